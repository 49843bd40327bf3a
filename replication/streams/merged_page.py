"""Pages of several writers' facts since a token, in linear order (docs/protocol/ids.md F6)."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from replication.errors import FactsGoneError
from replication.streams.facts import fact_bytes
from replication.streams.positions import MultiWriterToken
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from replication.streams.facts import Fact
    from replication.streams.interfaces import Page
    from replication.wire.grammar import StreamName

_MAX_TOKEN: Final = Token(2**63 - 1)
MAX_BYTES: Final = 8 * 2**20
BEGIN_AFTER: Final = "begin after {upto}"  # where a page of one writer may begin once facts are gone
GO_ON_WITH: Final = "go on with since={since}"  # the same for pages of all writers


class Fetch(Protocol):
    """A function that returns pages of one writer, like ``ICatchUp.facts``."""

    async def __call__(
        self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int
    ) -> Page:
        """Return a page."""
        ...


class WrittenFact(msgspec.Struct, frozen=True):
    """A fact and its writer."""

    writer: InstanceName
    fact: Fact

    @property
    def token(self) -> Token:
        """The token of the fact."""
        return self.fact.token


class MergedPage(msgspec.Struct, frozen=True):
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
    # The source of a relay may lag: its page then ends before the position, and is not limited.
    ends = [page.upto for writer, page in pages.items() if page.limited or page.upto < positions[writer]]
    floor = min(ends, default=_MAX_TOKEN)
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


async def read_page_since(
    encode: Callable[[MultiWriterToken], Awaitable[str]],
    fetch: Fetch,
    stream: StreamName,
    after: MultiWriterToken,
    positions: Mapping[InstanceName, Token],
    **options: Any,
) -> tuple[MergedPage, str]:
    """Return a page of all writers, as ``read_merged_page`` with ``options``, and the text of the token at its end.

    ``encode`` returns the text of a token.  FactsGoneError: facts are gone; its ``since`` and its message have the
    token with which to go on without them.  To begin after ``upto`` would leave out facts of other writers, too.
    """
    try:
        page = await read_merged_page(fetch, stream, after, positions, **options)
    except FactsGoneError as error:
        if error.writer is None or error.upto is None:
            raise
        gone = MultiWriterToken(Token(0), {InstanceName(error.writer): Token(error.upto)})
        since = await encode(after.advanced(gone))
        # The message of a relay's source has the same words.
        text = str(error).replace(BEGIN_AFTER.format(upto=error.upto), GO_ON_WITH.format(since=since))
        raise FactsGoneError(text, stream=error.stream, writer=error.writer, upto=error.upto, since=since) from error
    return page, await encode(page.upto)
