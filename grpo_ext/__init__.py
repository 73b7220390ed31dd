"""Advantage estimators for TRL's `GRPOTrainer`, one paper per file."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_ext.config import AdvantageGRPOConfig as AdvantageGRPOConfig
    from grpo_ext.trainer import AdvantageGRPOTrainer as AdvantageGRPOTrainer

__version__ = "0.1.0"

__all__ = ["AdvantageGRPOConfig", "AdvantageGRPOTrainer"]


def __getattr__(name: str) -> type:
    # Lazily, so that `grpo_ext.advantages` imports neither trl nor transformers.
    if name == "AdvantageGRPOTrainer":
        from grpo_ext.trainer import AdvantageGRPOTrainer

        return AdvantageGRPOTrainer
    if name == "AdvantageGRPOConfig":
        from grpo_ext.config import AdvantageGRPOConfig

        return AdvantageGRPOConfig
    raise AttributeError(f"module 'grpo_ext' has no attribute {name!r}")
