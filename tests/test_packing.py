"""Micro-batches are cut where padding is least."""

from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ext.packing import BALANCE, split_rows


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


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 2), st.integers(0, 8), st.integers(1, 4), st.integers(0, 10**6))
def test_no_other_split_costs_less(num_ranks, num_rows, num_steps, seed):
    widths_RL2 = np.random.default_rng(seed).integers(1, 20, (num_ranks, num_rows, 2))
    size = max(1, -(-num_rows // num_steps))
    caps_R = size * widths_RL2.max(axis=1, initial=1).sum(axis=1)
    counts = split_rows(widths_RL2, num_steps, caps_R)
    assert len(counts) == num_steps
    assert sum(counts) == num_rows
    assert (tokens_of(widths_RL2, counts) <= caps_R[:, None]).all()
    assert sorted(counts, key=lambda count: count == 0) == counts
    allowed = [
        cost_of(widths_RL2, split, caps_R.max())
        for split in every_split(num_rows, num_steps)
        if (tokens_of(widths_RL2, split) <= caps_R[:, None]).all()
    ]
    assert cost_of(widths_RL2, counts, caps_R.max()) == pytest.approx(min(allowed))


def test_rows_of_one_length_are_dealt_evenly():
    """Any split pads nothing; micro-batches of one size need the least memory."""
    assert split_rows(np.full((1, 12, 2), 5), 4, np.array([60])) == [3, 3, 3, 3]


def test_long_rows_stand_alone():
    """Two of 100 and six of 10: [2, 6] costs 200 + 60 tokens, [1, 7] 100 + 700."""
    widths_RL2 = np.array([[[100, 0]] * 2 + [[10, 0]] * 6])
    assert split_rows(widths_RL2, 2, np.array([400])) == [2, 6]
    assert split_rows(widths_RL2, 3, np.array([400])) == [1, 1, 6]


def test_the_cap_binds():
    """Six short rows would fit one micro-batch, but for the cap of 40 tokens."""
    widths_RL2 = np.array([[[40, 0]] + [[10, 0]] * 6])
    assert max(split_rows(widths_RL2, 3, np.array([40]))[1:]) <= 4
