"""What the metrics of a run have shown so far, in bounded memory. Python's numbers alone."""

from collections import deque

from grpo_ext.early_warning.limits import Limits
from grpo_ext.early_warning.tally import Batch, Tally, numbers

ENTROPIES = ("entropy", "entropy_live")
"""The entropy of all rows, or, where the update computes the live rows only, of these."""

LOGGED = (*ENTROPIES, "avspo/threshold")
"""What is taken from a log line, beside the metrics of each batch."""


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
        self.early, self.first, self.last = Tally(), Tally(), Tally()
        self.constant_reward: float | None = None
        self.constant_groups, self.constant_batches = 0.0, 0
        self.is_constant = start == 0
        self.first_entropies: dict[str, list[float]] = {name: [] for name in ENTROPIES}
        self.last_entropies = {name: deque[float](maxlen=limits.entropy_lines) for name in ENTROPIES}
        self.max_groups = 0.0
        self._last: deque[Batch] = deque()
        self._num_first = 0

    def add(self, metrics: dict[str, float], num_batches: int = 1) -> None:
        """Counts the metrics of a batch (or the means over several), of a log line, or of both at once."""
        metrics = numbers(metrics)
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
        self.last = Tally(self._last) if self.has_last else self.first
        self._look_for_a_constant(batch)

    @property
    def _num_last(self) -> int:
        return sum(batch.num_batches for batch in self._last)

    @property
    def has_last(self) -> bool:
        """Whether `last` is a window of its own, which the first one does not overlap."""
        return self._num_last >= self.limits.window

    def _look_for_a_constant(self, batch: Batch) -> None:
        """Whether all completions since the first batch got one and the same reward."""
        reward = batch.metrics.get("reward")
        if reward is None or batch.num_groups == 0:
            return
        if self.constant_reward is None:
            self.constant_reward = reward
        agrees = abs(reward - self.constant_reward) <= 1e-6 * max(1.0, abs(reward))
        self.is_constant = self.is_constant and agrees and batch.metrics["acr/rate"] >= 1 - 1e-9
        if self.is_constant:
            self.constant_groups += batch.num_groups
            self.constant_batches += batch.num_batches

    @property
    def was_constant(self) -> bool:
        """Whether that went on for long enough to be told."""
        limits = self.limits
        return self.constant_groups >= limits.constant_groups and self.constant_batches >= limits.min_batches
