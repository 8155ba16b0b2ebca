"""The house rules that keep the packages apart, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gemma_ray", "raycluster", "workloads")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# The command line stands above the packages although it lives in one of them: its verbs start stages, as workloads do.
ENTRY = "gemma_ray/cli.py"
MAY_NOT_IMPORT = {"gemma_ray": {"raycluster", "workloads"}, "raycluster": {"gemma_ray", "workloads"}, "workloads": set()}
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "misc", "common", "tools"}
LONGEST_MODULE_LINES = 300
HEAVY = ["flax", "jax", "numpy", "ray", "torch", "transformers", "tunix", "vllm"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


TREES = {name_of(path): ast.parse(path.read_text(encoding="utf-8"), filename=str(path)) for path in MODULES}


def found(trees: dict[str, ast.Module], offends: Callable[[ast.AST], bool]) -> list[str]:
    """Places, as `module:line`, of the nodes that offend."""
    return [f"{name}:{getattr(node, 'lineno', 0)}" for name, tree in trees.items() for node in ast.walk(tree) if offends(node)]


def packages_imported(node: ast.AST) -> set[str]:
    """Top-level packages that an import statement names; it may stand inside a function."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return {node.module.split(".")[0]} if isinstance(node, ast.ImportFrom) and node.module and not node.level else set()


def test_the_packages_are_found():
    assert {name.split("/")[0] for name in TREES} == set(PACKAGES)
    assert len(TREES) > 20


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str):
    trees = {name: tree for name, tree in TREES.items() if name.startswith(f"{package}/") and name != ENTRY}
    assert not found(trees, lambda node: bool(packages_imported(node) & MAY_NOT_IMPORT[package]))


def test_only_the_command_line_is_allowed_above_its_package():
    assert not [
        name for name, tree in TREES.items() if name != ENTRY and any(imports_module(node, "gemma_ray.cli") for node in ast.walk(tree))
    ]


def imports_module(node: ast.AST, module: str) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name == module for alias in node.names)
    package, _, name = module.rpartition(".")
    return isinstance(node, ast.ImportFrom) and (node.module == module or (node.module == package and name in {a.name for a in node.names}))


def test_no_relative_imports():
    assert not found(TREES, lambda node: isinstance(node, ast.ImportFrom) and node.level > 0)


def test_a_library_does_not_print():
    library = {name: tree for name, tree in TREES.items() if not name.startswith("workloads/") and name != ENTRY}
    assert not found(library, lambda node: isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print")


def test_no_bare_except():
    assert not found(TREES, lambda node: isinstance(node, ast.ExceptHandler) and node.type is None)


def test_a_modules_name_says_what_is_in_it():
    assert not [name_of(path) for path in MODULES if {path.stem, path.parent.name} & NAMES_THAT_SAY_NOTHING]


def test_a_module_can_be_read_in_one_sitting():
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert not {name: lines for name, lines in lengths.items() if lines > LONGEST_MODULE_LINES}


def test_every_module_says_what_it_is():
    assert not [name for name, tree in TREES.items() if tree.body and not ast.get_docstring(tree)]


def test_what_is_public_is_documented():
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [(name, node) for name, tree in TREES.items() for node in tree.body if isinstance(node, definitions) and node.name[0] != "_"]
    assert not [f"{name}:{node.lineno} {node.name}" for name, node in public if not ast.get_docstring(node)]


@pytest.mark.parametrize("module", ["gemma_ray.recipe", "gemma_ray.artifacts", "gemma_ray.cli", "raycluster.slices", "raycluster.doctor"])
def test_importing_it_is_light(module: str):
    if not (ROOT / f"{module.replace('.', '/')}.py").exists():
        pytest.skip(f"no {module} yet")
    code = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []
