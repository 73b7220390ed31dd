"""`grpo-ext replay`: a run's rewards through any estimators, as a table, a JSON file and a picture."""

import argparse
import json
import sys
from pathlib import Path

from grpo_ext.advantages import METHODS
from grpo_ext.cli.commands import CommandParser, one_sentence_errors, positive
from grpo_ext.cli.records import read_state
from grpo_ext.completions import FOLDER, is_completion_table, read_completions
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.pictures import MatplotlibMissingError
from grpo_ext.replay import Outcome, Report, replay, replay_run
from grpo_ext.replay_picture import draw_replay
from grpo_ext.resolution import find_method
from grpo_ext.reward_log import has_log
from grpo_ext.reward_log.writer import FOLDER as LOG_FOLDER

COLUMNS = {
    "collapse_before": "before",
    "collapse_after": "after",
    "frac_silent": "silent",
    "frac_woken": "woken",
    "frac_opposite_sign": "opposite",
    "mass_pos": "mass +",
    "mass_neg": "mass -",
}
LEGEND = """before, after: share of groups without a signal, before and after the method
silent: share of completions with advantage zero or left out; woken: not silent, though GRPO leaves them so
opposite: share of completions whose advantage has the opposite sign of GRPO's; mass: sum of advantages per group"""


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = CommandParser("replay", "Sends the logged rewards of a run through any methods, in order, state and all.")
    parser.add_argument(
        "source", nargs="+", type=Path, help="run folder with a reward log, or TRL's completion tables (parquet)"
    )
    parser.add_argument(
        "--method", nargs="+", default=list(METHODS), help="names or package.module:Class; unset: all of this package"
    )
    parser.add_argument("--output", type=Path, help="folder for replay.json and replay.png; unset: the run's")
    parser.add_argument("--num_generations", type=positive, help="completions per prompt, for TRL's tables")
    parser.add_argument("--reward_weights", nargs="+", type=float, help="one per reward function, for TRL's tables")
    return parser


def find_run(source: list[Path]) -> Path:
    """
    What was named first, or the run whose log it is a part of: a part alone lacks what methods with a memory remember.
    """
    folder = source[0].parent
    is_part = source[0].is_file() and source[0].name.startswith("part-") and has_log(folder)
    if is_part and len({path.parent for path in source}) > 1:
        raise ValueError("Parts should be those of one log, found several folders: replay them one by one.")
    return folder if is_part else source[0]


def make_method(name: str) -> AdvantageEstimator:
    """The method of a name, with its default arguments."""
    method = find_method(name)
    try:
        return method()
    except TypeError as error:
        raise ValueError(f"`--method` should name classes that need no arguments, found {name} ({error}).") from error


def make_report(arguments: argparse.Namespace, first: Path) -> Report:
    """The replay that the flags ask for, of what `find_run` gave."""
    methods = {name: make_method(name) for name in arguments.method}
    if len(arguments.source) > 1 and any(path.is_dir() for path in arguments.source):
        raise ValueError(f"RUN should be one folder, found {len(arguments.source)}: replay them one by one.")
    if first.is_dir() and has_log(first):
        for flag in ("num_generations", "reward_weights"):
            if vars(arguments)[flag] is not None:
                raise ValueError(f"`--{flag}` should come with TRL's tables, found a reward log, which knows: drop it.")
        return replay_run(first, methods)
    paths = sorted((first / FOLDER).glob("*.parquet")) if first.is_dir() else arguments.source
    if not paths or not all(path.is_file() and is_completion_table(path) for path in paths):
        raise ValueError(
            f"`{first}` should be a run with a reward log, or hold TRL's completion tables, found neither: train with "
            "`log_rewards=True`."
        )
    state = read_state(paths[0].parent.parent)
    batches, remarks = read_completions(
        paths, arguments.num_generations, arguments.reward_weights, state["log_history"] if state else None
    )
    report = replay(batches, methods)
    report.remarks = remarks
    return report


def describe(report: Report) -> str:
    """The table, what it means, and what has to be known about it."""
    width = max(12, *(len(outcome.method) for outcome in report.outcomes)) + 2
    lines = [f"{'method':<{width}}{'G':>4}" + "".join(f"{label:>10}" for label in COLUMNS.values())]
    lines += [_row(outcome, width) for outcome in report.outcomes]
    lines.append(LEGEND)
    lines += report.remarks
    if report.check is not None:
        lines.append(report.check.describe())
    return "\n".join(lines)


def _row(outcome: Outcome, width: int) -> str:
    if outcome.error is not None:
        return f"{outcome.method:<{width}}cannot: {outcome.error}"
    shares = outcome.shares()
    values = [f"{shares[name]:>10.2f}" if name.startswith("mass") else f"{shares[name]:>10.1%}" for name in COLUMNS]
    return f"{outcome.method:<{width}}{outcome.num_generations:>4}" + "".join(values)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    arguments = make_parser().parse_args(argv)
    first = find_run(arguments.source)
    report = make_report(arguments, first)
    sys.stdout.write(describe(report) + "\n")
    run = first.parent if first.name == LOG_FOLDER else first
    folder = arguments.output or (run if run.is_dir() else run.parent)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "replay.json"
    path.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    sys.stdout.write(f"Numbers in {path}{_save_picture(report, folder, run)}.\n")


def _save_picture(report: Report, folder: Path, source: Path) -> str:
    """Where the picture is, or what it takes to get one."""
    try:
        figure = draw_replay(report, title=f"the rewards of {source.resolve().name} through other methods")
    except MatplotlibMissingError:
        return ", for a picture `pip install 'grpo-ext[plot]'`"
    figure.savefig(folder / "replay.png", dpi=120)
    return f", picture in {folder / 'replay.png'}"


if __name__ == "__main__":
    main()
