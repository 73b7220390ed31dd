"""Rows of the batches that TRL buffers: which of them the loss needs, and how they are dealt to micro-batches.

Pure functions on TRL's dicts of row-aligned tensors, and on the sizes of their rows. Axes: see `groups.py`; B are this
rank's rows of one optimizer step. Besides, K micro-batches of that step, R ranks, L rows of one rank after dealing.

Row i of micro-batch m has the gradient A_i G_i / D_m, with D_m the rows of m (`ROW_MEAN_LOSSES`), its loss tokens
(bnpo) or a constant. So a row with A_i = 0 may leave, and any row may move to another micro-batch of the same
optimizer step, on any rank, where its factor D_m' / D_m is made up for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_ext.packing import split_rows

Batch = dict[str, Any]

ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")
"""Losses that average over the rows of a micro-batch, so that rows left out have to be divided out again."""

TOKEN_MEAN_LOSSES = ("bnpo", "dapo", "cispo", "vespo")
"""Losses that divide by loss tokens, from which masked rows are absent."""

LOSS_SCALE = "loss_scale"
"""Key of our factor on a micro-batch's loss, a 0-d float64 tensor on the CPU."""

MICRO_STEP = "micro_step"
"""Key of a micro-batch's `MicroStep`."""

LEFT_PADDED = ("prompt_ids", "prompt_mask")
RIGHT_PADDED = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "advantages",  # (B,), or (B, T) in a subclass
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",  # (B, T), or (B, 1) at the level of sequences
)

WIRE_TYPES = {
    **dict.fromkeys(("prompt_ids", "completion_ids"), torch.int32),
    **dict.fromkeys(("prompt_mask", "completion_mask", "tool_mask"), torch.uint8),
}
"""What tensors are sent as, where that is less than what they are."""


def check_exclusion(loss_type: str, other_terms: dict[str, bool]) -> None:
    """
    Whether rows can be left out of the loss exactly.

    Args:
        loss_type (`str`):
            TRL's.
        other_terms (`dict[str, bool]`):
            What the correction of a row mean must not scale, or cannot reach, and whether it is switched on.

    Raises:
        `ValueError`: for an unknown loss, or a row-mean loss beside a term that its correction must not scale.
    """
    known = ROW_MEAN_LOSSES + TOKEN_MEAN_LOSSES
    if loss_type not in known:
        raise ValueError(
            f"`loss_type` should be one of {', '.join(known)} where an estimator leaves rows out, found {loss_type!r}: "
            "use one of these."
        )
    for term, is_enabled in other_terms.items():
        if is_enabled and loss_type in ROW_MEAN_LOSSES:
            raise ValueError(
                f"`loss_type` should not average over rows where an estimator leaves rows out beside an {term}, found "
                f"{loss_type!r}: use 'dapo', or switch the {term} off."
            )


def find_limits(loss_type: str, beta: float, other_terms: dict[str, bool]) -> tuple[list[str], list[str]]:
    """
    What keeps the update from being computed on fewer or other rows with the same gradient.

    Args:
        loss_type (`str`):
            TRL's.
        beta (`float`):
            Weight of the KL term.
        other_terms (`dict[str, bool]`):
            What depends on which rows share a micro-batch, and whether it is switched on.

    Returns:
        `tuple[list[str], list[str]]`: why rows stay in their micro-batch, and why those with advantage zero stay;
        empty where they need not.
    """
    regrouping = [term for term, is_enabled in other_terms.items() if is_enabled]
    if loss_type not in ROW_MEAN_LOSSES + TOKEN_MEAN_LOSSES:
        regrouping.append(f"unknown `loss_type={loss_type!r}`")
    if loss_type == "bnpo" and beta:
        regrouping.append(f"KL term (`beta={beta}`), which 'bnpo' averages over the tokens of a micro-batch")
    return regrouping, [f"KL term (`beta={beta}`), which moves them too"] if beta else []


