"""What a generation batch teaches, and why the rest teaches nothing: pure functions of rewards and advantages.

None of them raises because of a reward's value: without a readable success signal an all-equal group counts as
"other". Axes: see `groups.py`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_ext.estimator import Component
from grpo_ext.groups import SUCCESS_TOLERANCE, RewardGroups
from grpo_ext.statistics import EPS, batch_mean, group_mean, is_all_equal, num_comparable, num_scored, share_all_equal

ZERO = 1e-8
"""An advantage up to this size counts as zero."""

FIRST_BATCHES = 100
"""Generation batches of `acr/first_100`, the early predictor of arXiv 2605.21125."""


def advantage_collapse_rate(rewards_PG: Tensor) -> float:
    """
    Share of groups whose rewards are all equal (arXiv 2605.21125, eq. 6).

    Works on raw rewards, before any scaling. Groups with fewer than two scored rows are not counted; without a
    counted group the rate is 0.

    Args:
        rewards_PG (`torch.Tensor`):
            Rewards (P, G), NaN where unscorable.

    Returns:
        `float` in [0, 1].

    Example:
        >>> advantage_collapse_rate(torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
        0.5
    """
    return share_all_equal(rewards_PG if rewards_PG.is_floating_point() else rewards_PG.double())


def collapse_causes(groups: RewardGroups) -> dict[str, Tensor]:
    """All-equal groups by cause, bool (P, 1): `all_correct`, `all_incorrect`, `other` (equal partial credit)."""
    is_collapsed_P1 = is_all_equal(groups.rewards_PG)
    if groups.success_error is None:
        success_P1 = group_mean(groups.success_PG)
        is_correct_P1 = is_collapsed_P1 & (success_P1 >= 1 - SUCCESS_TOLERANCE)
        is_incorrect_P1 = is_collapsed_P1 & (success_P1 <= SUCCESS_TOLERANCE)
    else:
        is_correct_P1 = is_incorrect_P1 = torch.zeros_like(is_collapsed_P1)
    is_other_P1 = is_collapsed_P1 & ~is_correct_P1 & ~is_incorrect_P1
    return {"all_correct": is_correct_P1, "all_incorrect": is_incorrect_P1, "other": is_other_P1}


def has_no_signal(groups: RewardGroups, advantages_PG: Tensor) -> Tensor:
    """
    Groups (of at least two scored rows) without a signal, bool (P, 1).

    Every advantage is zero, or, where all rewards agree, no larger than the float noise of the group's own mean
    can make it with TRL's eps.
    """
    noise_PG = (groups.rewards_PG - group_mean(groups.rewards_PG)).abs().nan_to_num(nan=0.0) / EPS
    noise_P1 = noise_PG.amax(dim=1, keepdim=True) * is_all_equal(groups.rewards_PG)
    largest_P1 = advantages_PG.abs().nan_to_num(nan=0.0).amax(dim=1, keepdim=True)
    return (num_scored(groups.rewards_PG) >= 2) & (largest_P1 <= noise_P1.clamp(min=ZERO))


def collapse_metrics(groups: RewardGroups, advantages_PG: Tensor) -> dict[str, float]:
    """`acr/rate`, its split by cause, and `acr/after`, the share without a signal once the estimator has spoken."""
    num_groups = max(1, num_comparable(groups.rewards_PG))
    metrics = {"acr/rate": advantage_collapse_rate(groups.rewards_PG)}
    for cause, is_cause_P1 in collapse_causes(groups).items():
        metrics[f"acr/{cause}"] = int(is_cause_P1.sum()) / num_groups
    metrics["acr/after"] = int(has_no_signal(groups, advantages_PG).sum()) / num_groups
    return metrics


def batch_metrics(groups: RewardGroups, advantages_PG: Tensor) -> dict[str, float]:
    """What the early warning watches."""
    num_groups = num_comparable(groups.rewards_PG)
    is_noise_P1 = has_no_signal(groups, advantages_PG) & (advantages_PG.abs() > ZERO).any(dim=1, keepdim=True)
    metrics = collapse_metrics(groups, advantages_PG) | {
        "acr/float_noise": int(is_noise_P1.sum()) / max(1, num_groups),
        "groups/num": float(num_groups),
        "groups/frac_unscorable": 1 - num_groups / len(groups.rewards_PG),
        "reward": batch_mean(groups.rewards_PG),
    }
    if groups.is_scored_PG.any():
        metrics["advantage/abs_max"] = advantage_metrics(groups, advantages_PG)["advantage/abs_max"]
    return metrics


def advantage_metrics(groups: RewardGroups, advantages_PG: Tensor) -> dict[str, float]:
    """Size, zeros and mass of the advantages over scored rows (mass: mean over groups), and the unscorable share."""
    scored = advantages_PG[groups.is_scored_PG].cpu().double()
    metrics = {"groups/frac_unscorable_rows": 1 - len(scored) / advantages_PG.numel()}
    if len(scored):
        metrics |= {
            "advantage/abs_mean": scored.abs().mean().item(),
            "advantage/abs_max": scored.abs().max().item(),
            "advantage/frac_zero": (scored.abs() < ZERO).double().mean().item(),
            "advantage/sum_pos": scored.clamp(min=0).sum().item() / len(advantages_PG),
            "advantage/sum_neg": scored.clamp(max=0).sum().item() / len(advantages_PG),
        }
    return metrics


def idle_completions(groups: RewardGroups, advantages_PG: Tensor, excluded_PG: Tensor | None = None) -> dict[str, int]:
    """
    Number of completions that teach nothing, by the first cause that fits.

    `all_correct`, `all_incorrect` and `other` are the completions of groups without a signal; `unscorable` got no
    reward; `excluded` was left out by the estimator; `baseline` got the advantage zero in a group that teaches.
    """
    is_silent_P1 = has_no_signal(groups, advantages_PG)
    causes = {cause: is_cause_P1 & is_silent_P1 for cause, is_cause_P1 in collapse_causes(groups).items()}
    causes["unscorable"] = ~groups.is_scored_PG
    if excluded_PG is not None:
        causes["excluded"] = excluded_PG
    causes["baseline"] = advantages_PG.abs() < ZERO
    is_counted_PG = torch.zeros_like(groups.is_scored_PG)
    counts = {}
    for cause, is_cause in causes.items():
        is_new_PG = is_cause & ~is_counted_PG
        if cause != "unscorable":
            is_new_PG = is_new_PG & groups.is_scored_PG
        counts[cause] = int(is_new_PG.sum())
        is_counted_PG = is_counted_PG | is_new_PG
    return counts


@dataclass
class CollapseHistory(Component):
    """Counts over all generated training batches; state is what a checkpoint keeps."""

    num_batches: int = field(init=False, default=0)
    num_groups: int = field(init=False, default=0)
    num_collapsed: int = field(init=False, default=0)
    first_rates: list[float] = field(init=False, default_factory=list)
    num_completions: int = field(init=False, default=0)
    num_scored: int = field(init=False, default=0)
    num_idle: dict[str, int] = field(init=False, default_factory=dict)

    def update(self, groups: RewardGroups, advantages_PG: Tensor, excluded_PG: Tensor | None = None) -> None:
        """Counts one batch."""
        self.num_batches += 1
        self.num_groups += num_comparable(groups.rewards_PG)
        self.num_collapsed += int(is_all_equal(groups.rewards_PG).sum())
        if num_comparable(groups.rewards_PG) and len(self.first_rates) < FIRST_BATCHES:
            self.first_rates.append(advantage_collapse_rate(groups.rewards_PG))
        self.num_completions += advantages_PG.numel()
        self.num_scored += int(groups.is_scored_PG.sum())
        for cause, count in idle_completions(groups, advantages_PG, excluded_PG).items():
            self.num_idle[cause] = self.num_idle.get(cause, 0) + count

    def metrics(self) -> dict[str, float]:
        """`acr/cumulative`, over all groups so far, and `acr/first_100`, the mean rate of the first batches."""
        return {
            "acr/cumulative": self.num_collapsed / max(1, self.num_groups),
            "acr/first_100": sum(self.first_rates) / max(1, len(self.first_rates)),
        }
