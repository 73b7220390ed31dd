"""Micro-batches as TRL buffers them, and the gradient of an optimizer step: TRL's own, and ours."""

from pathlib import Path
from typing import Any

import torch
from _training import DATA, even_digits, make_args
from rollouts import Shape, draw
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from trl import GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from grpo_ext import AdvantageGRPOTrainer
from grpo_ext.batching import Batch
from grpo_ext.testbed import POLICY_PATH

NUM_STEPS = 6  # micro-batches of 4 rows
SHAPE = Shape(num_rows=4 * NUM_STEPS, prompt=(3, 9), mean=10, cap=24, vocabulary=24)


def make_model(**settings: Any) -> PreTrainedModel:
    """A small random LLaMA with the shipped policy's vocabulary."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": 25, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes | tokens | settings))


def make_compact_trainer(
    folder: Path,
    model: PreTrainedModel | None = None,
    trainer_class: type[AdvantageGRPOTrainer] = AdvantageGRPOTrainer,
    **settings: Any,
) -> AdvantageGRPOTrainer:
    """A trainer in the middle of an optimizer step of six micro-batches."""
    beta = settings.pop("beta", 0.0)
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": NUM_STEPS}
    if settings.get("loss_type") == "luspo":
        settings["importance_sampling_level"] = "sequence"
    trainer = trainer_class(
        model=model or make_model(),
        reward_funcs=[even_digits],
        args=make_args(folder, **sizes | settings),
        train_dataset=DATA,
        processing_class=AutoTokenizer.from_pretrained(str(POLICY_PATH)),
    )
    trainer.beta = beta  # set late, so that TRL looks for no reference model on the Hub
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def make_batch(trainer: AdvantageGRPOTrainer, live: float, seed: int = 0, shape: Shape = SHAPE) -> Batch:
    """A generation batch in the model's precision; by its old and reference log-probs, ratios leave the clip range."""
    dtype = next(trainer.model.parameters()).dtype
    batch = draw(shape, live, seed)
    ids, mask = (torch.cat([batch[f"prompt_{name}"], batch[f"completion_{name}"]], dim=1) for name in ("ids", "mask"))
    with torch.no_grad():
        width = batch["completion_ids"].size(1)
        logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width, compute_entropy=True)[0]
    generator = torch.Generator().manual_seed(seed + 1)
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        noise = torch.randn(logps.shape, generator=generator, dtype=dtype)
        batch[name] = (logps + 0.3 * noise) * batch["completion_mask"]
    return batch | {"advantages": batch["advantages"].to(dtype)}


def split(batch: Batch, num_steps: int = NUM_STEPS) -> list[Batch]:
    """As TRL's buffer."""
    return split_tensor_dict(batch, num_steps)


def gradient(trainer: AdvantageGRPOTrainer, batches: list[Batch], loss_of: type = AdvantageGRPOTrainer) -> Tensor:
    """Of an optimizer step, in float64."""
    trainer.model.zero_grad()
    for batch in batches:
        loss_of._compute_loss(trainer, trainer.model, batch).backward()
    return torch.cat([p.grad.flatten().double() for p in trainer.model.parameters() if p.grad is not None])


def stock_gradient(trainer: AdvantageGRPOTrainer, batches: list[Batch]) -> Tensor:
    """TRL's own, without any of our methods."""
    trainer._is_compact = False
    try:
        return gradient(trainer, batches, GRPOTrainer)
    finally:
        trainer._is_compact = True


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return ((found - expected).abs().max() / expected.abs().max()).item()
