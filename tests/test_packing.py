"""Micro-batches are cut where padding is least."""

from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ext.packing import BALANCE, Sizes, make_plan, split_rows


def cut(counts):
    """First row and row after the last of each micro-batch."""
    ends = np.cumsum(counts)
    return list(zip(ends - counts, ends, strict=True))


def cost_of(widths_RL2, counts, cap):
    """By definition, micro-batch by micro-batch."""
    total = 0.0
    for start, end in cut(counts):
        piece = widths_RL2[:, start:end].max(axis=0, initial=0)  # the widest row of any rank, place by place
        tokens = (end - start) * piece.max(axis=0, initial=0).sum()
        total += tokens * (1 + BALANCE * tokens / cap)
    return total


def tokens_of(widths_RL2, counts):
    """Padded tokens of each rank's micro-batches (R, K)."""
    pieces = [widths_RL2[:, start:end].max(axis=1, initial=0).sum(axis=1) * (end - start) for start, end in cut(counts)]
    return np.stack(pieces, axis=1)


def every_split(num_rows, num_steps):
    for ends in combinations_with_replacement(range(num_rows + 1), num_steps - 1):
        yield np.diff([0, *ends, num_rows])


def within(widths_RL2, counts, caps_R2):
    """Whether no micro-batch holds more tokens or positions of completions than allowed."""
    completions_RL2 = widths_RL2 * [0, 1]
    parts = [
        tokens_of(each, counts) <= caps_R2[:, side, None] for side, each in enumerate((widths_RL2, completions_RL2))
    ]
    return all(part.all() for part in parts)


def caps_of(widths_RL2, size):
    """Of micro-batches of so many of the widest rows."""
    widest_R2 = widths_RL2.max(axis=1, initial=1)
    return size * np.stack([widest_R2.sum(axis=1), widest_R2[:, 1]], axis=1)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 2), st.integers(0, 8), st.integers(1, 4), st.integers(0, 10**6))
def test_no_other_split_costs_less(num_ranks, num_rows, num_steps, seed):
    widths_RL2 = np.random.default_rng(seed).integers(1, 20, (num_ranks, num_rows, 2))
    caps_R2 = caps_of(widths_RL2, max(1, -(-num_rows // num_steps)))
    counts = split_rows(widths_RL2, num_steps, caps_R2)
    assert len(counts) == num_steps
    assert sum(counts) == num_rows
    assert within(widths_RL2, counts, caps_R2)
    assert sorted(counts, key=lambda count: count == 0) == counts
    allowed = [split for split in every_split(num_rows, num_steps) if within(widths_RL2, split, caps_R2)]
    best = min(cost_of(widths_RL2, split, caps_R2.max()) for split in allowed)
    assert cost_of(widths_RL2, counts, caps_R2.max()) == pytest.approx(best)


def test_rows_of_one_length_are_dealt_evenly():
    """Any split pads nothing; micro-batches of one size need the least memory."""
    assert split_rows(np.full((1, 12, 2), 5), 4, np.array([[60, 60]])) == [3, 3, 3, 3]


def test_long_rows_stand_alone():
    """Two of 100 and six of 10: [2, 6] costs 200 + 60 tokens, [1, 7] 100 + 700."""
    widths_RL2 = np.array([[[100, 0]] * 2 + [[10, 0]] * 6])
    assert split_rows(widths_RL2, 2, np.array([[400, 400]])) == [2, 6]
    assert split_rows(widths_RL2, 3, np.array([[400, 400]])) == [1, 1, 6]


def test_the_cap_binds():
    """Five completions of 10, the first after a prompt of 100: [1, 4] pads nothing, but has 40 positions at once."""
    widths_RL2 = np.array([[[100, 10]] + [[1, 10]] * 4])
    assert split_rows(widths_RL2, 2, np.array([[330, 50]])) == [1, 4]
    assert split_rows(widths_RL2, 2, np.array([[330, 30]])) == [2, 3]


def test_a_cap_that_cannot_hold_is_exceeded_as_little_as_possible():
    """Four rows of 10 tokens in two micro-batches of at most 15: two each."""
    assert split_rows(np.full((1, 4, 2), 5), 2, np.array([[15, 15]])) == [2, 2]


def test_very_many_rows_are_cut_into_equal_numbers():
    """Where the best cut would take long to find."""
    widths_RL2 = -np.sort(-np.random.default_rng(0).integers(1, 100, (1, 2050, 2)), axis=1)
    counts = split_rows(widths_RL2, 256, np.array([[10**6, 10**6]]))
    assert sorted(set(counts)) == [8, 9]
    assert sum(counts) == 2050


def plan_of(rows):
    """Of rows of (prompt, completion), in two micro-batches; and its tokens."""
    sizes_B3 = np.array([[prompt, completion, completion] for prompt, completion in rows])
    plan = make_plan(Sizes(sizes_B3[None], sizes_B3.max(axis=0)[None, :2], np.array([1]), np.array([[1, 1]])), 2)
    return [sorted(rows.tolist()) for rows in plan.rows_RK[0]], plan.padded_R.tolist()


def test_completions_are_alike_where_prompts_differ_less():
    """In the order of whole rows, 12, 11, 10, 9 tokens, both kinds share a micro-batch however it is cut."""
    assert plan_of([(8, 4), (1, 10), (7, 3), (1, 8)]) == ([[1, 3], [0, 2]], [2 * (1 + 10) + 2 * (8 + 4)])


def test_whole_rows_are_alike_where_prompts_differ_more():
    """In the order of completions, long and short prompts alternate, and nearly every row is padded to 100."""
    rows = [(100, 1), (1, 2), (100, 3), (1, 4), (100, 5), (1, 6), (100, 7), (1, 8)]
    assert plan_of(rows) == ([[0, 2, 4, 6], [1, 3, 5, 7]], [4 * (100 + 7) + 4 * (1 + 8)])
