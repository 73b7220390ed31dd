"""Rows of the batches that TRL buffers: which of them the loss needs, and how to move them.

Pure functions on TRL's dicts of row-aligned tensors, all that know their keys, and the file is long for that reason.
Where rows go is decided in `packing.py`. Axes: see `groups.py`
and there.

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

from grpo_ext.packing import Plan

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
    return regrouping, [f"KL term (`beta={beta}`), which moves rows with advantage zero too"] if beta else []


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


def has_rows(value: object) -> bool:
    """Whether TRL takes this for one item per row: a list, or a tensor that is not 0-d."""
    return isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)


def find_unknown(batch: Batch) -> str | None:
    """The first key whose rows we cannot move (those of images, say), or None."""
    num_rows = len(batch["completion_ids"])
    for name, value in batch.items():
        if value is None or (isinstance(value, Tensor) and not has_rows(value)):
            continue
        is_aligned = has_rows(value) and len(value) == num_rows
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
    """
    Width of the prompt, width of the completion and number of loss tokens of each row, int64 (B, 3). A completion is
    at least two columns wide where it was: TRL takes a tensor of one column for a figure per row.
    """

    def width(mask_BT: Tensor, trims: bool, least: int) -> Tensor:
        num_columns = mask_BT.size(1)
        places_T = torch.arange(1, num_columns + 1, device=mask_BT.device)
        found_B = (mask_BT * places_T).amax(dim=1) if trims else places_T[-1:].expand(len(mask_BT))
        return -(found_B.clamp(min=min(least, num_columns)) // -trim.multiple) * trim.multiple

    prompt_B = width(batch["prompt_mask"].flip(1), trim.left, least=1)
    completion_B = width(batch["completion_mask"], trim.right, least=2)
    return torch.stack([prompt_B, completion_B, find_loss_mask(batch).sum(dim=1)], dim=1).long()


def find_needed(batch: Batch, prunes: bool) -> Tensor:
    """The rows (B,) with a token in the loss; with `prunes`, only where its advantage is not zero."""
    is_needed_BT = find_loss_mask(batch) != 0
    if prunes:
        advantages = batch["advantages"]
        is_needed_BT = is_needed_BT & (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages).ne(0)
    return is_needed_BT.any(dim=1)


def survey(rows: Batch, trim: Trim, drops: bool, prunes: bool) -> Tensor:
    """
    What other ranks have to know of these rows, int64 (B + 2, 3): the widths of prompts and completions and the number
    of loss tokens; the number of rows with an advantage in the loss and their tokens without padding; and `measure` of
    each row, zero where one leaves.
    """
    sizes_B3, is_live_B = measure(rows, trim), find_needed(rows, prunes=True)
    widths = sizes_B3.new_tensor([rows["prompt_ids"].size(1), rows["completion_ids"].size(1)])
    tokens_B = rows["prompt_mask"].sum(dim=1) + rows["completion_mask"].sum(dim=1)
    num_loss_tokens, num_live, num_live_tokens = sizes_B3[:, 2].sum(), is_live_B.sum(), (tokens_B * is_live_B).sum()
    before_3 = torch.cat([widths, num_loss_tokens.view(1)])
    live_3 = torch.stack([num_live, num_live_tokens, torch.zeros_like(num_live)])
    if drops:
        sizes_B3 = sizes_B3 * (is_live_B if prunes else find_needed(rows, prunes=False)).unsqueeze(1)
    return torch.cat([before_3.unsqueeze(0), live_3.unsqueeze(0), sizes_B3])


# Moving rows


def concatenate(batches: Sequence[Batch]) -> Batch:
    """The rows of several batches of the same widths as one."""

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], list):
            return [item for value in values for item in value]
        return torch.cat(values) if has_rows(values[0]) else values[0]

    return {name: join([batch[name] for batch in batches]) for name in batches[0]}


def take(batch: Batch, index: Sequence[int]) -> Batch:
    """Some of the rows of a batch, in the order of the index."""
    places = torch.tensor(index, dtype=torch.long, device=batch["completion_ids"].device)

    def pick(value: Any) -> Any:
        return [value[i] for i in index] if isinstance(value, list) else value[places.to(value.device)]

    return {name: pick(value) if has_rows(value) else value for name, value in batch.items()}


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Neighbouring rows of a batch."""
    return {name: value[start:stop] if has_rows(value) else value for name, value in batch.items()}


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


def deal(pool: Batch, plan: Plan, rank: int, index_N: np.ndarray, loss_type: str) -> list[Batch]:
    """
    The micro-batches of one rank, their factors D_m' / D_m made up for.

    Args:
        pool (`Batch`):
            Rows; for bnpo, `share_tokens` has been at them.
        plan (`Plan`):
            Whose rows go where.
        rank (`int`):
            Whose micro-batches to make.
        index_N (`np.ndarray`):
            Where in the pool each of the plan's rows lies.
        loss_type (`str`):
            TRL's.
    """
    filler, counts = len(pool["completion_ids"]), plan.counts_K.tolist()
    index: list[int] = []
    for rows, count in zip(plan.rows_RK[rank], counts, strict=True):
        index += [*index_N[rows].tolist(), *[filler] * (count - len(rows))]
    dealt, stop, batches = take(concatenate([pool, make_filler(pool)]), index), 0, []
    for count, widths, step in zip(counts, plan.widths_RK2[rank].tolist(), plan.steps_K, strict=True):
        start, stop = stop, stop + count
        batch = crop(cut(dealt, start, stop), *widths) | {MICRO_STEP: step}
        if loss_type in ROW_MEAN_LOSSES:
            scale = float(batch.get(LOSS_SCALE, 1.0)) * step.rows
            batch[LOSS_SCALE] = torch.tensor(scale, dtype=torch.float64)
        elif loss_type == "bnpo":
            batch["advantages"] = batch["advantages"] * count_loss_tokens(batch).clamp(min=1)
        batches.append(batch)
    return batches


def share_tokens(rows: Batch, num_steps: int) -> Batch:
    """For bnpo: the rows of an optimizer step, advantages divided by the loss tokens of the micro-batch they leave."""
    tokens_B = find_loss_mask(rows).sum(dim=1)
    divisor_B = tokens_B.view(num_steps, -1).sum(dim=1).clamp(min=1).repeat_interleave(len(tokens_B) // num_steps)
    advantages = rows["advantages"]
    return rows | {"advantages": advantages / (divisor_B if advantages.dim() == 1 else divisor_B.unsqueeze(1))}


# Moving rows to other ranks


def pack(rows: Batch, num_rows: int, widths: Sequence[int]) -> Tensor:
    """The rows, padded to these widths and by empty rows to their number, as bytes (num_rows, bytes of a row)."""
    columns = []
    for name, width, dtype in _layout(rows, widths):
        value = rows[name].to(rows["completion_ids"].device, dtype)
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
        value = packed[:, start:stop].contiguous().view(dtype).to(rows[name])
        found[name] = value.squeeze(1) if rows[name].dim() == 1 else value
        start = stop
    return found


def _layout(rows: Batch, widths: Sequence[int]) -> list[tuple[str, int, torch.dtype]]:
    """Name, columns and type on the wire of everything that has rows."""
    layout = []
    for name in sorted(name for name, value in rows.items() if has_rows(value)):
        is_wide = rows[name].dim() > 1 and rows[name].size(1) > 1
        width = widths[0] if name in LEFT_PADDED else widths[1] if is_wide else 1
        layout.append((name, width, WIRE_TYPES.get(name, rows[name].dtype)))
    return layout
