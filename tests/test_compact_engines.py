"""Two real processes: compact updates, and rows that move between ranks, end at the weights of TRL's own updates.

Each launch trains in each mode on batches that are live on both ranks, on one, or on none; see `_compact_worker.py`.
"""

from pathlib import Path

import pytest
import torch
from _compact_worker import MODES
from _launch import command, finish, start
from safetensors.torch import load_file

from grpo_ext.testbed import POLICY_PATH

WORKER = Path(__file__).with_name("_compact_worker.py")
PRECISIONS = {"ddp": "float64", "zero3": "float32"}  # DeepSpeed has no float64
SHORT, LONG = 24, 50
every_engine = pytest.mark.parametrize(
    "engine", [("ddp", LONG), ("zero3", SHORT), pytest.param(("zero3", LONG), marks=pytest.mark.slow)], ids=str
)
"""And the number of steps."""

every_mode = pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "stock"])


class Launches:
    """Launches each engine when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.done = folder, set()

    def __getitem__(self, engine: tuple[str, int]) -> Path:
        name, num_steps = engine
        folder = self.folder / f"{name}_{num_steps}"
        if engine not in self.done:
            words = ["--num_processes", 2, "--num_steps", num_steps, "--precision", PRECISIONS[name]]
            log = folder.with_suffix(".log")
            finish(start(command(name, WORKER, folder, *words), log), log)
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
    assert moved > 5e-3
    assert differences(stock, found) <= (1e-12 * moved if engine[0] == "ddp" else 1e-6)


@every_engine
@every_mode
def test_losses_and_gradients_are_those_of_trls_updates(launches, engine, mode):
    for expected, found in zip(*(records(launches[engine], name) for name in ("stock", mode)), strict=True):
        assert found["num_processes"] == 2
        assert found["engine"] == ("DistributedDataParallel" if engine[0] == "ddp" else "DeepSpeedEngine")
        assert len(found["log"]) == len(expected["log"]) == engine[1]
        for ours, stock in zip(found["log"], expected["log"], strict=True):
            rough, tolerance = (1e-6, 1e-11) if engine[0] == "ddp" else (1e-3, 1e-3)  # losses are added up in float32
            assert ours["loss"] == pytest.approx(stock["loss"], rel=rough, abs=1e-7)
            assert ours["grad_norm"] == pytest.approx(stock["grad_norm"], rel=tolerance, abs=1e-3 * tolerance)


@every_engine
def test_ranks_were_uneven_until_rows_moved(launches, engine):
    """Batches with all rows, with those of one rank, with none; the exchange is logged, and balances."""
    logs = {mode: records(launches[engine], mode)[0]["log"] for mode in MODES}
    assert not any("compact/live_rows" in log for log in logs["stock"])
    logs = {mode: [log for log in logs[mode] if "compact/live_rows" in log] for mode in logs}
    alone, together = logs["compact"], logs["exchange"]
    assert len(alone) == len(together) >= 10  # without the generations that a version of TRL leaves as they are
    assert [log["compact/live_rows"] for log in alone] == [log["compact/live_rows"] for log in together]
    assert {0.0, 20.0, 40.0} <= {log["compact/live_rows"] for log in alone}
    one_sided = [(a, b) for a, b in zip(alone, together, strict=True) if a["compact/rank_imbalance"] > 1.6]
    assert len(one_sided) >= 3
    assert all(moved["compact/rank_imbalance"] < 1.25 for _, moved in one_sided)
    in_place = [log for log in together if log["compact/live_rows"] and not log["compact/exchanged_bytes"]]
    assert all("kl" in log for log in in_place)  # bnpo beside a KL term
    assert len(in_place) <= 1
    assert not any("compact/exchanged_bytes" in log for log in alone)
