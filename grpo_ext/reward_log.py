"""The reward log: one row per completion of every generated batch, in `output_dir/rewards`.

The main process appends parquet parts, each whole or not there at all, and beside them keeps `run.json`, which holds
per attempt (one per start of training) what a replay needs and the rows lack. Batches that a resumed run generates
again replace their first version when reading. Axes: see `groups.py`.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers.utils import logging
from trl import GRPOTrainer

from grpo_ext.checkpoint import write_json
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardGroups, RewardSettings
from grpo_ext.progress import show_progress
from grpo_ext.resolution import to_spec

logger = logging.get_logger(__name__)

FOLDER = "rewards"
RUN_FILE = "run.json"
FORMAT_VERSION = 1
REWARD = "reward/"
"""What the column of a reward function begins with."""
FLUSH_SECONDS = 30.0
"""At least as long the rows of a running training wait for their part."""
FLUSH_SHARE = 0.001
"""At most this share of the time goes into writing parts."""


def content_key(text: str) -> int:
    """The first 64 bits of a text's SHA-256, as a signed number, so that a tensor can hold it."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big", signed=True)


def to_hex(key: int) -> str:
    """A key as the first 16 hex digits of its SHA-256."""
    return f"{key & 0xFFFFFFFFFFFFFFFF:016x}"


def to_text(content: Any) -> str:
    """A prompt or completion as text; a conversation as JSON, its images by the hash of their pixels."""

    def describe(value: Any) -> str:
        pixels = value.tobytes() if callable(getattr(value, "tobytes", None)) else repr(type(value)).encode()
        return hashlib.sha256(pixels).hexdigest()

    if isinstance(content, str):
        return content
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=describe)


def prompt_key(prompt: Any) -> int:
    """The key of a prompt, the same on every machine: of its canonical JSON."""
    return content_key(json.dumps(prompt, ensure_ascii=False) if isinstance(prompt, str) else to_text(prompt))


def prompt_id(prompt: Any) -> str:
    """
    The prompt's id in the log: the first 16 hex digits of the SHA-256 of its canonical JSON (sorted keys, no spaces).

    Example:
        >>> prompt_id("What is 2+2?")
        'ccf5a7e60d04b0bc'
    """
    return to_hex(prompt_key(prompt))


def describe_run(trainer: GRPOTrainer, settings: RewardSettings, estimator: AdvantageEstimator) -> dict[str, Any]:
    """What a replay of a run needs and its rows lack."""
    extra = estimator.num_extra_generations
    return {
        "trainer": type(trainer).__name__,
        "estimator": to_spec(estimator),
        "identity": estimator.identity(),
        "state": estimator.state_dict(),
        "num_generations": trainer.num_generations - extra,
        "num_extra_generations": extra,
        "reward_names": list(trainer.reward_func_names),
        **vars(settings),
        "step": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "scale_rewards": trainer.args.scale_rewards,
        "multi_objective_aggregation": trainer.args.multi_objective_aggregation,
        "seed": trainer.args.seed,
        "device": trainer.accelerator.device.type,
        "num_processes": trainer.accelerator.num_processes,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("grpo-ext", "trl", "torch", "transformers")},
    }


class RewardLog:
    """
    Writes the log of one run.

    Args:
        run (`Path`):
            The run's `output_dir`.
        flush_seconds (`float`, *optional*, defaults to `FLUSH_SECONDS`):
            How long rows wait for their part at least; a crash loses no more than the rows that wait.
    """

    def __init__(self, run: Path, flush_seconds: float = FLUSH_SECONDS) -> None:
        self.folder = run / FOLDER
        self.flush_seconds = flush_seconds
        self._attempt: int | None = None
        self._first_batch: int | None = None
        self._names: list[str] = []
        self._waiting: list[pa.Table] = []
        self._num_parts = 0
        self._evaluation = (-1, 0)  # batch number, groups so far
        self._next_flush = time.monotonic() + flush_seconds

    @property
    def has_begun(self) -> bool:
        """Whether there is an attempt to write for."""
        return self._attempt is not None

    def begin(self, first_batch: int | None, description: dict[str, Any]) -> None:
        """
        Starts an attempt whose first training batch has this number.

        Args:
            first_batch (`int`, *optional*):
                From here on earlier attempts no longer count. None: an evaluation without training.
            description (`dict`):
                What `describe_run` gives.
        """
        self.flush()
        attempts = read_attempts(self.folder)
        parts = [int(path.name.split("-")[1]) for path in self.folder.glob("part-*.parquet")]
        self._attempt = 1 + max([*parts, *(entry["attempt"] for entry in attempts)], default=0)
        self._first_batch, self._num_parts = first_batch, 0
        entry = {"attempt": self._attempt, "first_batch": first_batch} | description
        self._names = description["reward_names"]
        write_json(self.folder / RUN_FILE, {"format_version": FORMAT_VERSION, "attempts": [*attempts, entry]})

    def add(
        self,
        groups: RewardGroups,
        advantages_PG: Tensor,
        excluded_PG: Tensor | None,
        *,
        batch: int,
        step: int,
        mode: str,
        texts: list[tuple[str, str]] | None = None,
    ) -> None:
        """Adds a generated batch; evaluation batches of the same moment are numbered on by group."""
        assert self.has_begun
        num_groups, num_rows = len(advantages_PG), advantages_PG.numel()
        first_group = 0
        if mode == "eval":
            first_group = self._evaluation[1] if self._evaluation[0] == batch else 0
            self._evaluation = (batch, first_group + num_groups)
        num_generations = num_rows // num_groups
        columns = to_columns(groups, advantages_PG, excluded_PG, self._names)
        columns["group"] = np.repeat(np.arange(first_group, first_group + num_groups, dtype=np.int32), num_generations)
        columns["place"] = np.tile(np.arange(num_generations, dtype=np.int32), num_groups)
        columns |= {"batch": np.full(num_rows, batch, np.int32), "step": np.full(num_rows, step, np.int32)}
        columns["mode"] = [mode] * num_rows
        if texts is not None:
            columns["prompt"], columns["completion"] = map(list, zip(*texts, strict=True))
        self._waiting.append(pa.table(columns))
        if time.monotonic() >= self._next_flush:
            self.flush()

    def flush(self) -> None:
        """Writes the waiting rows as a part, under a temporary name until it is whole."""
        if not self._waiting:
            return
        start = time.monotonic()
        metadata = {"attempt": str(self._attempt), "first_batch": json.dumps(self._first_batch)}
        table = pa.concat_tables(self._waiting).replace_schema_metadata(metadata)
        path = self.folder / f"part-{self._attempt:04d}-{self._num_parts:06d}.parquet"
        temporary = path.with_suffix(".tmp")
        self.folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self._waiting, self._num_parts = [], self._num_parts + 1
        end = time.monotonic()
        self._next_flush = end + max(self.flush_seconds, (end - start) / FLUSH_SHARE)


