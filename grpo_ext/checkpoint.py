"""
The files we add to a checkpoint: the estimator's state, and a marker that the checkpoint is complete. Longer than
most files here: the marker vouches for the state, and the state's writer takes back the marker.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers.utils import logging

from grpo_ext.diagnostics import CollapseHistory
from grpo_ext.estimator import AdvantageEstimator

logger = logging.get_logger(__name__)

T = TypeVar("T")

STATE_FILE = "advantage_state.json"
MARKER_FILE = "checkpoint_complete.json"
FORMAT_VERSION = 1
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError)
"""What reading a file of any content may raise."""


def checksum(content: dict[str, Any]) -> str:
    """SHA-256 of a JSON object, so that a single changed digit shows."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes whole or not at all: to a temporary name, flushed, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, text = path.with_suffix(".tmp"), json.dumps(content, indent=2)
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def collect_state(
    estimator: AdvantageEstimator, history: CollapseHistory, is_generation_boundary: bool
) -> dict[str, Any]:
    """
    The content of `advantage_state.json`, the same on every rank.

    Raises:
        `ValueError`: where a resumed run could not read the estimator's state back as it is.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "identity": estimator.identity(),
        "arguments": plain_arguments(estimator),
        "state": plain_state(estimator),
        "collapse_history": history.state_dict(),
        "is_generation_boundary": is_generation_boundary,
    }
    return content | {"sha256": checksum(content)}


def save_state(folder: Path, content: dict[str, Any]) -> None:
    """Writes what `collect_state` gave; a marker that an earlier run left in the folder no longer holds."""
    (folder / MARKER_FILE).unlink(missing_ok=True)
    write_json(folder / STATE_FILE, content)


def plain_arguments(estimator: AdvantageEstimator) -> Any:
    """The estimator's arguments as JSON gives them back; what JSON cannot hold, by its `repr`."""
    return json.loads(json.dumps(estimator.arguments(), default=repr))


def plain_state(estimator: AdvantageEstimator) -> dict[str, Any]:
    """The estimator's state, once it is sure that a checkpoint gives it back."""
    state = estimator.state_dict()
    for name, value in state.items():
        try:
            is_kept = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            is_kept = False
        if not is_kept:
            raise ValueError(
                f"The state `{name}` of `{estimator.identity()}` should be finite numbers, strings, None, and lists or "
                f"dicts of them with strings as keys, found {str(value)[:80]}: a checkpoint can hold nothing else."
            )
    estimator.check_state(state)
    return state


def on_main_process(read: Callable[[], T]) -> T:
    """
    What `read` gives on the main process, on every rank: their views of a file system may differ.

    Raises:
        `ValueError`: on the other ranks, where `read` raises on the main one.
    """
    outcome: list[Any] = [None, None]
    if PartialState().is_main_process:
        try:
            outcome[0] = read()
        except Exception as error:
            broadcast_object_list([None, str(error)])
            raise
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    return outcome[0]


def load_state(folder: Path, estimator: AdvantageEstimator, history: CollapseHistory) -> None:
    """
    Restores what `save_state` wrote; says what differs from then.

    Raises:
        `ValueError`: where the file is damaged, of another format, or another estimator's.
    """
    content = on_main_process(lambda: read_state(folder, estimator.identity()))
    if content is None:
        logger.warning(f"`{folder}` holds no {STATE_FILE}: the estimator starts afresh.")
        return
    try:
        history.check_state(content["collapse_history"])  # before the estimator changes: both load, or neither
        estimator.load_state_dict(content["state"])
        history.load_state_dict(content["collapse_history"])
    except (ValueError, OverflowError) as error:
        raise ValueError(f"`{folder / STATE_FILE}` cannot be used. {error}") from error
    arguments = plain_arguments(estimator)
    if content["arguments"] != arguments:
        logger.warning(f"The estimator's arguments were {content['arguments']} at the checkpoint, now {arguments}.")
    if not content["is_generation_boundary"]:
        logger.warning(
            "This checkpoint lies within a generation cycle: its generation batch is sampled again, and the "
            "estimator's state counts it twice."
        )


