"""Rows of TRL's batches: what each needs, where it goes, and that none is lost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import Shape, draw
from trl.trainer.utils import split_tensor_dict

from grpo_ext.batching import (
    LOSS_SCALE,
    MICRO_STEP,
    Trim,
    concatenate,
    crop,
    deal,
    find_limits,
    find_needed,
    find_unknown,
    make_filler,
    measure,
    pack,
    share_tokens,
    survey,
    take,
    unpack,
)
from grpo_ext.packing import Sizes, keep_places, make_plan

BOTH = Trim(left=True, right=True)


def make_batch():
    """Three rows: prompts of 2, 1 and 3 tokens, completions of 3, 1 and 0 (masked by TRL as truncated)."""
    return {
        "prompt_ids": torch.tensor([[0, 5, 6], [0, 0, 7], [5, 6, 7]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [0, 0, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[8, 9, 1, 0], [1, 0, 0, 0], [8, 8, 8, 8]]),
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]),
        "advantages": torch.tensor([0.5, 0.0, -1.0]),
        "num_items_in_batch": torch.tensor(4),
    }


def test_widths_and_loss_tokens_are_counted():
    batch = make_batch()
    assert measure(batch, BOTH).tolist() == [[2, 3, 3], [1, 2, 1], [3, 2, 0]]
    assert measure(batch, Trim(left=False, right=True)).tolist() == [[3, 3, 3], [3, 2, 1], [3, 2, 0]]
    assert measure(batch, Trim(left=False, right=False)).tolist() == [[3, 4, 3], [3, 4, 1], [3, 4, 0]]
    assert measure(batch, Trim(True, True, multiple=2)).tolist() == [[2, 4, 3], [2, 2, 1], [4, 2, 0]]
    batch["tool_mask"] = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]])
    assert measure(batch, BOTH).tolist() == [[2, 3, 2], [1, 2, 0], [3, 2, 0]]  # read by the model, if not by the loss


def test_a_completion_is_two_columns_wide_where_it_was():
    """A tensor of one column would be a figure per row to TRL."""
    assert measure(crop(make_batch(), 3, 1), BOTH)[:, 1].tolist() == [1, 1, 1]
    assert measure(crop(make_batch(), 3, 2), BOTH)[:, 1].tolist() == [2, 2, 2]


def test_rows_without_a_token_in_the_loss_or_without_advantage_are_not_needed():
    batch = make_batch()
    assert find_needed(batch, prunes=True).tolist() == [True, False, False]
    assert find_needed(batch, prunes=False).tolist() == [True, True, False]
    batch["advantages"] = torch.tensor([[0.0, 0.0, 0.0, 9.0], [0.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    assert find_needed(batch, prunes=True).tolist() == [False, False, False]  # all outside the loss
    batch["advantages"][1, 0] = -1.0
    assert find_needed(batch, prunes=True).tolist() == [False, True, False]


def test_a_survey_tells_what_was_what_lives_and_the_size_of_what_stays():
    """Widths 3 and 4 with 4 loss tokens; one live row of 5 tokens; the sizes."""
    batch = make_batch()
    header, nothing = [[3, 4, 4], [1, 5, 0]], [0, 0, 0]
    assert survey(batch, BOTH, drops=True, prunes=True).tolist() == [*header, [2, 3, 3], nothing, nothing]
    assert survey(batch, BOTH, drops=True, prunes=False).tolist() == [*header, [2, 3, 3], [1, 2, 1], nothing]
    assert survey(batch, BOTH, drops=False, prunes=False).tolist() == [*header, [2, 3, 3], [1, 2, 1], [3, 2, 0]]


def test_columns_are_cut_where_padding_is():
    batch = make_batch() | {
        "old_per_token_logps": torch.arange(12.0).view(3, 4),
        "importance_sampling_ratio": torch.ones(3, 1),
    }
    cut = crop(take(batch, [1]), 1, 1)
    assert cut["prompt_ids"].tolist() == [[7]]
    assert cut["completion_ids"].tolist() == [[1]]
    assert cut["old_per_token_logps"].tolist() == [[4.0]]
    assert cut["importance_sampling_ratio"].shape == (1, 1)
    assert cut["advantages"].tolist() == [0.0]


def test_a_filler_has_one_token_and_no_loss():
    ratio = {"importance_sampling_ratio": torch.full((3, 4), 7.0), "ref_per_token_logps": torch.full((3, 4), -90.0)}
    filler = make_filler(make_batch() | ratio | {"notes": ["a", "b", "c"]})
    assert measure(filler, BOTH).tolist() == [[1, 2, 0]]
    assert not find_needed(filler, prunes=False)
    assert filler["advantages"].tolist() == [0.0]
    assert not filler["ref_per_token_logps"].any()
    assert filler["importance_sampling_ratio"].eq(1).all()
    assert filler["notes"] == ["a"]


def test_unknown_tensors_are_named():
    batch = make_batch()
    assert find_unknown(batch) is None
    assert find_unknown(batch | {"pixel_values": torch.ones(3, 5)}) == "pixel_values"
    assert find_unknown(batch | {"num_images": [1, 1]}) == "num_images"
    assert find_unknown(batch | {"tiles": torch.ones(7)}) == "tiles"
    own = {"row": torch.arange(3), "note": ["a", "b", "c"], "missing": None, "total": torch.tensor(3.0)}
    assert find_unknown(batch | own) is None


def test_limits():
    assert find_limits("dapo", 0.0, {"entropy bonus": False}) == ([], [])
    assert find_limits("grpo", 0.1, {})[0] == []
    assert find_limits("bnpo", 0.1, {})[0] != []
    assert find_limits("bnpo", 0.0, {}) == ([], [])
    assert find_limits("mine", 0.0, {})[0] == ["unknown `loss_type='mine'`"]
    assert find_limits("dapo", 0.0, {"entropy bonus": True})[0] == ["entropy bonus"]
    assert "0.1" in find_limits("dapo", 0.1, {})[1][0]


# Plans of several ranks

RANKS = st.sampled_from([1, 2, 3])


def make_ranks(num_ranks, seed, lives, num_steps=4, size=3):
    """Stock micro-batches of each rank, whose rows carry their number."""
    ranks = []
    for rank in range(num_ranks):
        shape = Shape(num_rows=num_steps * size, num_generations=size, prompt=(1, 6), mean=8, cap=30, vocabulary=20)
        batch = draw(shape, lives[rank % len(lives)], 100 * seed + rank)
        batch["row"] = torch.arange(shape.num_rows) + rank * shape.num_rows
        ranks.append(split_tensor_dict(batch, num_steps))
    return ranks


def deal_all(ranks, exchanges, loss_type="dapo", prunes=True):
    """The micro-batches of every rank, as the trainer makes them, with the plan."""
    pools = [concatenate(batches) for batches in ranks]
    sizes = Sizes.read(torch.stack([survey(pool, BOTH, drops=True, prunes=prunes) for pool in pools]).numpy())
    plan = make_plan(sizes, len(ranks[0]), exchanges=exchanges)
    pools = [share_tokens(pool, len(ranks[0])) if loss_type == "bnpo" else pool for pool in pools]
    num_rows, index_N = sizes.rows_RB3.shape[1], np.arange(sizes.is_needed_RB.size)
    if not exchanges:
        indices = [index_N - rank * num_rows for rank in range(len(ranks))]
        return [deal(pool, plan, rank, indices[rank], loss_type) for rank, pool in enumerate(pools)], plan
    widths = sizes.widths_R2.max(axis=0).tolist()
    packed = torch.cat([pack(pool, num_rows, widths) for pool in pools])
    return [deal(unpack(packed, pool, widths), plan, rank, index_N, loss_type) for rank, pool in enumerate(pools)], plan


@settings(max_examples=40, deadline=None)
@given(RANKS, st.booleans(), st.integers(0, 10**6), st.sampled_from([(0.0,), (1.0,), (0.5, 0.0), (0.25, 1.0, 0.5)]))
def test_every_needed_row_is_computed_once_by_micro_batches_no_larger_than_before(num_ranks, exchanges, seed, lives):
    ranks = make_ranks(num_ranks, seed, lives)
    dealt, plan = deal_all(ranks, exchanges)
    before = {int(row): (batch, i) for part in ranks for batch in part for i, row in enumerate(batch["row"])}
    needed = {row for row, (batch, i) in before.items() if batch["advantages"][i] != 0}
    found = []
    for part in dealt:
        assert len(part) == len(ranks[0])
        assert [len(batch["row"]) for batch in part] == plan.counts_K.tolist()
        for batch in part:
            for i, row in enumerate(batch["row"].tolist()):
                if not batch["completion_mask"][i].any():
                    assert batch["prompt_mask"][i].sum() == 1
                    continue
                found.append(row)
                stock, place = before[row]
                for name in ("prompt", "completion"):
                    seen, expected = (
                        each[f"{name}_ids"][j][each[f"{name}_mask"][j] == 1] for each, j in ((batch, i), (stock, place))
                    )
                    assert torch.equal(seen, expected)
                assert batch["advantages"][i] == stock["advantages"][place]
    assert sorted(found) == sorted(needed)
    for names in (("prompt_ids", "completion_ids"), ("completion_ids",)):
        before, after = (
            [[sum(batch[name].numel() for name in names) for batch in part] for part in each] for each in (ranks, dealt)
        )
        for rank, sizes in enumerate(after):
            if not exchanges:
                assert max(sizes) <= max(before[rank])
        if len(names) == 2:
            assert [sum(sizes) for sizes in after] == plan.padded_R.tolist()


def test_with_exchange_no_micro_batch_is_larger_than_the_largest_before():
    """Also where one rank has the long prompts and another the long completions."""
    for seed in range(30):
        ranks = make_ranks(2, seed, (1.0,))
        long = {"prompt_ids": torch.ones(3, 40, dtype=torch.long), "prompt_mask": torch.ones(3, 40, dtype=torch.long)}
        ranks[0] = [crop(batch, 9, 6) | long for batch in ranks[0]]
        before, after = (
            [batch["prompt_ids"].numel() + batch["completion_ids"].numel() for part in each for batch in part]
            for each in (ranks, deal_all(ranks, True)[0])
        )
        assert max(after) <= max(before)


@pytest.mark.parametrize("exchanges", [False, True])
def test_factors_make_up_for_the_row_mean_and_for_bnpos_tokens(exchanges):
    """A_i / D_m of each row: before, of its own micro-batch; after, of the one it came to."""
    ranks = make_ranks(2, 1, (0.5, 1.0))
    for loss_type in ("grpo", "bnpo"):
        expected, found = {}, {}
        for part in ranks:
            for batch in part:
                divisor = len(batch["row"]) if loss_type == "grpo" else batch["completion_mask"].sum()
                expected |= dict(zip(batch["row"].tolist(), (batch["advantages"] / divisor).tolist(), strict=True))
        dealt, _ = deal_all(ranks, exchanges, loss_type)
        for batch in (batch for part in dealt for batch in part):
            divisor = len(batch["row"]) if loss_type == "grpo" else batch["completion_mask"].sum().clamp(min=1)
            values = batch["advantages"] / divisor * float(batch.get(LOSS_SCALE, 1.0))
            is_real = batch["completion_mask"].any(dim=1)
            found |= dict(zip(batch["row"][is_real].tolist(), values[is_real].tolist(), strict=True))
        assert found == pytest.approx({row: value for row, value in expected.items() if value}, rel=1e-6)


def test_a_scale_of_before_is_kept():
    ranks = [[batch | {LOSS_SCALE: torch.tensor(2.0, dtype=torch.float64)} for batch in make_ranks(1, 0, (0.5,))[0]]]
    dealt, plan = deal_all(ranks, False, "grpo")
    assert [float(batch[LOSS_SCALE]) for batch in dealt[0]] == [2.0 * count / 3 for count in plan.counts_K]


def test_shares_weigh_a_micro_batch_by_what_it_holds():
    """Means over micro-batches, weighted so, are means over all tokens, live tokens and rows."""
    dealt, plan = deal_all(make_ranks(2, 3, (0.5, 0.75)), False)
    num_live = sum(len(rows) for rows_K in plan.rows_RK for rows in rows_K)
    tokens_K = [sum(int(part[k]["completion_mask"].sum()) for part in dealt) for k in range(4)]
    num_all = sum(int(batch["completion_mask"].sum()) for part in make_ranks(2, 3, (0.5, 0.75)) for batch in part)
    for k, step in enumerate(plan.steps_K):
        assert step.tokens == pytest.approx(tokens_K[k] * 4 / num_all)
        assert step.live_tokens == pytest.approx(tokens_K[k] * 4 / sum(tokens_K))
        assert step.rows == plan.counts_K[k] * 4 / 12
        num_fillers = sum(int((~part[k]["completion_mask"].any(dim=1)).sum()) for part in dealt)
        assert step.fillers == pytest.approx(num_fillers / (2 * plan.counts_K[k]))
        assert step.live_rows == pytest.approx(2 * plan.counts_K[k] * 4 / num_live)
        assert all(part[k][MICRO_STEP] is step for part in dealt)


def test_bytes_are_the_rows_again():
    """Mixed types and widths, rows of two ranks padded to each other's."""
    first, second = make_batch(), crop(take(make_batch(), [1, 0]), 2, 3)
    for seed, batch in enumerate((first, second)):
        generator = torch.Generator().manual_seed(seed)
        shape = batch["completion_ids"].shape
        batch["old_per_token_logps"] = torch.randn(shape, generator=generator, dtype=torch.float64)
        batch["importance_sampling_ratio"] = torch.rand(shape, generator=generator)
        batch["sequence_weight"] = torch.rand(shape[0], generator=generator)
        batch["row"] = torch.tensor([2**40, 7, 9])[: shape[0]]
    packed = torch.cat([pack(batch, 4, (3, 4)) for batch in (first, second)])
    assert packed.dtype == torch.uint8
    # ids 4 bytes, masks 1, float64 8, ratio 4; advantage and weight 4, row 8
    assert packed.shape == (8, 3 * (4 + 1) + 4 * (4 + 1 + 8 + 4) + 4 + 4 + 8)
    found = unpack(packed, first, (3, 4))
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in first.items()}
    for name, value in first.items():
        assert torch.equal(found[name][:3] if value.dim() else found[name], value)
    again = crop(take(found, [4, 5]), 2, 3)
    assert all(torch.equal(again[name], value) for name, value in second.items())
    assert found["importance_sampling_ratio"][4:6, 3].tolist() == [1.0, 1.0]  # whose logarithm vespo adds up
    assert not measure(take(found, [3, 6, 7]), BOTH)[:, 2].any()


