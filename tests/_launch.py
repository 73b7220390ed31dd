"""Real launches of `accelerate`, as a user types them."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "accelerate_configs"
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
ENGINES = {"one": "single", "ddp": "ddp", "zero2": "zero2", "zero3": "zero3_cpu"}
"""Our name of an engine -> its file in `accelerate_configs`."""


def environment() -> dict[str, str]:
    """One thread a process, no network, no GPU."""
    own = {
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests", ROOT / "benchmarks"))),
    }
    return {**os.environ, **own}


def command(engine: str, *words: object) -> list[str]:
    """`accelerate launch` of a script under an engine, two processes but for `one`."""
    config = ["--config_file", str(CONFIGS / f"{ENGINES[engine]}.yaml")]
    size = ["--num_processes", "1" if engine == "one" else "2", "--main_process_port", "0"]
    return [*ACCELERATE, *config, *size, *map(str, words)]


def run(words: list[str], **changes: Any) -> subprocess.CompletedProcess:
    """Runs a command from the repository's root to its end, and gives its output and exit code."""
    settings = {"cwd": ROOT, "env": environment(), "capture_output": True, "text": True, "timeout": 600}
    return subprocess.run(words, check=False, **settings | changes)


def start(words: list[str], log: Path) -> subprocess.Popen:
    """Starts a launch; its output is appended to a file."""
    with log.open("ab") as file:
        return subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen, log: Path, timeout: float = 300) -> str:
    """Waits for a launch to succeed, and gives its output."""
    try:
        code = process.wait(timeout)
    finally:
        kill(process)
    text = log.read_text(errors="replace")
    assert code == 0, text[-4000:]
    return text


def processes(launch: subprocess.Popen) -> list[psutil.Process]:
    """The launch and every process below it."""
    try:
        parent = psutil.Process(launch.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that nobody has waited for yet does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(launch: subprocess.Popen) -> None:
    """`kill -9` of the launch and of every process below it."""
    found, deadline = processes(launch), time.monotonic() + 20
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    launch.wait()
    while any(map(is_alive, found)) and time.monotonic() < deadline:
        time.sleep(0.02)