def to_columns(
    groups: RewardGroups, advantages_PG: Tensor, excluded_PG: Tensor | None, names: list[str]
) -> dict[str, Any]:
    """A batch's numbers as columns, one value per completion."""

    def flat(tensor: Tensor | None, kind: type) -> np.ndarray:
        assert tensor is not None  # the trainer fills every field
        return tensor.detach().flatten().cpu().numpy().astype(kind)

    columns: dict[str, Any] = {"prompt_id": np.repeat(np.array(groups.prompt_ids_P), advantages_PG.shape[1])}
    rewards = flat(groups.rewards_PGF, np.float32).reshape(-1, len(names))
    columns |= {REWARD + name: rewards[:, index] for index, name in enumerate(names)}
    columns["reward"] = flat(groups.rewards_PG, np.float32)
    success_PG = groups.success_PG if groups.success_error is None else torch.full_like(groups.rewards_PG, torch.nan)
    columns["success"] = flat(success_PG, np.float32)
    columns["length"] = flat(groups.lengths_PG, np.int32)
    columns["truncated"] = flat(groups.is_truncated_PG, np.bool_)
    columns["completion_key"] = flat(groups.completion_keys_PG, np.int64)
    columns["advantage"] = flat(advantages_PG, np.float32)
    is_excluded_PG = torch.zeros_like(advantages_PG, dtype=torch.bool) if excluded_PG is None else excluded_PG
    columns["excluded"] = flat(is_excluded_PG, np.bool_)
    return columns


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """The attempts of a log's `run.json`, none where there is none."""
    path = folder / RUN_FILE
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    if content["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"`{path}` should have the format version {FORMAT_VERSION}, found {content['format_version']}: read it "
            "with the version of grpo_ext that wrote it."
        )
    return content["attempts"]


def log_folder(run: Path) -> Path:
    """Where the log of a run lies; `run` may be that folder itself."""
    return run / FOLDER if (run / FOLDER).is_dir() else run


def has_log(run: Path) -> bool:
    """Whether a run has a reward log with at least one part."""
    return any(log_folder(run).glob("part-*.parquet"))


def read_rows(run: Path, mode: str | None = "train", texts: bool = False) -> pa.Table:
    """
    The rows of a log, each generated batch once, in order.

    Columns: batch, step, mode, prompt_id, group, place (in the group), reward/<function> (float32, NaN where it
    abstained), reward (weighted sum, NaN where unscorable), success (in [0, 1], NaN where unknown), length (tokens),
    truncated, completion_key, advantage (NaN where unscorable), excluded, attempt; prompt and completion on request.

    Args:
        run (`Path`):
            The run's `output_dir`, or its `rewards` folder.
        mode (`str`, *optional*, defaults to `"train"`):
            `"train"`, `"eval"`, or None for both.
        texts (`bool`, *optional*, defaults to `False`):
            Whether to read prompts and completions, where they were logged.

    Raises:
        `ValueError`: where there is no log.
    """
    folder, parts = log_folder(run), []
    paths = sorted(folder.glob("part-*.parquet"))
    for path in show_progress(paths, "parts of the reward log"):
        try:
            parts.append(_read_part(path, mode, texts))
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            logger.warning(f"`{path}` is left out, because it cannot be read ({error}).")
    if not parts:
        raise ValueError(
            f"`{run}` should hold a reward log, found none that can be read: train with `log_rewards=True`, or give "
            "the folder of such a run."
        )
    first_batches = {attempt: first_batch for attempt, first_batch, _ in parts if first_batch is not None}
    tables = []
    for attempt, _, table in parts:
        later = [first_batch for number, first_batch in first_batches.items() if number > attempt]
        tables.append(_drop_replaced(table, min(later)) if later else table)
    return _drop_repeated(pa.concat_tables(tables, promote_options="default"))


