"""How the rows of an optimizer step are dealt to micro-batches, from their sizes alone, so that little is padding.

B rows of one rank before and L after dealing, N = R * B of all R ranks; K micro-batches; 2 widths, of prompt and
completion, and 3 sizes, those and the loss tokens.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

BALANCE = 0.3
"""What a micro-batch as large as allowed costs beyond its tokens, as a share of them: among plans that pad about as
much, the one whose micro-batches are about as large."""

MOST_WORK = 2**26
"""Additions up to which rows are cut at the least cost (some 0.2 s); above, into equal numbers."""


@dataclass(frozen=True)
class Sizes:
    """
    What all ranks know of the rows of one optimizer step.

    Args:
        rows_RB3 (`np.ndarray`):
            `measure` of each rank's rows, zero where a row leaves.
        widths_R2 (`np.ndarray`):
            Each rank's width of prompts and completions before.
        tokens_R (`np.ndarray`):
            Loss tokens of each rank's rows, those included that leave.
        live_R2 (`np.ndarray`):
            Each rank's rows with an advantage in the loss, and their tokens without padding.
    """

    rows_RB3: np.ndarray
    widths_R2: np.ndarray
    tokens_R: np.ndarray
    live_R2: np.ndarray

    @classmethod
    def read(cls, table_RB3: np.ndarray) -> Self:
        """From the gathered tables of `survey`."""
        return cls(table_RB3[:, 2:], table_RB3[:, 0, :2], table_RB3[:, 0, 2], table_RB3[:, 1, :2])

    @property
    def is_needed_RB(self) -> np.ndarray:
        """The rows that stay."""
        return self.rows_RB3[:, :, 0] > 0

    @property
    def stock_R(self) -> np.ndarray:
        """Tokens that each rank's model would have read, padding included."""
        return self.rows_RB3.shape[1] * self.widths_R2.sum(axis=1)

    def floors_R2(self, multiple: int) -> np.ndarray:
        """The least widths: two columns of completions, since TRL takes a tensor of one for a figure per row."""
        return np.minimum(self.widths_R2, [multiple, max(2, multiple)])


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


