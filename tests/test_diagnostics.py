"""The collapse rate, its causes, what is left after an estimator, and idle completions."""

import itertools
import json
from math import nan

import pytest
import torch
from _asserts import foreign_states
from _rewards import BATCHES, MENAGERIE, groups, random_rewards
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ext.advantages import AVSPO, GRPO, HADW, MCGRPO
from grpo_ext.diagnostics import (
    CollapseHistory,
    advantage_collapse_rate,
    advantage_metrics,
    batch_metrics,
    collapse_causes,
    collapse_metrics,
    group_metrics,
    idle_completions,
    median_flips,
    num_effective_groups,
)
from grpo_ext.groups import RewardGroups
from grpo_ext.statistics import group_std


def shares(several: RewardGroups) -> dict[str, float]:
    """`acr/...` under GRPO."""
    return {
        name.removeprefix("acr/"): value for name, value in collapse_metrics(several, GRPO().estimate(several)).items()
    }


# The rate, where a zero standard deviation of the batch or of the group would not tell


def test_groups_that_differ_from_each_other_have_collapsed_all_the_same():
    """The batch's std is not 0."""
    assert advantage_collapse_rate(torch.tensor([[0.0] * 4, [1.0] * 4, [0.5] * 4])) == 1.0


def test_the_rate_counts_groups_whatever_the_normalisation():
    """One of two, also where each function varied but their sum agrees."""
    rewards_PGF = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.0]]])
    several = RewardGroups.from_functions(rewards_PGF.view(4, 2), torch.ones(2), 2)
    assert advantage_collapse_rate(several.rewards_PG) == 0.5


def test_a_group_with_one_scored_row_is_not_counted():
    assert advantage_collapse_rate(torch.tensor([[1.0, nan, nan], [1.0, 1.0, nan], [1.0, 0.0, nan]])) == 0.5


def test_float_noise_is_no_signal():
    """The float32 std of seven copies of 10.1 is above 1e-6."""
    rewards_PG = torch.full((1, 7), 10.1)
    assert group_std(rewards_PG).item() > 1e-6
    assert advantage_collapse_rate(rewards_PG) == 1.0


@pytest.mark.parametrize("rewards", [[[1.0], [0.0]], [[nan, nan]], [[nan, 1.0]]])
def test_without_a_comparison_the_rate_is_zero(rewards):
    assert advantage_collapse_rate(torch.tensor(rewards)) == 0.0


@pytest.mark.parametrize("scale", [1e-2, 0.1, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("shift", [0.0, 10.1, -100.3, 999.9, -1e3])
def test_gaps_of_a_hundredth_count_at_any_scale_and_shift(scale, shift):
    """Of the 2^4 binary groups of four the two constant ones, whatever the rewards for right and wrong are."""
    right_PG = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4)))
    assert advantage_collapse_rate(right_PG * scale + shift) == 2 / 16


@settings(deadline=None, max_examples=50)
@given(rewards=random_rewards(), shift=st.sampled_from([0.0, 3.0]), slope=st.sampled_from([0.5, 4.0]))
def test_the_rate_is_counted_by_hand_and_ignores_affine_maps(rewards, shift, slope):
    scored = [[reward for reward in row if reward == reward] for row in rewards]
    counted = [row for row in scored if len(row) >= 2]
    expected = sum(min(row) == max(row) for row in counted) / len(counted) if counted else 0.0
    assert advantage_collapse_rate(torch.tensor(rewards)) == expected
    assert advantage_collapse_rate(slope * torch.tensor(rewards) + shift) == expected


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_the_expected_rate_of_random_groups(rate):
    """p^G + (1-p)^G for independent answers that are right with chance p; four standard errors."""
    generator = torch.Generator().manual_seed(0)
    rewards_PG = (torch.rand(20_000, 4, generator=generator) < rate).float()
    expected = rate**4 + (1 - rate) ** 4
    error = (expected * (1 - expected) / 20_000) ** 0.5
    assert advantage_collapse_rate(rewards_PG) == pytest.approx(expected, abs=4 * error)