def _read_part(path: Path, mode: str | None, texts: bool) -> tuple[int, int | None, pa.Table]:
    """A part's attempt, the number of that attempt's first training batch, and the rows."""
    schema = pq.read_schema(path)
    columns = [name for name in schema.names if texts or name not in ("prompt", "completion")]
    table = pq.read_table(path, columns=columns, partitioning=None)
    attempt, first_batch = int(schema.metadata[b"attempt"]), json.loads(schema.metadata[b"first_batch"])
    table = table.append_column("attempt", pa.array(np.full(len(table), attempt, np.int32)))
    if mode is not None:
        table = table.filter(pc.equal(table["mode"], mode))
    return attempt, first_batch, table.replace_schema_metadata(None)


def _drop_replaced(table: pa.Table, first_batch: int) -> pa.Table:
    """Without what a later attempt, which began at `first_batch`, generated again or would have."""
    is_training = pc.equal(table["mode"], "train")
    limit = pc.if_else(is_training, first_batch, first_batch + 1)  # the evaluation comes before the checkpoint
    return table.filter(pc.less(table["batch"], limit))


def _drop_repeated(table: pa.Table) -> pa.Table:
    """One version of each group, the newest; by batch."""
    mode, batch, group, place, attempt = (
        table[name].to_numpy() if name != "mode" else pc.equal(table[name], "eval").to_numpy()
        for name in ("mode", "batch", "group", "place", "attempt")
    )
    order = np.lexsort((place, attempt, group, mode, batch))
    keys = np.stack([batch, mode, group])[:, order]
    begins = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)) if len(order) else np.zeros(0, bool)
    group_number = np.cumsum(begins) - 1
    newest = np.zeros(group_number[-1] + 1 if len(order) else 0, attempt.dtype)
    np.maximum.at(newest, group_number, attempt[order])
    return table.take(order[attempt[order] == newest[group_number]])


@dataclass
class LoggedBatch:
    """One generated batch of a log, as the estimator saw it, and what it answered."""

    batch: int
    step: int
    attempt: int
    groups: RewardGroups
    advantages_PG: Tensor
    excluded_PG: Tensor | None


def read_batches(run: Path, mode: str = "train") -> Iterator[LoggedBatch]:
    """
    The generated batches of a log, in order; an evaluation as one batch.

    Raises:
        `ValueError`: where there is no log, or its `run.json` is missing.
    """
    table = read_rows(run, mode)
    attempts = {entry["attempt"]: entry for entry in read_attempts(log_folder(run))}
    columns = {name: table[name].to_numpy() for name in table.column_names if name not in ("mode", "prompt_id")}
    prompt_ids = table["prompt_id"].to_numpy(zero_copy_only=False)
    edges = np.flatnonzero(np.diff(columns["batch"], prepend=-1, append=-1))
    for start, end in show_progress(list(pairwise(edges)), "logged batches"):
        attempt = int(columns["attempt"][start])
        if attempt not in attempts:
            raise ValueError(
                f"`{log_folder(run) / RUN_FILE}` should describe attempt {attempt} of the run, found none: put the "
                "file back that was written beside the parts."
            )
        rows = {name: values[start:end] for name, values in columns.items()}
        yield _to_batch(rows, prompt_ids[start:end], attempts[attempt])


def _to_batch(rows: dict[str, np.ndarray], prompt_ids: np.ndarray, run: dict[str, Any]) -> LoggedBatch:
    settings = RewardSettings(*(run[name] for name in ("weights", "success_column", "reward_min", "reward_max")))
    num_generations = len(rows["group"]) // len(np.unique(rows["group"]))
    tensors = {name: torch.from_numpy(values.copy()) for name, values in rows.items()}
    groups = settings.group(
        torch.stack([tensors[REWARD + name] for name in run["reward_names"]], dim=1),
        num_generations,
        lengths_PG=tensors["length"].long(),
        prompt_ids_P=list(prompt_ids[::num_generations]),
        is_truncated_PG=tensors["truncated"],
        completion_keys_PG=tensors["completion_key"],
        progress=int(rows["step"][0]) / max(1, run["max_steps"]),
    )
    excluded_PG = tensors["excluded"].view(-1, num_generations)
    return LoggedBatch(
        batch=int(rows["batch"][0]),
        step=int(rows["step"][0]),
        attempt=int(rows["attempt"][0]),
        groups=groups,
        advantages_PG=tensors["advantage"].view(-1, num_generations),
        excluded_PG=excluded_PG if excluded_PG.any() else None,
    )
