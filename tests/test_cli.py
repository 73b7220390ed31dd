"""The command line: flags from dataclasses, one sentence per mistake, and a run from data to curve."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from _launch import ACCELERATE
from _outside import WithDefaults
from datasets import Dataset
from trl import GRPOConfig, ModelConfig

from grpo_ext import AdvantageGRPOConfig
from grpo_ext.advantages import (
    AGRAE,
    AVSPO,
    GRPO,
    HADW,
    MCGRPO,
    METHODS,
    AdaptiveForgetting,
    FixedAnchor,
    FixedCount,
    LongestPivot,
    MovingAverage,
    UniformRewards,
)
from grpo_ext.cli import flags
from grpo_ext.cli.arguments import TrainArguments, parse
from grpo_ext.cli.report import describe_step
from grpo_ext.cli.train import main
from grpo_ext.testbed import POLICY_PATH

QUICK = [
    *["--max_steps", "2", "--logging_steps", "1", "--num_generations", "4", "--per_device_train_batch_size", "8"],
    *["--gradient_accumulation_steps", "1", "--max_completion_length", "12", "--save_strategy", "no"],
]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], GRPO()),
        (["--method", "avspo", "--anchor_reward", "0.2"], AVSPO(anchor_reward=0.2)),
        (["--method=ha-dw", "--anchor", "fixed_anchor", "--anchor_value", "0.4"], HADW(anchor=FixedAnchor(0.4))),
        (["--method", "ha_dw", "--anchor_window", "5"], HADW(anchor=MovingAverage(window=5))),
        (["--method", "ha_dw", "--anchor", "adaptive-forgetting"], HADW(anchor=AdaptiveForgetting())),
        (["--method", "ha_dw", "--base", "a_grae", "--base_group_level", "false"], HADW(base=AGRAE(group_level=False))),
        (["--method", "a_grae", "--no_sample_level"], AGRAE(sample_level=False)),
        (["--method", "a_grae", "--base_advantage_eps", "1e-6"], AGRAE(base=GRPO(advantage_eps=1e-6))),
        (
            ["--method", "avspo", "--virtual_strategy", "uniform_rewards", "--virtual_strategy_seed", "3"],
            AVSPO(virtual_strategy=UniformRewards(seed=3)),
        ),
        (
            ["--method", "avspo", "--virtual_count_rule", "fixed_count", "--virtual_count_rule_virtual_count", "2"],
            AVSPO(virtual_count_rule=FixedCount(2)),
        ),
        (["--method", "mc_grpo", "--pivot_rule", "longest_pivot"], MCGRPO(pivot_rule=LongestPivot())),
        (["--method", "ha_dw", "--base", "mc_grpo"], HADW(base=MCGRPO())),
    ],
    ids=str,
)
def test_flags_build_the_estimator(argv, expected):
    assert parse(argv).estimator == expected


@pytest.mark.parametrize("method", list(METHODS))
def test_the_default_flags_of_every_method_build_its_default(method):
    run = parse(["--method", method])
    assert run.estimator == METHODS[method]()
    assert run.training.num_extra_generations == METHODS[method]().num_extra_generations


@pytest.mark.parametrize("method", list(METHODS))
def test_no_flag_of_a_method_clashes_with_another(method):
    others = {
        field.name for cls in (AdvantageGRPOConfig, ModelConfig, TrainArguments) for field in dataclasses.fields(cls)
    }
    names = [name for name, _, _ in flags.collect(METHODS[method], {})]
    assert not others & set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("method", list(METHODS))
def test_every_flag_of_a_method_has_a_text(method):
    for name, _, field in flags.collect(METHODS[method], {}):
        assert len(field.metadata["help"]) > 20, name


def test_mc_grpo_fits_the_embedded_batch():
    run = parse(["--method", "mc_grpo"])
    assert run.training.generation_batch_size == 4 * 4 * 9
    assert parse(["--method", "mc_grpo", "--num_generations", "4"]).training.generation_batch_size == 4 * 4 * 5


def test_an_explicit_flag_wins_over_the_embedded_defaults():
    assert parse([]).training.learning_rate == 1e-4
    assert parse(["--learning_rate", "1e-5"]).training.learning_rate == 1e-5
    assert parse(["--model_name_or_path", str(POLICY_PATH)]).training.learning_rate == GRPOConfig.learning_rate


def test_a_yaml_file_gives_values_and_flags_override_it(tmp_path):
    config = tmp_path / "run.yaml"
    values = {"method": "ha_dw", "anchor": "moving_average", "anchor_window": 7, "learning_rate": 5e-4, "beta": 0.1}
    config.write_text(yaml.safe_dump(values))
    run = parse(["--config", str(config), "--beta", "0.2"])
    assert run.estimator == HADW(anchor=MovingAverage(window=7))
    assert (run.training.learning_rate, run.training.beta) == (5e-4, 0.2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--method", "grop"], f"should be one of {', '.join(METHODS)}, found 'grop'"),
        (["--method", "avspo", "--anchor_reward", "2"], r"`anchor_reward` should lie in \(0, 1\], found .*=2.0"),
        (["--method", "avspo", "--acr_threshold_init", "high"], "invalid float value: 'high'"),
        (["--method", "ha_dw", "--anchor", "moving"], "should be one of moving_average, adaptive_forgetting"),
        (
            ["--method", "ha_dw", "--anchor", "fixed_anchor", "--anchor_window", "5"],
            "`--anchor_window` should come with `--anchor moving_average`, found another choice",
        ),
        (["--anchor_reward", "0.2"], "`--anchor_reward` should come with `--method avspo`"),
        (["--learning_rat", "0.2"], "did you mean `--learning_rate`"),
        (["--method", "avspo", "--virtual_count_rule", "fixed_count"], "virtual_count_rule_virtual_count"),
        (["--num_generations", "1"], "`num_generations` should be at least 2"),
        (["--dataset_name", "problems.parquet"], "`--model_name_or_path` should name a model"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (
            ["--method", "mc_grpo", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "8"],
            "groups of 9 .*found generation_batch_size=64: use 72",
        ),
        (["--method", "avspo", "--scale_rewards", "batch"], "`scale_rewards` should be one of"),
        (["--method", "mc_grpo", "--scale_rewards", "none"], "center_scale"),
        (["--reward_funcs", "exact"], "found 'exact'"),
        (["--success_reward", "format"], r"\['boxed_accuracy'\], found 'format'"),
        (["--resume_from_checkpoint", "true"], "should find a complete checkpoint"),
        (["--num_generations", "abc"], "argument --num_generations.*: invalid int value: 'abc'"),
        (["--reward_funcs", "math.pi"], "found 'math.pi'"),
        (["--dataset_config", "main"], "`--dataset_config` should come with `--dataset_name`"),
        (["--dataset_train_split", "validation"], "`--dataset_train_split` should come with `--dataset_name`"),
        (["--eval_dataset_name", "test.parquet"], "should come with `--eval_strategy`"),
        (["--method", "ha_dw", "--reweight_scale", "inf"], "be above 0 and finite"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_and_leaves_nothing_behind(tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"error: .*{message}") as caught:
        main([*QUICK, *argv] if "generation" not in str(argv) and "mc_grpo" not in argv else argv)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "YAML file of flags and values"),
        ("a: [", "cannot be read"),
        ("method: 5", "found '5'"),
        ("method: ha_dw\nanchor: 5", "should be one of moving_average"),
        ("method: ha_dw\nanchor_window: 2.5", "invalid int value: '2.5'"),
        ("learning_rat: 1", "did you mean `--learning_rate`"),
    ],
)
def test_a_mistake_in_a_yaml_file_is_one_sentence(tmp_path, text, message):
    config = tmp_path / "run.yaml"
    config.write_text(text)
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        main([f"--config={config}"])


def test_dashes_in_a_yaml_file_are_underscores(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("method: ha-dw\nanchor: fixed-anchor\nanchor-value: 0.4\nnum-generations: 4\n")
    run = parse([f"--config={config}"])
    assert run.estimator == HADW(anchor=FixedAnchor(0.4))
    assert run.training.num_generations == 4


def test_a_single_file_is_not_its_own_test_split(problems):
    arguments = ["--model_name_or_path", str(POLICY_PATH), "--dataset_name", str(problems)]
    with pytest.raises(SystemExit, match="`--eval_dataset_name` should name a second file"):
        main([*arguments, "--eval_strategy", "steps"])


def test_a_method_from_outside_gets_flags():
    assert parse(["--method", "_outside:WithDefaults"]).estimator == WithDefaults()
    run = parse(["--method", "_outside:WithDefaults", "--places", "3", "4", "--base", "grpo"])
    assert run.estimator == WithDefaults(base=GRPO(), places=[3, 4])


@pytest.fixture
def problems(tmp_path):
    """A file of problems like MATH's, two of them without an answer."""
    rows = [{"problem": f"Compute $\\frac{{{n}}}{{2}}$.", "answer": f"\\frac{{{n}}}{{2}}"} for n in range(1, 13)]
    rows += [{"problem": "Open.", "answer": None}, {"problem": "Empty.", "answer": ""}]
    path = tmp_path / "problems.parquet"
    Dataset.from_list(rows).to_parquet(str(path))
    return path


