"""Anchor rules of HA-DW: what the model's accuracy is believed to be (arXiv 2601.08521, eq. 7-12, 134)."""

import statistics
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from grpo_ext.estimator import Component, require


class AnchorRule(Component, ABC):
    """A belief about the model's accuracy: two readers and one writer."""

    @abstractmethod
    def before(self, accuracy: float) -> float:
        """The belief before this batch is counted; the batch's own accuracy while there is none yet."""

    @abstractmethod
    def after(self, accuracy: float) -> float:
        """The belief once this batch is counted."""

    @abstractmethod
    def push(self, accuracy: float) -> None:
        """Counts this batch."""

    def metrics(self) -> dict[str, float]:
        """Numbers of this rule for the log."""
        return {}


@dataclass
class MovingAverage(AnchorRule):
    """
    The hard update: mean accuracy of the last batches (eq. 134).

    Args:
        window (`int`, *optional*, defaults to `10`):
            h, at least 1; the released code's value.
    """

    window: int = 10
    accuracies: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        require(self.window >= 1, "window", self.window, "be at least 1", "use 10, the released code's value")

    def before(self, accuracy: float) -> float:
        return statistics.fmean(self.accuracies or [accuracy])

    def after(self, accuracy: float) -> float:
        return statistics.fmean([*self.accuracies, accuracy][-self.window :])

    def push(self, accuracy: float) -> None:
        self.accuracies = [*self.accuracies, accuracy][-self.window :]


@dataclass
class AdaptiveForgetting(AnchorRule):
    """
    The soft update: C <- (1 - eta_t) C + eta_t y_t with eta_t = eta * std of the last m beliefs (eq. 8-11).

    As printed the rule can neither start nor leave a constant belief (no spread, no step), so the first `warmup`
    batches take the running mean and eta_t never falls below `forgetting_floor`.

    Args:
        forgetting_scale (`float`, *optional*, defaults to `10.0`):
            eta, above 0; the paper gives no value.
        stability_window (`int`, *optional*, defaults to `20`):
            m, at least 2; the paper gives no value.
        warmup (`int`, *optional*):
            Batches that take the running mean, at least 1. None: `stability_window`.
        forgetting_floor (`float`, *optional*, defaults to `0.05`):
            Smallest eta_t, in [0, 1]; 0 is the rule as printed.
    """

    forgetting_scale: float = 10.0
    stability_window: int = 20
    warmup: int | None = None
    forgetting_floor: float = 0.05
    beliefs: list[float] = field(init=False, default_factory=list)
    num_batches: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        scale, window, floor = self.forgetting_scale, self.stability_window, self.forgetting_floor
        require(scale > 0, "forgetting_scale", scale, "be above 0", "use 10.0")
        require(window >= 2, "stability_window", window, "be at least 2", "use 20")
        require(self.warmup is None or self.warmup >= 1, "warmup", self.warmup, "be at least 1", "leave it unset")
        require(0 <= floor <= 1, "forgetting_floor", floor, "lie in [0, 1]", "use 0.05")

    def before(self, accuracy: float) -> float:
        return self.beliefs[-1] if self.beliefs else accuracy

    def after(self, accuracy: float) -> float:
        rate = self.forgetting_rate()
        return (1 - rate) * self.before(accuracy) + rate * accuracy

    def push(self, accuracy: float) -> None:
        self.beliefs = [*self.beliefs, self.after(accuracy)][-self.stability_window :]
        self.num_batches += 1

    def metrics(self) -> dict[str, float]:
        return {"forgetting_rate": self.forgetting_rate()}

    def forgetting_rate(self) -> float:
        """eta_t: the weight of the next batch."""
        warmup = self.stability_window if self.warmup is None else self.warmup
        if self.num_batches < warmup:
            return 1 / (self.num_batches + 1)
        return min(1.0, max(self.forgetting_floor, self.forgetting_scale * statistics.pstdev(self.beliefs)))


@dataclass
class FixedAnchor(AnchorRule):
    """
    A constant belief (Table 2).

    Args:
        value (`float`, *optional*, defaults to `0.5`):
            The constant, in [0, 1].
    """

    value: float = 0.5

    def __post_init__(self) -> None:
        require(0 <= self.value <= 1, "value", self.value, "lie in [0, 1]", "use 0.5")

    def before(self, accuracy: float) -> float:
        return self.value

    def after(self, accuracy: float) -> float:
        return self.value

    def push(self, accuracy: float) -> None:
        """A fixed belief learns nothing."""
