"""All streams that a process follows: each command is passed to the follower of its stream."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import attrs
from msgspec.structs import replace
from twisted.internet.defer import Deferred, DeferredList
from twisted.logger import Logger, LogLevel

from replication.deferreds import Lifetime, share
from replication.errors import ConfigError, FactsGoneError, ReplicationError, StreamError
from replication.follower.absent_writers import AbsentWriters
from replication.follower.audit import Audit
from replication.follower.database_waits import look_for_waits
from replication.follower.doubts import Doubts
from replication.follower.history import FollowedHistories
from replication.follower.known_tokens import AppliedTokens, CopiedTokens, ReceivedTokens
from replication.follower.links import FollowedLinks, is_open
from replication.follower.merge import MergingFollower
from replication.follower.relayed_audit import RelayedAudit
from replication.follower.reports import PositionReports
from replication.follower.stream import FIRST_RETRY, LAST_RETRY, FollowMode, StreamFollower, begin_without_gap
from replication.logs import TroubleLog
from replication.session.backoff import Backoff
from replication.session.channel import LostRow
from replication.session.connection import Fault, Received, Rows
from replication.streams.access_tokens import hide_access_tokens
from replication.streams.cursor import Apply, CatchUp, Reset
from replication.streams.definitions import CACHES
from replication.streams.history import last_name
from replication.streams.interfaces import Page
from replication.wire.commands import Ping, Position
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

    from twisted.internet.interfaces import IReactorTime

    from replication.caches import Caches
    from replication.follower.application import FailedFactFunction
    from replication.follower.catch_up import CatchUpSources
    from replication.follower.relay import Relay
    from replication.follower.waiters import PositionWaiters
    from replication.net.command_functions import CommandFunctions
    from replication.net.links import IWriterLink
    from replication.streams.definitions import StreamDefinition
    from replication.streams.facts import Fact
    from replication.streams.history import History
    from replication.streams.interfaces import IStreamStore
    from replication.web.client import HttpCatchUp

STOP_PATIENCE: Final = 10.0  # seconds in which running functions must end when this process stops
QUIET_PERIOD: Final = 5.0  # seconds; a writer that has sent SERVER sends all its positions within them


@attrs.define(eq=False, repr=False, kw_only=True)
class FollowedStreams:
    """The followers of all streams, by stream name.

    Args:
        instance_name: of this process; rows under that name are not followed.
        store: holds positions and copies.
        lifetime: of this process.
        sources: where missed facts come from.
        waiters: fire when positions move.
        caches: are invalidated by the caches stream.
        commands: the application's functions for other commands.
        names: of the streams to follow; None means all.
        written: contains the names of the streams that this process writes.
        accept_new_history: that of ``FollowedHistories``.
        skip_gone: whether to go on where the writer has deleted facts that were not applied here.
        described: the definitions of streams that other programs write, by name.
        audit_interval: seconds between two checks of the audit; 0: there is none.
        access_tokens: that of ``StreamFollower``.
        relay: publishes what is followed; None if nothing is relayed.
        expected: the names of the writers that the configuration places at an endpoint.

    """

    log = Logger()

    _instance_name: InstanceName
    _store: IStreamStore
    _lifetime: Lifetime
    _sources: CatchUpSources
    _waiters: PositionWaiters
    _caches: Caches
    _commands: CommandFunctions
    names: Sequence[StreamName] | None
    _written: Container[str]
    _accept_new_history: bool
    _skip_gone: bool
    _described: Mapping[StreamName, StreamDefinition]
    _audit_interval: float
    _access_tokens: bool
    relay: Relay | None = None
    _expected: Mapping[str, Sequence[InstanceName]] = attrs.field(factory=dict)
    functions: dict[StreamName, Callable[..., object]] = attrs.field(init=False, factory=dict)
    undo: dict[StreamName, Callable[..., object]] = attrs.field(init=False, factory=dict)  # functions of on_reset
    on_failed: dict[StreamName, FailedFactFunction] = attrs.field(init=False, factory=dict)
    copy: bool = attrs.field(init=False, default=False)  # whether streams without a function are copied
    _linear: set[StreamName] = attrs.field(init=False, factory=set)
    _followers: dict[StreamName, StreamFollower] = attrs.field(init=False, factory=dict)
    links: FollowedLinks = attrs.field(init=False, factory=FollowedLinks)
    absent: AbsentWriters = attrs.field(init=False)
    _same_name_logged: bool = attrs.field(init=False, default=False)
    _audit: Audit | None = attrs.field(init=False, default=None)  # None: no foreign database, or no interval
    _relayed_audit: RelayedAudit | None = attrs.field(init=False, default=None)  # None: there can be none

    def __attrs_post_init__(self) -> None:
        """Let the relay announce writers once all are found, and the sources ask for epochs over the wire."""
        self._sources.epoch_of = self.links.epoch
        self.absent = AbsentWriters(
            expected=self._expected,
            links=self.links,
            lifetime=self._lifetime,
            all_streams=self.names is None,
            patience=QUIET_PERIOD,
        )
        if self.relay is not None:
            self.relay.links, self.relay.all_known = self.links, self.all_writers_known
            self.relay.followed_epoch = self._followed_epoch
        if self._audit_interval and self._sources.foreign_database() is None:
            self._relayed_audit = RelayedAudit(
                over_http=lambda endpoint: self._sources.over_http(endpoint),  # noqa: PLW0108 (tests replace them)
                links=self.links,
                endpoints=self.links.endpoints,
                followers=self,
                lifetime=self._lifetime,
                interval=self._audit_interval,
            )

    def __iter__(self) -> Iterator[StreamFollower]:
        """All followers; their number grows as writers send positions."""
        return iter([*self._followers.values()])

    def get(self, name: str) -> StreamFollower | None:
        """Return the follower of a stream, None if nothing was received of it."""
        return self._followers.get(StreamName(name))

    def wants(self, stream: str) -> bool:
        """Whether a stream is among those to follow."""
        return self.names is None or stream in self.names

    def add_function(self, stream: StreamName, function: Callable[..., object], *, linear: bool) -> None:
        """Register the application's function for a stream; ConfigError if that cannot be."""
        if not self.wants(stream):
            raise ConfigError(f"on({stream!r}): it is not among the streams to follow; add it to streams")
        if self.functions.setdefault(stream, function) is not function:
            raise ConfigError(f"stream {stream!r} has a function already")
        if linear and stream in self._described and self._described[stream].known_by_token:
            raise ConfigError(f"on({stream!r}, linear=True): its writers send each other's facts, so there is no order")
        if linear:
            self._linear.add(stream)

    def position(self, stream: StreamName, writer: InstanceName) -> Token:
        """Return the applied position of a writer; -1 if none is known."""
        follower = self._followers.get(stream)
        return Token(-1) if follower is None else follower.position(writer)

    def all_writers_known(self, follower: StreamFollower | None = None) -> bool:
        """Whether all writers of a stream are known; if not, the first number of a token stays (docs/http.md).

        None stands for all streams.  Over Redis, a process that does not run, or is slow, sends no position: only the
        database shows such a writer.
        """
        if not self.links.all_writers_found():
            return False
        if not self.links.over_redis():
            return True
        if self._audit is None:
            return False
        return self._audit.every_writer_known() if follower is None else self._audit.all_writers_known(follower)

    # ---- life

    async def open(self) -> None:
        """Read the stored positions of ``names``, or of the streams with a function; ReplicationError if that fails."""
        for decorator, registered in (("on_reset", self.undo.keys()), ("on_failed_fact", self.on_failed.keys())):
            for name in registered - self.functions.keys():
                raise ConfigError(f"{decorator}({name!r}): no function is registered with on({name!r})")
        for name in self.names or self.functions:
            await self._follower(name).open()

    def start(self) -> None:
        """Connect to every writer."""
        for client in self.links:
            if not self._lifetime.ended:
                client.start()
        Deferred.fromCoroutine(self._warn_of_unknown_streams())
        Deferred.fromCoroutine(self.absent.watch())
        Deferred.fromCoroutine(look_for_waits(self, self._lifetime))
        PositionReports(
            instance_name=self._instance_name,
            processes=self.http_of_writers,
            followers=self,
            copied=self._copied_streams,
            sync=self._store.sync,
            lifetime=self._lifetime,
        ).start()
        database = self._sources.foreign_database()
        if database is not None and self._audit_interval:
            self._audit = Audit(
                source=database,
                followers=self,
                links=self.links,
                lifetime=self._lifetime,
                interval=self._audit_interval,
                checked=None if self.relay is None else self.relay.look_for_others,
            )
            self._audit.start()

    async def stop(self, clock: IReactorTime) -> None:
        """Close every connection, and let running functions end for STOP_PATIENCE seconds."""
        await DeferredList([client.stop() for client in self.links])
        running = [each for follower in self for each in follower.in_progress()]
        ended = DeferredList([share(each) for each in running], consumeErrors=True)
        await ended.addTimeout(STOP_PATIENCE, clock, lambda _result, _seconds: None)
        for each in running:
            each.cancel()

    # ---- what sources have

    async def fetch_history(self, stream: StreamName, writer: InstanceName) -> History:
        """Return the history of a writer from the catch-up sources; CatchUpError if one fails and none has it."""
        return await self._sources.history(self.links.endpoints.get(writer), stream, writer)

    async def fetch_page(self, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int) -> Page:
        """Return a page for a follower of this process, which keeps no copy; CatchUpError if no source has it."""
        page = await self._sources.page(self.links.endpoints.get(writer), stream, writer, step, limit)
        return page if self._access_tokens else replace(page, facts=hide_access_tokens(stream, page.facts))

    def http_of_writers(self) -> list[HttpCatchUp]:
        """Return the HTTP of the writers, or of the relays, that are followed."""
        return self._sources.over_http_of(self.links.endpoints.values())

    # ---- what clients receive

    def received(self, client: IWriterLink, commands: Sequence[Received | LostRow]) -> None:
        """Process the commands of one read."""
        positions = False
        for command in commands:
            if isinstance(command, Rows | Position):
                if command.instance == self._instance_name:  # docs/protocol/traps.md 34
                    if command.stream not in self._written:
                        self._warn_of_same_name(client)
                elif not self.wants(command.stream):
                    pass
                elif isinstance(command, Rows):
                    self._rows_received(client, command)
                else:
                    positions = True
                    self._position_received(client, command)
            elif isinstance(command, LostRow):
                self._followers[command.stream].row_lost(client, command.instance)
            elif isinstance(command, Ping):
                _act_on_ping(self.links.pinged(client, command), self._followers, self.relay)
            elif client.peer is not None and not isinstance(command, Fault):
                self._commands.receive(client.peer, command)
                if self.relay is not None:
                    self.relay.pass_down(command)
        if positions and self.links.is_late(client):
            self.following(client)

    def following(self, client: IWriterLink) -> None:
        """Process the end of the first positions of a connection."""
        self.links.following(client)
        if self._relayed_audit is not None:
            self._relayed_audit.following(client)
        for follower in self:
            follower.following(client)
            follower.resume()
        if self.relay is not None:
            self.relay.announce()

    def lost(self, client: IWriterLink) -> None:
        """Drop the incomplete facts of a lost connection; another one to the same writer is followed from now on."""
        self._sources.connection_lost()
        for follower in self:
            follower.connection_lost(client)
        self.links.lost(client)

    def invalidate(self, facts: Iterable[Fact]) -> None:
        """Invalidate caches by facts of the caches stream."""
        for fact in facts:
            try:
                self._caches.apply(fact.rows)
            except StreamError as error:  # the other rows are applied; a bad row must not stop the stream
                self.log.error("caches fact {token}: {error}", token=fact.token, error=str(error))

    # ---- inside

    def _rows_received(self, client: IWriterLink, rows: Rows) -> None:
        follower = self._followers.get(rows.stream)
        if follower is not None and follower.rows_received(client, rows):
            client.pause_reading()
        if follower is None or not follower.is_linked(rows.instance):
            client.position_missing()

    def _position_received(self, client: IWriterLink, command: Position) -> None:
        self.links.position_received(client, command.instance)
        follower = self._followers.get(command.stream)
        if follower is None:
            follower = self._follower(command.stream)
            Deferred.fromCoroutine(self._open(follower))
        follower.position_received(client, command, can_go_back=client.can_go_back(command.stream))

    async def _open(self, follower: StreamFollower) -> None:
        """Open a follower; retry until that succeeds."""
        backoff, trouble = Backoff(FIRST_RETRY, LAST_RETRY), TroubleLog(self.log)
        while not self._lifetime.ended:
            try:
                await follower.open()
            except ReplicationError as error:
                if not self._lifetime.ended:
                    trouble.report("cannot follow {stream}: {error}", error=error, stream=follower.name)
            else:
                return
            await self._lifetime.sleep(backoff.next())
            for client in self.links:
                client.request_positions()  # positions that arrived meanwhile were dropped

    def _follower(self, name: StreamName) -> StreamFollower:
        function = self.functions.get(name)
        if function is not None:
            mode = FollowMode.APPLIED
        elif self.copy and name not in self._written:  # the table of a stream written here has its facts
            mode = FollowMode.COPIED
        else:
            mode = FollowMode.POSITION_ONLY
        definition, database = self._described.get(name), self._sources.foreign_database()
        used = mode is not FollowMode.POSITION_ONLY or name == CACHES or self.relay is not None
        compared = used and database is not None and database.audits(name)
        relayed = self._relayed_audit if used else None
        described = definition is not None and (definition.known_by_token or definition.position_name is not None)
        known = None
        if described or relayed is not None:
            known = _known_tokens(name, mode, self._store, self._instance_name)
        caching = name == CACHES and bool(len(self._caches))
        make: Callable[..., StreamFollower] = StreamFollower
        if name in self._linear:
            make = partial(MergingFollower, all_positions_received=self.links.all_positions_received)
        follower = self._followers[name] = make(
            name=name,
            mode=mode,
            instance_name=self._instance_name,
            store=self._store,
            lifetime=self._lifetime,
            fetch=self._fetch,
            moved=self._moved,
            function=function,
            undo=self.undo.get(name),
            on_failed=self.on_failed.get(name),
            histories=self._histories(name, mode) if mode is not FollowMode.POSITION_ONLY or caching else None,
            known=known,
            known_by_token=definition is not None and definition.known_by_token,
            audited=compared and self._audit_interval > 0,
            fetches_whole=compared and self.links.over_redis() and definition is not None and definition.has_kinds,
            confirm_audit=None if relayed is None else relayed.confirm,
            is_open=is_open,
            first=self._invalidate_step if name == CACHES else None,
            begin=self._begin_caches if name == CACHES else begin_without_gap,
            access_tokens=self._access_tokens,
            relay=self.relay,
        )
        return follower

    async def _followed_epoch(self, stream: StreamName, writer: InstanceName) -> str:
        """Return the name of a writer's newest epoch that is followed; empty if there is none."""
        follower = self._followers.get(stream)
        if follower is None:
            return ""
        if follower.histories is not None:
            return last_name(await follower.histories.followed(writer))
        # Nothing is stored here.  Without a connection nothing is published; the next one closes those of followers.
        return await self.links.epoch(stream, writer) or ""

    def _histories(self, name: StreamName, mode: FollowMode) -> FollowedHistories:
        async def count(stream: StreamName, writer: InstanceName, history: History, **of: Token) -> int | None:
            return await self._sources.count(self.links.endpoints.get(writer), stream, writer, history, **of)

        return FollowedHistories(
            stream=name,
            store=None if mode is FollowMode.POSITION_ONLY else self._store,
            follower="" if mode is FollowMode.COPIED else self._instance_name,
            lifetime=self._lifetime,
            fetch=self.fetch_history,
            accept_new=self._accept_new_history or mode is FollowMode.POSITION_ONLY,
            changed=None if self.relay is None else self.relay.restarted,
            # It may have lost facts that were not received here, and values may have been read before that.
            begun_again=self._caches.clear if name == CACHES else None,
            doubts=Doubts(
                stream=name,
                copies=self._store if mode is FollowMode.COPIED else None,
                clock=self._lifetime.clock,
                count=count,
            ),
        )

    async def _fetch(self, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int) -> Page:
        histories, endpoint = self._followers[stream].histories, self.links.endpoints.get(writer)
        followed = () if histories is None else await histories.followed(writer)
        try:
            return await self._sources.fetch(endpoint, stream, writer, step, limit, followed=followed)
        except FactsGoneError as error:
            mode = self._followers[stream].mode
            applies = mode is not FollowMode.POSITION_ONLY  # otherwise the application lacks nothing
            if error.upto is None or (applies and not self._skip_gone):
                raise
            upto = min(Token(error.upto), step.upto)
            if stream == CACHES:
                self._caches.clear()  # any entry may be among those that were invalidated
            if self.relay is not None:
                self.relay.left_out((stream, writer), upto)
            self.log.emit(
                LogLevel.error if applies else LogLevel.info,
                "{stream}: facts of {writer} after {after} up to {upto} are gone, and are left out here",
                stream=stream,
                writer=writer,
                after=step.after,
                upto=upto,
            )
            return Page((), upto, limited=upto < step.upto, left_out=True)

    async def _copied_streams(self) -> Collection[StreamName]:
        """Return the streams whose copies are stored here."""
        stored = await self._store.stored_positions() if self.copy else ()
        return [each for each in stored if self.wants(each) and each not in self._written]

    def _moved(self, stream: StreamName, writer: InstanceName, position: Token) -> None:
        for client in self.links:
            client.resume_reading()
        self._waiters.moved(stream, writer, position)

    def _begin_caches(self, command: Position) -> Token:
        """Clear the caches at the first POSITION of a writer: what it has sent before is never received here."""
        self._caches.clear()
        return begin_without_gap(command)

    def _invalidate_step(self, _: InstanceName, step: Apply | Reset) -> None:
        if isinstance(step, Reset):
            self._caches.clear()  # cached values may come from facts that the writer has lost
        else:
            self.invalidate(step.facts)

    def _warn_of_same_name(self, client: IWriterLink) -> None:
        if not self._same_name_logged:
            self._same_name_logged = True
            self.log.warn(
                "the writer at {endpoint} has the name of this process, {name}, so its facts are not followed: "
                "give each process an instance name of its own",
                endpoint=client.endpoint,
                name=self._instance_name,
            )

    async def _warn_of_unknown_streams(self) -> None:
        """Warn of each stream without a position, once all writers have had time: its name may be misspelt."""
        before: list[int | None] = []
        while True:
            await self._lifetime.sleep(QUIET_PERIOD)
            if self.relay is not None:
                self.relay.end_patience()
            if self._lifetime.ended or self._same_name_logged:
                return
            connected = [client.connections if client.greeted else None for client in self.links]
            if None not in connected and connected == before:
                break
            before = connected
        for name in self.names or self.functions:
            follower = self._followers.get(name)
            if name not in self._written and not (follower is not None and follower.cursors):
                self.log.warn(
                    "no writer has sent a position of stream {name}, and all are connected: is that its name?",
                    name=name,
                )


def _known_tokens(name: StreamName, mode: FollowMode, store: IStreamStore, follower: InstanceName) -> CopiedTokens:
    if mode is FollowMode.APPLIED:
        return AppliedTokens(name, store, follower)
    return (CopiedTokens if mode is FollowMode.COPIED else ReceivedTokens)(name, store)


def _act_on_ping(words: list[str], followers: Mapping[StreamName, StreamFollower], relay: Relay | None) -> None:
    match words:
        case [Ping.HISTORY, stream, writer] if (follower := followers.get(StreamName(stream))) is not None:
            for cursor in [each for name, each in follower.cursors.items() if name == writer]:
                cursor.compare_again()
                follower.resume()
        case [Ping.COMPLETE] if relay is not None:
            relay.announce()
        case [Ping.PARTIAL] | [_, Ping.PARTIAL, Ping.ECHO] if relay is not None:
            relay.look_for_others()
