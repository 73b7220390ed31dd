"""NaN-aware group statistics against plain Python."""

import statistics
from math import isnan, nan, sqrt

import pytest
import torch
from _asserts import assert_matches
from _rewards import TENTHS, random_rewards
from hypothesis import given, settings

from grpo_ext.statistics import (
    EPS,
    batch_mean,
    batch_std,
    group_mad,
    group_mean,
    group_median,
    group_std,
    is_all_equal,
    num_scored,
)


def scored(row: list[float]) -> list[float]:
    return [value for value in row if not isnan(value)]


def per_group(rewards: list[list[float]], function, at_least: int = 1) -> list[list[float]]:
    """The statistic of each group's scored values as a column, NaN where there are too few."""
    return [[function(scored(row))] if len(scored(row)) >= at_least else [nan] for row in rewards]


@settings(deadline=None, max_examples=60)
@given(rewards=random_rewards(values=TENTHS))
def test_group_statistics_match_plain_python(rewards):
    values_PG = torch.tensor(rewards, dtype=torch.float64)
    assert_matches(group_mean(values_PG), per_group(rewards, statistics.fmean))
    assert_matches(group_std(values_PG), per_group(rewards, statistics.stdev, at_least=2))
    assert_matches(group_std(values_PG, ddof=0), per_group(rewards, statistics.pstdev))
    assert_matches(group_median(values_PG), per_group(rewards, statistics.median_low))
    assert num_scored(values_PG).tolist() == [[len(scored(row))] for row in rewards]


@settings(deadline=None, max_examples=60)
@given(rewards=random_rewards())
def test_mad_matches_plain_python(rewards):
    def mad(values: list[float]) -> float:
        return statistics.median_low([abs(value - statistics.median_low(values)) for value in values])

    assert_matches(group_mad(torch.tensor(rewards)), per_group(rewards, mad))


@settings(deadline=None, max_examples=60)
@given(rewards=random_rewards(values=TENTHS))
def test_batch_statistics_match_plain_python(rewards):
    values_PG = torch.tensor(rewards, dtype=torch.float64)
    values = scored([value for row in rewards for value in row])
    expected = statistics.fmean(values) if values else nan
    assert batch_mean(values_PG) == pytest.approx(expected, nan_ok=True)
    expected = statistics.stdev(values) if len(values) > 1 else nan
    assert_matches(batch_std(values_PG), [[expected]])
    expected = statistics.pstdev(values) if values else nan
    assert_matches(batch_std(values_PG, ddof=0), [[expected]])


def test_shapes_keep_the_group_axis():
    values_PG = torch.rand(3, 4)
    for statistic in (group_mean, group_std, group_median, group_mad, num_scored, is_all_equal):
        assert statistic(values_PG).shape == (3, 1)
    assert batch_std(values_PG).shape == (1, 1)


def test_std_by_hand():
    """0 and 1: squares 1/4 + 1/4, over 1 and over 2."""
    values_PG = torch.tensor([[0.0, 1.0, nan]])
    assert group_std(values_PG).item() == pytest.approx(sqrt(0.5))
    assert group_std(values_PG, ddof=0).item() == pytest.approx(0.5)
    assert group_std(torch.tensor([[0.3, nan]])).isnan().item()
    assert EPS == 1e-4


def test_even_groups_have_the_lower_median():
    assert group_median(torch.tensor([[3.0, 0.0, 1.0, 2.0]])).item() == 1
    assert group_median(torch.tensor([[3.0, nan, 1.0, 2.0, 0.0]])).item() == 1
    assert group_mad(torch.tensor([[0.0, 0.0, 1.0, 1.0]])).item() == 0


def test_batch_mean_is_float64():
    """A third of 2**24 + 1 ones and zeros does not fit float32."""
    values = torch.tensor([16777216.0, 1.0, 1.0])
    assert batch_mean(values) == 16777218 / 3


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0, 0, 0], True),
        ([1, 0, 1], False),
        ([0.5, 0.5], True),
        ([nan, 1, 1], True),
        ([nan, 1, nan], False),
        ([nan, nan], False),
        ([0.5, 0.5 + 5e-7], True),
        ([0.5, 0.5 + 2e-6], False),
        ([0, 5e-7], True),
        ([0, 2e-6], False),
        ([-1, -1], True),
        ([1000, 1000.0005], True),
        ([1000, 1000.002], False),
        ([-1000, -1000.0005], True),
        ([-1000, -1000.002], False),
        ([-1, 1], False),
    ],
)
def test_all_equal_is_absolute_up_to_one_and_relative_above(row, expected):
    assert is_all_equal(torch.tensor([row], dtype=torch.float64)).item() is expected


@pytest.mark.parametrize("value", [10.1, 100.3])
def test_equal_rewards_are_equal_though_their_std_is_not_zero(value):
    """Seven float32 copies: their mean rounds."""
    values_PG = torch.full((1, 7), value)
    assert group_std(values_PG).item() > 1e-6
    assert is_all_equal(values_PG).item()


def test_tolerance_is_an_argument():
    values_PG = torch.tensor([[0.0, 0.05]])
    assert is_all_equal(values_PG, tol=0.1).item()
    assert not is_all_equal(values_PG, tol=0.0).item()
    assert is_all_equal(torch.zeros(1, 2), tol=0.0).item()
