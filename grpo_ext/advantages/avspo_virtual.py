"""How many virtual rewards AVSPO adds to a collapsed group, and which (arXiv 2605.21125, eq. 8, 9, Table 2)."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_ext.estimator import Component, require


class VirtualCountRule(Component, ABC):
    """K_g: the number of virtual rewards of a collapsed group."""

    uses_sensitivity: ClassVar[bool] = True

    @abstractmethod
    def raw_count(self, num_scored_P1: Tensor, collapse_rate: float, sensitivity: float) -> Tensor:
        """The unclipped, unrounded count, (P, 1)."""

    def count(self, num_scored_P1: Tensor, collapse_rate: float, sensitivity: float) -> Tensor:
        """K_g in 1 .. n_g, (P, 1); the slack keeps rounding from pushing an exact product up."""
        raw_P1 = self.raw_count(num_scored_P1.cpu().double(), collapse_rate, sensitivity)
        return torch.minimum((raw_P1 - 1e-9).ceil().clamp(min=1).long().to(num_scored_P1.device), num_scored_P1)


@dataclass
class PowerCount(VirtualCountRule):
    """ceil(n * ACR^alpha), the printed formula (eq. 8)."""

    def raw_count(self, num_scored_P1: Tensor, collapse_rate: float, sensitivity: float) -> Tensor:
        return num_scored_P1 * collapse_rate**sensitivity


@dataclass
class LinearCount(VirtualCountRule):
    """ceil(alpha * n * sqrt(ACR)), which fits the counts the ablation reports."""

    def raw_count(self, num_scored_P1: Tensor, collapse_rate: float, sensitivity: float) -> Tensor:
        return sensitivity * num_scored_P1 * math.sqrt(collapse_rate)


@dataclass
class FixedCount(VirtualCountRule):
    """
    The same number for every group, at most its scored rows.

    Args:
        virtual_count (`int`):
            K, the number of virtual rewards, at least 1.
    """

    virtual_count: int
    uses_sensitivity: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.virtual_count >= 1, "virtual_count", self.virtual_count, "be at least 1", "use 4")

    def raw_count(self, num_scored_P1: Tensor, collapse_rate: float, sensitivity: float) -> Tensor:
        return torch.full_like(num_scored_P1, float(self.virtual_count))


class VirtualStrategy(Component, ABC):
    """v_k: the virtual rewards of a collapsed group, in the success scale."""

    uses_anchor_reward: ClassVar[bool] = False

    @abstractmethod
    def rewards(self, value_P1: Tensor, count_P1: Tensor, anchor_reward: float, batch: int) -> Tensor:
        """
        Virtual rewards (P, K), read up to each group's count; K is the largest count.

        Args:
            value_P1 (`torch.Tensor`):
                The group's common success value c, above 0 where its answers are right.
            count_P1 (`torch.Tensor`):
                K_g.
            anchor_reward (`float`):
                Largest virtual reward of an all-incorrect group.
            batch (`int`):
                Number of generation batches seen, the same on every rank.
        """

    @staticmethod
    def ranks(value_P1: Tensor, count_P1: Tensor) -> Tensor:
        """k = 1 .. K for every group, (P, K), in the dtype and on the device of `value_P1`."""
        rank_1K = torch.arange(1, int(count_P1.max()) + 1, dtype=value_P1.dtype, device=value_P1.device)
        return rank_1K.expand(len(value_P1), -1)


@dataclass
class StratifiedRewards(VirtualStrategy):
    """c (1 - k/(K+1)) below a right group, anchor (K-k+1)/K above a wrong one (eq. 9)."""

    uses_anchor_reward: ClassVar[bool] = True

    def rewards(self, value_P1: Tensor, count_P1: Tensor, anchor_reward: float, batch: int) -> Tensor:
        rank_PK = self.ranks(value_P1, count_P1)
        below_PK = value_P1 * (1 - rank_PK / (count_P1 + 1))
        above_PK = anchor_reward * (count_P1 - rank_PK + 1) / count_P1
        return torch.where(value_P1 > 0, below_PK, above_PK)


@dataclass
class UniformRewards(VirtualStrategy):
    """
    Uniform on [0, 1], drawn by a generator of its own, so that all ranks and a resumed run draw the same.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            With the number of batches seen it seeds the generator.
    """

    seed: int = 0

    def rewards(self, value_P1: Tensor, count_P1: Tensor, anchor_reward: float, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + batch)
        drawn_PK = torch.rand(self.ranks(value_P1, count_P1).shape, generator=generator, dtype=torch.float64)
        return drawn_PK.to(value_P1.dtype).to(value_P1.device)


@dataclass
class ConstantRewards(VirtualStrategy):
    """
    The same value for all ("fixed" in the paper).

    Args:
        value (`float`, *optional*, defaults to `0.5`):
            The constant, in [0, 1].
    """

    value: float = 0.5

    def __post_init__(self) -> None:
        require(0 <= self.value <= 1, "value", self.value, "lie in [0, 1]", "use 0.5, the paper's value")

    def rewards(self, value_P1: Tensor, count_P1: Tensor, anchor_reward: float, batch: int) -> Tensor:
        return torch.full_like(self.ranks(value_P1, count_P1), self.value)


@dataclass
class ExponentialRewards(VirtualStrategy):
    """
    decay^k; the paper's own formula is not recoverable.

    Args:
        decay (`float`, *optional*, defaults to `0.5`):
            The base of the power, in (0, 1).
    """

    decay: float = 0.5

    def __post_init__(self) -> None:
        require(0 < self.decay < 1, "decay", self.decay, "lie in (0, 1)", "use 0.5")

    def rewards(self, value_P1: Tensor, count_P1: Tensor, anchor_reward: float, batch: int) -> Tensor:
        return self.decay ** self.ranks(value_P1, count_P1)


@dataclass
class NoVirtualRewards(VirtualStrategy):
    """None at all, which leaves collapsed groups at advantage 0: plain GRPO."""

    def rewards(self, value_P1: Tensor, count_P1: Tensor, anchor_reward: float, batch: int) -> Tensor:
        return torch.full_like(self.ranks(value_P1, count_P1), torch.nan)
