"""``replication skip``: leave out a fact that a worker's function cannot take (docs/command-line.md)."""

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
        "skip",
        "Leave out a fact that a worker's function cannot take.",
        "`replication skipped` lists what is left out; `replication retry` applies a fact after all.",
    )


def main(arguments: Sequence[str]) -> int:
    """Let the worker leave out the fact, now or at its next start."""
    return decide(make_parser(), arguments, "skip", SkipState.SKIP_REQUESTED)
