"""`grpo-ext plot`: a run's folder, finished or not, as a picture on one page."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from grpo_ext.cli.commands import CommandParser, one_sentence_errors
from grpo_ext.pictures import draw_run
from grpo_ext.reward_log import has_log, read_batches
from grpo_ext.run_history import BatchTally, RunHistory, from_logs

STATE_FILE = "trainer_state.json"
FORMATS = (".png", ".pdf", ".svg")
NO_HISTOGRAM = "For success rates over time, train with `--log_rewards true`."


def newest_logs(run: Path) -> list[dict[str, Any]]:
    """
    `log_history` of the run, from the folder or its newest checkpoint, whichever got further; empty without any.

    A state that cannot be read is passed over: its run may have been killed while it wrote it.
    """
    checkpoints = [path for path in run.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    checkpoints.sort(key=lambda path: int(path.name.split("-")[1]), reverse=True)
    own = _read_state(run)
    for checkpoint in checkpoints:
        state = _read_state(checkpoint)
        if state is not None:
            newest = state if own is None or state["global_step"] > own["global_step"] else own
            return newest["log_history"]
    return [] if own is None else own["log_history"]


def _read_state(folder: Path) -> dict[str, Any] | None:
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_whole = isinstance(state, dict) and {"global_step", "log_history"} <= state.keys()
    return state if is_whole else None


def read_batches_of(run: Path) -> BatchTally:
    """What the reward log knows of each generated training batch; empty without a reward log."""
    tally = BatchTally()  # by the step that a batch trains first; the reward log counts the steps before it
    if has_log(run):
        for batch in read_batches(run):
            tally.add(batch.step + 1, batch.groups, batch.advantages_PG)
    return tally


def read_run(run: Path) -> RunHistory:
    """
    All that a run's folder has to draw; what the reward log knows beyond the last logged step is added to the logs.

    Args:
        run (`Path`):
            The run's `output_dir`, or one of its checkpoints.

    Returns:
        [`RunHistory`].

    Raises:
        `ValueError`: where there is no such folder, or nothing to draw in it.
    """
    if not run.is_dir():
        raise ValueError(f"RUN should be the folder of a run, found `{run}`, which is none: pass its `--output_dir`.")
    logs, tally = newest_logs(run), read_batches_of(run)
    last_step = max((entry["step"] for entry in logs if "step" in entry), default=-1)
    history = from_logs(logs + tally.logs(after_step=last_step), title=run.resolve().name)
    history.histogram = tally.histogram()
    if history.is_empty:
        raise ValueError(
            f"RUN should hold logged steps, found neither a {STATE_FILE} with rewards nor a reward log in `{run}`: "
            "pass the `--output_dir` of a run that logged at least once."
        )
    return history


def parse(argv: list[str]) -> tuple[Path, Path]:
    """The run's folder and the picture's file."""
    parser = CommandParser("plot", "Draws a run on one page, readable in black and white.")
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's `--output_dir`, or one of its checkpoints")
    parser.add_argument("--output", type=Path, help="the picture, as .png, .pdf or .svg (default: RUN/run.png)")
    arguments = parser.parse_args(argv)
    output = arguments.output or arguments.run / "run.png"
    if output.suffix.lower() not in FORMATS:
        raise ValueError(f"`--output` should end in {', '.join(FORMATS)}, found `{output}`: rename it.")
    return arguments.run, output


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    run, output = parse(sys.argv[1:] if argv is None else argv)
    history = read_run(run)
    draw_run(history).savefig(output, dpi=120)
    if not history.histogram.counts:
        sys.stdout.write(f"{NO_HISTOGRAM}\n")
    sys.stdout.write(f"{output}\n")
