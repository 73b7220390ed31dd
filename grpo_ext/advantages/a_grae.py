"""A-GRAE: Unveiling Implicit Advantage Symmetry, arXiv 2602.05548.

A_i W_g min(1, omega / alpha) for A_i > 0 and A_i W_g otherwise (eq. 12, 13), with
W_g = gamma omega / sqrt(p_g) + gamma (1 - omega) / sqrt(1 - p_g), where omega is the batch's success rate and p_g
the group's: focus moves from easy to hard prompts as omega grows, and positive advantages are damped early on.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_ext.advantages.grpo import GRPO
from grpo_ext.advantages.reweighting import Reweighting
from grpo_ext.estimator import require
from grpo_ext.groups import RewardGroups
from grpo_ext.statistics import batch_mean, is_mixed

RELEASED_EPS = 1e-6
"""What the released code adds to both denominators of its easy factor's formula."""


def check_success_rate_clip(success_rate_clip: float | None) -> None:
    """The range that keeps `clip(p, c, 1 - c)` meaningful."""
    is_valid = success_rate_clip is None or 0 < success_rate_clip < 0.5
    require(is_valid, "success_rate_clip", success_rate_clip, "lie in (0, 0.5)", "leave it unset for 1/(2G)")


def clipped_success_rate(rate_P1: Tensor, groups: RewardGroups, clip: float | None) -> Tensor:
    """p'_g = clip(p_g, c, 1 - c), (P, 1), with c = 1/(2G) where unset: inert for binary rewards."""
    bound = 1 / (2 * groups.rewards_PG.shape[1]) if clip is None else clip
    return rate_P1.clamp(bound, 1 - bound)


@dataclass
class AGRAE(Reweighting):
    """
    Asymmetric weights over prompts and over the sign of the advantage.

    Args:
        base (`AdvantageEstimator`, *optional*, defaults to `GRPO()`):
            The estimator whose advantages A are multiplied.
        attenuation_threshold (`float`, *optional*, defaults to `1.0`):
            alpha in (0, 1]: the success rate from which positive advantages count in full.
        sample_level (`bool`, *optional*, defaults to `True`):
            Whether to apply W_g.
        group_level (`bool`, *optional*, defaults to `True`):
            Whether to damp positive advantages.
        easy_weight (`str`, *optional*, defaults to `"sqrt_one_minus_p"`):
            Denominator of the easy-focused term: the paper's sqrt(1 - p), or `"one_minus_sqrt_p"`, the code's.
        curriculum_scale (`float`, *optional*, defaults to `0.5`):
            gamma, above 0.
        success_rate_clip (`float`, *optional*):
            c in (0, 0.5); None: 1/(2G).
        omega_ema (`float`, *optional*, defaults to `0.0`):
            Weight of earlier batches in omega, in [0, 1); above 0 it departs from the paper and becomes state.
    """

    attenuation_threshold: float = 1.0
    sample_level: bool = True
    group_level: bool = True
    easy_weight: str = "sqrt_one_minus_p"
    curriculum_scale: float = 0.5
    success_rate_clip: float | None = None
    omega_ema: float = 0.0
    omega: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        alpha, gamma, ema = self.attenuation_threshold, self.curriculum_scale, self.omega_ema
        require(0 < alpha <= 1, "attenuation_threshold", alpha, "lie in (0, 1]", "use 1.0, the paper's for MATH")
        weights = ("sqrt_one_minus_p", "one_minus_sqrt_p")
        require(self.easy_weight in weights, "easy_weight", self.easy_weight, f"be one of {weights}", "pick one")
        require(0 < gamma < math.inf, "curriculum_scale", gamma, "be above 0 and finite", "use 0.5, the paper's value")
        require(0 <= ema < 1, "omega_ema", ema, "lie in [0, 1)", "use 0.0, the paper's rule")
        check_success_rate_clip(self.success_rate_clip)

    def estimate(self, groups: RewardGroups) -> Tensor:
        base_PG = self.base_advantages(groups)
        rate_P1 = self.success_rate(groups)
        advantages_PG = base_PG * self._weight(groups, rate_P1) if self.sample_level else base_PG
        if self.group_level:
            advantages_PG = torch.where(base_PG > 0, advantages_PG * self._attenuation(groups), advantages_PG)
        return torch.where(rate_P1.isnan(), base_PG, advantages_PG)

    def update(self, groups: RewardGroups) -> None:
        super().update(groups)
        omega = self._success_level(groups)
        if self.omega_ema > 0 and not math.isnan(omega):
            self.omega = omega

    def metrics(self, groups: RewardGroups) -> dict[str, float]:
        is_mixed_P1 = is_mixed(groups.rewards_PG)
        weights = self._weight(groups, self.success_rate(groups))[is_mixed_P1].cpu().double()
        advantages_PG = self.estimate(groups)
        positive = advantages_PG.clamp(min=0).nansum(dim=1).mean().item()
        negative = advantages_PG.clamp(max=0).nansum(dim=1).mean().item()
        numbers = {
            "omega": self._success_level(groups),
            "attenuation": self._attenuation(groups),
            "weight_mean": weights.mean().item(),
            "weight_min": weights.min().item() if len(weights) else math.nan,
            "weight_max": weights.max().item() if len(weights) else math.nan,
            "sum_pos": positive,
            "sum_neg": negative,
            "neg_pos_ratio": -negative / positive if positive else math.nan,
        }
        return super().metrics(groups) | {f"a_grae/{name}": value for name, value in numbers.items()}

    def _success_level(self, groups: RewardGroups) -> float:
        """omega: the batch's success rate, averaged over time where `omega_ema` asks for it."""
        omega = batch_mean(groups.success_PG)
        return omega if self.omega is None else self.omega_ema * self.omega + (1 - self.omega_ema) * omega

    def _attenuation(self, groups: RewardGroups) -> float:
        return min(1.0, self._success_level(groups) / self.attenuation_threshold)

    def _weight(self, groups: RewardGroups, rate_P1: Tensor) -> Tensor:
        """W_g, (P, 1); 1 where every answer is right, or wrong."""
        omega = self._success_level(groups)
        clipped_P1 = clipped_success_rate(rate_P1, groups, self.success_rate_clip)
        if self.easy_weight == "sqrt_one_minus_p":
            hard_P1, easy_P1 = clipped_P1.sqrt(), (1 - clipped_P1).sqrt()
        else:
            hard_P1, easy_P1 = clipped_P1.sqrt() + RELEASED_EPS, 1 - clipped_P1.sqrt() + RELEASED_EPS
        weight_P1 = self.curriculum_scale * (omega / hard_P1 + (1 - omega) / easy_P1)
        return torch.where((rate_P1 <= 0) | (rate_P1 >= 1), 1.0, weight_P1)


def paper_math() -> AGRAE:
    """The paper's runs on MATH."""
    return AGRAE()


def paper_multimodal() -> AGRAE:
    """The paper's runs on Geo3K and medical data, where training collapses easily."""
    return AGRAE(attenuation_threshold=0.5)


def official_formula() -> AGRAE:
    """The formula of the released code, whose shipped configuration never reaches it."""
    return AGRAE(base=GRPO(advantage_eps=1e-6), easy_weight="one_minus_sqrt_p")
