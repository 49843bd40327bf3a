"""A worker: a process that follows writers, applies what they write, and knows how far it is."""

from __future__ import annotations

import time
from bisect import bisect_right, insort
from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
from twisted.internet.defer import Deferred, DeferredList, fail, succeed
from twisted.logger import Logger

from replication.caches import Caches
from replication.errors import (
    ConfigError,
    NotAWriterError,
    PositionTimeoutError,
    ReplicationError,
    StoppingError,
    StreamError,
    UnknownStreamError,
)
from replication.follower import FIRST_RETRY, LAST_RETRY, Keeping, StreamFollower
from replication.linear import LinearFollower
from replication.listeners import Listeners
from replication.net.link import WriterLink
from replication.net.protocol import Limits
from replication.serving import Serving
from replication.session.connection import Fault, Role, Rows
from replication.sources import Sources
from replication.storage import open_store
from replication.streams.cursor import Reset
from replication.streams.positions import token_of
from replication.streams.registry import CACHES, StreamDefinition
from replication.streams.seams import Page, PeerStatus, Sample, StreamStatus
from replication.streams.since import facts_since
from replication.tokens import Tokens
from replication.voice import Voice
from replication.waiting import Waits, share
from replication.web.calls import Calls
from replication.wire import grammar
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from replication.net.listener import ReplicationFactory
    from replication.session.connection import Heard
    from replication.streams.cursor import Apply, CatchUp
    from replication.streams.facts import Fact
    from replication.streams.positions import MultiWriterToken
    from replication.streams.seams import IStreamStore
    from replication.streams.since import Since
    from replication.wire.commands import UserIp
    from replication.writer import StreamWriter

F = TypeVar("F", bound="Callable[..., object]")
T = TypeVar("T")
DEFAULT_CONNECT = ("tcp:127.0.0.1:9092",)
STOP_PATIENCE = 10.0  # seconds that functions under way have to finish when we stop
SILENCE = 5.0  # seconds from look to look: who had said SERVER at one has told all its streams by the next

_token_of = itemgetter(0)


