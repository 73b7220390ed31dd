"""What the commands that read a run have in common."""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import NoReturn


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Lines that fill the screen."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=110)


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong in one sentence; full names of flags only."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"grpo-ext {command}", description=description, formatter_class=Help, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"The command line should be valid, found {message}: see `{self.prog} --help`.")


def positive(text: str) -> int:
    """A whole number above 0."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def one_sentence_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A mistake of the user's ends a command in one sentence and exit code 1."""

    @functools.wraps(command)
    def run(argv: list[str] | None = None) -> None:
        try:
            command(argv)
        except (ValueError, OSError) as error:
            sys.exit(f"error: {' '.join(str(error).split())}")

    return run
