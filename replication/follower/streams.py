"""All streams that a process follows: each command is passed to the follower of its stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import attrs
from twisted.internet.defer import DeferredList
from twisted.logger import Logger

from replication.deferreds import Lifetime, share, start_alone
from replication.errors import ReplicationError
from replication.follower.absent_writers import AbsentWriters
from replication.follower.audit import Audit
from replication.follower.database_waits import look_for_waits
from replication.follower.follower_factory import FollowerFactory
from replication.follower.former_writers import FormerWriters
from replication.follower.links import FollowedLinks
from replication.follower.lost_writers import LostWriters
from replication.follower.missed_facts import MissedFacts
from replication.follower.registration import StreamFunctions
from replication.follower.relayed_audit import RelayedAudit
from replication.follower.reports import PositionReports
from replication.follower.second_databases import SecondDatabases
from replication.follower.step_errors import FIRST_RETRY, LAST_RETRY
from replication.logs import TroubleLog
from replication.net.endpoints import is_redis
from replication.session.backoff import Backoff
from replication.session.channel import LostRow
from replication.session.connection import Fault, Received, Rows
from replication.wire.commands import Ping, Position
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator, Mapping, Sequence

    from twisted.internet.interfaces import IReactorTime

    from replication.follower.cache_invalidation import CacheInvalidation
    from replication.follower.catch_up import CatchUpSources
    from replication.follower.relay import Relay
    from replication.follower.sources import DatabaseCatchUp
    from replication.follower.stream import StreamFollower
    from replication.follower.waiters import PositionWaiters
    from replication.net.command_functions import CommandFunctions
    from replication.net.links import IWriterLink
    from replication.streams.definitions import StreamDefinition
    from replication.streams.history import History
    from replication.streams.interfaces import IStreamStore

STOP_PATIENCE: Final = 10.0  # seconds in which running functions must end when this process stops
QUIET_PERIOD: Final = 5.0  # seconds; a writer that has sent SERVER sends all its positions within them
UNKNOWN: Final = "no writer has sent a position of stream {name}, and all are connected: is that its name?"


@attrs.define(eq=False, repr=False, kw_only=True)
class FollowedStreams:
    """The followers of all streams, by stream name.

    Args:
        instance_name: of this process; rows under that name are not followed.
        store: holds positions and copies.
        lifetime: of this process.
        factory: makes the follower of a stream.
        functions: of the application, for facts.
        missed: fetches the facts that this process has missed.
        links: to the writers.
        waiters: fire when positions move.
        commands: the application's functions for other commands.
        names: of the streams to follow; None means all.
        written: contains the names of the streams that this process writes.
        audit_interval: seconds between two checks of the audit; 0: there is none.
        relay: publishes what is followed; None if nothing is relayed.
        expected: the names of the writers that the configuration places at an endpoint.

    """

    log = Logger()

    _instance_name: InstanceName
    _store: IStreamStore
    _lifetime: Lifetime
    factory: FollowerFactory
    functions: StreamFunctions
    missed: MissedFacts
    links: FollowedLinks
    _waiters: PositionWaiters
    _commands: CommandFunctions
    names: Sequence[StreamName] | None
    _written: Container[str]
    _audit_interval: float
    relay: Relay | None
    _expected: Mapping[str, Sequence[InstanceName]]
    _followers: dict[StreamName, StreamFollower] = attrs.field(init=False, factory=dict)
    absent: AbsentWriters = attrs.field(init=False)
    lost_writers: LostWriters = attrs.field(init=False)
    second_databases: SecondDatabases = attrs.field(init=False)
    unknown: list[StreamName] = attrs.field(init=False, factory=list)  # streams of which no writer had sent a position
    _same_name_logged: bool = attrs.field(init=False, default=False)
    _audit: Audit | None = attrs.field(init=False, default=None)  # None: no foreign database, or no interval
    _relayed_audit: RelayedAudit | None = attrs.field(init=False, default=None)  # None: there can be none

    def __attrs_post_init__(self) -> None:
        """Let the relay announce writers once all are found, and the sources request histories over the connections."""
        self.links.followed = self._followed_link
        self.missed.sources.sent_history = self.links.history
        self.absent = AbsentWriters(
            expected=self._expected,
            links=self.links,
            lifetime=self._lifetime,
            all_streams=self.names is None,
            patience=QUIET_PERIOD,
        )
        self.lost_writers = LostWriters(
            instance_name=self._instance_name,
            links=self.links,
            followers=self,
            over_http=lambda endpoint: self.missed.sources.over_http(endpoint),  # noqa: PLW0108 (tests replace them)
            lifetime=self._lifetime,
            patience=QUIET_PERIOD,
        )
        self.second_databases = SecondDatabases(
            links=self.links, followers=self, lifetime=self._lifetime, patience=QUIET_PERIOD
        )
        if self.relay is not None:
            self.relay.links, self.relay.all_known = self.links, self.all_writers_known
            self.relay.followed_history = self._followed_history
        if self._audit_interval and self.missed.sources.foreign_database() is None:
            self._relayed_audit = RelayedAudit(
                over_http=lambda endpoint: self.missed.sources.over_http(endpoint),  # noqa: PLW0108 (tests replace them)
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

    def position(self, stream: StreamName, writer: InstanceName) -> Token:
        """Return the applied position of a writer; -1 if none is known."""
        follower = self._followers.get(stream)
        return Token(-1) if follower is None else follower.position(writer)

    def confirmed(self, stream: StreamName, writer: InstanceName) -> bool:
        """Whether what is applied is known to be of the writer's present history, as far as it has sent a position."""
        follower = self._followers.get(stream)
        cursor = None if follower is None else follower.cursors.get(writer)
        return cursor is None or cursor.confirmed

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
        self.functions.check()
        for name in self.names or self.functions.apply:
            await self._follower(name).open()

    def start(self) -> None:
        """Connect to every writer."""
        for link in self.links:
            if not self._lifetime.ended:
                link.start()
        start_alone(self._warn_of_unknown_streams())
        if self.relay is not None:
            start_alone(self._end_patience(self.relay))
        start_alone(self.absent.watch())
        start_alone(look_for_waits(self, self._lifetime))
        PositionReports(
            instance_name=self._instance_name,
            processes=self.missed.over_http,
            followers=self,
            copied=self._copied_streams,
            sync=self._store.sync,
            lifetime=self._lifetime,
        ).start()
        database = self.missed.sources.foreign_database()
        if database is not None and self._audit_interval:
            self._audit = Audit(
                source=database,
                followers=self,
                links=self.links,
                lifetime=self._lifetime,
                interval=self._audit_interval,
                checked=None if self.relay is None else self.relay.look_for_others,
                former=self._former_writers(database) if self.links.over_redis() else None,
            )
            self._audit.start()

    async def stop(self, clock: IReactorTime) -> None:
        """Close every connection, and let running functions end for STOP_PATIENCE seconds."""
        await DeferredList([link.stop() for link in self.links])
        running = [each for follower in self for each in follower.in_progress()]
        ended = DeferredList([share(each) for each in running], consumeErrors=True)
        await ended.addTimeout(STOP_PATIENCE, clock, lambda _result, _seconds: None)
        for each in running:
            each.cancel()

    # ---- what links receive

    def received(self, link: IWriterLink, commands: Sequence[Received | LostRow]) -> None:
        """Process the commands of one read."""
        positions = False
        for command in commands:
            if isinstance(command, Rows | Position):
                if command.instance == self._instance_name:  # docs/protocol/traps.md 34
                    if command.stream not in self._written:
                        self._warn_of_same_name(link)
                elif not self.wants(command.stream):
                    pass
                elif isinstance(command, Rows):
                    self._rows_received(link, command)
                else:
                    positions = True
                    self._position_received(link, command)
            elif isinstance(command, LostRow):
                self._followers[command.stream].row_lost(link, command.instance)
            elif isinstance(command, Ping):
                self._act_on_ping(link, self.links.pinged(link, command))
            elif link.peer is not None and not isinstance(command, Fault):
                self._commands.receive(link.peer, command)
                if self.relay is not None:
                    self.relay.pass_down(command)
        if positions and self.links.is_late(link):
            self.following(link)

    def following(self, link: IWriterLink) -> None:
        """Process the end of the first positions of a connection."""
        self.links.following(link)
        self.lost_writers.following()
        self.second_databases.following()
        if self._relayed_audit is not None:
            self._relayed_audit.following(link)
        for follower in self:
            follower.following(link)
            follower.resume()
        if self.relay is not None:
            self.relay.announce()
            if link.connections > 1 and not is_redis(link.endpoint):
                start_alone(self._withdraw_unsent(link))

    def lost(self, link: IWriterLink) -> None:
        """Drop the incomplete facts of a lost connection; another one to the same writer is followed from now on."""
        self.missed.sources.connection_lost()
        for follower in self:
            follower.connection_lost(link)
        self.links.lost(link)

    # ---- inside

    def _former_writers(self, database: DatabaseCatchUp) -> FormerWriters:
        return FormerWriters(source=database, links=self.links, lifetime=self._lifetime, received=self.received)

    def _act_on_ping(self, link: IWriterLink, words: list[str]) -> None:
        match words:
            case [Ping.HISTORY, stream, writer] if (follower := self.get(stream)) is not None:
                for cursor in [each for name, each in follower.cursors.items() if name == writer]:
                    cursor.compare_again()
                    follower.resume()
                    if self.relay is not None and follower.histories is None:
                        self.relay.epoch_begun(follower.name, InstanceName(writer))
            case [Ping.WITHDRAWN, stream, writer] if (follower := self.get(stream)) is not None:
                follower.withdrawn(link, InstanceName(writer))
                self.links.request_positions(InstanceName(writer))  # another connection may be to the writer
            case [Ping.COMPLETE] if self.relay is not None:
                self.relay.announce()
                start_alone(self._withdraw_unsent(link))
            case [Ping.PARTIAL] | [_, Ping.PARTIAL, Ping.ECHO] if self.relay is not None:
                self.relay.look_for_others()

    async def _withdraw_unsent(self, link: IWriterLink) -> None:
        """Let the relay withdraw each writer that was followed on a link before, if it has not sent its POSITION again.

        A relay at the other end may not have found that writer yet.  Then this is called once more.
        """
        connection = link.connections
        await self._lifetime.sleep(QUIET_PERIOD)
        is_open = link.state == "following" and link.connections == connection and not self._lifetime.ended
        if is_open and link.endpoint not in self.links.partial_relays():
            for follower in self:
                for writer in [name for name, cursor in follower.cursors.items() if not cursor.linked]:
                    follower.withdrawn(link, writer)

    def _rows_received(self, link: IWriterLink, rows: Rows) -> None:
        follower = self._followers.get(rows.stream)
        if follower is not None and follower.rows_received(link, rows):
            link.pause_reading()
        if follower is None or not follower.is_linked(rows.instance):
            link.position_missing()

    def _position_received(self, link: IWriterLink, command: Position) -> None:
        self.links.position_received(link, command.stream, command.instance)
        self.second_databases.position_received(link, command)
        follower = self._followers.get(command.stream)
        if follower is None:
            follower = self._follower(command.stream)
            start_alone(self._open(follower))
        can_go_back, begins_again = link.can_go_back(command.stream), link.begins_again(command.stream)
        follower.position_received(link, command, can_go_back=can_go_back, begins_again=begins_again)

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
            for link in self.links:
                link.request_positions()  # positions that arrived meanwhile were dropped

    def _follower(self, name: StreamName) -> StreamFollower:
        follower = self.factory.make(name, moved=self._moved, relayed_audit=self._relayed_audit)
        self._followers[name] = follower
        return follower

    def _followed_link(self, stream: StreamName, writer: InstanceName) -> IWriterLink | None:
        """Return the connection on which a writer is followed; None if there is none."""
        follower = self._followers.get(stream)
        cursor = None if follower is None else follower.cursors.get(writer)
        return None if cursor is None else cast("IWriterLink | None", cursor.link)

    async def _followed_history(self, stream: StreamName, writer: InstanceName) -> History:
        """Return the history of a writer that is followed; empty if there is none."""
        follower = self._followers.get(stream)
        if follower is None:
            return ()
        if follower.histories is not None:
            return await follower.histories.followed(writer)
        # No history is compared here, so the writer is asked.  Without a link the result is empty: at the next link
        # ``Relay.linked_again`` closes the followers' connections, so they ask again.
        return await self.links.history(stream, writer) or ()

    async def _copied_streams(self) -> Collection[StreamName]:
        """Return the streams whose copies are stored here."""
        stored = await self._store.stored_positions() if self.factory.copies else ()
        return [each for each in stored if self.wants(each) and each not in self._written]

    def _moved(self, stream: StreamName, writer: InstanceName, position: Token) -> None:
        for link in self.links:
            link.resume_reading()
        if self.confirmed(stream, writer):
            self._waiters.moved(stream, writer, position)

    def _warn_of_same_name(self, link: IWriterLink) -> None:
        if not self._same_name_logged:
            self._same_name_logged = True
            self.log.warn(
                "the writer at {endpoint} has the name of this process, {name}, so its facts are not followed: "
                "give each process an instance name of its own",
                endpoint=link.endpoint,
                name=self._instance_name,
            )

    async def _end_patience(self, relay: Relay) -> None:
        """Let the relay announce what it has found, although some writers may have sent no position."""
        await self._lifetime.sleep(QUIET_PERIOD)
        if not self._lifetime.ended:
            relay.end_patience()

    async def _warn_of_unknown_streams(self) -> None:
        """Warn of each stream without a position, once all writers have had time: its name may be misspelt."""
        before: list[int | None] = []
        while True:
            await self._lifetime.sleep(QUIET_PERIOD)
            if self._lifetime.ended or self._same_name_logged:
                return
            connected = [link.connections if link.greeted else None for link in self.links]
            if None not in connected and connected == before:
                break
            before = connected
        for name in self.names or self.functions.apply:
            follower = self._followers.get(name)
            if name not in self._written and not (follower is not None and follower.cursors):
                self.unknown.append(name)
                self.log.warn(UNKNOWN, name=name)


