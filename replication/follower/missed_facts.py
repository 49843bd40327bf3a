"""Missed facts of followed writers; the last source is the HTTP of the process that sent the writer's last POSITION."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from msgspec.structs import replace
from twisted.logger import Logger, LogLevel

from replication.errors import FactsGoneError
from replication.streams.access_tokens import hide_access_tokens
from replication.streams.definitions import CACHES
from replication.streams.interfaces import Page
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable

    from replication.follower.catch_up import CatchUpSources
    from replication.follower.doubts import FactCount
    from replication.follower.history import FollowedHistories
    from replication.follower.links import FollowedLinks
    from replication.follower.relay import Relay
    from replication.streams.cursor import CatchUp
    from replication.streams.history import History
    from replication.web.client import HttpCatchUp
    from replication.wire.grammar import InstanceName, StreamName


@attrs.define(eq=False, repr=False, kw_only=True)
class MissedFacts:
    """What the sources have of followed writers.

    Args:
        sources: are asked.
        links: have the endpoint of each writer.
        skip_gone: whether to go on where the writer has deleted facts that were not applied here.
        access_tokens: that of ``StreamFollower``.
        clear_caches: is called where facts of the caches stream are left out.
        relay: publishes what is followed; None if nothing is relayed.

    """

    log = Logger()

    sources: CatchUpSources
    _links: FollowedLinks
    _skip_gone: bool
    _access_tokens: bool
    _clear_caches: Callable[[], object]
    _relay: Relay | None

    async def fetch(
        self,
        stream: StreamName,
        writer: InstanceName,
        step: CatchUp,
        limit: int,
        *,
        histories: FollowedHistories | None,
        stores_position: bool,
    ) -> Page:
        """Return a page for a follower of this process; CatchUpError if no source has it.

        ``histories`` are those of the stream.  Facts that are gone raise FactsGoneError only if this process
        ``stores_position``, as it applies or copies the facts: otherwise the application lacks nothing.
        """
        followed = () if histories is None else await histories.followed(writer)
        try:
            return await self.sources.fetch(
                self._links.endpoint(stream, writer), stream, writer, step, limit, followed=followed
            )
        except FactsGoneError as error:
            if error.upto is None:  # they are not deleted: no source will ever have them
                raise
            if stores_position and not self._skip_gone:
                raise
            upto = min(Token(error.upto), step.upto)
            if stream == CACHES:
                self._clear_caches()  # any entry may be among those that were invalidated
            if self._relay is not None:
                self._relay.left_out((stream, writer), upto)
            self.log.emit(
                LogLevel.error if stores_position else LogLevel.info,
                "{stream}: facts of {writer} after {after} up to {upto} are gone, and are left out here",
                stream=stream,
                writer=writer,
                after=step.after,
                upto=upto,
            )
            return Page((), upto, limited=upto < step.upto, left_out=True)

    async def page(self, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int) -> Page:
        """Return a page of facts that are not stored here, for a follower of a relay or for a viewer.

        CatchUpError: no source has it.
        """
        page = await self.sources.page(self._links.endpoint(stream, writer), stream, writer, step, limit)
        return page if self._access_tokens else replace(page, facts=hide_access_tokens(stream, page.facts))

    async def history(self, stream: StreamName, writer: InstanceName) -> History:
        """Return the history of a writer; CatchUpError if a source fails and none has it."""
        return await self.sources.history(self._links.endpoint(stream, writer), stream, writer)

    async def count(
        self, stream: StreamName, writer: InstanceName, history: History, *, after: Token, upto: Token
    ) -> FactCount | None:
        """Return the count of a writer's facts in a range, as ``CatchUpSources.count`` does."""
        return await self.sources.count(
            self._links.endpoint(stream, writer), stream, writer, history, after=after, upto=upto
        )

    def over_http(self) -> list[HttpCatchUp]:
        """Return the HTTP of the writers, or of the relays, that are followed."""
        return self.sources.over_http_of(self._links.endpoints.values())
