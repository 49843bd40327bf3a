"""A process that writes streams and is followed: all of a master, and the part of a worker that writes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from replication.audience import Audience
from replication.effects import Effects
from replication.errors import ConfigError, LocalProtocolError, ReplicationError, StoppingError, StoreError
from replication.listeners import Listeners
from replication.net.listener import ReplicationFactory
from replication.net.protocol import Limits
from replication.session.connection import Role
from replication.session.feed import spell_position
from replication.storage import open_store
from replication.streams.facts import texts_of
from replication.streams.positions import token_of
from replication.streams.registry import CACHES, FEDERATION, StreamDefinition, StreamRegistry
from replication.streams.seams import Page, Sample, StreamStatus, WriterStatus
from replication.streams.since import facts_since
from replication.tokens import Tokens
from replication.waiting import Waits, share
from replication.watching import Watching
from replication.web.calls import Calls
from replication.wire import grammar
from replication.wire.commands import RemoteServerUp, Server, encode_line
from replication.wire.grammar import StreamName, Token
from replication.writer import FIRST_SETTLED, NOBODY, Reservation, StreamWriter

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from replication.net.protocol import ReplicationProtocol
    from replication.session.feed import Chunk
    from replication.streams.facts import Fact
    from replication.streams.positions import MultiWriterToken
    from replication.streams.seams import IStreamStore, PeerStatus
    from replication.streams.since import Since
    from replication.wire.commands import Command, UserIp
    from replication.wire.grammar import InstanceName

STOP_PATIENCE = 10.0  # seconds that open transactions have to finish when we stop
LOOK_EVERY = 1.0  # seconds between two looks how far others have got, and whether a position should be stored


class Serving:
    """Streams that this process writes into one database, and the connections that follow it.

    ``database`` is a URL as in ``sqlite:///app.db``, or a store; ``streams`` are names or definitions; the stream
    ``caches`` is always there.  ``slow_open`` is the age in seconds at which an incomplete ID is named in the log.
    ``committed`` is told of facts that are durable now, before anybody else is.  ``listeners`` are an application's
    functions for what followers say; ``on_command`` and ``on_syncing`` register them, ``syncing`` is who syncs where.
    """

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
        committed: Callable[[StreamName, Sequence[Fact]], object] | None = None,
        listeners: Listeners | None = None,
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
        self._tokens = Tokens(self.store)
        self.calls = Calls()
        self.listeners = listeners or Listeners([Role.WORKER])
        self.on_command, self.on_syncing = self.listeners.on_command, self.listeners.on_syncing
        self.effects = Effects(
            reactor, self.store, acknowledged=self._acknowledged, changed=self.listeners.syncing_changed
        )
        self.syncing = self.effects.syncing
        self.audience = Audience(
            reactor,
            server_name=server_name,
            limits=self.limits,
            wall=wall,
            positions=self._positions,
            prepare=self._ask_who_is_back,
            words=self.listeners.words,
            hear=self._hear,
            lost=self.effects.lost,
        )
        self.stopping = False
        self.catch_up_rows = 0
        self._committed = committed
        self._watching: Watching | None = None
        self._stored: Mapping[StreamName, Mapping[InstanceName, Token]] = {}  # others' positions, as we last saw them
        self._formers: dict[StreamName, Mapping[InstanceName, Token]] = {}  # who wrote a stream and no longer does
        self._gone: dict[StreamName, set[InstanceName]] = {}  # those of them who may come back
        self._warnings = 0  # how many of the store's were said
        self._reservations: dict[Reservation, None] = {}  # the open ones, oldest first
        self._writers: dict[StreamName, StreamWriter] = {}
        self._start: Deferred[Exception | None] | None = None
        self._stop: Deferred[None] | None = None
        self._idle: Deferred[None] | None = None  # fires once no reservation is open
        self._slow_open = slow_open
        self._slow = LoopingCall(self._name_slow_reservations)
        self._slow.clock = reactor
        self._looking = LoopingCall(lambda: Deferred.fromCoroutine(self._look()))
        self._looking.clock = reactor

    @property
    def faults(self) -> Counter[str]:
        """What connections were closed for."""
        return self.audience.faults

    # ---- life

    def start(self) -> Deferred[None]:
        """Open the database and find out where every stream stands; fires when facts can be written.

        It need not be called: ``factory()`` and the first ``reserve()`` do it.  StoreError if the database fails.
        """
        return Deferred.fromCoroutine(self.started())

    async def started(self) -> None:
        """Return once facts can be written; raise what starting failed with."""
        if self.stopping:
            raise StoppingError(f"{self.instance_name!r} is stopping")
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
        """Return the protocol factory to listen with; writing starts if it has not yet."""
        self.start().addErrback(lambda failure: self.log.error("cannot start: {why}", why=failure.getErrorMessage()))
        return ReplicationFactory(self.audience, self.clock, self.limits, self.listeners.words)

    def stream(self, name: str) -> StreamWriter:
        """Return the writing end of a stream; UnknownStreamError if none of that name is declared."""
        definition = self.registry[name]
        writer = self._writers.get(definition.name)
        if writer is None:
            owner = None if definition.shares is None else self.stream(definition.shares)
            writer = self._writers[definition.name] = StreamWriter(self, definition, owner)
        return writer

    async def _open(self) -> Exception | None:
        try:
            await self.store.open()
            await self.store.claim(self.instance_name)
            starts: dict[StreamName, Token] = {}
            for definition in self.registry:
                await self.store.declare(definition)
                await self.store.fill(definition.name, self.instance_name, copy=False)
                positions = await self.store.positions(definition.name)
                self._formers[definition.name] = _former_writers(definition, positions)
                self._gone[definition.name] = await self._who_is_gone(definition, positions)
                known = starts.get(definition.generator, FIRST_SETTLED)
                starts[definition.generator] = max([known, *positions.values()])
            for definition in self.registry:
                ids = definition.generator
                self.stream(definition.name).begin(starts[ids], self.store.sequence(ids))
            await self._watch()
            await self._store_positions([writer for writer in self._writers.values() if writer.shared])
            self._say_warnings()
        except Exception as error:  # noqa: BLE001 (whatever it is, everybody who waits for the start is told)
            self.audience.refuse(_why(error))
            return error
        self._slow.start(max(1.0, self._slow_open / 4), now=False)
        self._looking.start(LOOK_EVERY, now=False)
        self.effects.start()
        self.audience.begin()
        return None

    async def _stopped(self) -> None:
        self.audience.refuse("server stopping")
        if self._start is not None:
            await share(self._start)
        for loop in (self._slow, self._looking):
            if loop.running:
                loop.stop()
        if self._reservations:
            self._idle = Deferred()
            await self._idle.addTimeout(STOP_PATIENCE, self.clock, lambda _result, _seconds: None)
        for reservation in list(self._reservations):
            try:
                await reservation.abandon()
            except StoreError as error:
                self.log.error("rolling back at the end: {error}", error=str(error))
        if self._watching is not None:
            await self._watching.end()
        await self._look()
        self.waits.end()
        await self.audience.end()
        await self.effects.stop()
        await self.store.close()

    # ---- IWritingProcess

    def caches_writer(self) -> StreamWriter:
        """Return the writer of the caches stream."""
        return self.stream(CACHES)

    def tell(self, stream: StreamName, chunk: Chunk) -> None:
        """Hand lines to every connection that wants the stream, at the end of this reactor turn."""
        self.audience.tell(stream, chunk)

    def committed(self, stream: StreamName, facts: Sequence[Fact]) -> None:
        """Pass on what is durable now to whoever wants to know in this process."""
        if self._committed is not None:
            self._committed(stream, facts)
        if self._watching is not None:
            self._watching.wake(stream)

    def reservation_begins(self, reservation: Reservation) -> None:
        """Remember who holds IDs; StoppingError if we are stopping."""
        if self.stopping:
            raise StoppingError(f"{self.instance_name!r} is stopping")
        self._reservations[reservation] = None

    def reservation_ended(self, reservation: Reservation) -> None:
        """Forget a reservation whose IDs are complete."""
        del self._reservations[reservation]
        if self._idle is not None and not self._reservations and not self._idle.called:
            self._idle.callback(None)

    # ---- what the HTTP side asks (web.site.IServed)

    async def page(self, stream: str, writer: str | None, *, after: int, upto: int | None, limit: int) -> Page:
        """Return facts of one writer, never beyond what has been announced."""
        await self.started()
        mine = self.stream(stream)
        source = self.instance_name if writer is None else grammar.instance_name(writer)
        if source == self.instance_name:
            reached = mine.announced
        elif mine.shared:  # its newest fact may be above an open ID, unless it is gone
            stored = (await self.store.stored()).get(mine.definition.name, {}).get(source, Token(0))
            reached = max(stored, self._formers.get(mine.definition.name, {}).get(source, Token(0)))
        else:
            reached = (await self.store.positions(mine.definition.name)).get(source, Token(0))
        end = reached if upto is None else Token(min(upto, reached))
        if after >= end:
            return Page([], end, limited=False)
        if source == self.instance_name:
            page = await mine.facts(after=Token(after), upto=end, limit=limit)
        else:
            page = await self.store.facts(mine.definition.name, source, after=Token(after), upto=end, limit=limit)
        self.catch_up_rows += len(texts_of(page.facts))
        return page

    def token(self, stream: str) -> MultiWriterToken:
        """Return how far every writer of a stream has got, as far as that is known here (protocol F6)."""
        mine = self.stream(stream)
        return token_of(self._reached(mine, self._stored.get(mine.definition.name, {})))

    async def since(self, stream: str, token: str, limit: int) -> tuple[Since, str]:
        """Return what all writers have written since a token, and the token that comes after it, as a text."""
        await self.started()
        mine = self.stream(stream)
        stored = await self.store.stored() if mine.shared else {}
        reached = self._reached(mine, stored.get(mine.definition.name, {}))
        after = await self._tokens.read(token)
        since = await facts_since(self.page, mine.definition.name, after, reached, limit=limit)
        return since, await self._tokens.spell(since.upto)

    def _reached(self, mine: StreamWriter, stored: Mapping[InstanceName, Token]) -> dict[InstanceName, Token]:
        """Return each writer's position; what is above our own is not announced."""
        others = {writer: position for writer, position in stored.items() if writer not in (self.instance_name, NOBODY)}
        me = {self.instance_name: mine.announced} if mine.definition.written_by(self.instance_name) else {}
        return {**others, **me}

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
        return [self._status(writer, oldest.get(writer.definition.name)) for writer in self._writers.values()]

    def users_syncing(self) -> Mapping[str, Mapping[str, int]]:
        """Return, by instance ID, each user that syncs there, with the time of the last sync in ms."""
        return self.syncing.processes()

    async def places_of(self, user_id: str) -> Sequence[UserIp]:
        """Return where a user was seen, the latest first."""
        await self.started()
        return await self.effects.last_seen.of(user_id)

    def peer_statuses(self) -> list[PeerStatus]:
        """Return every connection."""
        return [peer.status() for peer in self.audience]

    def samples(self) -> Iterable[Sample]:
        """Yield the figures of the metrics page."""
        yield from self.audience.samples()
        yield from self.effects.samples()
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
            if status.kept is not None:
                yield Sample("kept_bytes", "gauge", "Memory of a stream without a table.", status.kept.bytes, of)
            mine = status.writers[0]
            where = {**of, "writer": mine.instance}
            yield Sample("position", "gauge", "Current ID of a writer.", mine.announced, where)
            yield Sample("lag", "gauge", "IDs settled and not announced.", mine.lag, where)

    # ---- commands

    def say(self, *commands: Command) -> None:
        """Say something to every follower; LocalProtocolError if it is not ours to say, or cannot be said."""
        self.audience.say(*commands)

    def remote_server_up(self, server: str) -> None:
        """Tell every follower that a server which was away answers again."""
        self.say(RemoteServerUp(server))

    def _hear(self, peer: ReplicationProtocol, command: Command) -> None:
        self.effects.hear(peer, command)
        self.listeners.hear(peer, command)

    def _acknowledged(self, sender: InstanceName, token: Token) -> None:
        writer = self._writers.get(FEDERATION)
        if writer is not None:
            writer.acknowledged(sender, token)

    # ---- inside

    async def _who_is_gone(
        self, definition: StreamDefinition, positions: Mapping[InstanceName, Token]
    ) -> set[InstanceName]:
        """Return who has facts in a table of ours that anybody may write, and is not there to tell of them."""
        others = positions.keys() - {self.instance_name, NOBODY}
        if not others or definition.writers or definition.in_memory or not _is_ours(definition):
            return set()
        others -= {*await self.store.present(others)}
        pages = {
            each: await self.store.facts(definition.name, each, after=Token(0), upto=positions[each], limit=1)
            for each in others
        }
        return {each for each, page in pages.items() if page.facts}

    def _ask_who_is_back(self) -> Deferred[None] | None:
        """Ask, before a follower is told of them, who of those that were gone still is; None if nobody was."""
        return Deferred.fromCoroutine(self._who_is_back()) if any(self._gone.values()) else None

    async def _who_is_back(self) -> None:
        """Leave whoever is there again to itself: for who follows both of us, our word would break its line."""
        for stream, gone in self._gone.items():
            if gone:
                gone.difference_update(await self.store.present(gone))
                positions = await self.store.positions(stream)
                self._formers[stream] = {each: positions[each] for each in gone & positions.keys()}

    def _status(self, writer: StreamWriter, oldest: tuple[Token, float] | None) -> StreamStatus:
        name, count = writer.definition.name, writer.pending.open_count
        notes = [each for each in self.store.warnings if each.startswith(f"stream {name!r}: ")]
        reach = None if self._watching is None else self._watching.reaches.get(name)
        if reach is not None and reach.drawn > writer.settled and reach.waits > 0:
            count = max(count, reach.drawn - writer.settled)
            if oldest is None or oldest[1] < reach.waits:
                oldest = (Token(writer.settled + 1), reach.waits)
            if reach.blockers:
                notes.append(f"stream {name!r}: {count} IDs from {oldest[0]} on wait for {', '.join(reach.blockers)}")
        error = self._error(writer)
        state = "stopped" if error else "writing" if writer.ids.are_known else "opening"
        mine = WriterStatus(self.instance_name, writer.settled, writer.announced, state, error)
        writers = [mine, *self._others(writer.definition)]
        kept = None if writer.kept is None else writer.kept.status()
        return StreamStatus(writer.definition, writers, open_count=count, oldest_open=oldest, kept=kept, notes=notes)

    def _error(self, writer: StreamWriter) -> str | None:
        """Return why nothing of a stream can be announced, and the cure, if that is so."""
        error = writer.error
        if error is None and self._watching is not None:
            error = self._watching.error_of(writer.definition.name)
        if error is None:
            return None
        cure = "it goes on once that is mended"
        if writer.definition.table is not None or writer.definition.tables:
            cure += ", or, if the mapping is, with the next start"
        return f"{error}; {cure}"

    def _positions(self, streams: Sequence[StreamName]) -> Sequence[Chunk]:
        """Return what answers REPLICATE; we speak for those who are gone, too: nobody else does."""
        chunks = []
        for name, writer in self._writers.items():
            mine = writer.definition.written_by(self.instance_name) and writer.ids.are_known
            if mine and (not streams or name in streams):
                formers = self._formers.get(name, {}).items()
                chunks += [spell_position(name, former, position, position) for former, position in formers]
                chunks.append(writer.position())
        return chunks

    def _others(self, definition: StreamDefinition) -> Iterable[WriterStatus]:
        """Return where others stand that may write a stream."""
        for instance, position in self._stored.get(definition.name, {}).items():
            if instance not in (self.instance_name, NOBODY) and definition.written_by(instance):
                yield WriterStatus(instance, position, position, state="elsewhere")

    async def _strangers(self, definition: StreamDefinition) -> Sequence[str]:
        """Return a warning if there are rows of writers that nobody has said there are: nobody announces those."""
        found = await self.store.positions(definition.name)
        others = sorted(each for each in found if each not in (self.instance_name, NOBODY, *definition.writers))
        if not others or definition.instance_column is None:
            return ()
        theirs = f"rows of {', '.join(map(repr, others))}, which {self.instance_name!r} does not announce"
        cure = "let them carry its name, or list all in writers, each a process"
        return [f"stream {definition.name!r}: its table has {theirs}: {cure}"]

    async def _watch(self) -> None:
        """Find out how far others have written the streams that anybody may write, and follow them from now on."""
        watch = self.store.watch()
        if watch is None:
            return
        watched = [each for each in map(self.stream, watch.streams) if len(each.ids.writers) == 1]
        mine = [each for each in watched if each.definition.written_by(self.instance_name)]
        for writer in mine:
            writer.watch()
            self.store.warnings += await self._strangers(writer.definition)
        self._watching = Watching(self.clock, watch, {writer.definition.name: writer for writer in mine})
        await self._watching.begin()

    async def _look(self) -> None:
        """Follow others where nothing of ours is open, and store positions that commits have left behind."""
        self._say_warnings()
        try:
            await self._follow_others()
            await self._store_positions(list(self._writers.values()))
            await self.store.claim(self.instance_name)  # again, if the database was away and has forgotten it
        except StoreError:  # whoever writes is told; it is tried again
            return

    def _say_warnings(self) -> None:
        """Log what the store has to say since the last time."""
        for warning in self.store.warnings[self._warnings :]:
            self.log.warn("{warning}", warning=warning)
        self._warnings = len(self.store.warnings)

    async def _follow_others(self) -> None:
        """Be as far as others, so that nobody waits for us (protocol D1, F4).

        Nobody waits for the caches stream, and all writers' echoing its positions would be a flood (trap 20).
        """
        mine = [each for each in self._writers.values() if each.definition.written_by(self.instance_name)]
        shared = [each for each in mine if each.shared and each.ids.reached is None and each.definition.name != CACHES]
        if shared:
            self._stored = await self.store.stored()
        for writer in shared:
            writer.note(max(self._stored.get(writer.definition.name, {}).values(), default=FIRST_SETTLED))

    async def _store_positions(self, writers: Sequence[StreamWriter]) -> None:
        writes = {writer: write for writer in writers if (write := writer.unstored()) is not None}
        if writes:
            await self.store.transaction().commit([*writes.values()])
        for writer, write in writes.items():
            writer.stored(write.upto)

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


def _former_writers(
    definition: StreamDefinition, positions: Mapping[InstanceName, Token]
) -> Mapping[InstanceName, Token]:
    """Return how far those got who wrote a stream in a table of ours, and are no longer among its writers."""
    if not definition.writers or not _is_ours(definition):
        return {}
    return {
        writer: position
        for writer, position in positions.items()
        if writer != NOBODY and not definition.written_by(writer)
    }


def _is_ours(definition: StreamDefinition) -> bool:
    """Whether the facts of a stream are in a table that we have made."""
    return definition.table is None and not definition.tables


def _why(error: Exception) -> str:
    """Return what peers are told if we cannot start."""
    return str(error) if isinstance(error, ReplicationError) else f"cannot start: {type(error).__name__}"
