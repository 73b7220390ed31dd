"""A method that this package does not know."""

from dataclasses import dataclass, field

from grpo_ext.advantages.reweighting import Reweighting
from grpo_ext.estimator import AdvantageEstimator


@dataclass
class WithDefaults(Reweighting):
    """A method from outside, with a list and a base that METHODS does not know."""

    base: AdvantageEstimator = field(default_factory=lambda: WithList())
    places: list[int] = field(default_factory=lambda: [1, 2])

    def estimate(self, groups):
        return self.base_advantages(groups)


@dataclass
class WithList(AdvantageEstimator):
    """Rewards as they are."""

    def estimate(self, groups):
        return groups.rewards_PG
