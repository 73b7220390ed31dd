"""One rank of a real launch that trains on the same rows three times: as TRL does, compactly, and with exchange.

Which rows have advantages depends on the batch: all, half, those of one rank alone, none; in every third batch an
estimator leaves rows out as well, and in another third there is a KL term.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from _training import make_args, make_trainer, use_float64
from _worker import check_processes, digits, save_record, write
from accelerate import Accelerator
from torch import Tensor

from grpo_ext import AdvantageGRPOTrainer
from grpo_ext.batching import ROW_MEAN_LOSSES, TOKEN_MEAN_LOSSES
from grpo_ext.cli.train import end
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardGroups

NUM_GROUPS, NUM_COMPLETIONS = 10, 4
LOSSES = [*TOKEN_MEAN_LOSSES, *ROW_MEAN_LOSSES]
MODES = {"stock": {"compact_updates": False}, "compact": {}, "exchange": {"exchange_rows": True}}


@dataclass
class Uneven(AdvantageEstimator):
    """Random advantages for some of the groups."""

    num_batches: int = field(init=False, default=0)

    def is_live(self) -> Tensor:
        half = torch.arange(NUM_GROUPS) < NUM_GROUPS // 2
        random = torch.rand(NUM_GROUPS, generator=torch.Generator().manual_seed(self.num_batches)) < 0.5
        return [random, half, torch.ones_like(half), ~half, torch.zeros_like(half)][self.num_batches % 5]

    def estimate(self, groups: RewardGroups) -> Tensor:
        generator = torch.Generator().manual_seed(self.num_batches)
        advantages_PG = torch.randn(groups.rewards_PG.shape, generator=generator, dtype=torch.float64)
        return groups.restrict((advantages_PG * self.is_live().unsqueeze(1)).to(groups.rewards_PG))

    def excluded(self, groups: RewardGroups) -> Tensor:
        generator = torch.Generator().manual_seed(self.num_batches)
        is_out_PG = torch.rand(groups.rewards_PG.shape, generator=generator) < 0.2
        return is_out_PG & (self.num_batches % 3 == 0)

    def update(self, groups: RewardGroups) -> None:
        self.num_batches += 1


class Worker(AdvantageGRPOTrainer):
    """Changes the loss with each generation, and shuffles rows alike in every mode."""

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        cycle = self.args.steps_per_generation * self.num_iterations
        if self._step % cycle == 0:
            number = self._step // cycle
            self.loss_type = LOSSES[number % len(LOSSES)]
            self.importance_sampling_level = "sequence" if self.loss_type == "luspo" else "token"
            self.beta = 0.1 if number % 3 == 1 else 0.0
            torch.manual_seed(100 * self._step + self.accelerator.process_index)
        return super()._prepare_inputs(generation_batch)


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def run(folder: Path, num_processes: int, num_steps: int, precision: str, mode: str) -> None:
    """Two optimizer steps of four micro-batches for each generation."""
    args = make_args(
        folder,
        num_generations=NUM_COMPLETIONS,
        per_device_train_batch_size=NUM_GROUPS * NUM_COMPLETIONS // 4 // num_processes,
        gradient_accumulation_steps=4,
        num_iterations=2,
        beta=0.1,
        max_steps=num_steps,
        adam_epsilon=1.0,  # nearly linear in the gradient: what differs by rounding stays so
        learning_rate=0.01,
        max_grad_norm=0.0,
        model_init_kwargs={"device_map": None},
        **MODES[mode],
    )
    trainer = make_trainer(args, length, Worker, advantage_estimator=Uneven(), rollout_func=write)
    if precision == "float64":
        use_float64(trainer, pytest.MonkeyPatch())
    trainer.train()
    trainer.save_model(str(folder / "model"))
    engine = type(trainer.model_wrapped).__name__
    save_record(trainer, folder, {"num_processes": trainer.accelerator.num_processes, "engine": engine})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--num_steps", type=int, required=True)
    parser.add_argument("--precision", required=True)
    options = parser.parse_args()
    check_processes(options.folder, options.num_processes)
    assert len({len(digits("1+1=", place)) for place in range(NUM_COMPLETIONS)}) > 1
    for mode in MODES:
        run(options.folder / mode, options.num_processes, options.num_steps, options.precision, mode)
    end(Accelerator())


if __name__ == "__main__":
    main()
