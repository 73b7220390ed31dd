"""One, two and four simulated ranks give the same advantages, exclusions and state, for every method.

Each rank is a thread that runs the trainer's own code on its local rows; what TRL gives it, and the gathering of
tensors, are stand-ins. Real processes: `test_engines.py`.
"""

import copy
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import nan
from types import SimpleNamespace

import pytest
import torch
from _ranks import Ranks
from _training import loss_mask, make_args, make_trainer
from torch import Tensor
from trl import GRPOTrainer

from grpo_ext.advantages import AGRAE, AVSPO, GRPO, HADW, MCGRPO, METHODS, AdaptiveForgetting, UniformRewards
from grpo_ext.batching import LOSS_SCALE

pytestmark = pytest.mark.filterwarnings("ignore:MC-GRPO should see an odd number")

VARIANTS = {
    "uniform": lambda: AVSPO(acr_threshold_init=0.1, virtual_strategy=UniformRewards(seed=3)),
    "omega_ema": lambda: AGRAE(omega_ema=0.5),
    "adaptive_forgetting": lambda: HADW(base=MCGRPO(), anchor=AdaptiveForgetting(stability_window=3)),
}
every_method = pytest.mark.parametrize("make", [*METHODS.values(), *VARIANTS.values()], ids=[*METHODS, *VARIANTS])

NUM_GROUPS, NUM_COMPLETIONS, NUM_BATCHES = 5, 8, 6  # 40 rows: no border of 2 or 4 ranks inside is one of groups


def make_rewards(batch: int) -> Tensor:
    """Rewards (N, 1): a group all correct, one all incorrect, mixed ones, unscorable rows; once nothing scored."""
    generator = torch.Generator().manual_seed(batch)
    rewards_PG = torch.randint(0, 2, (NUM_GROUPS, NUM_COMPLETIONS), generator=generator).float()
    rewards_PG[batch % NUM_GROUPS], rewards_PG[(batch + 1) % NUM_GROUPS] = 1.0, 0.0
    if batch % 2:
        rewards_PG[(batch + 2) % NUM_GROUPS] = torch.rand(NUM_COMPLETIONS, generator=generator)
    rewards_PG[torch.rand(rewards_PG.shape, generator=generator) < 0.1] = nan
    return rewards_PG.view(-1, 1) if batch != 3 else torch.full((NUM_GROUPS * NUM_COMPLETIONS, 1), nan)


def make_rank(trainer: GRPOTrainer, ranks: Ranks, rank: int) -> GRPOTrainer:
    """A trainer with a process index, an estimator, a history and logs of its own."""
    own = copy.copy(trainer)
    own.accelerator = SimpleNamespace(
        process_index=rank, device=torch.device("cpu"), gather=lambda tensor: ranks.gather(rank, tensor)
    )
    own.advantage_estimator = copy.deepcopy(trainer.advantage_estimator)
    own.collapse_history = copy.deepcopy(trainer.collapse_history)
    own._metrics = {"train": defaultdict(list)}
    own._logs = {"advantages": deque(maxlen=NUM_GROUPS * NUM_COMPLETIONS)}
    own._rank = rank
    return own


def score(trainer: GRPOTrainer, inputs: list[dict]) -> dict[str, Tensor]:
    """In the place of TRL's method: calls ours for the rewards, and gives this rank's rows of a batch."""
    batch, num_rows = inputs[0]["batch"], len(inputs)
    row_N = torch.arange(NUM_GROUPS * NUM_COMPLETIONS)
    row_B = row_N[trainer._rank * num_rows : (trainer._rank + 1) * num_rows]
    length_B = 1 + (row_B * 7 + batch) % 11
    trainer._lengths = length_B.tolist()
    trainer._calculate_rewards(inputs, [], [], [[length] for length in trainer._lengths])
    mask_BT = (torch.arange(11) < length_B.unsqueeze(1)).int()
    trainer._logs["advantages"].extend([nan] * len(row_N))
    return {
        "completion_ids": mask_BT,
        "completion_mask": mask_BT,
        "advantages": torch.zeros(num_rows),
        "num_items_in_batch": trainer.accelerator.gather(mask_BT.sum()).sum(),
    }


def give_rewards(trainer: GRPOTrainer, inputs: list[dict], *args: list) -> Tensor:
    return make_rewards(inputs[0]["batch"])  # gathered, as TRL's


def run(trainer: GRPOTrainer, num_ranks: int) -> list[list[dict]]:
    """What every rank got from each batch."""
    ranks, num_rows = Ranks(num_ranks), NUM_GROUPS * NUM_COMPLETIONS // num_ranks

    def train(rank: int) -> list[dict]:
        own, kept = make_rank(trainer, ranks, rank), []
        for batch in range(NUM_BATCHES):
            output = own._generate_and_score_completions([{"batch": batch, "prompt": "1+1="}] * num_rows)
            kept.append(
                {
                    "local": {"advantages": output["advantages"], "loss_mask": loss_mask(output)},
                    "num_items": output["num_items_in_batch"].reshape(()),
                    "scale": output.get(LOSS_SCALE, torch.tensor(1.0)),
                    "logged": list(own._logs["advantages"]),
                    "metrics": copy.deepcopy(own._metrics["train"]),
                    "state": own.advantage_estimator.state_dict(),
                    "history": own.collapse_history.state_dict(),
                }
            )
        return kept

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(train, range(num_ranks)))


@pytest.fixture
def make_ranked(tmp_path, monkeypatch) -> Callable:
    """A trainer whose sampling and scoring are stand-ins."""
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", score)
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", give_rewards)

    def build(make: Callable, **settings: object) -> GRPOTrainer:
        extra = make().num_extra_generations
        sizes = {"num_generations": NUM_COMPLETIONS - extra, "num_extra_generations": extra}
        batches = {"per_device_train_batch_size": NUM_GROUPS * NUM_COMPLETIONS, "gradient_accumulation_steps": 1}
        trainer = make_trainer(make_args(tmp_path, **sizes, **batches, **settings), advantage_estimator=make())
        trainer.model.train()
        return trainer

    return build


def assert_ranks_equal_one(alone: list[dict], together: list[list[dict]]) -> None:
    """Bit for bit, batch by batch; NaN equals NaN in metrics."""
    for batch, expected in enumerate(alone):
        ranks = [kept[batch] for kept in together]
        for name, whole in expected["local"].items():
            assert torch.equal(torch.cat([rank["local"][name] for rank in ranks]), whole)
        for rank in ranks:
            assert torch.equal(rank["num_items"], expected["num_items"])
            assert torch.equal(rank["scale"], expected["scale"])
            for name in ("logged", "state", "history"):
                assert rank[name] == expected[name]
            assert repr(rank["metrics"]) == repr(expected["metrics"])


@every_method
@pytest.mark.parametrize("settings", [{"loss_type": "dapo"}, {"loss_type": "grpo", "beta": 0.1}], ids=str)
def test_ranks_agree_with_one_process(make_ranked, make, settings):
    trainer = make_ranked(make, **settings)
    (alone,) = run(trainer, 1)
    assert any((kept["local"]["advantages"] != 0).any() for kept in alone)
    assert any((kept["local"]["loss_mask"].sum(dim=1) == 0).any() for kept in alone) == (
        make().num_extra_generations > 0
    )
    for num_ranks in (2, 4):
        together = run(trainer, num_ranks)
        assert len(together) == num_ranks
        assert_ranks_equal_one(alone, together)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_groups_straddle_ranks(num_ranks):
    size = NUM_GROUPS * NUM_COMPLETIONS // num_ranks
    assert all(border * size % NUM_COMPLETIONS for border in range(1, num_ranks))


@dataclass
class OfThisRank(GRPO):
    """What must not be: draws from the random state of the rank."""

    def estimate(self, groups):
        return super().estimate(groups) + torch.rand(1)


def test_an_estimator_that_draws_by_itself_is_found_out(make_ranked):
    trainer = make_ranked(OfThisRank)
    (alone,) = run(trainer, 1)
    with pytest.raises(AssertionError):
        assert_ranks_equal_one(alone, run(trainer, 2))
