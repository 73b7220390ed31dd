"""AVSPO, Advantage Collapse in Group Relative Policy Optimization (arXiv 2605.21125), and its public prototype."""

import warnings
from math import nan, sqrt

import _reference
import pytest
import torch
from _asserts import assert_golden, assert_identical, assert_matches
from _rewards import groups, random_rewards
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ext.advantages import (
    AVSPO,
    GRPO,
    AVSPOPrototype,
    ConstantRewards,
    ExponentialRewards,
    FixedCount,
    LinearCount,
    NoVirtualRewards,
    PowerCount,
    StratifiedRewards,
    UniformRewards,
    avspo,
)
from grpo_ext.groups import RewardGroups
from grpo_ext.statistics import is_all_equal

pytestmark = pytest.mark.filterwarnings("ignore:AVSPO sees fewer than 4 groups")

A, B, C, D = [0] * 8, [1] * 8, [1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0]
DTYPES = (torch.float32, torch.float64)


def after(estimator: AVSPO, mean_reward: float) -> AVSPO:
    """The estimator after a first batch of four groups with this mean reward, which leaves the threshold alone."""
    estimator.update(groups([[mean_reward] * 8] * 4, torch.float64))
    return estimator


def batch(rate: float, mean_reward: float) -> RewardGroups:
    """Four groups of eight with this collapse rate and mean success; the rewards only decide who collapsed."""
    num_collapsed = round(4 * rate)
    rewards = [A] * num_collapsed + [C] * (4 - num_collapsed)
    return groups(rewards, torch.float64, success_PG=[[mean_reward] * 8] * 4)


def always(**arguments: object) -> AVSPO:
    """Triggered by any collapsed group."""
    return AVSPO(acr_threshold_init=0.0, acr_threshold_min=0.0, **arguments)


# Published values: collapse rate 1/2, mean reward 17/32


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_above_the_threshold(dtype):
    """K = ceil(8 sqrt(1/2)) = 6."""
    estimator = after(AVSPO(acr_threshold_init=0.45), 0.5)
    several = groups([A, B, C, D], dtype)
    right, wrong = [0, 0.700910, 1.207381, 0.539945], [-0.699179, 0, -0.724429, -1.619835]
    expected = [
        [right[p] if reward else wrong[p] for reward in row] for p, row in enumerate(several.rewards_PG.tolist())
    ]
    assert_golden(estimator.estimate(several), expected)
    assert estimator.metrics(several)["avspo/num_virtual"] == 6
    estimator.update(several)
    assert estimator.threshold == pytest.approx(0.4505, rel=1e-9)


def test_values_of_the_theory():
    estimator = AVSPO(acr_threshold_init=0.45, std_ddof=0, advantage_eps=0.0)
    assert_golden(estimator.estimate(groups([A, B, C, D]))[:2], [[-0.727607] * 8, [0.727607] * 8])


def test_virtual_rewards_of_the_published_groups():
    count_P1, value_P1 = torch.tensor([[6], [6]]), torch.tensor([[0.0], [1.0]])
    below = [0.857143, 0.714286, 0.571429, 0.428571, 0.285714, 0.142857]
    above = [0.100000, 0.083333, 0.066667, 0.050000, 0.033333, 0.016667]
    assert_golden(StratifiedRewards().rewards(value_P1, count_P1, 0.1, 0), [above, below])


def test_a_rate_equal_to_the_threshold_does_not_trigger():
    estimator = after(AVSPO(acr_threshold_init=0.5), 0.5)
    several = groups([A, B, C, D])
    found = estimator.estimate(several)
    assert (found[:2] == 0).all()
    assert torch.equal(found[2:], GRPO().estimate(several)[2:])
    estimator.update(several)
    assert estimator.threshold == 0.5


