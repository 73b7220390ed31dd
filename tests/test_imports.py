"""Imports point one way: statistics, groups <- estimator <- advantages <- trainer, and diagnostics <- callbacks."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_ext

ROOT = Path(grpo_ext.__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(name: str) -> set[str]:
    """Modules of the package that this one imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} should import by the full name"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {module if module in MODULES else node.module for module in inner}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {module for module in found if module.split(".")[0] == "grpo_ext"} - {name}


def outside(name: str) -> set[str]:
    """Top-level names of other packages that this module imports."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
    return found


ADVANTAGES = [name for name in MODULES if name.startswith("grpo_ext.advantages")]
PURE = ["grpo_ext.statistics", "grpo_ext.groups", "grpo_ext.estimator", "grpo_ext.diagnostics", *ADVANTAGES]


@pytest.mark.parametrize("name", ["grpo_ext.statistics", "grpo_ext.groups"])
def test_the_ground_floor_imports_nothing_of_the_house(name):
    assert imported(name) == set()


def test_estimator_imports_the_ground_floor_only():
    assert imported("grpo_ext.estimator") <= {"grpo_ext.statistics", "grpo_ext.groups"}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_import_what_lies_below(name):
    below = {"grpo_ext.statistics", "grpo_ext.groups", "grpo_ext.estimator"}
    assert imported(name) <= below | set(ADVANTAGES)


def test_diagnostics_know_no_callback_and_no_method():
    assert imported("grpo_ext.diagnostics") <= {"grpo_ext.statistics", "grpo_ext.groups", "grpo_ext.estimator"}


def test_callbacks_do_not_know_the_trainer():
    assert "grpo_ext.trainer" not in imported("grpo_ext.callbacks")
    assert "grpo_ext.diagnostics" in imported("grpo_ext.callbacks")


def test_only_the_front_door_and_the_command_line_know_the_trainer():
    users = {name for name in MODULES if "grpo_ext.trainer" in imported(name)}
    assert all(name == "grpo_ext" or name.startswith("grpo_ext.cli") for name in users)
    assert users


def test_no_import_leads_back():
    """The front door, which imports lazily, is left out."""
    graph = {name: imported(name) - {"grpo_ext"} for name in MODULES if name != "grpo_ext"}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises where a cycle stands in the way
    assert set(graph) <= set(order)


@pytest.mark.parametrize("name", PURE)
def test_the_pure_part_needs_torch_alone(name):
    assert outside(name) <= {"torch", "grpo_ext", *sys.stdlib_module_names}


def test_advantages_import_neither_trl_nor_transformers():
    code = (
        "import sys, grpo_ext.advantages, grpo_ext.diagnostics\n"
        "loaded = {'trl', 'transformers', 'accelerate', 'datasets'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
