"""A-GRAE, Unveiling Implicit Advantage Symmetry (arXiv 2602.05548), and its four control groups."""

from math import nan, sqrt

import _reference
import pytest
import torch
from _asserts import assert_golden, assert_matches
from _rewards import groups, random_rewards
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ext.advantages import (
    AGRAE,
    AVSPO,
    GRPO,
    MCGRPO,
    EasyFocused,
    HardFocused,
    NegativeDominant,
    PositiveDominant,
    a_grae,
)
from grpo_ext.groups import RewardGroups

REWARDS = [[1, 0, 0, 0], [1, 1, 0, 1], [1, 0, 1, 0], [0, 0, 0, 0]]
R8, E8 = [1, 0, 0, 1, 0, 0, 0, 0], [1, 1, 0, 1, 1, 1, 0, 1]
SECOND = [R8, E8, [0] * 8, [1] * 8]  # omega = (2 + 6 + 0 + 8) / 32 = 1/2
DTYPES = (torch.float32, torch.float64)


def spread(right: list[float], wrong: list[float], rewards: list = REWARDS) -> list:
    """Advantages of groups of 0/1 rewards in which all right answers share one value and all wrong ones another."""
    return [[right[p] if reward else wrong[p] for reward in row] for p, row in enumerate(rewards)]


def pure() -> GRPO:
    """The base of the theory: population std, no eps."""
    return GRPO(std_ddof=0, advantage_eps=0.0)


def group_with(num_right: int, num_completions: int = 8) -> list[float]:
    return [1.0] * num_right + [0.0] * (num_completions - num_right)


# Published values: success rates 0.25, 0.75, 0.50, 0 and omega = 0.375


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("estimator", "right", "wrong"),
    [
        (AGRAE(), [0.413829, 0.157751, 0.229600], [-0.367848, -1.262007, -0.612266]),
        (AGRAE(attenuation_threshold=0.5), [0.827659, 0.315502, 0.459200], [-0.367848, -1.262007, -0.612266]),
        (AGRAE(group_level=False), [1.103545, 0.420669, 0.612266], [-0.367848, -1.262007, -0.612266]),
        (AGRAE(sample_level=False), [0.562388, 0.187463, 0.324703], [-0.499900, -1.499700, -0.865875]),
        (AGRAE(base=pure()), [0.477945, 0.182191, 0.265165], [-0.424840, -1.457532, -0.707107]),
        (a_grae.official_formula(), [0.562499, 0.477944, 0.432614], [-0.499999, -3.823550, -1.153636]),
    ],
)
def test_values_of_four_groups(estimator, right, wrong, dtype):
    assert_golden(estimator.estimate(groups(REWARDS, dtype)), spread([*right, 0], [*wrong, 0]))


@pytest.mark.parametrize(
    ("estimator", "right", "wrong"),
    [
        (AGRAE(base=GRPO(advantage_eps=1e-6)), [0.638899, 0.212966], [-0.425932, -1.277797]),
        (a_grae.official_formula(), [0.810089, 0.581831], [-0.540059, -3.490983]),
    ],
)
def test_values_of_a_second_batch(estimator, right, wrong):
    found = estimator.estimate(groups(SECOND))
    assert_golden(found, spread([*right, 0, 0], [*wrong, 0, 0], SECOND))


@pytest.mark.parametrize(
    ("control", "right", "wrong"),
    [
        (PositiveDominant, 16.201817, -0.540061),
        (NegativeDominant, 0.162018, -0.540061),
        (HardFocused, 1.620182, -0.540061),
        (EasyFocused, 0.935412, -0.311804),
    ],
)
def test_values_of_the_controls(control, right, wrong):
    """Two right answers of eight."""
    found = control(base=GRPO(advantage_eps=1e-6)).estimate(groups([R8]))
    assert_golden(found, spread([right], [wrong], [R8]))


def test_values_with_an_unscorable_row():
    """Four of seven scored answers are right."""
    several = groups([[1, nan, 0, 0], [1, 1, 0, 1]])
    expected = [[0.499613, nan, -0.437161, -0.437161], [0.216667, 0.216667, -1.137501, 0.216667]]
    assert_golden(AGRAE().estimate(several), expected)
    assert AGRAE().metrics(several)["a_grae/omega"] == pytest.approx(0.571429, abs=1e-6)