def test_threshold_follows_its_published_trajectory():
    estimator = AVSPO()
    rows = [
        (0.75, 0.20, 0.5, True, 7),
        (0.75, 0.25, 0.5, True, 7),
        (0.50, 0.22, 0.5025, False, None),
        (1.00, 0.22, 0.502525, True, 8),
        (0.25, 0.30, 0.502525, False, None),
        (0.25, 0.28, 0.49999975, False, None),
    ]
    for rate, mean_reward, threshold, is_triggered, count in rows:
        several = batch(rate, mean_reward)
        assert estimator.threshold == pytest.approx(threshold, rel=1e-9)
        assert estimator.metrics(several)["avspo/triggered"] == is_triggered
        if count is not None:
            assert PowerCount().count(torch.tensor([[8]]), rate, 0.5).tolist() == [[count]]
        estimator.update(several)
    assert estimator.threshold == pytest.approx(0.50249975, abs=5e-9)
    assert estimator.num_batches == 6


def test_values_with_an_unscorable_row():
    """Three scored rows, collapse rate 1/2: K = ceil(3 sqrt(1/2)) = 3."""
    found = AVSPO(acr_threshold_init=0.4).estimate(groups([[0, nan, 0, 0], [1, 0, 0, 0]]))
    assert_golden(found[:1], [[-0.788699, nan, -0.788699, -0.788699]])


def test_values_of_rewards_minus_one_and_one():
    """Collapsed groups live in the success scale, mixed ones in the rewards'."""
    rewards = [[2 * reward - 1 for reward in row] for row in (A, B, C, D)]
    found = AVSPO(acr_threshold_init=0.45).estimate(groups(rewards, success_PG=[A, B, C, D]))
    expected = [[-0.699179] * 8, [0.700910] * 8]
    expected += [[1.207498] * 3 + [-0.724499] * 5, [0.540003] * 6 + [-1.620010] * 2]
    assert_golden(found, expected)


# Against the slow reference


COUNTS = [
    (PowerCount(), _reference.power_count),
    (LinearCount(), _reference.linear_count),
    (FixedCount(1), _reference.fixed_count(1)),
    (FixedCount(4), _reference.fixed_count(4)),
]
STRATEGIES = [
    (StratifiedRewards(), _reference.stratified),
    (ConstantRewards(), _reference.constant(0.5)),
    (ConstantRewards(0.25), _reference.constant(0.25)),
    (ExponentialRewards(0.75), _reference.exponential(0.75)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=60)
@given(
    rewards=random_rewards(values=(0.0, 0.5, 1.0)),
    threshold=st.sampled_from([0.1, 0.25, 0.5]),
    count=st.sampled_from(COUNTS),
    strategy=st.sampled_from(STRATEGIES),
    kinds=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    ddof=st.sampled_from([0, 1]),
)
def test_advantages_match_the_reference(dtype, rewards, threshold, count, strategy, kinds, ddof):
    estimator = AVSPO(
        acr_threshold_init=threshold,
        virtual_count_rule=count[0],
        virtual_strategy=strategy[0],
        augment_all_incorrect=kinds[0],
        augment_all_correct=kinds[1],
        partial_credit_groups="as_correct" if kinds[2] else "skip",
        std_ddof=ddof,
    )
    expected = _reference.avspo(
        rewards,
        rewards,
        threshold,
        count[1],
        strategy[1],
        incorrect=kinds[0],
        correct=kinds[1],
        as_correct=kinds[2],
        ddof=ddof,
    )
    assert_matches(estimator.estimate(groups(rewards, dtype)), expected)


@settings(deadline=None, max_examples=40)
@given(
    rewards=random_rewards(values=(0.0, 1.0)),
    alpha=st.sampled_from([0.1, 0.3, 0.7, 1.0]),
    anchor=st.sampled_from([0.05, 0.5, 1.0]),
    scale=st.sampled_from(["group", "none"]),
)
def test_sensitivity_and_anchor_match_the_reference(rewards, alpha, anchor, scale):
    estimator = always(virtual_sensitivity=alpha, anchor_reward=anchor, scale_rewards=scale)
    expected = _reference.avspo(rewards, rewards, 0.0, alpha=alpha, anchor=anchor, scale=scale)
    assert_matches(estimator.estimate(groups(rewards, torch.float64)), expected)


@settings(deadline=None, max_examples=50)
@given(
    batches=st.lists(
        st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.integers(0, 4)), min_size=1, max_size=12
    ),
    lr=st.sampled_from([0.01, 0.5, 1.0]),
    stagnate=st.booleans(),
)
def test_threshold_matches_the_reference(batches, lr, stagnate):
    rule = "stagnate" if stagnate else "hold"
    estimator = AVSPO(acr_threshold_lr=lr, threshold_zero_improvement=rule)
    expected, previous = 0.5, None
    for rate, quarters in batches:
        estimator.update(batch(rate, quarters / 4))
        change = None if previous is None else quarters / 4 - previous
        expected, previous = _reference.avspo_threshold(expected, change, rate, lr, stagnate=stagnate), quarters / 4
        assert estimator.threshold == pytest.approx(expected, rel=1e-9)
        assert 0.1 <= estimator.threshold <= 0.9


