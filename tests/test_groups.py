"""RewardGroups: shapes, infinite rewards, reading success, grouping gathered rows."""

from math import inf, nan

import pytest
import torch
from _asserts import assert_identical, assert_matches
from _rewards import groups

from grpo_ext.advantages import AGRAE, AVSPO, GRPO, HADW, MCGRPO, EasyFocused, HardFocused, MeanControl
from grpo_ext.groups import RewardGroups


def test_rewards_are_success_where_nothing_else_is_given():
    several = groups([[1, 0.5, nan, 0]])
    assert_identical(several.success_PG, several.rewards_PG)
    assert several.success_error is None


def test_scored_rows_are_those_that_are_not_nan():
    assert groups([[1, nan], [nan, nan]]).is_scored_PG.tolist() == [[True, False], [False, False]]


def test_integers_and_bools_become_float32():
    for rewards in ([[1, 0]], [[True, False]]):
        several = RewardGroups(torch.tensor(rewards))
        assert several.rewards_PG.dtype == several.success_PG.dtype == torch.float32
        assert several.rewards_PG.tolist() == [[1.0, 0.0]]


def test_float64_stays():
    assert groups([[1, 0]], torch.float64).success_PG.dtype == torch.float64


def test_success_takes_the_rewards_dtype_and_their_nan():
    several = RewardGroups(torch.tensor([[2.0, nan, 5.0]], dtype=torch.float64), torch.tensor([[1, 1, 0]]))
    assert_matches(several.success_PG, [[1, nan, 0]])
    assert several.success_PG.dtype == torch.float64


def test_a_scored_row_may_lack_success():
    assert_matches(groups([[2, 5]], success_PG=[[nan, 1]]).success_PG, [[nan, 1]])


@pytest.mark.parametrize("value", [inf, -inf])
def test_infinite_rewards_are_refused_by_name(value):
    with pytest.raises(ValueError, match=r"should be finite.*for completion 1 of prompt 1: let"):
        groups([[0, 1], [0, value]])


def test_infinite_rewards_that_cancel_are_refused():
    """Their weighted sum is NaN, which would pass for unscorable."""
    rewards_NF = torch.tensor([[1.0, 0.0], [inf, -inf]])
    with pytest.raises(ValueError, match=r"should be finite.*for completion 1 of prompt 0: let"):
        RewardGroups.from_functions(rewards_NF, torch.ones(2), 2)


@pytest.mark.parametrize("value", [1.1, -0.1, 2.0, -1.0])
def test_success_out_of_range_is_refused_when_read(value):
    """The error names what was found and the three settings that help."""
    several = groups([[0, value]])
    with pytest.raises(ValueError, match=rf"found {value:g}.*success_reward.*reward_min.*reward_max"):
        _ = several.success_PG
    with pytest.raises(ValueError, match="success signal"):
        _ = groups([[0, 1]], success_PG=[[0, value]]).success_PG


def test_success_out_of_range_of_an_unscorable_row_is_no_matter():
    assert_matches(groups([[nan, 1]], success_PG=[[7, 1]]).success_PG, [[nan, 1]])


def test_rounding_is_clipped_away():
    """Up to 1e-6 outside."""
    several = groups([[1 + 5e-7, -5e-7, 0.5]], torch.float64)
    assert several.success_PG.tolist() == [[1.0, 0.0, 0.5]]
    for value in (1 + 2e-6, -2e-6):
        assert groups([[value, 0.5]], torch.float64).success_error is not None


@pytest.mark.parametrize("estimator", [GRPO(), MCGRPO(), MeanControl()], ids=lambda e: type(e).__name__)
def test_who_reads_no_success_takes_any_finite_reward(estimator):
    assert estimator.estimate(groups([[-3, 0, 500]])).isfinite().all()


@pytest.mark.parametrize("method", [HADW, AGRAE, AVSPO, HardFocused, EasyFocused])
def test_who_reads_success_says_what_to_set(method):
    with pytest.raises(ValueError, match=r"success_reward.*reward_min.*reward_max"):
        method().estimate(groups([[2, 0, 0]]))


def test_reading_rewards_never_reads_success():
    several = groups([[-1, 2]])
    assert several.rewards_PG.tolist() == [[-1.0, 2.0]]
    assert "success_reward" in several.success_error


@pytest.mark.parametrize("shape", [(4,), (2, 2, 2), ()])
def test_rewards_have_two_axes(shape):
    with pytest.raises(ValueError, match="`rewards_PG` should have the shape"):
        RewardGroups(torch.zeros(shape))


@pytest.mark.parametrize("name", ["success_PG", "lengths_PG", "rewards_PGF"])
def test_other_fields_begin_with_the_shape_of_the_rewards(name):
    with pytest.raises(ValueError, match=f"`{name}` should begin with the shape"):
        RewardGroups(torch.zeros(2, 3), **{name: torch.zeros(3, 2)})


def test_optional_fields_are_kept():
    several = RewardGroups(torch.zeros(2, 3), prompt_ids_P=["a", "b"], progress=0.5, reward_range=2.0)
    assert (several.prompt_ids_P, several.progress, several.reward_range) == (["a", "b"], 0.5, 2.0)
    assert several.lengths_PG is several.rewards_PGF is several.reward_weights_F is None
    assert RewardGroups(torch.zeros(2, 3)).reward_range == 1.0


def test_functions_are_weighted_summed_and_grouped():
    """Group-major rows; an abstaining function counts 0, a row that all abstained from is unscorable."""
    rewards_NF = torch.tensor([[1.0, 2.0], [nan, 4.0], [nan, nan], [0.0, 1.0]])
    several = RewardGroups.from_functions(
        rewards_NF, torch.tensor([1.0, 0.5]), 2, lengths_PG=torch.tensor([5, 6, 7, 8]), progress=0.25
    )
    assert_matches(several.rewards_PG, [[2.0, 2.0], [nan, 0.5]])
    assert_matches(several.rewards_PGF, [[[1, 2], [nan, 4]], [[nan, nan], [0, 1]]])
    assert several.lengths_PG.tolist() == [[5, 6], [7, 8]]
    assert several.progress == 0.25
    assert rewards_NF[2].isnan().all()


def test_advantages_are_restricted_to_scored_rows():
    """NaN becomes 0 where scored, and NaN where not, whatever stood there."""
    several = groups([[1, nan, 0]])
    assert_matches(several.restrict(torch.tensor([[nan, 3.0, 2.0]])), [[0, nan, 2]])
