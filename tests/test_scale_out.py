"""`accelerate_configs`, `examples/slurm.sh` and README's table of them: what they say is launched here, on CPUs."""

import os
import re
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from _launch import ACCELERATE, CONFIGS, ROOT, environment, finish, run, start
from _worker import LOSSES, SAVE_STEPS
from accelerate.commands.config.config_args import load_config_from_file

README = (ROOT / "README.md").read_text()
TABLE = README.partition("## Scale out")[2].partition("\n\n")[2].partition("\n\n")[0]
COMMANDS = re.findall(r"`((?:DS_ACCELERATOR=cpu )?accelerate launch [^`]*)`", TABLE)
FILES = sorted(CONFIGS.glob("*.yaml"))
STEPS = ["--max_steps", "2", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"]
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def config_of(command: str) -> str:
    return re.search(r"accelerate_configs/(\w+)\.yaml", command)[1]


def launch_of(command: str) -> list[str]:
    """A command of the table as this machine runs it: two processes for eight, ours for `accelerate`."""
    words = [word for word in shlex.split(command) if "=" not in word]
    for flag, value in (("--num_processes", "2"), ("--main_process_ip", "127.0.0.1")):
        if flag in words:
            words[words.index(flag) + 1] = value
    return [*ACCELERATE, *words[2:]]


def num_completions(output: str) -> int:
    """Of the last line about what the completions taught."""
    return int(re.findall(r"of (\d+) completions taught nothing", output)[-1])


@every_file
def test_each_file_explains_itself_and_sets_what_is_the_launchers(path):
    """One comment line; precision and the number of GPUs are the user's, so that neither is wrong in silence."""
    lines = path.read_text().splitlines()
    assert [line.startswith("#") for line in lines] == [True] + [False] * (len(lines) - 1)
    settings = yaml.safe_load(path.read_text())
    assert "mixed_precision" not in settings
    assert settings.get("num_processes", 0) == {"single": 1, "zero3_cpu": 2}.get(path.stem, 0)
    load_config_from_file(str(path))


def test_the_table_has_a_command_for_each_file():
    assert sorted(map(config_of, COMMANDS)) == [path.stem for path in FILES]
    assert "`sbatch --job-name avspo examples/slurm.sh --method avspo`" in TABLE


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "zero3_offload", "fsdp2", "zero3_multinode"])
def test_a_forgotten_number_of_processes_is_an_error(name):
    words = launch_of(next(command for command in COMMANDS if config_of(command) == name))
    place = words.index("--num_processes")
    del words[place : place + 2]
    done = run(words)
    assert done.returncode != 0
    assert "manually pass in `--num_processes`" in done.stderr


QUICK = ("zero3_cpu",)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=config_of(command), marks=() if config_of(command) in QUICK else pytest.mark.slow)
        for command in COMMANDS
        if config_of(command) != "zero3_multinode"
    ],
)
def test_commands_of_the_table_train(tmp_path, command):
    """The number of completions says how many processes sampled."""
    log, words = tmp_path / "log", [*launch_of(command), *STEPS, "--output_dir", str(tmp_path / "out")]
    num_processes = 1 if config_of(command) == "single" else 2
    assert num_completions(finish(start(words, log), log)) == 2 * 8 * 2 * num_processes


@pytest.mark.slow
def test_two_machines_train_together(tmp_path):
    command = next(command for command in COMMANDS if config_of(command) == "zero3_multinode")
    words = [*launch_of(command), *STEPS, "--output_dir", str(tmp_path / "out")]
    words[words.index("--main_process_port") + 1] = "29517"
    other = list(words)
    other[other.index("--machine_rank") + 1] = "1"
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    first = start(words, logs[0])
    time.sleep(4)
    second = start(other, logs[1])
    output = finish(first, logs[0])
    finish(second, logs[1])
    assert num_completions(output) == 2 * 8 * 2 * 2


SHIMS = {
    "scontrol": "echo localhost\n",
    "srun": 'SLURM_NODEID=0 "$@" & first=$!\nsleep 4\nSLURM_NODEID=1 "$@"\nsecond=$?\nwait $first && exit $second\n',
}


