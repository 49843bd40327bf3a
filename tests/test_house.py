"""The house rules that a linter does not know."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

import pytest

import replication

CHECKOUT = Path(__file__).parent.parent
MODULES = sorted((CHECKOUT / "replication").rglob("*.py"))
FORBIDDEN = {
    "handler",
    "manager",
    "processor",
    "engine",
    "helper",
    "helpers",
    "util",
    "utils",
    "base",
    "common",
    "misc",
}


def name_of(module: Path) -> str:
    """Return a module's path, for a test's name."""
    return str(module.relative_to(CHECKOUT))


@pytest.mark.parametrize("module", [each for each in MODULES if each.name != "__init__.py"], ids=name_of)
def test_every_module_has_a_twin_among_the_tests(module: Path) -> None:
    inside = module.relative_to(CHECKOUT / "replication")
    assert (CHECKOUT / "tests" / inside.parent / f"test_{inside.name}").exists()


@pytest.mark.parametrize("module", [*MODULES, *sorted((CHECKOUT / "twisted").rglob("*.py"))], ids=name_of)
def test_no_module_is_long_or_has_a_name_that_says_nothing(module: Path) -> None:
    text = module.read_text()
    assert len(text.splitlines()) <= 600
    assert module.stem not in FORBIDDEN
    classes = re.findall(r"^\s*class (\w+)", text, re.MULTILINE)
    words = {word.lower() for each in classes for word in re.findall(r"[A-Z][a-z]+", each)}
    assert not words & FORBIDDEN


@pytest.mark.parametrize("module", sorted((CHECKOUT / "tests").rglob("*.py")), ids=name_of)
def test_tests_are_no_package(module: Path) -> None:
    """Else two modules of one name would need a folder's name before them."""
    assert module.name != "__init__.py"


def test_the_map_names_every_package_and_module_of_the_top() -> None:
    said = replication.__doc__ or ""
    top = [each for each in (CHECKOUT / "replication").iterdir() if not each.name.startswith("_")]
    names = {f"{each.name}/" for each in top if (each / "__init__.py").exists()} | {
        each.name for each in top if each.suffix == ".py"
    }
    mapped = set(re.findall(r"^    (\w+(?:/|\.py)) ", said, re.MULTILINE))
    assert mapped == names


def test_every_package_is_packed() -> None:
    """setup.cfg spells them out, so that a new one must be added there."""
    found = {str(each.parent.relative_to(CHECKOUT)).replace("/", ".") for each in MODULES if each.name == "__init__.py"}
    assert set(setup_cfg()["options"]["packages"].split()) == found | {"twisted.plugins"}


def test_the_changelog_has_a_heading_for_what_comes_and_for_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (CHECKOUT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert replication.__version__ in headings


def test_tox_tests_exactly_the_lower_bounds_that_we_declare() -> None:
    """A lower bound that nobody tests is a guess."""
    declared = re.findall(r"^(\w+) >= ([\d.]+)$", setup_cfg()["options"]["install_requires"], re.MULTILINE)
    tested = re.findall(r"^ +oldest: (\w+) == ([\d.]+)$", (CHECKOUT / "tox.ini").read_text(), re.MULTILINE)
    assert tested == declared
    assert declared


def setup_cfg() -> ConfigParser:
    """Return setup.cfg."""
    parser = ConfigParser()
    parser.read(CHECKOUT / "setup.cfg")
    return parser


def test_tox_runs_on_spark_whatever_is_skipped_without_it() -> None:
    tox = ConfigParser(interpolation=None)
    tox.read(CHECKOUT / "tox.ini")
    (run,) = re.findall(r"posargs:([^}]*)", tox["testenv:spark"]["commands"])
    places = [each.partition("::")[0] for each in run.split()]
    needy = re.compile(r"need_spark|spark_runs|importorskip\(\"(pyarrow|adbc|zstandard)")
    files = [each for each in sorted((CHECKOUT / "tests").rglob("test_*.py")) if each != Path(__file__)]
    left_out = [
        name_of(each)
        for each in files
        if needy.search(each.read_text()) and not any(name_of(each).startswith(place) for place in places)
    ]
    assert left_out == []
