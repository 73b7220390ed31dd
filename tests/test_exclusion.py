"""A row the estimator leaves out changes the gradient as if it had never been sampled."""

from dataclasses import dataclass, fields

import pytest
import torch
from _training import even_digits, loss_mask, make_args, make_trainer, use_float64
from torch import Tensor
from trl import GRPOConfig

from grpo_ext.advantages import GRPO, MCGRPO
from grpo_ext.batching import ROW_MEAN_LOSSES, TOKEN_MEAN_LOSSES
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardGroups

LOSSES = ROW_MEAN_LOSSES + TOKEN_MEAN_LOSSES


@dataclass
class LeaveOut(AdvantageEstimator):
    """Fixed advantages; leaves out the completions whose place in the group is listed."""

    places: tuple[int, ...] = (1,)

    def estimate(self, groups: RewardGroups) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        advantages_PG = torch.randn(groups.rewards_PG.shape, generator=generator, dtype=torch.float64)
        return groups.restrict(advantages_PG.to(groups.rewards_PG.dtype))

    def excluded(self, groups: RewardGroups) -> Tensor:
        is_out_PG = torch.zeros_like(groups.rewards_PG, dtype=torch.bool)
        is_out_PG[:, list(self.places)] = True
        is_out_PG[0] = False  # groups lose different numbers of rows
        return is_out_PG


def gradient(trainer, batch) -> torch.Tensor:
    """Gradient of TRL's loss on one batch of rows."""
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, batch).backward()
    return torch.cat([p.grad.flatten().double() for p in trainer.model.parameters() if p.grad is not None])


def generate(trainer):
    """One generation batch, as the trainer prepares it, with old log-probs that make the ratios differ from 1."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = [row for row in trainer.train_dataset.select(range(4)) for _ in range(trainer.num_generations)]
    batch = trainer._generate_and_score_completions(inputs)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        width = batch["completion_ids"].size(1)
        logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width, compute_entropy=True)[0]
    dtype = next(trainer.model.parameters()).dtype
    noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    batch["old_per_token_logps"] = logps + 0.3 * noise
    batch["advantages"] = batch["advantages"].to(dtype)
    return batch


def without_rows(batch, keep, raw_advantages):
    """The same batch rebuilt from the kept rows only, its token count taken from them."""
    rebuilt = {
        name: value[keep] if isinstance(value, Tensor) and value.dim() else value for name, value in batch.items()
    }
    rebuilt["advantages"] = raw_advantages[keep]
    rebuilt["num_items_in_batch"] = rebuilt["completion_mask"].sum()
    rebuilt.pop("loss_scale", None)
    return rebuilt


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_gradient_is_that_of_the_batch_without_the_rows(tmp_path, monkeypatch, loss_type, beta, dtype):
    args = make_args(tmp_path, per_device_train_batch_size=16, gradient_accumulation_steps=1, loss_type=loss_type)
    args.beta = beta
    if loss_type == "luspo":
        args.importance_sampling_level = "sequence"
    trainer = make_trainer(args, advantage_estimator=LeaveOut(places=(1, 3)))
    if dtype == torch.float64:
        use_float64(trainer, monkeypatch)
    batch = generate(trainer)
    groups = RewardGroups(torch.ones(4, 4))
    keep = ~trainer.advantage_estimator.excluded(groups).flatten()
    assert keep.sum() == 10
    raw_advantages = trainer.advantage_estimator.estimate(RewardGroups(torch.ones(4, 4, dtype=dtype))).flatten()

    found = gradient(trainer, batch)
    expected = gradient(trainer, without_rows(batch, keep, raw_advantages))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    assert expected.abs().max() > 0
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_keeping_the_normaliser_is_a_different_gradient(tmp_path, loss_type):
    """The test above can fail: masking alone leaves the row mean, or the token count, too large."""
    args = make_args(tmp_path, per_device_train_batch_size=16, gradient_accumulation_steps=1, loss_type=loss_type)
    trainer = make_trainer(args, advantage_estimator=LeaveOut())
    batch = generate(trainer)
    keep = ~trainer.advantage_estimator.excluded(RewardGroups(torch.ones(4, 4))).flatten()
    raw_advantages = trainer.advantage_estimator.estimate(RewardGroups(torch.ones(4, 4))).flatten()
    expected = gradient(trainer, without_rows(batch, keep, raw_advantages))
    batch["advantages"] = raw_advantages
    batch["num_items_in_batch"] = torch.tensor(batch["completion_ids"].numel())
    assert (gradient(trainer, batch) - expected).abs().max() > 1e-2 * expected.abs().max()


def test_official_token_count_keeps_the_pivots_tokens(tmp_path):
    counts = {}
    for official in (False, True):
        settings = {"per_device_train_batch_size": 20, "gradient_accumulation_steps": 1, "num_extra_generations": 1}
        args = make_args(tmp_path, **settings)
        trainer = make_trainer(args, advantage_estimator=MCGRPO(official_token_count=official))
        batch = generate(trainer)
        counts[official] = int(batch["num_items_in_batch"])
        tokens_B = loss_mask(batch).sum(dim=1)
        assert int((tokens_B == 0).sum()) == 4
        assert int(tokens_B.sum()) == counts[False]
    assert counts[True] > counts[False]


def test_nothing_is_excluded_in_evaluation(tmp_path):
    args = make_args(tmp_path, per_device_eval_batch_size=16)
    trainer = make_trainer(args, advantage_estimator=LeaveOut())
    trainer.model.eval()
    inputs = [row for row in trainer.train_dataset.select(range(4)) for _ in range(4)]
    batch = trainer._generate_and_score_completions(inputs)
    assert "tool_mask" not in batch


@pytest.mark.parametrize(("setting", "value"), [("entropy_coef", 0.01), ("use_adaptive_entropy", True)])
def test_row_mean_losses_refuse_exclusion_beside_an_entropy_bonus(tmp_path, setting, value):
    if setting not in {field.name for field in fields(GRPOConfig)}:
        pytest.skip(f"this version of TRL has no {setting}")
    args = make_args(tmp_path, loss_type="grpo", **{setting: value})
    trainer = make_trainer(args, advantage_estimator=LeaveOut())
    with pytest.raises(ValueError, match="entropy bonus"):
        trainer.train()


def test_plain_grpo_excludes_nothing(tmp_path):
    trainer = make_trainer(make_args(tmp_path, per_device_train_batch_size=16), even_digits, advantage_estimator=GRPO())
    batch = generate(trainer)
    assert "tool_mask" not in batch
