"""HA-DW, Your Group-Relative Advantage Is Biased (arXiv 2601.08521)."""

import math
from math import exp, nan

import _reference
import pytest
import torch
from _asserts import assert_golden, assert_matches
from _rewards import BINARY, groups, random_rewards
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ext.advantages import GRPO, HADW, MCGRPO, AdaptiveForgetting, FixedAnchor, MovingAverage, ha_dw
from grpo_ext.groups import RewardGroups
from grpo_ext.statistics import group_mean, is_all_equal

REWARDS = [[1, 0, 0, 0], [1, 1, 0, 1], [1, 0, 1, 0], [0, 0, 0, 0]]
ZEROS = [0, 0, 0, 0]
DTYPES = (torch.float32, torch.float64)


def with_history(estimator: HADW, accuracies: list[float]) -> HADW:
    """The estimator after batches of these accuracies."""
    for accuracy in accuracies:
        estimator.update(RewardGroups(torch.full((4, 4), accuracy, dtype=torch.float64)))
    return estimator


# Published values


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_the_default(dtype):
    """Earlier accuracies 0.30, 0.40, 0.50, so the anchor is 0.40; success rates 0.25, 0.75, 0.50, 0."""
    estimator = with_history(HADW(), [0.30, 0.40, 0.50])
    expected = [
        [2.265124, -0.559348, -0.559348, -0.559348],
        [0.457956, 0.457956, -2.766628, 0.457956],
        [1.018519, -1.244022, 1.018519, -1.244022],
        ZEROS,
    ]
    assert_golden(estimator.estimate(groups(REWARDS, dtype)), expected)
    base = _reference.grpo(REWARDS)
    assert_matches(estimator.estimate(groups(REWARDS, dtype)), _reference.ha_dw(base, REWARDS, 0.4))


def test_values_without_a_scale():
    estimator = with_history(HADW(base=GRPO(scale_rewards="none")), [0.30, 0.40, 0.50])
    expected = [
        [1.132788, -0.279730, -0.279730, -0.279730],
        [0.229024, 0.229024, -1.383591, 0.229024],
        [0.588144, -0.718361, 0.588144, -0.718361],
        ZEROS,
    ]
    assert_golden(estimator.estimate(groups(REWARDS)), expected)


def test_values_of_the_official_code():
    """Posterior anchor 0.39375: the mean of 0.30, 0.40, 0.50 and this batch's 0.375."""
    estimator = with_history(ha_dw.official_code(), [0.30, 0.40, 0.50])
    expected = [
        [2.597835, -0.649577, -0.649577, -0.649577],
        [0.525222, 0.525222, -3.212914, 0.525222],
        [1.168093, -1.444658, 1.168093, -1.444658],
        ZEROS,
    ]
    assert_golden(estimator.estimate(groups(REWARDS)), expected)


def test_values_with_an_unscorable_row():
    found = HADW(anchor=FixedAnchor(0.4)).estimate(groups([[1, nan, 0, 0]]))
    assert_golden(found, [[1.604318, nan, -0.702028, -0.702028]])


@pytest.mark.parametrize(
    ("window", "prior", "posterior"),
    [
        (2, [0.30, 0.30, 0.35, 0.45], [0.30, 0.35, 0.45, 0.4375]),
        (10, [0.30, 0.30, 0.35, 0.40], [0.30, 0.35, 0.40, 0.39375]),
    ],
)
def test_hard_update_averages_a_window(window, prior, posterior):
    rule = MovingAverage(window)
    for accuracy, before, after in zip([0.30, 0.40, 0.50, 0.375], prior, posterior, strict=True):
        assert rule.before(accuracy) == pytest.approx(before, rel=1e-12)
        assert rule.after(accuracy) == pytest.approx(after, rel=1e-12)
        rule.push(accuracy)


def test_soft_update_follows_its_published_trace():
    rule = AdaptiveForgetting(forgetting_scale=10.0, stability_window=3, warmup=3, forgetting_floor=0.05)
    beliefs = [0.300000, 0.350000, 0.400000, 0.389794, 0.402781, 0.413792]
    rates = [nan, nan, nan, 0.408248, 0.215708, 0.055833]
    for accuracy, belief, rate in zip([0.30, 0.40, 0.50, 0.375, 0.45, 0.60], beliefs, rates, strict=True):
        if not math.isnan(rate):
            assert rule.metrics() == {"forgetting_rate": pytest.approx(rate, abs=1e-6)}
        assert rule.after(accuracy) == pytest.approx(belief, abs=1e-6)
        rule.push(accuracy)
        assert rule.before(0.123) == pytest.approx(belief, abs=1e-6)