def test_integers_are_rewards_too():
    assert advantage_collapse_rate(torch.tensor([[1, 1], [1, 0]])) == 0.5


# Causes


def test_causes_partition_the_collapsed_groups():
    rewards = [[0] * 3, [1] * 3, [0.75] * 3, [1, 0, 1], [nan, 1, 1], [nan, nan, 0]]
    causes = {name: is_cause.flatten().tolist() for name, is_cause in collapse_causes(groups(rewards)).items()}
    assert causes == {
        "all_correct": [False, True, False, False, True, False],
        "all_incorrect": [True, False, False, False, False, False],
        "other": [False, False, True, False, False, False],
    }
    several = groups(rewards)
    assert shares(several) == {
        "rate": pytest.approx(4 / 5),
        "all_correct": pytest.approx(2 / 5),
        "all_incorrect": pytest.approx(1 / 5),
        "other": pytest.approx(1 / 5),
        "after": pytest.approx(4 / 5),
        "float_noise": 0.0,
    }


def test_causes_come_from_success():
    """Equal rewards of 2 and of -1: right, wrong, undecided, and unknown."""
    several = groups([[2, 2], [-1, -1], [2, 2], [2, 2]], success_PG=[[1, 1], [0, 0], [1, 0], [nan, nan]])
    found = shares(several)
    assert [found[name] for name in ("rate", "all_correct", "all_incorrect", "other")] == [1.0, 0.25, 0.25, 0.5]
    assert found["after"] == 1.0


def test_without_a_success_signal_all_is_other():
    """Never an error because of a reward's value."""
    several = groups([[5, 5], [0, 0], [1, 2]])
    assert several.success_error is not None
    found = shares(several)
    assert (found["other"], found["all_correct"], found["all_incorrect"]) == (found["rate"], 0.0, 0.0)
    assert found["rate"] == pytest.approx(2 / 3)
    CollapseHistory().update(several, GRPO().estimate(several))


@pytest.mark.parametrize("arguments", MENAGERIE.values(), ids=MENAGERIE.keys())
def test_diagnostics_never_raise(arguments):
    bare = RewardGroups(arguments["rewards_PG"])
    for several in (bare, RewardGroups(**arguments)):
        advantages_PG = GRPO().estimate(several)
        found = collapse_metrics(several, advantages_PG)
        assert found["acr/rate"] == pytest.approx(sum(found[f"acr/{c}"] for c in collapse_causes(several)))
        assert all(type(value) is float for value in (found | advantage_metrics(several, advantages_PG)).values())
        CollapseHistory().update(several, advantages_PG, MCGRPO().excluded(several))


# What the estimator leaves


def test_avspo_gives_collapsed_groups_a_signal():
    several = groups([[0] * 4, [1] * 4, [0.5] * 4, [1, 0, 0, 0]])
    found = collapse_metrics(several, AVSPO().estimate(several))
    assert (found["acr/rate"], found["acr/after"]) == (0.75, 0.25)


def test_a_mixed_group_without_advantages_has_no_signal():
    several = groups([[1, 0], [1, 0]])
    advantages_PG = torch.tensor([[0.0, 0.0], [1.0, -1.0]])
    found = collapse_metrics(several, advantages_PG)
    assert (found["acr/rate"], found["acr/after"]) == (0.0, 0.5)


def test_float_noise_of_grpo_is_still_collapse():
    several = groups([[10.1] * 7, [100.3] * 7])
    advantages_PG = GRPO().estimate(several)
    assert (advantages_PG != 0).any()
    assert collapse_metrics(several, advantages_PG)["acr/after"] == 1.0


