"""A master: its streams, the connections that follow them, and its life from start to stop."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, cast

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from replication.deferreds import Lifetime, StartDeferred, check_reactor, close_after, share
from replication.errors import CommitsLostError, ConfigError, LocalProtocolError, ReplicationError, is_temporary
from replication.net.broadcast import Broadcast
from replication.net.command_functions import CommandFunction, CommandFunctions, SyncingFunction
from replication.net.protocol import Limits
from replication.presence.last_seen import LastSeen
from replication.presence.syncing import SyncingUsers
from replication.presence.tracker import PresenceTracker
from replication.session.connection import Role
from replication.storage import store_of
from replication.storage.tables.instances import TokenCodec
from replication.streams.definitions import CACHES, FEDERATION, StreamDefinition, StreamRegistry
from replication.web.synapse_requests import RequestFunction, SynapseRequests
from replication.wire import grammar
from replication.wire.commands import Command, RemoteServerUp, Server, encode_line
from replication.writer.epochs import begin_epochs
from replication.writer.external_writers import ExternalWriters
from replication.writer.former_writers import FormerWriters, find_unwritten
from replication.writer.known_followers import KnownFollowers
from replication.writer.positions import Positions
from replication.writer.publisher import INITIAL_POSITION, NO_WRITER, Publisher
from replication.writer.reservation import OpenTransactions
from replication.writer.retention import Retentions, forget_lost_marks
from replication.writer.served import WrittenStreams
from replication.writer.stream import StreamWriter
from replication.writer.subscribers import Subscribers

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from twisted.internet.protocol import Factory

    from replication.net.access import Access
    from replication.streams.facts import Fact
    from replication.streams.interfaces import IStreamStore
    from replication.streams.positions import MultiWriterToken
    from replication.urls import Url
    from replication.wire.grammar import InstanceName, StreamName, Token
    from replication.writer.positions import IRelay

PART_STREAMS: Final = 100  # are declared or read at once at the start; a stop waits for no more
STOP_PATIENCE: Final = 10.0  # seconds in which open transactions must end when this process stops
STORE_PATIENCE: Final = 5.0  # seconds in which the database must store what is left then


class Master:
    """Writes streams into one database, and publishes them to the connections that follow.

    The ``caches`` stream is always declared.  To call ``start`` is optional: ``factory()`` and the first ``reserve()``
    start the master.

    ``failed`` fires with a CommitsLostError if the database has lost commits of this process.  From then on the master
    writes and publishes nothing: end the process, and start it again.

    Args:
        server_name: is sent in SERVER; a worker compares it with its own.
        instance_name: the name of this writer in RDATA and POSITION.
        database: a URL such as ``sqlite:///app.db`` or ``postgresql://user@host/name``, or a store.
        streams: names or definitions of the streams to declare.
        reactor: the reactor; by default the global one.
        limits: of each connection (docs/configuration.md).
        slow_open: seconds after which an ID that is still open is named in the log.
        wall: seconds of the epoch, for PING and cache invalidations.
        on_commit: called with a stream's name and facts once they are durable, before they are published.
        functions: the application's functions for commands; by default an empty set.
        relay: publishes what this process follows to the same connections; None if it follows nothing.

    Raises:
        ConfigError: an argument cannot be used; the message names it.

    """

    role = "master"
    log = Logger()

    def __init__(
        self,
        *,
        server_name: str = "localhost",
        instance_name: str = "master",
        database: str | Url | IStreamStore = "sqlite:///replication.db",
        streams: Sequence[StreamDefinition | str] = (),
        reactor: Any = None,
        limits: Limits | None = None,
        slow_open: float = 60.0,
        wall: Callable[[], float] = time.time,
        on_commit: Callable[[StreamName, Sequence[Fact]], object] | None = None,
        functions: CommandFunctions | None = None,
        relay: IRelay | None = None,
    ) -> None:
        if reactor is None:
            from twisted.internet import reactor  # noqa: PLC0415 (importing it installs it)
        self.server_name = server_name
        self.instance_name: InstanceName = grammar.instance_name(instance_name)
        self.limits = limits or Limits()
        self.wall = wall
        self.registry = _registry(streams)
        _check_server_name(server_name, self.limits)
        self.store = store_of(database, reactor)
        self._clock, self._lifetime, self._on_commit = reactor, Lifetime(reactor), on_commit
        self._functions = functions or CommandFunctions([Role.WORKER])
        self._synapse_requests = SynapseRequests()
        self._streams: dict[StreamName, StreamWriter] = {}
        self._broadcast = Broadcast(reactor) if relay is None else relay.broadcast
        self._last_seen, syncing = LastSeen(self.store, wall), SyncingUsers(self._functions.syncing_changed)
        self._presence = PresenceTracker(reactor, syncing, self._last_seen, self._acknowledged)
        former = FormerWriters(self.instance_name, self.store, self._streams, self._broadcast)
        self._positions = Positions(self.instance_name, self.store, self._streams, former, self._lifetime)
        self._external = ExternalWriters(self._lifetime, self.store, self.instance_name, self._positions)
        if relay is not None:
            relay.own, self._presence.forward = self._positions, relay.forward
        self._transactions = self._make_transactions()
        self.retention = Retentions(self.instance_name, self.store, self._lifetime)
        self.followers = self._make_followers()
        self._subscribers = Subscribers(
            reactor,
            self._broadcast,
            positions=relay or self._positions,
            presence=self._presence,
            functions=self._functions,
            server_name=server_name,
            limits=self.limits,
            wall=wall,
        )
        self._positions.on_complete = (relay or self._subscribers).look_for_others
        self.served = self._make_served()
        self._slow_open = slow_open
        self._slow: set[tuple[StreamName, Token]] = set()  # IDs that the log names
        self._slow_loop = LoopingCall(self._log_slow_transactions)
        self._slow_loop.clock = reactor
        self.failed: Deferred[CommitsLostError] = self.store.commits_lost.addCallback(self._fail)
        self._failure: CommitsLostError | None = None
        self._start: Deferred[Exception | None] | None = None
        self._stop: Deferred[None] | None = None
        self._opened = False

    # ---- life

    def start(self) -> Deferred[None]:
        """Open the database and read the position of every stream; fires once facts can be written.

        StoreError: the database cannot be used; if it is ``temporary``, call this again.  StoppingError: ``stop`` was
        called.  ConfigError: asyncio's loop runs here without the reactor.
        """
        return StartDeferred("master.start()", self.started())

    async def started(self) -> None:
        """Return once facts can be written; raise the error with which the start, or later the master, failed."""
        self._transactions.check_not_stopping()
        if self._failure is not None:
            raise self._failure
        if self._start is None:
            check_reactor(self._clock)
            self._start = Deferred.fromCoroutine(self._open())
        if not self._opened:
            start = self._start
            error = await share(start)
            self._transactions.trouble = error
            if is_temporary(error) and self._start is start:
                self._start = None  # the next call tries again
            if error is not None:
                raise error

    def stop(self) -> Deferred[None]:
        """Let open transactions end, send ``ERROR server stopping`` to every connection, and close the database."""
        if self._stop is None:
            self._transactions.stopping = True
            self._stop = Deferred.fromCoroutine(self._close())
        return share(self._stop)

    def factory(self, access: Access | None = None) -> Factory:
        """Return the protocol factory for an endpoint to listen with; starts the master.

        ``access`` has the rights of peers by their certificates (docs/security.md, Rights); None: every right.
        """
        self.start().addErrback(lambda failure: self.log.error("cannot start: {why}", why=failure.getErrorMessage()))
        return self._subscribers.listener(access)

    # ---- streams

    def stream(self, name: str) -> StreamWriter:
        """Return the writer of a stream; UnknownStreamError if no stream of that name is declared."""
        writer = self._streams.get(cast("StreamName", name))
        if writer is None:
            definition = self.registry[name]
            if definition.shares is not None:
                publisher = self.stream(definition.shares).publisher
            else:
                publisher = Publisher(
                    self.instance_name, self.store, self._broadcast, self.limits, self._lifetime, self._clock
                )
            writer = StreamWriter(definition, publisher, self._transactions)
            self._streams[definition.name] = writer
        return writer

    def token(self, stream: str) -> MultiWriterToken:
        """Return the position of every writer of a stream, as of the last poll (docs/protocol/ids.md F6)."""
        return self._positions.token(self.stream(stream))

    # ---- commands

    def send(self, *commands: Command) -> None:
        """Send commands to every connection; LocalProtocolError: a master may not send one, or it cannot be encoded."""
        self._subscribers.send(*commands)

    def remote_server_up(self, server: str) -> None:
        """Send REMOTE_SERVER_UP to every connection: ``server`` answers again (docs/protocol/wire.md A4)."""
        self.send(RemoteServerUp(server))

    def on_command(self, command: type[Command]) -> Callable[[CommandFunction], CommandFunction]:
        """Register a function for a command of followers: ``function(command, peer)``.

        ``command`` is a class of ``replication.wire.commands``, or a subclass of ``ApplicationCommand``.  ``peer`` is
        the connection; it has ``name``, ``address`` and ``send()``.  The function may be plain, ``async`` or return a
        Deferred; an exception in it is logged.  ConfigError: a master does not receive ``command``.
        """
        return self._functions.on_command(command)

    def on_syncing(self, function: SyncingFunction) -> SyncingFunction:
        """Register a function for users that begin or stop syncing: ``function(user_id, syncing)``."""
        return self._functions.on_syncing(function)

    def on_synapse_request(self, name: str) -> Callable[[RequestFunction], RequestFunction]:
        """Register the function that answers the HTTP request ``name`` of a Synapse worker: ``function(words, body)``.

        ``words`` are the rest of the path, ``body`` is the decoded JSON object.  The function returns the answer, a
        dict.  It may be plain, ``async`` or return a Deferred; a ReplicationError refuses.  See docs/http.md.
        """
        return self._synapse_requests.on(name)

    @property
    def syncing(self) -> SyncingUsers:
        """The users that sync at any process."""
        return self._presence.syncing

    @property
    def faults(self) -> Counter[str]:
        """How many connections were closed for a fault of the peer, by kind."""
        return self._subscribers.faults

    # ---- inside

    async def _open(self) -> Exception | None:
        try:
            await self.store.open()
            await self.store.claim(self.instance_name)
            starts: dict[StreamName, Token] = {}
            own_places: dict[StreamName, Token] = {}  # the largest positions that this process may have published
            reached: dict[StreamName, Token] = {}  # where its own rows and stored positions end
            written: set[StreamName] = set()  # earlier or now, in the name of this process
            # One that counts up may have its rows in the same table as one that counts down, which the store must know.
            definitions = sorted(self.registry, key=lambda each: not each.negative)
            # A new table makes each connection read the schema again: first all are created, then all are read.
            for some in self._parts(definitions):
                await self.store.declare(*some)
                await self.store.claim_tables([each.name for each in some], self.instance_name, copy=False)
            for some in self._parts(definitions):
                positions = await self.store.positions_of([each.name for each in some])
                for definition in some:
                    found = positions[definition.name]
                    await self._positions.former.find(definition, found)
                    if self.instance_name in found and not definition.in_tables:
                        written.add(definition.name)
                    start = max([starts.get(definition.generator, INITIAL_POSITION), *found.values()])
                    starts[definition.generator] = start
                    own = [found[each] for each in (self.instance_name, NO_WRITER) if each in found]
                    reached[definition.name] = found.get(self.instance_name, INITIAL_POSITION)
                    place = max([own_places.get(definition.generator, INITIAL_POSITION), *own])
                    own_places[definition.generator] = place
            for definition in self.registry:
                outgoing = self.stream(definition.name).outgoing
                outgoing.publishes = outgoing.may_write or definition.name in written
            if not any(each.outgoing.publishes for name, each in self._streams.items() if name != CACHES):
                found_here = [f"{what}: {cure}" for what, cure in find_unwritten(self.instance_name, self.registry)]
                self.store.warnings += [each for each in found_here if each not in self.store.warnings]
            for owner, start in starts.items():
                publisher = self.stream(owner).publisher
                publisher.begin(start, self.store.sequence(owner))
                if start == INITIAL_POSITION:
                    await publisher.find_first_facts()
            await self._external.begin(self._streams.values())
            forgetful = {each.name for each in self.registry if each.may_forget}
            await forget_lost_marks(self.store, self.instance_name, forgetful)
            await begin_epochs(self.store, self.instance_name, self._epoch_starts(own_places), forgetful, reached)
            await self._positions.start()
        except Exception as error:  # noqa: BLE001 (every caller of start() receives it)
            await self._external.end()
            if not is_temporary(error):
                why = str(error) if isinstance(error, ReplicationError) else f"cannot start: {type(error).__name__}"
                self._subscribers.refuse(why)
            return error
        self._slow_loop.start(max(1.0, self._slow_open / 4))
        self._presence.start()
        self._positions.look_for_missing()
        self._subscribers.begin()
        self.retention.start(self._streams.values())
        self._opened = True
        return None

    def _fail(self, error: CommitsLostError) -> CommitsLostError:
        """Write and publish nothing any more: a later fact would hide from followers that others are lost."""
        self._failure = error
        self._positions.stop()
        self._lifetime.end()
        self._subscribers.close_all(str(error))
        return error

    async def _close(self) -> None:
        self._subscribers.refuse("server stopping")
        await close_after(self._finish(), self._end)

    async def _finish(self) -> None:
        if self._start is not None:
            await self._within(STOP_PATIENCE, share(self._start))
        if self._slow_loop.running:
            self._slow_loop.stop()
        self._positions.stop()
        await self._within(STOP_PATIENCE + STORE_PATIENCE, Deferred.fromCoroutine(self._settle()))

    async def _end(self) -> None:
        self._lifetime.end()
        await self._subscribers.end()
        await self._within(STORE_PATIENCE, Deferred.fromCoroutine(self._presence.stop()))
        await self.store.close()

    async def _settle(self) -> None:
        await self._transactions.finish(STOP_PATIENCE)
        await self._external.end()
        if self._opened:  # else not all streams are declared
            await self._positions.poll()

    async def _within(self, seconds: float, work: Deferred[Any]) -> None:
        """Wait for work whose statements the database may never answer; closing the store ends these."""
        await work.addTimeout(seconds, self._clock, lambda _result, _seconds: None)

    def _parts(self, definitions: Sequence[StreamDefinition]) -> Iterator[Sequence[StreamDefinition]]:
        """Yield the definitions in parts; StoppingError between two of them if this process is stopping."""
        for at in range(0, len(definitions), PART_STREAMS):
            self._transactions.check_not_stopping()
            yield definitions[at : at + PART_STREAMS]

    def _epoch_starts(self, own: Mapping[StreamName, Token]) -> dict[StreamName, Token]:
        """Return where the epoch of each stream begins that this process publishes, except with external writers.

        ``own`` is the last position of this process in each sequence.  The epoch begins there, even if other writers
        are ahead.  They may have written since a restore: then a follower above ``own`` has facts that are lost.
        """
        return {
            name: min(writer.published, own[writer.definition.generator]) if writer.shared else writer.published
            for name, writer in self._streams.items()
            if writer.outgoing.publishes and writer.outgoing.memory_log is None and writer.publisher.ids.horizon is None
        }

    def _make_transactions(self) -> OpenTransactions:
        return OpenTransactions(
            self.instance_name,
            self.store,
            clock=self._clock,
            wall=self.wall,
            ready=self.started,
            caches=lambda: self.stream(CACHES).outgoing,
            on_commit=self._committed,
        )

    def _make_followers(self) -> KnownFollowers:
        followers = KnownFollowers(
            self.store, self.wall, self.started, lambda: self.retention.active, self._positions.known_writers
        )
        self.retention.needs.append(followers)
        return followers

    def _make_served(self) -> WrittenStreams:
        return WrittenStreams(
            server_name=self.server_name,
            instance_name=self.instance_name,
            streams=self._streams,
            stream=self.stream,
            positions=self._positions,
            transactions=self._transactions,
            external=self._external,
            subscribers=self._subscribers,
            presence=self._presence,
            last_seen=self._last_seen,
            tokens=TokenCodec(self.store),
            synapse_requests=self._synapse_requests,
            retention=self.retention,
            followers=self.followers,
            lifetime=self._lifetime,
        )

    def _committed(self, stream: StreamName, facts: Sequence[Fact]) -> None:
        if self._on_commit is not None:
            self._on_commit(stream, facts)
        self._external.wake(stream)

    def _acknowledged(self, sender: InstanceName, token: Token) -> None:
        writer = self._streams.get(FEDERATION)
        if writer is not None:
            writer.outgoing.acknowledge(sender, token)

    def _log_slow_transactions(self) -> None:
        """Log each ID that has been open for long, once."""
        ages = {(stream.definition.name, first): age for stream, first, age in self._transactions.oldest_first()}
        slow = {each for each, age in ages.items() if age >= self._slow_open}
        for stream, token in sorted(slow - self._slow):
            self.log.warn(
                "ID {token} of stream {stream} has been open for {age:.0f} s: no later fact can be published",
                token=token,
                stream=stream,
                age=ages[stream, token],
            )
        self._slow = slow


def _registry(streams: Sequence[StreamDefinition | str]) -> StreamRegistry:
    if isinstance(streams, (str, StreamDefinition)):
        raise ConfigError(f"streams is a list, not a {type(streams).__name__}: write streams=[{streams!r}]")
    registry = StreamRegistry([StreamDefinition(each) if isinstance(each, str) else each for each in streams])
    for each in registry:
        if each.position_name is not None:
            raise ConfigError(f"stream {each.name!r} has a position_name: another program writes it, so none can here")
    if CACHES not in registry:
        registry.declare(StreamDefinition(CACHES, row=("cache_func", "keys", "invalidation_ts")))
    return registry


def _check_server_name(server_name: str, limits: Limits) -> None:
    try:
        encode_line(Server(server_name), limits.line_limit)
    except LocalProtocolError as error:
        raise ConfigError(f"server_name {server_name[:40]!r}: {error}") from error
