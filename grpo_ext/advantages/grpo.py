"""GRPO: DeepSeekMath, Shao et al., arXiv 2402.03300; and its settings in TRL.

A_i = (r_i - mean(r)) / (std(r) + eps), mean and std over the group. With `scale_rewards="batch"` the std is the
whole batch's, with "none" nothing divides (Dr.GRPO, Liu et al., arXiv 2503.20783). With
`multi_objective_aggregation="normalize_then_sum"` (GDPO, Liu et al., arXiv 2601.05242) each reward function is
normalised in its group, then the weighted sum over the batch.
"""

from dataclasses import dataclass

from torch import Tensor

from grpo_ext.estimator import AdvantageEstimator, require
from grpo_ext.groups import RewardGroups
from grpo_ext.statistics import EPS, batch_std, group_mean, group_std


def check_scale(std_ddof: int, advantage_eps: float) -> None:
    """The checks of the two arguments that every standardising estimator has."""
    require(std_ddof in (0, 1), "std_ddof", std_ddof, "be 0 or 1", "use 1, the sample standard deviation of TRL")
    require(advantage_eps >= 0, "advantage_eps", advantage_eps, "be at least 0", f"use {EPS}, TRL's value")


@dataclass
class GRPO(AdvantageEstimator):
    """
    TRL's own advantages, bit for bit.

    Args:
        scale_rewards (`str`, *optional*):
            `"group"`, `"batch"` or `"none"`. None: the trainer's setting, `"group"` without a trainer.
        multi_objective_aggregation (`str`, *optional*):
            `"sum_then_normalize"` or `"normalize_then_sum"`, which needs `rewards_PGF` and `reward_weights_F`
            and ignores `scale_rewards`. None: the trainer's setting, the former without a trainer.
        std_ddof (`int`, *optional*, defaults to `1`):
            1 for the sample standard deviation, 0 for the population's.
        advantage_eps (`float`, *optional*, defaults to `1e-4`):
            eps, added to the standard deviation.

    Example:
        >>> import torch
        >>> GRPO(scale_rewards="none").estimate(RewardGroups(torch.tensor([[1.0, 0.0, 0.0, 0.0]])))
        tensor([[ 0.7500, -0.2500, -0.2500, -0.2500]])
    """

    scale_rewards: str | None = None
    multi_objective_aggregation: str | None = None
    std_ddof: int = 1
    advantage_eps: float = EPS

    def __post_init__(self) -> None:
        scales = ("group", "batch", "none", None)
        require(self.scale_rewards in scales, "scale_rewards", self.scale_rewards, f"be one of {scales}", "pick one")
        orders = ("sum_then_normalize", "normalize_then_sum", None)
        order = self.multi_objective_aggregation
        require(order in orders, "multi_objective_aggregation", order, f"be one of {orders}", "pick one")
        check_scale(self.std_ddof, self.advantage_eps)

    def estimate(self, groups: RewardGroups) -> Tensor:
        if self.multi_objective_aggregation == "normalize_then_sum":
            return groups.restrict(self._normalize_then_sum(groups))
        advantages_PG = groups.rewards_PG - group_mean(groups.rewards_PG)
        if self.scale_rewards == "batch":
            advantages_PG = advantages_PG / (batch_std(groups.rewards_PG, self.std_ddof) + self.advantage_eps)
        elif self.scale_rewards != "none":
            advantages_PG = advantages_PG / (group_std(groups.rewards_PG, self.std_ddof) + self.advantage_eps)
        return groups.restrict(advantages_PG)

    def _normalize_then_sum(self, groups: RewardGroups) -> Tensor:
        if groups.rewards_PGF is None or groups.reward_weights_F is None:
            raise ValueError(
                '`GRPO(multi_objective_aggregation="normalize_then_sum")` should get `rewards_PGF` and '
                "`reward_weights_F`, found none: pass the rewards of each function, or sum before normalising."
            )
        # With one completion per prompt (evaluation only) TRL divides by eps alone; the numerator is 0 anyway.
        rewards_PGF = groups.rewards_PGF
        std_P1F = group_std(rewards_PGF, self.std_ddof)
        if rewards_PGF.shape[1] == 1:
            std_P1F = std_P1F.nan_to_num(nan=0.0)
        normalized_PGF = (rewards_PGF - group_mean(rewards_PGF)) / (std_P1F + self.advantage_eps)
        sum_PG = (normalized_PGF * groups.reward_weights_F).nansum(dim=2)
        sum_PG = groups.restrict(sum_PG)
        return (sum_PG - sum_PG.nanmean()) / (batch_std(sum_PG, self.std_ddof) + self.advantage_eps)