def make_plan(sizes: Sizes, num_steps: int, multiple: int = 1, exchanges: bool = False) -> Plan:
    """
    Deals the rows of one optimizer step to micro-batches, longest first, so that as few tokens as possible are padding.

    No micro-batch holds more tokens, or more positions of completions, than one of its rank did before; where rows move
    to other ranks, than the largest of any rank, wherever that can be.

    Args:
        sizes (`Sizes`):
            Of the rows; the same on every rank, and so is the plan.
        num_steps (`int`):
            K.
        multiple (`int`, *optional*, defaults to `1`):
            What widths have to be a multiple of.
        exchanges (`bool`, *optional*, defaults to `False`):
            Whether rows may move to another rank.
    """
    num_ranks, num_rows, _ = sizes.rows_RB3.shape
    prompts_N, completions_N, _ = sizes.rows_RB3.reshape(-1, 3).T
    caps_R2 = num_rows // num_steps * np.stack([sizes.widths_R2.sum(axis=1), sizes.widths_R2[:, 1]], axis=1)
    caps_R2 = np.broadcast_to(caps_R2.max(axis=0), caps_R2.shape) if exchanges else caps_R2
    plans = []
    # Completions differ more than prompts, mostly; where they do not, whole rows are what should be alike.
    for lengths_N in (completions_N * (prompts_N.max() + 1) + prompts_N, completions_N + prompts_N):
        order = np.argsort(-lengths_N, kind="stable")
        order = order[prompts_N[order] > 0]
        rows_R = [
            order[rank::num_ranks] if exchanges else order[order // num_rows == rank] for rank in range(num_ranks)
        ]
        longest = max(map(len, rows_R))
        widths_RL2 = np.repeat(sizes.floors_R2(multiple)[:, None], longest, axis=1)
        for rank, rows in enumerate(rows_R):
            widths_RL2[rank, : len(rows)] = sizes.rows_RB3.reshape(-1, 3)[rows, :2]
        plans.append(_describe(sizes, rows_R, split_rows(widths_RL2, num_steps, caps_R2), multiple))
    return min(plans, key=lambda plan: plan.padded_R.sum())


def keep_places(sizes: Sizes, num_steps: int, multiple: int = 1) -> Plan:
    """The plan that only trims."""
    num_ranks, num_rows, _ = sizes.rows_RB3.shape
    rows_R = list(np.arange(num_ranks * num_rows).reshape(num_ranks, num_rows))
    return _describe(sizes, rows_R, [num_rows // num_steps] * num_steps, multiple)


def _describe(sizes: Sizes, rows_R: list[np.ndarray], counts: list[int], multiple: int) -> Plan:
    num_ranks, num_rows, _ = sizes.rows_RB3.shape
    sizes_N3, num_steps, counts_K = sizes.rows_RB3.reshape(-1, 3), len(counts), np.maximum(counts, 1)
    rows_RK = [np.split(rows, np.cumsum(counts)[:-1]) for rows in rows_R]
    widths_RK2 = np.array([[sizes_N3[rows, :2].max(axis=0, initial=0) for rows in rows_K] for rows_K in rows_RK])
    widths_RK2 = np.maximum(widths_RK2, sizes.floors_R2(multiple)[:, None])
    tokens_K = np.array([[sizes_N3[rows, 2].sum() for rows in rows_K] for rows_K in rows_RK]).sum(axis=0)
    live_K = np.array([[len(rows) for rows in rows_K] for rows_K in rows_RK]).sum(axis=0)

    def share(values_K: np.ndarray, total: float) -> np.ndarray:
        return values_K * num_steps / total if total else np.full(num_steps, np.nan)

    shares = (
        share(tokens_K, sizes.tokens_R.sum()),
        share(tokens_K, tokens_K.sum()),
        share(counts_K, num_rows),
        share(num_ranks * counts_K, live_K.sum()),
        1 - live_K / (num_ranks * counts_K),
    )
    return Plan(rows_RK, counts_K, widths_RK2, [MicroStep(*map(float, values)) for values in zip(*shares, strict=True)])


def split_rows(widths_RL2: np.ndarray, num_steps: int, caps_R2: np.ndarray) -> list[int]:
    """
    Cuts rows into contiguous micro-batches at the least cost, by dynamic programming over their ends.

    Args:
        widths_RL2 (`np.ndarray`):
            Width of prompt and completion of each rank's rows, longest first.
        num_steps (`int`):
            Number of micro-batches K.
        caps_R2 (`np.ndarray`):
            Tokens, and positions of completions, that a micro-batch should hold at most on each rank, with padding.

    Returns:
        `list[int]`: rows of each micro-batch, the same on every rank; empty ones come last.
    """
    num_rows = widths_RL2.shape[1]
    if num_rows**2 * num_steps > MOST_WORK:
        return [len(part) for part in np.array_split(np.arange(num_rows), num_steps)]
    cost_IJ = _cost(widths_RL2, caps_R2)
    total_J, starts_KJ = cost_IJ[0], []
    for _ in range(num_steps - 1):
        totals_IJ = total_J[:, None] + cost_IJ
        starts_KJ.append(totals_IJ.argmin(axis=0))
        total_J = totals_IJ.min(axis=0)
    ends = [num_rows]
    for starts_J in reversed(starts_KJ):
        ends.append(int(starts_J[ends[-1]]))
    counts = np.diff([0, *reversed(ends)]).tolist()
    return sorted(counts, key=lambda count: count == 0)


def _cost(widths_RL2: np.ndarray, caps_R2: np.ndarray) -> np.ndarray:
    """
    Cost (L + 1, L + 1) of rows i to j - 1 as one micro-batch: the tokens of the rank that reads most, which the others
    wait for under ZeRO-3, and beyond all else what exceeds a cap.
    """
    num_rows = widths_RL2.shape[1]
    excess_IJ = np.zeros((num_rows, num_rows))
    for widths_L2, caps_2 in zip(widths_RL2, caps_R2, strict=True):
        for tokens_IJ, cap in zip(_tokens(widths_L2), caps_2, strict=True):
            excess_IJ += np.maximum(tokens_IJ - cap, 0)
    tokens_IJ, _ = _tokens(widths_RL2.max(axis=0))
    cost_IJ = tokens_IJ * (1 + BALANCE / caps_R2.max() * tokens_IJ) + 1e12 * excess_IJ
    padded_IJ = np.full((num_rows + 1, num_rows + 1), np.inf)
    np.fill_diagonal(padded_IJ, 0.0)
    is_piece_IJ = np.tri(num_rows, dtype=bool).T
    padded_IJ[:-1, 1:][is_piece_IJ] = cost_IJ[is_piece_IJ]
    return padded_IJ


def _tokens(widths_L2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and positions of completions (L, L) of rows i to j as one micro-batch, padding included, where i <= j."""
    places_L = np.arange(len(widths_L2))
    counts_IJ = places_L - places_L[:, None] + 1
    prompts_IJ, completions_IJ = (
        np.maximum.accumulate(np.where(counts_IJ > 0, widths_L, 0), axis=1) for widths_L in widths_L2.T
    )
    return counts_IJ * (prompts_IJ + completions_IJ), counts_IJ * completions_IJ