# Theory


def size(num_rows: int, count: int) -> float:
    """The closed form of |A'| with the population std and no eps, for both cases and any anchor."""
    spread = (num_rows + count) * (count - 1) / (3 * num_rows * (count + 1))
    return sqrt(count / num_rows) / sqrt(1 + spread)


def pushed(num_rows: int, count: int, **arguments: object) -> tuple[float, float]:
    """The advantages of an all-incorrect and of an all-correct group with K virtual rewards."""
    several = groups([[0] * num_rows, [1] * num_rows], torch.float64)
    found = always(virtual_count_rule=FixedCount(count), **arguments).estimate(several)
    assert (found == found[:, :1]).all()
    return found[0, 0].item(), found[1, 0].item()


@pytest.mark.parametrize("num_rows", [2, 3, 4, 8, 16])
def test_advantages_have_a_closed_form(num_rows):
    """Common to the group, signed by its kind, at most sqrt(K/G), which only K = 1 reaches, growing with K."""
    sizes = []
    for count in range(1, num_rows + 1):
        low, high = pushed(num_rows, count, std_ddof=0, advantage_eps=0.0)
        assert (low, high) == (pytest.approx(-size(num_rows, count)), pytest.approx(size(num_rows, count)))
        bound = sqrt(count / num_rows)
        assert high == pytest.approx(bound) if count == 1 else high < bound
        sizes.append(high)
        sample = pushed(num_rows, count, std_ddof=1, advantage_eps=0.0)[1]
        assert sample == pytest.approx(high * sqrt((num_rows + count - 1) / (num_rows + count)))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)


def test_closed_form_has_its_published_values():
    expected = [0.353553, 0.468521, 0.552345, 0.620174, 0.677631, 0.727607, 0.771845, 0.811503]
    found = [pushed(8, count, std_ddof=0, advantage_eps=0.0)[1] for count in range(1, 9)]
    assert found == [pytest.approx(value, abs=1e-6) for value in expected]


@pytest.mark.parametrize(("num_rows", "worst"), [(4, 0.0045), (8, 0.0054), (16, 0.0074)])
def test_the_anchor_hardly_matters(num_rows, worst):
    """Any multiple of 1 .. K gives the same advantage up to eps; between anchors 0.05 and 0.5 less than 1 %."""
    changes = []
    for count in range(1, num_rows + 1):
        several = groups([[0] * num_rows], torch.float64)
        rule = FixedCount(count)
        low, high = (always(virtual_count_rule=rule, anchor_reward=a).estimate(several)[0, 0] for a in (0.05, 0.5))
        changes.append((1 - low / high).abs().item())
        exact = [
            always(virtual_count_rule=rule, anchor_reward=a, advantage_eps=0.0).estimate(several)[0, 0].item()
            for a in (0.05, 0.5)
        ]
        assert exact[0] == pytest.approx(exact[1])
    assert max(changes) == pytest.approx(worst, abs=1e-4)


