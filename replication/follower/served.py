"""What the HTTP API shows of a worker: its copies, what it writes itself, statuses, metrics (docs/http.md)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import attrs
from msgspec.structs import replace

from replication.errors import NotAWriterError, StoreError, StreamError, UnknownStreamError
from replication.follower.one_writer import own_part
from replication.follower.stream import FollowMode, StreamFollower
from replication.follower.streams import UNKNOWN
from replication.streams.cursor import CatchUp
from replication.streams.definitions import CACHES, StreamDefinition
from replication.streams.interfaces import IStreamStore, Page, PeerStatus, Sample, StreamStatus
from replication.streams.merged_page import read_page_since
from replication.streams.positions import MultiWriterToken, token_of
from replication.wire import grammar
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from twisted.internet.protocol import Factory

    from replication.caches import Caches
    from replication.deferreds import Lifetime
    from replication.follower.relay import RelayServer
    from replication.follower.streams import FollowedStreams
    from replication.net.access import Access
    from replication.net.links import IWriterLink
    from replication.presence.reporter import PresenceReporter
    from replication.storage.tables.instances import TokenCodec
    from replication.streams.history import History
    from replication.streams.merged_page import MergedPage
    from replication.streams.retention import SegmentChain
    from replication.web.followers import IFollowers
    from replication.web.skips import ISkips
    from replication.web.synapse_requests import SynapseRequests
    from replication.wire.commands import UserIp
    from replication.writer.master import Master
    from replication.writer.served import WrittenStreams


@attrs.define(eq=False, repr=False, kw_only=True)
class ServedStreams:
    """The streams that a worker follows and writes, for ``web.site``.

    ``master`` is the part that writes; None if this worker writes no stream.  ``relay_server`` is the part that serves
    followers where there is no such master; None if there is, or if nothing is relayed.  ``rows`` are the names of
    the fields of streams that are described.  ``reports`` takes those of followers.  ``skips`` are facts that functions
    cannot take.
    """

    role = "worker"

    server_name: str
    instance_name: InstanceName
    synapse_requests: SynapseRequests
    _store: IStreamStore
    _followed: FollowedStreams
    _rows: Mapping[StreamName, Sequence[str] | None]
    _clients: Sequence[IWriterLink]
    _faults: Counter[str]
    _caches: Caches
    _reporter: PresenceReporter
    _tokens: TokenCodec
    _master: Master | None
    relay_server: RelayServer | None
    _reports: IFollowers | None
    _lifetime: Lifetime
    skips: ISkips | None
    trouble: Exception | None = attrs.field(init=False, default=None)  # why the last start failed

    @property
    def followers(self) -> IFollowers | None:
        """What takes the reports of followers; None if this worker neither writes nor relays a stream."""
        return self._reports

    def writer(self, stream: str | None = None) -> Master:
        """Return the part that writes; NotAWriterError if there is none."""
        if self._master is None:
            other = "" if stream is None else f"append to {stream[:100]!r} at its writer, or "
            raise NotAWriterError(
                f"worker {self.instance_name!r} writes no stream: {other}give writes=[…]",
                stream=stream,
                instance=self.instance_name,
            )
        return self._master

    def factory(self, access: Access | None = None) -> Factory:
        """Return the protocol factory to listen with; NotAWriterError if nothing is published here."""
        if self.relay_server is not None:
            return self.relay_server.subscribers.listener(access)
        if self._master is not None:
            return self._master.factory(access)
        raise NotAWriterError(
            f"worker {self.instance_name!r} publishes nothing: give writes=[…] or relay=True",
            instance=self.instance_name,
        )

    # ---- facts

    def stores(self, stream: str) -> bool:
        """Whether pages of ``stream`` are read from this database; a relay without a copy fetches them."""
        follower = self._followed.get(StreamName(stream))
        return self._followed.relay is None or follower is None or follower.mode is FollowMode.COPIED

    async def page(self, stream: str, writer: str | None, *, after: int, upto: int | None, limit: int) -> Page:
        """Return facts of one writer: from a copy, of a stream that is written here, or from a relay's sources."""
        master = self._writing(stream, writer)
        if master is not None:
            return await master.served.page(stream, writer, after=after, upto=upto, limit=limit)
        follower = self._readable(stream)
        if writer is None:
            if len(follower.cursors) != 1:
                raise StreamError(f"name the writer of {stream!r}: {', '.join(follower.cursors) or 'none is known'}")
            writer = next(iter(follower.cursors))
        source = grammar.instance_name(writer)
        reached = max(Token(0), follower.position(source))
        end = reached if upto is None else Token(min(upto, reached))
        if after >= end:
            return Page([], end, limited=False)
        if follower.mode is FollowMode.COPIED:
            return await self._store.facts(follower.name, source, after=Token(after), upto=end, limit=limit)
        page = await self._followed.missed.page(follower.name, source, CatchUp(Token(after), end), limit)
        return own_part(page, source, follower.positions(), end) if follower.one_writer else page

    async def shown_page(self, stream: str, writer: str, *, after: int, upto: int, limit: int) -> Page:
        """Return facts of one writer for a viewer: without a copy from a source, up to the received position."""
        follower, source = self._followed.get(StreamName(stream)), grammar.instance_name(writer)
        here = self._writing(stream, writer) is not None
        if here or follower is None or follower.mode is FollowMode.COPIED or source not in follower.cursors:
            return await self.page(stream, writer, after=after, upto=upto, limit=limit)
        end = min(Token(upto), follower.cursors[source].published)
        if after >= end:
            return Page([], end, limited=False)
        return await self._followed.missed.page(follower.name, source, CatchUp(Token(after), end), limit)

    async def history(self, stream: str, writer: str) -> History:
        """Return the epochs of one writer, from where its pages are."""
        master = self._writing(stream, writer)
        if master is not None:
            return await master.served.history(stream, writer)
        follower, source = self._readable(stream), grammar.instance_name(writer)
        if follower.mode is FollowMode.COPIED:
            return await self._store.history(follower.name, source)
        return await self._followed.missed.history(follower.name, source)

    async def since(self, stream: str, token: str, limit: int) -> tuple[MergedPage, str]:
        """Return about ``limit`` rows of all writers after ``token``, and the token that follows them."""
        master = self._writing(stream)
        if master is not None:
            return await master.served.since(stream, token, limit)
        follower = self._readable(stream)
        after = await self._tokens.read(token)
        copied, known = follower.mode is FollowMode.COPIED, follower.all_positions()
        positions = known if copied else follower.positions()  # a copy has the facts of writers that do not run
        all_known = self._followed.all_writers_known(follower) and positions.keys() == known.keys()
        options = {"limit": limit, "all_known": all_known}
        return await read_page_since(self._tokens.encode, self.page, follower.name, after, positions, **options)

    async def append_texts(self, stream: str, facts: Iterable[Sequence[object]], key: str | None) -> Sequence[Token]:
        """Append facts to a stream that is written here; NotAWriterError if none is."""
        return await self.writer(stream).served.append_texts(stream, facts, key)

    def token(self, stream: StreamName) -> MultiWriterToken:
        """Return the applied position of every writer of a stream; what is written here is applied once published."""
        follower = self._followed.get(stream)
        positions = {} if follower is None else follower.all_positions()
        if self._master is not None and stream in self._master.registry:
            written = self._master.stream(stream)
            if follower is None:
                return self._master.token(stream)
            positions |= {self.instance_name: written.published} if written.outgoing.publishes else {}
        known = follower is not None and self._followed.all_writers_known(follower)
        return token_of(positions) if known else MultiWriterToken(Token(0), positions)

    async def check(self) -> None:
        """Return if the store answers and can be written, else StoreError; the error of a failed start."""
        if self.trouble is not None:
            raise StoreError(str(self.trouble)) from self.trouble
        await (self._store.check() if self._master is None else self._master.served.check())

    # ---- users

    def users_syncing(self) -> Mapping[str, Mapping[str, int]]:
        """Return the users that sync here, and those that followers have reported."""
        server = self._server()
        reported = {} if server is None else server.users_syncing()
        return {**reported, **self._reporter.users_syncing()}

    async def places_of(self, user_id: str) -> Sequence[UserIp]:
        """Return where a user was seen; NotAWriterError if this worker writes no stream."""
        if self._master is not None:
            return await self._master.served.places_of(user_id)
        what = f"worker {self.instance_name!r} does not store where {user_id[:100]!r} was seen"
        raise NotAWriterError(f"{what}: send the request to a writer", instance=self.instance_name)

    # ---- statuses and metrics

    def stream_statuses(self, only: str | None = None) -> list[StreamStatus]:
        """Return the status of every stream, or of the stream named ``only``, if there is one."""
        written = [] if self._master is None else self._master.served.stream_statuses(only)
        statuses = {status.definition.name: status for status in written}
        followers = self._followed if only is None else [each for each in [self._followed.get(only)] if each]
        for follower in followers:
            followed = [
                replace(follower.status(writer), source=self._followed.missed.sources.source_of(follower.name, writer))
                for writer in follower.cursors
            ]
            definition = StreamDefinition(follower.name, row=self._rows.get(follower.name))
            ours = statuses.get(follower.name, StreamStatus(definition, []))
            others = [each for each in ours.writers if each.instance not in follower.cursors]
            is_unknown = follower.name in self._followed.unknown and not follower.cursors
            unknown = UNKNOWN.format(name=follower.name) if is_unknown else None
            waits = follower.application.waits.note
            own_notes = waits, self._parted_note(follower), self._partial_note(follower), unknown
            found = self._followed.lost_writers, self._followed.second_databases
            notes = [*filter(None, own_notes), *(note for each in found for note in each.notes(follower.name))]
            statuses[follower.name] = replace(ours, writers=[*others, *followed], notes=[*ours.notes, *notes])
        return [*statuses.values()]

    def unreachable_writers(self) -> Sequence[str]:
        """Return every writer that has not sent SERVER on a connection that is still open: its endpoint, and why."""
        missing = [client for client in self._clients if not client.greeted]
        return [each.endpoint if each.error is None else f"{each.endpoint} ({each.error})" for each in missing]

    def absent_writers(self) -> Sequence[str]:
        """Return a sentence for each writer that is not where the configuration places it, or cannot be followed."""
        unopened = [each for each in self._followed if each.error is not None and not each.cursors]
        return [*self._followed.absent.faults(), *(f"cannot follow {each.name}: {each.error}" for each in unopened)]

    def failed_tasks(self) -> Sequence[str]:
        """Return the names of tasks that have ended with an error, also of the part that writes."""
        return [*self._lifetime.failed_tasks, *(() if self._master is None else self._master.served.failed_tasks())]

    async def segments(self) -> list[SegmentChain]:
        """Return what the folders have that facts are fetched from, or that the part that writes waits for."""
        own = [] if self._master is None else await self._master.served.segments()
        return [*await self._followed.missed.sources.segments(), *own]

    def peer_statuses(self) -> list[PeerStatus]:
        """Return the status of each connection, to writers and of subscribers."""
        server = self._server()
        subscribers = [] if server is None else server.peer_statuses()
        return [*(client.peer.status() for client in self._clients if client.peer is not None), *subscribers]

    def samples(self) -> Iterable[Sample]:
        """Return the metrics; figures of both sides are added up."""
        server = self._server()
        served = [] if server is None else server.samples()
        samples: dict[Hashable, Sample] = {}
        for each in (*self._samples(), *served):
            key = each.name, *sorted(each.labels.items())
            samples[key] = replace(each, value=each.value + samples[key].value) if key in samples else each
        return samples.values()

    # ---- inside

    def _server(self) -> WrittenStreams | RelayServer | None:
        """Return what has the connections of followers."""
        return self.relay_server if self._master is None else self._master.served

    def _writing(self, stream: str, writer: str | None = None) -> Master | None:
        """Return the part that writes, if it has the facts of ``writer``, perhaps a former name of this worker."""
        master = self._master
        if master is None or stream not in master.registry:
            return None
        if writer in (None, self.instance_name) or master.stream(stream).shared:
            return master
        follower = self._followed.get(StreamName(stream))
        if (follower is None or writer not in follower.cursors) and master.served.has_former(stream, writer):
            return master
        if self._followed.relay is not None:
            return None
        raise UnknownStreamError(
            f"stream {stream!r}: only facts of {self.instance_name!r} are kept here", stream=stream
        )

    def _parted_note(self, follower: StreamFollower) -> str | None:
        """Return a warning if a stream that is written here is also written into another database."""
        name, master = follower.name, self._master
        if master is None or name == CACHES or name not in master.registry or not follower.cursors:
            return None
        written = master.stream(name)
        if written.shared or written.definition.in_memory:
            return None
        others = ", ".join(follower.cursors)
        return (
            f"stream {name!r}: {others} writes it in another database, so two facts have one ID, "
            "and no copy can have both: let both write one PostgreSQL database, or give one of the streams another name"
        )

    def _partial_note(self, follower: StreamFollower) -> str | None:
        """Return why the first number of a stream's tokens stays, if a process has not sent all positions."""
        relays = self._followed.links.partial_relays()
        if follower.name == CACHES or not relays:
            return None
        return (
            f"the process at {', '.join(relays)} has not sent a position of each writer and stream, so the first "
            "number of tokens stays: see /health/ready and the notes there"
        )

    def _readable(self, stream: str) -> StreamFollower:
        """Return the follower of a stream that is copied or, at a relay, has a catch-up source."""
        follower = self._followed.get(StreamName(stream))
        copied = follower is not None and follower.mode is FollowMode.COPIED
        if follower is None or not (copied or self._followed.relay is not None):
            raise UnknownStreamError(f"no copy of stream {stream[:100]!r} is kept here", stream=stream)
        return follower

    def _samples(self) -> Iterable[Sample]:
        clients = self._clients
        skipped = sum([Counter(peer.status().skipped) for client in clients if (peer := client.peer)], Counter[str]())
        for why, count in skipped.items():
            yield Sample("skipped_messages_total", count, {"reason": why})
        connected = sum(client.peer is not None for client in clients)
        yield Sample("links", connected)
        yield Sample("connections_total", sum(each.connections for each in clients))
        for kind, count in self._faults.items():
            yield Sample("faults_total", count, {"kind": kind})
        for follower in self._followed:
            of = {"stream": follower.name}
            yield Sample("catch_ups_total", follower.catch_ups, of)
            yield Sample("applied_rows_total", follower.applied_rows, of)
            yield Sample("failures_total", follower.errors.count, of)
            yield Sample("resets_total", follower.resets, of)
            if (histories := follower.histories) is not None:
                yield Sample("history_checks_total", histories.checks, of)
                yield Sample("history_mismatches_total", histories.mismatches, of)
            for writer, cursor in follower.cursors.items():
                where, lag = {**of, "writer": writer}, cursor.published - cursor.position
                yield Sample("position", cursor.position, where)
                yield Sample("lag", lag, where)
                stopped = writer in follower.errors.texts
                if lost := follower.lost_and_found[writer]:
                    yield Sample("lost_and_found_total", lost, where)
                if follower.mode is FollowMode.APPLIED:
                    yield Sample("facts_skipped_total", follower.application.failing.skipped_total[writer], where)
                yield Sample("stopped", stopped, where)
        for cache, (info, invalidations) in self._caches.stats().items():
            which = {"cache": cache}
            yield Sample("cache_hits_total", info.hits, which)
            yield Sample("cache_misses_total", info.misses, which)
            yield Sample("cache_size", info.currsize, which)
            yield Sample("cache_invalidations_total", invalidations, which)
