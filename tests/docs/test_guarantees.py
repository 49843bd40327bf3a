"""docs/guarantees.md: each test that it and docs/security.md name is there, and each fault of a test is on it."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import page, table
from tests.system.daemons import CHECKOUT

PAGE = page("guarantees.md")
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(?:\w+::)?(\w+))?`", PAGE + page("security.md"))
TESTS = {path.relative_to(CHECKOUT).as_posix(): path.read_text() for path in sorted((CHECKOUT / "tests").rglob("*.py"))}


@pytest.mark.parametrize(("path", "name"), NAMED, ids=["::".join(each) for each in NAMED])
def test_a_test_that_proves_something_is_there(path: str, name: str) -> None:
    assert re.search(rf"^ *(async )?(def|class) {name}\b", TESTS[path], re.MULTILINE), f"{path} has no test {name}"


def test_every_guarantee_names_its_tests() -> None:
    """The sections with promises do; ``others`` are about what is not promised, or about the tests."""
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    others = ("What is not", "Differences", "How it is tested")
    assert [
        each.partition("\n")[0] for each in sections if not each.startswith(others) and "Proved by" not in each
    ] == []


def test_every_fault_that_a_test_is_named_after_is_listed() -> None:
    named = {
        f"F{number}"
        for text in TESTS.values()
        for number in re.findall(r"def test_(?!protocol)(?:\w*_)??f(\d+)_", text)
    }
    listed = {row["fault"] for row in table(PAGE, "### Faults")}
    assert named <= listed
