"""GRPO and its settings (arXiv 2402.03300, 2503.20783, 2601.05242)."""

from math import nan, sqrt

import _reference
import pytest
import torch
from _asserts import assert_golden, assert_matches
from _rewards import SIXTEENTHS, groups, random_rewards
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ext.advantages import GRPO
from grpo_ext.groups import RewardGroups

R8, E8 = [1, 0, 0, 1, 0, 0, 0, 0], [1, 1, 0, 1, 1, 1, 0, 1]
DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=30)
@given(rewards=random_rewards(), ddof=st.sampled_from([0, 1]), eps=st.sampled_from([1e-6, 1e-4, 0.1]))
def test_scaling_matches_the_reference(scale, dtype, rewards, ddof, eps):
    estimator = GRPO(scale_rewards=scale, std_ddof=ddof, advantage_eps=eps)
    assert_matches(estimator.estimate(groups(rewards, dtype)), _reference.grpo(rewards, scale, ddof, eps))


@st.composite
def rewards_by_function(draw: st.DrawFn) -> list:
    """Rewards (P, G, F), NaN where a function abstained."""
    num_completions, num_functions = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    reward = st.sampled_from([*SIXTEENTHS, nan])
    row = st.lists(reward, min_size=num_functions, max_size=num_functions)
    group = st.lists(row, min_size=num_completions, max_size=num_completions)
    return draw(st.lists(group, min_size=1, max_size=4))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=60)
@given(rewards=rewards_by_function(), ddof=st.sampled_from([0, 1]))
def test_normalize_then_sum_matches_the_reference(dtype, rewards, ddof):
    rewards_PGF = torch.tensor(rewards, dtype=dtype)
    num_prompts, num_completions, num_functions = rewards_PGF.shape
    weights = [1.0, 0.5, 2.0][:num_functions]
    several = RewardGroups.from_functions(
        rewards_PGF.view(num_prompts * num_completions, num_functions),
        torch.tensor(weights, dtype=dtype),
        num_completions,
    )
    # An eps well above rounding keeps groups that cancel out from comparing noise with noise.
    estimator = GRPO(multi_objective_aggregation="normalize_then_sum", std_ddof=ddof, advantage_eps=0.01)
    expected = _reference.normalize_then_sum(rewards, weights, ddof, 0.01)
    assert_matches(estimator.estimate(several), expected, atol=2e-4 if dtype == torch.float32 else 1e-11)


def test_normalize_then_sum_on_two_functions():
    """Correctness and format; the mean of each group's normalised sum is 0, then the batch's std divides."""
    correctness = torch.tensor([R8, E8], dtype=torch.float32)
    format_reward = torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1], [1] * 8], dtype=torch.float32)
    rewards_NF = torch.stack([correctness, format_reward], dim=2).view(16, 2)
    several = RewardGroups.from_functions(rewards_NF, torch.ones(2), 8)
    found = GRPO(multi_objective_aggregation="normalize_then_sum").estimate(several)
    low, right, wrong = -0.147289, 0.426444, -1.279332
    first = [1.558486, low, low, 1.558486, -2.380525, low, low, low]
    assert_golden(found, [first, [right if reward else wrong for reward in E8]])


@settings(deadline=None, max_examples=50)
@given(row=st.lists(st.sampled_from(SIXTEENTHS), min_size=2, max_size=8))
def test_advantages_of_a_group_sum_to_zero(row):
    assert GRPO().estimate(groups([row], torch.float64)).sum().item() == pytest.approx(0, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(num_right=st.integers(1, 7), slope=st.sampled_from([0.25, 2.0, 8.0]), offset=st.sampled_from([-1.0, 0.0, 3.0]))
def test_advantages_without_eps_ignore_affine_maps(num_right, slope, offset):
    row = [1.0] * num_right + [0.0] * (8 - num_right)
    estimator = GRPO(advantage_eps=0.0)
    moved = estimator.estimate(groups([[slope * reward + offset for reward in row]], torch.float64))
    torch.testing.assert_close(moved, estimator.estimate(groups([row], torch.float64)))


def test_unset_settings_mean_group_and_sum_first():
    rewards = [[1, 0, 0, 0], [1, 1, 0, 1]]
    explicit = GRPO(scale_rewards="group", multi_objective_aggregation="sum_then_normalize")
    assert torch.equal(GRPO().estimate(groups(rewards)), explicit.estimate(groups(rewards)))


def test_sample_deviation_is_the_default():
    """[1, 0]: deviations of 1/2, sample std sqrt(1/2), population std 1/2."""
    pair = groups([[1, 0]], torch.float64)
    assert GRPO(advantage_eps=0.0).estimate(pair)[0, 0].item() == pytest.approx(sqrt(0.5))
    assert GRPO(advantage_eps=0.0, std_ddof=0).estimate(pair)[0, 0].item() == pytest.approx(1)


def test_minus_one_and_one_instead_of_zero_and_one():
    """Twice the deviation over twice the std: the same up to eps."""
    three, six = [1] * 3 + [-1] * 5, [1] * 6 + [-1] * 2
    expected = [[1.207498] * 3 + [-0.724499] * 5, [0.540003] * 6 + [-1.620010] * 2]
    assert_golden(GRPO().estimate(groups([three, six])), expected)


def test_rewards_need_not_be_contiguous():
    """A view of the rewards is as good as a copy."""
    rewards_GP = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    estimator = GRPO(scale_rewards="batch")
    view, copy = RewardGroups(rewards_GP.t()), RewardGroups(rewards_GP.t().contiguous())
    assert torch.equal(estimator.estimate(view), estimator.estimate(copy))


def test_normalize_then_sum_names_what_it_needs():
    with pytest.raises(ValueError, match="rewards_PGF"):
        GRPO(multi_objective_aggregation="normalize_then_sum").estimate(groups([[1, 0]]))


@pytest.mark.parametrize(
    "arguments",
    [
        {"scale_rewards": "groups"},
        {"scale_rewards": True},
        {"multi_objective_aggregation": "sum"},
        {"std_ddof": 2},
        {"std_ddof": -1},
        {"advantage_eps": -1e-9},
    ],
    ids=str,
)
def test_bad_arguments_are_named(arguments):
    with pytest.raises(ValueError, match=f"`{next(iter(arguments))}` should"):
        GRPO(**arguments)


def test_grpo_is_stateless_and_silent():
    several = groups([[1, 0, 0]])
    assert GRPO().state_dict() == {}
    assert GRPO().metrics(several) == {}
    assert GRPO().excluded(several) is None
    assert (GRPO.num_extra_generations, GRPO.training_only) == (0, False)
