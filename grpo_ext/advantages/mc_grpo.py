"""MC-GRPO: Median-Centered Group Relative Policy Optimization, arXiv 2601.22582.

One completion more than asked for is sampled; A_i = (r_i - median(r)) / (MAD(r) + eps_mad), and one completion at
the median, the pivot, has advantage 0 and leaves the loss, so that as many as asked for carry gradient. With
two-valued rewards the MAD is always 0; then the scale falls back to the standard deviation.
"""

import warnings
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from grpo_ext.advantages.grpo import check_scale
from grpo_ext.advantages.mc_grpo_pivots import FirstPivot, LastPivot, LongestPivot, PivotRule, ShortestPivot
from grpo_ext.estimator import AdvantageEstimator, require
from grpo_ext.groups import RewardGroups
from grpo_ext.statistics import EPS, group_mad, group_mean, group_median, group_std, is_all_equal, num_scored

__all__ = ["MCGRPO", "FirstPivot", "LastPivot", "LongestPivot", "PivotRule", "ShortestPivot", "official"]

MAD_TOL = 1e-6
"""A median absolute deviation up to this counts as 0."""


@dataclass
class MCGRPO(AdvantageEstimator):
    """
    Median baseline, robust scale, one completion at the median left out.

    Args:
        center_scale (`str`, *optional*, defaults to `"mad"`):
            What divides: `"mad"`, `"std"` or `"none"`.
        mad_eps (`float`, *optional*, defaults to `1e-3`):
            Added to the MAD, above 0.
        mad_fallback (`str`, *optional*, defaults to `"std"`):
            What divides where the MAD is 0: `"std"`, `"epsilon"` (`mad_eps` alone, the released code) or `"none"`.
        pivot_rule (`PivotRule`, *optional*, defaults to `FirstPivot()`):
            `FirstPivot`, `LastPivot`, `LongestPivot` or `ShortestPivot`.
        pivot_exclusion (`str`, *optional*, defaults to `"mask"`):
            `"mask"` takes the pivot out of the loss and its normalisers, `"none"` leaves it there.
        compensate_zero_advantages (`bool`, *optional*, defaults to `False`):
            Whether non-zero advantages are multiplied by G over their number (the released GSM8K trainer).
        max_abs_advantage (`float`, *optional*):
            Bound of the advantage's size, above 0.
        official_token_count (`bool`, *optional*, defaults to `False`):
            Whether the pivots' tokens stay in the loss normaliser, as in the released code.
        std_ddof (`int`, *optional*, defaults to `1`):
            1 for the sample standard deviation, 0 for the population's.
        advantage_eps (`float`, *optional*, defaults to `1e-4`):
            Added to the standard deviation.
    """

    num_extra_generations: ClassVar[int] = 1
    training_only: ClassVar[bool] = True
    setting_homes: ClassVar[dict[str, str]] = {"scale_rewards": "center_scale"}

    center_scale: str = "mad"
    mad_eps: float = 1e-3
    mad_fallback: str = "std"
    pivot_rule: PivotRule = field(default_factory=FirstPivot)
    pivot_exclusion: str = "mask"
    compensate_zero_advantages: bool = False
    max_abs_advantage: float | None = None
    official_token_count: bool = False
    std_ddof: int = 1
    advantage_eps: float = EPS

    def __post_init__(self) -> None:
        for name, options in (
            ("center_scale", ("mad", "std", "none")),
            ("mad_fallback", ("std", "epsilon", "none")),
            ("pivot_exclusion", ("mask", "none")),
        ):
            value = getattr(self, name)
            require(value in options, name, value, f"be one of {options}", f"use {options[0]!r}")
        require(self.mad_eps > 0, "mad_eps", self.mad_eps, "be above 0", "use 1e-3, the released code's value")
        is_rule = isinstance(self.pivot_rule, PivotRule)
        require(is_rule, "pivot_rule", self.pivot_rule, "be a rule", "pass `FirstPivot()`")
        bound = self.max_abs_advantage
        require(bound is None or bound > 0, "max_abs_advantage", bound, "be above 0", "leave it unset for no bound")
        is_possible = self.pivot_exclusion == "mask" or not self.official_token_count
        count = self.official_token_count
        require(is_possible, "official_token_count", count, "be False where nothing is excluded", "drop it")
        check_scale(self.std_ddof, self.advantage_eps)
        self.count_excluded_tokens = self.official_token_count  # type: ignore[misc]

    def estimate(self, groups: RewardGroups) -> Tensor:
        deviation_PG = groups.rewards_PG - group_median(groups.rewards_PG)
        advantages_PG = deviation_PG / self._scale(groups)
        advantages_PG = groups.restrict(advantages_PG.masked_fill(is_all_equal(groups.rewards_PG), 0.0))
        if self.compensate_zero_advantages:
            num_nonzero_P1 = (advantages_PG.nan_to_num(nan=0.0) != 0).sum(dim=1, keepdim=True).clamp(min=1)
            advantages_PG = advantages_PG * (advantages_PG.shape[1] / num_nonzero_P1.to(advantages_PG.dtype))
        if self.max_abs_advantage is not None:
            advantages_PG = advantages_PG.clamp(-self.max_abs_advantage, self.max_abs_advantage)
        return advantages_PG

    def update(self, groups: RewardGroups) -> None:
        """Keeps no state; says once when the group has no middle completion."""
        num_completions = groups.rewards_PG.shape[1]
        if num_completions % 2 == 0:
            warnings.warn(
                f"MC-GRPO should see an odd number of completions per prompt, found {num_completions}, whose lower "
                "median lies off the middle: use an even `num_generations`.",
                stacklevel=2,
            )

    def excluded(self, groups: RewardGroups) -> Tensor | None:
        """The pivot of each group, bool (P, G); its first unscorable row where it has one."""
        if self.pivot_exclusion == "none":
            return None
        is_at_median_PG = groups.rewards_PG == group_median(groups.rewards_PG)
        pivot_PG = self.pivot_rule.choose(is_at_median_PG, groups)
        is_unscorable_PG = ~groups.is_scored_PG
        first_unscorable_PG = is_unscorable_PG & (is_unscorable_PG.cumsum(dim=1) == 1)
        return torch.where(is_unscorable_PG.any(dim=1, keepdim=True), first_unscorable_PG, pivot_PG)

    def metrics(self, groups: RewardGroups) -> dict[str, float]:
        is_counted_P = num_scored(groups.rewards_PG).squeeze(1) >= 2
        rewards_PG, advantages_PG = groups.rewards_PG[is_counted_P], self.estimate(groups)[is_counted_P]
        sign_product_PG = (rewards_PG - group_mean(rewards_PG)).sign() * advantages_PG.sign()
        is_at_median_PG = rewards_PG == group_median(rewards_PG)
        numbers = {
            "median_mean": group_median(rewards_PG).mean().item(),
            "mad_mean": group_mad(rewards_PG).mean().item(),
            "frac_groups_mad_zero": (group_mad(rewards_PG) <= MAD_TOL).float().mean().item(),
            "frac_groups_tied": (is_at_median_PG.sum(dim=1) > 1).float().mean().item(),
            "contributing_rows_per_group": (advantages_PG.abs() > 0).sum(dim=1).float().mean().item(),
            "sign_flip_rate": (sign_product_PG == -1)[~rewards_PG.isnan()].float().mean().item(),
        }
        return {f"mc_grpo/{name}": value for name, value in numbers.items()}

    def _scale(self, groups: RewardGroups) -> Tensor:
        """scale_g, (P, 1)."""
        mad_P1 = group_mad(groups.rewards_PG)
        one_P1 = torch.ones_like(mad_P1)
        std_P1 = group_std(groups.rewards_PG, self.std_ddof) + self.advantage_eps
        if self.center_scale != "mad":
            return std_P1 if self.center_scale == "std" else one_P1
        fallback_P1 = {"std": std_P1, "epsilon": one_P1 * self.mad_eps, "none": one_P1}[self.mad_fallback]
        return torch.where(mad_P1 <= MAD_TOL, fallback_P1, mad_P1 + self.mad_eps)


def official(gsm8k: bool = False) -> MCGRPO:
    """The released code (by masking, which gives the gradient of its dropping); `gsm8k` for that trainer's rule."""
    return MCGRPO(mad_fallback="epsilon", official_token_count=True, compensate_zero_advantages=gsm8k)