@pytest.mark.parametrize("count", range(1, 9))
def test_constant_rewards_reach_the_bound(count):
    low, high = pushed(8, count, virtual_strategy=ConstantRewards(), std_ddof=0, advantage_eps=0.0)
    assert (low, high) == (pytest.approx(-sqrt(count / 8)), pytest.approx(sqrt(count / 8)))


@settings(deadline=None, max_examples=50)
@given(rewards=random_rewards(), scale=st.sampled_from([None, "group", "none"]), ddof=st.sampled_from([0, 1]))
def test_mixed_groups_are_the_bases(rewards, scale, ddof):
    """Bit for bit, triggered or not."""
    several = groups(rewards)
    base = GRPO(scale, std_ddof=ddof).estimate(several)
    is_mixed_P = ~is_all_equal(several.rewards_PG)[:, 0]
    for estimator in (AVSPO(scale_rewards=scale, std_ddof=ddof), always(scale_rewards=scale, std_ddof=ddof)):
        assert_identical(estimator.estimate(several)[is_mixed_P], base[is_mixed_P])


@settings(deadline=None, max_examples=50)
@given(rewards=random_rewards())
def test_without_a_trigger_all_is_the_bases(rewards):
    """A threshold of 1 is never exceeded; these rewards leave no float noise in the base."""
    never = AVSPO(acr_threshold_init=1.0, acr_threshold_max=1.0)
    assert_identical(never.estimate(groups(rewards)), GRPO().estimate(groups(rewards)))


@pytest.mark.parametrize(
    ("rate", "count"),
    [
        (0.01, 1),
        (0.0156, 1),
        (0.0625, 2),
        (0.125, 3),
        (0.25, 4),
        (0.375, 5),
        (0.5, 6),
        (0.625, 7),
        (0.75, 7),
        (0.875, 8),
        (1.0, 8),
    ],
)
def test_number_of_virtual_rewards_of_eight(rate, count):
    assert PowerCount().count(torch.tensor([[8]]), rate, 0.5).item() == count


@pytest.mark.parametrize("rule", [PowerCount(), LinearCount(), FixedCount(3)], ids=repr)
def test_number_of_virtual_rewards_grows_with_the_rate(rule):
    """Between 1 and the number of scored rows, which may differ between groups."""
    num_scored_P1 = torch.tensor([[2], [5], [8]])
    counts = torch.cat([rule.count(num_scored_P1, i / 64, 0.5) for i in range(65)], dim=1)
    assert (counts.diff(dim=1) >= 0).all()
    assert counts.min() >= 1
    assert (counts <= num_scored_P1).all()


def test_exact_products_are_not_rounded_up():
    """25 * 7/25 is 7 and 0.2 * 12 * sqrt(25/36) is 2, though both lie a rounding error above in floating point."""
    assert PowerCount().count(torch.tensor([[25]]), 7 / 25, 1.0).item() == 7
    assert LinearCount().count(torch.tensor([[12]]), 25 / 36, 0.2).item() == 2


@pytest.mark.parametrize(("alpha", "count"), [(0.3, 2), (0.5, 4), (0.7, 5), (1.0, 7)])
def test_linear_count(alpha, count):
    """ceil(alpha * 8 * sqrt(0.64)) = ceil(6.4 alpha)."""
    assert LinearCount().count(torch.tensor([[8]]), 0.64, alpha).item() == count


@settings(deadline=None, max_examples=50)
@given(threshold=st.floats(0.1, 0.9), rate=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), lr=st.floats(0, 1))
def test_improvement_never_moves_the_threshold_past_the_rate(threshold, rate, lr):
    estimator = after(AVSPO(acr_threshold_init=threshold, acr_threshold_lr=lr), 0.25)
    estimator.update(batch(rate, 0.5))
    target = min(0.9, max(0.1, rate))
    assert min(threshold, target) - 1e-12 <= estimator.threshold <= max(threshold, target) + 1e-12


