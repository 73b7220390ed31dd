"""A method's constructor as command-line flags: the dataclass is the schema.

A plain field becomes a flag of its name. A field that holds a rule or a base estimator becomes a flag that picks
one by its name in snake case, and the arguments of the picked one follow with that flag's name as prefix:
`--anchor moving_average --anchor_window 5`.
"""

import dataclasses
import difflib
import re
from pathlib import Path
from typing import Any, cast, get_type_hints

import yaml

from grpo_ext.advantages import METHODS
from grpo_ext.estimator import AdvantageEstimator, Component
from grpo_ext.resolution import SETTING_DEFAULTS, find_method


def split_config(argv: list[str]) -> tuple[list[str], dict[str, Any]]:
    """
    The command line without its `--config`, and that file's values by flag name.

    Raises:
        `ValueError`: for a file that is no YAML mapping.
    """
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if "--config" not in words:
        return words, {}
    place = words.index("--config")
    path = Path(words[place + 1] if place + 1 < len(words) else "")
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(
            f"`--config` should name a YAML file, found `{path}`, which cannot be read: {error}"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"`--config` should name a YAML file of flags and values, found no such in `{path}`.")
    return words[:place] + words[place + 2 :], {str(key).replace("-", "_"): value for key, value in values.items()}


def given_values(words: list[str], config: dict[str, Any]) -> dict[str, Any]:
    """What the user gave, by flag name: the configuration's values, then the command line's."""
    given = dict(config)
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            following = words[index + 1] if index + 1 < len(words) else ""
            given[name.replace("-", "_")] = value if has_value else following
    return given


def choices(kind: object) -> dict[str, type[Component]] | None:
    """The components a field of this type may hold, by the name that picks them; None for a plain field."""
    if not (isinstance(kind, type) and issubclass(kind, Component)):
        return None
    if issubclass(kind, AdvantageEstimator):
        return dict(METHODS)
    return {snake_case(rule.__name__): rule for rule in kind.__subclasses__()}


def pick(name: str, kind: object, default: Component, given: dict[str, Any]) -> tuple[str, type[Component]]:
    """The name and class of the component that the user picked for a field, or of the field's default."""
    options = dict(choices(kind) or {})
    own = next((key for key, option in options.items() if option is type(default)), snake_case(type(default).__name__))
    options.setdefault(own, type(default))
    wanted = str(given.get(name) or own)
    chosen = wanted.replace("-", "_")
    if chosen not in options and isinstance(default, AdvantageEstimator):
        return wanted, find_method(wanted)
    if chosen not in options:
        raise ValueError(f"`--{name}` should be one of {', '.join(options)}, found {chosen!r}: pick one of these.")
    return chosen, options[chosen]


def snake_case(name: str) -> str:
    """`MovingAverage` -> `moving_average`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def collect(component: type[Component], given: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """The flags of a component, as (name, type, field) for `dataclasses.make_dataclass`."""
    hints, texts, flags = get_type_hints(component), describe(component), []
    for field in constructor_fields(component):
        name, kind = prefix + field.name, hints[field.name]
        text = {"help": f"[{component.__name__}] {texts.get(field.name, '')}".replace("%", "%%")}
        options = choices(kind)
        if options is None:
            default = {"default": field.default, "default_factory": field.default_factory}
            flags.append((name, kind, dataclasses.field(**default, metadata=text)))
            continue
        chosen, picked = pick(name, kind, field.default_factory(), given)
        text["help"] += f" One of {', '.join(options)}."
        flags.append((name, str, dataclasses.field(default=chosen, metadata=text)))
        flags += collect(picked, given, f"{name}_")
    return flags


def build(component: type[Component], values: dict[str, Any], prefix: str = "") -> Component:
    """The component that the parsed values of its flags describe."""
    hints, arguments = get_type_hints(component), {}
    for field in constructor_fields(component):
        name, kind = prefix + field.name, hints[field.name]
        if choices(kind) is None:
            arguments[field.name] = values[name]
        else:
            _, picked = pick(name, kind, field.default_factory(), values)
            arguments[field.name] = build(picked, values, f"{name}_")
    return component(**arguments)


def extra_generations(method: type[AdvantageEstimator], given: dict[str, Any], prefix: str = "") -> int:
    """How many extra completions per prompt the method asks for, or the base it wraps."""
    numbers, hints = [method.num_extra_generations], get_type_hints(method)
    for field in constructor_fields(method):
        name, kind = prefix + field.name, hints[field.name]
        if isinstance(kind, type) and issubclass(kind, AdvantageEstimator):
            _, picked = pick(name, kind, field.default_factory(), given)
            numbers.append(extra_generations(cast(type[AdvantageEstimator], picked), given, f"{name}_"))
    return max(numbers)


def constructor_fields(component: type[Component]) -> list[Any]:
    """The fields that become flags; one named like a setting of TRL is that setting and has none of its own."""
    return [field for field in dataclasses.fields(component) if field.init and field.name not in SETTING_DEFAULTS]


def method_arguments(method: type[AdvantageEstimator], given: dict[str, Any]) -> type:
    """A dataclass of the method's flags, for `TrlParser`."""
    title = f"the method: {method.__name__}"
    flags = collect(method, given)
    return dataclasses.make_dataclass("MethodArguments", flags, kw_only=True, namespace={"_argument_group_name": title})


def describe(component: type) -> dict[str, str]:
    """The texts of a docstring's `Args` section, by argument; inherited arguments where a class adds none."""
    texts: dict[str, str] = {}
    for cls in reversed(component.__mro__):
        section = (cls.__doc__ or "").partition("Args:")[2].partition("Example:")[0]
        for name, body in re.findall(r"^ {8}(\w+) \(.*?:\n((?: {12}.*\n?)+)", section, flags=re.MULTILINE):
            texts[name] = " ".join(body.split()).replace("`", "")
    return texts


def explain_unknown(flag: str, given: dict[str, Any], known: list[str]) -> str:
    """One sentence about a flag that the chosen method and rules do not have."""
    name = flag.lstrip("-").partition("=")[0].replace("-", "_")
    chosen = f"--method {str(given.get('method') or 'grpo').replace('-', '_')}"
    owners = [f"`{owner}`" for owner, names in all_flags().items() if name in names and owner != chosen]
    if owners:
        return f"`--{name}` should come with {' or '.join(owners)}, found another choice: drop it, or choose that one."
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean `--{close[0]}`?" if close else "see `--help`."
    return f"`{flag}` should be a known flag, found an unknown one: {hint}"


def all_flags() -> dict[str, set[str]]:
    """Every flag of every method and rule, by what has to be chosen for it."""
    found: dict[str, set[str]] = {}
    for key, method in METHODS.items():
        found[f"--method {key}"] = {name for name, _, _ in collect(method, {})}
        hints = get_type_hints(method)
        for field in constructor_fields(method):
            for option, picked in (choices(hints[field.name]) or {}).items():
                own = {f"{field.name}_{inner.name}" for inner in constructor_fields(picked)}
                found.setdefault(f"--{field.name} {option}", set()).update(own)
    return found
