"""Real launches: torch.distributed, DeepSpeed ZeRO-2 and ZeRO-3 on two processes give one process' numbers.

Each launch trains the whole model and LoRA, stops nowhere, and then resumes from its own middle; see `_worker.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from _launch import ACCELERATE, CONFIGS, command, finish, start
from _worker import (
    LOSSES,
    NUM_COMPLETIONS,
    NUM_LORA_STEPS,
    NUM_MICRO_BATCHES,
    NUM_ROWS,
    NUM_STEPS,
    SAVE_STEPS,
    every_method,
)
from safetensors.torch import load_file

from grpo_ext.advantages import GRPO
from grpo_ext.testbed import POLICY_PATH

WORKER = Path(__file__).with_name("_worker.py")
BNPO_STEP = LOSSES.index("bnpo")
SIZES = {"full": (NUM_STEPS, SAVE_STEPS), "lora": (NUM_LORA_STEPS, NUM_LORA_STEPS // 2)}
"""Steps of a run, and the step of the checkpoint it resumes from."""

every_engine = pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3"])
every_run = pytest.mark.parametrize("run", SIZES)


@dataclass
class Launch:
    """What a launch left behind."""

    folder: Path
    num_ranks: int

    def records(self, run: str) -> list[dict[str, Any]]:
        names = [self.folder / run / f"rank{rank}.pt" for rank in range(self.num_ranks)]
        return [torch.load(name, weights_only=False) for name in names]

    def weights(self, run: str) -> dict[str, torch.Tensor]:
        (file,) = (self.folder / run / "model").glob("*.safetensors")
        return load_file(file)


class Launches:
    """Launches each engine when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: dict[str, Launch] = {}

    def __getitem__(self, engine: str) -> Launch:
        if engine not in self.done:
            num_ranks = 1 if engine == "one" else 2
            options = ["--num_processes", num_ranks]
            if engine == "one":
                options += ["--divisors", self.save_divisors(), "--foreign", self["ddp"].folder / "full"]
            self.launch(engine, self.folder / engine, *options)
            self.done[engine] = Launch(self.folder / engine, num_ranks)
        return self.done[engine]

    def launch(self, engine: str, folder: Path, *options: object) -> str:
        log = folder.with_suffix(".log")
        return finish(start(command(engine, WORKER, folder, *options), log), log)

    def save_divisors(self) -> Path:
        """Per row of bnpo's step, the loss tokens of the micro-batch it was in under DDP."""
        divisors = torch.zeros(NUM_ROWS)
        for record in self["ddp"].records("full"):
            for micro_batch in record["micro_batches"]:
                if micro_batch["step"] == BNPO_STEP:
                    divisors[micro_batch["row"]] = micro_batch["tokens"].float()
        path = self.folder / "divisors.pt"
        torch.save({BNPO_STEP: divisors}, path)
        return path


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    return Launches(tmp_path_factory.mktemp("engines"))


def assert_same(found: Any, expected: Any) -> None:
    """Equal to the last bit, NaN included, through lists and dicts."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected or (found != found and expected != expected)


@every_engine
@every_run
def test_the_engine_is_what_it_claims(launches, engine, run):
    """Two processes, the engine's own class, and under ZeRO only a part of the state on each."""
    whole = sum(weight.numel() for weight in load_policy().values())
    for record in launches[engine].records(run):
        facts = record["facts"]
        assert facts["num_processes"] == 2
        assert facts["engine"] == ("DistributedDataParallel" if engine == "ddp" else "DeepSpeedEngine")
        assert facts["stage"] == {"ddp": None, "zero2": 2, "zero3": 3}[engine]
        assert facts["local"] == 0 if engine == "zero3" else facts["local"] >= whole
        if engine == "zero2":
            assert 0 < facts["optimizer"] < 0.51 * facts["trainable"]


def load_policy() -> dict[str, torch.Tensor]:
    return load_file(POLICY_PATH / "model.safetensors")