def test_a_learning_rate_of_zero_keeps_the_threshold():
    estimator = AVSPO(acr_threshold_lr=0.0)
    for mean_reward in (0.2, 0.4, 0.1):
        estimator.update(batch(1.0, mean_reward))
    assert estimator.threshold == 0.5


@pytest.mark.parametrize(("mean_reward", "hold", "stagnate"), [(0.5, 0.5, 0.495), (0.6, 0.505, 0.505)])
def test_standstill_holds_or_counts_as_decline(mean_reward, hold, stagnate):
    """Rate 1 from threshold 0.5: a step of 0.01 * 0.5."""
    for rule, expected in (("hold", hold), ("stagnate", stagnate)):
        estimator = after(AVSPO(threshold_zero_improvement=rule), 0.5)
        estimator.update(batch(1.0, mean_reward))
        assert estimator.threshold == pytest.approx(expected)


# Edges


def test_groups_with_fewer_than_two_scored_rows_do_not_count():
    """One collapsed of two counted groups: 1/2, not above the threshold; the lone row gets 0."""
    rewards = [[0, 0, 0, 0], [1, 0, 0, 0], [nan, nan, 1, nan], [nan] * 4]
    found = AVSPO().estimate(groups(rewards))
    assert_matches(found, _reference.grpo_exact_zero(rewards))
    assert AVSPO().metrics(groups(rewards))["avspo/num_groups"] == 2
    assert always().estimate(groups(rewards))[2, 2] == 0


def test_groups_of_one_are_ignored():
    several = groups([[1], [0]])
    assert torch.equal(always().estimate(several), torch.zeros(2, 1))
    assert always().metrics(several)["avspo/triggered"] == 0


def test_partial_credit_is_skipped_or_counts_as_correct():
    """Half credit all round: 0, or the push of (c - mu') / (sigma' + eps) with c = 1/2 and K = G = 4."""
    several = groups([[0.5] * 4], torch.float64)
    assert (always().estimate(several) == 0).all()
    augmented = [0.5] * 4 + [0.4, 0.3, 0.2, 0.1]
    expected = (0.5 - _reference.mean(augmented)) / (_reference.std(augmented, 1) + 1e-4)
    assert_matches(always(partial_credit_groups="as_correct").estimate(several), [[expected] * 4])


def test_equal_rewards_with_different_success_are_skipped():
    several = groups([[1, 1, 1, 1]], success_PG=[[1, 1, 0, 0]])
    for rule in ("skip", "as_correct"):
        assert (always(partial_credit_groups=rule).estimate(several) == 0).all()


def test_equal_success_with_different_rewards_is_no_collapse():
    several = groups([[1, 1, 0.5, 1]], success_PG=[[1, 1, 1, 1]])
    assert torch.equal(always().estimate(several), GRPO().estimate(several))


def test_a_row_whose_correctness_is_unknown_counts_as_the_rest_of_its_group():
    """Four scored rows of value 0 meet K = 4 virtual rewards, though one function abstained for a row."""
    found = always().estimate(groups([[0] * 4], torch.float64, success_PG=[[0, 0, nan, 0]]))
    assert_matches(found, _reference.avspo([[0] * 4], [[0] * 4], 0.0))


def test_errors_only_and_correct_only():
    several = groups([A, B])
    errors, correct = always(augment_all_correct=False), always(augment_all_incorrect=False)
    assert (errors.estimate(several).sign() == torch.tensor([[-1], [0]])).all()
    assert (correct.estimate(several).sign() == torch.tensor([[0], [1]])).all()