def find_loss_mask(batch: Batch) -> Tensor:
    """The tokens (B, T) of these rows that the loss sees."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def count_loss_tokens(batch: Batch) -> Tensor:
    """Number of tokens of these rows that the loss sees."""
    return find_loss_mask(batch).sum()


def mask_rows(batch: Batch, excluded_B: Tensor) -> None:
    """
    Takes every token of the excluded rows out of the loss, in place. Where the model still reads them, log-probs of a
    row that it cannot see would meet those kept from before in ratios that overflow.
    """
    mask_BT = batch.get("tool_mask", torch.ones_like(batch["completion_mask"]))
    batch["tool_mask"] = mask_BT * (~excluded_B).unsqueeze(1).to(mask_BT)


# What a row needs


def find_unknown(batch: Batch, moves: bool) -> str | None:
    """The first key whose rows we cannot move (those of images, say) or, with `moves`, not to another rank; or None."""
    num_rows = len(batch["completion_ids"])
    for name, value in batch.items():
        if value is None or (isinstance(value, Tensor) and value.dim() == 0):
            continue
        is_aligned = isinstance(value, Tensor if moves else Tensor | list) and len(value) == num_rows
        is_scalar = not isinstance(value, Tensor) or value.dim() == 1
        if not (is_aligned and (is_scalar or name in LEFT_PADDED + RIGHT_PADDED)):
            return name
    return None


@dataclass(frozen=True)
class Trim:
    """Whether padding left of prompts and right of completions may go, and what widths have to be a multiple of."""

    left: bool
    right: bool
    multiple: int = 1


def measure(batch: Batch, trim: Trim) -> Tensor:
    """Width of the prompt, width of the completion and number of loss tokens of each row, int64 (B, 3)."""

    def width(mask_BT: Tensor, trims: bool) -> Tensor:
        places_T = torch.arange(1, mask_BT.size(1) + 1, device=mask_BT.device)
        found_B = (mask_BT * places_T).amax(dim=1).clamp(min=1) if trims else places_T[-1:].expand(len(mask_BT))
        return -(found_B // -trim.multiple) * trim.multiple

    prompt_B, completion_B = width(batch["prompt_mask"].flip(1), trim.left), width(batch["completion_mask"], trim.right)
    return torch.stack([prompt_B, completion_B, find_loss_mask(batch).sum(dim=1)], dim=1).long()


def find_needed(batch: Batch, prunes: bool) -> Tensor:
    """The rows (B,) with a token in the loss; with `prunes`, only where its advantage is not zero."""
    is_needed_BT = find_loss_mask(batch) != 0
    if prunes:
        advantages = batch["advantages"]
        is_needed_BT = is_needed_BT & (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages).ne(0)
    return is_needed_BT.any(dim=1)


def survey(batches: Sequence[Batch], trim: Trim, drops: bool, prunes: bool) -> Tensor:
    """
    `measure` of all rows, zero where one leaves (B, 3), below the widths of prompts and completions and the number of
    loss tokens of all rows: int64 (B + 1, 3).
    """
    sizes_B3 = torch.cat([measure(batch, trim) for batch in batches])
    widths = [batches[0][name].size(1) for name in ("prompt_ids", "completion_ids")]
    header_3 = sizes_B3.new_tensor([*widths, sizes_B3[:, 2].sum()])
    if drops:
        sizes_B3 = sizes_B3 * torch.cat([find_needed(batch, prunes) for batch in batches]).unsqueeze(1)
    return torch.cat([header_3.unsqueeze(0), sizes_B3])


# Moving rows


def concatenate(batches: Sequence[Batch]) -> Batch:
    """The rows of several batches of the same widths as one."""

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], list):
            return [item for value in values for item in value]
        return torch.cat(values) if isinstance(values[0], Tensor) and values[0].dim() else values[0]

    return {name: join([batch[name] for batch in batches]) for name in batches[0]}


def take(batch: Batch, index: Sequence[int]) -> Batch:
    """Some of the rows of a batch, in the order of the index."""

    def pick(value: Any) -> Any:
        if isinstance(value, list):
            return [value[i] for i in index]
        is_aligned = isinstance(value, Tensor) and value.dim()
        return value[torch.tensor(index, dtype=torch.long, device=value.device)] if is_aligned else value

    return {name: pick(value) for name, value in batch.items()}


def crop(batch: Batch, prompt_width: int, completion_width: int) -> Batch:
    """The batch without the columns beyond these widths."""
    left = {name: batch[name][:, -prompt_width:] for name in LEFT_PADDED if name in batch}
    wide = [name for name in RIGHT_PADDED if isinstance(batch.get(name), Tensor) and batch[name].dim() > 1]
    return batch | left | {name: batch[name][:, :completion_width] for name in wide}


def make_filler(batch: Batch) -> Batch:
    """One row of one prompt token, outside the loss: the cheapest that a model can be given."""
    filler = take(batch, [0])
    for name in LEFT_PADDED + RIGHT_PADDED:
        if isinstance(filler.get(name), Tensor):
            filler[name] = torch.zeros_like(filler[name])
    filler["prompt_mask"][:, -1] = 1
    if isinstance(filler.get("importance_sampling_ratio"), Tensor):
        filler["importance_sampling_ratio"] += 1
    return filler


# Dealing rows


@dataclass(frozen=True)
class MicroStep:
    """
    What a micro-batch holds, over all ranks, in relation to the K micro-batches of its optimizer step.

    Args:
        tokens (`float`):
            Its loss tokens, times K, over those of the step before any row left.
        live_tokens (`float`):
            The same over those of the rows that stayed; NaN without such a row.
        rows (`float`):
            Its rows, times K, over those of the step before any row left.
        live_rows (`float`):
            Its rows, times K, over the rows that stayed; NaN without such a row.
        fillers (`float`):
            Share of fillers among its rows.
    """

    tokens: float
    live_tokens: float
    rows: float
    live_rows: float
    fillers: float


@dataclass(frozen=True)
class Plan:
    """
    Who computes which rows, in K micro-batches of as many rows on every rank.

    Args:
        rows_RK (`list[list[np.ndarray]]`):
            Rows of each rank's micro-batches, as rank * B + place, without fillers.
        counts_K (`np.ndarray`):
            Rows of each micro-batch, fillers included.
        widths_RK2 (`np.ndarray`):
            Width of the prompts and of the completions.
        steps_K (`list[MicroStep]`):
            The same on every rank.
    """

    rows_RK: list[list[np.ndarray]]
    counts_K: np.ndarray
    widths_RK2: np.ndarray
    steps_K: list[MicroStep]

    @property
    def padded_R(self) -> np.ndarray:
        """Tokens that each rank's model reads, padding included."""
        return (self.widths_RK2.sum(axis=2) * self.counts_K).sum(axis=1)


