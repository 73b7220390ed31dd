"""`run.json`: what a replay needs of each start of a training, and the rows lack."""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from grpo_ext import __version__
from grpo_ext.checkpoint import write_json
from grpo_ext.estimator import AdvantageEstimator
from grpo_ext.groups import RewardSettings
from grpo_ext.resolution import UNKNOWN, to_spec

RUN_FILE = "run.json"
FORMAT_VERSION = 1
REMEDY = "put the file back that was written beside the parts, or move the folder away"


def describe_run(trainer: GRPOTrainer, settings: RewardSettings, estimator: AdvantageEstimator) -> dict[str, Any]:
    """What a replay of a run needs and its rows lack."""
    extra = estimator.num_extra_generations
    content = {
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
        | {"grpo_ext": __version__}
        | {name: version(name) for name in ("trl", "torch", "transformers")},
    }
    # What JSON cannot hold must not end a training; `from_spec` says that it cannot make it again.
    return json.loads(json.dumps(content, default=lambda value: {UNKNOWN: repr(value)}))


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """The attempts of a log's `run.json`, none where there is none."""
    path = folder / RUN_FILE
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text())
        found, attempts = content["format_version"], content["attempts"]
        is_whole = all(
            {"attempt", "reward_names", *RewardSettings.__dataclass_fields__} <= set(one) for one in attempts
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"`{path}` should describe the attempts of a run, found {error!r}: {REMEDY}.") from error
    if found != FORMAT_VERSION:
        raise ValueError(
            f"`{path}` should have the format version {FORMAT_VERSION}, found {found}: read it with the version of "
            "grpo_ext that wrote it."
        )
    if not is_whole:
        raise ValueError(f"`{path}` should describe the rewards of each attempt, found less: {REMEDY}.")
    return attempts


def write_attempts(folder: Path, attempts: list[dict[str, Any]]) -> None:
    """Writes `run.json`, whole or not at all."""
    write_json(folder / RUN_FILE, {"format_version": FORMAT_VERSION, "attempts": attempts})
