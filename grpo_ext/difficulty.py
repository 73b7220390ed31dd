"""Difficulty levels of problems, from success counts (arXiv 2605.21125)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from grpo_ext.population import Floats, Integers, check_counts, smooth_posterior

LEVEL_BOUNDS = (0.95, 0.75, 0.50, 0.25, 0.05, 0.01)
"""Success rates between the levels 0 to 6. The outer two are those of arXiv 2605.21125; the inner four are ours."""


@dataclass(frozen=True)
class Levels:
    """Difficulty by problem."""

    level_P: Integers
    """The most probable level, 0 (easy) to 6 (hard)."""
    level_low_P: Integers
    level_high_P: Integers
    """The 95 % credible range of levels."""
    success_rate_P: Floats
    """Posterior mean."""


def level_of(success_rate: ArrayLike, bounds: Sequence[float] = LEVEL_BOUNDS) -> Integers:
    """
    Difficulty level of a known success rate: 0 above the first bound, 6 below the last.

    Example:
        >>> level_of([1.0, 0.95, 0.5, 0.01, 0.0])
        array([0, 1, 3, 5, 6])
    """
    rates = np.asarray(success_rate, dtype=np.float64)[..., None]
    return (rates <= bounds[:-1]).sum(axis=-1) + (rates < bounds[-1:]).sum(axis=-1)


def difficulty_levels(num_correct: ArrayLike, num_samples: ArrayLike, bounds: Sequence[float] = LEVEL_BOUNDS) -> Levels:
    """
    The difficulty level of every problem (arXiv 2605.21125: level 0 above 95 % success, level 6 below 1 %).

    The bounds in between are not the paper's, which does not give them: 75, 50, 25 and 5 % are ours. A problem near a
    bound cannot be told from its neighbours by any number of samples one can afford, so the range of levels matters
    as much as the most probable one. Of 500 problems with 64 samples, means of 40 simulations:

    | population of p | most probable level right | range holds the level | range is one level | and that is right |
    |---|---|---|---|---|
    | uniform | 81 % | 99.5 % | 13 % | 98 % |
    | Beta(0.3, 0.3), U-shaped | 83 % | 99.5 % | 22 % | 99 % |
    | Beta(0.2, 2), mostly hard | 82 % | 99.6 % | 6 % | 97 % |
    | 30 % at 0, 30 % at 1, the rest uniform | 92 % | 99.3 % | 63 % | 99 % |
    | 40 % at 0, 40 % at 1, the rest uniform | 96 % | 99.6 % | 85 % | 99.6 % |
    | Beta(0.02, 0.02) | 97 % | 99.5 % | 93 % | 99.5 % |

    Args:
        num_correct, num_samples (`ArrayLike`):
            Successes and samples per problem (P,).
        bounds (`Sequence[float]`, *optional*, defaults to `LEVEL_BOUNDS`):
            Falling success rates between the levels.

    Returns:
        [`Levels`]

    Raises:
        `ValueError`: for what are no counts, or bounds that do not fall from 1 to 0.

    Example:
        >>> difficulty_levels([64, 24, 0], [64, 64, 64]).level_P
        array([0, 3, 6])
    """
    limits = list(bounds)
    if len(limits) != len(LEVEL_BOUNDS) or sorted({*limits, 0.0, 1.0}, reverse=True) != [1.0, *limits, 0.0]:
        raise ValueError(
            f"`--level_bounds` should be {len(LEVEL_BOUNDS)} falling numbers between 0 and 1, found {limits}: give "
            f"them like {' '.join(map(str, LEVEL_BOUNDS))}."
        )
    correct_P, samples_P = check_counts(num_correct, num_samples)
    pairs_2U, place_P, counts_U = np.unique(
        np.stack([correct_P, samples_P]), axis=1, return_inverse=True, return_counts=True
    )
    posterior_UJ, grid_J = smooth_posterior(pairs_2U, counts_U)
    level_J = level_of(grid_J, limits)
    by_level = np.stack([posterior_UJ[:, level_J == level].sum(axis=1) for level in range(len(limits) + 1)], axis=1)
    upto = by_level.cumsum(axis=1)
    low_U, high_U = (upto <= 0.025).sum(axis=1), (upto < 0.975).sum(axis=1)
    return Levels(by_level.argmax(axis=1)[place_P], low_U[place_P], high_U[place_P], (posterior_UJ @ grid_J)[place_P])
