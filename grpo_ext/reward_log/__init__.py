"""The reward log: one row per completion of every generated batch, in `output_dir/rewards`.

The main process appends parquet parts, each whole or not there at all, and beside them keeps `run.json`, which holds
per attempt (one per start of training) what a replay needs and the rows lack. Batches that a resumed run generates
again replace their first version when reading. Axes: see `groups.py`.
"""

from grpo_ext.reward_log.attempts import describe_run, read_attempts
from grpo_ext.reward_log.ids import prompt_id, prompt_key, to_hex, to_text
from grpo_ext.reward_log.reader import LoggedBatch, has_log, log_folder, read_batches, read_rows
from grpo_ext.reward_log.writer import RewardLog

__all__ = [
    "LoggedBatch",
    "RewardLog",
    "describe_run",
    "has_log",
    "log_folder",
    "prompt_id",
    "prompt_key",
    "read_attempts",
    "read_batches",
    "read_rows",
    "to_hex",
    "to_text",
]
