"""What commands print: one line at a time, without characters that a terminal obeys."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from replication.errors import escape

if TYPE_CHECKING:
    from collections.abc import Iterator


def write_line(text: str) -> None:
    """Print a line to standard output."""
    print(escape(text))


def report(text: str) -> None:
    """Print a line to standard error; if that fails, as on a full disk, the command goes on."""
    with suppress(OSError):
        print(escape(text), file=sys.stderr)


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, as SIGINT does, so that a command ends in order."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
