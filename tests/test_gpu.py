"""What only a CUDA device shows: `make gpu` runs these on the devices present and writes `outputs/gpu.md`."""

import gc
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import update
from _launch import ACCELERATE, CONFIGS, ROOT, environment, run
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
from trl import GRPOTrainer

from grpo_ext import AdvantageGRPOConfig
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


def one_device(folder: Path, precision: str, **settings: Any) -> AdvantageGRPOConfig:
    """Arguments of a training in this process, on the first of the devices."""
    args = make_args(folder, **PRECISIONS[precision], **settings)
    assert args.device.type == DEVICE
    args._n_gpu = 1
    return args


def train_and_measure(trainer_class: type[GRPOTrainer], args: AdvantageGRPOConfig) -> dict[str, Any]:
    """What a training gave and took; nothing of it stays on the device."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(args, [even_digits, short_or_none], trainer_class)
    trainer.train()
    return {
        "advantages": trainer.recorded,
        "weights": {name: value.cpu() for name, value in weights(trainer).items()},
        "seconds": statistics.median(log["step_time"] for log in trainer.state.log_history[2:-1]),
        "memory": torch.cuda.max_memory_allocated(),
    }


@every_precision
def test_grpo_equals_trl_and_costs_as_much(report, tmp_path, precision):
    """Advantages of the first batch bit for bit; time per step and peak memory as ratios."""
    args = one_device(tmp_path, precision, max_steps=8, reward_weights=[1.0, 0.5])
    stock, ours = (train_and_measure(trainer_class, args) for trainer_class in (StockRecorder, Recorder))
    assert stock["advantages"][0].any()
    assert torch.equal(stock["advantages"][0], ours["advantages"][0])  # later ones as far as the kernels repeat
    is_equal = all(torch.equal(*pair) for pair in zip(stock["advantages"], ours["advantages"], strict=True))
    same_weights = equal_weights(stock["weights"], ours["weights"])
    report(f"{precision}: advantages of 8 batches, weights equal TRL's bit for bit", f"{is_equal}, {same_weights}")
    for name in ("seconds", "memory"):
        report(f"{precision}: {name}, ours / TRL's", f"{ours[name] / stock[name]:.3f}")
    assert ours["memory"] < 1.05 * stock["memory"]


@every_precision
def test_resume_equals_never_stopping(report, tmp_path, precision):
    """The batch after the checkpoint bit for bit; later ones as far as the kernels repeat."""
    runs = []
    for resume_from in (None, str(tmp_path / "checkpoint-2")):
        args = one_device(tmp_path, precision, max_steps=4, save_strategy="steps", save_steps=2)
        runs.append(make_trainer(args, even_digits, Recorder, advantage_estimator=HADW()))
        runs[-1].train(resume_from_checkpoint=resume_from)
    whole, resumed = runs
    assert torch.equal(whole.recorded[2], resumed.recorded[0])
    accuracies = [trainer.advantage_estimator.anchor.accuracies for trainer in runs]
    assert accuracies[0][:3] == accuracies[1][:3]
    assert len(accuracies[0]) == len(accuracies[1]) == resumed.collapse_history.num_batches == 4
    is_equal = accuracies[0] == accuracies[1]
    report(
        f"{precision}: state, weights after resuming", f"{is_equal}, {equal_weights(weights(whole), weights(resumed))}"
    )


@pytest.mark.parametrize("model", ["0.5b", "1.5b"])
def test_the_update_is_shorter_and_needs_no_more_memory(report, model):
    """Qwen2.5's sizes with random weights, in bf16; completions of up to 1800 tokens."""
    for live in (0.5, 1.0):
        row = update.measure(model, live, repetitions=3)
        for name in update.COLUMNS:
            report(f"{model}, {live:.0%} of the rows live: {name.replace('_', ' ')}", f"{row[name]['median']:.2f}")
        assert row["time"]["median"] < 1
        assert row["memory"]["high"] <= 1.01
        torch.cuda.empty_cache()


@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3"])
def test_engines_train_save_and_resume(report, tmp_path, engine):
    """The command line on all devices present: as many processes, each with its part of the state."""
    num_devices = max(1, torch.cuda.device_count())
    if engine == "ddp" and num_devices == 1:
        pytest.skip("torch.distributed needs two devices")
    launch = [*ACCELERATE, "--config_file", str(CONFIGS / f"{engine}.yaml")]
    script = [*launch, "--num_processes", str(num_devices), str(ROOT / "examples" / "train.py"), *map(str, RUN)]
    cuda = {name: value for name, value in environment().items() if name != "DS_ACCELERATOR"}
    cuda["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_devices))))
    start_from = {"whole": [], "resumed": ["--resume_from_checkpoint", str(tmp_path / "whole" / "checkpoint-2")]}
    for name, options in start_from.items():
        words = [*script, "--max_steps", "4", "--save_steps", "2", "--output_dir", str(tmp_path / name), *options]
        done = run(words, env=cuda)
        assert done.returncode == 0, done.stderr[-4000:]
        parts = list((tmp_path / name / "checkpoint-4").glob("global_step4/*optim_states.pt"))
        assert len(parts) == (0 if engine == "ddp" else num_devices)
    whole, resumed = (outcome(tmp_path / name, 4, num_devices) for name in start_from)
    windows = [each["state"]["state"]["anchor"]["accuracies"] for each in (whole, resumed)]
    assert windows[0][0] == windows[1][0]  # of the three batches in the window, the first is the checkpoint's
    assert resumed["state"]["collapse_history"]["num_batches"] == 4
    is_equal = whole["state"] == resumed["state"]
    report(f"{engine} on {num_devices}: state, log after resuming", f"{is_equal}, {whole['steps'] == resumed['steps']}")
