"""Writing the reward log: parquet parts that appear whole. Axes: see `groups.py`."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers.utils import logging

from grpo_ext.groups import RewardGroups
from grpo_ext.reward_log.attempts import RUN_FILE, read_attempts, write_attempts

logger = logging.get_logger(__name__)

FOLDER = "rewards"
REWARD = "reward/"
"""What the column of a reward function begins with."""
FLUSH_SECONDS = 30.0
"""At least as long the rows of a running training wait for their part."""
FLUSH_SHARE = 0.001
"""At most this share of the time goes into writing parts."""


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
        attempts = self._read_attempts()
        parts = [int(path.name.split("-")[1]) for path in self.folder.glob("part-*.parquet")]
        self._attempt = 1 + max([*parts, *(entry["attempt"] for entry in attempts)], default=0)
        self._first_batch, self._num_parts = first_batch, 0
        entry = {"attempt": self._attempt, "first_batch": first_batch} | description
        self._names = description["reward_names"]
        write_attempts(self.folder, [*attempts, entry])

    def _read_attempts(self) -> list[dict[str, Any]]:
        """Earlier attempts; a damaged description is put aside, since a training should not end for it."""
        try:
            return read_attempts(self.folder)
        except ValueError as error:
            aside = (self.folder / RUN_FILE).rename(self.folder / f"{RUN_FILE}.damaged")
            logger.warning(f"{error} It is `{aside.name}` now.")
            return []

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
