"""`CompactGRPOTrainer`: TRL's `GRPOTrainer` whose update computes only what its gradient needs.

It wraps `_prepare_inputs` (rows and columns of the update), `_get_per_token_logps_and_entropies` (those of the passes
without a gradient) and `_compute_loss` (factors and metrics). What moves where is decided in `batching.py`.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import trl
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from grpo_ext.batching import (
    LOSS_SCALE,
    MICRO_STEP,
    Batch,
    Trim,
    concatenate,
    crop,
    deal,
    find_limits,
    find_unknown,
    measure,
    pack,
    share_tokens,
    survey,
    take,
    unpack,
)
from grpo_ext.config import AdvantageGRPOConfig
from grpo_ext.packing import MicroStep, Plan, keep_places, make_plan

logger = logging.get_logger(__name__)

# fmt: off
TRIMMED_LEFT = frozenset({
    "apertus", "arcee", "bloom", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "falcon", "falcon_h1",
    "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_neox", "gpt_oss", "granite", "granitemoe",
    "lfm2", "llama", "llama4_text", "minimax", "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmo3",
    "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe",
    "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2",
})
# fmt: on
"""Model types whose log-probs were found not to depend on the padding left of the prompt (`test_trimming.py`)."""

STEADY_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings that do not depend on the width of a batch."""


def find_trim(model: PreTrainedModel, multiple: int = 1) -> Trim:
    """What can be cut off a batch of this model without changing its log-probs."""
    config = model.config.get_text_config()
    parameters = vars(config).get("rope_parameters") or {}
    parts = [parameters] if "rope_type" in parameters else parameters.values()
    is_steady = all(part["rope_type"] in STEADY_ROPES for part in parts if part)
    # Virtual tokens stand left of the padding.
    has_virtual_tokens = any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values())
    return Trim(is_steady and config.model_type in TRIMMED_LEFT and not has_virtual_tokens, is_steady, multiple)


class CompactGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with the settings `compact_updates` and `exchange_rows`, read from `_settings`."""

    _settings: AdvantageGRPOConfig | type[AdvantageGRPOConfig]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_compact = self._settings.compact_updates is not False
        self._trim = find_trim(self.model, self.args.pad_to_multiple_of or 1)
        if self._is_compact:
            self._report_limits()

    # What is exact

    def _other_terms(self) -> dict[str, bool]:
        """What the loss may hold beside a mean over rows or tokens, and whether it does."""
        # Not every version of TRL has these attributes.
        settings = {"_entropy_bonus_enabled": False, "aux_loss_enabled": False} | vars(self)
        return {
            "entropy bonus": settings["_entropy_bonus_enabled"],
            "auxiliary loss": settings["aux_loss_enabled"],
        }

    def _limits(self) -> tuple[list[str], list[str]]:
        """Why rows stay in their micro-batch, and why those with advantage zero stay; see `find_limits`."""
        size, num_steps = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        own_loss = type(self)._compute_loss is not CompactGRPOTrainer._compute_loss
        terms = {
            f"quantile over a micro-batch (`top_entropy_quantile={self.top_entropy_quantile}`)": (
                self.top_entropy_quantile < 1.0
            ),
            f"`_compute_loss` of `{type(self).__name__}`, which may hold anything": own_loss,
            # Before TRL 1.14 it had a loss of its own.
            "`use_liger_kernel` of this version of TRL": vars(self).get("use_liger_kernel", False),
            f"`steps_per_generation={size}`, which {num_steps} steps of accumulation do not fit": (
                size % num_steps != 0 and num_steps % size != 0
            ),
        }
        return find_limits(self.loss_type, self.beta, self._other_terms() | terms)

    def _report_limits(self) -> None:
        regrouping, pruning = self._limits()
        model_type = self.model.config.model_type
        if self._settings.compact_updates and regrouping + pruning:
            raise ValueError(
                "`compact_updates=True` should go with settings under which rows can leave the update without changing "
                f"its gradient, found {', '.join(regrouping + pruning)}: drop that, or use `compact_updates=None`, "
                "which does what is exact."
            )
        if self._settings.exchange_rows and (regrouping or not self._trim.left):
            found = ", ".join(regrouping) or f"a model ({model_type}) whose positions may count padding"
            raise ValueError(
                "`exchange_rows` should go with settings under which rows can change their micro-batch, found "
                f"{found}: drop one of the two."
            )
        if regrouping:
            logger.warning_once(f"`compact_updates` keeps every row in its micro-batch: {', '.join(regrouping)}.")
        elif pruning:
            logger.warning_once(f"`compact_updates` keeps rows with advantage zero: {', '.join(pruning)}.")
        if not self._trim.left:
            sides = "left of prompts" if self._trim.right else "everywhere"
            logger.warning_once(f"`compact_updates` keeps the padding {sides}: positions of {model_type} may count it.")

    # Rows and columns of the update

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not (self.model.training and self._is_compact) or self._buffered_inputs is before:
            return inputs
        self._buffered_inputs = self._compact(self._buffered_inputs)
        return self._buffered_inputs[self._step % len(self._buffered_inputs)]

    def _compact(self, batches: list[Batch]) -> list[Batch]:
        """A generation batch, optimizer step by optimizer step."""
        if not self._understands(batches[0]):
            return batches
        regrouping, pruning = self._limits()
        num_steps = len(batches) if regrouping else min(len(batches), self.args.gradient_accumulation_steps)
        found, counts = [], []
        for part in (batches[start : start + num_steps] for start in range(0, len(batches), num_steps)):
            rows = concatenate(part)
            table_B3 = survey(rows, self._trim, drops=not regrouping, prunes=not (regrouping or pruning))
            table_RB3 = self.accelerator.gather(table_B3.unsqueeze(0)).cpu().numpy()
            sizes_RB3, widths_R2, num_tokens = table_RB3[:, 1:], table_RB3[:, 0, :2], int(table_RB3[:, 0, 2].sum())
            if regrouping:
                plan = keep_places(sizes_RB3, num_tokens, num_steps)
                widths_K2 = plan.widths_RK2[self.accelerator.process_index].tolist()
                found += [crop(batch, *widths) for batch, widths in zip(part, widths_K2, strict=True)]
            else:
                moves = self._settings.exchange_rows and len(widths_R2) > 1 and bool((widths_R2[:, 1] > 1).all())
                plan = make_plan(sizes_RB3, widths_R2, num_tokens, num_steps, moves)
                found += self._deal(rows, plan, sizes_RB3, widths_R2, moves)
            live_rows_R, live_tokens_R = (sizes_RB3[:, :, 0] > 0).sum(axis=1), sizes_RB3[:, :, :2].sum(axis=(1, 2))
            stock_R = sizes_RB3.shape[1] * widths_R2.sum(axis=1)
            counts.append([live_rows_R, live_tokens_R, stock_R, plan.padded_R])
        self._log_counts(np.sum(counts, axis=0))
        return found

    def _deal(self, rows: Batch, plan: Plan, sizes_RB3: np.ndarray, widths_R2: np.ndarray, moves: bool) -> list[Batch]:
        """This rank's micro-batches of one optimizer step, of its own rows or of everybody's."""
        rank, is_needed_RB = self.accelerator.process_index, sizes_RB3[:, :, 0] > 0
        pool = share_tokens(rows, len(plan.counts_K)) if self.loss_type == "bnpo" else rows
        index_N = np.arange(is_needed_RB.size) - rank * is_needed_RB.shape[1]
        if moves and is_needed_RB.any():
            num_rows, widths = int(is_needed_RB.sum(axis=1).max()), widths_R2.max(axis=0).tolist()
            packed = pack(take(pool, np.flatnonzero(is_needed_RB[rank]).tolist()), num_rows, widths)
            pool = unpack(self.accelerator.gather(packed), pool, widths)
            firsts_R1 = num_rows * np.arange(len(is_needed_RB))[:, None]
            index_N = (firsts_R1 + is_needed_RB.cumsum(axis=1) - 1).ravel()
            self._metrics["train"]["compact/exchanged_bytes"].append(float(packed.numel() * len(is_needed_RB)))
        return deal(pool, plan, rank, index_N, self.loss_type)

    def _understands(self, batch: Batch) -> bool:
        """Whether the loss is known not to read padding, and the rows of every rank can be moved."""
        unknown = find_unknown(batch, self._settings.exchange_rows)
        reads_padding = self.loss_type == "luspo" and Version(trl.__version__) < Version("1.10")
        is_known_R = torch.tensor([unknown is None and not reads_padding], device=self.accelerator.device)
        if self.accelerator.gather(is_known_R).all():
            return True
        found = f"`{unknown}`, which may not be one per row" if unknown else "unknown tensors on another rank"
        if reads_padding:
            found = "'luspo' of a version of TRL that averages over padding"
        if self._settings.compact_updates:
            raise ValueError(
                f"`compact_updates=True` should go with batches whose rows can be moved, found {found}: use "
                "`compact_updates=None`, which leaves such a batch as it is."
            )
        logger.warning_once(f"`compact_updates` leaves a batch as it is: found {found}.")
        return False

    def _log_counts(self, counts_4R: np.ndarray) -> None:
        (live_rows, live_tokens, stock, padded), padded_R = counts_4R.sum(axis=1).tolist(), counts_4R[3]
        figures = {
            "live_rows": live_rows,
            "live_tokens": live_tokens,
            "padded_tokens": padded,
            "padded_tokens_saved": stock - padded,
            "rank_imbalance": padded_R.max() / padded_R.mean(),
        }
        for name, figure in figures.items():
            self._metrics["train"][f"compact/{name}"].append(float(figure))

    # Columns of the passes without a gradient

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, ...]:
        def compute(ids: Tensor, mask: Tensor, keep: int, size: int | None = None) -> tuple[Tensor | None, ...]:
            return super(CompactGRPOTrainer, self)._get_per_token_logps_and_entropies(
                model, ids, mask, keep, batch_size=size, **kwargs
            )

        is_text = all(value is None or isinstance(value, bool) for value in kwargs.values())
        if not (self._is_compact and is_text):
            return compute(input_ids, attention_mask, logits_to_keep, batch_size)
        if batch_size is None or batch_size >= len(input_ids):  # micro-batches, which have been cut already
            outputs = compute(input_ids, attention_mask, logits_to_keep)
        else:
            outputs = self._by_length(compute, input_ids, attention_mask, logits_to_keep, batch_size)
        # Before TRL 1.15, padding had log-probs that met our zeros in ratios.
        is_padding_BT = attention_mask[:, -logits_to_keep:] == 0
        return tuple(
            output.masked_fill(is_padding_BT, 0) if output is not None and output.dim() == 2 else output
            for output in outputs
        )

    def _by_length(
        self, compute: Callable, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, batch_size: int
    ) -> tuple[Tensor | None, ...]:
        """Rows in chunks of similar length, each cut to what it needs."""
        edge = input_ids.size(1) - logits_to_keep
        masks = {"prompt_mask": attention_mask[:, :edge], "completion_mask": attention_mask[:, edge:]}
        sizes_B3 = measure(masks, self._trim)
        order_B = sizes_B3[:, 1].argsort(descending=True, stable=True)
        parts = []
        for index in order_B.split(batch_size):
            prompt, completion, _ = sizes_B3[index].amax(dim=0).tolist()
            columns = slice(edge - prompt, edge + completion)
            outputs = compute(input_ids[index, columns], attention_mask[index, columns], completion)
            missing = (0, logits_to_keep - completion)
            parts.append([output if output is None else pad(output, missing) for output in outputs])
        back_B = order_B.argsort()
        return tuple(None if column[0] is None else torch.cat(column)[back_B] for column in zip(*parts, strict=True))

    # Factors and metrics

    def _compute_loss(self, model: torch.nn.Module, inputs: Batch) -> Tensor:
        metrics = self._metrics["train"]
        before = {name: len(values) for name, values in metrics.items()}
        loss = super()._compute_loss(model, inputs)
        if MICRO_STEP in inputs:
            for name in [name for name, values in metrics.items() if len(values) > before.get(name, 0)]:
                self._amend(name, inputs[MICRO_STEP])
        return loss * float(inputs[LOSS_SCALE]) if LOSS_SCALE in inputs else loss

    def _amend(self, name: str, step: MicroStep) -> None:
        """
        TRL averages what each micro-batch of a step appends as if they were of one size. Weighted by its part of the
        step's tokens or rows, a figure again describes all rows; what is known of the rows that stayed is named so.
        """
        metrics = self._metrics["train"]
        is_per_row, live = self.importance_sampling_level == "sequence", "" if self.beta else "_live"
        value = metrics[name][-1]
        if name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio"):
            new_name, value = name, value * (step.rows if is_per_row else step.tokens)  # 0 in rows with advantage zero
        elif name == "kl":
            new_name, value = name, value * step.tokens
        elif name == "entropy":
            new_name, value = name + live, value * step.live_tokens
        elif name == "vespo/phi_seq_mean":
            new_name, value = name + live, (value - step.fillers) * step.live_rows  # 1 in fillers
        elif name in ("clip_ratio/low_min", "clip_ratio/high_max"):
            new_name, value = name + live, math.nan if is_per_row and step.fillers else value
        else:
            return
        metrics[name].pop()
        if not metrics[name]:
            del metrics[name]
        if math.isfinite(value):
            metrics[new_name].append(value)
