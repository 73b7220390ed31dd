"""What every advantage estimator is: a small dataclass that reads rewards and remembers plain numbers."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, ClassVar, Self, Union, get_args, get_origin

from torch import Tensor

from grpo_ext.groups import RewardGroups

State = dict[str, Any]


def require(condition: bool, name: str, value: object, should: str, remedy: str) -> None:
    """Raises the house's one-sentence `ValueError` unless `condition` holds."""
    if not condition:
        raise ValueError(f"`{name}` should {should}, found `{name}={value!r}`: {remedy}.")


def _is_of(value: object, kind: Any) -> bool:
    """Whether a loaded state value is of a field's declared kind, all its numbers finite."""
    if get_origin(kind) in (Union, UnionType):
        return any(_is_of(value, option) for option in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_of(item, get_args(kind)[0]) for item in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is_of(item, get_args(kind)[1]) for item in value.values())
    if kind in (int, float):
        numbers = int if kind is int else int | float
        return isinstance(value, numbers) and not isinstance(value, bool) and math.isfinite(value)
    # An annotation that is a string (`from __future__ import annotations`) names a kind we do not look up.
    return isinstance(value, kind) if isinstance(kind, type) else True


@dataclass
class Component:
    """
    A dataclass whose fields declared with `init=False` are its state.

    State holds plain numbers, strings, None, or lists or dicts of them; components in other fields (a base
    estimator, a rule, a list of estimators) save theirs under the field's name.
    """

    def children(self) -> dict[str, "Component"]:
        """The components in this one's fields, by field name (`name.0`, `name.1`, ... for a list)."""
        found: dict[str, Component] = {}
        for name in (field.name for field in fields(self) if field.init):
            value = getattr(self, name)
            if isinstance(value, Component):
                found[name] = value
            elif isinstance(value, list):
                found |= {f"{name}.{i}": item for i, item in enumerate(value) if isinstance(item, Component)}
        return found

    def walk(self) -> Iterator["Component"]:
        """This component and all below it."""
        yield self
        for child in self.children().values():
            yield from child.walk()

    def identity(self) -> str:
        """Class names of this component and those below it, without numbers: `HADW(base=GRPO, ...)`."""
        inner = ", ".join(f"{name}={child.identity()}" for name, child in self.children().items())
        return type(self).__name__ + (f"({inner})" if inner else "")

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments, nested for components, ready for JSON."""

        def plain(value: object) -> object:
            if isinstance(value, list):
                return [plain(item) for item in value]
            return {type(value).__name__: value.arguments()} if isinstance(value, Component) else value

        return {field.name: plain(getattr(self, field.name)) for field in fields(self) if field.init}

    def state_dict(self) -> State:
        """A copy of the state, ready for JSON."""
        state: State = {name: copy.deepcopy(getattr(self, name)) for name in self._state_names()}
        return state | {name: child.state_dict() for name, child in self.children().items()}

    def load_state_dict(self, state: State) -> None:
        """
        Replaces the state by one that `state_dict` gave.

        Raises:
            `ValueError`: where keys or kinds of values are not this component's; nothing is changed then.
        """
        self.check_state(state)
        self._assign_state(state)

    def _state_names(self) -> list[str]:
        return [field.name for field in fields(self) if not field.init]

    def check_state(self, state: State) -> None:
        """Raises the `ValueError` that `load_state_dict` would raise, and changes nothing."""
        expected = [*self._state_names(), *self.children()]
        if not isinstance(state, dict) or set(state) != set(expected):
            found = sorted(state) if isinstance(state, dict) else type(state).__name__
            raise ValueError(
                f"The state of `{type(self).__name__}` should have the keys {sorted(expected)}, found {found}: load "
                "a state that the same estimator saved."
            )
        for field in fields(self):
            if not field.init and not _is_of(state[field.name], field.type):
                kind = field.type.__name__ if isinstance(field.type, type) else field.type
                raise ValueError(
                    f"The state `{field.name}` of `{type(self).__name__}` should be {kind}, found "
                    f"{state[field.name]!r}: declare it as what it holds, or load a state that this estimator saved."
                )
        for name, child in self.children().items():
            child.check_state(state[name])

    def _assign_state(self, state: State) -> None:
        for name in self._state_names():
            setattr(self, name, copy.deepcopy(state[name]))
        for name, child in self.children().items():
            child._assign_state(state[name])


@dataclass
class AdvantageEstimator(Component, ABC):
    """
    Turns the rewards of a gathered generation batch into advantages.

    Fields declared with `init=False` are state: only `update` writes them, and they are checkpointed. They are
    computed from gathered rewards only, so that all ranks agree.
    """

    num_extra_generations: ClassVar[int] = 0
    """Completions per prompt to sample beyond the user's `num_generations`, in training."""

    training_only: ClassVar[bool] = False
    """Whether evaluation uses `GRPO()` in this estimator's place."""

    count_excluded_tokens: ClassVar[bool] = False
    """Whether the tokens of excluded rows stay in the loss normaliser `num_items_in_batch`."""

    setting_homes: ClassVar[dict[str, str]] = {}
    """Settings of TRL that this estimator replaces by an argument of its own: TRL's name -> the argument."""

    @abstractmethod
    def estimate(self, groups: RewardGroups) -> Tensor:
        """Advantages (P, G), finite where scored and NaN where unscorable; reads state, never writes it."""

    def update(self, groups: RewardGroups) -> None:
        """Called once per generated training batch, after `estimate`; the only writer of state."""

    def metrics(self, groups: RewardGroups) -> dict[str, float]:
        """Numbers of this method for the log, read before `update`; never writes."""
        return {}

    def excluded(self, groups: RewardGroups) -> Tensor | None:
        """Rows that must not take part in the loss at all, bool (P, G), or None."""
        return None

    def map_children(self, function: Callable[["AdvantageEstimator"], "AdvantageEstimator"]) -> Self:
        """A shallow copy in which every nested estimator is replaced by `function` of it."""

        def apply(value: object) -> object:
            if isinstance(value, list):
                return [apply(item) for item in value]
            return function(value) if isinstance(value, AdvantageEstimator) else value

        clone = copy.copy(self)
        for name in (field.name for field in fields(self) if field.init):
            setattr(clone, name, apply(getattr(self, name)))
        return clone
