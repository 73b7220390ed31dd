"""One rank of a real launch: a deterministic training run whose every number is kept for comparison.

Completions are a function of the prompt and the place in the group, so that any number of ranks trains on the same
rows; the model scores them and learns. Every method sees every batch, and one after the other trains.
"""

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from _training import DATA, make_args, make_trainer
from accelerate import Accelerator, PartialState
from peft import LoraConfig
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from grpo_ext import AdvantageGRPOTrainer
from grpo_ext.advantages import AGRAE, AVSPO, HADW, METHODS, AdaptiveForgetting, UniformRewards
from grpo_ext.batching import count_loss_tokens
from grpo_ext.cli.train import end
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardGroups

NUM_COMPLETIONS = 4  # with five prompts a batch, the middle group lies on both of two ranks
NUM_ROWS = 5 * NUM_COMPLETIONS
NUM_MICRO_BATCHES = 4  # two ranks, two each


def every_method() -> list[AdvantageEstimator]:
    """METHODS, and the variants with a memory or a random part of their own."""
    return [method() for method in METHODS.values()] + [
        HADW(base=AVSPO(acr_threshold_init=0.1), anchor=AdaptiveForgetting(stability_window=3)),
        AGRAE(omega_ema=0.5),
        AVSPO(acr_threshold_init=0.1, virtual_strategy=UniformRewards(seed=3)),
    ]


