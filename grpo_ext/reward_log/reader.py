"""Reading the reward log: each generated batch once, in its newest version. Axes: see `groups.py`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
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

from grpo_ext.groups import RewardGroups, RewardSettings
from grpo_ext.progress import show_progress
from grpo_ext.reward_log.attempts import RUN_FILE, read_attempts
from grpo_ext.reward_log.writer import FOLDER, REWARD

logger = logging.get_logger(__name__)


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
