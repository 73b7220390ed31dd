"""`AdvantageGRPOConfig`: TRL's `GRPOConfig` and the few settings that are ours."""

import math
from dataclasses import dataclass, field

import torch
from transformers.utils import logging
from trl import GRPOConfig

from grpo_ext.estimator import require

logger = logging.get_logger(__name__)


def check_settings(log_rewards: bool, log_reward_texts: bool, reward_min: float, reward_max: float) -> None:
    """Raises the `ValueError` about settings of the watching that contradict each other."""
    require(reward_min < reward_max, "reward_min", reward_min, f"lie below reward_max={reward_max}", "swap the two")
    is_logged = log_rewards or not log_reward_texts
    require(is_logged, "log_reward_texts", log_reward_texts, "come with `log_rewards`", "set both")


@dataclass
class AdvantageGRPOConfig(GRPOConfig):
    """
    Every argument of `GRPOConfig`, and the following. Without an accelerator and with neither `use_cpu` nor `bf16`
    set, it trains on the CPU in float32 and says so.

    Args:
        num_extra_generations (`int`, *optional*, defaults to `0`):
            Completions per training prompt beyond `num_generations`; the estimator says how many it needs. The
            generation batch has to hold whole groups of `num_generations + num_extra_generations`.
        success_reward (`str`, *optional*):
            Name or index of the reward function that tells right from wrong. None: the weighted sum.
        reward_min (`float`, *optional*, defaults to `0.0`):
            That function's value for a wrong answer.
        reward_max (`float`, *optional*, defaults to `1.0`):
            Its value for a right one.
        compact_updates (`bool`, *optional*):
            Compute the update without the rows and the padding that its gradient does not need. None: wherever that
            is exact, saying where it is not; True: an error where it is not; False: never.
        exchange_rows (`bool`, *optional*, defaults to `False`):
            With several processes, let rows move between them, so that each has about as much to compute.
        log_rewards (`bool`, *optional*, defaults to `False`):
            Keep every completion's rewards, length and advantage in `output_dir/rewards`, for `grpo-ext replay`,
            `diagnose` and `plot`.
        log_reward_texts (`bool`, *optional*, defaults to `False`):
            Keep prompts and completions there as well.
        reset_advantage_state (`bool`, *optional*, defaults to `False`):
            Resume without the estimator's state and the collapse figures of the checkpoint: with another method on
            purpose, or where the file is damaged. Drop it at the next resume.

    Raises:
        `ValueError`: where a value is out of range, or the generation batch does not hold whole groups.
    """

    _argument_group_name = "training (TRL's GRPOConfig, and ours)"

    num_extra_generations: int = field(
        default=0,
        metadata={"help": "Completions per training prompt beyond num_generations; the method says how many it needs."},
    )
    success_reward: str | None = field(
        default=None,
        metadata={"help": "Reward function (name or index) that tells right from wrong; unset: the weighted sum."},
    )
    reward_min: float = field(default=0.0, metadata={"help": "The success reward's value for a wrong answer."})
    reward_max: float = field(default=1.0, metadata={"help": "The success reward's value for a right answer."})
    compact_updates: bool | None = field(
        default=None,
        metadata={
            "help": "Update without the rows and padding its gradient does not need; unset: where exact, true: or fail."
        },
    )
    exchange_rows: bool = field(
        default=False,
        metadata={"help": "Let rows move between processes, so that each has about as much to compute."},
    )
    log_rewards: bool = field(
        default=False,
        metadata={"help": "Keep every completion's rewards and advantage in output_dir/rewards, for replay and plot."},
    )
    log_reward_texts: bool = field(default=False, metadata={"help": "Keep prompts and completions there as well."})
    reset_advantage_state: bool = field(
        default=False,
        metadata={"help": "Resume without the checkpoint's estimator state, to go on with another method on purpose."},
    )

    def __post_init__(self) -> None:
        num_generations, extra = self.num_generations, self.num_extra_generations
        require(num_generations >= 2, "num_generations", num_generations, "be at least 2", "a group needs a contrast")
        require(extra >= 0, "num_extra_generations", extra, "be at least 0", "use the method's own number")
        check_settings(self.log_rewards, self.log_reward_texts, self.reward_min, self.reward_max)
        should = "be False where `compact_updates=False` keeps rows in place"
        is_possible = not (self.exchange_rows and self.compact_updates is False)
        require(is_possible, "exchange_rows", self.exchange_rows, should, "drop one of the two")
        if self.bf16 is None and not (self.fp16 or self.use_cpu or torch.accelerator.is_available()):
            self.use_cpu, self.bf16 = True, False
            logger.warning("No accelerator found: training on the CPU in float32 (use_cpu=True, bf16=False).")
        if extra and self.num_generations_eval is None:
            self.num_generations_eval = num_generations
        self.num_generations = num_generations + extra
        try:
            super().__post_init__()
        except ValueError as error:
            size = self.generation_batch_size
            if size is None or size % self.num_generations == 0:
                raise
            raise ValueError(self._sizes_that_fit(num_generations, size)) from error
        finally:
            self.num_generations = num_generations

    def _sizes_that_fit(self, num_generations: int, size: int) -> str:
        group = self.num_generations
        step = math.lcm(group, self.per_device_train_batch_size * self.world_size)
        fitting = [fit for fit in (size // step * step, size // step * step + step) if fit > 0]
        found = f"{num_generations} + {self.num_extra_generations} extra" if self.num_extra_generations else str(group)
        steps = " or ".join(str(fit // (self.per_device_train_batch_size * self.world_size)) for fit in fitting)
        return (
            f"The generation batch should hold whole groups of {group} completions (num_generations={found}), found "
            f"generation_batch_size={size}: use {' or '.join(map(str, fitting))} (steps_per_generation or "
            f"gradient_accumulation_steps of {steps}), or a per_device_train_batch_size that {group} divides."
        )
