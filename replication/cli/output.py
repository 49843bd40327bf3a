"""What commands print: one line at a time, without characters that a terminal obeys."""

from __future__ import annotations

import sys

from replication.errors import escape


def write_line(text: str) -> None:
    """Print a line to standard output."""
    print(escape(text))


def report(text: str) -> None:
    """Print a line to standard error."""
    print(escape(text), file=sys.stderr)
