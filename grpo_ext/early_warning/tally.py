"""
Metrics pooled over batches, and how sure they make one. Python's numbers alone.

A share of few groups says little, so shares are pooled as counts (share times groups) and compared with a limit by the
lower end of Wilson's interval, with each other by the z of two proportions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite, nan, sqrt
from typing import Any

GROUP_SHARES = ("acr/rate", "acr/all_correct", "acr/all_incorrect", "acr/other", "acr/after", "acr/float_noise")
"""Shares of the comparable groups (those with two scored rows)."""


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that are finite numbers."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float) and isfinite(value)}


def lower_bound(share: float, count: float, z: float) -> float:
    """Lower end of Wilson's interval of a share of `count` cases, in [0, 1]; 0 without a case."""
    if count <= 0:
        return 0.0
    center = share + z**2 / (2 * count)
    spread = z * sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, (center - spread) / (1 + z**2 / count))


def rise_z(first: float, num_first: float, last: float, num_last: float) -> float:
    """z of two proportions, above 0 where the share rose; 0 where either has no case or both agree."""
    if min(num_first, num_last) <= 0 or first == last:
        return 0.0
    pooled = (first * num_first + last * num_last) / (num_first + num_last)
    return (last - first) / sqrt(pooled * (1 - pooled) * (1 / num_first + 1 / num_last))


@dataclass
class Batch:
    """Metrics of one generated training batch, or means over `num_batches` of them, which begin after `start`."""

    metrics: dict[str, float]
    start: int
    num_batches: int = 1

    @property
    def num_groups(self) -> float:
        """Comparable groups; where the run did not log how many, what there are at least."""
        return self.num_batches * self.metrics.get("groups/num", self.metrics.get("groups/at_least", 1.0))

    def num_cases(self, name: str) -> float:
        """The cases of which a metric is a share or a mean: groups, or batches."""
        if name in GROUP_SHARES or name == "completions/frac_duplicates":
            return self.num_groups
        unscorable = self.metrics.get("groups/frac_unscorable", 0.0)
        if name == "groups/frac_unscorable" and unscorable < 1:
            return self.num_groups / (1 - unscorable)
        return self.num_batches


class Tally:
    """Metrics pooled over batches, by their cases."""

    def __init__(self, batches: Iterable[Batch] = ()) -> None:
        self.first: Batch | None = None
        self.last: Batch | None = None
        self._sums: dict[str, float] = {}
        self._cases: dict[str, float] = {}
        for batch in batches:
            self.add(batch)

    def add(self, batch: Batch) -> None:
        """Counts one more batch."""
        self.first, self.last = self.first or batch, batch
        for name, value in batch.metrics.items():
            cases = batch.num_cases(name)
            self._sums[name] = self._sums.get(name, 0.0) + value * cases
            self._cases[name] = self._cases.get(name, 0.0) + cases

    def cases(self, name: str) -> float:
        """Groups (or batches) behind a metric; 0 where it was not logged."""
        return self._cases.get(name, 0.0)

    def mean(self, name: str) -> float:
        """The pooled share or mean, NaN where there is none."""
        return self._sums[name] / self._cases[name] if self.cases(name) else nan

    def exceeds(self, name: str, limit: float, z: float) -> bool:
        """Whether a share lies above a limit by z standard errors."""
        return lower_bound(self.mean(name), self.cases(name), z) > limit

    @property
    def span(self) -> str:
        """Which batches these are, in words."""
        if self.first is None or self.last is None:
            return "no batch"
        return f"batches {self.first.start + 1} to {self.last.start + self.last.num_batches}"