LOSSES = ["dapo"] * len(every_method()) + ["grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]
"""The loss of each step."""

NUM_STEPS, SAVE_STEPS, NUM_LORA_STEPS = len(LOSSES), 10, 4


@dataclass
class SideBySide(AdvantageEstimator):
    """Each estimator sees each batch; batch by batch, the next one trains."""

    num_extra_generations: ClassVar[int] = 1

    estimators: list[AdvantageEstimator] = field(default_factory=every_method)
    num_batches: int = field(init=False, default=0)

    def active(self) -> AdvantageEstimator:
        return self.estimators[self.num_batches % len(self.estimators)]

    def estimate(self, groups: RewardGroups) -> Tensor:
        return self.active().estimate(groups)

    def excluded(self, groups: RewardGroups) -> Tensor | None:
        return self.active().excluded(groups)

    def metrics(self, groups: RewardGroups) -> dict[str, float]:
        return self.active().metrics(groups)

    def update(self, groups: RewardGroups) -> None:
        for estimator in self.estimators:
            estimator.update(groups)
        self.num_batches += 1


def digits(prompt: str, place: int) -> str:
    """The completion of a prompt at a place in its group."""
    generator = random.Random(f"{prompt} {place}")
    return "".join(generator.choice("0123456789") for _ in range(generator.randint(1, 8)))


def write(prompts: list[str], trainer: AdvantageGRPOTrainer) -> dict[str, Any]:
    """A `rollout_func` in the sampler's place."""
    tokenizer, start = trainer.processing_class, trainer.accelerator.process_index * len(prompts)
    size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    places = [(start + row) % size for row in range(len(prompts))]
    texts = [digits(prompt, place) for prompt, place in zip(prompts, places, strict=True)]
    completions = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return {
        "prompt_ids": tokenizer(prompts)["input_ids"],
        "completion_ids": [[*ids, tokenizer.eos_token_id] for ids in completions],
        "logprobs": None,
    }


def digit_sum(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float | None]:
    """Right, wrong or unscorable by the digits; some prompts are always right, some never."""
    rewards: list[float | None] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        total, luck = sum(map(int, filter(str.isdigit, completion))), sum(prompt.encode()) % 5
        rewards.append(None if total % 9 == 0 else [0.0, 1.0, total % 2, total % 2, total % 3 / 2][luck])
    return rewards


def keep_stock_advantages(trainer: GRPOTrainer, inputs: list[dict]) -> dict[str, Any]:
    """TRL's own method, whose advantages ours replaces."""
    output = generate_and_score(trainer, inputs)
    trainer.stock_advantages = output["advantages"].clone()
    return output


generate_and_score = GRPOTrainer._generate_and_score_completions


class Worker(AdvantageGRPOTrainer):
    """Keeps what every batch and micro-batch was made of."""

    def __init__(self, *args: Any, divisors: dict[int, Tensor], **kwargs: Any) -> None:
        self.batches: list[dict[str, Any]] = []
        self.micro_batches: list[dict[str, Any]] = []
        self.divisors = divisors
        super().__init__(*args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        step = self.state.global_step
        self.loss_type = LOSSES[step]
        self.importance_sampling_level = "sequence" if self.loss_type == "luspo" else "token"
        state = torch.get_rng_state()
        # TRL shuffles rows before it cuts them into micro-batches; engines use up the generator differently.
        torch.manual_seed(100 * step + self.accelerator.process_index)
        inputs = super()._prepare_inputs(generation_batch)
        torch.set_rng_state(state)
        return inputs

    def _compute_advantages(self, groups: RewardGroups) -> Tensor:
        if not self.model.training:
            return super()._compute_advantages(groups)
        each = self.advantage_estimator.estimators
        self.batches.append(
            {
                "rewards": groups.rewards_PG.clone(),
                "lengths": groups.lengths_PG.clone(),
                "every": [estimator.estimate(groups) for estimator in each],
                "excluded": [estimator.excluded(groups) for estimator in each],
                "metrics": [estimator.metrics(groups) for estimator in each],
                "state": self.advantage_estimator.state_dict(),
            }
        )
        return super()._compute_advantages(groups)

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        output["row"] = self._local_rows(torch.arange(NUM_ROWS), output)
        self.batches[-1] |= {name: output[name].clone() for name in ("row", "advantages", "num_items_in_batch")}
        self.batches[-1]["stock"] = self.stock_advantages
        return output

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        inputs = dict(inputs)
        row, step = inputs.pop("row"), self.state.global_step
        if step in self.divisors:
            # Row i of micro-batch m has the gradient A_i G_i / D_m. Here D_m is dapo's token count; elsewhere it was
            # bnpo's, averaged over all micro-batches.
            self.loss_type = "dapo"
            factor = inputs["num_items_in_batch"] / (NUM_MICRO_BATCHES * self.divisors[step][row])
            inputs["advantages"] = inputs["advantages"] * factor
        loss = super()._compute_loss(model, inputs)
        self.micro_batches.append({"step": step, "row": row, "tokens": count_loss_tokens(inputs)})
        return loss


class Describe(TrainerCallback):
    """What really trains: the number of processes, the engine, and how much of the model lies on this rank."""

    trainer: Worker

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine, parameters = self.trainer.model_wrapped, list(self.trainer.model.parameters())
        self.facts = {
            "num_processes": PartialState().num_processes,
            "engine": type(engine).__name__,
            "stage": engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None,
            "local": sum(parameter.numel() for parameter in parameters),
            "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        }
        if self.facts["stage"] == 2:
            self.facts["optimizer"] = sum(part.numel() for part in engine.optimizer.single_partition_of_fp32_groups)


def run(folder: Path, num_processes: int, lora: bool, resume_from: Path | None, divisors: dict[int, Tensor]) -> None:
    """Trains, saves the model, and keeps this rank's record beside it."""
    args = make_args(
        folder,
        num_generations=NUM_COMPLETIONS - 1,
        num_extra_generations=1,
        per_device_train_batch_size=NUM_ROWS // 2 // num_processes,
        per_device_eval_batch_size=NUM_ROWS // num_processes,
        num_generations_eval=NUM_COMPLETIONS,
        max_steps=NUM_LORA_STEPS if lora else NUM_STEPS,
        save_strategy="steps",
        save_steps=NUM_LORA_STEPS // 2 if lora else SAVE_STEPS,
        adam_epsilon=1.0,  # nearly linear in the gradient: what differs by rounding stays so
        learning_rate=0.02,
        max_grad_norm=0.0,
        model_init_kwargs={"device_map": None},  # TRL 1.6 takes two CPU processes for one
    )
    describe = Describe()
    trainer = make_trainer(
        args,
        digit_sum,
        Worker,
        advantage_estimator=SideBySide(),
        rollout_func=write,
        peft_config=LoraConfig(target_modules="all-linear", init_lora_weights=False) if lora else None,
        callbacks=[describe],
        divisors=divisors,
    )
    describe.trainer = trainer
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    trainer.save_model(str(folder / "model"))
    evaluation = trainer.evaluate(DATA.select(range(10)))
    record = {
        "facts": describe.facts,
        "batches": trainer.batches,
        "micro_batches": trainer.micro_batches,
        "state": trainer.advantage_estimator.state_dict(),
        "history": trainer.collapse_history.state_dict(),
        "evaluation": evaluation,
    }
    save_record(trainer, folder, record)


def check_processes(folder: Path, expected: int) -> None:
    """Ends a launch of another number of processes than it was asked for."""
    found = make_args(folder).world_size  # after which accelerate knows its processes
    if found != expected:
        raise SystemExit(f"The launch should bring up {expected} processes, found {found}.")


def save_record(trainer: AdvantageGRPOTrainer, folder: Path, record: dict[str, Any]) -> None:
    """Keeps this rank's record, with the log, beside the model."""
    record["log"] = [line for line in trainer.state.log_history if "loss" in line]
    torch.save(record, folder / f"rank{trainer.accelerator.process_index}.pt")
    trainer.accelerator.wait_for_everyone()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--divisors", type=Path, help="bnpo's D_m per row, for one process to stand in for two")
    parser.add_argument("--foreign", type=Path, help="a run of another number of processes, to resume")
    options = parser.parse_args()
    folder, num_processes = options.folder, options.num_processes
    check_processes(folder, num_processes)
    GRPOTrainer._generate_and_score_completions = keep_stock_advantages
    divisors = torch.load(options.divisors) if options.divisors else {}
    if options.foreign:
        run(folder / "foreign", num_processes, False, options.foreign / f"checkpoint-{SAVE_STEPS}", divisors)
    if options.divisors or not options.foreign:
        for name, lora, step in (("full", False, SAVE_STEPS), ("lora", True, NUM_LORA_STEPS // 2)):
            run(folder / name, num_processes, lora, None, divisors)
            run(folder / f"{name}_resumed", num_processes, lora, folder / name / f"checkpoint-{step}", divisors)
    end(Accelerator())


if __name__ == "__main__":
    main()
