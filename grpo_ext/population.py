"""The population of success probabilities behind success counts, and means over the problems with intervals.

Problem i was answered correctly in k_i of n_i samples; its success probability p_i is unknown. The population of p
is estimated from all counts together, by nonparametric maximum likelihood (Laird 1978) on a grid, and every problem
gets its posterior under it.

Axes: `P` problems, `U` distinct pairs (k, n), `J` points of the grid, `R` populations.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SMOOTHING_STEPS = 5
"""
Steps of EM, from the arcsine prior, to the smooth population that levels and posterior spreads come from. Maximum
likelihood itself ends in a few spikes, under which every problem looks more certain than it is.
"""

FITTING_STEPS = 600
"""
Steps of EM to the maximum of the likelihood, and again along each tilt, for up to 500 problems. More problems need
more, as the square root of their number: the tilts get weaker, and where the counts fix little, slow.
"""

NORMAL_QUANTILE, LIKELIHOOD_DROP = 2.576, 3.317
"""
Half-widths of the 95 % intervals, in standard deviations and in log-likelihood. They are the asymptotic values of
99 %: in simulation those of 95 % cover in 80 to 95 of 100, since part of what is unknown is the shape itself.
"""

TILTS = np.geomspace(0.3, 300, 10)
"""Pressures, in units of 1/P, under which the likelihood is maximised again in search of the interval's ends."""


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Population:
    """Success counts, and the population of success probabilities fitted to them."""

    grid_J: Floats
    likelihood_UJ: Floats
    counts_U: Integers
    weights_J: Floats
    """Of maximum likelihood."""
    smooth_J: Floats
    """After `SMOOTHING_STEPS`."""

    @property
    def shares_U(self) -> Floats:
        """Share of the problems that have each pair (k, n)."""
        return self.counts_U / self.counts_U.sum()


def check_counts(num_correct: ArrayLike, num_samples: ArrayLike) -> tuple[Integers, Integers]:
    """The counts as whole numbers; a `ValueError` where they are none of k successes in n > 0 samples."""
    counts = [np.asarray(values, dtype=np.float64) for values in (num_correct, num_samples)]
    correct_P, samples_P = counts
    if correct_P.ndim != 1 or correct_P.shape != samples_P.shape or correct_P.size == 0:
        raise ValueError(
            f"`num_correct` and `num_samples` should be two lists with one number per problem, found the shapes "
            f"{correct_P.shape} and {samples_P.shape}: give both for at least one problem."
        )
    is_wrong_P = ~((correct_P >= 0) & (correct_P <= samples_P) & (samples_P >= 1))
    is_wrong_P |= (correct_P % 1 != 0) | (samples_P % 1 != 0)
    if is_wrong_P.any():
        place = int(is_wrong_P.argmax())
        raise ValueError(
            f"`num_correct` should be a whole number from 0 to `num_samples`, and that at least 1, found "
            f"{correct_P[place]:g} of {samples_P[place]:g} at problem {place}: correct or drop the row."
        )
    return correct_P.astype(np.int64), samples_P.astype(np.int64)


def make_grid(num_points: int) -> Floats:
    """Success probabilities from 0 to 1, equally spaced where a count's standard error is constant (arcsine)."""
    grid_J = np.sin(np.linspace(0, np.pi / 2, num_points)) ** 2
    grid_J[-1] = 1.0
    return grid_J


def likelihood(correct_U: Integers, samples_U: Integers, grid_J: Floats) -> Floats:
    """Binomial likelihoods (U, J), each pair's divided by its largest."""
    with np.errstate(divide="ignore"):
        log_success_J, log_failure_J = np.log(grid_J), np.log1p(-grid_J)
    # 0 log 0 is 0: a problem without a success may have p = 0.
    wins_UJ = np.where(correct_U[:, None] > 0, correct_U[:, None] * np.maximum(log_success_J, -1e9), 0.0)
    failures_U = samples_U - correct_U
    losses_UJ = np.where(failures_U[:, None] > 0, failures_U[:, None] * np.maximum(log_failure_J, -1e9), 0.0)
    log_UJ = wins_UJ + losses_UJ
    return np.exp(log_UJ - log_UJ.max(axis=1, keepdims=True))


def maximise(
    likelihood_UJ: Floats, shares_U: Floats, weights_RJ: Floats, num_steps: int, tilt_RJ: Floats | None = None
) -> Floats:
    """Steps of EM towards the populations of maximum likelihood, each under its own pull where there is a tilt."""
    for _ in range(num_steps):
        weights_RJ = weights_RJ * ((shares_U / (weights_RJ @ likelihood_UJ.T)) @ likelihood_UJ)
        if tilt_RJ is not None:
            weights_RJ = weights_RJ * tilt_RJ
        weights_RJ = weights_RJ / weights_RJ.sum(axis=1, keepdims=True)
    return weights_RJ


