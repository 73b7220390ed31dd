"""The panels of a run's picture, each drawn on given axes: hatches, line styles and labels say what colours say."""

import math
from typing import TYPE_CHECKING, Any

from grpo_ext.diagnostics import SUCCESS_BINS
from grpo_ext.run_history import CAUSES, Histogram, Level, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

CAUSE_STYLES = {
    "all_correct": ("all correct", "#b7dfb0", "..."),
    "all_incorrect": ("all incorrect", "#d98880", "////"),
    "other": ("other equal rewards", "#f2f2f2", "xxxx"),
}
"""How each cause of collapse is drawn: label, face and hatch."""

MOST_MARKED = 40
"""Points of a line that are marked one by one; more would run together."""

LABEL_GAP = 0.1
"""Between two labels beside a panel, as a share of its height."""


def draw_reward(axes: "Axes", reward: Series, evaluation: Series) -> None:
    """Mean reward in training, and evaluations as points."""
    mean = reward.windowed()
    if mean.steps != reward.steps:
        axes.plot(reward.steps, reward.values, color="0.75", linewidth=0.5)
    lines = axes.plot(mean.steps, mean.values, "k-", linewidth=1.2, label="training")
    style: dict[str, Any] = {"markersize": 6, "markerfacecolor": "white", "linewidth": 1.2, "clip_on": False}
    if evaluation.steps:  # an empty line that is not clipped upsets the layout
        lines += axes.plot(evaluation.steps, evaluation.values, "o--", color="tab:blue", label="evaluation", **style)
    values = reward.values + evaluation.values
    if min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.03, 1.03)
    _finish(axes, "mean reward", lines)


def draw_collapse(axes: "Axes", causes: dict[str, Series], after: Series) -> None:
    """All-equal groups by cause, stacked, and what the method leaves without a signal."""
    from matplotlib.patheffects import withStroke

    means = [causes[cause].windowed() for cause in CAUSES]
    steps, shares, after = means[0].steps, [mean.values for mean in means], after.windowed()
    if len(steps) == 1:  # an area needs a width
        steps, shares = [steps[0] - 0.5, steps[0] + 0.5], [values * 2 for values in shares]
    areas = axes.stackplot(steps, *shares)
    for area, cause in zip(areas, CAUSES, strict=True):
        label, face, hatch = CAUSE_STYLES[cause]
        area.set(label=label, facecolor=face, hatch=hatch, edgecolor="0.25", linewidth=0.5)
    outline = [withStroke(linewidth=4, foreground="white")]  # stands out from the hatches
    label = "without a signal\nafter the method"
    lines = axes.plot(after.steps, after.values, "k--", linewidth=1.8, label=label, path_effects=outline)
    _mark(lines)
    axes.set(ylim=(0, 1.03), ylabel="share of groups\nwith equal rewards")
    # A thin area has no room for its name: the names stand beside the panel, in the order of the stack.
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.05), "frameon": False, "fontsize": "small"}
    axes.legend(handles=[*lines, *areas[::-1]], handleheight=1.6, **beside)


def draw_zero_std(axes: "Axes", zero_std: Series) -> None:
    """What TRL alone logs of collapse."""
    mean = zero_std.windowed()
    lines = axes.plot(mean.steps, mean.values, "k-", linewidth=1.2, label="frac_reward_zero_std\n(TRL's figure)")
    axes.set_ylim(-0.03, 1.03)
    _finish(axes, "share of groups\nwith equal rewards", lines)


def draw_level(axes: "Axes", level: Level) -> None:
    """A method's threshold or anchor, and the batch's number that it is held against."""
    batch, mean = level.batch.windowed(), level.level.windowed()
    lines = axes.plot(batch.steps, batch.values, ":", color="0.35", linewidth=1.4, label=level.batch_name)
    lines += axes.plot(mean.steps, mean.values, "k-", linewidth=1.8, label=level.name)
    axes.set_ylim(-0.03, 1.03)
    _finish(axes, f"{level.method}: {level.name}", lines)


def draw_histogram(axes: "Axes", histogram: Histogram) -> None:
    """Groups by success rate over time, darker where there are more."""
    shares = []
    for row in histogram.counts:
        totals = [sum(column) for column in zip(*histogram.counts, strict=True)]
        shares.append([count / total if total else math.nan for count, total in zip(row, totals, strict=True)])
    rows = range(len(SUCCESS_BINS) + 1)
    axes.patch.set(hatch="\\\\", edgecolor="0.6")  # shows where no group could be counted
    mesh = axes.pcolormesh(histogram.edges, rows, shares, cmap="Greys", vmin=0)
    axes.set_yticks([row + 0.5 for row in rows[:-1]], SUCCESS_BINS)
    axes.set_ylabel("groups by success rate")
    axes.figure.colorbar(mesh, cax=axes.inset_axes((1.03, 0.0, 0.03, 1.0)), label="share of groups")


def _finish(axes: "Axes", label: str, lines: "list[Line2D]") -> None:
    """The y label, and each line's name beside its end."""
    _mark(lines)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    low, high = axes.get_ylim()
    place = -math.inf
    ends = [(*_points(line)[-1], line) for line in lines if len(_points(line))]
    for step, value, line in sorted(ends, key=lambda end: end[1]):
        place = max(place + LABEL_GAP, (value - low) / (high - low))
        axes.annotate(
            str(line.get_label()),
            (step, value),
            (1.03, place),
            textcoords="axes fraction",
            color=line.get_color(),
            fontsize="small",
            verticalalignment="center",
            arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6},  # too thin and light for a line
        )


def _mark(lines: "list[Line2D]") -> None:
    """Marks the points of a line that has few, so that a single one shows too."""
    for line in lines:
        if len(_points(line)) <= MOST_MARKED and line.get_marker() == "None":
            line.set(marker=".", markersize=4)


def _points(line: "Line2D") -> Any:
    return line.get_xydata()
