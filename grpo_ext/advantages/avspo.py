"""AVSPO: Advantage Collapse in Group Relative Policy Optimization, arXiv 2605.21125.

When the share of collapsed groups (ACR) exceeds a threshold tau, each collapsed group gets K virtual rewards
before its mean mu' and std sigma' are taken: A = (c - mu') / (sigma' + eps) for the common value c (eq. 12).
tau <- clip(tau + eta sign(dJ) (ACR - tau)) with dJ the change of the batch's mean reward (eq. 10).

Longer than its neighbours: sixteen arguments belong to one method here, and each is described and checked.
"""

import math
import warnings
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from grpo_ext.advantages.avspo_prototype import AVSPOPrototype
from grpo_ext.advantages.avspo_virtual import (
    NoVirtualRewards,
    PowerCount,
    StratifiedRewards,
    VirtualCountRule,
    VirtualStrategy,
)
from grpo_ext.advantages.grpo import GRPO, check_scale
from grpo_ext.estimator import AdvantageEstimator, require
from grpo_ext.groups import SUCCESS_TOLERANCE, RewardGroups
from grpo_ext.statistics import (
    COLLAPSE_TOL,
    EPS,
    batch_mean,
    group_mean,
    group_std,
    is_all_equal,
    num_comparable,
    num_scored,
    share_all_equal,
)


