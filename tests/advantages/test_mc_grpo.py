"""MC-GRPO, Median-Centered Group Relative Policy Optimization (arXiv 2601.22582), and its control arm."""

from math import nan

import _reference
import pytest
import torch
from _asserts import assert_golden, assert_matches
from _rewards import BINARY, SIXTEENTHS, TENTHS, groups, random_rewards
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ext.advantages import (
    GRPO,
    MCGRPO,
    FirstPivot,
    LastPivot,
    LongestPivot,
    MeanControl,
    ShortestPivot,
    mc_grpo,
)
from grpo_ext.groups import RewardGroups
from grpo_ext.statistics import group_mad, group_median, group_std

REWARDS = [[1, 0, 0, 1, 0], [0.1, 0.9, 0.4, 0.7, 0.3], [1, 1, 1, 1, 1], [2, 0, 2, 1.5, 2], [0, 0, 0, 0, 1]]
SPREAD = [-0.996678, 1.661130, 0, 0.996678, -0.332226]
ZEROS = [0, 0, 0, 0, 0]
DTYPES = (torch.float32, torch.float64)
ODD = (3, 5, 7, 9)


# Published values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (
            MCGRPO(),
            [[1.825409, 0, 0, 1.825409, 0], SPREAD, ZEROS, [0, -2.309134, 0, -0.577284, 0], [0, 0, 0, 0, 2.235568]],
        ),
        (mc_grpo.official(), [[1000, 0, 0, 1000, 0], SPREAD, ZEROS, [0, -2000, 0, -500, 0], [0, 0, 0, 0, 1000]]),
        (
            MCGRPO(center_scale="std"),
            [
                [1.825409, 0, 0, 1.825409, 0],
                [-0.939042, 1.565071, 0, 0.939042, -0.313014],
                ZEROS,
                [0, -2.309134, 0, -0.577284, 0],
                [0, 0, 0, 0, 2.235568],
            ],
        ),
        (
            MCGRPO(center_scale="none"),
            [[1, 0, 0, 1, 0], [-0.3, 0.5, 0, 0.3, -0.1], ZEROS, [0, -2, 0, -0.5, 0], [0, 0, 0, 0, 1]],
        ),
        (
            mc_grpo.official(gsm8k=True),
            [
                [2500, 0, 0, 2500, 0],
                [-1.245847, 2.076412, 0, 1.245847, -0.415282],
                ZEROS,
                [0, -5000, 0, -1250, 0],
                [0, 0, 0, 0, 5000],
            ],
        ),
    ],
)
def test_values_of_five_groups(estimator, expected, dtype):
    assert_golden(estimator.estimate(groups(REWARDS, dtype)), expected)


def test_statistics_and_pivots_of_five_groups():
    several = groups(REWARDS)
    assert_golden(group_median(several.rewards_PG), [[0], [0.4], [1], [2], [0]])
    assert_golden(group_mad(several.rewards_PG), [[0], [0.3], [0], [0], [0]])
    assert_golden(group_std(several.rewards_PG), [[0.547723], [0.319374], [0], [0.866025], [0.447214]])
    assert MCGRPO().excluded(several).int().argmax(dim=1).tolist() == [1, 2, 0, 0, 0]


def test_values_with_an_unscorable_row():
    """The unscorable row is the one left out."""
    several = groups([[1, nan, 0, 0, 1]])
    assert_golden(MCGRPO().estimate(several), [[1.731751, nan, 0, 0, 1.731751]])
    assert MCGRPO().excluded(several).tolist() == [[False, True, False, False, False]]


def test_values_of_more_groups():
    nine = [1, 0, 0, 1, 0, 0, 1, 1, 0]
    assert_golden(mc_grpo.official().estimate(groups([nine])), [[1000 * reward for reward in nine]])
    expected = [[1.66113, -0.996678, 0, -0.664452, 0.996678]]
    assert_golden(MCGRPO().estimate(groups([[0.9, 0.1, 0.4, 0.2, 0.7]])), expected)


