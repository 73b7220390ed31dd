"""Time, padding and memory of the update phase: TRL's, and with `compact_updates`, on the same rollouts in one process.

    python benchmarks/update.py [--model tiny|0.5b|1.5b] [--repetitions 5] [--output outputs/update.json]

A repetition draws rollouts, and runs TRL's update before and after ours; ours is compared with the mean of the two,
and left out where they differ by more than a quarter. Everything is repeated for each share of rows with an advantage.
The memory is what the backward pass of the largest micro-batch keeps (CPU), or the allocator's peak (CUDA).

Long, since it measures time, tokens and memory of the same updates, and a file each would draw these again.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from rollouts import Shape, draw
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from grpo_ext import AdvantageGRPOConfig, AdvantageGRPOTrainer
from grpo_ext.batching import count_loss_tokens, mask_rows, take
from grpo_ext.testbed import POLICY_PATH

LIVE = (0.2, 0.5, 0.8, 1.0)
STEADY = (0.8, 1.25)
"""TRL's second update over its first, where the machine was not disturbed."""

COLUMNS = ("time", "stock_against_stock", "padded_tokens", "padded_over_needed", "memory")
Batches = list[dict[str, Any]]

QWEN = {"vocab_size": 151_936, "max_position_embeddings": 32_768, "num_key_value_heads": 2, "tie_word_embeddings": True}
MODELS = {
    "tiny": (
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=2048,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
        ),
        Shape(),
        4,
    ),
    "0.5b": (
        Qwen2ForCausalLM,
        Qwen2Config(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, **QWEN),
        Shape(num_rows=64, num_generations=8, prompt=(60, 250), mean=620, cap=1800, vocabulary=151_000),
        4,
    ),
    "1.5b": (
        Qwen2ForCausalLM,
        Qwen2Config(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, **QWEN),
        Shape(num_rows=64, num_generations=8, prompt=(60, 250), mean=620, cap=1800, vocabulary=151_000),
        4,
    ),
}
"""Name -> model, its configuration (Qwen2.5's sizes, random weights), the rollouts, rows of a micro-batch."""


def make_trainer(
    model: PreTrainedModel, folder: str, trainer_class: type[GRPOTrainer], size: int, num_steps: int, **settings: Any
) -> GRPOTrainer:
    """A trainer in the middle of an optimizer step; nothing is ever sampled with it."""
    is_cuda = torch.cuda.is_available()
    args = AdvantageGRPOConfig(
        folder,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=num_steps,
        num_generations=size,
        use_cpu=not is_cuda,
        bf16=is_cuda,
        gradient_checkpointing=False,
        report_to="none",
        **settings,
    )
    args._n_gpu = min(1, args.n_gpu)  # this process, one device
    trainer = trainer_class(
        model=model,
        reward_funcs=[lambda completions, **kwargs: [0.0] * len(completions)],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "1+1="}]),
        processing_class=AutoTokenizer.from_pretrained(str(POLICY_PATH)),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = num_steps
    return trainer


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def update(trainer: GRPOTrainer, batches: Batches) -> None:
    """Forward and backward of an optimizer step."""
    for batch in batches:
        trainer._compute_loss(trainer.model, batch).backward()


def compact_update(trainer: GRPOTrainer, batches: Batches) -> None:
    """The same with ours, which first decides who goes where."""
    update(trainer, trainer._compact(batches))


def seconds(run: Callable[[], None], model: PreTrainedModel) -> float:
    """Of one update, from gradients of zero."""
    model.zero_grad()
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def peak_memory(run: Callable[[], None], model: PreTrainedModel) -> int:
    """Bytes: on CUDA the allocator's peak, on a CPU the most that one backward pass keeps of its forward pass."""
    model.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated()
    kept: dict[int, int] = {}
    peaks = [0]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        peaks.append(sum(kept.values()))
        return tensor

    def forget(model: PreTrainedModel, *args: Any) -> None:
        kept.clear()

    hook = model.register_forward_pre_hook(forget)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    hook.remove()
    return max(peaks)


def count_padded(batches: Batches) -> int:
    """Tokens that a model reads of these micro-batches."""
    return sum(batch[name].numel() for batch in batches for name in ("prompt_ids", "completion_ids"))


def measure(name: str, live: float, repetitions: int) -> dict[str, Any]:
    """Ratios to TRL's update of the same rows."""
    model_class, config, shape, size = MODELS[name]
    num_steps = shape.num_rows // size
    torch.manual_seed(0)
    model = model_class(config)
    with tempfile.TemporaryDirectory() as folder:
        stock = make_trainer(model, folder, GRPOTrainer, size, num_steps)
        ours = make_trainer(model, folder, AdvantageGRPOTrainer, size, num_steps)
    found: dict[str, list[float]] = defaultdict(list)
    for seed in range(3 * repetitions):
        batch = {key: value.to(stock.accelerator.device) for key, value in draw(shape, live, seed).items()}
        batches = split_tensor_dict(batch, num_steps)
        runs = {"stock": partial(update, stock, batches), "ours": partial(compact_update, ours, batches)}
        first, took, second = (seconds(runs[mode], model) for mode in ("stock", "ours", "stock"))
        found["stock_against_stock"].append(second / first)
        if not STEADY[0] <= second / first <= STEADY[1]:
            continue
        memory = {mode: peak_memory(run, model) for mode, run in runs.items()}
        needed, padded = count_needed(batch), count_padded(ours._compact(batches))
        found["time"].append(2 * took / (first + second))
        found["padded_tokens"].append(padded / count_padded(batches))
        found["padded_over_needed"].append(padded / needed)
        found["needed_tokens"].append(needed / count_padded(batches))
        found["memory"].append(memory["ours"] / memory["stock"])
        if len(found["time"]) == repetitions:
            break
    if not found["time"]:
        raise ValueError("TRL's update should take about as long twice in a row, found that it never did: try again.")
    return {"live": live} | {key: spread(values) for key, values in found.items()}


