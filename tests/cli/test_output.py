"""What commands print has no character that a terminal obeys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.cli.output import report, write_line

if TYPE_CHECKING:
    import pytest


def test_a_line_stays_one_line_and_has_no_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    write_line("a\nb \x1b[31m é")
    report("c\r\x9b")
    written = capsys.readouterr()
    assert (written.out, written.err) == ("a\\nb \\x1b[31m é\n", "c\\r\\x9b\n")