def read_state(folder: Path, identity: str) -> dict[str, Any] | None:
    """
    The content of `advantage_state.json`, None where there is none.

    Raises:
        `ValueError`: where the file is damaged, of another format, or another estimator's.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_bytes())
        version, found, expected = content["format_version"], content["identity"], content.pop("sha256")
        if version == FORMAT_VERSION and checksum(content) != expected:
            raise ValueError("its content and its checksum differ")
    except UNREADABLE as error:
        reason = f"without {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"`{path}` should hold an estimator's state, found a damaged or foreign file ({reason}): resume from "
            "another checkpoint, or start the estimator afresh with `reset_advantage_state`."
        ) from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"`{path}` should have the format version {FORMAT_VERSION}, found {version}: resume with the version of "
            "grpo_ext that wrote it."
        )
    if found != identity:
        raise ValueError(
            f"`{path}` should hold the state of `{identity}`, found that of `{found}`: resume with the method that "
            "wrote it, or start the new one afresh with `reset_advantage_state`."
        )
    return content


def mark_complete(folder: Path) -> None:
    """Writes the marker, last of all files: names and sizes of the others."""
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.stem != Path(MARKER_FILE).stem  # nor what a kill left of an earlier marker
    }
    write_json(folder / MARKER_FILE, {"format_version": FORMAT_VERSION, "files": sizes})


def find_damage(folder: Path, needs_state: bool = True) -> str | None:
    """Why a checkpoint is not complete, or None; without `needs_state` the estimator's file may be damaged."""
    try:
        files = json.loads((folder / MARKER_FILE).read_bytes())["files"]
        if STATE_FILE not in files:
            raise ValueError(f"no list of files with {STATE_FILE}")
        found = {name: (folder / name).stat().st_size for name in files if (folder / name).exists()}
        expected = {name: size for name, size in files.items() if needs_state or name != STATE_FILE}
    except FileNotFoundError:
        return f"it lacks {MARKER_FILE}"
    except UNREADABLE:
        return f"its {MARKER_FILE} is damaged"
    for name, size in expected.items():
        if name not in found:
            return f"it lacks {name}"
        if found[name] != size:
            return f"{name} has {found[name]} bytes instead of {size}"
    return None


def newest_complete(output_dir: Path, needs_state: bool = True) -> tuple[Path, dict[Path, str]]:
    """
    The newest complete checkpoint of a run, and the newer ones that are not, with the reason.

    Raises:
        `ValueError`: where there is no complete one.
    """
    folders = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    skipped: dict[Path, str] = {}
    for folder in sorted(folders, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        damage = find_damage(folder, needs_state)
        if damage is None:
            return folder, skipped
        skipped[folder] = damage
    found = "; ".join(f"{folder.name}: {damage}" for folder, damage in skipped.items()) or "none"
    raise ValueError(
        f"`resume_from_checkpoint` should find a complete checkpoint in `{output_dir}`, found {found}: name a "
        "checkpoint folder, or start without resuming."
    )


def choose_checkpoint(
    resume_from_checkpoint: str | bool | None, output_dir: str, reset_advantage_state: bool = False
) -> str | None:
    """
    The checkpoint to resume from: for True the newest complete one, saying which newer ones are skipped and why.

    Raises:
        `ValueError`: where there is none, or the named one is not complete.
    """
    if not resume_from_checkpoint:
        if reset_advantage_state:
            raise ValueError(
                "`reset_advantage_state` should come with `resume_from_checkpoint`, found none: a new run starts "
                "afresh anyway, drop it."
            )
        return None
    if resume_from_checkpoint is True:
        newest, skipped = newest_complete(Path(output_dir), not reset_advantage_state)
        for incomplete, reason in skipped.items():
            logger.warning(f"Skipping the incomplete checkpoint {incomplete}: {reason}.")
        return str(newest)
    folder = Path(resume_from_checkpoint)
    if not folder.is_dir():
        raise ValueError(
            f"`resume_from_checkpoint` should be a checkpoint folder or true, found `{folder}`, which does not exist: "
            "check the path."
        )
    is_ours = any((folder / name).exists() for name in (MARKER_FILE, STATE_FILE))  # TRL's own checkpoints have neither
    damage = find_damage(folder, not reset_advantage_state) if is_ours else None
    if damage is not None:
        raise ValueError(
            f"`{folder}` should be a complete checkpoint, found that {damage}: resume from an earlier one."
        )
    return str(folder)