def measure_pivot(name: str, repetitions: int) -> dict[str, Any]:
    """MC-GRPO's G + 1 completions, the pivot left out, against TRL's and our update of the G that stay."""
    model_class, config, shape, _ = MODELS[name]
    num_groups = shape.num_rows // 8
    torch.manual_seed(0)
    model = model_class(config)
    with tempfile.TemporaryDirectory() as folder:
        stock = make_trainer(model, folder, GRPOTrainer, 8, num_groups)
        kept = make_trainer(model, folder, AdvantageGRPOTrainer, 8, num_groups)
        pivot = make_trainer(model, folder, AdvantageGRPOTrainer, 9, num_groups)
    found: dict[str, list[float]] = defaultdict(list)
    for seed in range(repetitions):
        drawn = draw(replace(shape, num_rows=9 * num_groups, num_generations=9), 1.0, seed)
        batch = {key: value.to(stock.accelerator.device) for key, value in drawn.items()}
        is_pivot = torch.arange(9 * num_groups, device=stock.accelerator.device) % 9 == seed % 9
        rows = take(batch, (~is_pivot).nonzero().flatten().tolist())
        rows["num_items_in_batch"] = count_loss_tokens(rows)
        mask_rows(batch, is_pivot)
        batch["num_items_in_batch"] = rows["num_items_in_batch"]
        all_rows, kept_rows = split_tensor_dict(batch, num_groups), split_tensor_dict(rows, num_groups)
        runs = {
            "stock": partial(update, stock, kept_rows),
            "pivot": partial(compact_update, pivot, all_rows),
            "kept": partial(compact_update, kept, kept_rows),
        }
        took = {mode: seconds(run, model) for mode, run in runs.items()}
        again = seconds(runs["stock"], model)
        found["stock_against_stock"].append(again / took["stock"])
        found["time"].append(2 * took["pivot"] / (took["stock"] + again))
        found["time_against_ours_without_pivot"].append(took["pivot"] / took["kept"])
        padded = {"pivot": pivot._compact(all_rows), "kept": kept._compact(kept_rows)}
        assert len(padded["pivot"]) == len(padded["kept"])
        found["padded_against_ours_without_pivot"].append(count_padded(padded["pivot"]) / count_padded(padded["kept"]))
    return {key: spread(values) for key, values in found.items()}


def count_needed(batch: dict[str, torch.Tensor]) -> int:
    """Tokens of the rows with an advantage, without padding."""
    tokens_B = batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)
    return int(tokens_B[batch["advantages"] != 0].sum())


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"median": median, "low": low, "high": high}


def describe_machine() -> dict[str, Any]:
    """What the figures depend on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    versions = {"torch": torch.__version__, "trl": trl.__version__, "transformers": transformers.__version__}
    return {"device": device, "threads": torch.get_num_threads()} | versions


def save(path: Path, content: dict[str, Any]) -> None:
    """Writes what a benchmark found, and where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": describe_machine()} | content, indent=1) + "\n")


def draw_picture(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Time and padding against the share of live rows."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    shares = [row["live"] for row in rows]
    styles = {"time": "o-", "padded_tokens": "s--", "needed_tokens": ":"}
    for name, style in styles.items():
        low, middle, high = ([row[name][key] for row in rows] for key in ("low", "median", "high"))
        (line,) = axes.plot(shares, middle, style, label=name.replace("_", " "))
        axes.fill_between(shares, low, high, color=line.get_color(), alpha=0.2)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.text(shares[0], 1.01, "TRL")
    axes.set(xlabel="share of rows with an advantage", ylabel="update, relative to TRL's", ylim=(0, 1.1), title=title)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("outputs/update.json"))
    options = parser.parse_args()
    rows = []
    print("| live | " + " | ".join(COLUMNS).replace("_", " ") + " |\n|" + "---|" * (len(COLUMNS) + 1))  # noqa: T201
    for live in LIVE:
        row = measure(options.model, live, options.repetitions)
        rows.append(row)
        cells = ["{median:.2f} ({low:.2f} to {high:.2f})".format(**row[name]) for name in COLUMNS]
        print(f"| {live} | " + " | ".join(cells) + " |", flush=True)  # noqa: T201
    pivot, machine = measure_pivot(options.model, options.repetitions), describe_machine()
    for key, values in pivot.items():
        print(f"MC-GRPO, {key.replace('_', ' ')}: " + "{median:.2f} ({low:.2f} to {high:.2f})".format(**values))  # noqa: T201
    save(options.output, {"model": options.model, "rows": rows, "mc_grpo": pivot})
    draw_picture(rows, f"{options.model}, {machine['device']}", options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
