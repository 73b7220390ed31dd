"""What every advantage estimator promises, one assertion function per promise."""

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _rewards import Fields, select
from torch import Tensor

from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardGroups
from grpo_ext.statistics import is_all_equal

TOLERANCES = {torch.float32: (1e-5, 2e-6), torch.float64: (1e-9, 1e-12)}
"""Relative and absolute, by dtype; the absolute one covers rewards that equal their group's mean up to rounding."""


def assert_matches(found: Tensor, expected: list, rtol: float | None = None, atol: float | None = None) -> None:
    """Equal to nested lists up to the dtype's tolerance, NaN where they have it."""
    default_rtol, default_atol = TOLERANCES[found.dtype]
    torch.testing.assert_close(
        found,
        torch.tensor(expected, dtype=found.dtype),
        rtol=default_rtol if rtol is None else rtol,
        atol=default_atol if atol is None else atol,
        equal_nan=True,
    )


def assert_golden(found: Tensor, expected: list) -> None:
    """Equal to published values that are rounded to six decimals."""
    assert_matches(found, expected, rtol=1e-5, atol=1e-6)


def assert_identical(first: Tensor, second: Tensor) -> None:
    """Bit for bit, NaN in the same places."""
    assert torch.equal(first.isnan(), second.isnan())
    assert torch.equal(first.nan_to_num(nan=0.0), second.nan_to_num(nan=0.0))


def assert_finite_where_scored(estimator: AdvantageEstimator, groups: RewardGroups) -> None:
    """Advantages (P, G): finite where scored, NaN exactly where unscorable."""
    advantages_PG = estimator.estimate(groups)
    assert advantages_PG.shape == groups.rewards_PG.shape
    assert torch.equal(advantages_PG.isnan(), ~groups.is_scored_PG)
    assert advantages_PG[groups.is_scored_PG].isfinite().all()


def assert_keeps_dtype(estimator: AdvantageEstimator, arguments: Fields) -> None:
    """float32 rewards give float32 advantages, float64 ones float64."""
    for dtype in (torch.float32, torch.float64):
        cast = {n: value.to(dtype) if value.is_floating_point() else value for n, value in arguments.items()}
        assert estimator.estimate(RewardGroups(**cast)).dtype == dtype