def test_without_scaling_the_anchor_counts():
    """-anchor (K+1) / (2 (G+K)) = -0.1 * 9 / 32 and K / (2 (G+K)) = 8/32, times the range of the reward."""
    unscaled = always(scale_rewards="none")
    assert_matches(unscaled.estimate(groups([A, B])), [[-0.028125] * 8, [0.25] * 8])
    rewards = torch.tensor([A, B]) * 2.0 - 1
    several = RewardGroups(rewards, torch.tensor([A, B]).float(), reward_range=2.0)
    assert_matches(unscaled.estimate(several), [[-0.05625] * 8, [0.5] * 8])


def test_groups_do_not_sum_to_zero():
    found = AVSPO(std_ddof=0, advantage_eps=0.0).estimate(groups([A, A], torch.float64))
    assert found[0].sum().item() == pytest.approx(-8 * size(8, 8))


def test_the_first_batch_can_trigger_but_not_move_the_threshold():
    estimator = AVSPO()
    assert (estimator.estimate(groups([A] * 4)) < 0).all()
    estimator.update(groups([A] * 4))
    assert (estimator.threshold, estimator.prev_mean_reward, estimator.num_batches) == (0.5, 0.0, 1)


def test_a_tolerance_decides_what_collapsed():
    """Rewards 0.001 apart are mixed, or equal where the tolerance says so; their success agrees."""
    several = groups([[0.001, 0, 0, 0]], success_PG=[[0] * 4])
    assert torch.equal(always().estimate(several), GRPO().estimate(several))
    assert (always(collapse_tol=0.01).estimate(several) == -always().estimate(groups([[1] * 4]))).sum() == 0
    assert always(collapse_tol=0.01).metrics(several)["avspo/num_virtual"] == 4


# Strategies


@pytest.mark.parametrize(
    "strategy", [StratifiedRewards(), UniformRewards(), ConstantRewards(), ExponentialRewards()], ids=repr
)
def test_every_strategy_pushes_away_from_wrong_and_towards_right(strategy):
    found = always(virtual_strategy=strategy).estimate(groups([A, B]))
    assert (found[0] < 0).all()
    assert (found[1] > 0).all()


def test_no_virtual_rewards_is_grpo():
    several, none = groups([A, B, C]), always(virtual_strategy=NoVirtualRewards())
    assert torch.equal(none.estimate(several), GRPO().estimate(several))
    assert none.metrics(several)["avspo/num_virtual"] == 0


def test_no_virtual_rewards_leaves_partial_credit_at_zero():
    """Exactly, also where the mean of equal rewards rounds."""
    none = always(virtual_strategy=NoVirtualRewards(), partial_credit_groups="as_correct")
    assert (none.estimate(groups([[0.11] * 3, [0.01] * 3])) == 0).all()


def test_uniform_rewards_are_drawn_per_group_per_batch_and_per_seed():
    """The same on every rank and after a resume, whatever the global random state."""
    value_P1, count_P1 = torch.zeros(2, 1), torch.full((2, 1), 6)
    first = UniformRewards(seed=1).rewards(value_P1, count_P1, 0.1, 5)
    torch.rand(1)
    assert torch.equal(first, UniformRewards(seed=1).rewards(value_P1, count_P1, 0.1, 5))
    assert not torch.equal(first, UniformRewards(seed=1).rewards(value_P1, count_P1, 0.1, 6))
    assert not torch.equal(first, UniformRewards(seed=2).rewards(value_P1, count_P1, 0.1, 5))
    assert not torch.equal(first[0], first[1])
    assert ((first >= 0) & (first < 1)).all()


def test_uniform_rewards_are_drawn_anew_for_each_batch():
    estimator, several = AVSPO(virtual_strategy=UniformRewards()), groups([A] * 4)
    first = estimator.estimate(several)
    estimator.update(several)
    assert not torch.equal(first, estimator.estimate(several))


def test_drawing_leaves_the_global_random_state_alone():
    state = torch.random.get_rng_state()
    always(virtual_strategy=UniformRewards()).estimate(groups([A, B]))
    assert torch.equal(state, torch.random.get_rng_state())


