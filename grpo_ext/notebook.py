"""A run's picture in a notebook, live. IPython is not imported outside of one."""

import sys
from collections.abc import Callable
from io import BytesIO
from typing import Any

from torch import Tensor
from transformers import TrainerControl, TrainerState, TrainingArguments

from grpo_ext.callbacks import AdvantageCallback
from grpo_ext.diagnostics import CollapseHistory
from grpo_ext.groups import RewardGroups
from grpo_ext.pictures import draw_run
from grpo_ext.run_history import BatchTally, RunHistory, from_logs


def notebook_display() -> Callable[[RunHistory], None] | None:
    """
    A function that shows a run in the notebook's current cell, in the place of what it showed before; None outside.

    Raises:
        `ValueError`: in a notebook without matplotlib.
    """
    if "IPython" not in sys.modules:  # a notebook has imported it
        return None
    from IPython import display, get_ipython

    shell = get_ipython()
    if shell is None or not shell.has_trait("kernel"):  # a plain interpreter, or IPython in a terminal
        return None
    figure = draw_run(RunHistory())
    handle = display.DisplayHandle()
    shown = False

    def show(history: RunHistory) -> None:
        nonlocal shown
        file = BytesIO()
        draw_run(history, figure).savefig(file, format="png", dpi=100)
        (handle.update if shown else handle.display)(display.Image(file.getvalue()))
        shown = True

    return show


class LivePictureCallback(AdvantageCallback):
    """
    Shows the run's picture in a notebook while it trains; outside a notebook it does nothing.

    Args:
        every (`int`, *optional*, defaults to `5`):
            Logging steps from one drawing to the next.

    Raises:
        `ValueError`: at the beginning of training in a notebook, where matplotlib is missing.
    """

    def __init__(self, every: int = 5) -> None:
        if every < 1:
            raise ValueError(f"`every` should be at least 1, found {every}: use 5, the default.")
        self.every = every
        self._tally = BatchTally()
        self._show: Callable[[RunHistory], None] | None = None
        self._num_logs = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._show = notebook_display() if state.is_world_process_zero else None
        self._num_logs = 0

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
        if self._show is not None:
            self._tally.add(state.global_step + 1, groups)  # the step that this batch trains first

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._num_logs % self.every == 0:
            self._draw(state)
        self._num_logs += 1

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._draw(state)

    def _draw(self, state: TrainerState) -> None:
        if self._show is None:
            return
        history = from_logs(state.log_history)
        history.histogram = self._tally.histogram()
        if not history.is_empty:
            self._show(history)
