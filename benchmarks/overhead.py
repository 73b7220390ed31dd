"""What our own code costs in a training step of the embedded task, plain `GRPO()`.

    python benchmarks/overhead.py [--steps 20] [--output outputs/overhead.json]

Every method of ours and of TRL's that one of them wraps gets a clock, which stops while the other kind runs; so the
time inside our own code is known without comparing runs. The ratios of whole steps stand beside TRL's to itself.
"""

import argparse
import functools
import inspect
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl import GRPOTrainer
from update import save

from grpo_ext import AdvantageGRPOTrainer
from grpo_ext.cli import train as command
from grpo_ext.cli.arguments import parse
from grpo_ext.compact import CompactGRPOTrainer
from grpo_ext.watching import WatchedGRPOTrainer

RUNS = {
    "stock": (GRPOTrainer, ["--compact_updates", "false"]),
    "ours, compact_updates=False": (AdvantageGRPOTrainer, ["--compact_updates", "false"]),
    "ours, compact_updates=False, log_rewards=True": (
        AdvantageGRPOTrainer,
        ["--compact_updates", "false", "--log_rewards", "true"],
    ),
    "ours": (AdvantageGRPOTrainer, []),
    "stock again": (GRPOTrainer, ["--compact_updates", "false"]),
}


class Clock:
    """Seconds spent in our methods, without those of TRL that they call."""

    def __init__(self) -> None:
        self.own, self.since = 0.0, 0.0
        self.owners: list[bool] = [False]

    def watch(self, owner: type, name: str, is_ours: bool) -> None:
        method: Callable = vars(owner)[name]

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.switch(self.owners[-1])
            self.owners.append(is_ours)
            try:
                return method(*args, **kwargs)
            finally:
                self.switch(self.owners.pop())

        setattr(owner, name, timed)

    def switch(self, was_ours: bool) -> None:
        """Charges the time since the last switch."""
        now = time.perf_counter()
        self.own += (now - self.since) * was_ours
        self.since = now


def watch_all(clock: Clock) -> None:
    """Our methods that stand in the place of one of TRL's or of transformers', and those."""
    theirs = set()
    for owner in (CompactGRPOTrainer, WatchedGRPOTrainer, AdvantageGRPOTrainer):
        for name in [name for name, value in vars(owner).items() if inspect.isfunction(value)]:
            bases = [base for base in GRPOTrainer.__mro__ if name in vars(base)]
            if bases and not name.startswith("__"):
                clock.watch(owner, name, is_ours=True)
                theirs.add((bases[0], name))
    for base, name in theirs:
        clock.watch(base, name, is_ours=False)


def make_trainer(trainer_class: type[GRPOTrainer], words: list[str]) -> GRPOTrainer:
    """The command line's trainer, or TRL's with the same arguments."""

    def build(*args: Any, advantage_estimator: Any, **kwargs: Any) -> GRPOTrainer:
        own = {"advantage_estimator": advantage_estimator} if trainer_class is AdvantageGRPOTrainer else {}
        return trainer_class(*args, **own, **kwargs)

    command.AdvantageGRPOTrainer = build
    return command.make_trainer(parse(["--method", "grpo", *words]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("outputs/overhead.json"))
    options = parser.parse_args()
    clock, steps, shares = Clock(), {}, {}
    watch_all(clock)
    with tempfile.TemporaryDirectory() as folder:
        for run, (trainer_class, words) in RUNS.items():
            fixed = f"--max_steps {options.steps} --save_strategy no --output_dir {folder} --logging_steps 1".split()
            trainer = make_trainer(trainer_class, [*words, *fixed])
            clock.own, start = 0.0, time.perf_counter()
            clock.since = start
            trainer.train()
            shares[run] = clock.own / (time.perf_counter() - start)
            steps[run] = [log["step_time"] for log in trainer.state.log_history if "step_time" in log]
    stock = statistics.median(steps["stock"])
    print("| run | step / stock's | inside our code |\n|---|---|---|")  # noqa: T201
    for run, times in steps.items():
        low, median, high = (value / stock for value in statistics.quantiles(times, n=4))
        print(f"| {run} | {median:.3f} ({low:.3f} to {high:.3f}) | {shares[run]:.4%} |")  # noqa: T201
    save(options.output, {"inside_our_code": shares, "step_seconds": steps})


if __name__ == "__main__":
    main()
