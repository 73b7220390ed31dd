"""What a preempted run loses: the steps since its newest complete checkpoint, and nothing else.

The user's own command, with real sampling; everything of the launch is killed, and the same command goes on.
"""

import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from _launch import ROOT, command, finish, is_alive, kill, processes, start
from _training import equal_weights
from safetensors.torch import load_file

from grpo_ext.checkpoint import STATE_FILE, find_damage
from grpo_ext.reward_log import read_rows

RUN = [
    *("--method", "ha_dw", "--anchor_window", 3, "--num_generations", 4, "--max_completion_length", 16),
    *("--per_device_train_batch_size", 8, "--gradient_accumulation_steps", 2, "--logging_steps", 1),
    *("--log_rewards", "true"),
]
EVERY_STEP = ["--save_steps", 1, "--save_total_limit", 2]
ON_SIGTERM = ["--save_steps", 1000, "--enable_jit_checkpoint", "true"]
LORA = ["--use_peft", "true", "--lora_target_modules", "all-linear"]


def train(engine: str, folder: Path, *options: object) -> subprocess.Popen:
    """The command, started; it resumes where there is something to go on from."""
    resume = ["--resume_from_checkpoint", "true"] if steps_saved(folder) else []
    script = [ROOT / "examples" / "train.py", *RUN, "--output_dir", folder, *options, *resume]
    # Nothing lies between a scheduler and a single process; the launchers of several pass a signal on.
    words = [sys.executable, *map(str, script)] if engine == "one" else command(engine, *script)
    return start(words, folder.with_suffix(".log"))


def wait_for_training(launch: subprocess.Popen, log: Path, already: int) -> None:
    """Until a launch says, after what was `already` in its log, that it trains."""
    deadline = time.monotonic() + 120
    while b"Training with" not in log.read_bytes()[already:]:
        assert launch.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.05)


def size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def steps_saved(folder: Path) -> set[int]:
    """The steps of the complete checkpoints."""
    return {int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*") if find_damage(path) is None}


def steps_trained(log: Path, already: int) -> list[int]:
    """The steps that were reported after what was `already` in a log."""
    return [int(step) for step in re.findall(rb"^step +(\d+)/", log.read_bytes()[already:], flags=re.MULTILINE)]


def outcome(folder: Path, num_steps: int, num_processes: int) -> dict[str, Any]:
    """
    Whatever one finished run could have otherwise than another: weights, state, and the log without times. A
    checkpoint holds a random state for each process that there was.
    """
    checkpoint = folder / f"checkpoint-{num_steps}"
    assert len(list(checkpoint.glob("rng_state*.pth"))) == num_processes
    state = json.loads((checkpoint / STATE_FILE).read_text())
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    (weights,) = folder.glob("*.safetensors")
    steps = [{name: value for name, value in line.items() if name != "step_time"} for line in log if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, num_steps + 1))
    return {"state": state, "steps": steps, "weights": load_file(weights)}


def assert_same_outcome(engine: str, found: Path, expected: Path, num_steps: int) -> None:
    num_processes = 1 if engine == "one" else 2
    ours, reference = (outcome(folder, num_steps, num_processes) for folder in (found, expected))
    assert ours["state"] == reference["state"]
    assert repr(ours["steps"]) == repr(reference["steps"])
    assert equal_weights(ours["weights"], reference["weights"])
    logs = [read_rows(folder, None).drop_columns("attempt") for folder in (found, expected)]
    assert logs[0].num_rows == 16 * num_steps * num_processes
    assert logs[0].equals(logs[1])


def run_whole(engine: str, folder: Path, num_steps: int, *options: object) -> float:
    """
    A run to its end, and how many seconds its steps took; it goes on from the newest checkpoint, if there is one.
    """
    log, newest = folder.with_suffix(".log"), max(steps_saved(folder), default=0)
    already, launch = size(log), train(engine, folder, "--max_steps", num_steps, *options)
    wait_for_training(launch, log, already)
    begin = time.monotonic()
    while num_steps not in steps_trained(log, already) and launch.poll() is None:
        time.sleep(0.05)
    seconds = time.monotonic() - begin
    finish(launch, log)
    assert steps_trained(log, already)[0] == newest + 1
    return seconds


