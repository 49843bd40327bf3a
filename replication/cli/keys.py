"""Keys of a terminal, read one at a time while a command shows something."""

from __future__ import annotations

import os
import select
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAMES: Final = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"\x1b": "escape"}


class Keys:
    """The keys that are pressed at a terminal, by its file descriptor."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal

    def read(self, seconds: float) -> str:
        """Return the next key; the empty text if none is pressed for so long, and `escape` if the terminal is gone."""
        if not select.select([self._terminal], [], [], max(0.0, seconds))[0]:
            return ""
        try:
            pressed = os.read(self._terminal, 16)
        except OSError:
            pressed = b""
        if not pressed:  # the terminal is gone
            return "escape"
        return _NAMES.get(pressed) or pressed[:1].decode("ascii", "replace")


@contextmanager
def pressed_keys() -> Iterator[Keys | None]:
    """Give the keys of standard input, which are not shown meanwhile; None if it is not a terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    import termios  # noqa: PLC0415 (there may be no terminal)
    import tty  # noqa: PLC0415

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield Keys(terminal)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
