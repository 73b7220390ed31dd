"""Success counts of a model on problems: sampled batch by batch, and kept in a file as they come."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, set_seed

from grpo_ext.groups import SUCCESS_TOLERANCE
from grpo_ext.rewards import find_reward


@contextlib.contextmanager
def explain_missing_model(name: str) -> Iterator[None]:
    """
    Around what loads a model or its tokenizer.

    Raises:
        `ValueError`: where there is no such model.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"`--model_name_or_path` should be a Hub id or a local folder, found {name!r}, which cannot be loaded: "
            f"{error}"
        ) from error


@dataclass(frozen=True)
class SamplingSettings:
    """How completions are sampled."""

    num_samples: int = 16
    temperature: float = 1.0
    max_completion_length: int = 256
    batch_size: int = 8
    """Prompts per call of `generate`."""
    seed: int = 42


@dataclass(frozen=True)
class Policy:
    """A model and its tokenizer."""

    model: Any
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, name: str) -> "Policy":
        """
        Loads a model of the Hub or of a folder: bfloat16 on the accelerator where there is one, else float32.

        Raises:
            `ValueError`: where there is no such model.
        """
        has_accelerator = torch.accelerator.is_available()
        with explain_missing_model(name):
            tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
            dtype = torch.bfloat16 if has_accelerator else torch.float32
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if has_accelerator:
            model = model.to(torch.accelerator.current_accelerator())
        return cls(model.eval(), tokenizer)

    @torch.inference_mode()
    def sample(self, prompts: list, settings: SamplingSettings) -> list[list[int]]:
        """Token ids of `num_samples` completions per prompt, prompt by prompt, each up to its end token."""
        tokenizer = self.tokenizer
        if isinstance(prompts[0], list):
            inputs = tokenizer.apply_chat_template(
                prompts, add_generation_prompt=True, tokenize=True, padding=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = tokenizer(prompts, padding=True, return_tensors="pt")
        # What training samples with: the model's own top_k, top_p and penalties are set aside.
        config = GenerationConfig(
            max_new_tokens=settings.max_completion_length,
            num_return_sequences=settings.num_samples,
            do_sample=True,
            temperature=settings.temperature,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=self.ends,
        )
        tensors = {name: inputs[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
        tokens = self.model.generate(**tensors, generation_config=config)[:, tensors["input_ids"].shape[1] :]
        return [_until_end(row, self.ends) for row in tokens.tolist()]

    @property
    def ends(self) -> list[int]:
        """Tokens that end a completion, as in TRL: the tokenizer's, and those that the model declares."""
        declared = self.model.generation_config.eos_token_id
        own = [] if declared is None else [declared] if isinstance(declared, int) else declared
        return list(dict.fromkeys([self.tokenizer.eos_token_id, *own]))


def _until_end(tokens: list[int], ends: list[int]) -> list[int]:
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in ends), tokens)


def count_successes(
    prompts: Dataset,
    model_name: str,
    reward_name: str,
    settings: SamplingSettings,
    path: Path,
) -> Iterator[list[dict[str, Any]]]:
    """
    Samples every problem and counts its successes.

    The file at `path` gets one line per problem as soon as its batch is done. A rerun takes over the whole batches it
    finds there and samples the rest; each batch has a seed of its own, so the numbers are those of a single run.

    Args:
        prompts (`datasets.Dataset`):
            Rows with `prompt` and whatever columns the reward function reads.
        model_name (`str`):
            Hub id or folder.
        reward_name (`str`):
            Name or dotted path of a reward function; at least 1 counts as a success, None (unscorable) not at all.
        settings ([`SamplingSettings`]):
            How to sample.
        path (`Path`):
            Where the counts are kept, as JSON lines.

    Yields:
        `list[dict]`: all records so far, with `num_correct`, `num_samples` and `mean_length` in tokens; first those
        found in the file, then after every batch.

    Raises:
        `ValueError`: where the file holds the counts of something else.
    """
    reward = find_reward(reward_name)
    about = {"model": model_name, "reward": reward_name, **asdict(settings), "first_prompt": prompts[0]["prompt"]}
    records = _read_records(path, about)
    # A run over fewer problems may have ended within a batch.
    whole = len(records) if len(records) >= len(prompts) else len(records) // settings.batch_size * settings.batch_size
    records = records[: min(whole, len(prompts))]
    yield records
    if len(records) == len(prompts):
        return
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text("".join(json.dumps(line) + "\n" for line in [about, *records]))
    rewritten.replace(path)
    policy = Policy.load(model_name)
    for start in range(len(records), len(prompts), settings.batch_size):
        batch = prompts[start : start + settings.batch_size]
        set_seed(settings.seed + start)
        new = _score(batch, policy, reward, settings)
        with path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in new)
        records = records + new
        yield records


def _read_records(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of an earlier run with the same settings; a last line that was cut off does not count."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    if not lines:
        return []
    try:
        found = dict(json.loads(lines[0]))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"`{path}` should begin with the settings of a sampling, found {lines[0][:40]!r}: choose another "
            "`--output_dir`."
        ) from error
    changed = [name for name in about if found.get(name) != about[name]]
    if changed:
        raise ValueError(
            f"`{path}` should hold the counts of this very run, found others ({changed[0]} was "
            f"{found.get(changed[0])!r} and is {about[changed[0]]!r}): choose another `--output_dir`."
        )
    return [json.loads(line) for line in lines[1:]]


def _score(
    batch: dict[str, list], policy: Policy, reward: Callable[..., list[float | None]], settings: SamplingSettings
) -> list[dict[str, Any]]:
    """The records of a batch."""
    tokens = policy.sample(batch["prompt"], settings)
    texts = policy.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    is_chat = isinstance(batch["prompt"][0], list)
    completions = [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts
    columns = {name: [value for value in values for _ in range(settings.num_samples)] for name, values in batch.items()}
    rewards = reward(completions=completions, completion_ids=tokens, **_prompts_last(columns))
    records = []
    for first in range(0, len(tokens), settings.num_samples):
        own = slice(first, first + settings.num_samples)
        scored = [value for value in rewards[own] if value is not None]
        num_correct = sum(value >= 1 - SUCCESS_TOLERANCE for value in scored)
        mean_length = sum(map(len, tokens[own])) / settings.num_samples
        records.append({"num_correct": num_correct, "num_samples": len(scored), "mean_length": mean_length})
    return records


def _prompts_last(columns: dict[str, list]) -> dict[str, list]:
    """TRL's name for the prompts of a reward function."""
    return {("prompts" if name == "prompt" else name): values for name, values in columns.items()}
