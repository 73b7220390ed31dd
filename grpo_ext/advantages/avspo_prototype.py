"""The public prototype beside AVSPO (hexixiang/ACR@ca40ccf; the paper is arXiv 2605.21125).

Where every reward of the whole batch is 0, or every one is 1, each group gets one virtual reward of the opposite
extreme before mean and std are taken; otherwise plain GRPO. No threshold, no strata, no state.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_ext.advantages.grpo import GRPO, check_scale
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardGroups
from grpo_ext.statistics import EPS, group_mean, group_std, is_all_equal, num_scored


@dataclass
class AVSPOPrototype(AdvantageEstimator):
    """
    One opposite virtual reward per group when the whole batch agrees.

    Args:
        std_ddof (`int`, *optional*, defaults to `1`):
            1 for the sample standard deviation, 0 for the population's.
        advantage_eps (`float`, *optional*, defaults to `1e-4`):
            eps, added to the standard deviation.
    """

    training_only: ClassVar[bool] = True

    std_ddof: int = 1
    advantage_eps: float = EPS

    def __post_init__(self) -> None:
        check_scale(self.std_ddof, self.advantage_eps)

    def estimate(self, groups: RewardGroups) -> Tensor:
        rewards_PG = groups.rewards_PG
        scored = rewards_PG[groups.is_scored_PG]
        if (scored == 0).all() or (scored == 1).all():
            virtual_P1 = 1 - group_mean(rewards_PG)
            augmented_PK = torch.cat([rewards_PG, virtual_P1], dim=1)
            scale_P1 = group_std(augmented_PK, self.std_ddof) + self.advantage_eps
            advantages_PG = (rewards_PG - group_mean(augmented_PK)) / scale_P1
            return groups.restrict(advantages_PG.masked_fill(num_scored(rewards_PG) < 2, 0.0))
        advantages_PG = GRPO("group", std_ddof=self.std_ddof, advantage_eps=self.advantage_eps).estimate(groups)
        return groups.restrict(advantages_PG.masked_fill(is_all_equal(rewards_PG), 0.0))
