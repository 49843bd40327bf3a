"""How far a stream of several writers has got, and the tokens that say so (``protocol``, F3, F4 and F6)."""

from __future__ import annotations

import re
from heapq import heappop, heappush
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Self

import attrs

from replication.errors import RemoteProtocolError, StreamError
from replication.wire import grammar
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from replication.wire.grammar import InstanceName

_TOKEN: Final = re.compile(
    r"s?(?P<plain>[0-9]{1,19})|m(?P<stream>[0-9]{1,19})(?P<ahead>(?:~(?:[0-9]{1,19}\.[0-9]{1,19})?)*)", re.ASCII
)
_MAX_KNOWN: Final = 100_000  # complete IDs that are remembered, some 10 MB


class Positions:
    """Each writer's position, as a reader knows them; none of them ever goes back.

    ``persisted_upto`` is the linear current ID: every smaller ID, whoever has it, is known to be complete.
    """

    def __init__(self, positions: Mapping[InstanceName, Token], persisted_upto: Token | None = None) -> None:
        """Begin with what was stored; ``persisted_upto`` is the smallest of ``positions`` unless one knows better."""
        self._positions = dict(positions)
        self._known: list[Token] = []  # a heap of complete IDs above persisted_upto
        self.persisted_upto = persisted_upto if persisted_upto is not None else self.minimum

    @property
    def minimum(self) -> Token:
        """The position of the writer that is least far; 0 if there are none."""
        return min(self._positions.values(), default=Token(0))

    @property
    def maximum(self) -> Token:
        """The position of the writer that is furthest; 0 if there are none."""
        return max(self._positions.values(), default=Token(0))

    def of(self, writer: InstanceName) -> Token:
        """Return how far ``writer`` has got; one that was never heard of stands where all others have been."""
        return max(self._positions.get(writer, self.persisted_upto), self.persisted_upto)

    def advance(self, writer: InstanceName, upto: Token, ids: Iterable[Token] = ()) -> None:
        """Note that all IDs of ``writer`` up to ``upto`` are complete, and that ``ids`` are among them.

        A POSITION names no ID of its writer, so it comes without ``ids``.
        """
        self._positions[writer] = max(upto, self._positions.get(writer, upto))
        reached = max(self.persisted_upto, self.minimum)
        for each in ids:
            heappush(self._known, each)
        if len(self._known) > _MAX_KNOWN:
            self._known.clear()  # a writer is far behind: the minimum will do until it comes on
        while self._known and self._known[0] <= reached + 1:
            reached = max(reached, heappop(self._known))
        self.persisted_upto = reached

    def token(self) -> MultiWriterToken:
        """Return all of this as a token."""
        return MultiWriterToken(self.persisted_upto, self._positions)


@attrs.frozen(hash=False)
class MultiWriterToken:
    """A place in a stream of several writers: all of them are at ``stream``, but for those who are ``ahead`` of it.

    Entries of ``ahead`` at or below ``stream`` say nothing and are left out, wherever they come from (trap 42).
    """

    stream: Token
    ahead: Mapping[InstanceName, Token] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Leave out who is not ahead."""
        ahead = {writer: place for writer, place in self.ahead.items() if place > self.stream}
        object.__setattr__(self, "ahead", MappingProxyType(ahead))

    @classmethod
    def parse(cls, text: str, names: Mapping[int, InstanceName]) -> Self:
        """Read ``5``, ``s5`` or ``m5~1.7~2.9``, where ``names`` tells who 1 and 2 are; StreamError if it is neither."""
        match = _TOKEN.fullmatch(text)
        if match is None:
            raise StreamError(f"not a token: {text[:100]!r}")
        try:
            entries = (entry.split(".") for entry in (match["ahead"] or "").split("~") if entry)
            ahead = {names[int(number)]: grammar.token(place) for number, place in entries}
            return cls(grammar.token(match["plain"] or match["stream"]), ahead)
        except (KeyError, RemoteProtocolError) as error:
            raise StreamError(f"not a token of a stream of {len(names)} writers: {text[:100]!r}") from error

    def spell(self, numbers: Mapping[InstanceName, int], *, room: bool = False) -> str:
        """Return the text, where ``numbers`` tells the writers' numbers; a room's plain token begins with an ``s``."""
        if not self.ahead:
            return f"s{self.stream}" if room else str(self.stream)
        places = sorted((numbers[writer], place) for writer, place in self.ahead.items())
        return "~".join([f"m{self.stream}", *(f"{number}.{place}" for number, place in places)])

    def of(self, writer: InstanceName | None) -> Token:
        """Return the place of ``writer``; None, as old rows have it, is nobody who is ahead."""
        return self.stream if writer is None else self.ahead.get(writer, self.stream)

    @property
    def maximum(self) -> Token:
        """The place of whoever is furthest."""
        return max(self.ahead.values(), default=self.stream)

    def __le__(self, other: MultiWriterToken) -> bool:
        """Whether no writer has got further here than in ``other``: a partial order, so both ways may be false."""
        return self.stream <= other.stream and all(self.of(each) <= other.of(each) for each in self._writers(other))

    def advanced(self, other: MultiWriterToken) -> MultiWriterToken:
        """Return the first token that both lie before."""
        ahead = {writer: max(self.of(writer), other.of(writer)) for writer in self._writers(other)}
        return MultiWriterToken(max(self.stream, other.stream), ahead)

    def bounded(self, upto: Token) -> MultiWriterToken:
        """Return the part of this that lies at or before ``upto`` for every writer."""
        ahead = {writer: min(place, upto) for writer, place in self.ahead.items()}
        return MultiWriterToken(min(self.stream, upto), ahead)

    def covers(self, writer: InstanceName | None, token: Token, *, after: MultiWriterToken) -> bool:
        """Whether a row of ``writer`` at ``token`` lies between ``after``, exclusive, and here, inclusive."""
        return after.of(writer) < token <= self.of(writer)

    def _writers(self, other: MultiWriterToken) -> set[InstanceName]:
        return {*self.ahead, *other.ahead}


def token_of(positions: Mapping[InstanceName, Token]) -> MultiWriterToken:
    """Return the token of so many writers' positions: the smallest, and who is ahead of it."""
    return MultiWriterToken(min(positions.values(), default=Token(0)), positions)
