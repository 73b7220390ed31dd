"""`grpo-ext plot`: a run's folder, finished or not, as a picture on one page."""

import sys
from pathlib import Path

from grpo_ext.cli.commands import CommandParser, one_sentence_errors
from grpo_ext.cli.records import TRAINER_STATE, read_state
from grpo_ext.pictures import draw_run
from grpo_ext.reward_log import has_log, read_batches
from grpo_ext.run_history import BatchTally, RunHistory, from_logs

FORMATS = (".png", ".pdf", ".svg")
NO_HISTOGRAM = "For success rates over time, train with `--log_rewards true`."


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
    logs, tally = (read_state(run) or {}).get("log_history", []), read_batches_of(run)
    last_step = max((entry["step"] for entry in logs if "step" in entry), default=-1)
    history = from_logs(logs + tally.logs(after_step=last_step), title=run.resolve().name)
    history.histogram = tally.histogram()
    if history.is_empty:
        raise ValueError(
            f"RUN should hold logged steps, found neither a {TRAINER_STATE} with rewards nor a reward log in `{run}`: "
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
