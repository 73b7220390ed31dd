"""Read-only observers of training: they are told about every batch and change nothing."""

from collections.abc import Collection
from typing import Any

from torch import Tensor
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from grpo_ext.diagnostics import FIRST_BATCHES, CollapseHistory
from grpo_ext.early_warning import LOGGED, EarlyWarning, Finding, Limits, check_rules, forecast
from grpo_ext.groups import RewardGroups

CAUSES = {
    "all_correct": "in groups that were all correct",
    "all_incorrect": "in groups that were all incorrect",
    "other": "in groups with equal rewards between right and wrong",
    "unscorable": "without a reward",
    "excluded": "left out by the estimator",
    "baseline": "right at their group's baseline",
}
"""How each cause of `diagnostics.idle_completions` reads in a sentence."""


class AdvantageCallback(TrainerCallback):
    """A callback that `AdvantageGRPOTrainer` tells about each generated training batch."""

    def on_advantages(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        groups: RewardGroups,
        advantages_PG: Tensor,
        history: CollapseHistory,
    ) -> None:
        """Called after the estimator has spoken; `history` counts this batch already."""

    def on_batch_metrics(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        metrics: dict[str, float],
        history: CollapseHistory,
    ) -> None:
        """Called right after that with what `diagnostics.batch_metrics` says of the batch."""


class AdvantageCollapseCallback(AdvantageCallback):
    """Says at the end of training what share of the completions taught nothing, and why."""

    def __init__(self) -> None:
        self._history: CollapseHistory | None = None

    def on_advantages(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        groups: RewardGroups,
        advantages_PG: Tensor,
        history: CollapseHistory,
    ) -> None:
        self._history = history

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._history is not None and state.is_world_process_zero:
            tqdm.write(summarize(self._history))


class EarlyWarningCallback(AdvantageCallback):
    """
    Says once, in plain words, what goes wrong and what to change; it can stop the run.

    Args:
        limits (`Limits`, *optional*):
            From where on a figure is worth a sentence.
        stop_on (`Collection[str]`, *optional*, defaults to `()`):
            Rules at which training stops (`grpo_ext.early_warning.RULES`); a run that saves checkpoints saves one.
        forecast (`bool`, *optional*, defaults to `False`):
            Whether to say the forecast of arXiv 2605.21125 after 100 batches, with its scope.

    Raises:
        `ValueError`: where `stop_on` names no rule.
    """

    def __init__(self, limits: Limits | None = None, stop_on: Collection[str] = (), *, forecast: bool = False) -> None:
        self.limits = limits or Limits()
        self.stop_on = check_rules(stop_on)
        self.forecast = forecast
        self._watch: EarlyWarning | None = None
        self._stops = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._watch, self._stops = None, False

    def on_batch_metrics(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        metrics: dict[str, float],
        history: CollapseHistory,
    ) -> None:
        if self._watch is None:  # a resumed run's beginning was not seen
            self._watch = EarlyWarning(self.limits, start=history.num_earlier + history.num_batches - 1)
        self._tell(self._watch.observe(metrics), state)
        is_due = history.num_batches == FIRST_BATCHES and not history.num_earlier
        if self.forecast and is_due and state.is_world_process_zero:
            tqdm.write(forecast(history.metrics()["acr/first_100"]))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **kwargs: Any,
    ) -> None:
        if self._watch is not None:
            metrics = {name: logs[name] for name in LOGGED if name in logs}
            self._tell(self._watch.observe(metrics), state)
            self.on_step_end(args, state, control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Not before: transformers would leave the step between two micro-batches, and its batch untrained.
        if self._stops:
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy != SaveStrategy.NO

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._watch is None and state.is_world_process_zero:
            tqdm.write("The early warning saw no batch: for a plain `GRPOTrainer` call `watch_rewards(trainer)` first.")

    def _tell(self, findings: list[Finding], state: TrainerState) -> None:
        # Every rank sees the same gathered numbers, so all stop at the same step.
        for finding in findings:
            is_end = finding.name in self.stop_on
            if state.is_world_process_zero:
                ending = f" Training stops here, as `stop_on` asks for `{finding.name}`." if is_end else ""
                tqdm.write(f"Warning ({finding.name}): {finding.text}{ending}")
            self._stops = self._stops or is_end


def summarize(history: CollapseHistory) -> str:
    """One line: the share of completions that taught nothing, by cause."""
    total = max(1, history.num_completions)
    idle = sum(history.num_idle.values())
    line = f"{idle / total:.1%} of {history.num_completions:,} completions taught nothing"
    parts = [f"{count / total:.1%} {CAUSES[cause]}" for cause, count in history.num_idle.items() if count]
    return f"{line}: {', '.join(parts)}." if parts else f"{line}."