def assert_permutes_with_completions(estimator: AdvantageEstimator, arguments: Fields) -> None:
    """Completions of each group in another order: the same advantages in that order."""
    num_prompts, num_completions = arguments["rewards_PG"].shape
    prompts = list(range(num_prompts))
    advantages_PG = estimator.estimate(RewardGroups(**arguments))
    for shift in (1, num_completions // 2):
        order = [(i + shift) % num_completions for i in range(num_completions)]
        moved_PG = estimator.estimate(RewardGroups(**select(arguments, prompts, order)))
        torch.testing.assert_close(moved_PG, advantages_PG[:, order], rtol=1e-5, atol=1e-5, equal_nan=True)


def assert_permutes_with_prompts(estimator: AdvantageEstimator, arguments: Fields) -> None:
    """Groups in another order: the same advantages in that order."""
    num_prompts, num_completions = arguments["rewards_PG"].shape
    order = list(reversed(range(num_prompts)))
    advantages_PG = estimator.estimate(RewardGroups(**arguments))
    moved_PG = estimator.estimate(RewardGroups(**select(arguments, order, list(range(num_completions)))))
    torch.testing.assert_close(moved_PG, advantages_PG[order], rtol=1e-5, atol=1e-5, equal_nan=True)


def assert_all_equal_groups_are_zero(estimator: AdvantageEstimator, groups: RewardGroups) -> None:
    """Exactly zero, not approximately, on every scored row of an all-equal group."""
    is_equal_PG = is_all_equal(groups.rewards_PG).expand_as(groups.rewards_PG) & groups.is_scored_PG
    assert is_equal_PG.any(), "the groups should hold an all-equal one"
    assert (estimator.estimate(groups)[is_equal_PG] == 0).all()


def assert_lone_rows_are_zero(estimator: AdvantageEstimator, groups: RewardGroups) -> None:
    """A group with one scored row gets 0 on it."""
    is_lone_PG = (groups.is_scored_PG.sum(dim=1, keepdim=True) == 1) & groups.is_scored_PG
    assert is_lone_PG.any(), "the groups should hold one with a single scored row"
    assert (estimator.estimate(groups)[is_lone_PG] == 0).all()


def assert_readers_write_nothing(estimator: AdvantageEstimator, arguments: Fields) -> None:
    """`estimate`, `metrics` and `excluded` give the same twice and change neither the state nor the rewards."""
    groups = RewardGroups(**{name: value.clone() for name, value in arguments.items()})
    state = estimator.state_dict()
    first = estimator.estimate(groups)
    estimator.metrics(groups)
    excluded = estimator.excluded(groups)
    assert_identical(first, estimator.estimate(groups))
    assert excluded is None or torch.equal(excluded, estimator.excluded(groups))
    assert estimator.state_dict() == state
    for name, value in arguments.items():
        assert_identical(vars(groups).get(name, vars(groups).get(f"_{name}")), value)


def assert_metrics_are_floats(estimator: AdvantageEstimator, groups: RewardGroups) -> None:
    """A flat dict of floats under names with one slash."""
    for name, value in estimator.metrics(groups).items():
        assert type(value) is float, f"{name} is a {type(value).__name__}"
        assert name.count("/") == 1


def assert_excludes_whole_numbers_of_rows(estimator: AdvantageEstimator, groups: RewardGroups) -> None:
    """None, or a bool (P, G) with the same number of rows in each group: the extra completions."""
    excluded_PG = estimator.excluded(groups)
    if estimator.num_extra_generations == 0:
        assert excluded_PG is None
        return
    assert excluded_PG.dtype == torch.bool
    assert excluded_PG.shape == groups.rewards_PG.shape
    assert (excluded_PG.sum(dim=1) == estimator.num_extra_generations).all()


def assert_state_survives_json(make: Callable[[], AdvantageEstimator], batches: list[Fields]) -> None:
    """`state_dict` -> JSON -> `load_state_dict` is the identity, and what was loaded is a copy."""
    trained = train(make(), batches)
    state = json.loads(json.dumps(trained.state_dict(), allow_nan=False))
    restored = make()
    restored.load_state_dict(state)
    assert restored == trained
    assert restored.state_dict() == trained.state_dict() == state
    kept = copy.deepcopy(state)
    train(restored, batches)
    assert state == kept


def assert_refuses_foreign_state(make: Callable[[], AdvantageEstimator], batches: list[Fields]) -> None:
    """A state with other keys, at any depth, is a `ValueError` that changes nothing."""
    estimator = train(make(), batches)
    state = estimator.state_dict()
    for foreign in foreign_states(make().state_dict()):
        with pytest.raises(ValueError, match="should have the keys"):
            estimator.load_state_dict(foreign)
        assert estimator.state_dict() == state


def assert_refuses_foreign_values(make: Callable[[], AdvantageEstimator], batches: list[Fields]) -> None:
    """A value of another kind, or one that is not finite, is a `ValueError` that changes nothing."""
    estimator = train(make(), batches)
    state = estimator.state_dict()
    for foreign in foreign_values(state):
        with pytest.raises(ValueError, match=r"The state `\w+` of `\w+` should be "):
            estimator.load_state_dict(foreign)
        assert estimator.state_dict() == state


def assert_resume_equals_never_stopping(make: Callable[[], AdvantageEstimator], batches: list[Fields]) -> None:
    """Saved after any batch, loaded into a new estimator and continued: the same state and advantages."""
    for stop in range(len(batches)):
        uninterrupted = train(make(), batches[:stop])
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(uninterrupted.state_dict())))
        for arguments in batches[stop:]:
            groups = RewardGroups(**arguments)
            assert_identical(resumed.estimate(groups), uninterrupted.estimate(groups))
            resumed.update(groups)
            uninterrupted.update(groups)
        assert resumed.state_dict() == uninterrupted.state_dict()


def assert_ranks_agree(make: Callable[[], AdvantageEstimator], batches: list[Fields]) -> None:
    """Two processes that see the same gathered batches hold equal states and advantages."""
    first, second = make(), make()
    for arguments in batches:
        torch.rand(3)  # the device's random state differs between ranks
        groups = RewardGroups(**arguments)
        assert_identical(first.estimate(groups), second.estimate(groups))
        first.update(groups)
        second.update(groups)
    assert first.state_dict() == second.state_dict()


def assert_unscored_batch_changes_nothing(estimator: AdvantageEstimator) -> None:
    """A batch without any scored row leaves the state alone."""
    state = estimator.state_dict()
    estimator.update(RewardGroups(torch.full((4, 5), torch.nan)))
    assert estimator.state_dict() == state


def train(estimator: AdvantageEstimator, batches: list[Fields]) -> AdvantageEstimator:
    """The estimator after these batches."""
    for arguments in batches:
        groups = RewardGroups(**arguments)
        estimator.estimate(groups)
        estimator.update(groups)
    return estimator


def foreign_states(state: dict[str, Any]) -> list[Any]:
    """States of other estimators: not a dict, a key more, a key less, and the same one level down."""
    foreign: list[Any] = [None, [], "state", state | {"unknown": 1}]
    for name, value in state.items():
        foreign.append({other: kept for other, kept in state.items() if other != name})
        if isinstance(value, dict):
            foreign += [state | {name: inner} for inner in foreign_states(value)]
    return foreign


def foreign_values(state: dict[str, Any]) -> list[dict[str, Any]]:
    """States with the right keys in which one value, at any depth, is not what the estimator wrote."""
    foreign = []
    for name, value in state.items():
        if isinstance(value, dict):
            foreign += [state | {name: inner} for inner in foreign_values(value)]
        elif isinstance(value, list):
            foreign += [state | {name: other} for other in ("text", 0.5, [*value, math.nan], {"0": 0.5})]
        elif value is not None:
            foreign += [state | {name: other} for other in ("text", math.inf, math.nan, [value], {"0": value})]
    return foreign