@dataclass
class AVSPO(AdvantageEstimator):
    """
    Virtual rewards for collapsed groups above an adaptive collapse threshold; other groups as `GRPO`.

    Args:
        acr_threshold_init (`float`, *optional*, defaults to `0.5`):
            tau at the start, between the next two bounds.
        acr_threshold_lr (`float`, *optional*, defaults to `0.01`):
            eta in [0, 1]; 0 fixes the threshold.
        acr_threshold_min (`float`, *optional*, defaults to `0.1`):
            Lower bound of tau, at least 0.
        acr_threshold_max (`float`, *optional*, defaults to `0.9`):
            Upper bound of tau, at most 1.
        virtual_sensitivity (`float`, *optional*, defaults to `0.5`):
            alpha in (0, 1], the exponent of the collapse rate in K.
        virtual_count_rule (`VirtualCountRule`, *optional*, defaults to `PowerCount()`):
            K: `PowerCount`, `LinearCount` or `FixedCount`.
        virtual_strategy (`VirtualStrategy`, *optional*, defaults to `StratifiedRewards()`):
            The virtual rewards: `StratifiedRewards`, `UniformRewards`, `ConstantRewards`, `ExponentialRewards` or
            `NoVirtualRewards`.
        anchor_reward (`float`, *optional*, defaults to `0.1`):
            Largest virtual reward of an all-incorrect group, in (0, 1].
        augment_all_incorrect (`bool`, *optional*, defaults to `True`):
            Whether all-incorrect groups get virtual rewards (alone: "Error-Only").
        augment_all_correct (`bool`, *optional*, defaults to `True`):
            Whether all-correct groups do (alone: "Correct-Only").
        threshold_zero_improvement (`str`, *optional*, defaults to `"hold"`):
            At dJ = 0 the threshold holds, or moves as after a decline (`"stagnate"`).
        partial_credit_groups (`str`, *optional*, defaults to `"skip"`):
            Equal rewards between wrong and right stay at 0, or count `"as_correct"`.
        collapse_tol (`float`, *optional*, defaults to `1e-6`):
            How close rewards of a collapsed group lie, at least 0.
        scale_rewards (`str`, *optional*):
            `"group"` or `"none"`. None: the trainer's setting.
        std_ddof (`int`, *optional*, defaults to `1`):
            1 for the sample standard deviation, 0 for the population's.
        advantage_eps (`float`, *optional*, defaults to `1e-4`):
            eps, added to the standard deviation.
    """

    training_only: ClassVar[bool] = True

    acr_threshold_init: float = 0.5
    acr_threshold_lr: float = 0.01
    acr_threshold_min: float = 0.1
    acr_threshold_max: float = 0.9
    virtual_sensitivity: float = 0.5
    virtual_count_rule: VirtualCountRule = field(default_factory=PowerCount)
    virtual_strategy: VirtualStrategy = field(default_factory=StratifiedRewards)
    anchor_reward: float = 0.1
    augment_all_incorrect: bool = True
    augment_all_correct: bool = True
    threshold_zero_improvement: str = "hold"
    partial_credit_groups: str = "skip"
    collapse_tol: float = COLLAPSE_TOL
    scale_rewards: str | None = None
    std_ddof: int = 1
    advantage_eps: float = EPS
    threshold: float = field(init=False)
    prev_mean_reward: float | None = field(init=False, default=None)
    num_batches: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._check_threshold()
        self._check_virtual()
        scales = ("group", "none", None)
        require(self.scale_rewards in scales, "scale_rewards", self.scale_rewards, f"be one of {scales}", "pick one")
        check_scale(self.std_ddof, self.advantage_eps)
        self.threshold = self.acr_threshold_init

    def estimate(self, groups: RewardGroups) -> Tensor:
        base = GRPO(self.scale_rewards, std_ddof=self.std_ddof, advantage_eps=self.advantage_eps)
        is_collapsed_P1 = is_all_equal(groups.rewards_PG, self.collapse_tol)
        advantages_PG = base.estimate(groups).masked_fill(is_collapsed_P1, 0.0)
        is_augmented_P1 = self._is_augmented(groups)
        if is_augmented_P1.any():
            advantages_PG = torch.where(is_augmented_P1, self._injected_advantage(groups), advantages_PG)
        return groups.restrict(advantages_PG)

    def update(self, groups: RewardGroups) -> None:
        mean_reward = batch_mean(groups.success_PG)
        if math.isnan(mean_reward):
            return
        self._warn_once(groups)
        if self.prev_mean_reward is not None:
            step = self.acr_threshold_lr * self._direction(mean_reward - self.prev_mean_reward)
            threshold = self.threshold + step * (self._collapse_rate(groups) - self.threshold)
            self.threshold = min(self.acr_threshold_max, max(self.acr_threshold_min, threshold))
        self.prev_mean_reward = mean_reward
        self.num_batches += 1

    def metrics(self, groups: RewardGroups) -> dict[str, float]:
        is_augmented_P1 = self._is_augmented(groups)
        injected = self.estimate(groups)[is_augmented_P1.expand_as(groups.rewards_PG) & groups.is_scored_PG]
        numbers = {
            "threshold": self.threshold,
            "triggered": float(self._collapse_rate(groups) > self.threshold),
            "num_virtual": self._count(groups)[is_augmented_P1].float().mean().nan_to_num(nan=0.0).item(),
            "injected_abs_advantage": injected.abs().mean().nan_to_num(nan=0.0).item(),
            "num_groups": float(num_comparable(groups.rewards_PG)),
            "acr_success": share_all_equal(groups.success_PG, self.collapse_tol),
        }
        if self.prev_mean_reward is not None:
            numbers["reward_change"] = batch_mean(groups.success_PG) - self.prev_mean_reward
        return {f"avspo/{name}": value for name, value in numbers.items()}

    def _collapse_rate(self, groups: RewardGroups) -> float:
        """ACR: the share of collapsed groups."""
        return share_all_equal(groups.rewards_PG, self.collapse_tol)

    def _direction(self, change: float) -> int:
        if change == 0:
            return 0 if self.threshold_zero_improvement == "hold" else -1
        return 1 if change > 0 else -1

    def _is_augmented(self, groups: RewardGroups) -> Tensor:
        """Collapsed groups that get virtual rewards, bool (P, 1)."""
        success_PG = groups.success_PG
        value_P1 = group_mean(success_PG)
        is_incorrect_P1 = value_P1 <= SUCCESS_TOLERANCE
        is_correct_P1 = value_P1 >= 1 - SUCCESS_TOLERANCE
        if self.partial_credit_groups == "as_correct":
            is_correct_P1 = ~is_incorrect_P1
        is_enabled_P1 = (is_incorrect_P1 & self.augment_all_incorrect) | (is_correct_P1 & self.augment_all_correct)
        has_rewards = not isinstance(self.virtual_strategy, NoVirtualRewards)
        is_triggered = has_rewards and self._collapse_rate(groups) > self.threshold
        is_collapsed_P1 = is_all_equal(groups.rewards_PG, self.collapse_tol) & is_all_equal(success_PG)
        return is_collapsed_P1 & is_enabled_P1 & is_triggered

    def _count(self, groups: RewardGroups) -> Tensor:
        """K_g, (P, 1)."""
        count = self.virtual_count_rule.count
        return count(num_scored(groups.rewards_PG), self._collapse_rate(groups), self.virtual_sensitivity)

    def _injected_advantage(self, groups: RewardGroups) -> Tensor:
        """(c - mu') / (sigma' + eps), (P, 1), for every group as if it were collapsed."""
        count_P1, value_P1 = self._count(groups), group_mean(groups.success_PG)
        value_P1 = value_P1.masked_fill(value_P1 <= SUCCESS_TOLERANCE, 0.0)
        virtual_PK = self.virtual_strategy.rewards(value_P1, count_P1, self.anchor_reward, self.num_batches)
        is_used_PK = self.virtual_strategy.ranks(value_P1, count_P1) <= count_P1
        real_PG = value_P1.expand_as(groups.rewards_PG).masked_fill(~groups.is_scored_PG, torch.nan)
        augmented_PK = torch.cat([real_PG, virtual_PK.masked_fill(~is_used_PK, torch.nan)], dim=1)
        centered_P1 = value_P1 - group_mean(augmented_PK)
        if self.scale_rewards == "none":
            return centered_P1 * groups.reward_range
        return centered_P1 / (group_std(augmented_PK, self.std_ddof) + self.advantage_eps)

    def _warn_once(self, groups: RewardGroups) -> None:
        """Two settings in which the method can do little; Python shows each warning once."""
        if num_comparable(groups.rewards_PG) < 4:
            warnings.warn(
                "AVSPO sees fewer than 4 groups per generation batch, so the collapse rate is coarse and the threshold "
                "hardly acts: raise the generation batch size.",
                stacklevel=3,
            )
        if self.scale_rewards == "none":
            warnings.warn(
                'With `scale_rewards="none"` AVSPO pushes all-correct groups far harder than all-incorrect ones: use '
                '`scale_rewards="group"`, or a larger `anchor_reward`.',
                stacklevel=3,
            )

    def _check_threshold(self) -> None:
        low, high, start = self.acr_threshold_min, self.acr_threshold_max, self.acr_threshold_init
        require(0 <= low < high <= 1, "acr_threshold_min", low, f"lie in [0, acr_threshold_max={high})", "use 0.1")
        require(low <= start <= high, "acr_threshold_init", start, f"lie in [{low}, {high}]", "use 0.5")
        rate = self.acr_threshold_lr
        require(0 <= rate <= 1, "acr_threshold_lr", rate, "lie in [0, 1]", "use 0.01, the paper's value")
        rules = ("hold", "stagnate")
        rule = self.threshold_zero_improvement
        require(rule in rules, "threshold_zero_improvement", rule, f"be one of {rules}", "use 'hold'")
        require(self.collapse_tol >= 0, "collapse_tol", self.collapse_tol, "be at least 0", "use 1e-6")

    def _check_virtual(self) -> None:
        count, strategy = self.virtual_count_rule, self.virtual_strategy
        sensitivity, anchor = self.virtual_sensitivity, self.anchor_reward
        require(0 < sensitivity <= 1, "virtual_sensitivity", sensitivity, "lie in (0, 1]", "use 0.5")
        require(0 < anchor <= 1, "anchor_reward", anchor, "lie in (0, 1]", "use 0.1, the paper's value")
        require(isinstance(count, VirtualCountRule), "virtual_count_rule", count, "be a rule", "pass `PowerCount()`")
        is_strategy = isinstance(strategy, VirtualStrategy)
        require(is_strategy, "virtual_strategy", strategy, "be a strategy", "pass `StratifiedRewards()`")
        unused = f"keep its default beside `{count}`, which does not use it"
        is_used = count.uses_sensitivity or sensitivity == 0.5
        require(is_used, "virtual_sensitivity", sensitivity, unused, "drop one of the two")
        unused = f"keep its default beside `{strategy}`, which does not use it"
        is_used = strategy.uses_anchor_reward or anchor == 0.1
        require(is_used, "anchor_reward", anchor, unused, "drop one of the two")
        options = ("skip", "as_correct")
        partial = self.partial_credit_groups
        require(partial in options, "partial_credit_groups", partial, f"be one of {options}", "use 'skip'")


def paper() -> AVSPO:
    """The paper's population standard deviation; all else is the default."""
    return AVSPO(std_ddof=0)


def released_prototype() -> AVSPOPrototype:
    """What the only public code computes."""
    return AVSPOPrototype()