def slurm(folder: Path, *options: str) -> subprocess.CompletedProcess:
    """The job on two machines of one process each, which are this one."""
    shims = folder / "shims"
    shims.mkdir(exist_ok=True)
    for name, text in SHIMS.items():
        (shims / name).write_text(f"#!/bin/bash\n{text}")
        (shims / name).chmod(stat.S_IRWXU)
    (shims / "accelerate").write_text(f'#!/bin/bash\nexec {" ".join(ACCELERATE)} "${{@:2}}"\n')
    (shims / "accelerate").chmod(stat.S_IRWXU)
    job = {"SLURM_JOB_NAME": "job", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "9517", "SLURM_NNODES": "2"}
    search = f"{shims}{os.pathsep}{os.environ['PATH']}"
    for name in ("examples", "accelerate_configs"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    variables = environment() | job | {"SLURM_GPUS_ON_NODE": "1", "PATH": search}
    return run(["bash", "examples/slurm.sh", *options], cwd=folder, env=variables)


@pytest.mark.parametrize("option", ["--output_dir", "--resume_from_checkpoint"])
def test_the_slurm_script_refuses_what_it_sets_itself(tmp_path, option):
    done = slurm(tmp_path, option, "elsewhere")
    assert done.returncode == 1
    assert "use sbatch --job-name" in done.stderr


@pytest.mark.slow
def test_the_slurm_script_trains_on_two_machines_and_resumes(tmp_path):
    first = slurm(tmp_path, "--method", "ha_dw", *STEPS, "--save_steps", "1")
    assert first.returncode == 0, first.stderr[-4000:]
    assert num_completions(first.stdout) == 2 * 8 * 2 * 2
    again = slurm(tmp_path, "--method", "ha_dw", *STEPS, "--max_steps", "3")
    assert again.returncode == 0, again.stderr[-4000:]
    assert num_completions(again.stdout) == 3 * 8 * 2 * 2  # the figures of the whole run, its first two steps included
    assert "step 1/3" not in again.stdout


@pytest.mark.slow
def test_zero3_resumes_with_another_number_of_processes_once_converted(tmp_path):
    """README's command, and the setting that goes with it."""
    whole, log = tmp_path / "whole", tmp_path / "log"
    worker = [str(ROOT / "tests" / "_worker.py")]
    launch = [*ACCELERATE, "--config_file"]
    zero3 = [*launch, str(CONFIGS / "zero3_cpu.yaml")]
    finish(start([*zero3, *worker, str(whole), "--num_processes", "2"], log), log)
    folder = whole / "full" / f"checkpoint-{SAVE_STEPS}"
    alone = [*worker, str(tmp_path / "alone"), "--num_processes", "1", "--foreign", str(whole / "full")]
    refused = run([*zero3, "--num_processes", "1", *alone])
    assert refused.returncode != 0
    assert "used a DP world size of 2 but the current world size is 1" in refused.stderr

    (command,) = re.findall(r"^python (-m deepspeed.*?)\n```", README, flags=re.MULTILINE | re.DOTALL)
    words = command.replace("\\\n", " ").replace("outputs/avspo/checkpoint-50", str(folder))
    words = words.replace("global_step50", f"global_step{SAVE_STEPS}").split()
    run([sys.executable, *words]).check_returncode()
    settings = (CONFIGS / "zero3_cpu.json").read_text().rstrip().removesuffix("}")
    (tmp_path / "universal.json").write_text(f'{settings}, "checkpoint": {{"load_universal": true}}}}')
    config = (CONFIGS / "zero3_cpu.yaml").read_text()
    (tmp_path / "universal.yaml").write_text(
        config.replace("accelerate_configs/zero3_cpu.json", str(tmp_path / "universal.json"))
    )
    resumed = [*launch, str(tmp_path / "universal.yaml"), "--num_processes", "1", *alone]
    finish(start(resumed, log), log)
    expected = torch.load(whole / "full" / "rank0.pt", weights_only=False)
    found = torch.load(tmp_path / "alone" / "foreign" / "rank0.pt", weights_only=False)
    assert found["state"] == expected["state"]
    assert found["history"] == expected["history"]
    for step in range(SAVE_STEPS, LOSSES.index("bnpo")):  # whose value is that of its micro-batches
        # DeepSpeed 0.19.8 gives all parameter groups one step counter of Adam, which then runs ahead.
        tolerance = 1e-6 if step == SAVE_STEPS else 1e-2
        assert found["log"][step]["grad_norm"] == pytest.approx(expected["log"][step]["grad_norm"], rel=tolerance)
