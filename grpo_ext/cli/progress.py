"""How far a long computation is: a bar on a terminal, plain lines in a log file."""

import sys
import time

from tqdm import tqdm

SILENT_SECONDS = 2.0
"""What is over sooner shows no lines."""


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
        self._bar = tqdm(total=total, desc=what, disable=None)

    def show(self, done: int) -> None:
        """Moves the bar to `done` steps; without one, writes a line about every tenth of the way."""
        tenth = 10 * done // max(1, self._total)
        seconds = time.perf_counter() - self._start
        if not self._bar.disable:
            self._bar.update(done - self._bar.n)
        elif tenth > self._tenth and seconds > SILENT_SECONDS:
            sys.stdout.write(f"{self._what}: {done} of {self._total}, {seconds:.0f} s\n")
            sys.stdout.flush()
            self._tenth = tenth
        if done >= self._total:
            self._bar.close()
