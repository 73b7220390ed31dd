"""Logged rewards through any estimators: what each would have made of the same completions.

The rewards are those of the policy that was trained; another method would have trained another policy. So a replay
compares what methods do to the same batches, and not how far they would have come. Axes: see `groups.py`.
"""

import dataclasses
import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_ext.advantages import GRPO
from grpo_ext.diagnostics import ZERO, has_no_signal
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardGroups
from grpo_ext.resolution import SETTING_DEFAULTS, from_spec, resolve_estimator
from grpo_ext.reward_log import LoggedBatch, log_folder, read_attempts, read_batches
from grpo_ext.statistics import is_all_equal, num_comparable

DESCRIBED = {"identity", "device", "estimator", "state", "num_extra_generations"}
"""What `describe_run` says and a replay needs."""

TOLERANCE = 1e-6
"""What advantages may differ by between device types."""


@dataclass
class Outcome:
    """
    What one method made of a log. Counts are of groups with two scored rows, and of scored rows.

    `sum_pos` and `sum_neg` are the mass of the advantages, `num_opposite` the rows whose sign is the opposite of
    GRPO's, `num_silent` those with advantage zero or left out of the loss, `num_woken` those that are not though
    GRPO's is zero.
    """

    method: str
    num_generations: int = 0
    num_batches: int = 0
    num_groups: int = 0
    num_all_groups: int = 0
    num_collapsed: int = 0
    num_without_signal: int = 0
    num_rows: int = 0
    num_silent: int = 0
    num_woken: int = 0
    num_opposite: int = 0
    sum_pos: float = 0.0
    sum_neg: float = 0.0
    error: str | None = None

    def count(self, groups: RewardGroups, advantages_PG: Tensor, excluded_PG: Tensor | None, grpo_PG: Tensor) -> None:
        """Counts one batch, with the advantages of GRPO beside the method's."""
        is_scored_PG = groups.is_scored_PG
        own_PG = advantages_PG.nan_to_num(nan=0.0).double()
        is_silent_P1 = has_no_signal(groups, advantages_PG)
        sign_PG = own_PG.masked_fill((own_PG.abs() < ZERO) | is_silent_P1, 0.0).sign()
        if excluded_PG is not None:
            sign_PG = sign_PG.masked_fill(excluded_PG, 0.0)
        is_noise_P1 = has_no_signal(groups, grpo_PG)
        grpo_sign_PG = grpo_PG.nan_to_num(nan=0.0).masked_fill(is_noise_P1, 0.0).sign()
        self.num_batches += 1
        self.num_groups += num_comparable(groups.rewards_PG)
        self.num_all_groups += len(groups.rewards_PG)
        self.num_collapsed += int(is_all_equal(groups.rewards_PG).sum())
        self.num_without_signal += int(is_silent_P1.sum())
        self.num_rows += int(is_scored_PG.sum())
        self.num_silent += int(((sign_PG == 0) & is_scored_PG).sum())
        self.num_woken += int(((sign_PG != 0) & (grpo_sign_PG == 0) & is_scored_PG).sum())
        self.num_opposite += int((sign_PG * grpo_sign_PG < 0).sum())
        self.sum_pos += own_PG.clamp(min=0).sum().item()
        self.sum_neg += own_PG.clamp(max=0).sum().item()

    def shares(self) -> dict[str, float]:
        """The counts as shares, and the mass per group."""
        groups, rows = max(1, self.num_groups), max(1, self.num_rows)
        return {
            "collapse_before": self.num_collapsed / groups,
            "collapse_after": self.num_without_signal / groups,
            "mass_pos": self.sum_pos / max(1, self.num_all_groups),
            "mass_neg": self.sum_neg / max(1, self.num_all_groups),
            "frac_opposite_sign": self.num_opposite / rows,
            "frac_silent": self.num_silent / rows,
            "frac_woken": self.num_woken / rows,
        }


@dataclass
class Check:
    """Whether the method that ran gives the logged advantages again."""

    identity: str
    device: str
    num_batches: int = 0
    num_equal: int = 0
    largest_difference: float = 0.0
    error: str | None = None

    def compare(self, found_PG: Tensor, logged_PG: Tensor) -> None:
        """Compares one batch."""
        found_PG = found_PG.to(logged_PG)
        is_equal = torch.equal(found_PG.isnan(), logged_PG.isnan())
        difference = (found_PG - logged_PG).abs().nan_to_num(nan=0.0).max().item() if is_equal else torch.inf
        self.num_batches += 1
        self.num_equal += difference == 0.0
        self.largest_difference = max(self.largest_difference, difference)

    def describe(self) -> str:
        """One sentence."""
        if self.error is not None:
            return f"The run's own method, {self.identity}, could not be replayed. {self.error}"
        batches = f"the logged advantages of {self.num_batches:,} batches"
        if self.num_equal == self.num_batches:
            return f"{self.identity}, which ran, gives {batches} again, bit for bit."
        where = f"computed on {self.device} then, on cpu now"
        if self.largest_difference <= TOLERANCE and self.device != "cpu":
            return f"{self.identity}, which ran, gives {batches} again within {self.largest_difference:.1g} ({where})."
        return (
            f"{self.identity}, which ran, does NOT give {batches} again: {self.num_batches - self.num_equal:,} differ, "
            f"by up to {self.largest_difference:.2g} ({where})."
        )


