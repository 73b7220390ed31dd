"""The command `grpo-ext`."""

import sys

from grpo_ext import __version__

USAGE = f"""grpo-ext {__version__}: advantage estimators for TRL's GRPOTrainer

commands:
  grpo-ext train        train a policy (the same as examples/train.py); `grpo-ext train --help` lists its flags
  grpo-ext preflight    what a data set will teach a model: collapse rates, group size, difficulty levels
"""


def main() -> None:
    """Runs the command that the first argument names."""
    command, arguments = sys.argv[1:2], sys.argv[2:]
    if command == ["train"]:
        from grpo_ext.cli.train import main as train

        train(arguments)
    elif command == ["preflight"]:
        from grpo_ext.cli.preflight import main as preflight

        preflight(arguments)
    elif command in ([], ["--help"], ["-h"], ["--version"]):
        sys.stdout.write(USAGE)
    else:
        sys.exit(f"The command should be `train` or `preflight`, found {command[0]!r}: see `grpo-ext --help`.")