@pytest.mark.parametrize(
    ("row", "minority", "expected"),
    [([0, 0, 1], 1, 3000), ([0, 0, 0, 0, 1], 1, 5000), ([0, 0, 1, 1, 1], 0, -2500)],
)
def test_compensation_of_the_released_trainer(row, minority, expected):
    """1/0.001 times the group's size over the number of rows off the median."""
    found = mc_grpo.official(gsm8k=True).estimate(groups([row]))
    assert_golden(found, [[expected if reward == minority else 0 for reward in row]])


# Against the slow reference


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=80)
@given(
    rewards=st.sampled_from([BINARY, SIXTEENTHS, TENTHS]).flatmap(random_rewards),
    center_scale=st.sampled_from(["mad", "std", "none"]),
    mad_fallback=st.sampled_from(["std", "epsilon", "none"]),
    mad_eps=st.sampled_from([1e-3, 0.1]),
    compensate=st.booleans(),
    bound=st.sampled_from([None, 0.5, 10.0]),
    ddof=st.sampled_from([0, 1]),
)
def test_advantages_match_the_reference(dtype, rewards, center_scale, mad_fallback, mad_eps, compensate, bound, ddof):
    estimator = MCGRPO(
        center_scale=center_scale,
        mad_fallback=mad_fallback,
        mad_eps=mad_eps,
        compensate_zero_advantages=compensate,
        max_abs_advantage=bound,
        std_ddof=ddof,
    )
    several = groups(rewards, dtype)
    expected = _reference.mc_grpo(
        several.rewards_PG.tolist(), center_scale, mad_eps, mad_fallback, compensate, bound, ddof
    )
    assert_matches(estimator.estimate(several), expected)


@settings(deadline=None, max_examples=60)
@given(rewards=random_rewards(), seed=st.integers(0, 99))
def test_pivots_match_the_reference(rewards, seed):
    lengths_PG = torch.randint(1, 4, (len(rewards), len(rewards[0])), generator=torch.Generator().manual_seed(seed))
    several = RewardGroups(torch.tensor(rewards), lengths_PG=lengths_PG)
    backwards = [-i for i in range(len(rewards[0]))]
    for rule, priorities in (
        (FirstPivot(), [None] * len(rewards)),
        (LastPivot(), [backwards] * len(rewards)),
        (LongestPivot(), (-lengths_PG).tolist()),
        (ShortestPivot(), lengths_PG.tolist()),
    ):
        excluded_PG = MCGRPO(pivot_rule=rule).excluded(several)
        expected = [_reference.pivot(row, priority) for row, priority in zip(rewards, priorities, strict=True)]
        assert excluded_PG.int().argmax(dim=1).tolist() == expected
        assert (excluded_PG.sum(dim=1) == 1).all()


@settings(deadline=None, max_examples=40)
@given(rewards=random_rewards(), ddof=st.sampled_from([0, 1]), sign=st.sampled_from([-1, 1]))
def test_control_arm_matches_the_reference(rewards, ddof, sign):
    signed = [[sign * reward for reward in row] for row in rewards]
    several, control = groups(signed, torch.float64), MeanControl(std_ddof=ddof)
    assert_matches(control.estimate(several), _reference.grpo_exact_zero(signed, ddof=ddof))
    expected = [_reference.smallest_reward(row) for row in signed]
    assert control.excluded(several).int().argmax(dim=1).tolist() == expected
    assert (control.excluded(several).sum(dim=1) == 1).all()


# Theory


