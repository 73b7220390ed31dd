"""`CompactGRPOTrainer`: TRL's `GRPOTrainer` whose update computes only what its gradient needs.

It wraps `_prepare_inputs` (rows and columns of the update), `_get_per_token_logps_and_entropies` (those of the passes
without a gradient) and `_compute_loss` (factors and metrics). Which rows the loss needs is decided in `batching.py`,
where they go in `packing.py`. Long, since all that TRL's shape and versions ask of compact updates stands here.
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
from grpo_ext.packing import MicroStep, Sizes, keep_places, make_plan

logger = logging.get_logger(__name__)

# fmt: off
TRIMMED_LEFT = frozenset({
    "apertus", "arcee", "bloom", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "falcon", "falcon_h1",
    "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_neox", "gpt_oss", "granite", "granitemoe",
    "lfm2", "llama", "minimax", "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmo3",
    "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe",
    "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2",
})
# fmt: on
"""Model types whose log-probs were found not to depend on the padding left of the prompt (`test_trimming.py`)."""

TRIMMED_ADAPTERS = frozenset({"LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "VERA"})
"""Types of PEFT adapters, likewise; virtual tokens stand left of the padding, and others may know positions."""

STEADY_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings that do not depend on the width of a batch."""

TRL, GLOBAL_MEANS = Version(trl.__version__), Version("1.10")
"""This version of TRL, and one whose metrics are averages over the tokens of all processes."""


def find_trim(model: PreTrainedModel, multiple: int = 1, noise: float | None = None) -> Trim:
    """
    What can be cut off a batch of this model without changing its log-probs.

    Args:
        model (`PreTrainedModel`):
            With its adapters.
        multiple (`int`, *optional*, defaults to `1`):
            What widths have to be a multiple of.
        noise (`float`, *optional*):
            NEFTune's, which is scaled by the width of a batch.
    """
    config = model.config.get_text_config()
    parameters = vars(config).get("rope_parameters") or {}
    parts = [parameters] if "rope_type" in parameters else parameters.values()
    is_steady = noise is None and all(part["rope_type"] in STEADY_ROPES for part in parts if part)
    adapters = {adapter.peft_type for adapter in getattr(model, "peft_config", {}).values()}
    is_known = config.model_type in TRIMMED_LEFT and adapters <= TRIMMED_ADAPTERS
    return Trim(is_steady and is_known, is_steady, multiple)


class CompactGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with the settings `compact_updates` and `exchange_rows`, read from `_settings`."""

    _settings: AdvantageGRPOConfig | type[AdvantageGRPOConfig]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_compact = self._settings.compact_updates is not False
        self._trim = find_trim(self.model, self.args.pad_to_multiple_of or 1, self.args.neftune_noise_alpha)
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

    def _has_liger_loss(self) -> bool:
        """Before TRL 1.14 Liger had a loss of its own."""
        return Version("1.14") > TRL and bool(vars(self).get("use_liger_kernel", False))

    def _reads_padding(self) -> bool:
        """Before TRL 1.10, luspo averaged over padding."""
        return self.loss_type == "luspo" and TRL < GLOBAL_MEANS

    def _limits(self) -> tuple[list[str], list[str]]:
        """Why rows stay in their micro-batch, and why those with advantage zero stay; see `find_limits`."""
        size, num_steps = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        own_class = type(self)
        terms = {
            f"`{name}` of `{own_class.__name__}`, which may hold anything": (
                getattr(own_class, name) is not getattr(CompactGRPOTrainer, name)
            )
            for name in ("compute_loss", "_compute_loss")
        }
        terms |= {
            f"quantile over a micro-batch (`top_entropy_quantile={self.top_entropy_quantile}`)": (
                self.top_entropy_quantile < 1.0
            ),
            "`use_liger_kernel` of this version of TRL": self._has_liger_loss(),
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
            found = ", ".join(regrouping) or f"a model ({model_type}) whose log-probs may depend on padding"
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
            logger.warning_once(
                f"`compact_updates` keeps the padding {sides}: log-probs of this model ({model_type}), its adapters or "
                "NEFTune may depend on it."
            )
        if self.accelerator.num_processes > 1 and TRL < GLOBAL_MEANS:
            logger.warning_once(
                "`compact_updates` logs no entropy, KL and clip ratios here: this version of TRL averages them over "
                "processes as if each had as many tokens."
            )

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
        can_move, can_leave = self._ask_all(batches[0])
        if not can_move:
            return batches
        regrouping, pruning = self._limits()
        num_steps = len(batches) if regrouping else min(len(batches), self.args.gradient_accumulation_steps)
        rank, found, counts = self.accelerator.process_index, [], []
        for part in (batches[start : start + num_steps] for start in range(0, len(batches), num_steps)):
            rows, num_bytes = concatenate(part), 0
            table_B3 = survey(rows, self._trim, drops=not regrouping, prunes=not (regrouping or pruning))
            sizes = Sizes.read(self.accelerator.gather(table_B3.unsqueeze(0)).cpu().numpy())
            if regrouping:
                plan = keep_places(sizes, num_steps, self._trim.multiple)
                found += [
                    crop(batch, *widths) for batch, widths in zip(part, plan.widths_RK2[rank].tolist(), strict=True)
                ]
            else:
                plan = make_plan(sizes, num_steps, self._trim.multiple, can_leave)
                pool = share_tokens(rows, num_steps) if self.loss_type == "bnpo" else rows
                index_N = np.arange(sizes.is_needed_RB.size) - rank * sizes.is_needed_RB.shape[1]
                if can_leave and sizes.is_needed_RB.any():
                    pool, index_N, num_bytes = self._exchange(pool, sizes)
                found += deal(pool, plan, rank, index_N, self.loss_type)
            counts.append([*sizes.live_R2.T, sizes.stock_R, plan.padded_R, np.full_like(sizes.stock_R, num_bytes)])
        self._log_counts(np.sum(counts, axis=0))
        return found

    def _exchange(self, rows: Batch, sizes: Sizes) -> tuple[Batch, np.ndarray, int]:
        """The rows that stay of all ranks, where each of all lies among them, and the bytes that each rank got."""
        num_rows = int(sizes.is_needed_RB.sum(axis=1).max())
        widths = sizes.widths_R2.max(axis=0).tolist()
        own = np.flatnonzero(sizes.is_needed_RB[self.accelerator.process_index]).tolist()
        gathered = self.accelerator.gather(pack(take(rows, own), num_rows, widths))
        firsts_R1 = num_rows * np.arange(len(sizes.is_needed_RB))[:, None]
        index_N = (firsts_R1 + sizes.is_needed_RB.cumsum(axis=1) - 1).ravel()
        return unpack(gathered, rows, widths), index_N, gathered.numel()

    def _ask_all(self, batch: Batch) -> tuple[bool, bool]:
        """Whether on every rank the rows of this batch can be moved, and whether they are to move to other ranks."""
        unknown, lists = find_unknown(batch), [name for name, value in batch.items() if isinstance(value, list)]
        # On the wire, one column may be a tensor of one per row, or of a completion's only token.
        own = [unknown is None and not self._reads_padding(), not lists and batch["completion_ids"].size(1) > 1]
        answers_R2 = self.accelerator.gather(torch.tensor([own], device=self.accelerator.device))
        can_move, can_leave = answers_R2.all(dim=0).tolist()
        exchanges = self._settings.exchange_rows and self.accelerator.num_processes > 1
        if can_move and exchanges and not can_leave:
            found = f"the list `{lists[0]}`" if lists else "completions of one token, or a list, on a rank"
            logger.warning_once(f"`exchange_rows` leaves the rows of a batch where they are: found {found}.")
        if can_move:
            return True, exchanges and can_leave
        found = f"`{unknown}`, which may not be one per row" if unknown else "unknown tensors on another rank"
        if self._reads_padding():
            found = "'luspo' of a version of TRL that averages over padding"
        if self._settings.compact_updates:
            raise ValueError(
                f"`compact_updates=True` should go with batches whose rows can be moved, found {found}: use "
                "`compact_updates=None`, which leaves such a batch as it is."
            )
        logger.warning_once(f"`compact_updates` leaves a batch as it is: found {found}.")
        return False, False

    def _log_counts(self, counts_5R: np.ndarray) -> None:
        live_rows, live_tokens, stock, padded, _ = counts_5R.sum(axis=1).tolist()
        figures = {
            "live_rows": live_rows,
            "live_tokens": live_tokens,
            "padded_tokens": padded,
            "padded_tokens_saved": stock - padded,
            "rank_imbalance": counts_5R[3].max() / counts_5R[3].mean(),
        }
        if self._settings.exchange_rows:
            figures["exchanged_bytes"] = counts_5R[4, 0]
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
        if not (self._is_compact and is_text) or self._reads_padding():
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
            is_per_row = self.importance_sampling_level == "sequence" and inputs["advantages"].dim() == 1
            for name in [name for name, values in metrics.items() if len(values) > before.get(name, 0)]:
                self._amend(name, inputs[MICRO_STEP], is_per_row)
        return loss * float(inputs[LOSS_SCALE]) if LOSS_SCALE in inputs else loss

    def _amend(self, name: str, step: MicroStep, is_per_row: bool) -> None:
        """
        TRL averages what each micro-batch of a step appends as if they were of one size. Weighted by its part of the
        step's tokens or rows, a figure again describes all rows; what is known of the rows that stayed is named so.
        """
        metrics, live = self._metrics["train"], "" if self.beta else "_live"
        new_name, value = name, metrics[name][-1]
        if name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio"):
            value *= step.rows if is_per_row else step.tokens  # 0 in rows with advantage zero
        elif name == "kl":
            value *= step.tokens
        elif name == "entropy":
            new_name, value = name + live, value * step.live_tokens
        elif name == "vespo/phi_seq_mean":
            new_name, value = name + live, (value - step.fillers) * step.live_rows  # 1 in fillers
        elif name in ("clip_ratio/low_min", "clip_ratio/high_max"):
            is_of_fillers = step.fillers > 0 if is_per_row else step.fillers == 1
            new_name, value = name + live, math.nan if is_of_fillers else value
        else:
            return
        metrics[name].pop()
        if not metrics[name]:
            del metrics[name]
        if math.isfinite(value) and (TRL >= GLOBAL_MEANS or self.accelerator.num_processes == 1):
            metrics[new_name].append(value)
