"""What a preempted run loses: the steps since its newest complete checkpoint, and nothing else.

The user's own command, with real sampling; everything of the launch is killed, and the same command goes on.
"""

import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from _launch import ROOT, command, finish, kill, processes, start
from safetensors.torch import load_file

from grpo_ext.checkpoint import STATE_FILE, find_damage

RUN = [
    *("--method", "ha_dw", "--anchor_window", 3, "--num_generations", 4, "--max_completion_length", 16),
    *("--per_device_train_batch_size", 8, "--gradient_accumulation_steps", 2, "--logging_steps", 1),
]
EVERY_STEP = ["--save_steps", 1, "--save_total_limit", 2]
ON_SIGTERM = ["--save_steps", 1000, "--enable_jit_checkpoint", "true"]
LORA = ["--use_peft", "true", "--lora_target_modules", "all-linear"]


def train(engine: str, folder: Path, *options: object) -> subprocess.Popen:
    """The command, started; it resumes where there is something to go on from."""
    resume = ["--resume_from_checkpoint", "true"] if steps_saved(folder) else []
    words = command(engine, ROOT / "examples" / "train.py", *RUN, "--output_dir", folder, *options, *resume)
    return start(words, folder.with_suffix(".log"))


def wait_for_training(launch: subprocess.Popen, log: Path) -> None:
    """Until a launch that has just started says that it trains."""
    already, deadline = log.stat().st_size, time.monotonic() + 120
    while b"Training with" not in log.read_bytes()[already:]:
        assert launch.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.05)


def steps_saved(folder: Path) -> set[int]:
    """The steps of the complete checkpoints."""
    return {int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*") if find_damage(path) is None}


def outcome(folder: Path, num_steps: int) -> dict[str, Any]:
    """Whatever one finished run could have otherwise than another: weights, state, and the log without times."""
    state = json.loads((folder / f"checkpoint-{num_steps}" / STATE_FILE).read_text())
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    (weights,) = folder.glob("*.safetensors")
    steps = [{name: value for name, value in line.items() if name != "step_time"} for line in log if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, num_steps + 1))
    return {"state": state, "steps": steps, "weights": load_file(weights)}


def assert_same_outcome(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["state"] == expected["state"]
    assert repr(found["steps"]) == repr(expected["steps"])
    assert found["weights"].keys() == expected["weights"].keys()
    assert all(torch.equal(found["weights"][name], expected["weights"][name]) for name in expected["weights"])


def run_whole(engine: str, folder: Path, *options: object) -> float:
    """An uninterrupted run, and how many seconds it trained."""
    launch = train(engine, folder, *options)
    wait_for_training(launch, folder.with_suffix(".log"))
    begin = time.monotonic()
    finish(launch, folder.with_suffix(".log"))
    return time.monotonic() - begin


def assert_survives_kills(engine: str, folder: Path, num_kills: int, *options: object) -> None:
    """Killed at random moments and resumed each time, a run ends with the uninterrupted one's numbers."""
    num_steps = 8 + 6 * num_kills
    options = ("--max_steps", num_steps, *EVERY_STEP, *options)
    seconds = run_whole(engine, folder / "whole", *options)
    killed, log, moment = folder / "killed", folder / "killed.log", random.Random()
    saved = [0]
    for number in range(num_kills):
        launch = train(engine, killed, *options)
        wait_for_training(launch, log)
        while number == num_kills - 1 and not steps_saved(killed):
            assert launch.poll() is None
            time.sleep(0.05)  # one kill at least has to find something to go on from
        time.sleep(moment.uniform(0, seconds / num_kills))
        everything = processes(launch)
        assert launch.poll() is None
        kill(launch)
        assert not any(process.is_running() for process in everything)
        saved.append(max(steps_saved(killed), default=0))
    assert saved == sorted(saved)  # a kill costs no complete checkpoint
    assert 0 < saved[-1] < num_steps
    finish(train(engine, killed, *options), log)
    assert_same_outcome(outcome(killed, num_steps), outcome(folder / "whole", num_steps))


def test_two_kills_lose_only_the_steps_since_the_newest_checkpoint(tmp_path):
    assert_survives_kills("ddp", tmp_path, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "options"),
    [("one", []), ("ddp", []), ("zero3", []), ("zero3", LORA)],
    ids=["one", "ddp", "zero3", "zero3-lora"],
)
def test_ten_kills_lose_only_the_steps_since_the_newest_checkpoint(tmp_path, engine, options):
    assert_survives_kills(engine, tmp_path, 10, *options)


@pytest.mark.parametrize(
    "engine", [pytest.param("one", marks=pytest.mark.slow), "ddp", pytest.param("zero3", marks=pytest.mark.slow)]
)
def test_sigterm_saves_and_the_run_goes_on_as_if_it_had_not_come(tmp_path, engine):
    """As from a scheduler: to every process of the launch."""
    options = ("--max_steps", 30, *ON_SIGTERM)
    run_whole(engine, tmp_path / "whole", *options)
    folder, log = tmp_path / "stopped", tmp_path / "stopped.log"
    launch = train(engine, folder, *options)
    wait_for_training(launch, log)
    running = processes(launch)
    for process in running:
        process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(running, timeout=60)
    launch.wait()
    assert not alive
    (step,) = steps_saved(folder)
    assert 0 < step < 30
    assert f"Stopped after step {step} of 30" in log.read_text()
    finish(train(engine, folder, *options), log)
    assert_same_outcome(outcome(folder, 30), outcome(tmp_path / "whole", 30))
