"""Who sees what a trainer generated: metrics, history, callbacks and the reward log, with any `GRPOTrainer`.

They read and change nothing. Wraps TRL's `_generate`, `_calculate_rewards`, `_generate_and_score_completions`,
`train` and `_save_checkpoint`. Axes: see `groups.py`.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers.utils import logging
from trl import GRPOTrainer

from grpo_ext.advantages import GRPO
from grpo_ext.callbacks import AdvantageCallback
from grpo_ext.config import check_settings
from grpo_ext.diagnostics import CollapseHistory, batch_metrics
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardGroups, RewardSettings
from grpo_ext.resolution import resolve_estimator
from grpo_ext.reward_log import RewardLog, describe_run, prompt_key, to_hex, to_text

logger = logging.get_logger(__name__)

OWN_STATE = "grpo_ext"
"""Our entry among the states of callbacks."""


def watch_rewards(
    trainer: GRPOTrainer,
    *,
    log_rewards: bool = False,
    log_reward_texts: bool = False,
    success_reward: str | None = None,
    reward_min: float = 0.0,
    reward_max: float = 1.0,
) -> None:
    """
    Gives any `GRPOTrainer` the collapse metrics, the callbacks that are `AdvantageCallback`s, and the reward log.

    What it trains stays the same, bit for bit; `AdvantageGRPOTrainer` has all this from the start.

    Args:
        trainer (`GRPOTrainer`):
            Any trainer of TRL's that has not begun to train.
        log_rewards, log_reward_texts, success_reward, reward_min, reward_max:
            As in `AdvantageGRPOConfig`.

    Raises:
        `ValueError`: for a trainer that is watched already, or a `success_reward` it does not have.

    Example:
        ```python
        trainer = GRPOTrainer(model="Qwen/Qwen2.5-0.5B", reward_funcs=reward, train_dataset=dataset)
        watch_rewards(trainer, log_rewards=True)
        trainer.train()
        ```
    """
    if not isinstance(trainer, GRPOTrainer) or isinstance(trainer, WatchedGRPOTrainer):
        remedy = "drop the call" if isinstance(trainer, WatchedGRPOTrainer) else "pass a `GRPOTrainer`"
        raise ValueError(
            f"`watch_rewards` should get a `GRPOTrainer` that nobody watches yet, found `{type(trainer).__name__}`, "
            f"which is {'watched' if isinstance(trainer, WatchedGRPOTrainer) else 'none'}: {remedy}."
        )
    check_settings(log_rewards, log_reward_texts, reward_min, reward_max)
    settings = SimpleNamespace(
        log_rewards=log_rewards,
        log_reward_texts=log_reward_texts,
        success_reward=success_reward,
        reward_min=reward_min,
        reward_max=reward_max,
    )
    estimator = resolve_estimator(GRPO(), trainer.args)
    find_success_column(success_reward, trainer.reward_func_names)
    own = type(trainer)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    trainer.__class__ = type(own.__name__, (WatchedGRPOTrainer, own), names)
    trainer._watch(settings, estimator)


def find_success_column(wanted: str | None, names: list[str]) -> int | None:
    """
    The place of the reward function that tells right from wrong, None for the weighted sum.

    Raises:
        `ValueError`: where there is no such function.
    """
    if wanted is None:
        return None
    if str(wanted).isdecimal() and int(wanted) < len(names):
        return int(wanted)
    if wanted in names:
        return names.index(wanted)
    raise ValueError(
        f"`success_reward` should name one of the reward functions {names}, found {wanted!r}: use one of these names, "
        "or an index."
    )


class WatchedGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` that shows each generated batch to whoever watches; made by `watch_rewards`, or a base class."""

    _restores_history: ClassVar[bool] = False
    """Whether a checkpoint brings the history back."""

    def _watch(self, settings: Any, estimator: AdvantageEstimator) -> None:
        """Sets up the watching; `estimator` is the one whose advantages train."""
        self._settings = settings
        self.collapse_history = CollapseHistory()
        self._success_column = find_success_column(settings.success_reward, self.reward_func_names)
        self._watched_estimator = estimator
        self._reward_log = RewardLog(Path(self.args.output_dir)) if settings.log_rewards else None
        self._is_place_known, self._begins_attempt = False, False
        self._gathered: tuple[Tensor, Tensor] | None = None
        self._logged_weights: list[float] | None = None

    # What is gathered

    def _generate(self, prompts: list) -> tuple:
        output = super()._generate(prompts)
        completion_ids, tool_mask = output[1], output[2]
        self._lengths = [len(ids) for ids in completion_ids] if tool_mask is None else [sum(row) for row in tool_mask]
        return output

    def _calculate_rewards(
        self, inputs: list[dict], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> Tensor:
        rewards_NF = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        tokenizer = self._tokenizer
        ends = {*vars(self).get("eos_token_ids", ()), tokenizer.eos_token_id, tokenizer.pad_token_id}  # as TRL
        facts = [
            (length, ids[-1] not in ends, prompt_key(row["prompt"]), hash(tuple(ids)))
            for length, ids, row in zip(self._lengths, completion_ids_list, inputs, strict=True)
        ]
        facts_B4 = torch.tensor(facts, dtype=torch.int64, device=self.accelerator.device)
        self._gathered = rewards_NF, self.accelerator.gather(facts_B4)
        if self._settings.log_rewards and self._settings.log_reward_texts:
            texts = [(to_text(row["prompt"]), to_text(text)) for row, text in zip(inputs, completions, strict=True)]
            self._texts = gather_object(texts)
        return rewards_NF

    def _reward_settings(self) -> RewardSettings:
        """How rewards are added by now: TRL's weights may be changed while it trains."""
        low, high = self._settings.reward_min, self._settings.reward_max
        return RewardSettings(self.reward_weights.tolist(), self._success_column, low, high)

    def _group_rewards(self, rewards_NF: Tensor, facts_N4: Tensor) -> RewardGroups:
        """The gathered batch by group."""
        num_generations = self.num_generations if self.model.training else self.num_generations_eval
        lengths_N, is_truncated_N, prompt_keys_N, completion_keys_N = facts_N4.unbind(dim=1)
        return self._reward_settings().group(
            rewards_NF,
            num_generations,
            lengths_PG=lengths_N,
            prompt_ids_P=[to_hex(key) for key in prompt_keys_N[::num_generations].tolist()],
            is_truncated_PG=is_truncated_N.bool(),
            completion_keys_PG=completion_keys_N,
            progress=self.state.global_step / max(1, self.state.max_steps),
        )

    # What is done with it

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        gathered, self._gathered = self._gathered, None
        if gathered is None:  # a subclass that takes completions from elsewhere
            logger.warning_once("A batch that was not generated and rewarded as in TRL is not watched.")
            return output
        groups = self._group_rewards(*gathered)
        advantages_PG, excluded_PG = self._assign_advantages(groups, output)
        self._observe(groups, advantages_PG, excluded_PG)
        return output

    def _assign_advantages(self, groups: RewardGroups, output: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The advantages (P, G) that train, and the excluded rows: TRL's own, a token's largest where they differ."""
        advantages = output["advantages"]
        if advantages.dim() > 1:
            advantages = advantages.gather(1, advantages.abs().argmax(dim=1, keepdim=True)).squeeze(1)
        advantages_N = self.accelerator.gather(advantages)
        return groups.restrict(advantages_N.view_as(groups.rewards_PG)), None

    def _observe(self, groups: RewardGroups, advantages_PG: Tensor, excluded_PG: Tensor | None) -> None:
        """Metrics and the log in both modes; in training then history and callbacks."""
        if groups.success_error is not None:
            logger.warning_once(
                "All-equal groups cannot be split into correct and incorrect ones, because the correctness signal "
                "leaves [0, 1]: set `success_reward`, `reward_min` and `reward_max`."
            )
        if not self._is_place_known:
            self._find_place()
        metrics = batch_metrics(groups, advantages_PG)
        self._log_metrics({name: value for name, value in metrics.items() if name != "reward"})  # which TRL logs
        self._write_log(groups, advantages_PG, excluded_PG)
        if not self.model.training:
            return
        self.collapse_history.update(groups, advantages_PG, excluded_PG)
        for name, value in self.collapse_history.metrics().items():
            self._metrics["train"][name] = [value]  # running figures: the last one is logged, not their mean
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, AdvantageCallback):
                place, history = (self.args, self.state, self.control), self.collapse_history
                callback.on_advantages(*place, groups=groups, advantages_PG=advantages_PG, history=history)
                callback.on_batch_metrics(*place, metrics=metrics, history=history)

    def _log_metrics(self, metrics: dict[str, float]) -> None:
        mode = "train" if self.model.training else "eval"
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    # The reward log

    def _write_log(self, groups: RewardGroups, advantages_PG: Tensor, excluded_PG: Tensor | None) -> None:
        log = self._reward_log
        if log is None or not self.accelerator.is_main_process:
            return
        weights = self._reward_settings().weights
        if self.model.training and log.has_begun and weights != self._logged_weights:
            self._begins_attempt = True  # one description holds for a whole attempt
        if self._begins_attempt or not log.has_begun:
            log.begin(self._batch_number() if self._begins_attempt else None, self._describe_run())
            self._begins_attempt, self._logged_weights = False, weights
        log.add(
            groups,
            advantages_PG,
            excluded_PG,
            batch=self._batch_number(),
            step=self.state.global_step,
            mode="train" if self.model.training else "eval",
            texts=self._texts if self._settings.log_reward_texts else None,
        )

    def _describe_run(self) -> dict[str, Any]:
        return describe_run(self, self._reward_settings(), self._watched_estimator)

    def _batch_number(self) -> int:
        """Training batches before this one."""
        return self.collapse_history.num_earlier + self.collapse_history.num_batches

    # Where the run is

    def _find_place(self) -> None:
        """A resumed run without the history of its beginning gets an empty one, and the number of its batches."""
        self._is_place_known = True
        if self.state.global_step and not (self._restores_history and self.collapse_history.num_batches):
            saved = self.state.stateful_callbacks.get(OWN_STATE, {}).get("attributes", {})
            num_micro_steps = self.state.global_step * self.args.gradient_accumulation_steps
            cycle = self.args.steps_per_generation * self.num_iterations
            self.collapse_history = CollapseHistory()
            # Nobody watched the run before, where nothing is saved: near enough.
            self.collapse_history.num_earlier = saved.get("num_batches", math.ceil(num_micro_steps / cycle))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in TRL; the reward log is complete when it returns or raises."""
        self._is_place_known, self._begins_attempt = False, True
        try:
            return super().train(*args, **kwargs)
        finally:
            self._flush_log()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As in TRL; the reward log is complete when it returns."""
        result = super().evaluate(*args, **kwargs)
        self._flush_log()
        return result

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        self._flush_log()  # what a resumed run will not generate again
        # Beside the states of callbacks, in `trainer_state.json`: a stock trainer has no other place for it.
        self.state.stateful_callbacks[OWN_STATE] = {"args": {}, "attributes": {"num_batches": self._batch_number()}}
        super()._save_checkpoint(model, trial)

    def _flush_log(self) -> None:
        if self._reward_log is not None:
            self._reward_log.flush()
