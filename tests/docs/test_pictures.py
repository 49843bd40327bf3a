"""docs/architecture.md shows the code as it is: its pictures, its tables, and the modules that it names."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

import pytest

from tests.docs.pages import DOCS, code, page, section
from tests.system.daemons import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = page("architecture.md")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NAMED = {*code(re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE))}


@cache
def pictures() -> Any:
    """Return docs/pictures.py as a module."""
    spec = spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_those_of_the_code() -> None:
    assert pictures().fill(PAGE) == PAGE, f"run: {sys.executable} docs/pictures.py"


def test_every_package_is_in_the_layers_and_the_arrows_have_no_circle() -> None:
    found = pictures()
    assert sorted(name for layer in found.layers() for name in layer) == list(found.boxes())
    place = {name: number for number, layer in enumerate(found.layers()) for name in layer}
    assert [f"{a} -> {b}" for a, targets in found.arrows().items() for b in targets if place[a] >= place[b]] == []


PLACES = [
    f"/{path.relative_to(CHECKOUT)}"
    for top in ("replication", "tests", "twisted")
    for path in (CHECKOUT / top).rglob("*")
]


@pytest.mark.parametrize("path", sorted(each for each in NAMED if re.fullmatch(r"[a-z_\d/]+(?:\.py|/)", each)))
def test_a_module_that_is_named_is_there(path: str) -> None:
    assert any(each.endswith(f"/{path.rstrip('/')}") for each in PLACES)


@cache
def definitions() -> dict[str, list[ast.stmt]]:
    """Return the statements at the first level of all modules that define each name."""
    found: dict[str, list[ast.stmt]] = {}
    for path in (CHECKOUT / "replication").rglob("*.py"):
        for node in pictures().tree_of(path).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = [each.id for each in targets if isinstance(each, ast.Name)]
            for name in [node.name] if isinstance(node, ast.ClassDef) else names:
                found.setdefault(name, []).append(node)
    return found


@pytest.mark.parametrize("name", sorted(each for each in NAMED if re.fullmatch(r"[A-Z][a-z]\w+(?:\.\w+)?", each)))
def test_a_class_or_method_that_is_named_is_there(name: str) -> None:
    owner, _, method = name.partition(".")
    found = definitions()[owner]
    methods = {each.name for node in found for each in getattr(node, "body", []) if isinstance(each, FUNCTIONS)}
    assert not method or method in methods


@cache
def imports_of(path: Path) -> set[str]:
    """Return the modules that a module imports, also those that only its types need."""
    nodes = [*ast.walk(pictures().tree_of(path))]
    names = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return names


@pytest.mark.parametrize("package", ["rooms", "synapse"])
def test_what_imports_a_package_that_may_be_deleted_is_named(package: str) -> None:
    items = re.split(r"^- ", section(PAGE, "### What may I delete?").partition("\n\nNo module")[0], flags=re.MULTILINE)
    (item,) = [each for each in items if each.startswith(f"`{package}`")]
    with_it, edit = ([each for each in code(part) if each.endswith(".py")] for part in item.split("Edit", 1))
    gone = [f"replication.{name.removesuffix('.py').replace('/', '.')}" for name in (package, *with_it)]
    importing = {
        str(path.relative_to(CHECKOUT / "replication"))
        for path in (CHECKOUT / "replication").rglob("*.py")
        if any(f"{name}.".startswith(f"{each}.") for name in imports_of(path) for each in gone)
    }
    kept = {each for each in importing if not each.startswith(f"{package}/")} - {*with_it, "__init__.py"}
    assert kept - {*edit} == set()