def test_a_run_from_the_shell(tmp_path, problems):
    """`accelerate launch examples/train.py`: a local model and file, LoRA, evaluation; model and curve appear."""
    script = Path(__file__).parents[1] / "examples" / "train.py"
    launch = [*ACCELERATE, "--num_processes", "1", str(script)]
    out = tmp_path / "out"
    arguments = ["--method", "ha_dw", *QUICK, "--model_name_or_path", str(POLICY_PATH), "--output_dir", str(out)]
    arguments += ["--dataset_name", str(problems), "--use_peft", "--lora_target_modules", "q_proj", "v_proj"]
    arguments += ["--eval_strategy", "steps", "--eval_steps", "1", "--eval_dataset_name", str(problems)]
    arguments += ["--gradient_checkpointing", "false"]
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "skipped 2 of 14 rows" in done.stdout
    assert "step 2/2  reward" in done.stdout
    assert "evaluation reward" in done.stdout
    assert "completions taught nothing" in done.stdout
    assert (out / "adapter_model.safetensors").exists()
    assert (out / "reward_and_collapse.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 2


def test_resume_from_the_command_line(tmp_path, capsys):
    arguments = ["--method", "ha_dw", *QUICK, "--output_dir", str(tmp_path), "--save_strategy", "steps"]
    arguments += ["--save_steps", "1"]
    main(arguments)
    main([*arguments, "--max_steps", "3", "--resume_from_checkpoint", "true"])
    state = json.loads((tmp_path / "checkpoint-3" / "advantage_state.json").read_text())
    assert len(state["state"]["anchor"]["accuracies"]) == 3
    assert "step 3/3" in capsys.readouterr().out


def test_rewards_by_dotted_path_and_weight(tmp_path, capsys):
    rewards = ["--reward_funcs", "boxed_accuracy", "_training.even_digits", "--reward_weights", "1.0", "0.25"]
    success = ["--success_reward", "boxed_accuracy"]
    main([*QUICK, "--method", "a_grae", *rewards, *success, "--output_dir", str(tmp_path)])
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    first = history[0]
    expected = first["rewards/boxed_accuracy/mean"] + 0.25 * first["rewards/even_digits/mean"]
    assert first["reward"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("no_reward", "first three generation batches should hold a scored completion"),
        ("two", "should lie in .*found 2 .*success_reward.*reward_min.*reward_max"),
        ("infinity", "Rewards should be finite"),
    ],
)
def test_a_reward_that_cannot_train_is_one_sentence(tmp_path, monkeypatch, reward, message):
    monkeypatch.chdir(tmp_path)
    rewards = ["--reward_funcs", f"test_cli.{reward}", "--output_dir", "out/run"]
    with pytest.raises(SystemExit, match=f"error: .*{message}") as caught:
        main([*QUICK, "--method", "ha_dw", "--max_steps", "4", *rewards])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_state_file_that_cannot_be_used_is_one_sentence(tmp_path):
    arguments = [*QUICK, "--output_dir", str(tmp_path), "--save_strategy", "steps", "--save_steps", "2"]
    main([*arguments, "--method", "ha_dw"])
    resume = ["--max_steps", "3", "--resume_from_checkpoint", str(tmp_path / "checkpoint-2")]
    with pytest.raises(SystemExit, match=r"error: .*state of `GRPO`, found that of `HADW"):
        main([*arguments, "--method", "grpo", *resume])
    state = tmp_path / "checkpoint-2" / "advantage_state.json"
    state.write_text(state.read_text().replace("HADW", "HEDW"))
    with pytest.raises(SystemExit, match=r"error: .*advantage_state.json. should hold an estimator's state, found a"):
        main([*arguments, "--method", "ha_dw", *resume])
    state.write_text(state.read_text()[:100])
    with pytest.raises(SystemExit, match=r"error: .*checkpoint, found that advantage_state.json has 100 bytes"):
        main([*arguments, "--method", "ha_dw", *resume])
    main([*arguments, "--method", "grpo", *resume, "--reset_advantage_state", "true"])


def test_trls_own_complaints_are_one_sentence_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="error: Number of reward weights"):
        main([*QUICK, "--reward_weights", "1.0", "2.0"])
    with pytest.raises(SystemExit, match=r"error: `--model_name_or_path` should be .* found 'nowhere/at-all'"):
        main([*QUICK, "--model_name_or_path", "nowhere/at-all"])


def no_reward(completions, **kwargs):
    return [None] * len(completions)


def two(completions, **kwargs):
    return [2.0] * len(completions)


def infinity(completions, **kwargs):
    return [float("inf")] * len(completions)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help(arguments, capsys, monkeypatch):
    from grpo_ext.cli import main as grpo_ext

    monkeypatch.setattr(sys, "argv", ["grpo-ext", *arguments])
    if "train" in arguments:
        with pytest.raises(SystemExit, match="0"):
            grpo_ext()
    else:
        grpo_ext()
    assert "train" in capsys.readouterr().out


@pytest.mark.parametrize("method", list(METHODS))
def test_help_shows_the_flags_of_every_method(method, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--method", method, "--help"])
    shown = capsys.readouterr().out
    for name, _, _ in flags.collect(METHODS[method], {}):
        assert f"--{name}" in shown
    assert "per_device_train_batch_size" in shown


def test_an_unknown_command_is_one_sentence(monkeypatch):
    from grpo_ext.cli import main as grpo_ext

    monkeypatch.setattr(sys, "argv", ["grpo-ext", "trian"])
    with pytest.raises(SystemExit, match="should be `train` or `preflight`, found 'trian'"):
        grpo_ext()


def test_a_progress_line_says_what_the_update_read():
    logs = {"reward": 0.5, "entropy_live": 0.2, "compact/padded_tokens": 30.0, "compact/padded_tokens_saved": 70.0}
    assert describe_step(logs, 5, 10).endswith("live entropy 0.20  update 30% of the tokens")
    assert describe_step({"reward": 0.5, "entropy": 0.2}, 5, 10).endswith("  entropy 0.20")
