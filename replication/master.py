"""A master: the process that writes, and that others follow."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from replication.errors import ConfigError, LocalProtocolError, ReplicationError, StoreError, StreamError
from replication.net.broadcast import Broadcast
from replication.net.listener import ReplicationFactory
from replication.net.protocol import Limits
from replication.session.connection import Fault
from replication.storage import open_store
from replication.streams.facts import texts_of
from replication.streams.registry import CACHES, StreamDefinition, StreamRegistry
from replication.streams.seams import Page, PeerStatus, Sample, StreamStatus, WriterStatus
from replication.waiting import Waits, share
from replication.wire import grammar
from replication.wire.commands import Error, Name, Ping, RemoteServerUp, Replicate, Server, encode_line
from replication.wire.grammar import StreamName, Token
from replication.writer import FIRST_SETTLED, Reservation, StreamWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from replication.net.protocol import ReplicationProtocol
    from replication.session.connection import Heard
    from replication.session.feed import Chunk
    from replication.streams.seams import IStreamStore

STOP_PATIENCE = 10.0  # seconds that open transactions have to finish when we stop
REMEMBER_EVERY = 1.0  # seconds between two looks whether a position should be stored
GOODBYE_PATIENCE = 5.0  # seconds that peers have then to take what is still on its way to them
NAME_LENGTH = 255  # of a peer's NAME, what is kept: as much as an instance's name may have


class Master:
    """Streams over one database, and the connections that follow them.

    ``database`` is a URL as in ``sqlite:///app.db``, or a store; ``streams`` are names or definitions; the stream
    ``caches`` is always there.  ``slow_open`` is the age in seconds at which an incomplete ID is named in the log.
    """

    role = "master"
    log = Logger()

    def __init__(
        self,
        *,
        server_name: str = "localhost",
        instance_name: str = "master",
        database: str | IStreamStore = "sqlite:///replication.db",
        streams: Sequence[StreamDefinition | str] = (),
        reactor: Any = None,
        limits: Limits | None = None,
        slow_open: float = 60.0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if reactor is None:
            from twisted.internet import reactor  # noqa: PLC0415 (importing it installs it)
        self.server_name = server_name
        self.instance_name = grammar.instance_name(instance_name)
        self.limits = limits or Limits()
        try:
            encode_line(Server(server_name), self.limits.line_limit)
        except LocalProtocolError as error:
            raise ConfigError(f"server_name {server_name[:40]!r}: {error}") from error
        self.clock = reactor
        self.wall = wall
        self.registry = StreamRegistry([StreamDefinition(each) if isinstance(each, str) else each for each in streams])
        if CACHES not in self.registry:
            self.registry.declare(StreamDefinition(CACHES, row=("cache_func", "keys", "invalidation_ts")))
        self.store = open_store(database, reactor) if isinstance(database, str) else database
        self.waits = Waits(reactor)
        self.stopping = False
        self._running = False
        self._reservations: dict[Reservation, None] = {}  # the open ones, oldest first
        self.faults = Counter[str]()
        self.connections = 0
        self.catch_up_rows = 0
        self._broadcast = Broadcast(reactor)
        self._early: dict[ReplicationProtocol, list[Replicate]] = {}  # connected before we had started, what they asked
        self._transports: set[ReplicationProtocol] = set()  # all that there are, those that are being closed too
        self._gone = Counter[str]()  # lines and bytes of connections that have ended
        self._writers: dict[StreamName, StreamWriter] = {}
        self._start: Deferred[Exception | None] | None = None
        self._failed: Exception | None = None  # why we could not start
        self._stop: Deferred[None] | None = None
        self._idle: Deferred[None] | None = None  # fires once no reservation is open
        self._alone: Deferred[None] | None = None  # fires once no transport is left
        self._slow_open = slow_open
        self._slow = LoopingCall(self._name_slow_reservations)
        self._slow.clock = reactor
        self._remembering = LoopingCall(lambda: Deferred.fromCoroutine(self._remember()))
        self._remembering.clock = reactor

    # ---- life

    def start(self) -> Deferred[None]:
        """Open the database and find out where every stream stands; fires when facts can be written.

        It need not be called: ``factory()`` and the first ``reserve()`` do it.  StoreError if the database fails.
        """
        return Deferred.fromCoroutine(self.started())

    async def started(self) -> None:
        """Return once facts can be written; raise what starting failed with."""
        if self.stopping:
            raise StreamError(f"{self.instance_name!r} is stopping")
        if self._start is None:
            self._start = Deferred.fromCoroutine(self._open())
        error = await share(self._start)
        if error is not None:
            raise error

    def stop(self) -> Deferred[None]:
        """Let open transactions finish, tell every connection, close them and the database."""
        if self._stop is None:
            self.stopping = True
            self._stop = Deferred.fromCoroutine(self._stopped())
        return share(self._stop)

    def factory(self) -> ReplicationFactory:
        """Return the protocol factory to listen with; the master starts if it has not yet."""
        self.start().addErrback(lambda failure: self.log.error("cannot start: {why}", why=failure.getErrorMessage()))
        return ReplicationFactory(self, self.clock, self.limits)

    def stream(self, name: str) -> StreamWriter:
        """Return the writing end of a stream; UnknownStreamError if none of that name is declared."""
        definition = self.registry[name]
        writer = self._writers.get(definition.name)
        if writer is None:
            writer = self._writers[definition.name] = StreamWriter(self, definition)
        return writer

    async def _open(self) -> Exception | None:
        try:
            await self.store.open()
            await self.store.claim(self.instance_name)
            for definition in self.registry:
                await self.store.declare(definition)
                positions = await self.store.positions(definition.name)
                self.stream(definition.name).begin(max([FIRST_SETTLED, *positions.values()]))
            for warning in self.store.warnings:
                self.log.warn("{warning}", warning=warning)
        except Exception as error:  # noqa: BLE001 (whatever it is, everybody who waits for the start is told)
            self._failed = error
            for peer in list(self._early):
                peer.close(_why(error))
            return error
        self._slow.start(max(1.0, self._slow_open / 4), now=False)
        self._remembering.start(REMEMBER_EVERY, now=False)
        self._running = True
        early, self._early = self._early, {}
        for peer, asked in early.items():
            for command in asked:
                self._answer(peer, command.streams)
        return None

    async def _stopped(self) -> None:
        if self._start is not None:
            await share(self._start)
        for loop in (self._slow, self._remembering):
            if loop.running:
                loop.stop()
        if self._reservations:
            self._idle = self._in_time(STOP_PATIENCE)
            await self._idle
        for reservation in list(self._reservations):
            try:
                await reservation.abandon()
            except StoreError as error:
                self.log.error("rolling back at the end: {error}", error=str(error))
        await self._remember()
        self.waits.end()
        self._broadcast.flush()
        for peer in list(self._transports):
            peer.close("server stopping")
        if self._transports:
            self._alone = self._in_time(GOODBYE_PATIENCE)
            await self._alone
        for peer in list(self._transports):
            peer.abort()
        await self.store.close()

    def _in_time(self, seconds: float) -> Deferred[None]:
        """Return a Deferred that fires after so many seconds unless somebody does it before."""
        waiting: Deferred[None] = Deferred()
        return waiting.addTimeout(seconds, self.clock, lambda _result, _seconds: None)

    # ---- IWritingProcess

    def caches_writer(self) -> StreamWriter:
        """Return the writer of the caches stream."""
        return self.stream(CACHES)

    def tell(self, stream: StreamName, chunk: Chunk) -> None:
        """Hand lines to every connection that wants the stream, at the end of this reactor turn."""
        self._broadcast.put(stream, chunk)

    def reservation_begins(self, reservation: Reservation) -> None:
        """Remember who holds IDs; StreamError if we are stopping."""
        if self.stopping:
            raise StreamError(f"{self.instance_name!r} is stopping")
        self._reservations[reservation] = None

    def reservation_ended(self, reservation: Reservation) -> None:
        """Forget a reservation whose IDs are complete."""
        del self._reservations[reservation]
        if self._idle is not None and not self._reservations and not self._idle.called:
            self._idle.callback(None)

    # ---- Conversation

    def peer_connected(self, peer: ReplicationProtocol) -> None:
        """Introduce ourselves; from now on the connection gets all that is new."""
        self.connections += 1
        self._transports.add(peer)
        if self.stopping:
            peer.close("server stopping")
        elif self._failed is not None:
            peer.close(_why(self._failed))
        else:
            self._greet(peer)
            if not self._running:
                self._early[peer] = []

    def peer_said(self, peer: ReplicationProtocol, heard: Sequence[Heard]) -> None:
        """Do what the commands ask for."""
        for command in heard:
            match command:
                case Replicate(streams):
                    if peer in self._early:
                        self._early[peer].append(command)
                    else:
                        self._answer(peer, streams)
                case Name(name):
                    peer.name = name[:NAME_LENGTH]
                case Error("server stopping"):
                    self.log.info("{name!r} ({address}) is stopping", name=peer.name, address=peer.address)
                case Error(text):
                    self.log.warn(
                        "{name!r} ({address}) says: {text!r}", name=peer.name, address=peer.address, text=text[:200]
                    )
                case RemoteServerUp():
                    self._relay(peer, command)
                case _:
                    pass

    def peer_faulted(self, peer: ReplicationProtocol, fault: Fault) -> None:
        """Count and log what a connection did wrong."""
        self.faults[fault.kind] += 1
        self.log.warn(
            "closing {name!r} ({address}): {text}", name=peer.name or "a peer", address=peer.address, text=fault.text
        )

    def peer_lost(self, peer: ReplicationProtocol) -> None:
        """Forget a connection."""
        self._broadcast.remove(peer)
        self._early.pop(peer, None)
        for what in ("lines_in", "lines_out", "bytes_in", "bytes_out"):
            self._gone[what] += getattr(peer, what)

    def peer_gone(self, peer: ReplicationProtocol) -> None:
        """Forget a transport."""
        self._transports.discard(peer)
        if self._alone is not None and not self._transports and not self._alone.called:
            self._alone.callback(None)

    def _greet(self, peer: ReplicationProtocol) -> None:
        peer.say(Server(self.server_name), Ping(str(int(self.wall() * 1000))))
        self._broadcast.add(peer)

    def _relay(self, origin: ReplicationProtocol, command: RemoteServerUp) -> None:
        """Pass on to all others what one connection said, never back to where it came from (trap 9)."""
        try:
            line = encode_line(command, self.limits.line_limit)
        except LocalProtocolError as error:  # readable, but not to be said so: two CR at its end
            origin.fail(Fault(str(error), "bad line"))
            return
        for peer in self._broadcast:
            if peer is not origin:
                peer.write(line, 1)

    def _answer(self, peer: ReplicationProtocol, streams: tuple[StreamName, ...]) -> None:
        """Answer REPLICATE, to this connection only, with what all of them have been told up to now (trap 19)."""
        self._broadcast.restrict(peer, streams)
        positions = [
            writer.position()
            for writer in self._writers.values()
            if (not streams or writer.definition.name in streams) and writer.definition.written_by(self.instance_name)
        ]
        peer.write(b"".join(each.data for each in positions), len(positions))

    # ---- what the HTTP side asks (web.site.IServed)

    async def page(self, stream: str, writer: str | None, *, after: int, upto: int | None, limit: int) -> Page:
        """Return facts of one writer, never beyond what has been announced."""
        await self.started()
        mine = self.stream(stream)
        source = self.instance_name if writer is None else grammar.instance_name(writer)
        if source == self.instance_name:
            reached = mine.announced
        else:
            reached = (await self.store.positions(mine.definition.name)).get(source, Token(0))
        end = reached if upto is None else Token(min(upto, reached))
        if after >= end:
            return Page([], end, limited=False)
        page = await self.store.facts(mine.definition.name, source, after=Token(after), upto=end, limit=limit)
        self.catch_up_rows += len(texts_of(page.facts))
        return page

    async def append_texts(self, stream: str, facts: Sequence[Sequence[object]], key: str | None) -> Sequence[Token]:
        """Append facts, each a list of decoded rows."""
        return await self.stream(stream).append(facts, key)

    async def check(self) -> None:
        """Return if the store answers and can be written."""
        await self.started()
        await self.store.check()

    def stream_statuses(self) -> list[StreamStatus]:
        """Return where every stream stands."""
        oldest: dict[StreamName, tuple[Token, float]] = {}
        now = self.clock.seconds()
        for reservation in reversed(self._reservations):
            for writer, first in reservation.held:
                oldest[writer.definition.name] = (first, now - reservation.since)
        return [
            StreamStatus(
                definition=writer.definition,
                writers=[
                    WriterStatus(self.instance_name, Token(writer.pending.settled), writer.announced, state="writing")
                ],
                open_count=writer.pending.open_count,
                oldest_open=oldest.get(writer.definition.name),
            )
            for writer in self._writers.values()
        ]

    def peer_statuses(self) -> list[PeerStatus]:
        """Return every connection."""
        return [peer.status() for peer in self._broadcast]

    def samples(self) -> Iterable[Sample]:
        """Yield the figures of the metrics page."""
        peers = list(self._broadcast)
        yield Sample("connections", "gauge", "Connections that follow this writer.", len(peers))
        yield Sample("connections_total", "counter", "Connections accepted.", self.connections)
        yield Sample(
            "queued_bytes", "gauge", "Bytes kept for peers that do not read.", sum(p.queued_bytes for p in peers)
        )
        for what in ("lines", "bytes"):
            for way in ("in", "out"):
                total = self._gone[f"{what}_{way}"] + sum(getattr(peer, f"{what}_{way}") for peer in peers)
                yield Sample(f"{what}_total", "counter", f"{what.capitalize()} of the wire.", total, {"direction": way})
        for kind, count in self.faults.items():
            yield Sample(
                "faults_total", "counter", "Connections closed for a fault of the peer.", count, {"kind": kind}
            )
        yield Sample("catch_up_rows_total", "counter", "Rows served to those who catch up.", self.catch_up_rows)
        for status in self.stream_statuses():
            of = {"stream": status.definition.name}
            yield Sample("open_ids", "gauge", "Reserved IDs that are not complete.", status.open_count, of)
            age = status.oldest_open[1] if status.oldest_open else 0.0
            yield Sample("oldest_open_seconds", "gauge", "Age of the oldest incomplete ID.", age, of)
            for writer in status.writers:
                where = {**of, "writer": writer.instance}
                yield Sample("position", "gauge", "Current ID of a writer.", writer.announced, where)
                yield Sample(
                    "lag", "gauge", "IDs settled and not announced.", writer.position - writer.announced, where
                )

    async def _remember(self) -> None:
        """Store positions that commits have left behind: facts that were committed out of order do."""
        for writer in list(self._writers.values()):
            try:
                await writer.remember()
            except StoreError:  # whoever writes is told; it is tried again
                return

    def _name_slow_reservations(self) -> None:
        now = self.clock.seconds()
        for reservation in self._reservations:
            age = now - reservation.since
            if age < self._slow_open:
                break
            for writer, first in reservation.held:
                self.log.warn(
                    "ID {token} of stream {stream} has been open for {age:.0f} s: nothing after it can be announced",
                    token=first,
                    stream=writer.definition.name,
                    age=age,
                )


def _why(error: Exception) -> str:
    """Return what peers are told if we cannot start."""
    return str(error) if isinstance(error, ReplicationError) else f"cannot start: {type(error).__name__}"
