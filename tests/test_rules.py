"""Rules of this code that a linter does not check."""

from __future__ import annotations

import ast
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

# Words of style: machines send, receive, report and return, and sentences name their subjects.
TALK = re.compile(r"(?i)(?<![a-z])(?:whoever|(?:any|every|no|some)body|told|tells?|said|says?|heard|hears?)(?![a-z])")
# The only files with such words, and the reason.
TALK_ALLOWED = {
    "CHANGELOG.md": "the names of earlier releases",
    "replication/bench/cluster.py": "`nobody`, a user of Linux",
    "tests/test_rules.py": "these words",
    "tests/web/live/test_calls.py": "the name of a user",
    "tests/web/live/test_tables.py": "the name of a test",
}


def name_of(module: Path) -> str:
    """Return a module's path, for a test's name."""
    return str(module.relative_to(CHECKOUT))


@pytest.mark.parametrize("module", [each for each in MODULES if each.name != "__init__.py"], ids=name_of)
def test_every_module_has_a_twin_among_the_tests(module: Path) -> None:
    inside = module.relative_to(CHECKOUT / "replication")
    assert (CHECKOUT / "tests" / inside.parent / f"test_{inside.name}").exists()


@pytest.fixture(scope="module", params=[*MODULES, *sorted((CHECKOUT / "twisted").rglob("*.py"))], ids=name_of)
def module(request: pytest.FixtureRequest) -> Path:
    """Return each module; the tests of one run after each other, with the tree that is parsed once."""
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def tree(module: Path) -> ast.Module:
    """Return the module, parsed."""
    return ast.parse(module.read_text())


def test_a_long_module_gives_the_reason_and_no_name_is_empty_of_meaning(module: Path, tree: ast.Module) -> None:
    if len(module.read_text().splitlines()) > 500:
        assert "The module has more than 500 lines because" in (ast.get_docstring(tree) or "")
    assert module.stem not in FORBIDDEN
    words = {word.lower() for each in classes_of(tree) for word in re.findall(r"[A-Z][a-z]+", each.name)}
    assert not words & FORBIDDEN


def test_no_class_is_large(tree: ast.Module) -> None:
    """30 methods, and 60 lines of a constructor, are enough."""
    for each in classes_of(tree):
        methods = [it for it in each.body if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert len(methods) <= 30, each.name
        for it in methods:
            lines = (it.end_lineno or it.lineno) - it.lineno + 1
            assert it.name != "__init__" or lines <= 60, f"the constructor of {each.name} has {lines} lines"


def test_the_first_level_has_few_boxes() -> None:
    top = (CHECKOUT / "replication").iterdir()
    packages = [each for each in top if (each / "__init__.py").exists()]
    modules = [each for each in (CHECKOUT / "replication").glob("*.py") if each.name != "__init__.py"]
    assert len(packages) + len(modules) <= 24
    assert len(modules) <= 12


def test_machines_do_not_talk_in_code_tests_and_documents() -> None:
    """Not in their names either. ``tests/data`` is kept as it was recorded or released."""
    suffixes = {".py", ".md", ".toml", ".ini", ".cfg", ".txt", ".html", ".js", ".css", ".yaml", ".service"}
    folders = [CHECKOUT / each for each in ("replication", "twisted", "tests", "examples", "docs", "conf", ".ci")]
    files = [*CHECKOUT.glob("*"), *(path for folder in folders for path in folder.rglob("*"))]
    texts = {
        name_of(path): path.read_text(encoding="utf-8")
        for path in files
        if path.suffix in suffixes and path.is_file() and not path.is_relative_to(CHECKOUT / "tests/data")
    }
    found = {name: words for name, text in texts.items() if (words := {*TALK.findall(text)})}
    assert found.keys() == TALK_ALLOWED.keys(), found


def classes_of(tree: ast.Module) -> list[ast.ClassDef]:
    """Return the classes of a module, nested ones too."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def test_tests_are_no_package() -> None:
    """Else two modules of one name would need a folder's name before them."""
    assert [*(CHECKOUT / "tests").rglob("__init__.py")] == []


def test_the_map_names_every_package_and_module_of_the_top() -> None:
    text = replication.__doc__ or ""
    top = [each for each in (CHECKOUT / "replication").iterdir() if not each.name.startswith("_")]
    names = {f"{each.name}/" for each in top if (each / "__init__.py").exists()} | {
        each.name for each in top if each.suffix == ".py"
    }
    mapped = set(re.findall(r"^    (\w+(?:/|\.py)) ", text, re.MULTILINE))
    assert mapped == names


def test_every_package_is_packed() -> None:
    """setup.cfg spells them out, so that a new one must be added there."""
    found = {str(each.parent.relative_to(CHECKOUT)).replace("/", ".") for each in MODULES if each.name == "__init__.py"}
    assert set(setup_cfg()["options"]["packages"].split()) == found | {"twisted.plugins"}


def test_the_changelog_has_a_heading_for_what_comes_and_for_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (CHECKOUT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    released = ".dev" not in replication.__version__
    assert (replication.__version__ in headings) == released


def test_every_message_names_an_extra_in_one_form() -> None:
    """``errors.install_command`` makes it, and each extra that it is called with is one of setup.cfg."""
    texts = {name_of(each): each.read_text() for each in MODULES}
    spelt = [name for name, text in texts.items() if re.search(r"pip install [^`]*\.?\[", text)]
    assert spelt == ["replication/errors.py"]
    named = {extra for text in texts.values() for extra in re.findall(r"install_command\([\"'](\w+)[\"']\)", text)}
    assert named <= set(setup_cfg()["options.extras_require"])
    assert named >= {"postgres", "segments", "spark", "zstd", "tls", "metrics", "redis"}


def test_tox_tests_exactly_the_lower_bounds_that_we_declare() -> None:
    """A lower bound without a test is a guess."""
    declared = [
        each
        for text in (
            setup_cfg()["options"]["install_requires"],
            setup_cfg()["options.extras_require"]["tls"],
            setup_cfg()["options.extras_require"]["redis"],
        )
        for each in re.findall(r"^([\w-]+) >= ([\d.]+)$", text, re.MULTILINE)
    ]
    tested = re.findall(r"^ +oldest: ([\w-]+) == ([\d.]+)$", (CHECKOUT / "tox.ini").read_text(), re.MULTILINE)
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
