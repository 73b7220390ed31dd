"""What SIGTERM does to a run."""

from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_jit_checkpoint import CheckpointManager, JITCheckpointCallback
from transformers.utils import logging

logger = logging.get_logger(__name__)


class SigtermCallback(JITCheckpointCallback):
    """
    Transformers' checkpoint on SIGTERM (`enable_jit_checkpoint`), at the end of the step and agreed on by all ranks.
    Earlier in a step the estimator has seen a batch that a resumed run would sample again; and every rank hears the
    signal at its own moment, so that ranks on their own could stop at different steps. As there, the signal is heard
    from the trainer's construction to the end of its first `train`.
    """

    def __init__(self, manager: CheckpointManager) -> None:
        super().__init__()
        self.jit_manager: CheckpointManager = manager

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Not here: one rank may have heard of it later than another."""

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Not here: the step is not complete."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """A new training has not been asked to stop."""
        self.is_stopping = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Where any rank was asked to, saves at once and stops training."""
        accelerator = self.jit_manager.trainer.accelerator
        requested = torch.tensor([self.jit_manager.is_checkpoint_requested], device=accelerator.device)
        if not accelerator.gather(requested).any():
            return
        if control.should_evaluate:
            logger.warning(f"SIGTERM: the evaluation of step {state.global_step} is left out to save in time.")
        self.jit_manager.is_checkpoint_requested, self.is_stopping = False, True
        control.should_evaluate = False
        control.should_save = control.should_training_stop = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Transformers ends the epoch even so; the checkpoint is written already."""
        if self.is_stopping:
            control.should_evaluate = control.should_save = False
