"""What a run left to read, batch by batch: its reward log, or else the log lines of its trainer."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from grpo_ext.diagnostics import batch_metrics
from grpo_ext.early_warning import LOGGED
from grpo_ext.early_warning.tally import numbers
from grpo_ext.reward_log import has_log, read_batches

TRAINER_STATE = "trainer_state.json"


@dataclass
class Record:
    """What was logged of one batch, of several at once, or (without `acr/rate`) beside the batches."""

    metrics: dict[str, float]
    step: int
    num_batches: int = 1
    number: int | None = None
    """The batch's number in the run, where it is known."""


def read_state(run: Path) -> dict[str, Any] | None:
    """
    The newest trainer's state of a folder and its checkpoints; None where there is none.
    A state that cannot be read is passed over: its run may have been killed while it wrote it.
    """
    files = [path for path in (run / TRAINER_STATE, *run.glob(f"checkpoint-*/{TRAINER_STATE}")) if path.is_file()]
    states = [(path.stat().st_mtime, state) for path in files if (state := _read_json(path)) is not None]
    return max(states, key=lambda pair: (pair[0], pair[1]["global_step"]), default=(0.0, None))[1]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) and {"global_step", "log_history"} <= state.keys() else None


def read_log_lines(state: dict[str, Any] | None) -> list[Record]:
    """The training lines of `log_history`; without a note of the batches behind one, one batch per step."""
    records, previous = [], 0
    for line in (state or {}).get("log_history", []):
        metrics = numbers(line)
        step = int(line.get("step", previous))
        if "frac_reward_zero_std" in metrics:
            metrics.setdefault("acr/rate", metrics["frac_reward_zero_std"])
        if "acr/rate" in metrics or "loss" in metrics:
            records.append(Record(metrics, step, max(1, step - previous)))
            previous = step
    if not any("acr/after" in record.metrics for record in records):
        bound_groups(records)
    return records


def bound_groups(records: list[Record]) -> None:
    """
    Notes how many groups per batch TRL's shares speak of at least: a mean of k / P over b batches, in lowest terms, has
    a denominator that divides P b.
    """
    shares = [(record, record.metrics.get("frac_reward_zero_std")) for record in records]
    fractions = [(record, share, Fraction(share).limit_denominator(1000)) for record, share in shares if share]
    exact = [
        fraction.denominator / record.num_batches
        for record, share, fraction in fractions
        if abs(fraction - Fraction(share)) < 1e-6
    ]
    for record in records:
        record.metrics["groups/at_least"] = max([1.0, *exact])


def read_reward_log(run: Path, lines: list[Record]) -> Iterator[Record]:
    """Every batch of the reward log, and between them what only the log lines hold."""
    logged = [({name: line.metrics[name] for name in LOGGED if name in line.metrics}, line.step) for line in lines]
    for batch in read_batches(run):
        while logged and logged[0][1] < batch.step:
            yield Record(*logged.pop(0))
        yield Record(numbers(batch_metrics(batch.groups, batch.advantages_PG)), batch.step, number=batch.batch)
    yield from (Record(*line) for line in logged)


def read_records(run: Path) -> tuple[str, list[Record]]:
    """Where the numbers of a run come from, and the numbers."""
    if not run.is_dir():
        raise ValueError(f"A run should be a folder, found none at `{run}`: name the `output_dir` of a training run.")
    lines = read_log_lines(read_state(run))
    if has_log(run):
        return "reward log", list(read_reward_log(run, lines))
    if not any("acr/rate" in line.metrics for line in lines):
        raise ValueError(
            f"`{run}` should hold a reward log, or a {TRAINER_STATE} with logged rewards (in it or in a checkpoint), "
            "found neither: name the `output_dir` of a GRPO run that has logged a step."
        )
    return TRAINER_STATE, lines
