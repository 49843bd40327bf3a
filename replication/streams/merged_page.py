"""Pages of several writers' facts since a token, in linear order (docs/protocol/ids.md F6)."""

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
    from replication.streams.interfaces import Page
    from replication.wire.grammar import InstanceName, StreamName

_MAX_TOKEN: Final = Token(2**63 - 1)
MAX_BYTES: Final = 8 * 2**20


class Fetch(Protocol):
    """A function that returns pages of one writer, like ``ICatchUp.facts``."""

    async def __call__(
        self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int
    ) -> Page:
        """Return a page."""
        ...


@attrs.frozen
class WrittenFact:
    """A fact and its writer."""

    writer: InstanceName
    fact: Fact

    @property
    def token(self) -> Token:
        """The token of the fact."""
        return self.fact.token


@attrs.frozen
class MergedPage:
    """Facts of several writers, ascending by token, and ``upto``, the token after which the next page begins.

    All facts between the requested token and ``upto`` are here.  ``limited`` if there are more above.
    """

    written: Sequence[WrittenFact]
    upto: MultiWriterToken
    limited: bool


async def read_merged_page(
    fetch: Fetch,
    stream: StreamName,
    after: MultiWriterToken,
    positions: Mapping[InstanceName, Token],
    *,
    limit: int,
    max_bytes: int = MAX_BYTES,
    all_known: bool = True,
) -> MergedPage:
    """Return the facts between ``after`` and each writer's position: about ``limit`` rows, at most about ``max_bytes``.

    Facts are whole, and there is at least one if any exists.  Without ``all_known``, there may be writers without a
    position, so the first number of the token stays.  Errors of ``fetch`` are passed on.
    """
    pages = {
        writer: await fetch(stream, writer, after=after.of(writer), upto=position, limit=limit)
        for writer, position in positions.items()
        if after.of(writer) < position
    }
    floor = min([page.upto for page in pages.values() if page.limited], default=_MAX_TOKEN)
    found = [WrittenFact(writer, fact) for writer, page in pages.items() for fact in page.facts if fact.token <= floor]
    found.sort(key=attrgetter("token"))
    rows = [*accumulate(len(each.fact.texts) for each in found)]
    size = [*accumulate(fact_bytes([each.fact]) for each in found)]
    count = max(1, min(bisect_right(rows, limit), bisect_right(size, max_bytes)))
    if count < len(found):
        floor = found[count - 1].token
        count = bisect_right(found, floor, key=attrgetter("token"))
    places = {writer: max(after.of(writer), min(position, floor)) for writer, position in positions.items()}
    start = min([*places.values()], default=after.stream) if all_known else after.stream
    return MergedPage(found[:count], MultiWriterToken(start, {**after.ahead, **places}), limited=floor < _MAX_TOKEN)
