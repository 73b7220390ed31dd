"""
Slow, obvious references of every estimator: lists in, lists out, float64, NaN where unscorable.

Written from the papers' formulas, without torch. `success` is the correctness of each completion; where a paper uses
the reward itself, pass the rewards.
"""

import math
from collections.abc import Callable

Row = list[float]
Rows = list[Row]


# Statistics


def scored(row: Row) -> Row:
    return [value for value in row if not math.isnan(value)]


def flat(rows: Rows) -> Row:
    return [value for row in rows for value in row]


def mean(values: Row) -> float:
    return math.fsum(values) / len(values)


def std(values: Row, ddof: int) -> float:
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - ddof))


def lower_median(values: Row) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def all_equal(row: Row, tol: float = 1e-6) -> bool:
    values = scored(row)
    if len(values) < 2:
        return False
    return max(values) - min(values) <= tol * max(1.0, max(abs(value) for value in values))


def collapse_rate(rewards: Rows, tol: float = 1e-6) -> float:
    counted = [row for row in rewards if len(scored(row)) >= 2]
    collapsed = [row for row in counted if all_equal(row, tol)]
    return len(collapsed) / len(counted) if counted else 0.0


def where_scored(row: Row, function: Callable[[float], float]) -> Row:
    return [math.nan if math.isnan(value) else function(value) for value in row]


def ratio(numerator: float, denominator: float) -> float:
    return 0.0 if numerator == 0 else numerator / denominator


def known_success(rewards: Rows, success: Rows) -> Rows:
    """Success of the scored rows; an unscorable row has none."""
    return [
        [math.nan if math.isnan(r) else s for r, s in zip(reward_row, success_row, strict=True)]
        for reward_row, success_row in zip(rewards, success, strict=True)
    ]


def sign(value: float) -> int:
    return (value > 0) - (value < 0)


# GRPO


def grpo(rewards: Rows, scale: str = "group", ddof: int = 1, eps: float = 1e-4) -> Rows:
    advantages = []
    for row in rewards:
        values = scored(row)
        if len(values) < 2:
            advantages.append(where_scored(row, lambda reward: 0.0))
            continue
        baseline = mean(values)
        divisor = 1.0
        if scale == "group":
            divisor = std(values, ddof) + eps
        elif scale == "batch":
            divisor = std(scored(flat(rewards)), ddof) + eps
        advantages.append([math.nan if math.isnan(r) else ratio(r - baseline, divisor) for r in row])
    return advantages


def grpo_exact_zero(rewards: Rows, **options: object) -> Rows:
    """GRPO with exact zeros on all-equal groups, what the reweighting papers multiply."""
    advantages = grpo(rewards, **options)
    return [
        where_scored(row, lambda reward: 0.0) if all_equal(row) else out
        for row, out in zip(rewards, advantages, strict=True)
    ]


def normalize_then_sum(rewards: list[Rows], weights: Row, ddof: int = 1, eps: float = 1e-4) -> Rows:
    """`rewards[p][i][f]`: each function is normalised in its group, then the weighted sum over the batch."""
    sums = []
    for group in rewards:
        totals = [0.0 if scored(row) else math.nan for row in group]
        for f, weight in enumerate(weights):
            column = [row[f] for row in group]
            values = scored(column)
            if len(values) < 2:
                continue
            baseline, divisor = mean(values), std(values, ddof) + eps
            for i, value in enumerate(column):
                if not math.isnan(value):
                    totals[i] += weight * ratio(value - baseline, divisor)
        sums.append(totals)
    values = scored(flat(sums))
    if len(values) < 2:
        return [where_scored(row, lambda total: 0.0) for row in sums]
    baseline, divisor = mean(values), std(values, ddof) + eps
    return [[math.nan if math.isnan(total) else ratio(total - baseline, divisor) for total in row] for row in sums]


# HA-DW


def moving_average(accuracies: Row, window: int) -> float:
    """The belief after these batches."""
    return mean(accuracies[-window:])


def adaptive_forgetting(accuracies: Row, scale: float, window: int, warmup: int, floor: float) -> tuple[Row, Row]:
    """Beliefs after each batch, and the rates that led to them (NaN in the warm-up)."""
    beliefs: Row = []
    rates: Row = []
    for t, accuracy in enumerate(accuracies):
        if t < warmup:
            beliefs.append(mean(accuracies[: t + 1]))
            rates.append(math.nan)
            continue
        rate = min(1.0, max(floor, scale * std(beliefs[-window:], 0)))
        beliefs.append((1 - rate) * beliefs[-1] + rate * accuracy)
        rates.append(rate)
    return beliefs, rates


