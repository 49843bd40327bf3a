"""Plain ``pytest`` leaves out what is slow, and what is named runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.slow import SLOW, TESTS, left_out, name_of


def config(*asked: str, everything: bool = False) -> Any:
    """Return what the configuration of ``pytest ASKED`` has, started in the checkout."""
    return SimpleNamespace(
        args=[*asked], invocation_params=SimpleNamespace(dir=TESTS.parent), getoption={"--all": everything}.get
    )


def test_what_is_slow_is_there() -> None:
    assert [name_of(each) for each in SLOW if not each.exists()] == []


def test_plain_pytest_leaves_out_all_that_is_slow() -> None:
    assert left_out(config("tests")) == SLOW
    assert left_out(config("tests", everything=True)) == []


@pytest.mark.parametrize(
    ("asked", "missing"),
    [
        (["tests/streams"], []),
        (["tests/system"], []),
        (["tests/system/test_kills.py::test_nothing"], []),
        (["tests/writer", "tests/writer/test_two_masters.py"], []),
        (["tests/writer"], ["tests/writer/test_two_masters.py"]),
    ],
)
def test_what_is_named_runs(asked: list[str], missing: list[str]) -> None:
    assert [name_of(each) for each in left_out(config(*asked))] == missing
