"""What a generation batch teaches, and why the rest teaches nothing: pure functions of rewards and advantages.

None of them raises because of a reward's value: without a readable success signal an all-equal group counts as
"other". Long, since every figure stands here with its definition, and nothing else does. Axes: see `groups.py`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_ext.estimator import Component
from grpo_ext.groups import SUCCESS_TOLERANCE, RewardGroups
from grpo_ext.statistics import EPS, group_mean, group_median, is_all_equal, num_comparable, num_scored, share_all_equal

ZERO = 1e-8
"""An advantage up to this size counts as zero."""

FIRST_BATCHES = 100
"""Generation batches of `acr/first_100`, the early predictor of arXiv 2605.21125."""


def advantage_collapse_rate(rewards_PG: Tensor) -> float:
    """
    Share of groups whose rewards are all equal (arXiv 2605.21125, eq. 6).

    Works on raw rewards, before any scaling. Groups with fewer than two scored rows are not counted; without a
    counted group the rate is 0. Rewards count as equal where they differ by at most 1e-6, above 1 by at most a
    millionth of their size: a gap of 0.01 counts up to rewards of 10,000, one of 1e-6 or less never.

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
    """
    `acr/rate`, its split by cause, `acr/after`, the share without a signal once the estimator has spoken, and
    `acr/float_noise`, the part of it whose advantages are not zero but rounding errors.
    """
    num_groups = max(1, num_comparable(groups.rewards_PG))
    metrics = {"acr/rate": advantage_collapse_rate(groups.rewards_PG)}
    for cause, is_cause_P1 in collapse_causes(groups).items():
        metrics[f"acr/{cause}"] = int(is_cause_P1.sum()) / num_groups
    has_no_signal_P1 = has_no_signal(groups, advantages_PG)
    is_noise_P1 = has_no_signal_P1 & (advantages_PG.abs() > ZERO).any(dim=1, keepdim=True)
    metrics["acr/after"] = int(has_no_signal_P1.sum()) / num_groups
    metrics["acr/float_noise"] = int(is_noise_P1.sum()) / num_groups
    return metrics


def batch_metrics(groups: RewardGroups, advantages_PG: Tensor) -> dict[str, float]:
    """
    Everything about one generation batch that a log or a warning wants, by metric name: `collapse_metrics`,
    `advantage_metrics`, `group_metrics`, and `reward`, the mean over scored rows.
    """
    metrics = collapse_metrics(groups, advantages_PG) | advantage_metrics(groups, advantages_PG)
    rewards = groups.rewards_PG[groups.is_scored_PG]
    return metrics | group_metrics(groups) | ({"reward": rewards.double().mean().item()} if len(rewards) else {})


def group_metrics(groups: RewardGroups) -> dict[str, float]:
    """
    `groups/num` (groups with two scored rows), `groups/size` (completions in each), `groups/frac_unscorable` (the share
    of groups that lack two scored rows), `groups/frac_median_flips`, and `completions/frac_duplicates`: the share of
    completions whose tokens another one of their group has had before.
    """
    num_groups = num_comparable(groups.rewards_PG)
    metrics = {
        "groups/num": float(num_groups),
        "groups/size": float(groups.rewards_PG.shape[1]),
        "groups/frac_unscorable": 1 - num_groups / len(groups.rewards_PG),
        "groups/frac_median_flips": median_flips(groups),
    }
    if groups.completion_keys_PG is not None:
        keys_PG = groups.completion_keys_PG.sort(dim=1).values
        metrics["completions/frac_duplicates"] = (keys_PG[:, 1:] == keys_PG[:, :-1]).sum().item() / keys_PG.numel()
    return metrics


def median_flips(groups: RewardGroups) -> float:
    """
    Share of scored rows above their group's mean and below its median, or the other way round: the rows whose
    advantage changes its sign with the baseline (arXiv 2601.22582). Rewards of 0 and 1 have none.
    """
    is_scored_PG = groups.is_scored_PG
    from_mean_PG = groups.rewards_PG - group_mean(groups.rewards_PG)
    from_median_PG = groups.rewards_PG - group_median(groups.rewards_PG)
    return ((from_mean_PG * from_median_PG < 0) & is_scored_PG).sum().item() / max(1, int(is_scored_PG.sum()))


def num_effective_groups(groups: RewardGroups, advantages_PG: Tensor) -> float:
    """
    Effective number of groups that teach: (sum of m)^2 / (sum of m^2), m the absolute advantages' sum of a group with
    a signal. As many as there are where all teach alike, 0 where none does.
    """
    mass_P1 = advantages_PG.abs().nan_to_num(nan=0.0).double().sum(dim=1, keepdim=True)
    mass_P1 = mass_P1.masked_fill(has_no_signal(groups, advantages_PG), 0.0)
    return (mass_P1.sum() ** 2 / (mass_P1**2).sum().clamp(min=torch.finfo(torch.float64).tiny)).item()


