"""From rows to facts, pages and positions, the same for every database."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from replication.errors import StoreError
from replication.streams.facts import gather
from replication.streams.seams import Page
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Iterable

SEPARATOR: Final = "\x1e"  # of rows that the database gives as one value: it is in no JSON text and in no name


class Rows(NamedTuple):
    """A page as columns: ``texts[i]`` is a row of the fact ``tokens[i]``."""

    tokens: list[Token]
    texts: list[str]
    upto: Token
    limited: bool

    @classmethod
    def of_fact(cls, token: Token, texts: Iterable[str], upto: Token) -> Rows:
        """Return the page up to ``upto`` that has one fact, which is larger than a page."""
        rows = [*texts]
        return cls([token] * len(rows), rows, token, limited=token < upto)

    def page(self) -> Page:
        """Return its facts."""
        return Page(gather(self.tokens, self.texts), self.upto, self.limited)


def check_limit(limit: int) -> None:
    """Raise StoreError for a page that could not hold a row."""
    if limit < 1:
        raise StoreError(f"a page of {limit} rows was asked for: at least one")


def split_rows(table: str, ids: str, texts: str) -> tuple[list[Token], list[str]]:
    """Return the tokens and the texts of rows that came as two values; StoreError if one has a separator in it."""
    tokens, rows = cast("list[Token]", [*map(int, ids.split(","))]), texts.split(SEPARATOR)
    if len(tokens) != len(rows):
        raise StoreError(f"table {table!r} has a row between {tokens[0]} and {tokens[-1]} that is not JSON")
    return tokens, rows


def cut_rows(tokens: list[Token], texts: list[str], *, upto: Token, limit: int) -> Rows | None:
    """Return the page that begins with these rows: up to ``limit`` of them, and one more if there are more.

    The row too many tells where the last whole fact ends.  None if there is none: the first fact has more than
    ``limit`` rows and has to be read by itself.
    """
    if len(tokens) <= limit:
        return Rows(tokens, texts, upto, limited=False)
    whole = bisect_left(tokens, tokens[limit])
    if whole == 0:
        return None
    return Rows(tokens[:whole], texts[:whole], tokens[whole - 1], limited=True)


def gather_positions(rows: Iterable[tuple[str, str, int]]) -> dict[StreamName, dict[InstanceName, Token]]:
    """Return the positions in rows of (stream, writer, token)."""
    positions: dict[StreamName, dict[InstanceName, Token]] = {}
    for stream, writer, token in rows:
        positions.setdefault(StreamName(stream), {})[InstanceName(writer)] = Token(token)
    return positions
