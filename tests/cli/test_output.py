"""What commands print has no character that a terminal obeys."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from unittest.mock import Mock

from replication.cli.output import report, write_line

if TYPE_CHECKING:
    import pytest


def test_a_line_stays_one_line_and_has_no_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    write_line("a\nb \x1b[31m é")
    report("c\r\x9b")
    written = capsys.readouterr()
    assert (written.out, written.err) == ("a\\nb \\x1b[31m é\n", "c\\r\\x9b\n")


def test_a_full_disk_under_standard_error_stops_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an append that reports a retry."""
    full = Mock(write=Mock(side_effect=OSError(28, "No space left on device")))
    monkeypatch.setattr(sys, "stderr", full)
    report("retrying")
    full.write.assert_called()