@settings(deadline=None, max_examples=60)
@given(rewards=random_rewards(sizes=ODD, with_unscorable=False))
def test_pivots_are_exactly_zero_and_halves_differ(rewards):
    """Exactly one row per group leaves; at most half of the rows lie on either side of the median."""
    several = groups(rewards)
    advantages_PG, excluded_PG = MCGRPO().estimate(several), MCGRPO().excluded(several)
    half = len(rewards[0]) // 2
    assert (advantages_PG[excluded_PG] == 0).all()
    assert (excluded_PG.sum(dim=1) == 1).all()
    assert ((advantages_PG > 0).sum(dim=1) <= half).all()
    assert ((advantages_PG < 0).sum(dim=1) <= half).all()


@settings(deadline=None, max_examples=50)
@given(row=st.sampled_from(ODD).flatmap(lambda n: st.lists(st.integers(0, 64), min_size=n, max_size=n, unique=True)))
def test_distinct_rewards_leave_one_zero(row):
    assert (MCGRPO().estimate(groups([row])) == 0).sum() == 1


@settings(deadline=None, max_examples=50)
@given(
    row=st.sampled_from(ODD).flatmap(lambda n: st.lists(st.integers(0, 64), min_size=n, max_size=n, unique=True)),
    slope=st.sampled_from([0.5, 3.0]),
    offset=st.integers(-5, 5),
)
def test_affine_maps_change_nothing_without_eps(row, slope, offset):
    moved = [slope * reward + offset for reward in row]
    tiny = 1e-12  # `mad_eps` should be above 0
    for estimator in (MCGRPO(mad_eps=tiny), MCGRPO(center_scale="std", advantage_eps=0.0)):
        found = estimator.estimate(groups([moved], torch.float64))
        torch.testing.assert_close(found, estimator.estimate(groups([row], torch.float64)), rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(
    row=st.sampled_from(ODD).flatmap(lambda n: st.lists(st.sampled_from(SIXTEENTHS), min_size=n, max_size=n)),
    outlier=st.sampled_from([0.5, 10.0, 1000.0]),
)
def test_an_outlier_flips_no_other_sign(row, outlier):
    """The median of an odd group stays where it was when its largest reward grows."""
    top = row.index(max(row))
    grown = [reward + outlier * (i == top) for i, reward in enumerate(row)]
    before, after = (MCGRPO().estimate(groups([rewards], torch.float64))[0].sign() for rewards in (row, grown))
    others = [i for i in range(len(row)) if i != top]
    assert torch.equal(before[others], after[others])
    assert group_median(torch.tensor([row])).item() == group_median(torch.tensor([grown])).item()


def test_an_outlier_flips_signs_of_the_mean_baseline():
    """0.6 lies above the mean of 0, 0.6, 0.7 and below that of 0, 0.6, 70."""
    before, after = (GRPO().estimate(groups([[0, 0.6, top]]))[0, 1] for top in (0.7, 70))
    assert before > 0 > after


@settings(deadline=None, max_examples=50)
@given(row=st.sampled_from(ODD).flatmap(lambda n: st.lists(st.sampled_from([0, 2]), min_size=n, max_size=n)))
def test_two_valued_rewards_have_no_mad(row):
    """More than half of the rows sit at the median, so only the minority gets an advantage."""
    several = groups([row])
    assert group_mad(several.rewards_PG).item() == 0
    minority = min(row.count(0), row.count(2))
    assert (MCGRPO().estimate(several) != 0).sum() == minority
    assert MCGRPO().metrics(several)["mc_grpo/contributing_rows_per_group"] == minority


@pytest.mark.parametrize(("n", "mean_share", "median_share"), [(2, 0.249, 0.126), (4, 0.212, 0.109), (8, 0.175, 0.090)])
def test_median_signs_agree_with_the_truth_under_heavy_tails(n, mean_share, median_share):
    """
    Share of wrong signs for Student t rewards of two degrees of freedom, whose true baseline is 0.

    The mean of n rows against the median of n + 1, pivots left out.
    """
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(20_000, n + 1, 3, generator=generator, dtype=torch.float64)
    rewards_PG = normal[..., 0] / (normal[..., 1:].square().sum(dim=-1) / 2).sqrt()
    several, fewer = RewardGroups(rewards_PG), RewardGroups(rewards_PG[:, :n])
    mean_wrong_PG = GRPO().estimate(fewer).sign() != fewer.rewards_PG.sign()
    median_wrong_PG = (MCGRPO().estimate(several).sign() != rewards_PG.sign())[~MCGRPO().excluded(several)]
    assert mean_wrong_PG.double().mean().item() == pytest.approx(mean_share, abs=0.01)
    assert median_wrong_PG.double().mean().item() == pytest.approx(median_share, abs=0.01)


# Edges


def test_groups_with_fewer_than_two_scored_rows():
    several = groups([[nan, 0.7, nan], [nan, nan, nan]])
    for center_scale in ("mad", "std", "none"):
        for fallback in ("std", "epsilon", "none"):
            estimator = MCGRPO(center_scale=center_scale, mad_fallback=fallback)
            assert_matches(estimator.estimate(several), [[nan, 0, nan], [nan] * 3])
    assert MCGRPO().excluded(several).tolist() == [[True, False, False], [True, False, False]]
    assert MeanControl().excluded(several).tolist() == [[True, False, False], [True, False, False]]


def test_rewards_of_any_range_are_welcome():
    """No success signal is read: -3, 0, 5 have median 0 and MAD 3."""
    assert_matches(MCGRPO().estimate(groups([[-3, 0, 5]])), [[-3 / 3.001, 0, 5 / 3.001]])


def test_the_even_median_is_the_lower_one():
    """0, 1, 2, 3: median 1, distances 1, 0, 1, 2, their lower median 1."""
    assert_matches(MCGRPO().estimate(groups([[0, 1, 2, 3]])), [[-1 / 1.001, 0, 1 / 1.001, 2 / 1.001]])


def test_tiny_deviations_are_bounded_on_request():
    """MAD 0.001: the outlier lies 1000 of them off."""
    row = [[0.5, 0.501, 0.499, 0.502, 1.5]]
    free, bounded = (MCGRPO(max_abs_advantage=bound).estimate(groups(row)) for bound in (None, 10.0))
    assert free.max().item() == pytest.approx(0.999 / 0.002, rel=1e-3)
    torch.testing.assert_close(bounded, free.clamp(-10, 10))


def test_pivot_rules_choose_among_ties():
    """Three rows at the median, 4, 9, 4 tokens long."""
    several = groups([[0, 1, 0, 0, 1]])
    several.lengths_PG = torch.tensor([[4, 99, 9, 4, 1]])
    for rule, expected in ((FirstPivot(), 0), (LastPivot(), 3), (LongestPivot(), 2), (ShortestPivot(), 0)):
        assert MCGRPO(pivot_rule=rule).excluded(several).int().argmax().item() == expected


@pytest.mark.parametrize("rule", [LongestPivot(), ShortestPivot()], ids=repr)
def test_pivot_rules_name_the_lengths_they_need(rule):
    with pytest.raises(ValueError, match="lengths_PG"):
        MCGRPO(pivot_rule=rule).excluded(RewardGroups(torch.tensor([[1.0, 0.0, 0.0]])))


def test_the_pivot_can_stay():
    assert MCGRPO(pivot_exclusion="none").excluded(groups([[1, 0, 0]])) is None


def test_even_groups_warn():
    with pytest.warns(UserWarning, match="odd number of completions"):
        MCGRPO().update(groups([[1, 0, 0, 1]]))
    MCGRPO().update(groups([[1, 0, 0]]))


def test_the_control_arm_leaves_out_the_smallest_absolute_reward():
    several = groups([[1, -0.5, 2, 0.5, 1], [1, 0, 0, nan, 1]])
    assert MeanControl().excluded(several).int().argmax(dim=1).tolist() == [1, 3]


# Arguments, presets, metrics


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: MCGRPO(center_scale="median"), "center_scale"),
        (lambda: MCGRPO(mad_eps=0.0), "mad_eps"),
        (lambda: MCGRPO(mad_fallback="mean"), "mad_fallback"),
        (lambda: MCGRPO(pivot_rule="first"), "pivot_rule"),
        (lambda: MCGRPO(pivot_rule=FirstPivot), "pivot_rule"),
        (lambda: MCGRPO(pivot_exclusion="half"), "pivot_exclusion"),
        (lambda: MCGRPO(max_abs_advantage=0.0), "max_abs_advantage"),
        (lambda: MCGRPO(official_token_count=True, pivot_exclusion="none"), "official_token_count"),
        (lambda: MCGRPO(std_ddof=3), "std_ddof"),
        (lambda: MCGRPO(advantage_eps=-1e-4), "advantage_eps"),
        (lambda: MeanControl(std_ddof=3), "std_ddof"),
        (lambda: MeanControl(advantage_eps=-1e-4), "advantage_eps"),
    ],
)
def test_bad_arguments_are_named(make, name):
    with pytest.raises(ValueError, match=f"`{name}` should"):
        make()


