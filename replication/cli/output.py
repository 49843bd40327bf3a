"""What commands print: one line at a time, without characters that a terminal obeys."""

from __future__ import annotations

import sys
from contextlib import suppress

from replication.errors import escape


def write_line(text: str) -> None:
    """Print a line to standard output."""
    print(escape(text))


def report(text: str) -> None:
    """Print a line to standard error; if that fails, as on a full disk, the command goes on."""
    with suppress(OSError):
        print(escape(text), file=sys.stderr)
