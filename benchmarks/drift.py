"""Two runs that differ in `compact_updates` only: when does a sampled token first differ, and does the reward?

    python benchmarks/drift.py [--steps 100] [--seeds 5] [--output outputs/drift.json]

Both train the embedded policy from the same seed. The weights differ by the order of sums; sooner or later a token is
sampled differently, and from there on the runs are two samples of the same experiment. The reward is compared over the
last quarter of the steps, with a 95 % interval over the seeds (Student's t).
"""

import argparse
import json
import statistics
import tempfile
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor
from update import save

from grpo_ext.cli.arguments import parse
from grpo_ext.cli.train import make_trainer

STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Quantiles of Student's t by the number of seeds."""


def train(compact_updates: str, seed: int, steps: int) -> tuple[list[list[list[int]]], list[float], dict[str, Tensor]]:
    """Tokens and mean reward of every generated batch, and the weights at the end."""
    tokens, rewards = [], []
    with tempfile.TemporaryDirectory() as folder:
        words = ["--max_steps", steps, "--seed", seed, "--output_dir", folder, "--save_strategy", "no"]
        trainer = make_trainer(parse(["--method", "grpo", "--compact_updates", compact_updates, *map(str, words)]))
        calculate = trainer._calculate_rewards

        def keep(inputs: Any, prompts: Any, completions: Any, completion_ids: list[list[int]]) -> Any:
            found = calculate(inputs, prompts, completions, completion_ids)
            tokens.append(completion_ids)
            rewards.append(found.nanmean().item())
            return found

        trainer._calculate_rewards = keep
        trainer.train()
    return tokens, rewards, trainer.model.state_dict()


def compare(seed: int, steps: int) -> dict[str, Any]:
    """First step with a differing token (None without one), largest difference of a weight, rewards at the end."""
    ours, stock = (train(each, seed, steps) for each in ("true", "false"))
    pairs = zip(ours[0], stock[0], strict=True)
    num_equal = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    last = slice(-max(1, steps // 4), None)
    return {
        "seed": seed,
        "first_step_with_a_differing_token": num_equal + 1 if num_equal < steps else None,
        "largest_weight_difference": max((ours[2][name] - stock[2][name]).abs().max().item() for name in stock[2]),
        "reward": statistics.fmean(ours[1][last]),
        "reward_without": statistics.fmean(stock[1][last]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5, choices=STUDENT_95)
    parser.add_argument("--output", type=Path, default=Path("outputs/drift.json"))
    options = parser.parse_args()
    rows = []
    for seed in range(options.seeds):
        rows.append(compare(seed, options.steps))
        print(json.dumps(rows[-1]), flush=True)  # noqa: T201
    differences = [row["reward"] - row["reward_without"] for row in rows]
    mean, num_seeds = statistics.fmean(differences), len(rows)
    half = STUDENT_95[num_seeds] * statistics.stdev(differences) / num_seeds**0.5
    print(f"reward with minus without: {mean:+.4f}, 95 % interval {mean - half:+.4f} to {mean + half:+.4f}")  # noqa: T201
    save(options.output, {"steps": options.steps, "rows": rows, "difference": [mean, half]})


if __name__ == "__main__":
    main()
