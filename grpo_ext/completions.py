"""TRL's own completion tables (`log_completions`) as generated batches, as far as they go.

A table holds the newest generation batch at one logging step, without group ids, weights or a success signal: groups
are recovered from prompts that follow each other, and batches between two logging steps are missing.
"""

import math
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from grpo_ext.groups import RewardSettings
from grpo_ext.progress import show_progress
from grpo_ext.reward_log import LoggedBatch, prompt_id

FOLDER = "completions"
TEXT_COLUMNS = ("prompt", "completion")
OTHER_COLUMNS = ("step", "advantage")


def is_completion_table(path: Path) -> bool:
    """Whether a parquet file looks like one that TRL wrote."""
    return {*TEXT_COLUMNS, *OTHER_COLUMNS} <= set(pq.read_schema(path).names)


def read_completions(
    paths: list[Path],
    num_generations: int | None = None,
    reward_weights: list[float] | None = None,
    logs: list[dict[str, Any]] | None = None,
) -> tuple[list[LoggedBatch], list[str]]:
    """
    The generated batches of TRL's completion tables, by step.

    Args:
        paths (`list[Path]`):
            Files `completions_<step>.parquet`.
        num_generations (`int`, *optional*):
            Completions per prompt. None: recovered from the prompts.
        reward_weights (`list[float]`, *optional*):
            One per reward function. None: all 1.
        logs (`list[dict]`, *optional*):
            The run's `log_history`, which tells when it evaluated: TRL mixes those rows with the training's.

    Returns:
        The batches, and what a reader has to know about them, one sentence each.

    Raises:
        `ValueError`: where groups cannot be recovered, or a table has no rewards.
    """
    tables = {path: pq.read_table(path, partitioning=None) for path in show_progress(paths, "TRL's completion tables")}
    filled = [(path, table) for path, table in tables.items() if len(table)]
    tables = dict(sorted(filled, key=lambda pair: _step(pair[1])))
    kept = leave_out_mixed(tables, logs or [])
    num_mixed, num_whole = len(tables) - len(kept), len(kept)
    kept = leave_out_copies(kept)
    batches, ambiguous = [], set()
    names: list[str] = []
    for path, table in kept.items():
        names = find_rewards(table, path)
        size, is_certain = find_group_size(table, path, num_generations)
        if not is_certain:
            ambiguous.add(size)
        batches.append(_to_batch(table, names, size, reward_weights or [1.0] * len(names), path))
    if not batches:
        raise ValueError(
            "TRL's completion tables should hold a step without an evaluation, found "
            f"{num_mixed} tables with one and no other: train with `log_rewards=True`, which keeps both apart."
        )
    remarks = [
        f"TRL's tables hold the newest generation batch of each logging step ({len(batches)} here): methods with a "
        "memory see gaps, and progress and success settings are unknown."
    ]
    if num_whole > len(kept):
        remarks.append(f"{num_whole - len(kept)} more were left out, because they repeat the batch before.")
    if logs is None or max((entry.get("step", 0) for entry in logs), default=0) < batches[-1].step:
        remarks.append("If the run evaluated, rows of evaluations may be among these: no log says when it did.")
    if num_mixed:
        remarks.append(
            f"{num_mixed} more were left out, because TRL mixes rows of the training and of an evaluation in them."
        )
    if ambiguous:
        sizes = " and ".join(map(str, sorted(ambiguous)))
        remarks.append(
            f"Groups of {sizes} completions were taken, the largest number that fits prompts which follow each other: "
            "give `--num_generations` if it is another."
        )
    if len(names) > 1 and reward_weights is None:
        remarks.append(f"The rewards {', '.join(names)} were added with weight 1: give `--reward_weights` if not so.")
    return batches, remarks


def leave_out_mixed(tables: dict[Path, pa.Table], logs: list[dict[str, Any]]) -> dict[Path, pa.Table]:
    """Without the tables that hold rows of an evaluation: those of its step, and what repeats their rows."""
    steps = {entry["step"] for entry in logs if any(name.startswith("eval_") for name in entry)}
    if not steps:
        return tables
    rows = {path: _rows(table) for path, table in tables.items()}
    evaluated = {row for path, table in tables.items() if _step(table) in steps for row in rows[path]}
    return {path: table for path, table in tables.items() if evaluated.isdisjoint(rows[path])}


def leave_out_copies(tables: dict[Path, pa.Table]) -> dict[Path, pa.Table]:
    """Without the tables that repeat the one before: a batch that trained for several logging steps."""
    kept: dict[Path, pa.Table] = {}
    previous: list[tuple[str, ...]] = []
    for path, table in tables.items():
        rows = _rows(table)
        if rows != previous:
            kept[path] = table
        previous = rows
    return kept


def _rows(table: pa.Table) -> list[tuple[str, ...]]:
    """Each row's prompt, completion and advantage as text."""
    columns = [map(repr, table[name].to_pylist()) for name in (*TEXT_COLUMNS, "advantage")]
    return list(zip(*columns, strict=True))


def _step(table: pa.Table) -> int:
    return table["step"][0].as_py()


def find_rewards(table: pa.Table, path: Path) -> list[str]:
    """The columns of the reward functions: all numbers but the step and the advantage."""
    names = [
        field.name
        for field in table.schema
        if field.name not in (*TEXT_COLUMNS, *OTHER_COLUMNS)
        and (pa.types.is_floating(field.type) or pa.types.is_integer(field.type) or pa.types.is_boolean(field.type))
    ]
    if not names:
        raise ValueError(
            f"`{path}` should hold a column of rewards, found {table.column_names}: give a table that TRL wrote with "
            "`log_completions`."
        )
    return names


def find_group_size(table: pa.Table, path: Path, num_generations: int | None) -> tuple[int, bool]:
    """Completions per prompt, and whether nothing else fits the prompts."""
    prompts = list(map(prompt_id, table["prompt"].to_pylist()))
    runs = [len(list(run)) for _, run in groupby(prompts)]
    size = num_generations or math.gcd(*runs)
    fits = all(run % size == 0 for run in runs)
    if size < 2 or not fits:
        found = f"prompts that follow each other {', '.join(map(str, sorted(set(runs))))} times"
        raise ValueError(
            f"The rows of `{path}` should lie in groups of one prompt's completions, found {found}: the groups cannot "
            "be recovered, so log the run with `log_rewards=True`, which keeps them."
        )
    return size, num_generations is not None or set(runs) == {size}


def _to_batch(table: pa.Table, names: list[str], size: int, weights: list[float], path: Path) -> LoggedBatch:
    if len(weights) != len(names):
        raise ValueError(
            f"`--reward_weights` should give one number for each of {names} in `{path}`, found {weights}: add or drop "
            "some."
        )
    columns = [table[name].cast(pa.float32()).to_pandas().to_numpy(dtype="float32", copy=True) for name in names]
    rewards_NF = torch.stack([torch.from_numpy(column) for column in columns], dim=1)
    ids = [prompt_id(prompt) for prompt in table["prompt"].to_pylist()[::size]]
    groups = RewardSettings(weights).group(rewards_NF, size, prompt_ids_P=ids)
    advantages = torch.tensor(table["advantage"].cast(pa.float32()).to_pylist())
    return LoggedBatch(_step(table), _step(table), 1, groups, advantages.view(-1, size), None)
