"""A finding in one line."""

from __future__ import annotations

from functools import partial
from threading import Barrier
from typing import TYPE_CHECKING

import pytest

from replication.cli.findings import Finding, together

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_line_has_the_place_the_fault_and_the_cure() -> None:
    assert str(Finding("a.toml", "it is empty", "write it")) == "a.toml: it is empty; cure: write it"


def test_the_place_is_shown_without_secrets() -> None:
    for where, shown in (
        ("http://u:PASS@h:1", "http://…@h:1"),
        ("/tmp/u:PASS@h", "…@h"),
        ("stream orders of master", "stream orders of master"),
        ("/srv/segments/manifest.json", "/srv/segments/manifest.json"),
    ):
        assert Finding(where, "", "").where == shown


def test_checks_wait_at_the_same_time_and_keep_their_order() -> None:
    """Nine places without an answer took a minute."""
    both = Barrier(2, timeout=10)

    def check(what: str) -> Iterator[str]:
        both.wait()
        yield what

    assert together((partial(check, "a"), partial(check, "b"))) == ["a", "b"]


def test_an_error_of_a_check_is_raised() -> None:
    def fail() -> Iterator[str]:
        raise ValueError("no check")

    with pytest.raises(ValueError, match="no check"):
        together((fail,))