def test_advantage_metrics_by_hand():
    """Scored advantages 2, -1, 0, -1, 0 in two groups of three, one row unscorable; masses 3 and 1."""
    several = RewardGroups(
        torch.tensor([[1, 0, 0.5], [0, nan, 0]]), lengths_PG=torch.tensor([[10, 20, 30], [40, 50, 60]])
    )
    found = advantage_metrics(several, torch.tensor([[2.0, -1.0, 0.0], [-1.0, nan, 0.0]]))
    assert found == {
        "groups/frac_unscorable_rows": pytest.approx(1 / 6),
        "advantage/abs_mean": pytest.approx(4 / 5),
        "advantage/abs_max": 2.0,
        "advantage/frac_zero": pytest.approx(2 / 5),
        "advantage/sum_pos": 1.0,
        "advantage/sum_neg": -1.0,
        "advantage/frac_zero_tokens": pytest.approx((30 + 50 + 60) / 210),
        "groups/num_effective": pytest.approx(16 / 10),
    }


def test_nothing_scored_leaves_only_the_unscorable_share():
    several = RewardGroups(torch.full((1, 2), nan))
    assert advantage_metrics(several, several.rewards_PG) == {"groups/frac_unscorable_rows": 1.0}
    assert batch_metrics(several, several.rewards_PG)["groups/frac_unscorable"] == 1.0


def test_as_many_groups_are_effective_as_teach_alike():
    """Two mixed groups of equal spread count as two, beside a collapsed one; nothing at all counts as none."""
    several = groups([[1, 0, 0], [1, 1, 0], [1, 1, 1]])
    assert num_effective_groups(several, GRPO().estimate(several)) == pytest.approx(2.0)
    collapsed = groups([[1, 1], [0, 0]])
    assert num_effective_groups(collapsed, GRPO().estimate(collapsed)) == 0.0
    # A group with a tenth of the other's mass hardly counts: (1.1)^2 / (1 + 0.01).
    assert num_effective_groups(groups([[1, 0], [1, 0]]), torch.tensor([[5.0, -5], [0.5, -0.5]])) == pytest.approx(
        1.21 / 1.01
    )


def test_float_noise_is_counted_apart():
    """The float32 mean of seven copies of 10.1 is another number; 1.0 has no such noise, and 0.5 beside 1 a signal."""
    noisy = groups([[10.1] * 7, [1.0] * 7, [1.0] * 6 + [0.5]])
    found = shares(noisy)
    assert GRPO().estimate(noisy)[0].abs().max() > 1e-3
    assert (found["float_noise"], found["after"], found["rate"]) == pytest.approx((1 / 3, 2 / 3, 2 / 3))


def test_signs_that_change_with_the_baseline():
    """Mean 0.5, median 0.3: 0.4 lies between. Rewards of 0 and 1 have no such row."""
    between = groups([[0.0, 0.2, 0.3, 0.4, 1.6, nan]])
    assert between.rewards_PG.nanmean() == pytest.approx(0.5)
    assert median_flips(between) == pytest.approx(1 / 5)
    assert all(median_flips(groups([[1] * right + [0] * (8 - right)])) == 0.0 for right in range(9))


def test_duplicates_by_hand():
    """Of 2 * 4 completions: three equal ones repeat one twice, and a pair once."""
    keys_PG = torch.tensor([[7, 7, 3, 7], [1, 2, 1, 3]])
    several = RewardGroups(torch.zeros(2, 4), completion_keys_PG=keys_PG)
    assert group_metrics(several)["completions/frac_duplicates"] == 3 / 8
    assert "completions/frac_duplicates" not in group_metrics(RewardGroups(torch.zeros(2, 4)))


# Idle completions


def test_idle_completions_by_hand():
    """Four groups of three: all right, all wrong, half credit, and one of a right, an unscorable and a wrong answer."""
    several = groups([[1] * 3, [0] * 3, [0.5] * 3, [1, nan, 0]])
    expected = {"all_correct": 3, "all_incorrect": 3, "other": 3, "unscorable": 1, "baseline": 0}
    assert idle_completions(several, GRPO().estimate(several)) == expected


def test_rows_at_the_baseline_and_excluded_rows_are_told_apart():
    """Median 0 of 1, 0, 0, 1, 0: the pivot is excluded, two more rows sit at the baseline."""
    several = groups([[1, 0, 0, 1, 0]])
    found = idle_completions(several, MCGRPO().estimate(several), MCGRPO().excluded(several))
    assert (found["excluded"], found["baseline"]) == (1, 2)