def test_defaults_and_presets():
    assert MCGRPO() == MCGRPO("mad", 1e-3, "std", FirstPivot(), "mask", False, None, False, 1, 1e-4)
    assert MeanControl() == MeanControl(1, 1e-4)
    for gsm8k in (False, True):
        expected = MCGRPO(mad_fallback="epsilon", official_token_count=True, compensate_zero_advantages=gsm8k)
        assert mc_grpo.official(gsm8k) == expected
    for method in (MCGRPO, MeanControl):
        assert (method.num_extra_generations, method.training_only) == (1, True)
        assert method().state_dict() in ({}, {"pivot_rule": {}})
    assert MCGRPO(official_token_count=True).count_excluded_tokens
    assert not MCGRPO().count_excluded_tokens


def test_metrics_of_five_groups():
    """Medians 0, 0.4, 1, 2, 0; tied in all groups but the second; 2 + 4 + 0 + 2 + 1 rows off the median."""
    expected = {
        "median_mean": 3.4 / 5,
        "mad_mean": 0.3 / 5,
        "frac_groups_mad_zero": 4 / 5,
        "frac_groups_tied": 4 / 5,
        "contributing_rows_per_group": 9 / 5,
        "sign_flip_rate": 0.0,
    }
    found = MCGRPO().metrics(groups(REWARDS, torch.float64))
    assert found == {f"mc_grpo/{name}": pytest.approx(value) for name, value in expected.items()}


def test_sign_flips_are_rows_between_mean_and_median():
    """0.6 lies above the median 0.5 and below the mean of 0, 0, 0.5, 0.6, 9: one row of five."""
    assert MCGRPO().metrics(groups([[0, 0, 0.5, 0.6, 9]]))["mc_grpo/sign_flip_rate"] == pytest.approx(0.2)


def test_two_rows_at_the_median_are_a_tie():
    assert MCGRPO().metrics(groups([[0, 1, 1, 2, 3], [0, 1, 2, 3, 4]]))["mc_grpo/frac_groups_tied"] == 0.5


def test_groups_with_fewer_than_two_scored_rows_are_left_out_of_group_counts():
    """Two groups count, one of them with three rows at its median and two that contribute."""
    rewards = [[1, 0, 0, 1, 0], [0.1, 0.9, 0.4, 0.7, 0.3], [nan] * 5, [nan, nan, 1, nan, nan]]
    found = MCGRPO().metrics(groups(rewards))
    assert found["mc_grpo/frac_groups_mad_zero"] == pytest.approx(1 / 2)
    assert found["mc_grpo/frac_groups_tied"] == pytest.approx(1 / 2)
    assert found["mc_grpo/contributing_rows_per_group"] == pytest.approx(6 / 2)
