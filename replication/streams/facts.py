"""Facts, and fast functions over many of them.  A fact is one token with all its rows."""

from __future__ import annotations

from functools import partial
from itertools import chain, groupby
from operator import itemgetter, lt
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from replication.errors import RowError
from replication.wire import grammar
from replication.wire.grammar import EXPONENT_VALUES, MAX_VALUES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from replication.wire.grammar import Token

_FACT_BYTES: Final = 128  # a fact and its tuple of texts, without them (CPython 3.11, 64 bits)
MAX_FACT_ROWS: Final = 1_000_000
MAX_FACT_BYTES: Final = 64 * 2**20  # as a page has them: [token,row],
_SMALL: Final = MAX_VALUES  # so many characters have no more values, also if each number has an exponent
BYTES_IN_PAGE: Final = 24  # of a row in a page, beside its text
_ROW_BYTES: Final = 64  # a str without its characters, and the pointer to it


class Fact(NamedTuple):
    """All rows of one token.

    ``texts`` are the rows as JSON text, as they were encoded when the fact was written.  ``rows`` decodes them, at each
    use.  A fact may have no rows.
    """

    token: Token
    texts: tuple[str, ...]

    @property
    def rows(self) -> list[Any]:
        """The rows, decoded."""
        return grammar.read_rows(self.texts)


# Fact._make without its check of the length, which takes two thirds of a follower's time for a row.
_make_fact = cast("Callable[[tuple[Token, tuple[str, ...]]], Fact]", partial(tuple.__new__, Fact))


def facts_of(tokens: Iterable[Token], texts: Iterable[tuple[str, ...]]) -> list[Fact]:
    """Return one fact for each token and tuple of rows."""
    return list(map(_make_fact, zip(tokens, texts, strict=True)))


def facts_of_rows(tokens: Sequence[Token], texts: Sequence[str]) -> list[Fact]:
    """Return one fact for each token and its single row."""
    return facts_of(tokens, zip(texts, strict=True))


def gather(tokens: Sequence[Token], texts: Sequence[str]) -> list[Fact]:
    """Return the facts of rows that are sorted by token: ``texts[i]`` is a row of the fact ``tokens[i]``."""
    if len(set(tokens)) == len(tokens):
        return facts_of_rows(tokens, texts)
    rows = groupby(zip(tokens, texts, strict=True), itemgetter(0))
    return [Fact(token, tuple([text for _, text in group])) for token, group in rows]


def tokens_of(facts: Iterable[Fact]) -> list[Token]:
    """Return each fact's token."""
    return list(map(itemgetter(0), facts))


def texts_of(facts: Iterable[Fact]) -> list[str]:
    """Return the rows of all facts in one list."""
    return list(chain.from_iterable(map(itemgetter(1), facts)))


def count_rows(facts: Iterable[Fact]) -> int:
    """Return the number of rows of all facts."""
    return sum(map(len, map(itemgetter(1), facts)))


def is_ascending(tokens: Sequence[Token]) -> bool:
    """Return whether each token is larger than the one before it."""
    return all(map(lt, tokens, tokens[1:]))


def check_size(texts: Sequence[str]) -> None:
    """Raise RowError if rows are too much for one fact (docs/configuration.md, Fixed limits)."""
    if len(texts) == 1 and len(texts[0]) < _SMALL:  # the usual case
        return
    check_rows(len(texts))
    size = sum(map(len, texts)) + BYTES_IN_PAGE * len(texts)
    if size > MAX_FACT_BYTES:
        found, most, unit = size, MAX_FACT_BYTES, "bytes"
    elif size > _SMALL and (values := _count_values(texts)) > MAX_VALUES:
        found, most, unit = values, MAX_VALUES, "values"
    else:
        return
    raise _too_large(found, most, unit)


def _count_values(texts: Sequence[str]) -> int:
    return grammar.count_values(",".join(texts).encode(), EXPONENT_VALUES) + 1 - len(texts)


def check_rows(count: int) -> None:
    """Raise RowError if ``count`` rows are too many for one fact."""
    if count > MAX_FACT_ROWS:
        raise _too_large(count, MAX_FACT_ROWS, "rows")


def _too_large(found: int, most: int, unit: str) -> RowError:
    return RowError(f"a fact has {most} {unit} at most, and this one has {found}: write several facts")


def row_bytes(texts: Sequence[str]) -> int:
    """Return the approximate memory of rows, in bytes."""
    return sum(map(len, texts)) + _ROW_BYTES * len(texts)


def fact_bytes(facts: Sequence[Fact]) -> int:
    """Return the approximate memory of facts with their rows, in bytes."""
    return row_bytes(texts_of(facts)) + _FACT_BYTES * len(facts)
