"""What papers share that multiply the advantages of another estimator."""

from dataclasses import dataclass, field

from torch import Tensor

from grpo_ext.advantages.grpo import GRPO
from grpo_ext.estimator import AdvantageEstimator, require
from grpo_ext.groups import RewardGroups
from grpo_ext.statistics import group_mean, is_all_equal, num_scored


@dataclass
class Reweighting(AdvantageEstimator):
    """
    An abstract wrapper: samples, excludes and remembers as its `base` does.

    Args:
        base (`AdvantageEstimator`, *optional*, defaults to `GRPO()`):
            The estimator whose advantages are multiplied.
    """

    base: AdvantageEstimator = field(default_factory=GRPO)

    def __post_init__(self) -> None:
        is_estimator = isinstance(self.base, AdvantageEstimator)
        require(is_estimator, "base", self.base, "be an advantage estimator", "pass an instance, `GRPO()` for one")
        self.num_extra_generations = self.base.num_extra_generations  # type: ignore[misc]
        self.count_excluded_tokens = self.base.count_excluded_tokens  # type: ignore[misc]

    def update(self, groups: RewardGroups) -> None:
        self.base.update(groups)

    def metrics(self, groups: RewardGroups) -> dict[str, float]:
        return self.base.metrics(groups)

    def excluded(self, groups: RewardGroups) -> Tensor | None:
        return self.base.excluded(groups)

    def base_advantages(self, groups: RewardGroups) -> Tensor:
        """The base's advantages (P, G); exactly 0 on all-equal groups of `GRPO`, which keeps float noise there."""
        advantages_PG = self.base.estimate(groups)
        if not isinstance(self.base, GRPO):
            return advantages_PG
        is_silent_P1 = is_all_equal(groups.rewards_PG)
        if self.base.multi_objective_aggregation == "normalize_then_sum":
            # Equal sums of unequal rewards do carry a signal there.
            for rewards_PG in groups.rewards_PGF.unbind(dim=2) if groups.rewards_PGF is not None else ():
                is_silent_P1 = is_silent_P1 & (is_all_equal(rewards_PG) | (num_scored(rewards_PG) < 2))
        return groups.restrict(advantages_PG.masked_fill(is_silent_P1, 0.0))

    @staticmethod
    def success_rate(groups: RewardGroups) -> Tensor:
        """p_g: mean success of each group (P, 1), NaN where no scored row has a success value."""
        return group_mean(groups.success_PG)