def ha_dw(base: Rows, success: Rows, anchor: float | None = None, scale: float = 1.3) -> Rows:
    """`success` is NaN where unknown. No anchor: the first batch, which is compared with its own accuracy."""
    known = scored(flat(success))
    belief = (mean(known) if known else math.nan) if anchor is None else anchor
    out = []
    for advantages, successes in zip(base, success, strict=True):
        if not scored(successes):
            out.append(advantages)
            continue
        difference = mean(scored(successes)) - belief
        weighted = []
        for advantage in advantages:
            direction = 0 if math.isnan(advantage) else -sign(advantage) * sign(difference)
            weighted.append(advantage * scale * math.exp(direction * abs(difference)))
        out.append(weighted)
    return out


# A-GRAE


def a_grae(
    base: Rows,
    success: Rows,
    alpha: float = 1.0,
    sample_level: bool = True,
    group_level: bool = True,
    released_easy_factor: bool = False,
    gamma: float = 0.5,
    clip: float | None = None,
    omega: float | None = None,
) -> Rows:
    """`success` is NaN where unknown; `omega` defaults to the batch's success rate."""
    known = scored(flat(success))
    if not known:
        return base
    omega = mean(known) if omega is None else omega
    out = []
    for advantages, successes in zip(base, success, strict=True):
        if not scored(successes):
            out.append(advantages)
            continue
        weight = 1.0
        rate = mean(scored(successes))
        if sample_level and 0 < rate < 1:
            bound = 1 / (2 * len(successes)) if clip is None else clip
            clipped = min(max(rate, bound), 1 - bound)
            if released_easy_factor:
                hard, easy = 1 / (math.sqrt(clipped) + 1e-6), 1 / (1 - math.sqrt(clipped) + 1e-6)
            else:
                hard, easy = 1 / math.sqrt(clipped), 1 / math.sqrt(1 - clipped)
            weight = gamma * omega * hard + gamma * (1 - omega) * easy
        damping = min(1.0, omega / alpha) if group_level else 1.0
        out.append([a * weight * (damping if a > 0 else 1.0) for a in advantages])
    return out


def dominant(base: Rows, factor: float) -> Rows:
    return [[a * factor if a > 0 else a for a in row] for row in base]


def focused(base: Rows, success: Rows, hard: bool, gamma: float = 0.5, clip: float | None = None) -> Rows:
    out = []
    for advantages, successes in zip(base, success, strict=True):
        rate = mean(scored(successes)) if scored(successes) else 0.0
        if not 0 < rate < 1:
            out.append(advantages)
            continue
        bound = 1 / (2 * len(successes)) if clip is None else clip
        clipped = min(max(rate, bound), 1 - bound)
        out.append([a * gamma / math.sqrt(clipped if hard else 1 - clipped) for a in advantages])
    return out


# AVSPO


def power_count(num_rows: int, rate: float, alpha: float = 0.5) -> int:
    return max(1, min(num_rows, math.ceil(num_rows * rate**alpha - 1e-9)))


def linear_count(num_rows: int, rate: float, alpha: float = 0.5) -> int:
    return max(1, min(num_rows, math.ceil(alpha * num_rows * math.sqrt(rate) - 1e-9)))


def fixed_count(count: int) -> Callable[[int, float, float], int]:
    return lambda num_rows, rate, alpha: max(1, min(num_rows, count))


def stratified(value: float, count: int, anchor: float) -> Row:
    if value > 0:
        return [value * (1 - k / (count + 1)) for k in range(1, count + 1)]
    return [anchor * (count - k + 1) / count for k in range(1, count + 1)]


def constant(reward: float) -> Callable[[float, int, float], Row]:
    return lambda value, count, anchor: [reward] * count


def exponential(decay: float) -> Callable[[float, int, float], Row]:
    return lambda value, count, anchor: [decay**k for k in range(1, count + 1)]


def common_success(successes: Row, as_correct: bool) -> float | None:
    """c: 0 where all are wrong, 1 where all are right, the common value where partial credit counts, else None."""
    if all(value <= 1e-6 for value in successes):
        return 0.0
    if all(value >= 1 - 1e-6 for value in successes):
        return 1.0
    if as_correct and max(successes) - min(successes) <= 1e-6:
        return mean(successes)
    return None


def avspo(
    rewards: Rows,
    success: Rows,
    threshold: float = 0.5,
    count: Callable[[int, float, float], int] = power_count,
    virtual: Callable[[float, int, float], Row] = stratified,
    alpha: float = 0.5,
    anchor: float = 0.1,
    incorrect: bool = True,
    correct: bool = True,
    as_correct: bool = False,
    scale: str = "group",
    ddof: int = 1,
    eps: float = 1e-4,
    reward_range: float = 1.0,
) -> Rows:
    rate = collapse_rate(rewards)
    out = grpo_exact_zero(rewards, scale=scale, ddof=ddof, eps=eps)
    if not rate > threshold:
        return out
    for p, row in enumerate(rewards):
        if not all_equal(row):
            continue
        value = common_success(scored(success[p]), as_correct)
        if value is None or not (correct if value > 0 else incorrect):
            continue
        num_rows = len(scored(row))
        augmented = [value] * num_rows + virtual(value, count(num_rows, rate, alpha), anchor)
        advantage = value - mean(augmented)
        advantage = advantage * reward_range if scale == "none" else ratio(advantage, std(augmented, ddof) + eps)
        out[p] = [math.nan if math.isnan(reward) else advantage for reward in row]
    return out


