"""Tokens that hold the positions of several writers (docs/protocol/ids.md F6)."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Self

import attrs

from replication.errors import RemoteProtocolError, StreamError
from replication.wire import grammar
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.wire.grammar import InstanceName

_TOKEN: Final = re.compile(
    r"s?(?P<plain>[0-9]{1,19})|m(?P<stream>[0-9]{1,19})(?P<ahead>(?:~(?:[0-9]{1,19}\.[0-9]{1,19})?)*)", re.ASCII
)


@attrs.frozen(hash=False)
class MultiWriterToken:
    """A position in a stream of several writers: ``stream`` for every writer that is not in ``ahead``.

    Entries of ``ahead`` that are not above ``stream`` are removed (docs/protocol/traps.md 42).
    """

    stream: Token
    ahead: Mapping[InstanceName, Token] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Remove entries that are not ahead."""
        ahead = {writer: place for writer, place in self.ahead.items() if place > self.stream}
        object.__setattr__(self, "ahead", MappingProxyType(ahead))

    @classmethod
    def parse(cls, text: str, names: Mapping[int, InstanceName]) -> Self:
        """Return the token in ``5``, ``s5`` or ``m5~1.7~2.9``; StreamError if it is none.

        ``names`` has the writers by their numbers, here 1 and 2.
        """
        match = _TOKEN.fullmatch(text)
        if match is None:
            raise StreamError(f"not a token: {text[:100]!r}")
        try:
            entries = (entry.split(".") for entry in (match["ahead"] or "").split("~") if entry)
            ahead = {names[int(number)]: grammar.token(place) for number, place in entries}
            return cls(grammar.token(match["plain"] or match["stream"]), ahead)
        except KeyError as error:
            raise StreamError(
                f"not a token of this database, which has no writer number {error}: {text[:100]!r}"
            ) from error
        except RemoteProtocolError as error:
            raise StreamError(f"not a token: {text[:100]!r}") from error

    def encode(self, numbers: Mapping[InstanceName, int], *, room: bool = False) -> str:
        """Return the text of the token; a plain token of a ``room`` begins with ``s``.

        ``numbers`` has the writers' numbers.
        """
        if not self.ahead:
            return f"s{self.stream}" if room else str(self.stream)
        places = sorted((numbers[writer], place) for writer, place in self.ahead.items())
        return "~".join([f"m{self.stream}", *(f"{number}.{place}" for number, place in places)])

    def of(self, writer: str | None) -> Token:
        """Return the position of ``writer``; for None, the writer of old rows, the position of all writers."""
        return self.stream if writer is None else self.ahead.get(grammar.InstanceName(writer), self.stream)

    @property
    def maximum(self) -> Token:
        """The highest position of a writer."""
        return max(self.ahead.values(), default=self.stream)

    def __le__(self, other: MultiWriterToken) -> bool:
        """Return whether every writer's position is at most that in ``other``.

        This is a partial order: it may be false in both directions.
        """
        return self.stream <= other.stream and all(self.of(each) <= other.of(each) for each in self._writers(other))

    def advanced(self, other: MultiWriterToken) -> MultiWriterToken:
        """Return the token with the higher position of each writer."""
        ahead = {writer: max(self.of(writer), other.of(writer)) for writer in self._writers(other)}
        return MultiWriterToken(max(self.stream, other.stream), ahead)

    def bounded(self, upto: Token) -> MultiWriterToken:
        """Return the token with each writer's position lowered to ``upto``."""
        ahead = {writer: min(place, upto) for writer, place in self.ahead.items()}
        return MultiWriterToken(min(self.stream, upto), ahead)

    def covers(self, writer: InstanceName | None, token: Token, *, after: MultiWriterToken) -> bool:
        """Return whether a row of ``writer`` at ``token`` is above ``after`` and not above this token."""
        return after.of(writer) < token <= self.of(writer)

    def _writers(self, other: MultiWriterToken) -> set[InstanceName]:
        return {*self.ahead, *other.ahead}


def token_of(positions: Mapping[InstanceName, Token]) -> MultiWriterToken:
    """Return the token of these positions."""
    return MultiWriterToken(min(positions.values(), default=Token(0)), positions)
