"""HA-DW: Your Group-Relative Advantage Is Biased, arXiv 2601.08521.

A_i Phi_i with Phi_i = lambda * exp(D_i M_g), D_i = -sign(A_i) sign(d_g), M_g = |d_g|, d_g = p_g - C (eq. 13-17):
a prompt whose success rate p_g lies below the anchor C, the model's recent accuracy, is hard; there right
answers gain weight and wrong ones lose it, on easy prompts the reverse.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_ext.advantages.grpo import GRPO
from grpo_ext.advantages.ha_dw_anchors import AdaptiveForgetting, AnchorRule, FixedAnchor, MovingAverage
from grpo_ext.advantages.reweighting import Reweighting
from grpo_ext.estimator import require
from grpo_ext.groups import RewardGroups
from grpo_ext.statistics import batch_mean, is_mixed

__all__ = ["HADW", "AdaptiveForgetting", "AnchorRule", "FixedAnchor", "MovingAverage", "official_code", "paper"]


@dataclass
class HADW(Reweighting):
    """
    Difficulty weights from the history of the batch accuracy.

    Args:
        base (`AdvantageEstimator`, *optional*, defaults to `GRPO()`):
            The estimator whose advantages A are multiplied.
        reweight_scale (`float`, *optional*, defaults to `1.3`):
            lambda, above 0 (the best of Table 7).
        anchor (`AnchorRule`, *optional*, defaults to `MovingAverage()`):
            Rule of C: `MovingAverage` (hard), `AdaptiveForgetting` (soft) or `FixedAnchor`. Holds the state.
        anchor_timing (`str`, *optional*, defaults to `"prior"`):
            `"prior"`: C before this batch is counted, as in the paper; `"posterior"`: after, as in its code.
    """

    reweight_scale: float = 1.3
    anchor: AnchorRule = field(default_factory=MovingAverage)
    anchor_timing: str = "prior"

    def __post_init__(self) -> None:
        super().__post_init__()
        scale, timing = self.reweight_scale, self.anchor_timing
        require(0 < scale < math.inf, "reweight_scale", scale, "be above 0 and finite", "use 1.3, the paper's best")
        require(isinstance(self.anchor, AnchorRule), "anchor", self.anchor, "be a rule", "pass `MovingAverage()`")
        timings = ("prior", "posterior")
        require(timing in timings, "anchor_timing", timing, f"be one of {timings}", "use the paper's 'prior'")

    def estimate(self, groups: RewardGroups) -> Tensor:
        advantages_PG = self.base_advantages(groups)
        return advantages_PG * self._factor(groups, advantages_PG)

    def update(self, groups: RewardGroups) -> None:
        super().update(groups)
        accuracy = batch_mean(groups.success_PG)
        if not math.isnan(accuracy):
            self.anchor.push(accuracy)

    def metrics(self, groups: RewardGroups) -> dict[str, float]:
        accuracy = batch_mean(groups.success_PG)
        if math.isnan(accuracy):
            return super().metrics(groups)
        is_mixed_P1 = is_mixed(groups.rewards_PG)
        easiness_P1 = self._easiness(groups)
        advantages_PG = self.base_advantages(groups)
        factor_PG = self._factor(groups, advantages_PG)
        scored_factors = factor_PG[groups.is_scored_PG]
        numbers = self.anchor.metrics() | {
            "batch_accuracy": accuracy,
            "anchor": self._belief(groups),
            "anchor_next": self.anchor.after(accuracy),
            "diff_mean": easiness_P1.nanmean().item(),
            "diff_abs_mean": easiness_P1.abs().nanmean().item(),
            "frac_harder": (easiness_P1[is_mixed_P1] < 0).float().mean().item(),
            "factor_mean": scored_factors.mean().item(),
            "factor_min": scored_factors.min().item(),
            "factor_max": scored_factors.max().item(),
            "net_advantage": (advantages_PG * factor_PG).nansum(dim=1).mean().item(),
        }
        return super().metrics(groups) | {f"ha_dw/{name}": value for name, value in numbers.items()}

    def _belief(self, groups: RewardGroups) -> float:
        """C, the anchor this batch is weighted with."""
        accuracy = batch_mean(groups.success_PG)
        return self.anchor.before(accuracy) if self.anchor_timing == "prior" else self.anchor.after(accuracy)

    def _easiness(self, groups: RewardGroups) -> Tensor:
        """d_g, (P, 1): how much easier than the anchor; NaN for a group without a success value."""
        return self.success_rate(groups) - self._belief(groups)

    def _factor(self, groups: RewardGroups, advantages_PG: Tensor) -> Tensor:
        """Phi, (P, G); 1 for a group without a success value."""
        easiness_P1 = self._easiness(groups)
        factor_PG = self.reweight_scale * torch.exp(-advantages_PG.sign() * easiness_P1)
        return torch.where(easiness_P1.isnan(), 1.0, factor_PG)


def paper() -> HADW:
    """The paper's main text: the soft update."""
    return HADW(anchor=AdaptiveForgetting())


def official_code() -> HADW:
    """The released code: hard update that counts the batch first, scale 1.5, eps 1e-6."""
    return HADW(
        base=GRPO(advantage_eps=1e-6),
        reweight_scale=1.5,
        anchor=MovingAverage(window=10),
        anchor_timing="posterior",
    )