def crash(engine: str, folder: Path, seconds: float, is_last: bool, *options: object) -> None:
    """A run that is killed so many seconds after it began to train, and began where the last checkpoint ends."""
    log, newest = folder.with_suffix(".log"), max(steps_saved(folder), default=0)
    already, launch = size(log), train(engine, folder, *options)
    try:
        wait_for_training(launch, log, already)
        while is_last and not steps_saved(folder):
            assert launch.poll() is None
            time.sleep(0.05)  # one kill at least has to leave something to go on from
        time.sleep(seconds)
        assert launch.poll() is None
        everything = processes(launch)
    finally:
        kill(launch)
    assert not any(map(is_alive, everything))
    assert steps_trained(log, already)[:1] in ([], [newest + 1])
    assert max(steps_saved(folder), default=0) >= newest  # a kill costs no complete checkpoint


def assert_survives_kills(engine: str, folder: Path, num_kills: int, *options: object) -> None:
    """Killed at random moments and resumed each time, a run ends with the uninterrupted one's numbers."""
    num_steps = 8 + 6 * num_kills
    seconds = run_whole(engine, folder / "whole", num_steps, *EVERY_STEP, *options)
    seed = time.time_ns()
    sys.stdout.write(f"moments of the kills: random.Random({seed})\n")  # pytest shows it where the test fails
    moment = random.Random(seed)
    options = (*EVERY_STEP, *options)
    for number in range(num_kills):
        delay, is_last = moment.uniform(0, 0.7 * seconds / num_kills), number == num_kills - 1
        crash(engine, folder / "killed", delay, is_last, "--max_steps", num_steps, *options)
    assert 0 < max(steps_saved(folder / "killed")) < num_steps
    run_whole(engine, folder / "killed", num_steps, *options)
    assert_same_outcome(engine, folder / "killed", folder / "whole", num_steps)


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


def stop(engine: str, folder: Path) -> tuple[int, float]:
    """A run that gets SIGTERM, where it was launched, once it trains: its exit code, and how long it took to end."""
    log = folder.with_suffix(".log")
    launch = train(engine, folder, "--max_steps", 100_000, *ON_SIGTERM)
    try:
        wait_for_training(launch, log, 0)
        while not steps_trained(log, 0):
            assert launch.poll() is None
            time.sleep(0.05)
        running, begin = processes(launch), time.monotonic()
        launch.send_signal(signal.SIGTERM)
        code = launch.wait(timeout=60)
        seconds = time.monotonic() - begin
        assert not any(map(is_alive, running))
    finally:
        kill(launch)
    return code, seconds


@pytest.mark.parametrize(
    "engine", [pytest.param("one", marks=pytest.mark.slow), "ddp", pytest.param("zero3", marks=pytest.mark.slow)]
)
def test_sigterm_saves_and_the_run_goes_on_as_if_it_had_not_come(tmp_path, engine):
    """Every process ends by itself, before the launcher would kill it; a single one with success."""
    folder = tmp_path / "stopped"
    code, seconds = stop(engine, folder)
    assert seconds < 25
    assert code == 0 or engine != "one"  # torchrun reports the signal as its own failure
    (step,) = steps_saved(folder)
    text = folder.with_suffix(".log").read_text()
    assert f"Stopped after step {step} of 100000" in text
    assert f"Model in {folder}" in text
    run_whole(engine, folder, step + 3, *ON_SIGTERM)
    run_whole(engine, tmp_path / "whole", step + 3, *ON_SIGTERM)
    assert_same_outcome(engine, folder, tmp_path / "whole", step + 3)


@pytest.mark.slow
def test_the_launcher_kills_after_as_many_seconds_as_the_variable_says(tmp_path, monkeypatch):
    """One is too few: transformers waits three for a kill before it saves."""
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    _, seconds = stop("ddp", tmp_path / "stopped")
    assert seconds < 10
    assert steps_saved(tmp_path / "stopped") == set()


def test_no_rank_waits_where_there_is_nothing_to_resume(tmp_path):
    """The main process finds it out, and all of them end with its sentence."""
    launch = train("ddp", tmp_path / "run", "--max_steps", 1, "--resume_from_checkpoint", "true")
    try:
        assert launch.wait(timeout=120) != 0
    finally:
        kill(launch)
    text = (tmp_path / "run.log").read_text()
    assert text.count("error: `resume_from_checkpoint` should find a complete checkpoint") == 2


def test_an_outcome_of_one_process_is_none_of_two(tmp_path):
    """The comparisons above cannot pass on a launch that silently ran one process."""
    run_whole("one", tmp_path / "run", 1, *EVERY_STEP)
    outcome(tmp_path / "run", 1, num_processes=1)
    with pytest.raises(AssertionError):
        outcome(tmp_path / "run", 1, num_processes=2)
