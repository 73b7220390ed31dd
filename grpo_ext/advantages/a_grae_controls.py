"""The four control groups of A-GRAE (arXiv 2602.05548, Table 1 and section 4.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_ext.advantages.a_grae import check_success_rate_clip, clipped_success_rate
from grpo_ext.advantages.reweighting import Reweighting
from grpo_ext.estimator import require
from grpo_ext.groups import RewardGroups


@dataclass
class Dominance(Reweighting):
    """
    An abstract control: positive advantages times a factor.

    Args:
        dominance_factor (`float`, *optional*, defaults to `10.0`):
            beta, above 1.
    """

    dominance_factor: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        factor = self.dominance_factor
        require(factor > 1, "dominance_factor", factor, "be above 1", "use 10.0, the paper's value")

    def scale_positive(self, groups: RewardGroups, factor: float) -> Tensor:
        """The base's advantages (P, G), the positive ones times `factor`."""
        advantages_PG = self.base_advantages(groups)
        return torch.where(advantages_PG > 0, advantages_PG * factor, advantages_PG)


@dataclass
class PositiveDominant(Dominance):
    """Positive advantages times beta, `dominance_factor`."""

    def estimate(self, groups: RewardGroups) -> Tensor:
        return self.scale_positive(groups, self.dominance_factor)


@dataclass
class NegativeDominant(Dominance):
    """Positive advantages divided by beta, `dominance_factor`."""

    def estimate(self, groups: RewardGroups) -> Tensor:
        return self.scale_positive(groups, 1 / self.dominance_factor)


@dataclass
class Focus(Reweighting):
    """
    An abstract control: advantages times gamma over the root of a rate that lies strictly between 0 and 1.

    Args:
        curriculum_scale (`float`, *optional*, defaults to `0.5`):
            gamma, above 0.
        success_rate_clip (`float`, *optional*):
            The rate is kept this far from 0 and 1, in (0, 0.5); None: 1/(2G).
    """

    curriculum_scale: float = 0.5
    success_rate_clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        gamma = self.curriculum_scale
        require(gamma > 0, "curriculum_scale", gamma, "be above 0", "use 0.5, the paper's value")
        check_success_rate_clip(self.success_rate_clip)

    def divide_by_root(self, groups: RewardGroups, rate_P1: Tensor) -> Tensor:
        """The base's advantages (P, G) times gamma / sqrt(rate), where the rate lies strictly in (0, 1)."""
        advantages_PG = self.base_advantages(groups)
        root_P1 = clipped_success_rate(rate_P1, groups, self.success_rate_clip).sqrt()
        is_between_P1 = (rate_P1 > 0) & (rate_P1 < 1)
        return torch.where(is_between_P1, advantages_PG * self.curriculum_scale / root_P1, advantages_PG)


@dataclass
class HardFocused(Focus):
    """Advantages times gamma / sqrt(p): hard prompts weigh more (gamma is `curriculum_scale`)."""

    def estimate(self, groups: RewardGroups) -> Tensor:
        return self.divide_by_root(groups, self.success_rate(groups))


@dataclass
class EasyFocused(Focus):
    """Advantages times gamma / sqrt(1 - p): easy prompts weigh more (gamma is `curriculum_scale`)."""

    def estimate(self, groups: RewardGroups) -> Tensor:
        return self.divide_by_root(groups, 1 - self.success_rate(groups))
