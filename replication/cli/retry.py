"""``replication retry``: apply a fact that was left out (docs/command-line.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.cli.skipping import decide, make_fact_parser
from replication.streams.skips import SkipState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.cli.parser import Parser


def make_parser() -> Parser:
    """Return the parser of the command line."""
    return make_fact_parser(
        "retry",
        "Apply a fact that was left out, after later ones.",
        "If the function raises again, the fact stays left out.",
    )


def main(arguments: Sequence[str]) -> int:
    """Let the worker apply the fact, now or at its next start."""
    return decide(make_parser(), arguments, "retry", SkipState.RETRY_REQUESTED)
