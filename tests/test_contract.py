"""The contract, for every estimator of METHODS, for wrappers over other bases and for every rule with a memory."""

from collections.abc import Callable

import _reference
import pytest
import torch
from _asserts import (
    assert_all_equal_groups_are_zero,
    assert_excludes_whole_numbers_of_rows,
    assert_finite_where_scored,
    assert_keeps_dtype,
    assert_lone_rows_are_zero,
    assert_matches,
    assert_metrics_are_floats,
    assert_permutes_with_completions,
    assert_permutes_with_prompts,
    assert_ranks_agree,
    assert_readers_write_nothing,
    assert_refuses_foreign_state,
    assert_refuses_foreign_values,
    assert_resume_equals_never_stopping,
    assert_state_survives_json,
    assert_unscored_batch_changes_nothing,
    train,
)
from _rewards import BATCHES, MENAGERIE, groups, random_rewards
from hypothesis import given, settings

from grpo_ext.advantages import (
    AGRAE,
    AVSPO,
    GRPO,
    HADW,
    MCGRPO,
    METHODS,
    AdaptiveForgetting,
    AVSPOPrototype,
    EasyFocused,
    FixedAnchor,
    HardFocused,
    LongestPivot,
    MovingAverage,
    NegativeDominant,
    PositiveDominant,
    UniformRewards,
)
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardGroups

pytestmark = pytest.mark.filterwarnings(
    "ignore:AVSPO sees fewer than 4 groups", "ignore:MC-GRPO should see an odd number"
)

Make = Callable[[], AdvantageEstimator]
WRAPPERS = (HADW, AGRAE, PositiveDominant, NegativeDominant, HardFocused, EasyFocused)
BASES = (GRPO, AVSPO, MCGRPO)

PAIRS: dict[str, Make] = {
    f"{wrapper.__name__}({base.__name__})": lambda wrapper=wrapper, base=base: wrapper(base=base())
    for wrapper in WRAPPERS
    for base in BASES
}

VARIANTS: dict[str, Make] = {
    "moving_average": lambda: HADW(anchor=MovingAverage(window=2)),
    "adaptive_forgetting": lambda: HADW(anchor=AdaptiveForgetting(stability_window=3, warmup=2)),
    "fixed_anchor": lambda: HADW(anchor=FixedAnchor(0.4)),
    "posterior": lambda: HADW(anchor_timing="posterior"),
    "omega_ema": lambda: AGRAE(omega_ema=0.5),
    "nested": lambda: HADW(base=AGRAE(base=MCGRPO(), omega_ema=0.9), anchor=AdaptiveForgetting(warmup=1)),
    "grpo_batch": lambda: GRPO(scale_rewards="batch"),
    "grpo_none": lambda: GRPO(scale_rewards="none", std_ddof=0),
    "avspo_stagnate": lambda: AVSPO(threshold_zero_improvement="stagnate", partial_credit_groups="as_correct"),
    "mc_grpo_longest": lambda: MCGRPO(pivot_rule=LongestPivot(), mad_fallback="epsilon"),
}

# Draws by position, hence not permutable.
RANDOM: dict[str, Make] = {"avspo_uniform": lambda: AVSPO(virtual_strategy=UniformRewards(seed=3))}

PERMUTABLE: dict[str, Make] = {**METHODS, **PAIRS, **VARIANTS}
ESTIMATORS: dict[str, Make] = {**PERMUTABLE, **RANDOM}

every_estimator = pytest.mark.parametrize("make", ESTIMATORS.values(), ids=ESTIMATORS.keys())
every_permutable = pytest.mark.parametrize("make", PERMUTABLE.values(), ids=PERMUTABLE.keys())
every_group = pytest.mark.parametrize("arguments", MENAGERIE.values(), ids=MENAGERIE.keys())


@every_estimator
@every_group
def test_advantages_are_finite_where_scored(make, arguments):
    assert_finite_where_scored(make(), RewardGroups(**arguments))


@every_estimator
@every_group
def test_readers_write_nothing(make, arguments):
    assert_readers_write_nothing(train(make(), BATCHES), arguments)


@every_permutable
@every_group
def test_advantages_follow_their_rows(make, arguments):
    assert_permutes_with_completions(make(), arguments)
    assert_permutes_with_prompts(make(), arguments)


@every_estimator
@every_group
def test_excluded_rows_are_the_extra_completions(make, arguments):
    assert_excludes_whole_numbers_of_rows(make(), RewardGroups(**arguments))


@every_estimator
def test_dtype_is_the_rewards(make):
    assert_keeps_dtype(train(make(), BATCHES), MENAGERIE["half_collapsed"])


@every_estimator
@pytest.mark.parametrize("name", ["binary_mixed", "half_collapsed", "all_correct", "partial_credit", "single_group"])
def test_metrics_are_floats(make, name):
    assert_metrics_are_floats(make(), RewardGroups(**MENAGERIE[name]))


@every_estimator
def test_state_survives_json(make):
    assert_state_survives_json(make, BATCHES)


@every_estimator
def test_foreign_state_is_refused(make):
    assert_refuses_foreign_state(make, BATCHES)
    assert_refuses_foreign_values(make, BATCHES)


@every_estimator
def test_resume_equals_never_stopping(make):
    assert_resume_equals_never_stopping(make, BATCHES)


@every_estimator
def test_ranks_agree(make):
    assert_ranks_agree(make, BATCHES)


@every_estimator
def test_unscored_batch_changes_nothing(make):
    assert_unscored_batch_changes_nothing(train(make(), BATCHES))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(deadline=None, max_examples=50)
