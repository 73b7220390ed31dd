"""Reward functions: plain TRL ones, which work with a stock `GRPOTrainer` too."""

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from trl import rewards as trl_rewards

from grpo_ext.resolution import import_object


def last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{...}` of a text, None where there is none."""
    opening = "\\boxed{"
    start = text.rfind(opening)
    while start >= 0:
        depth = 1
        for position in range(start + len(opening), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + len(opening) : position]
        start = text.rfind(opening, 0, start)
    return None


def is_equivalent(found: str | None, answer: str) -> bool | None:
    """Whether two answers mean the same, by math-verify; None where the reference cannot be parsed."""
    answer = answer.strip()
    if found is not None and found.strip() == answer and answer:
        return True
    # math-verify's time limits use signals, which only the main thread can set.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    reference = _parse_reference(answer, limit)
    if not reference:
        return None
    if found is None:
        return False
    return verify(reference, parse(f"\\boxed{{{found}}}", parsing_timeout=limit), timeout_seconds=limit)


@lru_cache(maxsize=4096)
def _parse_reference(answer: str, limit: int | None) -> list:
    return parse(f"\\boxed{{{answer}}}", parsing_timeout=limit)


def boxed_accuracy(completions: list, answer: list[str], **kwargs: Any) -> list[float | None]:
    """
    1 where the last `\\boxed{}` of the completion means the same as the reference answer, else 0.

    Args:
        completions (`list`):
            Texts, or conversations whose messages hold them.
        answer (`list[str]`):
            Reference answers, bare or inside `\\boxed{}`.

    Returns:
        `list[float | None]`: 0.0 or 1.0; None (unscorable) where the reference answer cannot be parsed.

    Example:
        >>> boxed_accuracy(["It is \\\\boxed{0.5}.", "No idea."], answer=["\\\\frac{1}{2}", "3"])
        [1.0, 0.0]
    """
    return [_score(completion, reference) for completion, reference in zip(completions, answer, strict=True)]


def _score(completion: str | list[dict[str, str]], reference: str) -> float | None:
    text = (
        completion if isinstance(completion, str) else "".join(message.get("content") or "" for message in completion)
    )
    is_right = is_equivalent(last_boxed(text), last_boxed(reference) or reference)
    return None if is_right is None else float(is_right)


REWARDS: dict[str, Callable] = {
    "boxed_accuracy": boxed_accuracy,
    "accuracy_reward": trl_rewards.accuracy_reward,
    "reasoning_accuracy_reward": trl_rewards.reasoning_accuracy_reward,
    "think_format_reward": trl_rewards.think_format_reward,
}


def find_reward(name: str) -> Callable:
    """A reward function by its name or dotted path."""
    if name in REWARDS:
        return REWARDS[name]
    module, _, function = name.rpartition(".")
    try:
        reward = import_object(module, function)
        if not callable(reward):
            raise ValueError("it is no function")
        return reward
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"`--reward_funcs` should hold names among {', '.join(REWARDS)} or dotted paths, found {name!r} ({error}): "
            "check the spelling."
        ) from error