def advantage_metrics(groups: RewardGroups, advantages_PG: Tensor) -> dict[str, float]:
    """
    Size, zeros and mass of the advantages over scored rows (mass: mean over groups), the share of completion tokens
    with advantage zero, the effective number of groups, and the unscorable share of the rows.
    """
    scored = advantages_PG[groups.is_scored_PG].cpu().double()
    metrics = {"groups/frac_unscorable_rows": 1 - len(scored) / advantages_PG.numel()}
    if len(scored):
        metrics |= {
            "advantage/abs_mean": scored.abs().mean().item(),
            "advantage/abs_max": scored.abs().max().item(),
            "advantage/frac_zero": (scored.abs() < ZERO).double().mean().item(),
            "advantage/sum_pos": scored.clamp(min=0).sum().item() / len(advantages_PG),
            "advantage/sum_neg": scored.clamp(max=0).sum().item() / len(advantages_PG),
            "groups/num_effective": num_effective_groups(groups, advantages_PG),
        }
    if groups.lengths_PG is not None:
        is_zero_PG = advantages_PG.abs().nan_to_num(nan=0.0) < ZERO
        num_zero_tokens = (groups.lengths_PG * is_zero_PG).sum().item()
        metrics["advantage/frac_zero_tokens"] = num_zero_tokens / max(1, groups.lengths_PG.sum().item())
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
    """
    Counts over all generated training batches; state is what a checkpoint keeps. `num_earlier` is how many there were
    before, where a run was resumed without the counts of its beginning.
    """

    num_batches: int = field(init=False, default=0)
    num_groups: int = field(init=False, default=0)
    num_collapsed: int = field(init=False, default=0)
    first_rates: list[float] = field(init=False, default_factory=list)
    num_earlier: int = field(init=False, default=0)
    num_completions: int = field(init=False, default=0)
    num_scored: int = field(init=False, default=0)
    num_idle: dict[str, int] = field(init=False, default_factory=dict)

    def update(self, groups: RewardGroups, advantages_PG: Tensor, excluded_PG: Tensor | None = None) -> None:
        """Counts one batch."""
        self.num_batches += 1
        self.num_groups += num_comparable(groups.rewards_PG)
        self.num_collapsed += int(is_all_equal(groups.rewards_PG).sum())
        is_early = not self.num_earlier and len(self.first_rates) < FIRST_BATCHES
        if is_early and num_comparable(groups.rewards_PG):
            self.first_rates.append(advantage_collapse_rate(groups.rewards_PG))
        self.num_completions += advantages_PG.numel()
        self.num_scored += int(groups.is_scored_PG.sum())
        for cause, count in idle_completions(groups, advantages_PG, excluded_PG).items():
            self.num_idle[cause] = self.num_idle.get(cause, 0) + count

    def metrics(self) -> dict[str, float]:
        """
        `acr/cumulative`, over all groups so far, and `acr/first_100`, the mean rate of the run's first batches, where
        they were seen.
        """
        metrics = {"acr/cumulative": self.num_collapsed / max(1, self.num_groups)}
        if not self.num_earlier:
            metrics["acr/first_100"] = sum(self.first_rates) / max(1, len(self.first_rates))
        return metrics


SUCCESS_BINS = ("none right", "up to 25%", "up to 50%", "up to 75%", "below 100%", "all right")
"""The bins of `success_histogram`, from success rate 0 over (0, 0.25], ..., (0.75, 1) to 1."""


def success_histogram(groups: RewardGroups) -> list[int]:
    """
    Number of groups by success rate, one count for each of `SUCCESS_BINS`.

    Counts groups with at least two scored rows; a group without a readable success signal counts nowhere.

    Args:
        groups ([`RewardGroups`]):
            Rewards of one gathered generation batch.

    Returns:
        `list[int]` of six counts.

    Example:
        >>> success_histogram(RewardGroups(torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])))
        [1, 0, 1, 0, 0, 1]
    """
    if groups.success_error is not None:
        return [0] * len(SUCCESS_BINS)
    # On the CPU and in float64, so that 3 of 12 is a quarter for every dtype and device.
    rate_P1 = group_mean(groups.success_PG.cpu().double())
    is_counted_P1 = (num_scored(groups.rewards_PG).cpu() >= 2) & ~rate_P1.isnan()
    tops = torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64) + SUCCESS_TOLERANCE
    tops = torch.cat([tops, torch.tensor([1 - SUCCESS_TOLERANCE], dtype=torch.float64)])
    bins = torch.bucketize(rate_P1[is_counted_P1], tops)
    return torch.bincount(bins, minlength=len(SUCCESS_BINS)).tolist()
