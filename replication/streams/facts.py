"""A fact: one token with all its rows, never a part of them; and what is done with many facts at once."""

from __future__ import annotations

from functools import partial
from itertools import chain, groupby
from operator import itemgetter, lt
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from replication.wire.grammar import Token

_FACT_BYTES: Final = 128  # a fact and its tuple of texts, without them (CPython 3.11, 64 bits)
_ROW_BYTES: Final = 64  # a str without its characters, and the pointer to it


class Fact(NamedTuple):
    """What one writer did under one stream ID.

    ``texts`` are the rows as JSON text, as they were spelt when the fact was written and as they travel; ``rows``
    decodes them, each time that it is asked.  A fact may have no rows.
    """

    token: Token
    texts: tuple[str, ...]

    @property
    def rows(self) -> list[Any]:
        """The rows, decoded."""
        return grammar.read_rows(self.texts)


# Fact._make without its check of the length, which is two thirds of the time that a follower spends on a row.
_make_fact = cast("Callable[[tuple[Token, tuple[str, ...]]], Fact]", partial(tuple.__new__, Fact))


def facts_of(tokens: Iterable[Token], texts: Iterable[tuple[str, ...]]) -> list[Fact]:
    """Return a fact for each token and its rows, in bulk."""
    return list(map(_make_fact, zip(tokens, texts, strict=True)))


def facts_of_rows(tokens: Sequence[Token], texts: Sequence[str]) -> list[Fact]:
    """Return a fact per row: the usual case."""
    return facts_of(tokens, zip(texts, strict=True))


def gather(tokens: Sequence[Token], texts: Sequence[str]) -> list[Fact]:
    """Return the facts of rows that stand in token order: ``texts[i]`` is a row of the fact ``tokens[i]``."""
    if len(set(tokens)) == len(tokens):
        return facts_of_rows(tokens, texts)
    rows = groupby(zip(tokens, texts, strict=True), itemgetter(0))
    return [Fact(token, tuple([text for _, text in group])) for token, group in rows]


def tokens_of(facts: Iterable[Fact]) -> list[Token]:
    """Return each fact's token."""
    return list(map(itemgetter(0), facts))


def texts_of(facts: Iterable[Fact]) -> list[str]:
    """Return the rows of all facts, one after the other."""
    return list(chain.from_iterable(map(itemgetter(1), facts)))


def is_ascending(tokens: Sequence[Token]) -> bool:
    """Whether each token is larger than the one before it."""
    return all(map(lt, tokens, tokens[1:]))


def row_bytes(texts: Sequence[str]) -> int:
    """Return about how many bytes of memory rows take."""
    return sum(map(len, texts)) + _ROW_BYTES * len(texts)


def fact_bytes(facts: Sequence[Fact]) -> int:
    """Return about how many bytes of memory facts take, rows and all: what bounds are counted in."""
    return row_bytes(texts_of(facts)) + _FACT_BYTES * len(facts)
