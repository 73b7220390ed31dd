"""How far a long computation is: a bar on a terminal, plain lines in a log file."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

SILENT_SECONDS = 2.0
"""What is over sooner shows nothing."""


class Progress:
    """
    Shows the share of work that is done.

    Args:
        total (`int`):
            Number of steps.
        what (`str`):
            What is being done, as the label.
    """

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what = total, what
        self._start, self._tenth = time.perf_counter(), 0
        # `disable=None` hides the bar where the output is no terminal.
        self._bar = tqdm(total=total, desc=what, delay=SILENT_SECONDS, disable=None)

    def show(self, done: int) -> None:
        """Moves the bar to `done` steps; without one, writes a line about every tenth of the way."""
        if not self._bar.disable:
            self._bar.update(done - self._bar.n)
            if done >= self._total:
                self._bar.close()
            return
        tenth = 10 * done // max(1, self._total)
        if tenth == self._tenth:
            return
        seconds = time.perf_counter() - self._start
        if seconds > SILENT_SECONDS:
            left = seconds * (self._total - done) / done
            sys.stderr.write(f"{self._what}: {done:,} of {self._total:,}, {left:.0f} s left\n")
            self._tenth = tenth


def show_progress(items: Sequence[T], what: str) -> Iterator[T]:
    """The items, one by one, with their progress."""
    progress = Progress(len(items), what)
    for number, item in enumerate(items):
        progress.show(number)
        yield item
    progress.show(len(items))
