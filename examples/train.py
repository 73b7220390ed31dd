"""Train with any estimator: `accelerate launch examples/train.py --method avspo` (`--help` lists the flags)."""

from grpo_ext.cli.train import main

if __name__ == "__main__":
    main()