# Warnings, arguments, presets, metrics


def test_few_groups_and_missing_scale_warn():
    with pytest.warns(UserWarning, match="fewer than 4 groups"):
        AVSPO().update(groups([A, B, C]))
    with pytest.warns(UserWarning, match="scale_rewards"):
        AVSPO(scale_rewards="none").update(groups([A, B, C, D]))


def test_four_groups_do_not_warn():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        AVSPO().update(groups([A, B, C, D]))
    assert seen == []


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: AVSPO(acr_threshold_init=0.05), "acr_threshold_init"),
        (lambda: AVSPO(acr_threshold_init=0.95), "acr_threshold_init"),
        (lambda: AVSPO(acr_threshold_lr=-0.1), "acr_threshold_lr"),
        (lambda: AVSPO(acr_threshold_lr=1.1), "acr_threshold_lr"),
        (lambda: AVSPO(acr_threshold_min=-0.1), "acr_threshold_min"),
        (lambda: AVSPO(acr_threshold_min=0.9), "acr_threshold_min"),
        (lambda: AVSPO(virtual_sensitivity=0.0), "virtual_sensitivity"),
        (lambda: AVSPO(virtual_sensitivity=1.1), "virtual_sensitivity"),
        (lambda: AVSPO(virtual_sensitivity=0.7, virtual_count_rule=FixedCount(4)), "virtual_sensitivity"),
        (lambda: AVSPO(virtual_count_rule="power"), "virtual_count_rule"),
        (lambda: AVSPO(virtual_count_rule=PowerCount), "virtual_count_rule"),
        (lambda: AVSPO(virtual_strategy="stratified"), "virtual_strategy"),
        (lambda: AVSPO(anchor_reward=0.0), "anchor_reward"),
        (lambda: AVSPO(anchor_reward=1.1), "anchor_reward"),
        (lambda: AVSPO(anchor_reward=0.2, virtual_strategy=ConstantRewards()), "anchor_reward"),
        (lambda: AVSPO(threshold_zero_improvement="wait"), "threshold_zero_improvement"),
        (lambda: AVSPO(partial_credit_groups="as_incorrect"), "partial_credit_groups"),
        (lambda: AVSPO(collapse_tol=-1e-9), "collapse_tol"),
        (lambda: AVSPO(scale_rewards="batch"), "scale_rewards"),
        (lambda: AVSPO(std_ddof=2), "std_ddof"),
        (lambda: AVSPO(advantage_eps=-1.0), "advantage_eps"),
        (lambda: AVSPOPrototype(std_ddof=2), "std_ddof"),
        (lambda: AVSPOPrototype(advantage_eps=-1.0), "advantage_eps"),
        (lambda: FixedCount(0), "virtual_count"),
        (lambda: ConstantRewards(-0.1), "value"),
        (lambda: ConstantRewards(1.1), "value"),
        (lambda: ExponentialRewards(0.0), "decay"),
        (lambda: ExponentialRewards(1.0), "decay"),
    ],
)
def test_bad_arguments_are_named(make, name):
    with pytest.raises(ValueError, match=f"`{name}` should"):
        make()


def test_threshold_bounds_out_of_range_are_named():
    with pytest.raises(ValueError, match="acr_threshold_max"):
        AVSPO(acr_threshold_max=1.1)


def test_rewards_out_of_range_ask_for_a_success_signal():
    with pytest.raises(ValueError, match=r"success_reward.*reward_min.*reward_max"):
        AVSPO().estimate(groups([[2, 0]]))


