"""What only a CUDA device shows: `make gpu` runs these on the devices present and writes `outputs/gpu.md`."""

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _launch import CONFIGS, ROOT, environment
from _rewards import BATCHES, Fields
from _training import (
    Recorder,
    StockRecorder,
    equal_weights,
    even_digits,
    make_args,
    make_trainer,
    short_or_none,
    weights,
)
from test_crash import RUN, outcome

from grpo_ext.advantages import HADW, METHODS
from grpo_ext.groups import RewardGroups

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here, so nothing of this was checked"),
    pytest.mark.filterwarnings("ignore:AVSPO sees fewer than 4 groups", "ignore:MC-GRPO should see an odd number"),
]
PRECISIONS = {
    "float32": {"use_cpu": DEVICE == "cpu", "bf16": False},
    "bf16": {"use_cpu": DEVICE == "cpu", "bf16": True},
}
every_precision = pytest.mark.parametrize("precision", PRECISIONS)


@pytest.fixture(scope="module")
def report() -> Iterator[Callable[[str, object], None]]:
    """Collects lines, and writes them when all is done."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else DEVICE
    lines = [f"{torch.cuda.device_count()} x {name}, torch {torch.__version__}", "", "| check | figure |", "|---|---|"]
    yield lambda check, figure: lines.append(f"| {check} | {figure} |")
    path = ROOT / "outputs" / "gpu.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def on_device(arguments: Fields) -> Fields:
    return {name: value.to(DEVICE) for name, value in arguments.items()}


def numbers(state: Any) -> list[float]:
    """The numbers of a state, in order."""
    if isinstance(state, dict | list):
        values = state.values() if isinstance(state, dict) else state
        return [number for value in values for number in numbers(value)]
    return [float(state)] if isinstance(state, int | float) else []


@pytest.mark.parametrize("method", METHODS)
def test_methods_give_the_cpus_numbers(report, method):
    """Advantages within rounding, excluded rows and state as on the CPU, on the rewards' device."""
    here, there, worst = METHODS[method](), METHODS[method](), 0.0
    for arguments in BATCHES:
        groups, moved = RewardGroups(**arguments), RewardGroups(**on_device(arguments))
        expected, found = here.estimate(groups), there.estimate(moved)
        assert found.device.type == DEVICE
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        worst = max(worst, (found.cpu() - expected).abs().nan_to_num().max().item())
        excluded = here.excluded(groups)
        assert excluded is None or torch.equal(there.excluded(moved).cpu(), excluded)
        here.update(groups)
        there.update(moved)
    assert numbers(there.state_dict()) == pytest.approx(numbers(here.state_dict()), rel=1e-6)
    report(f"{method} against the CPU, largest difference", f"{worst:.1e}")


@every_precision
def test_grpo_equals_trl_and_costs_as_much(report, tmp_path, precision):
    """Advantages of each batch bit for bit; time per step and peak memory as ratios."""
    runs, seconds, memory = [], [], []
    for trainer_class in (StockRecorder, Recorder):
        args = make_args(tmp_path, max_steps=8, reward_weights=[1.0, 0.5], **PRECISIONS[precision])
        torch.cuda.reset_peak_memory_stats()
        trainer = make_trainer(args, [even_digits, short_or_none], trainer_class)
        trainer.train()
        runs.append(trainer)
        memory.append(torch.cuda.max_memory_allocated())
        seconds.append(statistics.median(log["step_time"] for log in trainer.state.log_history[2:-1]))
    stock, ours = runs
    assert torch.equal(stock.recorded[0], ours.recorded[0])
    assert stock.recorded[0].any()
    is_equal = all(torch.equal(one, other) for one, other in zip(stock.recorded, ours.recorded, strict=True))
    same_weights = equal_weights(weights(stock), weights(ours))
    report(f"{precision}: advantages of 8 batches, weights equal TRL's bit for bit", f"{is_equal}, {same_weights}")
    report(f"{precision}: seconds per step, ours / TRL's", f"{seconds[1] / seconds[0]:.2f}")
    report(f"{precision}: peak memory, ours / TRL's", f"{memory[1] / max(1, memory[0]):.3f}")


@every_precision
def test_resume_equals_never_stopping(report, tmp_path, precision):
    """State and the advantages of the batch after the checkpoint; later ones as far as the kernels repeat."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **PRECISIONS[precision]}
    runs = []
    for resume_from in (None, str(tmp_path / "checkpoint-2")):
        runs.append(make_trainer(make_args(tmp_path, **settings), even_digits, Recorder, advantage_estimator=HADW()))
        runs[-1].train(resume_from_checkpoint=resume_from)
    whole, resumed = runs
    assert torch.equal(whole.recorded[2], resumed.recorded[0])
    is_equal = whole.advantage_estimator.state_dict() == resumed.advantage_estimator.state_dict()
    report(
        f"{precision}: state, weights after resuming", f"{is_equal}, {equal_weights(weights(whole), weights(resumed))}"
    )


@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3"])
def test_engines_train_save_and_resume(report, tmp_path, engine):
    """The command line on all devices present; the resumed run ends in the state of the whole one."""
    num_devices = max(1, torch.cuda.device_count())
    if engine == "ddp" and num_devices == 1:
        pytest.skip("torch.distributed needs two devices")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{engine}.yaml")]
    script = [*launch, "--num_processes", str(num_devices), str(ROOT / "examples" / "train.py"), *map(str, RUN)]
    cuda = {name: value for name, value in environment().items() if name != "DS_ACCELERATOR"}
    for name, options in (
        ("whole", []),
        ("resumed", ["--resume_from_checkpoint", str(tmp_path / "whole" / "checkpoint-2")]),
    ):
        run = [*script, "--max_steps", "4", "--save_steps", "2", "--output_dir", str(tmp_path / name), *options]
        done = subprocess.run(run, cwd=ROOT, env=cuda, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
    assert engine == "ddp" or (tmp_path / "whole" / "checkpoint-2" / "global_step2").is_dir()  # DeepSpeed's own files
    whole, resumed = outcome(tmp_path / "whole", 4), outcome(tmp_path / "resumed", 4)
    assert whole["state"]["identity"] == resumed["state"]["identity"]
    is_equal = whole["state"] == resumed["state"]
    report(f"{engine} on {num_devices}: state, log after resuming", f"{is_equal}, {whole['steps'] == resumed['steps']}")
