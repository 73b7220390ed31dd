"""From what the user asked for to the estimator that trains: names, TRL's settings, evaluation."""

import copy
import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

from trl import GRPOConfig

from grpo_ext.advantages import GRPO, METHODS
from grpo_ext.estimator import AdvantageEstimator, Component

SETTING_DEFAULTS = {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"}
"""Settings of TRL that shape the advantage. A field of the same name in an estimator is that setting."""


def find_method(name: str) -> type[AdvantageEstimator]:
    """
    The estimator class of a name in METHODS (`-` counts as `_`) or of a dotted path `package.module:Class`.

    Raises:
        `ValueError`: for an unknown name, listing the known ones.
    """
    if ":" in name:
        return _import_method(name)
    key = name.replace("-", "_")
    if key not in METHODS:
        raise ValueError(
            f"The method should be one of {', '.join(METHODS)}, found {name!r}: pick one of these, or give your own "
            "class as package.module:Class."
        )
    return METHODS[key]


def import_object(module: str, name: str) -> Any:
    """An object of a module, which may lie in the working directory."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return getattr(importlib.import_module(module), name)


def _import_method(path: str) -> type[AdvantageEstimator]:
    try:
        found = import_object(*path.split(":", 1))
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"The method should be an importable package.module:Class, found {path!r} ({error}): check the path."
        ) from error
    if not (isinstance(found, type) and issubclass(found, AdvantageEstimator)):
        raise ValueError(
            f"The method should be a subclass of `AdvantageEstimator`, found {path!r}: derive it from "
            "`grpo_ext.estimator.AdvantageEstimator`."
        )
    return found


def resolve_estimator(estimator: AdvantageEstimator | str | None, args: GRPOConfig) -> AdvantageEstimator:
    """
    A copy of the estimator in which every field named like a setting of TRL holds a value.

    Raises:
        `ValueError`: where a non-default setting of TRL contradicts the estimator, or finds no place in it.
    """
    if estimator is None:
        estimator = GRPO()
    resolved = find_method(estimator)() if isinstance(estimator, str) else copy.deepcopy(estimator)
    if not isinstance(resolved, AdvantageEstimator):
        raise ValueError(
            f"`advantage_estimator` should be an instance of an estimator or a name, found {estimator!r}: write "
            "`GRPO()` with its parentheses."
        )
    for setting, default in SETTING_DEFAULTS.items():
        wanted = vars(args)[setting]
        homes = [part for part in resolved.walk() if setting in vars(part)]
        if not homes and wanted != default:
            parts = [part for part in resolved.walk() if isinstance(part, AdvantageEstimator)]
            home = {name: own for part in parts for name, own in part.setting_homes.items()}.get(setting)
            instead = f", or set its own `{home}`" if home else ""
            raise ValueError(
                f"`{setting}` should keep its default {default!r} with `{resolved.identity()}`, which does not use it, "
                f"found {wanted!r}: drop `{setting}`{instead}, or choose another method."
            )
        for part in homes:
            _fill(part, setting, wanted, default)
    return resolved


def _fill(part: Component, setting: str, wanted: str, default: str) -> None:
    own = vars(part)[setting]
    if own is None:
        dataclasses.replace(part, **{setting: wanted})  # raises where the estimator refuses the value
        setattr(part, setting, wanted)
    elif own != wanted and wanted != default:
        raise ValueError(
            f"`{setting}` should be set once, found {own!r} in `{type(part).__name__}` and {wanted!r} in the training "
            "arguments: drop one of the two."
        )


def for_evaluation(estimator: AdvantageEstimator, args: GRPOConfig) -> AdvantageEstimator:
    """The estimator with `GRPO()` in the place of whatever is defined in training only, at any depth."""
    if estimator.training_only:
        return resolve_estimator(GRPO(scale_rewards=vars(estimator).get("scale_rewards")), args)
    return estimator.map_children(lambda child: for_evaluation(child, args))


UNKNOWN = "unknown to JSON"
"""Marks, in a stored description, the `repr` of an argument that JSON cannot hold."""


def to_spec(component: Component) -> dict[str, Any]:
    """A component by its classes' paths and its arguments, as JSON holds them; `from_spec` makes it again."""

    def plain(value: object) -> object:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return to_spec(value) if isinstance(value, Component) else value

    own = type(component)
    arguments = {
        field.name: plain(vars(component)[field.name]) for field in dataclasses.fields(component) if field.init
    }
    return {"class": f"{own.__module__}:{own.__qualname__}", "arguments": arguments}


def from_spec(spec: dict[str, Any]) -> Component:
    """
    The component that `to_spec` described, without its state.

    Raises:
        `ValueError`: where a class cannot be imported or is none of ours.
    """

    def build(value: Any) -> Any:
        if isinstance(value, list):
            return [build(item) for item in value]
        if isinstance(value, dict) and set(value) == {UNKNOWN}:
            raise ValueError(
                f"The arguments of `{spec['class']}` should be plain values, found {value[UNKNOWN]}: pass an instance."
            )
        return from_spec(value) if isinstance(value, dict) and set(value) == {"class", "arguments"} else value

    try:
        found = import_object(*spec["class"].split(":", 1))
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"The estimator should be an importable package.module:Class, found {spec['class']!r} ({error}): install "
            "the package it comes from."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Component)):
        raise ValueError(f"The estimator should consist of this package's components, found {spec['class']!r}.")
    return found(**{name: build(value) for name, value in spec["arguments"].items()})
