"""`grpo-ext diagnose`: from a run folder to what is wrong and what to change. It reads, and writes nothing."""

import json
import sys
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path

from grpo_ext.cli.commands import CommandParser, one_sentence_errors
from grpo_ext.cli.records import TRAINER_STATE, read_records
from grpo_ext.diagnostics import FIRST_BATCHES
from grpo_ext.early_warning import RULES, EarlyWarning, Finding, forecast
from grpo_ext.early_warning.tally import Batch, Tally

COLLAPSE_RULES = {"constant_reward", "early_collapse", "late_collapse"}
"""Without one of them nobody has looked at whether the run can learn."""

STOCK = (
    'The rate is TRL\'s `frac_reward_zero_std`, which is wrong under `scale_rewards="batch"`, with rewards of None and '
    "with float noise; `AdvantageGRPOTrainer` with `GRPO()` trains the same and logs the causes."
)


@dataclass
class Diagnosis:
    """What the records of a run say."""

    source: str
    is_stock: bool
    num_batches: int = 0
    num_steps: int = 0
    findings: list[Finding] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=dict)
    forecast: str | None = None


# Diagnosing


def diagnose(run: Path) -> Diagnosis:
    """
    What is wrong with a run, from its reward log or else from what its trainer logged.

    Args:
        run (`Path`):
            The `output_dir` of a run, or a checkpoint.

    Raises:
        `ValueError`: where there is nothing to read.
    """
    source, records = read_records(run)
    first = next((record.number for record in records if record.number is not None), 0)
    watch, batches, start = EarlyWarning(start=first), [], first
    is_stock = source == TRAINER_STATE and not any("acr/after" in record.metrics for record in records)
    diagnosis = Diagnosis(source, is_stock)
    for record in records:
        diagnosis.findings += watch.observe(record.metrics, record.num_batches)
        diagnosis.num_steps = max(diagnosis.num_steps, record.step)
        if "acr/rate" in record.metrics:
            batches.append(Batch(record.metrics, start, record.num_batches))
            start += record.num_batches
    diagnosis.num_batches, diagnosis.silent = start - first, watch.silent()
    diagnosis.figures = summarize(batches)
    if start >= FIRST_BATCHES and first == 0:
        diagnosis.forecast = forecast(early_rate(batches))
    return diagnosis


def summarize(batches: list[Batch]) -> dict[str, float | None]:
    """Mean reward over the first and the last tenth, and the shares over the whole run."""
    tenth = max(1, len(batches) // 10)
    whole = Tally(batches)
    names = ("acr/rate", "acr/all_correct", "acr/all_incorrect", "acr/other", "acr/after")
    figures = {
        "reward_first": Tally(batches[:tenth]).mean("reward"),
        "reward_last": Tally(batches[-tenth:]).mean("reward"),
        **{name: whole.mean(name) for name in names},
    }
    return {name: None if isnan(value) else value for name, value in figures.items()}


def early_rate(batches: list[Batch]) -> float:
    """Mean collapse rate of the first batches that could be compared, as in the metric `acr/first_100`."""
    early = [item for item in batches if item.start < FIRST_BATCHES and item.num_groups]
    if "acr/first_100" in batches[-1].metrics:
        return batches[-1].metrics["acr/first_100"]
    total = sum(item.num_batches for item in early)
    return sum(item.metrics["acr/rate"] * item.num_batches for item in early) / max(1, total)


# Telling


def describe(diagnosis: Diagnosis) -> str:
    """The diagnosis as lines to read."""
    lines = [describe_run(diagnosis)]
    if diagnosis.is_stock:
        lines.append(STOCK)
    lines += [f"- {finding.text} ({finding.name})" for finding in diagnosis.findings]
    looked = [name for name in RULES if name not in diagnosis.silent]
    if not diagnosis.findings and COLLAPSE_RULES & set(looked):
        lines.append("Nothing that could be looked at keeps this run from learning.")
    elif not diagnosis.findings:
        lines.append(f"{diagnosis.num_batches} batches are too few to judge by.")
    lines.append(f"Looked at: {', '.join(looked) or 'nothing'}.")
    if diagnosis.silent:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in diagnosis.silent.items())
        lines.append(f"Could not look at: {reasons}.")
    if diagnosis.forecast:
        lines.append(diagnosis.forecast)
    return "\n".join(lines)


def describe_run(diagnosis: Diagnosis) -> str:
    """One line: how long the run is, its reward, and its collapse by cause."""
    shares, first, last = diagnosis.figures, diagnosis.figures["reward_first"], diagnosis.figures["reward_last"]
    source = diagnosis.source + (", taken as one batch per step" if diagnosis.source == TRAINER_STATE else "")
    parts = [f"{diagnosis.num_batches} batches in {diagnosis.num_steps} steps ({source})"]
    if first is not None and last is not None:
        parts.append(f"mean reward {first:.3f} at first, {last:.3f} at last")
    causes = [
        f"{value:.0%} {name.removeprefix('acr/').replace('_', ' ')}"
        for name, value in shares.items()
        if name in ("acr/all_correct", "acr/all_incorrect", "acr/other") and value is not None
    ]
    rate, after = shares["acr/rate"], shares["acr/after"]
    parts.append(f"equal rewards in {rate or 0.0:.0%} of the groups" + (f" ({', '.join(causes)})" if causes else ""))
    if after is not None:
        parts.append(f"{after:.0%} without an advantage after the method")
    return f"{'; '.join(parts)}."


def to_json(diagnosis: Diagnosis) -> str:
    """The same for a machine."""
    content = vars(diagnosis) | {"findings": [vars(finding) for finding in diagnosis.findings]}
    return json.dumps(content, indent=2)


@one_sentence_errors
def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    parser = CommandParser("diagnose", "Says what is wrong with a run, and what to do.")
    parser.add_argument("run", type=Path, help="the output_dir of a run, or a checkpoint; TRL's own runs do too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    diagnosis = diagnose(arguments.run)
    sys.stdout.write((to_json(diagnosis) if arguments.json else describe(diagnosis)) + "\n")