def avspo_threshold(
    threshold: float,
    change: float | None,
    rate: float,
    lr: float = 0.01,
    low: float = 0.1,
    high: float = 0.9,
    stagnate: bool = False,
) -> float:
    """tau of the next batch; no change of the mean reward is known at the first one."""
    if change is None:
        return threshold
    direction = -1 if stagnate and change == 0 else sign(change)
    return min(high, max(low, threshold + lr * direction * (rate - threshold)))


def avspo_prototype(rewards: Rows, ddof: int = 1, eps: float = 1e-4) -> Rows:
    for extreme in (0.0, 1.0):
        if all(reward == extreme for reward in scored(flat(rewards))):
            out = []
            for row in rewards:
                augmented = [*scored(row), 1 - extreme]
                advantage = 0.0
                if len(scored(row)) >= 2:
                    advantage = (extreme - mean(augmented)) / (std(augmented, ddof) + eps)
                out.append([math.nan if math.isnan(reward) else advantage for reward in row])
            return out
    return grpo_exact_zero(rewards, ddof=ddof, eps=eps)


# MC-GRPO


def mc_grpo(
    rewards: Rows,
    center_scale: str = "mad",
    mad_eps: float = 1e-3,
    mad_fallback: str = "std",
    compensate: bool = False,
    bound: float | None = None,
    ddof: int = 1,
    eps: float = 1e-4,
) -> Rows:
    out = []
    for row in rewards:
        values = scored(row)
        if len(values) < 2 or all_equal(row):
            out.append(where_scored(row, lambda reward: 0.0))
            continue
        median = lower_median(values)
        mad = lower_median([abs(value - median) for value in values])
        if center_scale == "none":
            divisor = 1.0
        elif center_scale == "std":
            divisor = std(values, ddof) + eps
        elif mad > 1e-6:
            divisor = mad + mad_eps
        else:
            divisor = {"std": std(values, ddof) + eps, "epsilon": mad_eps, "none": 1.0}[mad_fallback]
        advantages = [math.nan if math.isnan(reward) else (reward - median) / divisor for reward in row]
        if compensate:
            num_nonzero = sum(1 for advantage in scored(advantages) if advantage != 0)
            advantages = [advantage * len(row) / max(1, num_nonzero) for advantage in advantages]
        if bound is not None:
            advantages = where_scored(advantages, lambda advantage: min(bound, max(-bound, advantage)))
        out.append(advantages)
    return out


def pivot(row: Row, priority: Row | None = None) -> int:
    """The row that leaves the loss: the first unscorable one, else the candidate with the smallest priority."""
    for i, reward in enumerate(row):
        if math.isnan(reward):
            return i
    candidates = [i for i, reward in enumerate(row) if reward == lower_median(row)]
    return min(candidates, key=lambda i: (i if priority is None else priority[i], i))


def smallest_reward(row: Row) -> int:
    """The row that the control arm leaves out: the first unscorable one, else the smallest absolute reward."""
    for i, reward in enumerate(row):
        if math.isnan(reward):
            return i
    return min(range(len(row)), key=lambda i: (abs(row[i]), i))


# A fresh estimator of each method with its defaults: (rewards, success) -> advantages

REFERENCES: dict[str, Callable[[Rows, Rows], Rows]] = {
    "grpo": lambda rewards, success: grpo(rewards),
    "avspo": lambda rewards, success: avspo(rewards, success),
    "avspo_prototype": lambda rewards, success: avspo_prototype(rewards),
    "ha_dw": lambda rewards, success: ha_dw(grpo_exact_zero(rewards), success),
    "a_grae": lambda rewards, success: a_grae(grpo_exact_zero(rewards), success),
    "positive_dominant": lambda rewards, success: dominant(grpo_exact_zero(rewards), 10.0),
    "negative_dominant": lambda rewards, success: dominant(grpo_exact_zero(rewards), 0.1),
    "hard_focused": lambda rewards, success: focused(grpo_exact_zero(rewards), success, hard=True),
    "easy_focused": lambda rewards, success: focused(grpo_exact_zero(rewards), success, hard=False),
    "mc_grpo": lambda rewards, success: mc_grpo(rewards),
    "mc_grpo_control": lambda rewards, success: grpo_exact_zero(rewards),
}