# Against the slow reference


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=50)
@given(
    rewards=random_rewards(),
    anchor=st.floats(0, 1),
    scale=st.sampled_from([0.5, 1.0, 1.3, 2.0]),
    base_scale=st.sampled_from(["group", "batch", "none"]),
)
def test_weights_match_the_reference(dtype, rewards, anchor, scale, base_scale):
    estimator = HADW(base=GRPO(base_scale), reweight_scale=scale, anchor=FixedAnchor(anchor))
    base = _reference.grpo_exact_zero(rewards, scale=base_scale)
    expected = _reference.ha_dw(base, rewards, anchor, scale)
    assert_matches(estimator.estimate(groups(rewards, dtype)), expected)


@settings(deadline=None, max_examples=50)
@given(accuracies=st.lists(st.floats(0, 1), min_size=1, max_size=15), window=st.integers(1, 5))
def test_hard_update_matches_the_reference(accuracies, window):
    rule = MovingAverage(window)
    for t, accuracy in enumerate(accuracies):
        expected = _reference.moving_average(accuracies[: t + 1], window)
        assert rule.after(accuracy) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        rule.push(accuracy)
        assert rule.before(accuracy) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert len(rule.accuracies) == min(window, len(accuracies))


@settings(deadline=None, max_examples=50)
@given(
    accuracies=st.lists(st.floats(0, 1), min_size=1, max_size=15),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    window=st.integers(2, 5),
    warmup=st.integers(1, 6),
    floor=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_soft_update_matches_the_reference(accuracies, scale, window, warmup, floor):
    rule = AdaptiveForgetting(scale, window, warmup, floor)
    beliefs, _ = _reference.adaptive_forgetting(accuracies, scale, window, warmup, floor)
    for accuracy, belief in zip(accuracies, beliefs, strict=True):
        assert rule.after(accuracy) == pytest.approx(belief, rel=1e-9, abs=1e-9)
        rule.push(accuracy)
    assert rule.num_batches == len(accuracies)
    assert len(rule.beliefs) == min(window, len(accuracies))


def test_warm_up_is_as_long_as_the_stability_window():
    """Up to there the belief is the running mean."""
    rule = AdaptiveForgetting(stability_window=4)
    for accuracy in (0.0, 1.0, 1.0, 0.0):
        rule.push(accuracy)
    assert rule.before(0.7) == pytest.approx(0.5)
    assert rule.forgetting_rate() == 1.0  # ten times the std of 0, 1/2, 2/3, 1/2, capped


# Theory


@settings(deadline=None, max_examples=50)
@given(rewards=random_rewards(), anchor=st.floats(0, 1))
def test_signs_are_the_bases(rewards, anchor):
    several = groups(rewards, torch.float64)
    found = HADW(anchor=FixedAnchor(anchor)).estimate(several).nan_to_num(nan=0.0)
    noise_free = torch.where(found.abs() < 1e-9, 0.0, found)
    base = GRPO().estimate(several).nan_to_num(nan=0.0)
    assert torch.equal(noise_free.sign(), torch.where(base.abs() < 1e-9, 0.0, base).sign())


@settings(deadline=None, max_examples=50)
@given(rewards=random_rewards(with_unscorable=False), anchor=st.floats(0, 1))
def test_output_is_linear_in_the_scale(rewards, anchor):
    several = groups(rewards, torch.float64)
    once = HADW(reweight_scale=0.7, anchor=FixedAnchor(anchor)).estimate(several)
    thrice = HADW(reweight_scale=2.1, anchor=FixedAnchor(anchor)).estimate(several)
    torch.testing.assert_close(thrice, 3 * once)


@settings(deadline=None, max_examples=50)
@given(rewards=random_rewards(with_unscorable=False), anchor=st.floats(0, 1))
def test_groups_sum_to_minus_two_lambda_s_sinh_d(rewards, anchor):
    """S is the sum of the positive base advantages: hard prompts gain mass, easy ones lose it."""
    several = groups(rewards, torch.float64)
    positive_P = GRPO().estimate(several).clamp(min=0).sum(dim=1)
    easiness_P = group_mean(several.success_PG)[:, 0] - anchor
    sums_P = HADW(anchor=FixedAnchor(anchor)).estimate(several).sum(dim=1)
    torch.testing.assert_close(sums_P, -2 * 1.3 * positive_P * easiness_P.sinh(), rtol=1e-9, atol=1e-9)


def test_hard_prompts_favour_right_answers_and_easy_ones_punish_wrong_answers():
    """The four cases: lambda times e to the plus or minus |d|."""
    found = HADW(base=GRPO("none"), anchor=FixedAnchor(0.5)).estimate(groups([[1, 0, 0, 0], [1, 1, 1, 0]]))
    factors = found / GRPO("none").estimate(groups([[1, 0, 0, 0], [1, 1, 1, 0]]))
    up, down = 1.3 * exp(0.25), 1.3 * exp(-0.25)
    assert_matches(factors, [[up, down, down, down], [down, down, down, up]])


def test_scale_one_at_the_anchor_is_the_base():
    several = groups([[1, 0, 1, 0]])
    found = HADW(reweight_scale=1.0, anchor=FixedAnchor(0.5)).estimate(several)
    assert torch.equal(found, GRPO().estimate(several))


def test_the_first_batch_is_compared_with_itself():
    """No belief yet: the anchor is the batch's own accuracy, whichever rule."""
    several = groups(REWARDS)
    expected = _reference.ha_dw(_reference.grpo(REWARDS), REWARDS, 0.375)
    for anchor in (MovingAverage(), AdaptiveForgetting()):
        assert_matches(HADW(anchor=anchor).estimate(several), expected)


def test_literal_soft_update_never_moves():
    """Without warm-up and floor equal beliefs have no spread, hence no step: an absorbing state."""
    rule = AdaptiveForgetting(warmup=1, forgetting_floor=0.0)
    rule.push(0.3)
    for accuracy in (0.4, 0.6, 0.9):
        rule.push(accuracy)
    assert set(rule.beliefs) == {0.3}


def informative(num_completions: int, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Every number of right answers that leaves a group mixed: group means and their probabilities given that.

    The exact binomial distribution, as one group per outcome.
    """
    outcomes_PG = torch.ones(num_completions + 1, num_completions, dtype=torch.float64).tril(-1)
    ways = [math.comb(num_completions, k) for k in range(num_completions + 1)]
    chances = [w * rate**k * (1 - rate) ** (num_completions - k) for k, w in enumerate(ways)]
    is_mixed_P = ~is_all_equal(outcomes_PG)[:, 0]
    chance_P = torch.tensor(chances, dtype=torch.float64)[is_mixed_P]
    return group_mean(outcomes_PG)[is_mixed_P][:, 0], chance_P / chance_P.sum()


@pytest.mark.parametrize("num_completions", [2, 4, 8, 16])
@pytest.mark.parametrize("rate", [0.05, 0.1, 0.25, 0.5, 0.75, 0.9])
def test_group_mean_is_biased_as_lemma_2_says(num_completions, rate):
    """(p (1-p)^G + p^(G+1) - p^G) / Z: too high for hard prompts, too low for easy ones."""
    means, chances = informative(num_completions, rate)
    bias = (means * chances).sum().item() - rate
    g, p = num_completions, rate
    closed = (p * (1 - p) ** g + p ** (g + 1) - p**g) / (1 - (1 - p) ** g - p**g)
    assert bias == pytest.approx(closed, abs=1e-12)
    mirrored_means, mirrored_chances = informative(num_completions, 1 - rate)
    assert (mirrored_means * mirrored_chances).sum().item() - (1 - rate) == pytest.approx(-bias, abs=1e-12)
    assert (bias > 1e-9, bias < -1e-9) == (rate < 0.5, rate > 0.5)


@pytest.mark.parametrize(
    ("num_completions", "at_tenth", "at_quarter"),
    [(2, 0.400000, 0.250000), (4, 0.190576, 0.112069), (8, 0.075583, 0.027800), (16, 0.022745, 0.002531)],
)
def test_bias_has_its_published_size(num_completions, at_tenth, at_quarter):
    for rate, expected in ((0.1, at_tenth), (0.25, at_quarter)):
        means, chances = informative(num_completions, rate)
        assert (means * chances).sum().item() - rate == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("num_completions", "below_quarter", "below_half"), [(4, 1.0, 0.7770), (6, 0.8278, 0.6897), (8, 0.7811, 0.6409)]
)
def test_right_answers_are_underestimated_as_often_as_theorem_2_says(num_completions, below_quarter, below_half):
    """P(A - A_hat > 0), averaged over uniform success rates: A_hat of a right answer is 1 - group mean."""
    for high, expected in ((0.25, below_quarter), (0.5, below_half)):
        rates = [(i + 0.5) / 1000 * high for i in range(1000)]
        shares = []
        for rate in rates:
            means, chances = informative(num_completions, rate)
            shares.append(chances[means > rate].sum().item())
        assert sum(shares) / len(shares) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("num_completions", [2, 4, 8])
def test_extreme_prompts_are_misjudged_surely(num_completions):
    """Corollary 3: below 1/G every mixed group underestimates a right answer, above (G-1)/G each overestimates it."""
    outcomes_PG = torch.ones(num_completions + 1, num_completions, dtype=torch.float64).tril(-1)[1:-1]
    estimated_P = GRPO(scale_rewards="none").estimate(RewardGroups(outcomes_PG))[:, 0]
    for rate in (0.5 / num_completions, 0.99 / num_completions):
        assert (estimated_P < 1 - rate).all()
    for rate in (1 - 0.5 / num_completions, 1 - 0.99 / num_completions):
        assert (estimated_P > 1 - rate).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alpha", "beta", "num_completions", "collapsed", "bias"),
    [
        (1, 9, 4, 0.24245, 0.012613),
        (1, 9, 8, 0.03447, 0.001708),
        (2, 5, 4, 0.02945, 0.001634),
        (9, 1, 4, 0.24245, -0.012613),
        (3, 3, 4, 0.01428, 0.0),
    ],
)
def test_bias_of_continuous_rewards(alpha, beta, num_completions, collapsed, bias):
    """Groups that spread less than 0.1 teach nothing; the others overestimate hard prompts (appendix D.5)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        law = torch.distributions.Beta(torch.tensor(float(alpha)), torch.tensor(float(beta)))
        rewards_PG = law.sample((1_000_000, num_completions)).double()
    is_collapsed_P1 = is_all_equal(rewards_PG, tol=0.1)
    means = group_mean(rewards_PG)[~is_collapsed_P1]
    assert is_collapsed_P1.double().mean().item() == pytest.approx(collapsed, abs=2e-3)
    assert means.mean().item() - alpha / (alpha + beta) == pytest.approx(bias, abs=5e-4)


# Edges


def test_all_equal_groups_count_in_the_accuracy():
    """Means 1, 0, 0 and 1/2: 3/8."""
    estimator = HADW()
    estimator.update(groups([[1] * 4, ZEROS, ZEROS, [1, 1, 0, 0]]))
    assert estimator.anchor.accuracies == [0.375]


def test_accuracy_is_the_share_of_right_answers_not_a_mean_of_groups():
    """One of four scored rows in the first group, one of one in the second: 2/5."""
    estimator = HADW()
    estimator.update(groups([[1, 0, 0, 0], [1, nan, nan, nan]]))
    assert estimator.anchor.accuracies == [pytest.approx(0.4)]


def test_difficulty_comes_from_success_not_from_rewards():
    """Rewards 0 and 2 with success 0 and 1: the weights of 0/1 rewards on the advantages of the sum."""
    rewards = [[2, 0, 0, 0]]
    found = HADW(anchor=FixedAnchor(0.4)).estimate(groups(rewards, success_PG=[[1, 0, 0, 0]]))
    assert_matches(found, _reference.ha_dw(_reference.grpo(rewards), [[1, 0, 0, 0]], 0.4))


def test_a_group_without_success_keeps_its_base_advantage():
    several = groups([[1, 0, 0, 0], [1, 1, 0, 0]], success_PG=[[nan] * 4, [1, nan, 0, 0]])
    found, base = HADW(anchor=FixedAnchor(0.5)).estimate(several), GRPO().estimate(several)
    assert torch.equal(found[0], base[0])
    down, up = exp(1 / 3 - 0.5), exp(0.5 - 1 / 3)  # one of the three known answers is right
    assert_matches(found[1] / base[1], [1.3 * up, 1.3 * up, 1.3 * down, 1.3 * down])


def test_the_mean_reward_itself_gets_zero():
    assert_matches(HADW(anchor=FixedAnchor(0.2)).estimate(groups([[1, 0.5, 0]]))[:, 1], [0.0])


def test_evaluation_reads_the_anchor_as_it_is():
    estimator = with_history(HADW(), [0.2])
    estimator.estimate(groups([[1, 0, 0, 0]]))
    estimator.metrics(groups([[1, 0, 0, 0]]))
    assert estimator.anchor.accuracies == [pytest.approx(0.2)]


def test_weights_apply_to_any_base():
    """Median and MAD of 0.1, 0.9, 0.4, 0.7, 0.3 under the weights of their mean 0.48 against 0.3."""
    row = [[0.1, 0.9, 0.4, 0.7, 0.3]]
    found = HADW(base=MCGRPO(), anchor=FixedAnchor(0.3)).estimate(groups(row))
    assert_matches(found, _reference.ha_dw(_reference.mc_grpo(row), row, 0.3))


@settings(deadline=None, max_examples=25)
@given(rewards=random_rewards(values=BINARY, sizes=(4,)))
def test_posterior_counts_the_batch_first(rewards):
    known = _reference.scored(_reference.flat(rewards))
    if not known:
        return
    estimator = with_history(HADW(anchor_timing="posterior"), [0.5, 0.25])
    anchor = (0.75 + sum(known) / len(known)) / 3
    expected = _reference.ha_dw(_reference.grpo_exact_zero(rewards), rewards, anchor)
    assert_matches(estimator.estimate(groups(rewards, torch.float64)), expected)


# Arguments, presets, metrics


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: HADW(reweight_scale=0.0), "reweight_scale"),
        (lambda: HADW(anchor_timing="before"), "anchor_timing"),
        (lambda: HADW(anchor="moving_average"), "anchor"),
        (lambda: HADW(anchor=MovingAverage), "anchor"),
        (lambda: HADW(base=GRPO), "base"),
        (lambda: MovingAverage(window=0), "window"),
        (lambda: AdaptiveForgetting(forgetting_scale=0.0), "forgetting_scale"),
        (lambda: AdaptiveForgetting(stability_window=1), "stability_window"),
        (lambda: AdaptiveForgetting(warmup=0), "warmup"),
        (lambda: AdaptiveForgetting(forgetting_floor=-0.1), "forgetting_floor"),
        (lambda: AdaptiveForgetting(forgetting_floor=1.1), "forgetting_floor"),
        (lambda: FixedAnchor(value=-0.1), "value"),
        (lambda: FixedAnchor(value=1.1), "value"),
    ],
)
def test_bad_arguments_are_named(make, name):
    with pytest.raises(ValueError, match=f"`{name}` should"):
        make()


