"""Every code block of the README is executed; `make` and `pip` lines are compared with what they name."""

import ast
import re
import shlex
import subprocess
import sys

import pytest
from _launch import ACCELERATE, ROOT
from _training import DATA, even_digits
from datasets import Dataset

from grpo_ext.advantages import METHODS
from grpo_ext.cli import main as grpo_ext
from grpo_ext.cli.preflight import main as preflight
from grpo_ext.cli.train import main as train
from grpo_ext.testbed import POLICY_PATH

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def commands() -> list[str]:
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.strip()]


def test_every_block_is_of_a_kind_that_is_tested():
    assert {name for name, _ in BLOCKS} <= {"bash", "diff", "python", ""}
    assert {command.split()[0] for command in commands()} <= {"make", "pip", "accelerate", "python", "grpo-ext"}
    assert [command.split()[2] for command in commands() if command.startswith("python")] == [
        "deepspeed.checkpoint.ds_to_universal"  # `test_scale_out.py` runs it
    ]


@pytest.mark.parametrize("block", blocks("python"))
def test_python_blocks_run_and_their_estimators_estimate(block):
    import torch

    from grpo_ext.estimator import AdvantageEstimator
    from grpo_ext.groups import RewardGroups

    names: dict = {}
    exec(block, names)
    groups = RewardGroups(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    for value in names.values():
        if isinstance(value, type) and issubclass(value, AdvantageEstimator) and value is not AdvantageEstimator:
            value().update(groups)
            assert value().estimate(groups).shape == (2, 2)
    for node in ast.parse(block).body:
        expected = block.splitlines()[node.lineno - 1].partition("  # ")[2]
        if isinstance(node, ast.Expr) and expected:
            assert eval(ast.unparse(node), names) == eval(expected)


def test_the_diff_gives_a_script_that_trains(tmp_path):
    (diff,) = blocks("diff")
    script = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    names = {"model": str(POLICY_PATH), "reward": even_digits, "dataset": DATA, "output_dir": str(tmp_path)}
    exec(script, names)
    trainer = names["trainer"]
    trainer.args.max_steps = 1
    trainer.args.save_strategy = "no"
    trainer.max_completion_length = trainer.generation_config.max_new_tokens = 4
    trainer.train()
    assert trainer.advantage_estimator.identity() == "HADW(base=GRPO, anchor=MovingAverage)"


def test_nothing_is_left_to_fill_in():
    assert not re.search(r"^[A-Z_]{6,}$", README, flags=re.MULTILINE)


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {command.split()[1] for command in commands() if command.startswith("make")} <= targets
    assert set(re.findall(r"`make ([a-z-]+)`", README)) <= targets


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """What stands in for the Hub's model and data set, and the subset that pre-flight writes."""
    folder = tmp_path_factory.mktemp("readme")
    path = folder / "problems.parquet"
    Dataset.from_list([{"problem": f"{n}+1?", "solution": str(n + 1)} for n in range(64)]).to_parquet(str(path))
    (flight,) = [shlex.split(command)[2:] for command in commands() if command.startswith("grpo-ext preflight")]
    preflight([*flight, "--output_dir", str(folder)])
    return {
        "Qwen/Qwen2.5-Math-1.5B": str(POLICY_PATH),
        "DigitalLearningGmbH/MATH-lighteval": str(path),
        "outputs/preflight/level3-16.parquet": str(folder / "level3-16.parquet"),
    }


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("accelerate")])
def test_accelerate_commands_run(command, tmp_path, offline):
    """One step each; the Hub's model and data set are replaced by local ones."""
    words = [offline.get(word, word) for word in shlex.split(command)]
    if "1024" in words:
        words[words.index("1024")] = "16"
    launch = [*ACCELERATE, "--num_processes", "1"]
    run = [*launch, *words[2:], "--max_steps", "1", "--output_dir", str(tmp_path)]
    if "--help" not in words:
        run += ["--per_device_train_batch_size", "9" if "mc_grpo" in words else "8", "--save_strategy", "no"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--center_scale" in done.stdout if "--help" in words else "completions taught nothing" in done.stdout


def test_the_commands_that_read_a_run_do(tmp_path, capsys, monkeypatch):
    """After the training command above them, shortened."""
    place = "outputs/ha_dw"
    (training,) = [command for command in commands() if f"--output_dir {place}" in command]
    train([*shlex.split(training)[3:], "--max_steps", "2", "--output_dir", str(tmp_path)])
    readers = [command for command in commands() if command.startswith("grpo-ext") and place in command]
    assert [command.split()[1] for command in readers] == ["diagnose", "replay", "plot"]
    for command in readers:
        monkeypatch.setattr(sys, "argv", shlex.split(command.replace(place, str(tmp_path))))
        grpo_ext()
    shown = capsys.readouterr().out
    assert "2 batches in 2 steps (reward log)" in shown
    assert "which ran, gives the logged advantages of 2 batches again, bit for bit" in shown
    assert {"replay.json", "replay.png", "run.png"} <= {path.name for path in tmp_path.iterdir()}


def test_the_install_command_names_extras_that_exist():
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert {"plot", "peft", "dev"} <= set(extras)


def test_the_methods_table_is_complete():
    table = README.partition("## Methods")[2].partition("## Write your own")[0]
    assert all(f"`{name}`" in table for name in METHODS)


def test_the_tree_names_what_exists():
    tree = README.partition("## The house")[2].partition("```\n")[2].partition("```")[0]
    for line in tree.splitlines():
        name = line.replace("|--", "").replace("`--", "").split()[0]
        assert (ROOT / name).exists() or (ROOT / "grpo_ext" / name).exists(), name


def test_the_named_tests_exist():
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    promises = README.partition("## Guarantees")[2].partition("## The embedded")[0]
    for name in re.findall(r"`(test_\w+(?:\.py)?)`", promises):
        assert f"def {name}(" in sources or (ROOT / "tests" / name).exists(), name