class Worker:
    """Follows the writers at ``connect`` and keeps what they write, or hands it to the application's functions.

    ``database`` is a URL or a store, by default ``sqlite:///replication-INSTANCE.db``; positions are kept there.
    ``streams`` are the names to follow, None means all.  ``catch_up`` lists sources of missed facts in the order in
    which they are tried (``http://…``, a database URL, a folder of segments), by default each writer's HTTP: its
    ``connect`` host at the next port.
    ``writers`` says for a writer by name where its ``connect`` and ``http`` are.  A stream that has no function is
    copied into the database if ``copy``, which by default is so where there is no function at all; else only its
    position is followed.  ``secret`` is what the writers' HTTP wants.

    ``writes`` are streams, names or definitions, that this process writes too, into the same database, and others
    follow at ``factory()``: ``stream(name)`` is what a master's is.  Functions are given what others wrote there; its
    facts are not copied, since that table has them.
    """

    role = "worker"
    log = Logger()

    def __init__(
        self,
        *,
        connect: Sequence[str] | None = None,
        server_name: str = "localhost",
        instance_name: str = "worker1",
        database: str | IStreamStore | None = None,
        streams: Sequence[str] | None = None,
        catch_up: Sequence[str] = (),
        copy: bool | None = None,
        secret: str | None = None,
        writers: Mapping[str, Mapping[str, str]] | None = None,
        writes: Sequence[StreamDefinition | str] = (),
        reactor: Any = None,
        limits: Limits | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if reactor is None:
            from twisted.internet import reactor  # noqa: PLC0415 (importing it installs it)
        for option, value in (
            ("connect", connect),
            ("streams", streams),
            ("catch_up", catch_up),
            ("writes", writes),
        ):
            if isinstance(value, str):
                raise ConfigError(f"{option} is a list, not a string: write {option}=[{value!r}]")
        self.server_name = server_name
        self.instance_name = grammar.instance_name(instance_name)
        self.limits = limits or Limits()
        self.clock = reactor
        self.wall = wall
        database = database or f"sqlite:///replication-{instance_name}.db"
        self.store = open_store(database, reactor) if isinstance(database, str) else database
        self.listeners = Listeners([Role.MASTER, Role.WORKER] if writes else [Role.MASTER])
        self.on_command, self.on_syncing = self.listeners.on_command, self.listeners.on_syncing
        self.serving: Serving | None = None
        if writes:
            self.serving = Serving(
                server_name=server_name,
                instance_name=instance_name,
                database=self.store,
                streams=writes,
                reactor=reactor,
                limits=self.limits,
                wall=wall,
                committed=self._committed,
                listeners=self.listeners,
            )
        self.caches = Caches()
        self.cached = self.caches.cached
        self.faults = Counter[str]()
        self.waits = Waits(reactor)
        self._tokens = Tokens(self.store)
        self.calls = Calls()
        self.stopping = False
        self._streams = None if streams is None else [grammar.stream_name(each) for each in streams]
        self._copy = copy
        self._functions: dict[StreamName, Callable[..., object]] = {}
        self._linear: set[StreamName] = set()
        self._followers: dict[StreamName, StreamFollower] = {}
        self._waiters: dict[tuple[StreamName, InstanceName], list[tuple[Token, Deferred[None]]]] = {}
        self.voice = Voice(
            reactor,
            self.instance_name,
            words=self.listeners.words,
            peers=lambda: [link.peer for link in self._links if link.peer is not None],
            wall=wall,
            line_limit=self.limits.line_limit,
        )
        self.say, self.user_syncing, self.user_ip = self.voice.say, self.voice.user_syncing, self.voice.user_ip
        self.federation_ack, self.remote_server_up = self.voice.federation_ack, self.voice.remote_server_up
        named = {name: place for name, place in (writers or {}).items() if name != instance_name}
        if connect is None:
            connect = () if named else DEFAULT_CONNECT
        endpoints = list(dict.fromkeys([*(each["connect"] for each in named.values() if "connect" in each), *connect]))
        if not endpoints:
            raise ConfigError("a worker needs at least one writer to connect to: give connect")
        self._links = [
            WriterLink(
                reactor,
                endpoint,
                server_name=server_name,
                instance_name=self.instance_name,
                streams=self._streams or (),
                limits=self.limits,
                on_heard=self._heard,
                on_lost=self._lost,
                on_fault=self._faulted,
                hello=self.voice.hello,
                words=self.listeners.words,
            )
            for endpoint in endpoints
        ]
        self._sources = Sources(reactor, catch_up, named, secret)
        self._source_of: dict[InstanceName, str] = {}  # the endpoint where a writer was heard
        self._first_positions: dict[WriterLink, Deferred[None]] = {link: Deferred() for link in self._links}
        self._start: Deferred[Exception | None] | None = None
        self._stop: Deferred[None] | None = None
        self._warned = False

    # ---- what an application says

    def on(self, stream: str, *, linear: bool = False) -> Callable[[F], F]:
        """Register a function for a stream: ``apply(facts, txn)``, plain, ``async`` or returning a Deferred.

        ``facts`` are whole, ascending, of one writer; ``txn`` is an :class:`ApplyTransaction`.  If it raises, nothing
        of its transaction stays and the same facts, perhaps with newer ones, come again; other streams go on.

        With ``linear``, facts of all writers come in one order, that of their tokens, and ``txn.writer_of(fact)`` says
        whose each is.  All wait then for the writer that has settled least (protocol F1).
        """
        name = grammar.stream_name(stream)

        def register(function: F) -> F:
            if self._start is not None:
                raise StreamError(f"on({stream!r}): register functions before start()")
            if not self._wants(name):
                raise ConfigError(f"on({stream!r}): that is not among the streams to follow: add it there")
            if self._functions.setdefault(name, function) is not function:
                raise ConfigError(f"stream {stream!r} has a function already")
            if linear:
                self._linear.add(name)
            return function

        return register

    def stream(self, name: str) -> StreamWriter:
        """Return the writing end of a stream in ``writes``; UnknownStreamError or NotAWriterError if it is not."""
        return self._writing(name).stream(name)

    def factory(self) -> ReplicationFactory:
        """Return the protocol factory to listen with; NotAWriterError if there is nobody to tell anything."""
        return self._writing().factory()

    def start(self) -> Deferred[None]:
        """Open the database and connect; fires when every writer's first positions are known.

        StoreError if the database cannot serve.  It waits for writers for as long as it takes.
        """
        return Deferred.fromCoroutine(self._started())

    def stop(self) -> Deferred[None]:
        """Let functions that are under way finish, close connections and the database."""
        if self._stop is None:
            self.stopping = True
            self._stop = Deferred.fromCoroutine(self._stopped())
        return share(self._stop)

    def wait_for(self, stream: str, writer: str, token: int, timeout: float = 10.0) -> Deferred[None]:
        """Fire once the facts of ``writer`` up to ``token`` are applied here.

        PositionTimeoutError after ``timeout`` seconds says how far it got and how the link is.  StoppingError: we stop.
        """
        key = grammar.stream_name(stream), grammar.instance_name(writer)
        if self._position(*key) >= token or (writer == self.instance_name and self._writes(key[0])):
            return succeed(None)  # what we wrote ourselves is here (protocol E6)
        if self.stopping:
            return fail(StoppingError(f"{self.instance_name!r} is stopping"))
        waiting: Deferred[None] = Deferred()
        entry = (Token(token), waiting)
        insort(self._waiters.setdefault(key, []), entry, key=_token_of)
        late = self.clock.callLater(
            timeout, lambda: waiting.errback(PositionTimeoutError(self._why(*key, token, timeout)))
        )

        def forget(result: T) -> T:
            if late.active():
                late.cancel()
            waiters = self._waiters.get(key, [])
            if entry in waiters:  # else moved() has taken it
                waiters.remove(entry)
                if not waiters:
                    del self._waiters[key]
            return result

        return waiting.addBoth(forget)

    # ---- life

    async def _started(self) -> None:
        if self._start is None and not self.stopping:
            self._start = Deferred.fromCoroutine(self._open())
        if self._start is not None and (error := await share(self._start)) is not None:
            raise error
        for first in self._first_positions.values():
            await share(first)
        if self.stopping:
            raise StoppingError(f"{self.instance_name!r} is stopping")

    async def _open(self) -> Exception | None:
        if self._copy is None:
            self._copy = not self._functions and not len(self.caches)
        if len(self.caches) and not self._wants(CACHES):
            self.log.warn("nothing invalidates the cached functions: {name} is not among streams", name=CACHES)
        try:
            await self.store.open()
            await self.store.claim(self.instance_name)
            if self.serving is not None:
                await self.serving.started()
            for name in self._streams or self._functions:
                await self._follower(name).open()
        except Exception as error:  # noqa: BLE001 (whatever it is, everybody who waits for the start is told)
            return error
        for link in self._links:
            if not self.stopping:
                link.start()
        Deferred.fromCoroutine(self._notice_silence())
        return None

    async def _notice_silence(self) -> None:
        """Name the streams that no writer has told anything of, some time after all were asked: one may be misspelt."""
        before: list[int | None] = []
        while True:
            await self.waits.nap(SILENCE)
            if self.stopping or self._warned:  # of a writer with our name: that is why
                return
            asked = [link.connections if link.greeted else None for link in self._links]
            if None not in asked and asked == before:
                break
            before = asked
        for name in self._streams or self._functions:
            follower = self._followers.get(name)
            if not self._writes(name) and not (follower is not None and follower.cursors):
                self.log.warn(
                    "no writer has said where stream {name} stands, and all are connected: is that its name?", name=name
                )

    async def _stopped(self) -> None:
        self.waits.end()
        self.voice.end()
        for first in self._first_positions.values():
            if not first.called:
                first.callback(None)  # so that start() ends, too
        for waiters in list(self._waiters.values()):
            for _, waiting in list(waiters):
                if not waiting.called:
                    waiting.errback(StoppingError(f"{self.instance_name!r} is stopping"))
        if self._start is not None:
            await share(self._start)
        await DeferredList([link.stop() for link in self._links])
        under_way = [each for follower in self._followers.values() for each in follower.under_way()]
        ended = DeferredList([share(each) for each in under_way], consumeErrors=True)
        await ended.addTimeout(STOP_PATIENCE, self.clock, lambda _result, _seconds: None)
        for each in under_way:
            each.cancel()
        await self._sources.close()
        await (self.store.close() if self.serving is None else self.serving.stop())

    # ---- what the links say

    def _heard(self, link: WriterLink, heard: Sequence[Heard]) -> None:
        positions = False
        for each in heard:
            if isinstance(each, Rows | Position):
                if each.instance == self.instance_name:  # trap 34
                    if not self._writes(each.stream):
                        self._warn_of_loopback(link)
                    continue
                if not self._wants(each.stream):
                    continue
                follower = self._followers.get(each.stream)
                if isinstance(each, Rows):
                    if follower is not None and follower.rows_heard(link, each):
                        link.rest()
                    continue
                positions = True
                self._source_of[each.instance] = link.endpoint
                if follower is None:
                    follower = self._follower(each.stream)
                    Deferred.fromCoroutine(self._open_follower(follower))
                follower.position_heard(link, each)
            elif link.peer is not None and not isinstance(each, Fault):
                self.listeners.hear(link.peer, each)
        if positions and not self._first_positions[link].called:
            self._first_positions[link].callback(None)
            for follower in list(self._followers.values()):
                follower.look_again()

    async def _open_follower(self, follower: StreamFollower) -> None:
        delay = FIRST_RETRY
        said = ""
        while not self.stopping:
            try:
                await follower.open()
            except ReplicationError as error:
                if said != str(error):
                    said = str(error)
                    self.log.error("cannot follow {stream}: {error}", stream=follower.name, error=said)
            else:
                return
            await self.waits.nap(delay)
            delay = min(delay * 2, LAST_RETRY)
            for link in self._links:
                link.ask()  # what was heard meanwhile is lost

    def _warn_of_loopback(self, link: WriterLink) -> None:
        if not self._warned:
            self._warned = True
            self.log.warn(
                "the writer at {endpoint} has our own name, {name}, so nothing of it is followed: give each an instance"
                " name of its own",
                endpoint=link.endpoint,
                name=self.instance_name,
            )

    def _lost(self, link: WriterLink) -> None:
        for follower in self._followers.values():
            follower.link_lost(link)

    def _faulted(self, fault: Fault) -> None:
        self.faults[fault.kind] += 1

    def _wants(self, stream: StreamName) -> bool:
        return self._streams is None or stream in self._streams

    def _follower(self, name: StreamName) -> StreamFollower:
        function = self._functions.get(name)
        if function is not None:
            keeping = Keeping.APPLIED
        elif self._copy and not self._writes(name):  # its table has what is written here
            keeping = Keeping.COPIED
        else:
            keeping = Keeping.WATCHED
        first = self._invalidate if name == CACHES else None
        kind = LinearFollower if name in self._linear else StreamFollower
        follower = self._followers[name] = kind(self, name, keeping, function, first)
        return follower

    def _invalidate(self, step: Apply | Reset) -> None:
        if isinstance(step, Reset):
            self.caches.clear()  # what the writer took back may be what they remember
            return
        self._empty_caches(step.facts)

    def _empty_caches(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            try:
                self.caches.apply(fact.rows)
            except StreamError as error:  # it has applied the other rows; a bad one must not hold up the stream
                self.log.error("caches fact {token}: {error}", token=fact.token, error=str(error))

    # ---- what is written here

    def _writes(self, stream: str) -> bool:
        return self.serving is not None and stream in self.serving.registry

    def _writing(self, stream: str | None = None) -> Serving:
        if self.serving is None:
            what = "listen for nobody" if stream is None else f"append to {stream[:100]!r} at its writer"
            raise NotAWriterError(f"worker {self.instance_name!r} writes no stream: {what}, or give writes=[…]")
        return self.serving

    def _committed(self, stream: StreamName, facts: Sequence[Fact]) -> None:
        """Empty our own caches by what we wrote: nobody tells us."""
        if stream == CACHES:
            self._empty_caches(facts)

    # ---- IFollowingProcess

    async def fetch(self, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int) -> Page:
        """Return missed facts from the first source that has them."""
        return await self._sources.fetch(self._source_of.get(writer), stream, writer, step, limit)

    def all_heard(self) -> bool:
        """Whether every link has said where its streams stand."""
        return all(first.called for first in self._first_positions.values())

    def moved(self, stream: StreamName, writer: InstanceName, position: Token) -> None:
        """Wake whoever waits for this position or an earlier one."""
        for link in self._links:
            link.go_on()
        waiters = self._waiters.get((stream, writer))
        if waiters is None:
            return
        ready = waiters[: bisect_right(waiters, position, key=_token_of)]
        del waiters[: len(ready)]
        if not waiters:
            del self._waiters[stream, writer]
        for _, waiting in ready:  # which may wait again, or cancel one another (trap 32)
            if not waiting.called:
                waiting.callback(None)

    def _position(self, stream: StreamName, writer: InstanceName) -> Token:
        follower = self._followers.get(stream)
        return Token(-1) if follower is None else follower.position(writer)

    def _why(self, stream: StreamName, writer: InstanceName, token: int, timeout: float) -> str:
        follower = self._followers.get(stream)
        if follower is None or writer not in follower.cursors:
            error = None if follower is None else follower.error
            how = "nothing has been heard of it" if error is None else f"it cannot be followed: {error}"
        else:
            status = follower.status(writer)
            how = f"it is at {status.position}, {status.state}" + (f" ({status.error})" if status.error else "")
        links = ", ".join(f"{link.endpoint} {link.state}" for link in self._links)
        return f"stream {stream!r} of {writer!r} did not reach {token} in {timeout:g} s: {how}; links: {links}"

    # ---- what the HTTP side asks (web.site.IServed)

    async def page(self, stream: str, writer: str | None, *, after: int, upto: int | None, limit: int) -> Page:
        """Return facts of one writer from the copy that is kept here, or from what is written here."""
        if self.serving is not None and self._writes(stream):
            if writer not in (None, self.instance_name) and not self.serving.stream(stream).shared:
                raise UnknownStreamError(f"of stream {stream!r} only what {self.instance_name!r} writes is kept here")
            return await self.serving.page(stream, writer, after=after, upto=upto, limit=limit)
        follower = self._copy_of(stream)
        if writer is None:
            if len(follower.cursors) != 1:
                raise StreamError(f"say which writer of {stream!r}: {', '.join(follower.cursors) or 'none known'}")
            writer = next(iter(follower.cursors))
        source = grammar.instance_name(writer)
        reached = max(Token(0), self._position(follower.name, source))
        end = reached if upto is None else Token(min(upto, reached))
        if after >= end:
            return Page([], end, limited=False)
        return await self.store.facts(follower.name, source, after=Token(after), upto=end, limit=limit)

    def _copy_of(self, stream: str) -> StreamFollower:
        follower = self._followers.get(StreamName(stream))
        if follower is None or follower.keeping is not Keeping.COPIED:
            raise UnknownStreamError(f"no copy of stream {stream[:100]!r} is kept here")
        return follower

    def token(self, stream: str) -> MultiWriterToken:
        """Return how far every writer of a stream is applied here (protocol F6)."""
        follower = self._followers.get(grammar.stream_name(stream))
        return token_of({} if follower is None else follower.positions())

    async def since(self, stream: str, token: str, limit: int) -> tuple[Since, str]:
        """Return what all writers have written since a token, from a copy that is kept here or what is written here."""
        if self.serving is not None and self._writes(stream):
            return await self.serving.since(stream, token, limit)
        follower = self._copy_of(stream)
        after = await self._tokens.read(token)
        since = await facts_since(self.page, follower.name, after, follower.positions(), limit=limit)
        return since, await self._tokens.spell(since.upto)

    async def append_texts(self, stream: str, facts: Sequence[Sequence[object]], key: str | None) -> Sequence[Token]:
        """Append facts to a stream that is written here."""
        return await self._writing(stream).append_texts(stream, facts, key)

    async def check(self) -> None:
        """Return if the store answers and can be written."""
        await (self.store.check() if self.serving is None else self.serving.check())

    def stream_statuses(self) -> list[StreamStatus]:
        """Return where every stream stands."""
        written = [] if self.serving is None else self.serving.stream_statuses()
        statuses = {status.definition.name: status for status in written}
        for name, follower in self._followers.items():
            followed = [follower.status(writer) for writer in follower.cursors]
            mine = statuses.get(name, StreamStatus(StreamDefinition(name), []))
            others = [each for each in mine.writers if each.instance not in follower.cursors]
            statuses[name] = attrs.evolve(mine, writers=[*others, *followed])
        return [*statuses.values()]

    def users_syncing(self) -> Mapping[str, Mapping[str, int]]:
        """Return the users that sync here, and those of whom our followers say so."""
        theirs = {} if self.serving is None else self.serving.users_syncing()
        return {**theirs, **self.voice.users_syncing()}

    async def places_of(self, user_id: str) -> Sequence[UserIp]:
        """Return where a user was seen; NotAWriterError if we do not write: only a writer writes that down."""
        if self.serving is not None:
            return await self.serving.places_of(user_id)
        raise NotAWriterError(f"this is worker {self.instance_name!r}: ask a writer where {user_id[:100]!r} was seen")

    def peer_statuses(self) -> list[PeerStatus]:
        """Return the links to writers, and who follows us."""
        followers = [] if self.serving is None else self.serving.peer_statuses()
        return [*(link.peer.status() for link in self._links if link.peer is not None), *followers]

    def samples(self) -> Iterable[Sample]:
        """Return the figures of the metrics page; what is counted on both sides is added up."""
        written = [] if self.serving is None else self.serving.samples()
        samples: dict[Hashable, Sample] = {}
        for each in (*self._samples(), *written):
            key = each.name, *sorted(each.labels.items())
            samples[key] = attrs.evolve(each, value=each.value + samples[key].value) if key in samples else each
        return samples.values()

    def _samples(self) -> Iterable[Sample]:
        up = sum(link.peer is not None for link in self._links)
        yield Sample("links", "gauge", "Writers that this worker is connected to.", up)
        yield Sample("connections_total", "counter", "Connections made.", sum(link.connections for link in self._links))
        for kind, count in self.faults.items():
            yield Sample(
                "faults_total", "counter", "Connections closed for a fault of the peer.", count, {"kind": kind}
            )
        for name, follower in self._followers.items():
            of = {"stream": name}
            yield Sample("catch_ups_total", "counter", "Pages of missed facts asked for.", follower.catch_ups, of)
            yield Sample("applied_rows_total", "counter", "Rows applied.", follower.applied_rows, of)
            yield Sample("failures_total", "counter", "Times that applying or fetching failed.", follower.failures, of)
            yield Sample("resets_total", "counter", "Times that a writer went back.", follower.resets, of)
            for writer, cursor in follower.cursors.items():
                where = {**of, "writer": writer}
                yield Sample("position", "gauge", "Position applied here.", cursor.position, where)
                yield Sample(
                    "lag", "gauge", "IDs announced and not applied.", cursor.announced - cursor.position, where
                )
                yield Sample("stopped", "gauge", "1 while a stream stands still.", writer in follower.errors, where)
        for cache, (hits, misses, size, invalidations) in self.caches.stats().items():
            which = {"cache": cache}
            yield Sample("cache_hits_total", "counter", "Calls answered by a cache.", hits, which)
            yield Sample("cache_misses_total", "counter", "Calls that computed.", misses, which)
            yield Sample("cache_size", "gauge", "Entries of a cache.", size, which)
            yield Sample("cache_invalidations_total", "counter", "Invalidations of a cache.", invalidations, which)