def test_defaults_and_presets():
    assert AVSPO() == AVSPO(
        acr_threshold_init=0.5,
        acr_threshold_lr=0.01,
        acr_threshold_min=0.1,
        acr_threshold_max=0.9,
        virtual_sensitivity=0.5,
        virtual_count_rule=PowerCount(),
        virtual_strategy=StratifiedRewards(),
        anchor_reward=0.1,
        augment_all_incorrect=True,
        augment_all_correct=True,
        threshold_zero_improvement="hold",
        partial_credit_groups="skip",
        collapse_tol=1e-6,
        scale_rewards=None,
        std_ddof=1,
        advantage_eps=1e-4,
    )
    assert AVSPO.training_only
    assert UniformRewards() == UniformRewards(0)
    assert ConstantRewards() == ConstantRewards(0.5)
    assert ExponentialRewards() == ExponentialRewards(0.5)
    assert avspo.paper() == AVSPO(std_ddof=0)
    assert avspo.released_prototype() == AVSPOPrototype() == AVSPOPrototype(1, 1e-4)


def test_state_is_a_threshold_and_the_last_mean_reward():
    estimator = AVSPO(acr_threshold_init=0.3)
    assert estimator.state_dict().items() >= {"threshold": 0.3, "prev_mean_reward": None, "num_batches": 0}.items()
    estimator.update(groups([A, B, C, D]))
    assert estimator.state_dict().items() >= {"threshold": 0.3, "prev_mean_reward": 17 / 32, "num_batches": 1}.items()


def test_metrics_of_the_published_groups():
    numbers = after(AVSPO(acr_threshold_init=0.45), 0.5).metrics(groups([A, B, C, D], torch.float64))
    expected = {
        "threshold": 0.45,
        "triggered": 1.0,
        "num_virtual": 6.0,
        "injected_abs_advantage": (0.699179 + 0.700910) / 2,
        "num_groups": 4.0,
        "acr_success": 0.5,
        "reward_change": 0.03125,
    }
    assert numbers == {f"avspo/{name}": pytest.approx(value, abs=1e-6) for name, value in expected.items()}


def test_metrics_of_a_quiet_batch():
    numbers = AVSPO().metrics(groups([A, C, C, D]))
    assert numbers["avspo/triggered"] == numbers["avspo/num_virtual"] == numbers["avspo/injected_abs_advantage"] == 0
    assert "avspo/reward_change" not in numbers


def test_collapse_on_success_alone():
    """The third group's rewards differ though all its answers are right; a lone scored row is not counted."""
    rewards = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0.5, 1], [0, nan, nan, nan]]
    several = groups(rewards, success_PG=[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0] * 4])
    assert AVSPO().metrics(several)["avspo/acr_success"] == pytest.approx(1 / 3)


# The public prototype


@pytest.mark.parametrize(("num_completions", "expected"), [(8, 0.333233), (4, 0.447114)])
def test_values_of_the_prototype(num_completions, expected):
    """About 1 / sqrt(G + 1)."""
    for reward, sign in ((0, -1), (1, 1)):
        found = AVSPOPrototype().estimate(groups([[reward] * num_completions] * 2))
        assert_golden(found, [[sign * expected] * num_completions] * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(rewards=random_rewards(values=(0.0, 1.0), max_groups=2), ddof=st.sampled_from([0, 1]))
def test_prototype_matches_the_reference(dtype, rewards, ddof):
    found = AVSPOPrototype(std_ddof=ddof).estimate(groups(rewards, dtype))
    assert_matches(found, _reference.avspo_prototype(rewards, ddof))


def test_prototype_needs_the_whole_batch_to_agree():
    """One group all wrong, one all right: zeros although both collapsed."""
    assert torch.equal(AVSPOPrototype().estimate(groups([[0] * 4, [1] * 4])), torch.zeros(2, 4))


def test_prototype_leaves_lone_rows_at_zero():
    """One scored row has no contrast to its group, also in a batch that is all wrong."""
    assert AVSPOPrototype().estimate(groups([[0, 0, 0], [0, nan, nan]]))[1, 0] == 0


def test_prototype_is_stateless():
    assert AVSPOPrototype().state_dict() == {}
    assert AVSPOPrototype.training_only