def test_keeping_places_only_cuts():
    batches = make_ranks(1, 0, (0.5,))[0]
    table_B3 = survey(concatenate(batches), BOTH, drops=False, prunes=False).numpy()
    plan = keep_places(Sizes.read(table_B3[None]), 4)
    assert [rows.tolist() for rows in plan.rows_RK[0]] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    for batch, widths in zip(batches, plan.widths_RK2[0].tolist(), strict=True):
        assert widths == measure(batch, BOTH)[:, :2].amax(dim=0).tolist()
    assert len(concatenate(batches)["row"]) == 12


# How good the plans are


def simulate(num_ranks, live, exchanges, seed, size=8, num_rows=32, num_generations=8):
    """Padded tokens per rank, tokens needed and stock's, for the benchmark's lengths."""
    tables = []
    generator = np.random.default_rng(seed)
    num_groups = num_ranks * num_rows // num_generations
    lives = np.repeat(generator.permutation(num_groups) < round(live * num_groups), num_generations)
    for rank in range(num_ranks):
        batch = draw(Shape(num_rows=num_rows, num_generations=num_generations), 1.0, 1000 * seed + rank)
        batch["advantages"] = torch.from_numpy(lives[rank * num_rows : (rank + 1) * num_rows].astype(np.float32))
        tables.append(survey(batch, BOTH, drops=True, prunes=True).numpy())
    sizes = Sizes.read(np.stack(tables))
    plan = make_plan(sizes, num_rows // size, exchanges=exchanges)
    return plan.padded_R, sizes.live_R2[:, 1].sum(), sizes.stock_R.sum()


@pytest.mark.parametrize(("live", "bar"), [(0.2, 0.12), (0.5, 0.28), (0.8, 0.38), (1.0, 0.5)])
def test_padded_tokens_are_near_the_least_possible(live, bar):
    """Over 30 draws of 40 rows in micro-batches of 4, and of 64 in 8."""
    for size, num_rows, num_generations in ((4, 40, 4), (8, 64, 8)):
        drawn = [simulate(1, live, False, seed, size, num_rows, num_generations) for seed in range(30)]
        assert max(padded_R.sum() / needed for padded_R, needed, _ in drawn) <= 1.35
        assert np.mean([padded_R.sum() / stock for padded_R, _, stock in drawn]) <= bar


@pytest.mark.parametrize("size", [4, 8])
def test_exchange_balances_eight_ranks(size):
    """The slowest of eight ranks, over 30 draws; without exchange it has up to twice the mean."""
    ratios = {}
    for exchanges in (False, True):
        drawn = [simulate(8, 0.5, exchanges, seed, size)[0] for seed in range(30)]
        ratios[exchanges] = [padded_R.max() / padded_R.mean() for padded_R in drawn]
    assert max(ratios[True]) <= 1.15
    assert np.mean(ratios[False]) > 1.4
