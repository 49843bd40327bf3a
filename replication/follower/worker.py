"""A worker: which streams it follows, from which writers, and its life from start to stop."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from twisted.logger import Logger

from replication.caches import CachedFunction, Caches, KeysOf
from replication.deferreds import Lifetime, StartDeferred, check_reactor, check_thread, close_after, share
from replication.errors import CommitsLostError, ConfigError, StoppingError, decorator_error, is_temporary
from replication.follower.audit import DEFAULT_INTERVAL
from replication.follower.cache_invalidation import CacheInvalidation
from replication.follower.catch_up import CatchUpSources
from replication.follower.links import endpoints_of, expected_writers
from replication.follower.registration import ADD_STREAM, RegistersFunctions
from replication.follower.relay import make_relay
from replication.follower.reports import RelayedReports
from replication.follower.served import ServedStreams
from replication.follower.skips import FollowedSkips
from replication.follower.sources import all_definitions, described_streams
from replication.follower.streams import FollowedStreams, follow_streams
from replication.follower.waiters import PositionWaiters, timeout_error
from replication.net.client import WriterClient
from replication.net.command_functions import CommandFunction, CommandFunctions, SyncingFunction
from replication.net.endpoints import is_redis
from replication.net.protocol import Limits, ReplicationProtocol
from replication.presence.reporter import PresenceReporter, users_of
from replication.session.connection import Role
from replication.storage import store_of
from replication.storage.tables.instances import TokenCodec
from replication.streams.definitions import CACHES, StreamDefinition
from replication.web.synapse_requests import RequestFunction, SynapseRequests
from replication.wire import grammar
from replication.wire.commands import Command, Error, FederationAck, RemoteServerUp
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from twisted.internet.protocol import Factory

    from replication.net.access import Access
    from replication.net.links import IWriterLink
    from replication.streams.facts import Fact
    from replication.streams.interfaces import IStreamStore
    from replication.streams.positions import MultiWriterToken
    from replication.urls import Url
    from replication.web.followers import IFollowers
    from replication.writer.master import Master
    from replication.writer.stream import StreamWriter

P = ParamSpec("P")
R = TypeVar("R")


class Worker(RegistersFunctions):
    """Follows writers: their facts go to the application's functions, or are copied into the database.

    A stream without a function is copied if ``copy``.  Otherwise only its position is followed.

    Args:
        connect: Twisted client endpoint strings, one for each writer; by default ``tcp:127.0.0.1:9092``.  For a
            Synapse from 1.67 on, the URL of its Redis (docs/configuration.md, Endpoints).
        server_name: the name that each writer's SERVER must have; the channel of Redis.
        instance_name: of this process; positions are stored under it.
        database: a URL or a store; by default ``sqlite:///replication-INSTANCE.db``.
        streams: names of the streams to follow; None means all.
        catch_up: sources of missed facts, tried in this order: ``http://…``, a database URL, a folder of segments.  By
            default each writer's HTTP: the host of its ``connect`` at the next port.
        copy: whether streams without a function are copied; by default only if there is no function at all, and no
            cached function.
        secret: the secret that the writers' HTTP requires.
        certificate: files with a certificate and its private key, which writers and a Redis with TLS are shown.
        redis_password: for ``redis://`` URLs without a password.
        writers: for a writer by name, its ``connect`` and ``http``.
        writes: names or definitions of streams that this process writes too, into the same database.
        reactor: the reactor; by default the global one.
        limits: of each connection (docs/configuration.md).
        wall: seconds of the epoch, for PING and presence.
        accept_new_history: whether to follow a writer whose database was emptied or exchanged, from the beginning, and
            to lower the positions of functions without ``on_reset`` (docs/operations.md, Backups).
        skip_gone: whether to leave out facts that a writer has deleted and no source has; else their stream stops
            (docs/operations.md, Retention).
        access_tokens: whether functions and copies receive the access tokens in facts of a Synapse's caches stream; by
            default these facts invalidate the whole cache instead (docs/protocol/streams.md C4).
        relay: whether what is followed is published to followers of this process (docs/how-to/relay.md).
        definitions: of streams that a database in ``catch_up`` has in tables of an application, such as a Synapse.
            Their fields are shown at ``/v1/streams``, and Spark may read them by name.
        audit_interval: seconds between two comparisons with such a database; 0: none (docs/protocol/redis.md, Audit).

    ``caches`` are the cached functions: ``caches.fan_out`` registers special names.  With ``writes``, ``stream(name)``
    and ``factory()`` are those of a ``Master``; with ``relay`` there is ``factory()``, too.  The function of a stream
    in ``writes`` receives only the facts of other writers.  ``failed`` fires as ``Master.failed`` does.

    Raises:
        ConfigError: an argument cannot be used; the message names it.

    """

    role = "worker"
    log = Logger()

    def __init__(
        self,
        *,
        connect: Sequence[str] | None = None,
        server_name: str = "localhost",
        instance_name: str = "worker1",
        database: str | Url | IStreamStore | None = None,
        streams: Sequence[str] | None = None,
        catch_up: Sequence[str | Url] = (),
        copy: bool | None = None,
        secret: str | None = None,
        certificate: tuple[str, str] | None = None,
        redis_password: str | None = None,
        writers: Mapping[str, Mapping[str, str]] | None = None,
        writes: Sequence[StreamDefinition | str] = (),
        reactor: Any = None,
        limits: Limits | None = None,
        wall: Callable[[], float] = time.time,
        accept_new_history: bool = False,
        skip_gone: bool = False,
        access_tokens: bool = False,
        relay: bool = False,
        definitions: Sequence[StreamDefinition] = (),
        audit_interval: float = DEFAULT_INTERVAL,
    ) -> None:
        if reactor is None:
            from twisted.internet import reactor  # noqa: PLC0415 (importing it installs it)
        _refuse_strings(connect=connect, streams=streams, catch_up=catch_up, writes=writes)
        self.instance_name: InstanceName = grammar.instance_name(instance_name)
        self.caches, self._faults = Caches(), Counter[str]()
        self._invalidation = CacheInvalidation(self.caches)
        definitions = all_definitions(writes, definitions)
        self.store = store_of(database or f"sqlite:///replication-{instance_name}.db", reactor)
        self._clock, self._copy, self._login = reactor, copy, (redis_password, certificate)
        self._lifetime, self._synapse_requests, self.server_name = Lifetime(reactor), SynapseRequests(), server_name
        self._command_functions = CommandFunctions([Role.MASTER, Role.WORKER] if writes or relay else [Role.MASTER])
        limits = limits or Limits()
        shared: dict[str, Any] = {"server_name": server_name, "limits": limits, "wall": wall, "reactor": reactor}
        self._reporter = PresenceReporter(reactor, self._peers, wall=wall, line_limit=limits.line_limit)
        self._relay = make_relay(self._reporter, self._command_functions, alone=not writes, **shared) if relay else None
        self._master = self._make_master(writes, shared) if writes else None
        self.failed: Deferred[CommitsLostError] = self.store.commits_lost
        named = {name: place for name, place in (writers or {}).items() if name != instance_name}
        self._sources = CatchUpSources(reactor, catch_up, named, secret, definitions, certificate, server_name)
        self._waiters = PositionWaiters(reactor)
        endpoints = endpoints_of(connect, named)
        described = described_streams(endpoints, definitions)
        self._followed = self._make_followed(
            described=described,
            expected=expected_writers(named),
            audit_interval=audit_interval,
            names=None if streams is None else [grammar.stream_name(each) for each in streams],
            accept_new_history=accept_new_history,
            skip_gone=skip_gone,
            access_tokens=access_tokens,
        )
        self._clients = [self._make_client(endpoint, shared) for endpoint in endpoints]
        self.served = self._make_served({name: each.row for name, each in described.items()}, wall)
        self._start: Deferred[Exception | None] | None = None
        self._stop: Deferred[None] | None = None

    # ---- functions of the application

    def cached(
        self,
        *function: object,
        max_entries: int = 10_000,
        name: str | None = None,
        invalidated_by: Mapping[str, KeysOf] | None = None,
    ) -> Callable[[Callable[P, R]], CachedFunction[P, R]]:
        """Cache what a function returns until the caches stream invalidates it; see ``replication.caches``.

        For functions, ``async`` functions, functions that return a Deferred, and methods.  The decorated function has
        ``invalidate(*arguments)``, ``clear()`` and ``cache_info()``.  The cache holds ``max_entries`` calls.  Its
        ``name`` in the caches stream is the function's by default.  ``invalidated_by`` has more names, each with a
        function: it returns the arguments of calls, from the keys of a row.  ``replication.synapse.invalidation`` has
        the special names of a Synapse.

        ConfigError: the name is taken, or calls have no wire key.
        """
        if function:
            raise decorator_error("cached() takes options only", "@worker.cached()", function[0])
        return self.caches.cached(max_entries=max_entries, name=name, invalidated_by=invalidated_by)

    def on_command(self, command: type[Command]) -> Callable[[CommandFunction], CommandFunction]:
        """Register a function for a command of a writer: ``function(command, peer)``.

        ``command`` is a class of ``replication.wire.commands``, or a subclass of ``ApplicationCommand``.  ``peer`` is
        the connection; it has ``name``, ``address`` and ``send()``.  The function may be plain, ``async`` or return a
        Deferred; an exception in it is logged.  ConfigError: a worker does not receive ``command``.
        """
        return self._command_functions.on_command(command)

    def on_syncing(self, function: SyncingFunction) -> SyncingFunction:
        """Register a function for users that begin or stop syncing at a follower: ``function(user_id, syncing)``."""
        return self._command_functions.on_syncing(function)

    def on_synapse_request(self, name: str) -> Callable[[RequestFunction], RequestFunction]:
        """Register the function that answers the HTTP request ``name``; see ``Master.on_synapse_request``."""
        return self._synapse_requests.on(name)

    # ---- life

    def start(self) -> Deferred[None]:
        """Open the database and connect; fires when the first positions of every writer have arrived.

        StoreError: the database cannot be used.  StoppingError: ``stop`` was called.  There is no time limit.
        ConfigError: asyncio's loop runs here without the reactor.
        """
        return StartDeferred("worker.start()", self._ready())

    async def started(self) -> None:
        """Return once the database is open and connections are begun; raise the error with which that failed."""
        if self._start is None and not self._lifetime.ended:
            check_reactor(self._clock)
            self._start = Deferred.fromCoroutine(self._open())
        start = self._start
        if start is not None:
            self.served.trouble = error = await share(start)
            if error is not None:
                if is_temporary(error) and self._start is start:
                    self._start = None  # the next call tries again
                raise error

    def stop(self) -> Deferred[None]:
        """Let running functions end, then close the connections and the database."""
        if self._stop is None:
            self._stop = Deferred.fromCoroutine(self._close())
        return share(self._stop)

    def wait_for(self, stream: str, writer: str, token: int, timeout: float = 10.0) -> Deferred[None]:
        """Fire once the facts of ``writer`` up to ``token`` are applied here.

        It does not fire while the history of the writer is compared, or a restore of its database is to be undone: an
        applied fact may be a lost one with the same token.

        PositionTimeoutError after ``timeout`` seconds; its message names the position and the state of each connection.
        StoppingError: the worker stops.  ConfigError: the stream is not among those to follow.  The process's own
        tokens count as applied (docs/protocol/following.md E6).
        """
        check_thread(self._clock)
        name, instance = grammar.stream_name(stream), grammar.instance_name(writer)
        own = instance == self.instance_name and self._master is not None and name in self._master.registry
        reached = self._followed.position(name, instance) >= token
        if own or (reached and self._followed.confirmed(name, instance)):
            return succeed(None)
        if self._lifetime.ended:
            return fail(_stopping_error(self.instance_name))
        if not self._followed.wants(name):
            raise ConfigError(f"wait_for({name!r}): it is not among the streams to follow; {ADD_STREAM}")
        return self._waiters.add(
            name,
            instance,
            Token(token),
            timeout,
            lambda: timeout_error(
                self._followed.get(name), self._clients, name, instance, token=token, timeout=timeout
            ),
        )

    def token(self, stream: str) -> MultiWriterToken:
        """Return the applied position of every writer of a stream (docs/protocol/ids.md F6).

        Facts that this process writes count as applied once they are published.  A writer that is not known is at 0 if
        there may be one, as after a start or over Redis (docs/http.md).
        """
        return self.served.token(StreamName(stream))

    @property
    def connections(self) -> dict[str, str]:
        """The state of each connection by endpoint: ``not connected``, ``connected``, ``following`` or ``stopping``."""
        return {each.endpoint: each.state for each in self._clients}

    @property
    def faults(self) -> Counter[str]:
        """How many connections were closed for a fault of the writer, by kind."""
        return self._faults

    # ---- streams that are written here

    def stream(self, name: str) -> StreamWriter:
        """Return the writer of a stream in ``writes``; NotAWriterError or UnknownStreamError if it is not there."""
        return self.served.writer(name).stream(name)

    def factory(self, access: Access | None = None) -> Factory:
        """Return the protocol factory to listen with; NotAWriterError if this worker writes and relays no stream.

        ``access`` is as in ``Master.factory``.
        """
        return self.served.factory(access)

    # ---- commands to writers

    def send(self, command: Command) -> int:
        """Send a command to every connected writer, and return their number; LocalProtocolError if that cannot be."""
        return self._reporter.send(command)

    def user_syncing(self, user_id: str) -> AbstractContextManager[None]:
        """Return a context during which a user counts as syncing here, and ten seconds longer (USER_SYNC)."""
        return self._reporter.user_syncing(user_id)

    def user_ip(
        self, user_id: str, access_token: str, ip: str, user_agent: str = "", device_id: str | None = None
    ) -> int:
        """Report that a user was seen now (USER_IP); returns the number of writers that it was sent to.

        It is 0, and nothing is sent, if the same user, token, address and device were reported in the last two minutes.
        """
        return self._reporter.user_ip(user_id, access_token, ip, user_agent, device_id)

    def federation_ack(self, token: int) -> int:
        """Report that the federation stream was sent on up to ``token``; returns the number of writers."""
        return self.send(FederationAck(self.instance_name, Token(token)))

    def remote_server_up(self, server: str) -> int:
        """Report that ``server`` answers again (REMOTE_SERVER_UP); returns the number of writers."""
        return self.send(RemoteServerUp(server))

    # ---- inside

    async def _ready(self) -> None:
        await self.started()
        await self._followed.links.first_positions()
        if self._lifetime.ended:
            raise _stopping_error(self.instance_name)

    async def _open(self) -> Exception | None:
        cached, server = bool(len(self.caches)), self.served.relay_server
        copies = not self._followed.functions.apply and not cached
        self._followed.factory.copies = copies if self._copy is None else self._copy
        if cached and not self._followed.wants(CACHES):
            self.log.warn("nothing invalidates the cached functions: {name} is not among streams", name=CACHES)
        try:
            await self.store.open()
            await self.store.claim(self.instance_name)
            if self._master is not None:
                await self._master.started()
            await self._followed.open()
        except Exception as error:  # noqa: BLE001 (every caller of start() receives it)
            if server is not None and not is_temporary(error):
                server.subscribers.refuse(f"cannot start: {error}")
            return error
        if server is not None:
            server.begin()
        self._followed.start()
        return None

    async def _close(self) -> None:
        self._lifetime.end()
        if self.served.relay_server is not None:
            self.served.relay_server.subscribers.refuse(Error.STOPPING)
        self._reporter.end()
        self._followed.links.end_waiting()
        self._waiters.fail(_stopping_error(self.instance_name))
        close_store = self.store.close if self._master is None else self._master.stop
        await close_after(self._finish(), close_store)

    async def _finish(self) -> None:
        if self._start is not None:
            await share(self._start)
        await self._followed.stop(self._clock)
        await self._sources.close()
        if self.served.relay_server is not None:
            await self.served.relay_server.end()

    def _committed(self, stream: StreamName, facts: Sequence[Fact]) -> None:
        """Invalidate the caches of this process by its own facts: no writer sends them back."""
        if stream == CACHES:
            self._invalidation.apply(facts)

    # ---- wiring

    def _peers(self) -> list[ReplicationProtocol]:
        return [each.peer for each in self._clients if isinstance(each, WriterClient) and each.peer is not None]

    def _make_master(self, writes: Sequence[StreamDefinition | str], shared: Mapping[str, Any]) -> Master:
        from replication.writer.master import Master  # noqa: PLC0415 (most workers write nothing)

        return Master(
            instance_name=self.instance_name,
            database=self.store,
            streams=writes,
            on_commit=self._committed,
            functions=self._command_functions,
            relay=self._relay,
            **shared,
        )

    def _make_followed(self, **options: Any) -> FollowedStreams:
        return follow_streams(
            instance_name=self.instance_name,
            store=self.store,
            lifetime=self._lifetime,
            sources=self._sources,
            waiters=self._waiters,
            invalidation=self._invalidation,
            commands=self._command_functions,
            written=() if self._master is None else self._master.registry,
            relay=self._relay,
            **options,
        )

    def _make_client(self, endpoint: str, shared: Mapping[str, Any]) -> IWriterLink:
        relay = self._relay
        followed: dict[str, Any] = {
            "instance_name": self.instance_name,
            "on_received": self._followed.received,
            "on_lost": self._followed.lost,
            "on_following": self._followed.following,
            "on_fault": lambda fault: self._faults.update([fault.kind]),
            "wall": shared["wall"],
            "reactor": shared["reactor"],
        }
        client: IWriterLink
        password, certificate = self._login
        if is_redis(endpoint):
            from replication.net.redis import RedisClient  # noqa: PLC0415 (few workers follow a Synapse)

            client = RedisClient(
                url=endpoint,
                password=password,
                certificate=certificate,
                channel=self.server_name,
                wants=self._followed.wants,
                command=self._command_functions.taken,
                **followed,
            )
        else:
            client = WriterClient(
                endpoint=endpoint,
                server_name=self.server_name,
                streams=self._followed.names or (),
                limits=shared["limits"],
                greeting=tuple if relay is None else relay.greeting,
                users=self._reporter.users_now if relay is None else lambda: users_of(self.served.users_syncing()),
                commands=self._command_functions.commands,
                certificate=certificate,
                **followed,
            )
        self._followed.links.add(client)
        return client

    def _make_served(self, rows: Mapping[StreamName, Sequence[str] | None], wall: Callable[[], float]) -> ServedStreams:
        reports: IFollowers | None = None if self._master is None else self._master.served.followers
        if self._relay is not None:
            reports = RelayedReports(
                processes=self._followed.missed.over_http,
                missing=self._followed.links.silent_endpoints,
                wall=wall,
                follower_of=self._followed.get,
                own=reports,
            )
        return ServedStreams(
            server_name=self.server_name,
            instance_name=self.instance_name,
            store=self.store,
            followed=self._followed,
            rows=rows,
            clients=self._clients,
            faults=self._faults,
            caches=self.caches,
            reporter=self._reporter,
            tokens=TokenCodec(self.store),
            synapse_requests=self._synapse_requests,
            master=self._master,
            skips=FollowedSkips(self.instance_name, self.store, self._followed),
            relay_server=None if self._relay is None else self._relay.server,
            reports=reports,
            lifetime=self._lifetime,
        )


def _stopping_error(instance: InstanceName) -> StoppingError:
    return StoppingError(f"{instance!r} is stopping", instance=instance)


def _refuse_strings(**options: object) -> None:
    for option, value in options.items():
        if isinstance(value, str):
            raise ConfigError(f"{option} is a list, not a string: write {option}=[{value!r}]")
