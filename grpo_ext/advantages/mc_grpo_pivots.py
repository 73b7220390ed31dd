"""Which of the completions at the median MC-GRPO leaves out (arXiv 2601.22582; the choice is ours)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_ext.estimator import Component
from grpo_ext.groups import RewardGroups


class PivotRule(Component, ABC):
    """Picks one candidate per group; ties go to the lowest index."""

    @abstractmethod
    def priority(self, groups: RewardGroups) -> Tensor:
        """A number per completion (P, G); the candidate with the smallest is the pivot."""

    def choose(self, candidates_PG: Tensor, groups: RewardGroups) -> Tensor:
        """The pivot among the candidates, bool (P, G) with one True per group that has a candidate."""
        priority_PG = self.priority(groups).float().masked_fill(~candidates_PG, torch.inf)
        is_best_PG = candidates_PG & (priority_PG == priority_PG.amin(dim=1, keepdim=True))
        return is_best_PG & (is_best_PG.cumsum(dim=1) == 1)


def position(groups: RewardGroups) -> Tensor:
    """0 .. G-1 for every group, (P, G)."""
    rewards_PG = groups.rewards_PG
    return torch.arange(rewards_PG.shape[1], device=rewards_PG.device).expand_as(rewards_PG)


def lengths(groups: RewardGroups) -> Tensor:
    """`lengths_PG`, or an error that says who needs it."""
    if groups.lengths_PG is None:
        raise ValueError(
            "The pivot rules `LongestPivot` and `ShortestPivot` should get `lengths_PG`, found none: pass the "
            "completion lengths to `RewardGroups`, or use `FirstPivot()`."
        )
    return groups.lengths_PG


@dataclass
class FirstPivot(PivotRule):
    """The candidate with the lowest index."""

    def priority(self, groups: RewardGroups) -> Tensor:
        return position(groups)


@dataclass
class LastPivot(PivotRule):
    """The candidate with the highest index."""

    def priority(self, groups: RewardGroups) -> Tensor:
        return -position(groups)


@dataclass
class LongestPivot(PivotRule):
    """The longest candidate; needs `lengths_PG`."""

    def priority(self, groups: RewardGroups) -> Tensor:
        return -lengths(groups)


@dataclass
class ShortestPivot(PivotRule):
    """The shortest candidate; needs `lengths_PG`."""

    def priority(self, groups: RewardGroups) -> Tensor:
        return lengths(groups)
