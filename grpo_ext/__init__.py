"""Advantage estimators for TRL's `GRPOTrainer`, one paper per file."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_ext.config import AdvantageGRPOConfig as AdvantageGRPOConfig
    from grpo_ext.trainer import AdvantageGRPOTrainer as AdvantageGRPOTrainer
    from grpo_ext.watching import watch_rewards as watch_rewards

__version__ = "0.1.0"

__all__ = ["AdvantageGRPOConfig", "AdvantageGRPOTrainer", "watch_rewards"]


HOMES = {
    "AdvantageGRPOTrainer": "grpo_ext.trainer",
    "AdvantageGRPOConfig": "grpo_ext.config",
    "watch_rewards": "grpo_ext.watching",
}


def __getattr__(name: str) -> Any:
    # Lazily, so that `grpo_ext.advantages` imports neither trl nor transformers.
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"module 'grpo_ext' has no attribute {name!r}")
