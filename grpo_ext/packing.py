"""How the rows of an optimizer step are dealt to micro-batches, from their sizes alone, so that little is padding.

B rows of one rank before and L after dealing, N = R * B of all R ranks; K micro-batches; 2 widths, of prompt and
completion, and 3 sizes, those and the loss tokens.
"""

from dataclasses import dataclass

import numpy as np

BALANCE = 0.3
"""What a micro-batch as large as allowed costs beyond its tokens, as a share of them: among plans that pad about as
much, the one whose micro-batches are about as large."""


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


def split_rows(widths_RL2: np.ndarray, num_steps: int, caps_R: np.ndarray) -> list[int]:
    """
    Cuts rows into contiguous micro-batches at the least cost, by dynamic programming over their ends.

    Args:
        widths_RL2 (`np.ndarray`):
            Width of prompt and completion of each rank's rows, longest first.
        num_steps (`int`):
            Number of micro-batches K.
        caps_R (`np.ndarray`):
            Tokens that a micro-batch may hold on each rank, padding included. K micro-batches of equal size have to
            stay below.

    Returns:
        `list[int]`: rows of each micro-batch, the same on every rank; empty ones come last.
    """
    num_rows = widths_RL2.shape[1]
    cost_IJ = _cost(widths_RL2, caps_R)
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


def _cost(widths_RL2: np.ndarray, caps_R: np.ndarray) -> np.ndarray:
    """
    Cost (L + 1, L + 1) of rows i to j - 1 as one micro-batch: the tokens of the rank that reads most, which the others
    wait for under ZeRO-3, and infinite where they are too many.
    """
    num_rows = widths_RL2.shape[1]
    fits_IJ = np.logical_and.reduce(
        [_tokens(widths_L2) <= cap for widths_L2, cap in zip(widths_RL2, caps_R, strict=True)]
    )
    tokens_IJ = _tokens(widths_RL2.max(axis=0))
    is_piece_IJ = np.tri(num_rows, dtype=bool).T & fits_IJ
    cost_IJ = np.full((num_rows + 1, num_rows + 1), np.inf)
    np.fill_diagonal(cost_IJ, 0.0)
    penalty = BALANCE / caps_R.max()
    cost_IJ[:-1, 1:][is_piece_IJ] = (tokens_IJ * (1 + penalty * tokens_IJ))[is_piece_IJ]
    return cost_IJ


def _tokens(widths_L2: np.ndarray) -> np.ndarray:
    """Tokens (L, L) of rows i to j as one micro-batch, padding included, where i <= j."""
    places_L = np.arange(len(widths_L2))
    counts_IJ = places_L - places_L[:, None] + 1
    prompts_IJ, completions_IJ = (
        np.maximum.accumulate(np.where(counts_IJ > 0, widths_L, 0), axis=1) for widths_L in widths_L2.T
    )
    return counts_IJ * (prompts_IJ + completions_IJ)
