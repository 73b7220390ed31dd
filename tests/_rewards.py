"""A menagerie of reward groups, and random ones. Axes: see `grpo_ext/groups.py`."""

from math import nan
from typing import Any

import torch
from hypothesis import strategies as st

from grpo_ext.groups import RewardGroups

Fields = dict[str, Any]


def fields(rewards: list[list[float]], dtype: torch.dtype = torch.float32, **others: list) -> Fields:
    """Arguments of `RewardGroups` as tensors; completion lengths that differ come along."""
    rewards_PG = torch.tensor(rewards, dtype=dtype)
    num_prompts, num_completions = rewards_PG.shape
    lengths_PG = (torch.arange(num_prompts * num_completions) * 7 % 11 + 1).view(num_prompts, num_completions)
    tensors = {name: torch.tensor(value, dtype=dtype) for name, value in others.items()}
    return {"rewards_PG": rewards_PG, "lengths_PG": lengths_PG} | tensors


def groups(rewards: list[list[float]], dtype: torch.dtype = torch.float32, **others: list) -> RewardGroups:
    """Reward groups of nested lists."""
    return RewardGroups(**fields(rewards, dtype, **others))


def select(arguments: Fields, prompts: list[int], completions: list[int]) -> Fields:
    """The same arguments with prompts and completions in another order."""
    return {name: value[prompts][:, completions] for name, value in arguments.items()}


MIXED = [1.0, 0.0, 0.0, 1.0, 0.0]

MENAGERIE: dict[str, Fields] = {
    "binary_mixed": fields([MIXED, [1, 1, 0, 1, 1], [0, 0, 0, 0, 1], [0, 1, 1, 1, 0]]),
    "half_collapsed": fields([[0] * 5, [1] * 5, MIXED, [1, 1, 1, 1, 0]]),
    "all_incorrect": fields([[0] * 5, [0] * 5]),
    "all_correct": fields([[1] * 5, [1] * 5]),
    "all_half_credit": fields([[0.5] * 5, [0.5] * 5]),
    "equal_of_each_kind": fields([[0] * 5, [1] * 5, [0.5] * 5, [0.25] * 5, MIXED]),
    "unscorable_rows": fields([[1, nan, 0, 0, nan], [nan, 1, 1, 0, 1], [nan, 0, 0, nan, 0], MIXED]),
    "one_scored_row": fields([[nan, 1, nan, nan, nan], [0, nan, nan, nan, nan], MIXED]),
    "group_without_scored_row": fields([[nan] * 5, MIXED]),
    "nothing_scored": fields([[nan] * 5, [nan] * 5]),
    "partial_credit": fields([[0.1, 0.9, 0.4, 0.7, 0.3], [0.3, 0.3, 0.9, 1, 0], [0.05, 0.1, 0.2, 0.4, 0.8]]),
    "float64": fields([[0.1, 0.9, 0.4, 0.7, 0.3], [0.3] * 5, MIXED, [1, nan, 0, 0, 1]], torch.float64),
    "single_group": fields([MIXED]),
    "pairs": fields([[1, 0], [1, 1], [0.5, 0.25], [0, nan]]),
    "even_size": fields([[1, 0, 0, 1, 0.5, 0.25], [1, 1, 0, 0, 0, 0]]),
    "large_values": fields(
        [[-50, 0, 50, 100, 300], [200, 200, -7, 3, 3], [64] * 5],
        success_PG=[[0, 0, 0.5, 1, 1], [1, 1, 0, 0, 0], [1] * 5],
    ),
    "float_noise": fields([[100.3] * 7, [10.1] * 7, [0.3] * 7], success_PG=[[0] * 7, [1] * 7, [0.3] * 7]),
    "success_of_its_own": fields([[2, 0.5, 0, 1, 1], [1, 1.5, 1, 1, 1]], success_PG=[[1, 0, 0, 0, 1], [1] * 5]),
    "success_abstained": fields([MIXED, [0.5, 1, 2, 1, 0]], success_PG=[[1, nan, 0, nan, 0], [nan] * 5]),
}
"""By name, the arguments of `RewardGroups`; every estimator can read each of them."""

BATCHES: list[Fields] = [
    fields([MIXED, [1, 1, 0, 1, 1], [0] * 5, [0] * 5]),
    fields([MIXED, [1] * 5, [0] * 5, [0] * 5]),
    fields([[nan] * 5] * 4),
    fields([MIXED, [1, nan, 0, 0, 1], [1] * 5, [0.5, 0.25, 1, 1, 1]]),
    fields([[0] * 5, [1] * 5, [1] * 5, [1] * 5]),
    fields([MIXED, MIXED, [1] * 5, [0] * 5]),
]
"""A short training run: accuracy rises, holds and falls, collapse comes and goes, one batch scores nothing."""

BINARY = (0.0, 1.0)
SIXTEENTHS = tuple(i / 16 for i in range(17))
TENTHS = tuple(i / 10 for i in range(11))


@st.composite
def random_rewards(
    draw: st.DrawFn,
    values: tuple[float, ...] = SIXTEENTHS,
    sizes: tuple[int, ...] = (2, 3, 4, 5, 7, 8),
    with_unscorable: bool = True,
    max_groups: int = 5,
) -> list[list[float]]:
    """Rewards (P, G) as nested lists: mixed and all-equal groups, some rows unscorable."""
    num_completions = draw(st.sampled_from(sizes))
    reward = st.sampled_from(values)
    mixed = st.lists(reward, min_size=num_completions, max_size=num_completions)
    group = st.one_of(mixed, mixed, reward.map(lambda value: [value] * num_completions))
    rewards = draw(st.lists(group, min_size=1, max_size=max_groups))
    if with_unscorable and draw(st.booleans()):
        rows = st.tuples(st.integers(0, len(rewards) - 1), st.integers(0, num_completions - 1))
        for prompt, completion in draw(st.lists(rows, max_size=4)):
            rewards[prompt] = [nan if i == completion else value for i, value in enumerate(rewards[prompt])]
    return rewards