@dataclass
class Report:
    """The outcomes of all methods, and the check of the one that ran, where a log says which."""

    outcomes: list[Outcome]
    check: Check | None = None
    remarks: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Everything, for machines."""
        rows = [dataclasses.asdict(outcome) | outcome.shares() for outcome in self.outcomes]
        check = dataclasses.asdict(self.check) if self.check else None
        return {"methods": rows, "check": check, "remarks": self.remarks}


def answer(estimator: AdvantageEstimator, groups: RewardGroups) -> tuple[Tensor, Tensor | None]:
    """What a trainer gets from an estimator in training: advantages (P, G), and excluded rows; then it learns."""
    if not groups.is_scored_PG.any():
        return groups.rewards_PG, None
    advantages_PG, excluded_PG = estimator.estimate(groups), estimator.excluded(groups)
    estimator.update(groups)
    return advantages_PG, excluded_PG


def replay(
    batches: Iterable[LoggedBatch],
    methods: dict[str, AdvantageEstimator],
    attempts: list[dict[str, Any]] | None = None,
) -> Report:
    """
    Sends logged training batches, in order, through estimators, state and all.

    Where a log has more completions per group than a method samples, it gets the first of them; where it has fewer,
    the method takes the group as if it had been sampled with its extra ones in it.

    Args:
        batches (`Iterable[LoggedBatch]`):
            What `read_batches` gives.
        methods (`dict[str, AdvantageEstimator]`):
            Name -> estimator.
        attempts (`list[dict]`, *optional*):
            What `read_attempts` gives: the settings of the run, and the check that its own method gives the logged
            advantages again.
    """
    known = {entry["attempt"]: entry for entry in attempts or []}
    for entry in known.values():
        if not set(entry) >= DESCRIBED:
            missing = min(DESCRIBED - set(entry))
            raise ValueError(
                f"Attempt {entry['attempt']} of a log should be described whole, found no `{missing}`: put the "
                "`run.json` back that was written beside the parts."
            )
    settings = SimpleNamespace(**(SETTING_DEFAULTS | (attempts[-1] if attempts else {})))
    contenders = [_enter(name, method, settings) for name, method in methods.items()]
    grpo = resolve_estimator(GRPO(), settings)
    own: AdvantageEstimator | None = None
    check: Check | None = None
    attempt = None
    for batch in batches:
        if known and batch.attempt != attempt:
            attempt = batch.attempt
            own, check = _begin_attempt(known[attempt], check)
        if own is not None and check is not None:
            _check_batch(own, check, batch)
        num_extra = known[batch.attempt]["num_extra_generations"] if known else 0
        _contest(batch, num_extra, contenders, grpo)
    return Report([outcome for outcome, _ in contenders], check)


def _enter(name: str, method: AdvantageEstimator, settings: Any) -> tuple[Outcome, AdvantageEstimator | None]:
    """A method with the run's settings, or why it cannot have them."""
    outcome = Outcome(name)
    try:
        return outcome, resolve_estimator(method, settings)
    except ValueError as error:
        outcome.error = str(error)
        return outcome, None


def _contest(
    batch: LoggedBatch,
    num_extra: int,
    contenders: list[tuple[Outcome, AdvantageEstimator | None]],
    grpo: AdvantageEstimator,
) -> None:
    """One batch, with `num_extra` completions per group beyond the run's G, through all methods."""
    references: dict[int, tuple[RewardGroups, Tensor]] = {}
    for outcome, estimator in contenders:
        if outcome.error is not None or estimator is None:
            continue
        width = batch.groups.rewards_PG.shape[1] - max(0, num_extra - estimator.num_extra_generations)
        if width not in references:
            groups = batch.groups.first(width)
            references[width] = groups, answer(grpo, groups)[0]
        groups, grpo_PG = references[width]
        outcome.num_generations = width - estimator.num_extra_generations
        try:
            outcome.count(groups, *answer(estimator, groups), grpo_PG)
        except ValueError as error:
            outcome.error = str(error)


def _begin_attempt(entry: dict[str, Any], check: Check | None) -> tuple[AdvantageEstimator | None, Check]:
    """The estimator that ran in an attempt, with the state it began with, and the check that goes on."""
    check = check or Check(entry["identity"], entry["device"])
    try:
        own = from_spec(entry["estimator"])
        assert isinstance(own, AdvantageEstimator)
        own.load_state_dict(entry["state"])
    except (ValueError, TypeError) as error:
        check.error = str(error)
        return None, check
    return own, check


def _check_batch(own: AdvantageEstimator, check: Check, batch: LoggedBatch) -> None:
    try:
        check.compare(answer(own, batch.groups)[0], batch.advantages_PG)
    except ValueError as error:
        check.error = str(error)


def replay_run(run: Path, methods: dict[str, AdvantageEstimator]) -> Report:
    """`replay` of a run folder's reward log."""
    return replay(read_batches(run), methods, read_attempts(log_folder(run)))


if __name__ == "__main__":
    importlib.import_module("grpo_ext.cli.replay").main()  # the command, which imports this module
