"""Tiny training runs on the shipped policy."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOTrainer

from grpo_ext import AdvantageGRPOConfig, AdvantageGRPOTrainer
from grpo_ext.data import PROMPT_TEMPLATE
from grpo_ext.testbed import POLICY_PATH
from grpo_ext.testbed.arithmetic import make_problems

ROWS = [
    {"prompt": PROMPT_TEMPLATE.replace("{problem}", str(row["problem"])) + "\n", "answer": row["answer"]}
    for row in make_problems(64)
]
DATA = Dataset.from_list(ROWS)


def even_digits(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward without a verifier: 1 where the completion holds an even number of digits."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(sum(map(str.isdigit, text)) % 2 == 0) for text in texts]


def short_or_none(completions: list[str], **kwargs: Any) -> list[float | None]:
    """Partial credit for brevity; about a third of the rows are unscorable."""
    return [None if sum(map(str.isdigit, text)) % 3 == 0 else 1 / (1 + len(text)) for text in completions]


def make_args(output_dir: Path, **settings: Any) -> AdvantageGRPOConfig:
    """A configuration of four groups of four, one optimizer step per generation batch."""
    defaults = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 10,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return AdvantageGRPOConfig(str(output_dir), **{**defaults, **settings})


def make_trainer(
    args: AdvantageGRPOConfig,
    reward_funcs: Callable | list[Callable] = even_digits,
    trainer_class: type[GRPOTrainer] = AdvantageGRPOTrainer,
    **kwargs: Any,
) -> GRPOTrainer:
    """A trainer of the shipped policy."""
    functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    kwargs.setdefault("train_dataset", DATA)
    return trainer_class(model=str(POLICY_PATH), reward_funcs=functions, args=args, **kwargs)


def use_float64(trainer: GRPOTrainer, monkeypatch: Any) -> None:
    """Model and rewards in float64, with what else computes in float32: norms, rotary tables and TRL's head."""
    trainer.model.double()
    rewards = trainer._calculate_rewards

    def calculate(*args):
        trainer._gathered = (rewards(*args).double(), trainer._gathered[1])
        return trainer._gathered[0]

    monkeypatch.setattr(trainer, "_calculate_rewards", calculate)
    rotary = trainer.model.model.rotary_emb

    def rotate(x, position_ids):
        angles = position_ids[..., None].double() * rotary.inv_freq.double()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(rotary, "forward", rotate)
    for norm in (module for module in trainer.model.modules() if type(module).__name__ == "LlamaRMSNorm"):

        def normalise(x, norm=norm):
            return norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)

        monkeypatch.setattr(norm, "forward", normalise)

    method = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies)
    num_results = 3 if "compute_aux_loss" in method.parameters else 2

    def logps(model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs):
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        all_logps = logits.log_softmax(dim=-1)
        chosen = all_logps.gather(2, input_ids[:, -logits_to_keep:, None]).squeeze(2)
        return (chosen, -(all_logps.exp() * all_logps).sum(dim=-1).detach(), None)[:num_results]

    monkeypatch.setattr(trainer, "_get_per_token_logps_and_entropies", logps)


def loss_mask(batch: dict[str, Any]) -> torch.Tensor:
    """The tokens of a batch that TRL's loss sees."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def weights(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    """The trained weights."""
    return dict(trainer.model.state_dict())


def equal_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights agree bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class Recorder(AdvantageGRPOTrainer):
    """Keeps the advantages of every generated batch, as the loss gets them."""

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.__dict__.setdefault("recorded", []).append(output["advantages"].clone())
        return output


class StockRecorder(GRPOTrainer):
    """The same for TRL's own trainer."""

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self.__dict__.setdefault("recorded", []).append(output["advantages"].clone())
        return output
