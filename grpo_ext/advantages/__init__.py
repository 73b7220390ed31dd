"""Advantage estimators, one paper per file. METHODS maps the command line's names to their classes."""

from grpo_ext.advantages.a_grae import AGRAE
from grpo_ext.advantages.a_grae_controls import EasyFocused, HardFocused, NegativeDominant, PositiveDominant
from grpo_ext.advantages.avspo import AVSPO
from grpo_ext.advantages.avspo_prototype import AVSPOPrototype
from grpo_ext.advantages.avspo_virtual import (
    ConstantRewards,
    ExponentialRewards,
    FixedCount,
    LinearCount,
    NoVirtualRewards,
    PowerCount,
    StratifiedRewards,
    UniformRewards,
)
from grpo_ext.advantages.grpo import GRPO
from grpo_ext.advantages.ha_dw import HADW
from grpo_ext.advantages.ha_dw_anchors import AdaptiveForgetting, FixedAnchor, MovingAverage
from grpo_ext.advantages.mc_grpo import MCGRPO
from grpo_ext.advantages.mc_grpo_control import MeanControl
from grpo_ext.advantages.mc_grpo_pivots import FirstPivot, LastPivot, LongestPivot, ShortestPivot
from grpo_ext.estimator import AdvantageEstimator

METHODS: dict[str, type[AdvantageEstimator]] = {
    "grpo": GRPO,
    "avspo": AVSPO,
    "avspo_prototype": AVSPOPrototype,
    "ha_dw": HADW,
    "a_grae": AGRAE,
    "positive_dominant": PositiveDominant,
    "negative_dominant": NegativeDominant,
    "hard_focused": HardFocused,
    "easy_focused": EasyFocused,
    "mc_grpo": MCGRPO,
    "mc_grpo_control": MeanControl,
}

__all__ = [
    "AGRAE",
    "AVSPO",
    "GRPO",
    "HADW",
    "MCGRPO",
    "METHODS",
    "AVSPOPrototype",
    "AdaptiveForgetting",
    "ConstantRewards",
    "EasyFocused",
    "ExponentialRewards",
    "FirstPivot",
    "FixedAnchor",
    "FixedCount",
    "HardFocused",
    "LastPivot",
    "LinearCount",
    "LongestPivot",
    "MeanControl",
    "MovingAverage",
    "NegativeDominant",
    "NoVirtualRewards",
    "PositiveDominant",
    "PowerCount",
    "ShortestPivot",
    "StratifiedRewards",
    "UniformRewards",
]