# Against the slow reference


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=60)
@given(
    rewards=random_rewards(),
    alpha=st.sampled_from([0.25, 0.5, 1.0]),
    sample_level=st.booleans(),
    group_level=st.booleans(),
    released=st.booleans(),
    gamma=st.sampled_from([0.5, 1.5]),
    clip=st.sampled_from([None, 0.01, 0.3]),
)
def test_weights_match_the_reference(dtype, rewards, alpha, sample_level, group_level, released, gamma, clip):
    estimator = AGRAE(
        attenuation_threshold=alpha,
        sample_level=sample_level,
        group_level=group_level,
        easy_weight="one_minus_sqrt_p" if released else "sqrt_one_minus_p",
        curriculum_scale=gamma,
        success_rate_clip=clip,
    )
    expected = _reference.a_grae(
        _reference.grpo_exact_zero(rewards), rewards, alpha, sample_level, group_level, released, gamma, clip
    )
    # 1 - sqrt(p) loses digits near p = 1.
    rtol = 1e-4 if released and dtype == torch.float32 else None
    assert_matches(estimator.estimate(groups(rewards, dtype)), expected, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(
    rewards=random_rewards(),
    factor=st.sampled_from([2.0, 10.0]),
    gamma=st.sampled_from([0.5, 2.0]),
    clip=st.sampled_from([None, 0.2]),
)
def test_controls_match_the_reference(dtype, rewards, factor, gamma, clip):
    several, base = groups(rewards, dtype), _reference.grpo_exact_zero(rewards)
    for control, expected in (
        (PositiveDominant(dominance_factor=factor), _reference.dominant(base, factor)),
        (NegativeDominant(dominance_factor=factor), _reference.dominant(base, 1 / factor)),
        (HardFocused(GRPO(), gamma, clip), _reference.focused(base, rewards, True, gamma, clip)),
        (EasyFocused(GRPO(), gamma, clip), _reference.focused(base, rewards, False, gamma, clip)),
    ):
        assert_matches(control.estimate(several), expected)


@settings(deadline=None, max_examples=40)
@given(batches=st.lists(random_rewards(sizes=(4,), with_unscorable=False), min_size=1, max_size=4))
def test_averaged_omega_matches_the_reference(batches):
    estimator, omega = AGRAE(omega_ema=0.75), None
    for rewards in batches:
        batch_rate = _reference.mean(_reference.flat(rewards))
        omega = batch_rate if omega is None else 0.75 * omega + 0.25 * batch_rate
        expected = _reference.a_grae(_reference.grpo_exact_zero(rewards), rewards, omega=omega)
        several = groups(rewards, torch.float64)
        assert_matches(estimator.estimate(several), expected)
        estimator.update(several)
        assert estimator.omega == pytest.approx(omega, rel=1e-9)


# Theory, with the population std and no eps


@pytest.mark.parametrize("num_right", range(1, 8))
def test_right_and_wrong_answers_weigh_the_same_in_grpo(num_right):
    """Total 2 G sqrt(p (1-p)), or 2 sqrt(G (G-1) p (1-p)) with the sample std; half of it on either side."""
    rate, several = num_right / 8, groups([group_with(num_right)], torch.float64)
    for ddof, total in ((0, 16 * sqrt(rate * (1 - rate))), (1, 2 * sqrt(56 * rate * (1 - rate)))):
        advantages = GRPO(std_ddof=ddof, advantage_eps=0.0).estimate(several)
        assert advantages.clamp(min=0).sum().item() == pytest.approx(total / 2)
        assert advantages.clamp(max=0).sum().item() == pytest.approx(-total / 2)


@pytest.mark.parametrize("num_right", range(1, 8))
def test_controls_focus_on_hard_or_on_easy_prompts(num_right):
    """Totals G sqrt(1-p) and G sqrt(p)."""
    rate, several = num_right / 8, groups([group_with(num_right)], torch.float64)
    hard, easy = HardFocused(pure()).estimate(several), EasyFocused(pure()).estimate(several)
    assert hard.abs().sum().item() == pytest.approx(8 * sqrt(1 - rate))
    assert easy.abs().sum().item() == pytest.approx(8 * sqrt(rate))
    assert max(hard.abs().sum(), easy.abs().sum()) <= 8


def batch_with(num_right: int, omega: float) -> RewardGroups:
    """
    A mixed group of eight whose success rate is `num_right / 8`, in a batch whose success rate is omega.

    Other groups have equal rewards, so that they only move omega.
    """
    rest = (omega * 5 - num_right / 8) / 4
    rewards = [group_with(num_right), *[[0.0] * 8] * 4]
    return groups(rewards, torch.float64, success_PG=[group_with(num_right), *[[rest] * 8] * 4])


OMEGAS = (0.25, 0.4, 0.5, 0.7)


@pytest.mark.parametrize("omega", OMEGAS)
@pytest.mark.parametrize("num_right", range(1, 8))
def test_sample_level_mixes_the_two_totals(num_right, omega):
    """T = G (omega sqrt(1-p) + (1-omega) sqrt(p)), still balanced."""
    rate = num_right / 8
    advantages = AGRAE(pure(), group_level=False).estimate(batch_with(num_right, omega))[0]
    expected = 8 * (omega * sqrt(1 - rate) + (1 - omega) * sqrt(rate))
    assert advantages.abs().sum().item() == pytest.approx(expected)
    assert advantages.sum().item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("omega", OMEGAS)
@pytest.mark.parametrize("num_right", range(1, 8))
def test_group_level_takes_from_the_positive_side(num_right, omega, alpha):
    """With s = min(1, omega/alpha): total T (1+s) / 2 and sum -T (1-s) / 2, so balanced iff omega >= alpha."""
    several = batch_with(num_right, omega)
    balanced = AGRAE(pure(), group_level=False).estimate(several)[0].abs().sum().item()
    advantages = AGRAE(pure(), attenuation_threshold=alpha).estimate(several)[0]
    damping = min(1.0, omega / alpha)
    assert advantages.abs().sum().item() == pytest.approx(balanced * (1 + damping) / 2)
    assert advantages.sum().item() == pytest.approx(-balanced * (1 - damping) / 2, abs=1e-12)


def weight(num_right: int, omega: float) -> float:
    """W of a group, read off an advantage."""
    several = batch_with(num_right, omega)
    return (AGRAE(pure(), group_level=False).estimate(several)[0] / pure().estimate(several)[0])[0].item()


@pytest.mark.parametrize("num_right", range(1, 8))
def test_weights_mirror_each_other(num_right):
    """W_omega(p) = W_{1-omega}(1-p); below omega = 1/2 the easier prompt weighs more, above it the harder one."""
    assert weight(num_right, 0.5) == pytest.approx(weight(8 - num_right, 0.5))
    assert weight(num_right, 0.3) == pytest.approx(weight(8 - num_right, 0.7))
    if num_right < 4:
        assert weight(num_right, 0.3) < weight(8 - num_right, 0.3)
        assert weight(num_right, 0.7) > weight(8 - num_right, 0.7)


@pytest.mark.parametrize(("alpha", "is_lifted"), [(1.0, True), (0.5, False)])
def test_a_negative_sum_lifts_unsampled_answers(alpha, is_lifted):
    """Theorem 1: for a softmax policy the logit of an answer b moves by A_b [b was sampled] - sum(A) pi_b."""
    advantages = AGRAE(pure(), attenuation_threshold=alpha).estimate(batch_with(2, 0.6))[0]
    logits = torch.linspace(-1, 1, 12, dtype=torch.float64, requires_grad=True)  # twelve answers, eight sampled
    log_chances = logits.log_softmax(0)
    (advantages * log_chances[:8]).sum().backward()
    expected = torch.cat([advantages, torch.zeros(4)]) - advantages.sum() * log_chances.detach().exp()
    torch.testing.assert_close(logits.grad, expected)
    moves = logits.grad[8:]
    assert (moves > 0).all() if is_lifted else (moves.abs() < 1e-12).all()


@pytest.mark.parametrize(
    ("num_right", "paper", "released"),
    [
        (1, 1.069045, 1.546918),
        (2, 1.154701, 2.000000),
        (3, 1.264911, 2.579796),
        (4, 1.414214, 3.414214),
        (5, 1.632993, 4.774852),
        (6, 2.000000, 7.464102),
        (7, 2.828427, 15.483315),
    ],
)
def test_easy_factors_of_paper_and_code(num_right, paper, released):
    """1 / sqrt(1-p) and 1 / (1 - sqrt(p)); a lone group has omega = p, hence W = sqrt(p) + (1-p) times the factor."""
    rate, several = num_right / 8, groups([group_with(num_right)], torch.float64)
    for easy_weight, expected in (("sqrt_one_minus_p", paper), ("one_minus_sqrt_p", released)):
        estimator = AGRAE(pure(), group_level=False, easy_weight=easy_weight, curriculum_scale=1.0)
        found = (estimator.estimate(several) / pure().estimate(several))[0, 0].item()
        assert (found - sqrt(rate)) / (1 - rate) == pytest.approx(expected, rel=2e-5)


# Edges


def test_all_wrong_batches_are_zero():
    assert torch.equal(AGRAE().estimate(groups([[0] * 4, [0] * 4])), torch.zeros(2, 4))


def test_rates_of_zero_and_one_are_not_rescaled():
    """Rewards differ though success agrees: only the damping by omega = 1/2 applies."""
    rewards = [[2, 1, 1, 1], [1, 1, 0.5, 1]]
    several = groups(rewards, torch.float64, success_PG=[[1] * 4, [0] * 4])
    base = _reference.grpo(rewards)
    assert_matches(AGRAE().estimate(several), _reference.dominant(base, 0.5))
    for control in (HardFocused(), EasyFocused()):
        assert_matches(control.estimate(several), base)


def test_continuous_rates_are_clipped():
    """Rate 1/80 counts as c = 1/8: W = gamma (omega / sqrt(1/8) + (1 - omega) / sqrt(7/8))."""
    row = [[0.05, 0, 0, 0]]
    omega = 1 / 80
    expected_weight = 0.5 * (omega / sqrt(1 / 8) + (1 - omega) / sqrt(7 / 8))
    found = AGRAE(group_level=False).estimate(groups(row, torch.float64))
    assert_matches(found, [[a * expected_weight for a in _reference.grpo(row)[0]]])


def test_positive_means_a_positive_advantage_not_a_right_answer():
    """A wrong answer with a high total reward is damped, a right one with a low total is not."""
    several = groups([[0.9, 0.1]], torch.float64, success_PG=[[0, 1]])
    base = GRPO().estimate(several)
    factors = AGRAE(sample_level=False).estimate(several) / base
    assert_matches(factors, [[0.5, 1.0]])


def test_difficulty_comes_from_success_not_from_rewards():
    rewards, success = [[1, 1, 0, 1], [2, 0, 0, 0]], [[1, 0, 0, 0], [1, 1, 1, 0]]
    found = AGRAE().estimate(groups(rewards, torch.float64, success_PG=success))
    assert_matches(found, _reference.a_grae(_reference.grpo(rewards), success))


def test_a_group_without_success_keeps_its_base_advantage():
    several = groups([[1, 0, 0, 0], [1, 1, 0, 0]], success_PG=[[nan] * 4, [1, nan, 0, 0]])
    base = GRPO().estimate(several)
    for estimator in (AGRAE(), HardFocused(), EasyFocused()):
        found = estimator.estimate(several)
        assert torch.equal(found[0], base[0])
        assert not torch.equal(found[1], base[1])


def test_collapsed_groups_of_avspo_are_damped_but_not_rescaled():
    """Half of the groups are right, so omega = 1/2."""
    rewards = [[0] * 4, [1] * 4, [0] * 4, [1] * 4]
    pushed = AVSPO().estimate(groups(rewards, torch.float64))
    assert (pushed != 0).all()
    found = AGRAE(base=AVSPO()).estimate(groups(rewards, torch.float64))
    torch.testing.assert_close(found, torch.where(pushed > 0, pushed / 2, pushed))


def test_weights_apply_to_any_base():
    rewards = [[0.1, 0.9, 0.4, 0.7, 0.3], [1, 0, 0, 1, 0]]
    found = AGRAE(base=MCGRPO()).estimate(groups(rewards, torch.float64))
    assert_matches(found, _reference.a_grae(_reference.mc_grpo(rewards), rewards))


# Arguments, presets, metrics


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: AGRAE(attenuation_threshold=0.0), "attenuation_threshold"),
        (lambda: AGRAE(attenuation_threshold=1.1), "attenuation_threshold"),
        (lambda: AGRAE(easy_weight="sqrt_p"), "easy_weight"),
        (lambda: AGRAE(curriculum_scale=0.0), "curriculum_scale"),
        (lambda: AGRAE(success_rate_clip=0.0), "success_rate_clip"),
        (lambda: AGRAE(success_rate_clip=0.5), "success_rate_clip"),
        (lambda: AGRAE(omega_ema=-0.1), "omega_ema"),
        (lambda: AGRAE(omega_ema=1.0), "omega_ema"),
        (lambda: AGRAE(base=None), "base"),
        (lambda: PositiveDominant(dominance_factor=1.0), "dominance_factor"),
        (lambda: NegativeDominant(dominance_factor=1.0), "dominance_factor"),
        (lambda: HardFocused(curriculum_scale=0.0), "curriculum_scale"),
        (lambda: EasyFocused(curriculum_scale=-1.0), "curriculum_scale"),
        (lambda: HardFocused(success_rate_clip=0.5), "success_rate_clip"),
        (lambda: EasyFocused(success_rate_clip=0.0), "success_rate_clip"),
    ],
)
def test_bad_arguments_are_named(make, name):
    with pytest.raises(ValueError, match=f"`{name}` should"):
        make()


