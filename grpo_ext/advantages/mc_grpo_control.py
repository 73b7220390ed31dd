"""The control arm of MC-GRPO's GSM8K code (lotusroot-kim/MC-GRPO@da07745, "drop_min_abs"; arXiv 2601.22582).

One extra completion as in MC-GRPO, mean and std over all of them, and the one with the smallest absolute reward
leaves the loss.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_ext.advantages.grpo import GRPO, check_scale
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardGroups
from grpo_ext.statistics import EPS, is_all_equal


@dataclass
class MeanControl(AdvantageEstimator):
    """
    Mean baseline over one extra completion, the smallest absolute reward left out.

    Args:
        std_ddof (`int`, *optional*, defaults to `1`):
            1 for the sample standard deviation, 0 for the population's.
        advantage_eps (`float`, *optional*, defaults to `1e-4`):
            eps, added to the standard deviation.
    """

    num_extra_generations: ClassVar[int] = 1
    training_only: ClassVar[bool] = True

    std_ddof: int = 1
    advantage_eps: float = EPS

    def __post_init__(self) -> None:
        check_scale(self.std_ddof, self.advantage_eps)

    def estimate(self, groups: RewardGroups) -> Tensor:
        advantages_PG = GRPO("group", std_ddof=self.std_ddof, advantage_eps=self.advantage_eps).estimate(groups)
        return groups.restrict(advantages_PG.masked_fill(is_all_equal(groups.rewards_PG), 0.0))

    def excluded(self, groups: RewardGroups) -> Tensor:
        """One row per group, bool (P, G): the first unscorable one, else the smallest absolute reward."""
        size_PG = groups.rewards_PG.abs().masked_fill(~groups.is_scored_PG, -torch.inf)
        is_smallest_PG = size_PG == size_PG.amin(dim=1, keepdim=True)
        return is_smallest_PG & (is_smallest_PG.cumsum(dim=1) == 1)
