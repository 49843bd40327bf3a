"""A finding in one line."""

from __future__ import annotations

from replication.cli.findings import Finding


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