def fit_population(num_correct: ArrayLike, num_samples: ArrayLike) -> Population:
    """
    The population of success probabilities that the counts make most likely.

    Args:
        num_correct, num_samples (`ArrayLike`):
            Successes and samples per problem (P,).

    Raises:
        `ValueError`: for what are no counts.
    """
    correct_P, samples_P = check_counts(num_correct, num_samples)
    pairs_2U, counts_U = np.unique(np.stack([correct_P, samples_P]), axis=1, return_counts=True)
    # Two points of the grid lie less than one standard error of the longest row of samples apart.
    grid_J = make_grid(max(64, math.ceil(4 * math.sqrt(samples_P.max()))))
    likelihood_UJ = likelihood(pairs_2U[0], pairs_2U[1], grid_J)
    start_1J, shares_U = np.full((1, len(grid_J)), 1 / len(grid_J)), counts_U / counts_U.sum()
    smooth_1J = maximise(likelihood_UJ, shares_U, start_1J, SMOOTHING_STEPS)
    weights_1J = maximise(likelihood_UJ, shares_U, smooth_1J, num_fitting_steps(len(correct_P)))
    return Population(grid_J, likelihood_UJ, counts_U, weights_1J[0], smooth_1J[0])


def smooth_posterior(pairs_2U: Integers, counts_U: Integers) -> tuple[Floats, Floats]:
    """Posterior (U, J) of each pair of counts under the smooth population, on a grid fine enough for the bounds."""
    grid_J = make_grid(max(513, math.ceil(8 * math.sqrt(pairs_2U[1].max()))))
    likelihood_UJ = likelihood(pairs_2U[0], pairs_2U[1], grid_J)
    start_1J = np.full((1, len(grid_J)), 1 / len(grid_J))
    weighted_UJ = likelihood_UJ * maximise(likelihood_UJ, counts_U / counts_U.sum(), start_1J, SMOOTHING_STEPS)
    return weighted_UJ / weighted_UJ.sum(axis=1, keepdims=True), grid_J


def num_fitting_steps(num_problems: int) -> int:
    """Steps of EM after which more change the third digit of an interval."""
    return math.ceil(FITTING_STEPS * max(1.0, math.sqrt(num_problems / 500)))


def posterior_mean(population: Population, values_J: Floats, weights_RJ: Floats) -> tuple[Floats, Floats]:
    """Mean over the problems of a quantity's posterior expectation (R,), and its posterior variance (R,)."""
    evidence_RU = weights_RJ @ population.likelihood_UJ.T
    mean_RU = (weights_RJ * values_J) @ population.likelihood_UJ.T / evidence_RU
    square_RU = (weights_RJ * values_J**2) @ population.likelihood_UJ.T / evidence_RU
    variance_R = np.maximum(square_RU - mean_RU**2, 0) @ population.shares_U / population.counts_U.sum()
    return mean_RU @ population.shares_U, variance_R


def estimate_mean(population: Population, values_J: Floats) -> Estimate:
    """
    Mean of a quantity over these problems, with an interval.

    Two uncertainties are added in quadrature: the problems' own, given the population (posterior variance), and the
    population's: among the populations whose log-likelihood lies within `LIKELIHOOD_DROP` of the largest, how far
    the mean can move. These are found by maximising the likelihood again under an exponential tilt towards larger
    or smaller values. Where n fixes the mean, the first is what counts; where it does not, the second.

    Args:
        population ([`Population`]):
            From `fit_population`.
        values_J (`NDArray`):
            The quantity at every point of the grid, in [0, 1].

    Returns:
        [`Estimate`]
    """
    weights_RJ, drop_R = tilted_populations(population, values_J)
    mean_R, variance_R = posterior_mean(population, values_J, weights_RJ)
    smooth_R, smooth_variance_R = posterior_mean(population, values_J, population.smooth_J[None])
    middle = len(TILTS)
    ends = [
        np.interp(LIKELIHOOD_DROP, np.maximum.accumulate(drop_R[side]), mean_R[side])
        for side in (slice(middle, None, -1), slice(middle, None))
    ]
    value = float(mean_R[middle])
    # The smooth population is plausible too, though a long row of samples may rule it out.
    lowest, highest = min(*ends, smooth_R[0], value), max(*ends, smooth_R[0], value)
    spread = NORMAL_QUANTILE * math.sqrt(max(variance_R[middle], smooth_variance_R[0]))
    low, high = value - math.hypot(value - lowest, spread), value + math.hypot(highest - value, spread)
    return Estimate(value, max(0.0, low), min(1.0, high))


def tilted_populations(population: Population, values_J: Floats) -> tuple[Floats, Floats]:
    """The populations (R, J) from the strongest pull down, over none, to the strongest up; what each costs (R,)."""
    num_problems = int(population.counts_U.sum())
    pull_R = np.concatenate([-TILTS[::-1], [0.0], TILTS]) / num_problems
    weights_RJ = maximise(
        population.likelihood_UJ,
        population.shares_U,
        np.tile(population.weights_J, (len(pull_R), 1)),
        num_fitting_steps(num_problems),
        np.exp(pull_R[:, None] * values_J),
    )
    log_R = num_problems * np.log(weights_RJ @ population.likelihood_UJ.T) @ population.shares_U
    return weights_RJ, log_R[len(TILTS)] - log_R
