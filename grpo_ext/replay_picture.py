"""A replay as a picture that reads in black and white: one row per method, one column per question."""

from typing import TYPE_CHECKING, Any

from grpo_ext.pictures import MatplotlibMissingError
from grpo_ext.replay import Outcome, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, ROW_HEIGHT, MARGIN_HEIGHT = 10.0, 0.5, 1.9
BARS: dict[str, dict[str, Any]] = {
    "outline": {"facecolor": "white", "edgecolor": "black"},
    "hatched": {"facecolor": "0.85", "edgecolor": "black", "hatch": "////"},
}


def draw_replay(report: Report, title: str = "") -> "Figure":
    """
    Draws what each method made of a log: groups without a signal, completions it silences or turns, advantage mass.

    Args:
        report ([`Report`]):
            What `replay` gave; methods that could not be replayed are left out.
        title (`str`, *optional*, defaults to `""`):
            What stands above the picture.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        `ValueError`: where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MatplotlibMissingError from error
    outcomes = [outcome for outcome in report.outcomes if outcome.error is None]
    figure = Figure(figsize=(WIDTH, ROW_HEIGHT * len(outcomes) + MARGIN_HEIGHT), layout="constrained")
    figure.suptitle(title)
    groups, completions, mass = figure.subplots(1, 3, sharey=True)
    shares = [outcome.shares() for outcome in outcomes]
    _draw_pair(groups, "share of groups without a signal", shares, collapse_before="before", collapse_after="after")
    groups.set_yticks(range(len(outcomes)), [_label(outcome) for outcome in outcomes])
    groups.invert_yaxis()
    _draw_pair(completions, "share of completions", shares, frac_silent="silent", frac_opposite_sign="sign turned")
    rows = range(len(outcomes))
    mass.barh(rows, [share["mass_pos"] for share in shares], height=0.6, label="positive", **BARS["outline"])
    mass.barh(rows, [share["mass_neg"] for share in shares], height=0.6, label="negative", **BARS["hatched"])
    mass.axvline(0.0, color="black", linewidth=1.0)
    _finish(mass, "sum of advantages per group")
    return figure


def _draw_pair(axes: "Axes", label: str, shares: list[dict[str, float]], **names: str) -> None:
    """Two thin bars per method, from 0 to 1."""
    styles = (BARS["outline"], BARS["hatched"])
    for offset, style, (name, text) in zip((-0.2, 0.2), styles, names.items(), strict=True):
        places = [row + offset for row in range(len(shares))]
        axes.barh(places, [share[name] for share in shares], height=0.36, label=text, **style)
    axes.set_xlim(0, 1)
    _finish(axes, label)


def _finish(axes: "Axes", label: str) -> None:
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize="small")


def _label(outcome: Outcome) -> str:
    name = outcome.method.rsplit(":", 1)[-1]
    return f"{name}\nG = {outcome.num_generations}"
