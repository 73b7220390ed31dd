"""
What the metrics of a run have shown so far, as counts of groups, and how sure they make one. Python's numbers alone.

A share of few groups says little, so shares are pooled over batches as counts (share times groups) and compared with a
limit by the lower end of Wilson's interval, with each other by the z of two proportions.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan, nan, sqrt

from grpo_ext.limits import Limits

GROUP_SHARES = ("acr/rate", "acr/all_correct", "acr/all_incorrect", "acr/other", "acr/after", "acr/float_noise")
"""Shares of the comparable groups (those with two scored rows)."""

ENTROPIES = ("entropy", "entropy_live")
"""The entropy of all rows, or, where the update computes the live rows only, of these."""


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
        """Comparable groups; one per batch where the run did not log how many."""
        return self.num_batches * self.metrics.get("groups/num", 1.0)

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


class Evidence:
    """
    All that the rules look at, in bounded memory.

    Args:
        limits (`Limits`):
            What the windows are.
        start (`int`, *optional*, defaults to `0`):
            Batches of the run that were not seen, because it was resumed.
    """

    def __init__(self, limits: Limits, start: int = 0) -> None:
        self.limits = limits
        self.num_batches = start
        self.num_seen = 0
        self.seen: set[str] = set()
        self.early, self.first = Tally(), Tally()
        self.constant_reward: float | None = None
        self.constant_groups = 0.0
        self.is_constant = start == 0
        self.first_entropies: dict[str, list[float]] = {name: [] for name in ENTROPIES}
        self.last_entropies = {name: deque[float](maxlen=limits.entropy_lines) for name in ENTROPIES}
        self.max_groups = 0.0
        self._last: deque[Batch] = deque()
        self._num_first = 0

    def add(self, metrics: dict[str, float], num_batches: int = 1) -> None:
        """Counts the metrics of a batch (or the means over several), of a log line, or of both at once."""
        metrics = {name: value for name, value in metrics.items() if _is_number(value)}
        self.seen |= metrics.keys()
        for name in ENTROPIES:
            if name in metrics:
                first, last = self.first_entropies[name], self.last_entropies[name]
                (first if len(first) < self.limits.entropy_lines else last).append(metrics[name])
        if "acr/rate" in metrics:
            self._add_batch(Batch(metrics, self.num_batches, num_batches))

    def _add_batch(self, batch: Batch) -> None:
        self.num_batches += batch.num_batches
        self.num_seen += batch.num_batches
        if self.num_batches <= self.limits.early_batches:
            self.early.add(batch)
        self.max_groups = max(self.max_groups, batch.num_cases("groups/frac_unscorable") / batch.num_batches)
        if self._num_first < self.limits.window:
            self._num_first += batch.num_batches
            self.first.add(batch)
        else:
            self._last.append(batch)
        while self._last and self._num_last - self._last[0].num_batches >= self.limits.window:
            self._last.popleft()
        self._look_for_a_constant(batch)

    @property
    def _num_last(self) -> int:
        return sum(batch.num_batches for batch in self._last)

    def _look_for_a_constant(self, batch: Batch) -> None:
        """Whether all completions since the first batch got one and the same reward."""
        reward = batch.metrics.get("reward")
        if reward is None or batch.num_groups == 0:
            return
        if self.constant_reward is None:
            self.constant_reward = reward
        agrees = abs(reward - self.constant_reward) <= 1e-6 * max(1.0, abs(reward))
        self.is_constant = self.is_constant and agrees and batch.metrics["acr/rate"] >= 1 - 1e-9
        self.constant_groups += batch.num_groups

    @property
    def has_last(self) -> bool:
        """Whether the last window is full; it does not overlap the first."""
        return self._num_last >= self.limits.window

    @property
    def last(self) -> Tally:
        """The last window; until it is full the first."""
        return Tally(self._last) if self.has_last else self.first


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isnan(value)
