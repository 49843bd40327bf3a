"""What several writers have written since a token, in the order of their IDs (``protocol``, F6)."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Protocol

import attrs

from replication.streams.facts import fact_bytes
from replication.streams.positions import MultiWriterToken
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.streams.facts import Fact
    from replication.streams.seams import Page
    from replication.wire.grammar import InstanceName, StreamName

_NEVER: Final = Token(2**63 - 1)  # the largest token that there can be
MAX_BYTES: Final = 8 * 2**20


class Fetch(Protocol):
    """Where pages of one writer come from: what ``ICatchUp.facts`` is."""

    async def __call__(
        self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int
    ) -> Page:
        """Return a page."""
        ...


@attrs.frozen
class Written:
    """A fact, and who wrote it."""

    writer: InstanceName
    fact: Fact

    @property
    def token(self) -> Token:
        """The fact's."""
        return self.fact.token


@attrs.frozen
class Since:
    """Facts in ascending order; all of every writer up to its place in ``upto`` are here, or were there before.

    ``limited`` says that there is more already.
    """

    written: Sequence[Written]
    upto: MultiWriterToken
    limited: bool


async def facts_since(
    fetch: Fetch,
    stream: StreamName,
    after: MultiWriterToken,
    positions: Mapping[InstanceName, Token],
    *,
    limit: int,
    max_bytes: int = MAX_BYTES,
) -> Since:
    """Return what lies between ``after`` and each writer's position: about ``limit`` rows and so many bytes of it.

    A fact is never cut, and one comes always, if there is any.  It raises what ``fetch`` does.
    """
    pages = {
        writer: await fetch(stream, writer, after=after.of(writer), upto=position, limit=limit)
        for writer, position in positions.items()
        if after.of(writer) < position
    }
    floor = min([page.upto for page in pages.values() if page.limited], default=_NEVER)
    found = [Written(writer, fact) for writer, page in pages.items() for fact in page.facts if fact.token <= floor]
    found.sort(key=attrgetter("token"))
    rows = [*accumulate(len(each.fact.texts) for each in found)]
    size = [*accumulate(fact_bytes([each.fact]) for each in found)]
    count = max(1, min(bisect_right(rows, limit), bisect_right(size, max_bytes)))
    if count < len(found):
        floor = found[count - 1].token
        count = bisect_right(found, floor, key=attrgetter("token"))
    places = {writer: max(after.of(writer), min(position, floor)) for writer, position in positions.items()}
    start = min([*places.values()], default=after.stream)
    return Since(found[:count], MultiWriterToken(start, {**after.ahead, **places}), limited=floor < _NEVER)
