"""How many rows each micro-batch takes, so that as few tokens as possible are padding. Axes: see `batching.py`."""

import numpy as np

BALANCE = 0.3
"""What a micro-batch as large as allowed costs beyond its tokens, as a share of them: among plans that pad about as
much, the one whose micro-batches are about as large."""


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
    envelope_L2 = widths_RL2.max(axis=0)
    cost_IJ = np.full((num_rows + 1, num_rows + 1), np.inf)
    np.fill_diagonal(cost_IJ, 0.0)
    for start in range(num_rows):
        counts_J = np.arange(1, num_rows - start + 1)
        tokens_RJ = counts_J * np.maximum.accumulate(widths_RL2[:, start:], axis=1).sum(axis=2)
        tokens_J = counts_J * np.maximum.accumulate(envelope_L2[start:], axis=0).sum(axis=1)
        fits_J = (tokens_RJ <= caps_R[:, None]).all(axis=0)
        cost_IJ[start, start + 1 :] = np.where(fits_J, tokens_J * (1 + BALANCE * tokens_J / caps_R.max()), np.inf)
    return cost_IJ
