"""`AdvantageGRPOTrainer`: TRL's `GRPOTrainer` with a place to change the advantage.

Beside `watching.py` and `compact.py` the one file where TRL's shape shows, and long for that reason. It wraps methods
of TRL and copies no body: what `watching.py` names for the advantages and rows left out of the loss, `train`,
`_save_checkpoint` and `_load_optimizer_and_scheduler` for exact resume. Axes: see `groups.py`.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import logging
from trl import GRPOConfig

from grpo_ext.batching import LOSS_SCALE, ROW_MEAN_LOSSES, check_exclusion, count_loss_tokens, mask_rows
from grpo_ext.checkpoint import (
    choose_checkpoint,
    collect_state,
    load_state,
    mark_complete,
    on_main_process,
    save_state,
)
from grpo_ext.compact import CompactGRPOTrainer
from grpo_ext.config import AdvantageGRPOConfig
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardGroups
from grpo_ext.preemption import SigtermCallback
from grpo_ext.resolution import for_evaluation, resolve_estimator
from grpo_ext.watching import WatchedGRPOTrainer

logger = logging.get_logger(__name__)


class AdvantageGRPOTrainer(WatchedGRPOTrainer, CompactGRPOTrainer):
    """
    `GRPOTrainer` whose advantages come from an estimator.

    Args:
        model, reward_funcs, args, ...:
            Every argument of `GRPOTrainer`, unchanged. `args` may be a plain `GRPOConfig`.
        advantage_estimator (`AdvantageEstimator` or `str`, *optional*):
            An instance, a name in METHODS, or a dotted path `package.module:Class`; the trainer works on a copy of
            an instance. None: `GRPO()`, which gives TRL's own advantages.

    Raises:
        `ValueError`: where a setting of `args` contradicts the estimator.
    """

    _restores_history = True
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "grpo_ext"]

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Callable | list | str | PreTrainedModel | None = None,
        args: GRPOConfig | None = None,
        *positional: Any,
        advantage_estimator: AdvantageEstimator | str | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = AdvantageGRPOConfig(f"{Path(name).name}-GRPO")
        self.advantage_estimator = resolve_estimator(advantage_estimator, args)
        # A plain `GRPOConfig` lacks our fields; their defaults are the class's attributes.
        self._settings = args if isinstance(args, AdvantageGRPOConfig) else AdvantageGRPOConfig
        super().__init__(model, reward_funcs, self._with_extra_generations(args), *positional, **kwargs)
        # TRL has taken its number; what is saved and logged is the user's.
        self.args.num_generations -= self.advantage_estimator.num_extra_generations
        self._watch(self._settings, self.advantage_estimator)
        stock = self.pop_callback(JITCheckpointCallback)  # None unless `enable_jit_checkpoint`
        if stock is not None:
            self.add_callback(SigtermCallback(stock.jit_manager))

    # The advantages

    def _assign_advantages(self, groups: RewardGroups, output: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        if not groups.is_scored_PG.any():
            advantages_PG, excluded_PG = groups.rewards_PG, None
            self._report_unscored()
        else:
            advantages_PG = self._compute_advantages(groups)
            excluded_PG = self._active_estimator().excluded(groups) if self.model.training else None
        advantages_N = advantages_PG.nan_to_num(nan=0.0).flatten().to(output["advantages"])
        output["advantages"] = self._local_rows(advantages_N, output)
        self._relog_advantages(advantages_N)
        if excluded_PG is not None:
            self._exclude(output, excluded_PG.flatten())
        return advantages_PG, excluded_PG

    def _compute_advantages(self, groups: RewardGroups) -> Tensor:
        """The hook: advantages (P, G) of one gathered generation batch. It only estimates."""
        return self._active_estimator().estimate(groups)

    def _active_estimator(self) -> AdvantageEstimator:
        return self.advantage_estimator if self.model.training else for_evaluation(self.advantage_estimator, self.args)

    def _observe(self, groups: RewardGroups, advantages_PG: Tensor, excluded_PG: Tensor | None) -> None:
        has_scored = bool(groups.is_scored_PG.any())
        if has_scored:
            self._log_metrics(self._active_estimator().metrics(groups))
        super()._observe(groups, advantages_PG, excluded_PG)
        if has_scored and self.model.training:
            self.advantage_estimator.update(groups)

    def _with_extra_generations(self, args: GRPOConfig) -> GRPOConfig:
        """A copy of the arguments in which TRL samples what the estimator needs; the user's are left alone."""
        extra = self.advantage_estimator.num_extra_generations
        if self._settings.num_extra_generations != extra:
            raise ValueError(
                f"`num_extra_generations` should be {extra} for `{self.advantage_estimator.identity()}`, found "
                f"{self._settings.num_extra_generations}: set `AdvantageGRPOConfig(num_extra_generations={extra})`."
            )
        if extra == 0:
            return args
        args = copy.copy(args)
        args.num_generations_eval = args.num_generations_eval or args.num_generations
        args.num_generations += extra
        return args

    def _local_rows(self, values_N: Tensor, output: dict[str, Any]) -> Tensor:
        """This rank's slice of gathered rows."""
        num_rows = len(output["completion_ids"])
        start = self.accelerator.process_index * num_rows
        return values_N[start : start + num_rows]

    def _report_unscored(self) -> None:
        """Nobody scored a completion of the batch: a warning, and an error once training began with three such."""
        history = self.collapse_history
        if self.model.training and history.num_batches == 2 and history.num_scored == 0:
            raise ValueError(
                "The first three generation batches should hold a scored completion, found none: let the reward "
                "functions return a number instead of None."
            )
        logger.warning_once("No completion of a generation batch got a reward: such a batch teaches nothing.")

    def _relog_advantages(self, advantages_N: Tensor) -> None:
        """TRL has logged its own advantages by now; ours trained."""
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages_N), len(logged))):
            logged.pop()
        logged.extend(advantages_N.tolist())

    # Rows left out of the loss

    def _exclude(self, output: dict[str, Any], excluded_N: Tensor) -> None:
        """
        Takes rows out of the loss and its normalisers, as if they had not been sampled; only the router statistics of
        an auxiliary loss still see them.
        """
        other_terms = {"inseparable KL term (`use_liger_kernel`)": self._has_liger_loss() and self.beta != 0.0}
        check_exclusion(self.loss_type, self._other_terms() | other_terms)
        num_tokens = self.accelerator.gather(count_loss_tokens(output)).sum()
        mask_rows(output, self._local_rows(excluded_N, output))
        num_kept_tokens = self.accelerator.gather(count_loss_tokens(output)).sum()
        num_rows = int(excluded_N.sum())
        self._log_metrics({"excluded/rows": float(num_rows), "excluded/tokens": float(num_tokens - num_kept_tokens)})
        if not self.advantage_estimator.count_excluded_tokens:
            output["num_items_in_batch"] = output["num_items_in_batch"] - num_tokens + num_kept_tokens
        if self.loss_type in ROW_MEAN_LOSSES:
            scale = len(excluded_N) / max(1, len(excluded_N) - num_rows)
            if self.beta == 0.0:
                output["advantages"] = output["advantages"] * scale
            else:  # the KL term does not scale with the advantage
                output[LOSS_SCALE] = torch.tensor(scale, dtype=torch.float64)

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in TRL; `resume_from_checkpoint=True` takes the newest complete checkpoint of `output_dir`."""
        reset = self._settings.reset_advantage_state
        folder = on_main_process(lambda: choose_checkpoint(resume_from_checkpoint, self.args.output_dir, reset))
        return super().train(folder, *args, **kwargs)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        is_boundary = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        content = collect_state(self.advantage_estimator, self.collapse_history, is_boundary)
        if self.args.should_save:
            save_state(folder, content)
        # Older checkpoints may go only once this one is marked complete.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            torch.save(self.args, folder / TRAINING_ARGS_NAME)  # with the limit
            mark_complete(folder)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(folder.parent), limit, best_model_checkpoint=best, use_mtime=True)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._settings.reset_advantage_state:
            logger.warning(f"`{self.advantage_estimator.identity()}` starts afresh, as `reset_advantage_state` asks.")
        elif checkpoint is not None:
            load_state(Path(checkpoint), self.advantage_estimator, self.collapse_history)
