"""What a run did, as numbers over optimizer steps: pure functions of its logs and of its generated batches."""

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from grpo_ext.diagnostics import SUCCESS_BINS, collapse_metrics, success_histogram
from grpo_ext.groups import RewardGroups
from grpo_ext.statistics import batch_mean

CAUSES = ("all_correct", "all_incorrect", "other")

LEVELS = {
    "avspo/threshold": ("AVSPO", "threshold", "acr/rate", "collapsed groups"),
    "ha_dw/anchor": ("HA-DW", "anchor", "ha_dw/batch_accuracy", "batch accuracy"),
}
"""A method's level in the log: its method and name, and the batch's number it is held against with what that is."""

MAX_WINDOWS = 60
"""Windows of steps in a picture: narrower ones could not be told apart."""


@dataclass
class Series:
    """A number over optimizer steps."""

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def windowed(self) -> "Series":
        """The mean of each window of neighbouring points, at its middle; a series of few points is itself."""
        places, values = _windows(self.steps), _windows(self.values)
        return Series([_mean(window) for window in places], [_mean(window) for window in values])


@dataclass
class Level:
    """What a method compares each batch with (threshold, anchor), and that number of the batch."""

    method: str
    name: str
    level: Series
    batch_name: str
    batch: Series


@dataclass
class Histogram:
    """
    Groups by success rate over time: `counts[bin][window]`, bins as in `diagnostics.success_histogram`; window w
    reaches from `edges[w]` to `edges[w + 1]`.
    """

    edges: list[float] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)


@dataclass
class RunHistory:
    """
    All that a picture of a run shows; what a run does not have is empty.

    Args:
        title (`str`, *optional*, defaults to `""`):
            What stands above the picture.
        reward, evaluation ([`Series`], *optional*):
            Mean reward in training and in evaluation.
        causes (`dict[str, Series]`, *optional*):
            Shares of all-equal groups by cause, at the same steps.
        after ([`Series`], *optional*):
            Share of groups without a signal once the estimator has spoken.
        zero_std ([`Series`], *optional*):
            TRL's `frac_reward_zero_std`, all that a run without our metrics knows of collapse.
        levels (`list[Level]`, *optional*):
            Thresholds and anchors.
        histogram ([`Histogram`], *optional*):
            Groups by success rate over time.

    Example:
        >>> from_logs([{"step": 1, "reward": 0.5}]).reward.values
        [0.5]
    """

    title: str = ""
    reward: Series = field(default_factory=Series)
    evaluation: Series = field(default_factory=Series)
    causes: dict[str, Series] = field(default_factory=dict)
    after: Series = field(default_factory=Series)
    zero_std: Series = field(default_factory=Series)
    levels: list[Level] = field(default_factory=list)
    histogram: Histogram = field(default_factory=Histogram)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        drawn = (self.reward.steps, self.evaluation.steps, self.causes, self.zero_std.steps, self.levels)
        return not any(drawn) and not self.histogram.counts


def from_logs(logs: list[dict[str, Any]], title: str = "") -> RunHistory:
    """The history that `log_history` of a trainer's state tells: all but the histogram."""
    collapsed = [entry for entry in logs if all(_is_number(entry.get(f"acr/{cause}")) for cause in CAUSES)]
    levels = []
    for name, (method, label, batch_metric, batch_name) in LEVELS.items():
        level = _series(logs, name)
        if level.steps:
            levels.append(Level(method, label, level, batch_name, _series(logs, batch_metric)))
    return RunHistory(
        title=title,
        reward=_series(logs, "reward"),
        evaluation=_series(logs, "eval_reward"),
        causes={cause: _series(collapsed, f"acr/{cause}") for cause in CAUSES} if collapsed else {},
        after=_series(logs, "acr/after"),
        zero_std=_series(logs, "frac_reward_zero_std"),
        levels=levels,
    )


def _series(logs: list[dict[str, Any]], name: str) -> Series:
    """The finite values of a metric; a batch without a scored row logs NaN, which JSON may have made null."""
    entries = [entry for entry in logs if "step" in entry and _is_number(entry.get(name))]
    return Series([entry["step"] for entry in entries], [entry[name] for entry in entries])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass
class BatchTally:
    """What a picture needs of each generated training batch: numbers alone, by step."""

    by_step: dict[int, list[tuple[dict[str, float], list[int]]]] = field(default_factory=dict)

    def add(self, step: int, groups: RewardGroups, advantages_PG: Tensor | None = None) -> None:
        """Counts one batch; without its advantages for the histogram alone."""
        metrics: dict[str, float] = {}
        if advantages_PG is not None:
            metrics = {"reward": batch_mean(groups.rewards_PG), **collapse_metrics(groups, advantages_PG)}
        self.by_step.setdefault(step, []).append((metrics, success_histogram(groups)))

    def logs(self, after_step: float = -math.inf) -> list[dict[str, float]]:
        """The mean metrics of each step beyond `after_step`, in the form of `log_history`."""
        entries = []
        for step in sorted(step for step in self.by_step if step > after_step):
            batches = [metrics for metrics, _ in self.by_step[step]]
            entries.append({"step": step, **{name: _mean([batch[name] for batch in batches]) for name in batches[0]}})
        return entries

    def histogram(self) -> Histogram:
        """Groups by success rate and window; empty where no batch had a readable success signal."""
        windows = _windows(sorted(self.by_step))
        columns = [[counts for step in steps for _, counts in self.by_step[step]] for steps in windows]
        counts = [[sum(batch[row] for batch in column) for column in columns] for row in range(len(SUCCESS_BINS))]
        if not any(map(any, counts)):
            return Histogram()
        last = sorted(self.by_step)[-2:]
        edges = [steps[0] - 0.5 for steps in windows]
        return Histogram([*edges, last[-1] - 0.5 + (last[-1] - last[0] or 1)], counts)


def window_size(num_points: int) -> int:
    """Neighbouring points to a window, so that there are at most `MAX_WINDOWS`."""
    return max(1, math.ceil(num_points / MAX_WINDOWS))


def _windows(points: list[Any]) -> list[list[Any]]:
    size = window_size(len(points))
    return [points[first : first + size] for first in range(0, len(points), size)]


def _mean(values: list[float]) -> float:
    """The mean of the finite values, NaN without one; a single value is itself."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan
