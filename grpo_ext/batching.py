"""Rows of the batches that TRL buffers: pure functions on its dict of row-aligned tensors. Axes: see `groups.py`."""

from typing import Any

import torch
from torch import Tensor

ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")
"""Losses that average over the rows of a micro-batch, so that rows left out have to be divided out again."""

TOKEN_MEAN_LOSSES = ("bnpo", "dapo", "cispo", "vespo")
"""Losses that divide by loss tokens, from which masked rows are absent."""


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


def count_loss_tokens(batch: dict[str, Any]) -> Tensor:
    """Number of tokens of these rows that the loss sees."""
    return (batch["completion_mask"] * batch.get("tool_mask", 1)).sum()


def mask_rows(batch: dict[str, Any], excluded_B: Tensor) -> None:
    """
    Takes every token of the excluded rows out of the loss, in place. The model still reads them: log-probs of a row
    that it cannot see would meet those kept from before in ratios that overflow.
    """
    mask_BT = batch.get("tool_mask", torch.ones_like(batch["completion_mask"]))
    batch["tool_mask"] = mask_BT * (~excluded_B).unsqueeze(1).to(mask_BT)
