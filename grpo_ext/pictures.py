"""A run on one page, readable in black and white: hatches, line styles and labels say what colours say.

Nothing here touches pyplot, so a picture leaves no state behind; matplotlib is the extra `plot`.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from grpo_ext.panels import draw_collapse, draw_histogram, draw_level, draw_reward, draw_zero_std
from grpo_ext.run_history import RunHistory, window_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, PANEL_HEIGHT, MARGIN_HEIGHT, MAX_HEIGHT = 8.0, 2.3, 0.7, 10.0
"""Inches: a picture fits on a page, A4 or letter."""


class MatplotlibMissingError(ValueError):
    """There is nothing to draw with."""

    def __init__(self) -> None:
        super().__init__("A picture should be drawn with matplotlib, found none: `pip install 'grpo-ext[plot]'`.")


def draw_run(history: RunHistory, figure: "Figure | None" = None) -> "Figure":
    """
    Draws a run: reward, collapse with causes, threshold or anchor, and groups by success rate over time.

    What the run does not have is left out, and the others get its room. Of a long run the points are means of
    neighbouring logged values, as the label of the steps then says.

    Args:
        history ([`RunHistory`]):
            What to draw.
        figure (`matplotlib.figure.Figure`, *optional*):
            A figure of an earlier call, which is cleared and used again.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        `ValueError`: where matplotlib is missing.

    Example:
        >>> from grpo_ext.run_history import from_logs
        >>> draw_run(from_logs([{"step": 1, "reward": 0.5}], title="a run")).axes[0].get_ylabel()
        'mean reward'
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise MatplotlibMissingError from error
    figure = Figure(layout="constrained") if figure is None else figure
    figure.clear()
    draws = _panels(history)
    figure.set_size_inches(WIDTH, min(PANEL_HEIGHT * max(1, len(draws)) + MARGIN_HEIGHT, MAX_HEIGHT))
    figure.suptitle(history.title)
    if draws:
        column = figure.subplots(len(draws), 1, sharex=True, squeeze=False)[:, 0]
        for draw, axes in zip(draws, column, strict=True):
            draw(axes)
        size = window_size(max(len(series.steps) for series in (history.reward, history.after, history.zero_std)))
        means = f" (lines: means of {size} logged values)" if size > 1 else ""
        column[-1].set_xlabel(f"optimizer step{means}")
        column[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def _panels(history: RunHistory) -> list["Callable[[Axes], None]"]:
    """What draws each panel that the run has, from top to bottom."""
    panels: list[Callable[[Axes], None]] = []
    if history.reward.steps or history.evaluation.steps:
        panels.append(partial(draw_reward, reward=history.reward, evaluation=history.evaluation))
    if history.causes:
        panels.append(partial(draw_collapse, causes=history.causes, after=history.after))
    elif history.zero_std.steps:
        panels.append(partial(draw_zero_std, zero_std=history.zero_std))
    panels.extend(partial(draw_level, level=level) for level in history.levels)
    if history.histogram.counts:
        panels.append(partial(draw_histogram, histogram=history.histogram))
    return panels
