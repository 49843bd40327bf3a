"""Every trap that others fell into has a test with its number in the name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TRAPS = range(1, 53)  # docs/protocol/traps.md


@cache
def numbers_in_names() -> set[int]:
    """Return the numbers in the names of tests."""
    names = (re.findall(r"def test_\w*?trap_(\d+)_", module.read_text()) for module in TESTS.rglob("*.py"))
    return {int(number) for found in names for number in found}


@pytest.mark.parametrize("trap", TRAPS)
def test_the_trap_has_a_test(trap: int) -> None:
    assert trap in numbers_in_names()


def test_no_test_is_about_a_trap_that_there_is_not() -> None:
    assert numbers_in_names() <= {*TRAPS}
