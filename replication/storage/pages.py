"""Rows of a database become facts, pages and positions."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from replication.errors import StoreError
from replication.streams.facts import gather
from replication.streams.interfaces import Page
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Iterable

SEPARATOR: Final = "\x1e"  # between rows that the database returns as one value; no JSON text and no name contains it


class Rows(NamedTuple):
    """A page as columns: ``texts[i]`` is a row of the fact ``tokens[i]``."""

    tokens: list[Token]
    texts: list[str]
    upto: Token
    limited: bool

    @classmethod
    def of_fact(cls, token: Token, texts: Iterable[str], upto: Token) -> Rows:
        """Return the page with one fact, which is larger than a page; ``upto`` is the end of the range."""
        rows = [*texts]
        return cls([token] * len(rows), rows, token, limited=token < upto)

    def page(self) -> Page:
        """Return the page as facts."""
        return Page(gather(self.tokens, self.texts), self.upto, self.limited)


def check_limit(limit: int) -> None:
    """Raise StoreError if ``limit`` is no number of rows that a page can have."""
    if limit < 1:
        raise StoreError(f"a page has at least one row, not {limit}")


def split_rows(table: str, ids: str, texts: str) -> tuple[list[Token], list[str]]:
    """Return the tokens and texts of rows that came as two values; StoreError if a row contains a separator."""
    tokens, rows = cast("list[Token]", [*map(int, ids.split(","))]), texts.split(SEPARATOR)
    if len(tokens) != len(rows):
        raise StoreError(f"table {table!r} has a row between {tokens[0]} and {tokens[-1]} that is not JSON")
    return tokens, rows


def cut_rows(tokens: list[Token], texts: list[str], *, upto: Token, limit: int) -> Rows | None:
    """Return the page that these rows begin.

    The caller reads ``limit + 1`` rows.  If they are all there, the last row shows where the last whole fact ends.
    Returns None if the first fact alone has more than ``limit`` rows; the caller then reads that fact by itself.
    """
    if len(tokens) <= limit:
        return Rows(tokens, texts, upto, limited=False)
    whole = bisect_left(tokens, tokens[limit])
    if whole == 0:
        return None
    return Rows(tokens[:whole], texts[:whole], tokens[whole - 1], limited=True)


def collect_positions(rows: Iterable[tuple[str, str, int]]) -> dict[StreamName, dict[InstanceName, Token]]:
    """Return the positions in rows of (stream, writer, token)."""
    positions: dict[StreamName, dict[InstanceName, Token]] = {}
    for stream, writer, token in rows:
        positions.setdefault(StreamName(stream), {})[InstanceName(writer)] = Token(token)
    return positions