def make_plan(
    sizes_RB3: np.ndarray, widths_R2: np.ndarray, num_tokens: int, num_steps: int, exchanges: bool = False
) -> Plan:
    """
    Deals the rows of one optimizer step to micro-batches, longest first, so that as few tokens as possible are padding.

    Args:
        sizes_RB3 (`np.ndarray`):
            `measure` of each rank's rows, zero where a row leaves; the same on every rank, and so is the plan.
        widths_R2 (`np.ndarray`):
            Each rank's width of prompts and completions before. No micro-batch holds more tokens than before.
        num_tokens (`int`):
            Loss tokens of all ranks' rows, those included that leave.
        num_steps (`int`):
            K.
        exchanges (`bool`, *optional*, defaults to `False`):
            Whether rows may move to another rank.
    """
    num_ranks, num_rows, _ = sizes_RB3.shape
    sizes_N3 = sizes_RB3.reshape(-1, 3)
    caps_R = num_rows // num_steps * (widths_R2.max(axis=0)[None] if exchanges else widths_R2).sum(axis=1)
    prompts_N, completions_N = sizes_N3[:, 0], sizes_N3[:, 1]
    plans = []
    for lengths_N in (completions_N * (prompts_N.max() + 1) + prompts_N, completions_N + prompts_N):
        order = np.argsort(-lengths_N, kind="stable")
        order = order[prompts_N[order] > 0]
        rows_R = [
            order[rank::num_ranks] if exchanges else order[order // num_rows == rank] for rank in range(num_ranks)
        ]
        sizes_RL2 = np.ones((num_ranks, max(map(len, rows_R)), 2), dtype=np.int64)
        for rank, rows in enumerate(rows_R):
            sizes_RL2[rank, : len(rows)] = sizes_N3[rows, :2]
        counts = split_rows(sizes_RL2, num_steps, np.broadcast_to(caps_R, num_ranks))
        plans.append(_describe(sizes_N3, rows_R, counts, num_rows, num_tokens))
    return min(plans, key=lambda plan: plan.padded_R.sum())


def keep_places(sizes_RB3: np.ndarray, num_tokens: int, num_steps: int) -> Plan:
    """The plan that only trims."""
    num_ranks, num_rows, _ = sizes_RB3.shape
    rows_R = list(np.arange(num_ranks * num_rows).reshape(num_ranks, num_rows))
    counts = [num_rows // num_steps] * num_steps
    return _describe(sizes_RB3.reshape(-1, 3), rows_R, counts, num_rows, num_tokens)


def _describe(
    sizes_N3: np.ndarray, rows_R: list[np.ndarray], counts: list[int], num_rows: int, num_tokens: int
) -> Plan:
    num_ranks, num_steps, counts_K = len(rows_R), len(counts), np.maximum(counts, 1)
    rows_RK = [np.split(rows, np.cumsum(counts)[:-1]) for rows in rows_R]
    widths_RK2 = np.array([[sizes_N3[rows, :2].max(axis=0, initial=1) for rows in rows_K] for rows_K in rows_RK])
    tokens_K = np.array([[sizes_N3[rows, 2].sum() for rows in rows_K] for rows_K in rows_RK]).sum(axis=0)
    live_K = np.array([[len(rows) for rows in rows_K] for rows_K in rows_RK]).sum(axis=0)

    def share(values_K: np.ndarray, total: float) -> np.ndarray:
        return values_K * num_steps / total if total else np.full(num_steps, np.nan)

    shares = (
        share(tokens_K, num_tokens),
        share(tokens_K, tokens_K.sum()),
        share(counts_K, num_rows),
        share(num_ranks * counts_K, live_K.sum()),
        1 - live_K / (num_ranks * counts_K),
    )
    return Plan(rows_RK, counts_K, widths_RK2, [MicroStep(*map(float, values)) for values in zip(*shares, strict=True)])


def deal(pool: Batch, plan: Plan, rank: int, index_N: np.ndarray, loss_type: str) -> list[Batch]:
    """
    The micro-batches of one rank, their factors D_m' / D_m made up for.

    Args:
        pool (`Batch`):
            Rows, from `pool_rows`.
        plan (`Plan`):
            Whose rows go where.
        rank (`int`):
            Whose micro-batches to make.
        index_N (`np.ndarray`):
            Where in the pool each of the plan's rows lies.
        loss_type (`str`):
            TRL's.
    """
    num_rows = len(pool["completion_ids"])
    pool = concatenate([pool, make_filler(pool)])
    batches = []
    for rows, count, widths, step in zip(
        plan.rows_RK[rank], plan.counts_K, plan.widths_RK2[rank], plan.steps_K, strict=True
    ):
        index = [*index_N[rows].tolist(), *[num_rows] * (int(count) - len(rows))]
        batch = crop(take(pool, index), *widths.tolist()) | {MICRO_STEP: step}
        if loss_type in ROW_MEAN_LOSSES:
            scale = float(batch.get(LOSS_SCALE, 1.0)) * step.rows
            batch[LOSS_SCALE] = torch.tensor(scale, dtype=torch.float64)
        elif loss_type == "bnpo":
            batch["advantages"] = batch["advantages"] * count_loss_tokens(batch).clamp(min=1)
        batches.append(batch)
    return batches


def pool_rows(batches: Sequence[Batch], loss_type: str) -> Batch:
    """All rows of an optimizer step; for bnpo, their advantages are divided by the tokens that they shared."""
    if loss_type == "bnpo":
        tokens = [count_loss_tokens(batch).clamp(min=1) for batch in batches]
        batches = [
            batch | {"advantages": batch["advantages"] / count} for batch, count in zip(batches, tokens, strict=True)
        ]
    return concatenate(batches)


# Moving rows to other ranks


def pack(rows: Batch, num_rows: int, widths: Sequence[int]) -> Tensor:
    """The rows, padded to these widths and by empty rows to their number, as bytes (num_rows, bytes of a row)."""
    columns = []
    for name, width, dtype in _layout(rows, widths):
        value = rows[name].to(dtype)
        value = value.unsqueeze(1) if value.dim() == 1 else value
        missing = width - value.size(1)
        sides = (missing, 0) if name in LEFT_PADDED else (0, missing)
        fill = 1.0 if name == "importance_sampling_ratio" else 0.0
        value = torch.nn.functional.pad(value, (*sides, 0, num_rows - len(value)), value=fill)
        columns.append(value.contiguous().view(torch.uint8))
    return torch.cat(columns, dim=1)


def unpack(packed: Tensor, rows: Batch, widths: Sequence[int]) -> Batch:
    """The rows of `pack`, gathered from all ranks; `rows` are this rank's own, for what they are made of."""
    found, start = dict(rows), 0
    for name, width, dtype in _layout(rows, widths):
        stop = start + width * dtype.itemsize
        value = packed[:, start:stop].contiguous().view(dtype).to(rows[name].dtype)
        found[name] = value.squeeze(1) if rows[name].dim() == 1 else value
        start = stop
    return found


def _layout(rows: Batch, widths: Sequence[int]) -> list[tuple[str, int, torch.dtype]]:
    """Name, columns and type on the wire of everything that has rows."""
    layout = []
    for name in sorted(name for name, value in rows.items() if isinstance(value, Tensor) and value.dim()):
        is_wide = rows[name].dim() > 1 and rows[name].size(1) > 1
        width = widths[0] if name in LEFT_PADDED else widths[1] if is_wide else 1
        layout.append((name, width, WIRE_TYPES.get(name, rows[name].dtype)))
    return layout
