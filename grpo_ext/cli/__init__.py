"""The command `grpo-ext`."""

import importlib
import sys

from grpo_ext import __version__

COMMANDS = {
    "preflight": "what a data set will teach a model, before you rent the GPUs",
    "train": "train a policy (the same as examples/train.py)",
    "diagnose": "what is wrong with a run, and what to change",
    "plot": "a run on one page",
    "replay": "a run's logged rewards through any methods (the same as python -m grpo_ext.replay)",
}
"""Each command is the module of its name, and what it does."""


def usage() -> str:
    """What there is."""
    lines = [f"  grpo-ext {name:<11}{what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            f"grpo-ext {__version__}: advantage estimators for TRL's GRPOTrainer\n",
            "commands (`grpo-ext COMMAND --help` lists the flags):",
            *lines,
            "",
        ]
    )


def main() -> None:
    """Runs the command that the first argument names."""
    command, arguments = sys.argv[1:2], sys.argv[2:]
    if command and command[0] in COMMANDS:
        importlib.import_module(f"grpo_ext.cli.{command[0]}").main(arguments)
    elif command in ([], ["--help"], ["-h"], ["--version"]):
        sys.stdout.write(usage())
    else:
        sys.exit(f"The command should be one of {', '.join(COMMANDS)}, found {command[0]!r}: see `grpo-ext --help`.")
