"""How long work shows where it is."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

SECONDS_OF_SILENCE = 2.0
SECONDS_BETWEEN_LINES = 10.0


def show_progress(items: Sequence[T], what: str, unit: str) -> Iterator[T]:
    """
    The items, one by one; after two seconds with a bar on a terminal, and now and then a line anywhere else.

    Args:
        items (`Sequence`):
            What is worked on.
        what (`str`):
            What is being done: "reading the reward log".
        unit (`str`):
            What the items are: "batches".
    """
    if sys.stderr.isatty():
        yield from tqdm(items, desc=what, unit=f" {unit}", delay=SECONDS_OF_SILENCE)
        return
    start = time.monotonic()
    next_line = start + SECONDS_OF_SILENCE
    for number, item in enumerate(items):
        now = time.monotonic()
        if now >= next_line:
            left = (now - start) * (len(items) - number) / max(1, number)
            sys.stderr.write(f"{what}: {number:,} of {len(items):,} {unit}, {left:.0f} s left\n")
            next_line = now + SECONDS_BETWEEN_LINES
        yield item