@every_engine
def test_groups_straddle_the_ranks(launches, engine):
    first, second = (record["batches"][0]["row"] for record in launches[engine].records("full"))
    assert_same(torch.cat([first, second]), torch.arange(NUM_ROWS))
    assert set((first // NUM_COMPLETIONS).tolist()) & set((second // NUM_COMPLETIONS).tolist())


@every_engine
@every_run
def test_every_method_gives_one_process_numbers(launches, engine, run):
    """Rewards, advantages, excluded rows, metrics and state of every method at every step, on every rank."""
    (expected,) = launches["one"].records(run)
    assert len(expected["batches"]) == SIZES[run][0]
    found = launches[engine].records(run)
    gathered = ("rewards", "lengths", "every", "excluded", "metrics", "state", "num_items_in_batch")
    for step, batch in enumerate(expected["batches"]):
        ranks = [record["batches"][step] for record in found]
        for rank in ranks:
            assert_same({name: rank[name] for name in gathered}, {name: batch[name] for name in gathered})
        assert_same(torch.cat([rank["advantages"] for rank in ranks]), batch["advantages"])
    for record in found:
        assert_same([record["state"], record["history"]], [expected["state"], expected["history"]])


@pytest.mark.parametrize("engine", ["one", "ddp", "zero2", "zero3"])
def test_grpo_equals_trl_on_every_rank(launches, engine):
    """TRL's own advantages of each batch, unscorable rows included."""
    assert isinstance(every_method()[0], GRPO)
    for record in launches[engine].records("full"):
        for batch in record["batches"]:
            assert_same(batch["every"][0].nan_to_num(0.0).flatten()[batch["row"]], batch["stock"])


@every_engine
def test_evaluation_gives_one_process_numbers(launches, engine):
    (expected,) = launches["one"].records("full")
    names = [name for name in expected["evaluation"] if name.startswith(("eval_acr", "eval_reward", "eval_groups"))]
    assert len(names) >= 7
    for record in launches[engine].records("full"):
        for name in names:
            assert record["evaluation"][name] == pytest.approx(expected["evaluation"][name], rel=1e-6)


def test_the_run_has_what_could_differ(launches):
    """Unscorable rows, collapsed groups, excluded rows, every method with advantages, states that move."""
    (record,) = launches["one"].records("full")
    assert all(log["grad_norm"] > 0 for log in record["log"])
    rewards = [batch["rewards"] for batch in record["batches"]]
    assert any(rewards_PG.isnan().any() for rewards_PG in rewards)
    assert any((rewards_PG == 1.0).all(dim=1).any() for rewards_PG in rewards)
    for index, estimator in enumerate(every_method()):
        assert any((batch["every"][index].nan_to_num() != 0).any() for batch in record["batches"])
        assert all(
            (batch["excluded"][index] is not None) == bool(estimator.num_extra_generations)
            for batch in record["batches"]
        )
    first, last = record["batches"][0]["state"], record["state"]
    moved = [
        each.identity() for i, each in enumerate(every_method()) if first[f"estimators.{i}"] != last[f"estimators.{i}"]
    ]
    assert sum("HADW" in name for name in moved) == 2
    assert sum("AVSPO" in name for name in moved) == 3
    assert sum("AGRAE" in name for name in moved) == 1


@every_engine
@every_run
def test_losses_and_gradients_are_one_process(launches, engine, run):
    """All losses but bnpo as they are; bnpo, whose normaliser is the micro-batch's, by D_m in the other's place."""
    expected, found = (launches[name].records(run)[0]["log"] for name in ("one", engine))
    for ours, reference in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(reference[name], rel=1e-3, abs=1e-5)
    ours, reference = launches[engine].weights(run), launches["one"].weights(run)
    assert ours.keys() >= reference.keys()  # ZeRO-2 saves the tied head beside the embedding
    for name in reference:
        torch.testing.assert_close(ours[name], reference[name], rtol=0, atol=1e-6)


def test_weights_moved_further_than_they_may_differ(launches):
    start_weights, end = load_policy(), launches["one"].weights("full")
    assert max((end[name] - start_weights[name]).abs().max() for name in end) > 1e-3


@every_engine
def test_losses_are_their_formulas(launches, engine):
    """On policy a loss is minus the mean advantage over tokens: of all rows for dapo, of each micro-batch for bnpo."""
    records = launches[engine].records("full")
    log = records[0]["log"]
    batch = records[0]["batches"][0]
    advantages_N = torch.cat([record["batches"][0]["advantages"] for record in records])
    tokens_N = batch["lengths"].flatten()
    assert log[0]["loss"] == pytest.approx(-(advantages_N * tokens_N).sum().item() / tokens_N.sum().item(), rel=1e-5)

    advantages_N = torch.cat([record["batches"][BNPO_STEP]["advantages"] for record in records])
    tokens_N = records[0]["batches"][BNPO_STEP]["lengths"].flatten()
    micro_batches = [part["row"] for record in records for part in record["micro_batches"] if part["step"] == BNPO_STEP]
    assert len(micro_batches) == NUM_MICRO_BATCHES
    means = [-(advantages_N[row] * tokens_N[row]).sum() / tokens_N[row].sum() for row in micro_batches]
    assert log[BNPO_STEP]["loss"] == pytest.approx(sum(means).item() / NUM_MICRO_BATCHES, rel=1e-4)
    overall = -(advantages_N * tokens_N).sum().item() / tokens_N.sum().item()
    assert log[BNPO_STEP]["loss"] != pytest.approx(overall, rel=1e-3)


@pytest.mark.parametrize("engine", ["one", "ddp", "zero2", "zero3"])
@every_run
def test_resume_equals_never_stopping(launches, engine, run):
    """Advantages, state, history and weights, bit for bit."""
    num_steps, saved_at = SIZES[run]
    whole, resumed = launches[engine].records(run), launches[engine].records(f"{run}_resumed")
    for one, other in zip(whole, resumed, strict=True):
        assert len(other["batches"]) == num_steps - saved_at
        assert_same(other["batches"], one["batches"][saved_at:])
        assert_same([other["state"], other["history"]], [one["state"], one["history"]])
    assert_same(launches[engine].weights(f"{run}_resumed"), launches[engine].weights(run))


def test_another_number_of_processes_resumes(launches):
    """One process goes on from a checkpoint of two, and two from a checkpoint of one."""
    launches.launch(
        "ddp", launches.folder / "grown", "--num_processes", 2, "--foreign", launches["one"].folder / "full"
    )
    grown = Launch(launches.folder / "grown", 2)
    (expected,) = launches["one"].records("full")
    for resumed in (launches["one"], grown):
        for record in resumed.records("foreign"):
            assert_same(record["batches"][0]["every"], expected["batches"][SAVE_STEPS]["every"])
            assert_same([record["state"], record["history"]], [expected["state"], expected["history"]])


@pytest.mark.parametrize("option", [["--cpu"], ["--config_file", str(CONFIGS / "single.yaml")]], ids=["cpu", "single"])
def test_a_launch_that_brings_up_one_process_fails_loudly(tmp_path, option):
    """With these `accelerate launch --num_processes 2` silently runs one."""
    launch = [*ACCELERATE, *option, "--num_processes", "2"]
    log = tmp_path / "log"
    with pytest.raises(AssertionError, match="should bring up 2 processes, found 1"):
        finish(start([*launch, str(WORKER), str(tmp_path / "out"), "--num_processes", "2"], log), log)
