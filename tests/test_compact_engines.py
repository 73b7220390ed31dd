"""Two real processes: compact updates, and rows that move between ranks, end at the weights of TRL's own updates.

Each launch trains 50 steps in each mode on batches that are live on both ranks, on one, or on none; see
`_compact_worker.py`.
"""

from pathlib import Path

import pytest
import torch
from _compact_worker import MODES, NUM_STEPS
from _launch import command, finish, start
from safetensors.torch import load_file

from grpo_ext.testbed import POLICY_PATH

WORKER = Path(__file__).with_name("_compact_worker.py")
PRECISIONS = {"ddp": "float64", "zero3": "float32"}  # DeepSpeed has no float64
every_engine = pytest.mark.parametrize("engine", PRECISIONS)
every_mode = pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "stock"])


class Launches:
    """Launches each engine when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.done = folder, set()

    def __getitem__(self, engine: str) -> Path:
        folder = self.folder / engine
        if engine not in self.done:
            words = [WORKER, folder, "--num_processes", 2, "--precision", PRECISIONS[engine]]
            finish(start(command(engine, *words), folder.with_suffix(".log")), folder.with_suffix(".log"))
            self.done.add(engine)
        return folder


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    return Launches(tmp_path_factory.mktemp("compact"))


def records(folder, mode):
    return [torch.load(folder / mode / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def differences(first, second):
    return max((first[name].double() - second[name].double()).abs().max().item() for name in first)


@every_engine
@every_mode
def test_weights_are_those_of_trls_updates(launches, engine, mode):
    stock, found = (load_file(launches[engine] / name / "model" / "model.safetensors") for name in ("stock", mode))
    moved = differences(stock, load_file(POLICY_PATH / "model.safetensors"))
    assert moved > 1e-2
    assert differences(stock, found) <= (1e-12 * moved if engine == "ddp" else 1e-6)


@every_engine
@every_mode
def test_losses_and_gradients_are_those_of_trls_updates(launches, engine, mode):
    for expected, found in zip(*(records(launches[engine], name) for name in ("stock", mode)), strict=True):
        assert found["num_processes"] == 2
        assert found["engine"] == ("DistributedDataParallel" if engine == "ddp" else "DeepSpeedEngine")
        assert len(found["log"]) == len(expected["log"]) == NUM_STEPS
        for ours, stock in zip(found["log"], expected["log"], strict=True):
            assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-5, abs=1e-7)  # added up in float32
            tolerance = 1e-12 if engine == "ddp" else 1e-3
            assert ours["grad_norm"] == pytest.approx(stock["grad_norm"], rel=tolerance, abs=1e-3 * tolerance)


@every_engine
def test_ranks_were_uneven_until_rows_moved(launches, engine):
    """Batches with all rows, with those of one rank, with none; the exchange is logged, and balances."""
    logs = {mode: records(launches[engine], mode)[0]["log"] for mode in MODES}
    assert not any("compact/live_rows" in log for log in logs["stock"])
    logs = {mode: [log for log in logs[mode] if "compact/live_rows" in log] for mode in logs}
    alone, together = logs["compact"], logs["exchange"]
    assert len(alone) == len(together) == NUM_STEPS // 2
    assert [log["compact/live_rows"] for log in alone] == [log["compact/live_rows"] for log in together]
    rows = {log["compact/live_rows"] for log in alone}
    assert {0.0, 40.0} <= rows
    one_sided = [(a, b) for a, b in zip(alone, together, strict=True) if a["compact/rank_imbalance"] > 1.6]
    assert len(one_sided) >= 10
    assert all(moved["compact/rank_imbalance"] < 1.25 for _, moved in one_sided)
    assert all(("compact/exchanged_bytes" in log) == (log["compact/live_rows"] > 0) for log in together)
    assert not any("compact/exchanged_bytes" in log for log in alone)
