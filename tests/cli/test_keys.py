"""Keys of a real terminal, of which the test has the other end."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios
from contextlib import closing
from typing import TYPE_CHECKING

from replication.cli.keys import Keys, pressed_keys

if TYPE_CHECKING:
    import pytest


def test_keys_are_read_one_by_one_and_the_terminal_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, device = pty.openpty()
    with closing(os.fdopen(controller, "wb", buffering=0)) as user, os.fdopen(device) as terminal:
        before = termios.tcgetattr(device)
        monkeypatch.setattr(sys, "stdin", terminal)
        with pressed_keys() as keys:
            assert keys is not None
            assert keys.read(0) == ""
            for sent, expected in ((b"q", "q"), (b"\x1b[A", "up"), (b"\x1b[6~", "page down"), (b"\x1b", "escape")):
                user.write(sent)
                assert keys.read(5) == expected
            assert not termios.tcgetattr(device)[3] & (termios.ICANON | termios.ECHO)
        assert termios.tcgetattr(device) == before
        user.close()
        assert Keys(device).read(5) == "escape"


def test_a_pipe_has_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("q"))
    with pressed_keys() as keys:
        assert keys is None