@given(rewards=random_rewards())
def test_methods_match_their_references(method, dtype, rewards):
    """Fresh, with its defaults, on random groups."""
    several = groups(rewards, dtype)
    expected = _reference.REFERENCES[method](rewards, several.success_PG.tolist())
    assert_matches(METHODS[method]().estimate(several), expected)


# All-equal groups: zero, except where a method says otherwise.


@every_estimator
def test_all_equal_groups_are_zero(make):
    """A collapse rate of one half does not exceed AVSPO's first threshold, one half."""
    assert_all_equal_groups_are_zero(make(), RewardGroups(**MENAGERIE["half_collapsed"]))


@every_estimator
def test_partial_credit_groups_are_zero(make):
    assert_all_equal_groups_are_zero(make(), groups([[0.5] * 5, [0.25] * 5, [1, 0, 0, 1, 0], [1, 1, 0, 0, 1]]))


@every_estimator
def test_lone_rows_are_zero(make):
    assert_lone_rows_are_zero(make(), RewardGroups(**MENAGERIE["one_scored_row"]))


def leaves_noise(make: Make) -> bool:
    """`GRPO` itself by parity with TRL; partial credit that counts as correct is pushed on purpose."""
    parts = list(make().walk())
    pushes = [isinstance(part, AVSPO) and part.partial_credit_groups == "as_correct" for part in parts]
    return isinstance(parts[0], GRPO) or any(pushes)


EXACT = {name: make for name, make in PERMUTABLE.items() if not leaves_noise(make)}


@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT.keys())
def test_float_noise_is_no_signal(make):
    """Equal rewards whose mean rounds off, or nearly equal ones, give exact zeros everywhere but in `GRPO` itself."""
    rewards = [[100.3] * 7, [10.1] * 7, [0.5] * 6 + [0.5 + 5e-7]]
    noisy = groups(rewards, success_PG=[[0.3] * 7, [0.6] * 7, [0.5] * 7])
    assert_all_equal_groups_are_zero(make(), noisy)


def test_grpo_keeps_the_float_noise_of_trl():
    """The mean of seven float32 copies of 100.3 is off by a rounding error, which TRL trains on."""
    assert (GRPO().estimate(groups([[100.3] * 7])) != 0).any()


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_triggered_methods_push_collapsed_groups(value):
    """Away from a wrong answer, towards a right one."""
    collapsed = groups([[value] * 4, [value] * 4])
    for estimator in (AVSPO(), AVSPOPrototype()):
        assert (estimator.estimate(collapsed).sign() == (1 if value else -1)).all()


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)
def test_wrappers_keep_the_push_of_avspo(wrapper):
    """A wrapper multiplies by positive factors, so a collapsed group keeps the sign its base gave it."""
    collapsed = groups([[0.0] * 4, [1.0] * 4, [0.0] * 4])
    pushed_PG = AVSPO().estimate(collapsed)
    assert torch.equal(wrapper(base=AVSPO()).estimate(collapsed).sign(), pushed_PG.sign())


def test_wrappers_keep_the_signal_of_functions_whose_sum_agrees():
    """Rewards (2, 0) and (0, 1) with weights 1 and 2 sum to 2 both, yet `normalize_then_sum` tells them apart."""
    rewards_NF = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    several = RewardGroups.from_functions(
        rewards_NF, torch.tensor([1.0, 2.0]), 2, success_PG=torch.tensor([1, 0, 1, 0])
    )
    base = GRPO(multi_objective_aggregation="normalize_then_sum")
    assert several.rewards_PG[0].tolist() == [2.0, 2.0]
    found = PositiveDominant(base=base).estimate(several)
    assert (found[0] != 0).all()
    assert torch.equal(found.sign(), base.estimate(several).sign())


# Wrappers sample, exclude and remember as their base does.


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)
def test_wrappers_exclude_what_their_base_excludes(wrapper):
    several = RewardGroups(**MENAGERIE["binary_mixed"])
    wrapped = wrapper(base=MCGRPO(official_token_count=True))
    assert torch.equal(wrapped.excluded(several), MCGRPO().excluded(several))
    assert wrapped.num_extra_generations == 1
    assert wrapped.count_excluded_tokens
    assert wrapper().num_extra_generations == 0
    assert wrapper().excluded(several) is None


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)
def test_wrappers_update_and_report_their_base(wrapper):
    wrapped = train(wrapper(base=AVSPO()), BATCHES)
    alone = train(AVSPO(), BATCHES)
    assert wrapped.base.state_dict() == alone.state_dict()
    several = RewardGroups(**MENAGERIE["half_collapsed"])
    assert alone.metrics(several).items() <= wrapped.metrics(several).items()


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)
def test_wrappers_refuse_what_is_no_estimator(wrapper):
    with pytest.raises(ValueError, match="`base` should be an advantage estimator"):
        wrapper(base="grpo")


def test_the_run_trains_what_it_should():
    """The batches of this module move every kind of state, so that the tests above compare something."""
    assert train(AVSPO(), BATCHES).threshold != AVSPO().threshold
    assert len(set(train(HADW(), BATCHES).anchor.accuracies)) > 2
    assert train(AGRAE(omega_ema=0.5), BATCHES).omega is not None
    assert train(AGRAE(), BATCHES).omega is None


def test_methods_are_keyed_in_snake_case():
    assert all(name == name.lower() and name.replace("_", "").isalnum() for name in METHODS)
    assert all(issubclass(method, AdvantageEstimator) for method in METHODS.values())