def test_defaults_and_presets():
    assert AGRAE() == AGRAE(GRPO(), 1.0, True, True, "sqrt_one_minus_p", 0.5, None, 0.0)
    assert PositiveDominant() == PositiveDominant(GRPO(), 10.0)
    assert NegativeDominant() == NegativeDominant(GRPO(), 10.0)
    assert HardFocused() == HardFocused(GRPO(), 0.5, None)
    assert EasyFocused() == EasyFocused(GRPO(), 0.5, None)
    assert a_grae.paper_math() == AGRAE()
    assert a_grae.paper_multimodal() == AGRAE(attenuation_threshold=0.5)
    assert a_grae.official_formula() == AGRAE(GRPO(advantage_eps=1e-6), easy_weight="one_minus_sqrt_p")


def test_nothing_is_remembered_unless_asked():
    estimator = AGRAE()
    estimator.update(groups(REWARDS))
    assert estimator.state_dict() == {"base": {}, "omega": None}
    averaging = AGRAE(omega_ema=0.5)
    averaging.update(groups(REWARDS))
    assert averaging.state_dict() == {"base": {}, "omega": 0.375}


def test_metrics_of_the_published_groups():
    """Weights 0.735844, 0.841506, 0.707107 over the mixed groups."""
    right, wrong = [0.413829, 0.157751, 0.229600], [0.367848, 1.262007, 0.612266]
    positive = (right[0] + 3 * right[1] + 2 * right[2]) / 4
    negative = (3 * wrong[0] + wrong[1] + 2 * wrong[2]) / 4
    expected = {
        "omega": 0.375,
        "attenuation": 0.375,
        "weight_mean": (0.735844 + 0.841506 + 0.707107) / 3,
        "weight_min": 0.707107,
        "weight_max": 0.841506,
        "sum_pos": positive,
        "sum_neg": -negative,
        "neg_pos_ratio": negative / positive,
    }
    found = AGRAE().metrics(groups(REWARDS, torch.float64))
    assert found == {f"a_grae/{name}": pytest.approx(value, abs=5e-6) for name, value in expected.items()}


def test_plain_grpo_has_a_mass_ratio_of_one():
    plain = AGRAE(sample_level=False, group_level=False)
    assert plain.metrics(groups(REWARDS))["a_grae/neg_pos_ratio"] == pytest.approx(1, rel=1e-5)
    assert torch.equal(plain.estimate(groups(REWARDS)), GRPO().estimate(groups(REWARDS)))