@settings(deadline=None, max_examples=60)
@given(rewards=random_rewards(values=(0.0, 0.5, 1.0)))
@pytest.mark.parametrize("estimator", [GRPO(), AVSPO(), MCGRPO(), HADW()], ids=lambda e: type(e).__name__)
def test_each_completion_is_idle_for_one_reason_or_teaches(estimator, rewards):
    several = groups(rewards)
    advantages_PG, excluded_PG = estimator.estimate(several), estimator.excluded(several)
    counts = idle_completions(several, advantages_PG, excluded_PG)
    teaches_PG = several.is_scored_PG & (advantages_PG.abs() > 1e-8)
    if excluded_PG is not None:
        teaches_PG &= ~excluded_PG
    assert sum(counts.values()) + int(teaches_PG.sum()) == advantages_PG.numel()
    assert counts["unscorable"] == int((~several.is_scored_PG).sum())


# History


def observe(history: CollapseHistory, *batches: list[list[float]]) -> CollapseHistory:
    for rewards in batches:
        several = groups(rewards)
        history.update(several, GRPO().estimate(several))
    return history


def test_the_cumulative_rate_weighs_groups_and_the_first_weighs_batches():
    """One of one group, then one of three: 2/4 of the groups; mean rate (1 + 1/3) / 2."""
    history = observe(CollapseHistory(), [[1, 1]], [[0, 0], [1, 0], [0, 1]])
    assert history.metrics() == {"acr/cumulative": 0.5, "acr/first_100": pytest.approx(2 / 3)}


def test_the_first_hundred_batches_are_remembered():
    history = observe(CollapseHistory(), *[[[1, 1]]] * 50, *[[[1, 0]]] * 70)
    assert history.metrics() == {"acr/cumulative": pytest.approx(50 / 120), "acr/first_100": 0.5}
    assert history.num_batches == 120


def test_a_batch_without_a_comparison_is_no_early_sign():
    """The first rates are those of batches in which groups could agree or differ."""
    history = observe(CollapseHistory(), [[1, nan]], [[1, 1]])
    assert history.metrics() == {"acr/cumulative": 1.0, "acr/first_100": 1.0}
    assert history.num_batches == 2


def test_an_empty_history_is_zero():
    assert CollapseHistory().metrics() == {"acr/cumulative": 0.0, "acr/first_100": 0.0}


def test_history_counts_completions():
    history = observe(CollapseHistory(), [[1, 1], [1, nan]], [[1, 0], [0, 0]])
    assert (history.num_completions, history.num_scored, history.num_groups, history.num_collapsed) == (8, 7, 3, 2)
    assert history.num_idle["all_correct"] == history.num_idle["all_incorrect"] == 2
    assert history.num_idle["unscorable"] == 1


def test_history_survives_json_and_continues():
    for stop in range(len(BATCHES)):
        histories = [CollapseHistory(), CollapseHistory()]
        for i, arguments in enumerate(BATCHES):
            several = RewardGroups(**arguments)
            if i == stop:
                histories[1] = CollapseHistory()
                histories[1].load_state_dict(json.loads(json.dumps(histories[0].state_dict())))
            for history in histories:
                history.update(several, GRPO().estimate(several))
        assert histories[0] == histories[1]


def test_a_saved_history_is_a_copy():
    """Later batches change neither what was saved nor what was loaded."""
    saved = observe(CollapseHistory(), [[1, 1]]).state_dict()
    kept = json.loads(json.dumps(saved))
    restored = CollapseHistory()
    restored.load_state_dict(saved)
    observe(restored, [[0, 0]])
    assert saved == kept
    history = observe(CollapseHistory(), [[1, 1]])
    state = history.state_dict()
    observe(history, [[0, 0]])
    assert state == kept


def test_history_refuses_another_state():
    history = observe(CollapseHistory(), [[1, 1]])
    state = history.state_dict()
    for foreign in foreign_states(CollapseHistory().state_dict())[:5]:
        with pytest.raises(ValueError, match="should have the keys"):
            history.load_state_dict(foreign)
        assert history.state_dict() == state