def follow_streams(
    *,
    instance_name: InstanceName,
    store: IStreamStore,
    lifetime: Lifetime,
    sources: CatchUpSources,
    waiters: PositionWaiters,
    invalidation: CacheInvalidation,
    commands: CommandFunctions,
    names: Sequence[StreamName] | None,
    written: Container[str],
    described: Mapping[StreamName, StreamDefinition],
    expected: Mapping[str, Sequence[InstanceName]],
    audit_interval: float,
    accept_new_history: bool,
    skip_gone: bool,
    access_tokens: bool,
    relay: Relay | None,
) -> FollowedStreams:
    """Return the streams that a process follows; ``FollowedStreams`` and ``FollowerFactory`` have the parameters."""
    links, functions = FollowedLinks(), StreamFunctions(names=names, described=described)
    missed = MissedFacts(
        sources=sources,
        links=links,
        skip_gone=skip_gone,
        access_tokens=access_tokens,
        clear_caches=invalidation.clear,
        relay=relay,
    )
    factory = FollowerFactory(
        instance_name=instance_name,
        store=store,
        lifetime=lifetime,
        functions=functions,
        missed=missed,
        invalidation=invalidation,
        links=links,
        written=written,
        described=described,
        audits=audit_interval > 0,
        accept_new_history=accept_new_history,
        access_tokens=access_tokens,
        relay=relay,
    )
    return FollowedStreams(
        instance_name=instance_name,
        store=store,
        lifetime=lifetime,
        factory=factory,
        functions=functions,
        missed=missed,
        links=links,
        waiters=waiters,
        commands=commands,
        names=names,
        written=written,
        audit_interval=audit_interval,
        relay=relay,
        expected=expected,
    )
