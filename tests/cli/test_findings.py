"""A finding in one line."""

from __future__ import annotations

from replication.cli.findings import Finding


def test_a_line_has_the_place_the_fault_and_the_cure() -> None:
    assert str(Finding("a.toml", "it is empty", "write it")) == "a.toml: it is empty; cure: write it"
