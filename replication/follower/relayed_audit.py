"""The audit of a worker behind a relay: what it has applied is compared with what the relay has.

A relay compares with the database of the writers.  It applies a fact that was lost below its position, so no follower
receives it in order.  ``/v1/streams`` of the relay counts such facts, and has the ID up to which none can be found any
more (docs/how-to/relay.md, Lost facts).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import attrs
from twisted.internet import defer
from twisted.internet.defer import Deferred

from replication.deferreds import Lock
from replication.errors import CatchUpError, ReplicationError
from replication.follower.audit import Audit
from replication.net.endpoints import is_redis
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from replication.deferreds import Lifetime
    from replication.follower.stream import StreamFollower
    from replication.net.links import IWriterLink
    from replication.streams.interfaces import Page
    from replication.web.client import AuditedWriter, HttpCatchUp

PATIENCE: Final = 2.0  # seconds for which facts of a new connection wait for the answer of a relay
PAGE_ROWS: Final = 10_000


@attrs.define
class _Relay:
    """The last answer of a relay, or of a master, which compares nothing; ``streams`` is None if there was none."""

    connection: int
    http: HttpCatchUp | None = None
    streams: Mapping[StreamName, Mapping[InstanceName, AuditedWriter]] | None = None

    def audits(self, stream: StreamName) -> bool:
        """Whether facts of a stream are compared there."""
        return any(each.audited is not None for each in (self.streams or {}).get(stream, {}).values())

    @property
    def audits_any(self) -> bool:
        return any(map(self.audits, self.streams or ()))


@attrs.define(eq=False, repr=False, kw_only=True)
class RelayedAudit:
    """What relays have compared: the source of an ``Audit`` behind them.

    Args:
        over_http: returns the HTTP sources for an endpoint.
        links: to the relays.
        endpoints: which link has sent the POSITION of a writer.
        followers: of all streams.
        lifetime: of this process.
        interval: seconds between two comparisons; they begin once a relay is found that compares facts.

    """

    name = "the relay"

    _over_http: Callable[[str], Sequence[HttpCatchUp]]
    _links: Iterable[IWriterLink]
    _endpoints: Mapping[InstanceName, str]
    _followers: Iterable[StreamFollower]
    _lifetime: Lifetime
    _interval: float
    audit: Audit | None = attrs.field(init=False, default=None)
    _relays: dict[str, _Relay] = attrs.field(init=False, factory=dict)  # by endpoint
    _lock: Lock = attrs.field(init=False, factory=Lock)

    async def confirm(self, follower: StreamFollower, writer: InstanceName) -> None:
        """Begin or end the audit of a stream, before facts of a new connection are applied.

        A relay that does not answer within PATIENCE changes nothing: it is asked again by the audit.
        """
        endpoint = self._endpoints.get(writer)
        for link in self._links:
            if link.endpoint == endpoint and not is_redis(link.endpoint):
                await self._ask_in_time(link, follower.name, writer)
                await self._begin_or_end(follower, link.endpoint)

    def following(self, link: IWriterLink) -> None:
        """Ask the peer of a new connection what it compares."""
        if not is_redis(link.endpoint):
            asking = self._lifetime.add(Deferred.fromCoroutine(self._ask_and_begin(link)))
            asking.addErrback(lambda failure: failure.trap(ReplicationError, defer.CancelledError))

    # ---- the source of an audit

    def audits(self, stream: StreamName) -> bool:
        """Whether a relay compares facts of a stream."""
        return any(each.audits(stream) for each in self._relays.values())

    def stores_positions(self, _stream: StreamName) -> bool:
        """Whether there are stored positions: a relay publishes its positions, and none is lost."""
        return False

    def state(self, stream: StreamName, writer: InstanceName, position: Token) -> object:
        """Return what changes whenever the relay has applied lost facts; None if that cannot be known.

        A follower that is below the relay's position may still pass over such a fact.
        """
        relay, found = self._of(stream, writer)
        if relay is None or found is None or position < found.position:
            return None
        return relay.connection, found.late

    def settled(self, stream: StreamName, writer: InstanceName) -> Token:
        """Return the ID up to which the relay finds no lost fact any more."""
        _, found = self._of(stream, writer)
        return Token(0) if found is None or found.audited is None else found.audited

    async def stored_positions(self) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Ask the relays, and return nothing: they compare with the positions; CatchUpError if one does not answer."""
        for link in self._links:
            if link.peer is None or is_redis(link.endpoint):
                continue
            if self._is_old(link):
                await self._ask(link)
            for follower in self._followers:
                await self._begin_or_end(follower, link.endpoint)
        return {}

    async def newest(self, _stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return nothing, as ``stored_positions``."""
        return {}

    async def last_row(self, _stream: StreamName) -> Token:
        """Return nothing, as ``stored_positions``."""
        return Token(0)

    def keeps_rows(self, _stream: StreamName) -> bool:
        """Return False, as ``is_primary``."""
        return False

    async def is_primary(self) -> bool:
        """Return False: a relay that goes back closes its connections, and then sends its lower position."""
        return False

    async def present(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token) -> set[Token]:
        """Return the tokens of ``writer`` with ``after < token <= upto`` that the relay has."""
        tokens = set[Token]()
        while after < upto:
            page = await self.facts(stream, writer, after=after, upto=upto, limit=PAGE_ROWS)
            tokens.update(fact.token for fact in page.facts)
            if page.upto <= after:
                break
            after = page.upto
        return tokens

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return a page of the relay; CatchUpError if it does not answer."""
        relay, _ = self._of(stream, writer)
        if relay is None or relay.http is None:
            raise CatchUpError(f"no relay compares facts of {writer}")
        return await relay.http.facts(stream, writer, after=after, upto=upto, limit=limit)

    # ---- inside

    async def _ask_and_begin(self, link: IWriterLink) -> None:
        async with self._lock:
            if self._is_old(link):
                await self._ask(link)
        for follower in self._followers:
            await self._begin_or_end(follower, link.endpoint)

    def _of(self, stream: StreamName, writer: InstanceName) -> tuple[_Relay | None, AuditedWriter | None]:
        relay = self._relays.get(self._endpoints.get(writer, ""))
        return relay, None if relay is None else (relay.streams or {}).get(stream, {}).get(writer)

    def _is_old(self, link: IWriterLink) -> bool:
        """Whether to ask a peer of whom what is known may have changed."""
        relay = self._relays.get(link.endpoint)
        if relay is None or relay.connection != link.connections or relay.audits_any:
            return True
        return relay.http is None or any(
            self._endpoints.get(writer) == link.endpoint and self._is_new(relay, follower.name, writer)
            for follower in self._followers
            for writer in follower.cursors
        )

    def _is_new(self, relay: _Relay, stream: StreamName, writer: InstanceName) -> bool:
        """Whether a peer has named a writer only after its last answer; a Synapse answers nothing."""
        return relay.streams is not None and writer not in relay.streams.get(stream, {})

    async def _begin_or_end(self, follower: StreamFollower, endpoint: str) -> None:
        relay = self._relays.get(endpoint)
        if relay is None:
            return
        if relay.audits(follower.name):
            await _begin(follower)
            follower.audit_known = True
            return
        if relay.streams is None:  # a Synapse
            follower.audit_known = True
            return
        named = relay.streams.get(follower.name, {})
        writers = [each for each in follower.cursors if self._endpoints.get(each) == endpoint]
        if writers and all(each in named for each in writers):  # a relay that has just started may not name them yet
            follower.audit_known = True
            if len(writers) == len(follower.cursors):
                await _end(follower)

    async def _ask_in_time(self, link: IWriterLink, stream: StreamName, writer: InstanceName) -> None:
        """Ask unless it is known on this connection; wait for the answer for PATIENCE seconds."""
        if not self._lock.locked and self._knows(link, stream, writer):
            return
        asking: Deferred[Any] = self._lifetime.add(Deferred.fromCoroutine(self._ask_once(link, stream, writer)))
        with suppress(CatchUpError, defer.TimeoutError):
            await asking.addTimeout(PATIENCE, self._lifetime.clock)

    async def _ask_once(self, link: IWriterLink, stream: StreamName, writer: InstanceName) -> None:
        async with self._lock:
            if not self._knows(link, stream, writer):
                await self._ask(link)

    def _knows(self, link: IWriterLink, stream: StreamName, writer: InstanceName) -> bool:
        """Whether a peer has answered on this connection, and has named a writer."""
        relay = self._relays.get(link.endpoint)
        return relay is not None and relay.connection == link.connections and not self._is_new(relay, stream, writer)

    async def _ask(self, link: IWriterLink) -> None:
        """Ask a peer; CatchUpError if it compared facts before, and does not answer."""
        connection, error = link.connections, CatchUpError(f"no HTTP is known for {link.endpoint}")
        for http in self._over_http(link.endpoint):
            try:
                relay = _Relay(connection, http, await http.audited())
            except CatchUpError as failed:
                error = failed
                continue
            self._relays[link.endpoint] = relay
            if relay.audits_any and self.audit is None:
                self.audit = Audit(
                    source=self,
                    followers=self._followers,
                    links=self._links,
                    lifetime=self._lifetime,
                    interval=self._interval,
                )
                self.audit.start()
            return
        before = self._relays.get(link.endpoint)
        if before is not None and before.audits_any:
            raise error
        self._relays[link.endpoint] = _Relay(connection)


async def _begin(follower: StreamFollower) -> None:
    """Note from now on which facts are applied, to compare them."""
    async with follower.lock:
        if not follower.audited and follower.known is not None:
            follower.checked = await follower.known.begin_audit(follower.all_positions())
            follower.audited = True


async def _end(follower: StreamFollower) -> None:
    """Note no longer which facts are applied: there is nothing to compare with."""
    async with follower.lock:
        if follower.audited and follower.known is not None:
            follower.audited = False
            await follower.known.end_audit()
