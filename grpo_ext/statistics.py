"""NaN-aware statistics of groups: pure functions from (P, G) to (P, 1). Axes: see `groups.py`."""

import torch
from torch import Tensor

EPS = 1e-4
"""Added to a standard deviation before dividing by it; TRL's value."""

COLLAPSE_TOL = 1e-6
"""Rewards of a group closer together than this (relative above 1) count as equal."""


def num_scored(values_PG: Tensor) -> Tensor:
    """Number of rows that are not NaN, int (P, 1)."""
    return (~values_PG.isnan()).sum(dim=1, keepdim=True)


def group_mean(values_PG: Tensor) -> Tensor:
    """Mean over the scored rows, (P, 1); NaN for a group without one."""
    return values_PG.nanmean(dim=1, keepdim=True)


def group_std(values_PG: Tensor, ddof: int = 1) -> Tensor:
    """
    Standard deviation over the scored rows, (P, 1).

    `ddof=1` is the sample standard deviation, NaN where fewer than two rows are scored; `ddof=0` is the population's.
    """
    return _std(values_PG, ddof, dim=1)


def batch_std(values_PG: Tensor, ddof: int = 1) -> Tensor:
    """Standard deviation over all scored rows of the batch, (1, 1); otherwise as `group_std`."""
    return _std(values_PG, ddof, dim=None)


def _std(values: Tensor, ddof: int, dim: int | None) -> Tensor:
    # TRL's order of operations, so that the last bit agrees.
    mean = values.nanmean(dim=dim, keepdim=True)
    variance = ((values - mean) ** 2).nanmean(dim=dim, keepdim=True)
    if ddof == 1:
        count = (~values.isnan()).sum(dim=dim, keepdim=True).to(values.dtype)
        variance = variance * (count / (count - 1)).masked_fill(count < 2, torch.nan)
    return variance.sqrt()


def group_median(values_PG: Tensor) -> Tensor:
    """Median over the scored rows, (P, 1); the lower middle value for an even number of them."""
    return values_PG.nanmedian(dim=1, keepdim=True).values


def group_mad(values_PG: Tensor) -> Tensor:
    """Median absolute deviation from the median, (P, 1); both medians are lower ones."""
    return group_median((values_PG - group_median(values_PG)).abs())


def is_all_equal(values_PG: Tensor, tol: float = COLLAPSE_TOL) -> Tensor:
    """
    Groups whose scored values all agree, bool (P, 1).

    `max - min <= tol * max(1, max|value|)` over at least two scored rows. Up to 1 the test is absolute, above it
    is relative: two rewards of 1000 that differ by less than 0.001 count as equal.
    """
    is_nan_PG = values_PG.isnan()
    high_P1 = values_PG.masked_fill(is_nan_PG, -torch.inf).amax(dim=1, keepdim=True)
    low_P1 = values_PG.masked_fill(is_nan_PG, torch.inf).amin(dim=1, keepdim=True)
    size_P1 = torch.maximum(high_P1.abs(), low_P1.abs()).clamp(min=1.0)
    return (num_scored(values_PG) >= 2) & (high_P1 - low_P1 <= tol * size_P1)


def is_mixed(values_PG: Tensor) -> Tensor:
    """Groups of at least two scored values that do not all agree, bool (P, 1)."""
    return (num_scored(values_PG) >= 2) & ~is_all_equal(values_PG)


def num_comparable(values_PG: Tensor) -> int:
    """Number of groups with at least two scored values, the only ones that can agree or differ."""
    return int((num_scored(values_PG) >= 2).sum())


def share_all_equal(values_PG: Tensor, tol: float = COLLAPSE_TOL) -> float:
    """Share of the comparable groups whose values all agree; 0 where there is no such group."""
    return int(is_all_equal(values_PG, tol).sum()) / max(1, num_comparable(values_PG))


def batch_mean(values: Tensor) -> float:
    """Mean over all scored values in float64; NaN when there is none."""
    return values.cpu().double().nanmean().item()  # not every device has float64