def test_defaults_and_presets():
    assert HADW() == HADW(GRPO(), 1.3, MovingAverage(window=10), "prior")
    assert AdaptiveForgetting() == AdaptiveForgetting(10.0, 20, None, 0.05)
    assert FixedAnchor() == FixedAnchor(0.5)
    assert ha_dw.paper() == HADW(anchor=AdaptiveForgetting())
    base = GRPO(advantage_eps=1e-6)
    assert ha_dw.official_code() == HADW(base, 1.5, MovingAverage(10), anchor_timing="posterior")


def test_state_is_the_window():
    estimator = with_history(HADW(anchor=MovingAverage(2)), [0.1, 0.2, 0.3])
    assert estimator.state_dict() == {"base": {}, "anchor": {"accuracies": pytest.approx([0.2, 0.3])}}
    assert HADW(anchor=AdaptiveForgetting()).state_dict()["anchor"] == {"beliefs": [], "num_batches": 0}
    assert HADW(anchor=FixedAnchor()).state_dict()["anchor"] == {}


def test_metrics_of_the_published_groups():
    """d = -0.15, 0.35, 0.1, -0.4; the factors of an all-equal group are lambda."""
    numbers = with_history(HADW(), [0.30, 0.40, 0.50]).metrics(groups(REWARDS, torch.float64))
    advantages = _reference.ha_dw(_reference.grpo(REWARDS), REWARDS, 0.4)
    factors = [1.510385, *[1.118920] * 3, *[0.916095] * 3, 1.844788, *[1.176289] * 2, *[1.436722] * 2, *[1.3] * 4]
    expected = {
        "batch_accuracy": 0.375,
        "anchor": 0.4,
        "anchor_next": 0.39375,
        "diff_mean": -0.025,
        "diff_abs_mean": 0.25,
        "frac_harder": 1 / 3,
        "factor_mean": sum(factors) / 16,
        "factor_min": 0.916095,
        "factor_max": 1.844788,
        "net_advantage": sum(map(sum, advantages)) / 4,
    }
    assert numbers == {f"ha_dw/{name}": pytest.approx(value, abs=1e-6) for name, value in expected.items()}


def test_soft_update_reports_its_rate():
    assert HADW(anchor=AdaptiveForgetting()).metrics(groups(REWARDS))["ha_dw/forgetting_rate"] == 1.0
    assert "ha_dw/forgetting_rate" not in HADW().metrics(groups(REWARDS))


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_a_fixed_anchor_learns_nothing(value):
    estimator = with_history(HADW(anchor=FixedAnchor(value)), [0.1, 0.9])
    assert estimator.anchor == FixedAnchor(value)
    assert estimator.metrics(groups(REWARDS))["ha_dw/anchor"] == value
