"""Arithmetic problems of five levels, and the careless demonstrations the shipped policy learned from.

Level 1 adds two digits, level 2 adds or subtracts two-digit numbers, level 3 has three terms, level 4
multiplies a two-digit number by a digit, level 5 a three-digit number by a two-digit one. Demonstrations of levels
2 to 4 get digits wrong at a rate that grows with the level; those of level 5 are right but show no working, which
a model this small cannot imitate. So the policy is nearly always right on level 1, nearly always wrong on level 5,
and in between elsewhere: groups collapse on both sides.
"""

import hashlib
import random

SLIP_RATES = {1: 0.0, 2: 0.08, 3: 0.13, 4: 0.2, 5: 0.0}
"""Probability, by level, that a digit of a demonstration's result is replaced by another."""


OTHER_DIGITS = {digit: [other for other in "0123456789" if other != digit] for digit in "0123456789"}


def _terms(level: int, rng: random.Random) -> tuple[list[int], str]:
    """Operands and operators of one random problem."""
    if level == 1:
        return [rng.randint(0, 9), rng.randint(0, 9)], "+"
    if level == 2:
        first, second = rng.randint(10, 99), rng.randint(10, 99)
        return ([first, second], "+") if rng.random() < 0.5 else ([max(first, second), min(first, second)], "-")
    if level == 3:
        return [rng.randint(10, 99) for _ in range(3)], "++"
    if level == 4:
        return [rng.randint(11, 99), rng.randint(3, 9)], "*"
    return [rng.randint(101, 999), rng.randint(11, 99)], "*"


def _is_test(problem: str) -> bool:
    """A tenth of all problems, chosen by hash, is kept for evaluation and never trained on."""
    return hashlib.sha256(problem.encode()).digest()[0] % 10 == 0


def _sample(level: int, split: str, rng: random.Random) -> tuple[str, list[int], str]:
    while True:
        numbers, operators = _terms(level, rng)
        expression = str(numbers[0]) + "".join(f"{o}{n}" for o, n in zip(operators, numbers[1:], strict=True))
        problem = f"What is {expression}?"
        if _is_test(problem) == (split == "test"):
            return problem, numbers, operators


def make_problems(
    num_problems: int, split: str = "train", seed: int = 0, levels: tuple[int, ...] = (1, 2, 3, 4, 5)
) -> list[dict[str, str | int]]:
    """
    Draws problems, the levels in turn.

    Args:
        num_problems (`int`):
            Number of problems.
        split (`str`, *optional*, defaults to `"train"`):
            `"train"` or `"test"`; no problem belongs to both.
        seed (`int`, *optional*, defaults to `0`):
            The same seed gives the same problems.
        levels (`tuple[int, ...]`, *optional*, defaults to `(1, 2, 3, 4, 5)`):
            The difficulty mix; a level that is named twice comes twice as often.

    Returns:
        `list[dict]`: rows with `problem`, `answer` and `level`.
    """
    rng = random.Random(f"{split}-{seed}")
    rows: list[dict[str, str | int]] = []
    for index in range(num_problems):
        level = levels[index % len(levels)]
        problem, numbers, operators = _sample(level, split, rng)
        rows.append({"problem": problem, "answer": str(_solve(numbers, operators)), "level": level})
    return rows


def _solve(numbers: list[int], operators: str) -> int:
    value = numbers[0]
    for operator, number in zip(operators, numbers[1:], strict=True):
        value = {"+": value + number, "-": value - number, "*": value * number}[operator]
    return value


def demonstrate(level: int, rng: random.Random) -> tuple[str, str]:
    """One training problem and a solution, whose results slip at the level's rate."""
    problem, numbers, operators = _sample(level, "train", rng)
    if level == 5:
        return problem, f"\\boxed{{{_solve(numbers, operators)}}}"
    if operators == "*":
        text, answer = _multiply(numbers[0], numbers[1], SLIP_RATES[level], rng)
    else:
        text, answer = _add(numbers, operators, SLIP_RATES[level], rng)
    return problem, f"{text}\n\\boxed{{{answer}}}"


def _add(numbers: list[int], operators: str, slip_rate: float, rng: random.Random) -> tuple[str, int]:
    lines, value = [], numbers[0]
    for operator, number in zip(operators, numbers[1:], strict=True):
        result = _slip(_solve([value, number], operator), slip_rate, rng)
        lines.append(f"{value}{operator}{number}={result}")
        value = result
    return "\n".join(lines), value


def _multiply(first: int, second: int, slip_rate: float, rng: random.Random) -> tuple[str, int]:
    """By the tens and the ones of the first factor."""
    tens = _slip(first // 10 * 10 * second, slip_rate, rng)
    ones = first % 10 * second
    result = _slip(tens + ones, slip_rate, rng)
    return f"{tens}+{ones}={result}", result


def _slip(value: int, slip_rate: float, rng: random.Random) -> int:
    """The value with each of its digits replaced by another one at the given rate."""
    return int("".join(rng.choice(OTHER_DIGITS[d]) if rng.random() < slip_rate else d for d in str(value)))
