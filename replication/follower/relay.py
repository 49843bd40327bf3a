"""A relay: a worker publishes what it follows to workers of its own, in the names of the writers.

A fact is published once it is applied here, so no follower is ahead of the pages that this process serves.  A follower
compares the history of the writer itself when it connects.  So where a writer went back, or started again, the relay
closes its connections, as the writer has closed its own.  See docs/how-to/relay.md.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import attrs
from twisted.logger import Logger

from replication.errors import LocalProtocolError
from replication.follower.links import FollowedLinks
from replication.net.broadcast import Broadcast
from replication.presence.syncing import SyncingUsers
from replication.presence.tracker import PresenceTracker
from replication.session.connection import Fault, Role, may_send
from replication.session.encoder import (
    FIRST_GAP,
    EncodedLines,
    encode_gap,
    encode_new_epoch,
    encode_position,
    encode_withdrawn,
)
from replication.streams.cursor import Apply, Check, Cursor, Reset
from replication.wire.commands import (
    ApplicationCommand,
    ClearUserSync,
    Command,
    FederationAck,
    Ping,
    RemoteServerUp,
    UserIp,
    UserSync,
    encode_line,
)
from replication.writer.publisher import encode_within
from replication.writer.subscribers import Subscribers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence

    from twisted.internet.interfaces import IReactorTime

    from replication.net.command_functions import CommandFunctions
    from replication.net.protocol import Limits, ReplicationProtocol
    from replication.presence.reporter import PresenceReporter
    from replication.streams.history import History
    from replication.streams.interfaces import PeerStatus, Sample
    from replication.wire.grammar import InstanceName, StreamName, Token
    from replication.writer.positions import IPositions

UP: Final = (UserSync, ClearUserSync, UserIp, FederationAck, RemoteServerUp, ApplicationCommand)
MAX_SHOWN: Final = 40  # characters of a name that cannot be sent
DOWN: Final = (RemoteServerUp, ApplicationCommand)
_Key = tuple["StreamName", "InstanceName"]


@attrs.define(eq=False, repr=False, kw_only=True)
class Relay:
    """What a worker publishes of the streams that it follows; it also answers REPLICATE.

    A writer is *announced* once this process has all its facts up to the POSITION with which the writer was found.  So
    a relay with a new or restored database is silent while it catches up: a lower POSITION would take followers back.
    After a start all writers are announced together, for followers that apply facts in linear order; but not later than
    ``end_patience``.

    Args:
        broadcast: sends lines to the followers.
        limits: of each connection.
        reporter: sends commands to the writers.

    ``FollowedStreams`` sets ``links``, those to the writers; ``all_known``, whether there are no other writers; and
    ``followed_history``, which returns the history of a writer as it is followed, empty if there is none.
    ``is_complete`` is true while all writers found are announced, ``all_known()`` is true and ``own`` is complete;
    it decides between PING ``complete`` and ``partial`` (docs/protocol/connection.md B2).  If this process writes
    streams, its ``Master`` sets ``own``, their positions.  Otherwise ``own`` is None, and ``server`` has the
    followers.

    """

    log = Logger()

    broadcast: Broadcast
    _limits: Limits
    _reporter: PresenceReporter
    own: IPositions | None = attrs.field(init=False, default=None)
    server: RelayServer | None = attrs.field(init=False, default=None)
    links: FollowedLinks = attrs.field(init=False, factory=FollowedLinks)
    all_known: Callable[[], bool] = attrs.field(init=False, default=lambda: True)
    is_complete: bool = attrs.field(init=False, default=False)
    followed_history: Callable[[StreamName, InstanceName], Awaitable[History]] = attrs.field(init=False)
    _published: dict[_Key, Token] = attrs.field(init=False, factory=dict)  # of each announced writer
    _found_at: dict[_Key, Token] = attrs.field(
        init=False, factory=dict
    )  # the POSITION with which each other writer was found
    _confirmed: dict[_Key, Token] = attrs.field(init=False, factory=dict)  # positions of those to be announced
    _sources: dict[_Key, Hashable] = attrs.field(init=False, factory=dict)  # the link that was followed last
    _patient: bool = attrs.field(init=False, default=True)
    _left_out: dict[_Key, Token] = attrs.field(init=False, factory=dict)  # up to this token facts may be left out
    _linked_again: set[Hashable] = attrs.field(init=False, factory=set)
    _with_first_fact: set[_Key] = attrs.field(init=False, factory=set)  # those with a fact at ID 1

    # ---- answers to REPLICATE

    async def refresh(self) -> None:
        """Return once ``lines`` has the positions of this moment."""
        if self.own is not None:
            await self.own.refresh()

    def lines(self, streams: Collection[StreamName]) -> Sequence[EncodedLines]:
        """Return the POSITION lines for ``streams``, or for all streams if that is empty."""
        ours = [] if self.own is None else self.own.lines(streams)
        return [*ours, *(self._position(key) for key in self._published if not streams or key[0] in streams)]

    async def history(self, stream: StreamName, writer: InstanceName) -> History:
        """Return the history of a writer that is followed here, or writes here; empty if there is none."""
        followed = await self.followed_history(stream, writer)
        return await self.own.history(stream, writer) if self.own is not None and not followed else followed

    # ---- what cursors report

    def linked(self, link: Hashable, key: _Key, prev: Token, new: Token) -> None:
        """Note the first POSITION of a writer on a connection."""
        self._sources[key] = link
        self._confirmed.pop(key, None)
        if key not in self._published:
            self._found_at[key] = new
        if new < FIRST_GAP <= prev:
            self._with_first_fact.add(key)

    def confirmed(self, key: _Key, position: Token) -> None:
        """Note a position up to which all applied facts are the writer's, and announce the writer."""
        if key in self._found_at and position >= self._found_at[key]:
            self._confirmed[key] = position
            self.announce()

    def announce(self) -> None:
        """Announce the writers that can be; while this process is patient, only all together."""
        found = self.links.all_writers_found()
        if self._patient and not (found and self._confirmed.keys() == self._found_at.keys()):
            return
        self._patient = False
        confirmed, self._confirmed = self._confirmed, {}
        for key, position in confirmed.items():
            del self._found_at[key]
            self._published[key] = position
            try:
                lines = self._position(key)
            except LocalProtocolError as error:  # a name in Synapse's tables that is invalid on the wire
                del self._published[key]
                self.log.error(
                    "{stream}: followers receive no facts of {name!r}, a name that no line can have: {error}",
                    stream=key[0],
                    name=key[1][:MAX_SHOWN],
                    error=error,
                )
                continue
            self.broadcast.publish(key[0], lines)
        self.look_for_others()

    def look_for_others(self) -> None:
        """Send to followers whether all writers are announced, if that has changed."""
        complete = not self._found_at and self.all_known() and (self.own is None or self.own.is_complete)
        if complete != self.is_complete:
            self.is_complete = complete
            self.broadcast.flush()  # the POSITIONs first
            for peer in self.broadcast:
                peer.send(Ping(Ping.COMPLETE if complete else Ping.PARTIAL))

    def withdrawn(self, link: Hashable, key: _Key) -> None:
        """Announce a writer no more if ``link`` has sent its last POSITION: that process sends none of it any more."""
        if self._sources.get(key) != link:
            return
        self._found_at.pop(key, None)
        self._confirmed.pop(key, None)
        if self._published.pop(key, None) is not None:
            self.broadcast.publish(key[0], encode_withdrawn(*key))
        self.announce()

    def end_patience(self) -> None:
        """Wait for no other writer any more."""
        self._patient = False
        self.announce()

    def left_out(self, key: _Key, upto: Token) -> None:
        """Note that facts up to ``upto`` are not applied here, because the writer has deleted them."""
        self._left_out[key] = max(upto, self._left_out.get(key, upto))

    def applied(self, key: _Key, step: Apply | Reset) -> None:
        """Publish what was applied; where facts are left out, publish a gap: each follower then fetches them itself."""
        if isinstance(step, Apply) and step.facts and step.facts[0].token < FIRST_GAP:
            self._with_first_fact.add(key)
        if isinstance(step, Reset):
            self._confirmed.pop(key, None)
        if key not in self._published:
            return
        if isinstance(step, Reset):
            self._published[key] = step.to
            self.restarted(*key)
            return
        self._published[key] = step.upto
        (stream, writer), upto = key, step.upto
        if not self.broadcast.receivers(stream):
            return
        if upto == step.after:  # facts that a Synapse has sent late, below the position
            if not step.facts:
                return
            upto = step.facts[-1].token
        lines = None
        if self._left_out.get(key, step.after) <= step.after:
            lines = encode_within(self._limits, stream, writer, step.facts, after=step.after, upto=upto)
        for each in [encode_gap(stream, writer, upto)] if lines is None else lines:
            self.broadcast.publish(stream, each)

    def restarted(self, stream: StreamName, writer: InstanceName) -> None:
        """Close the connections that receive a stream: followers must compare the history of a writer again."""
        if (stream, writer) in self._published:
            for peer in self.broadcast.receivers(stream):
                peer.close(f"connect again to compare the history of {stream} of {writer}")

    def epoch_begun(self, stream: StreamName, writer: InstanceName) -> None:
        """Let followers compare the history of a writer once more, because none is compared here."""
        if (stream, writer) in self._published:
            self.broadcast.publish(stream, encode_new_epoch(stream, writer))

    def linked_again(self, link: Hashable) -> None:
        """Close all connections of followers, once for each new link: they must compare histories, as none is here."""
        if link not in self._linked_again:
            self._linked_again.add(link)
            for peer in self.broadcast:
                peer.close("connect again to compare histories: a writer may have started again")

    def link_lost(self, link: Hashable) -> None:
        """Note that the connection to a writer, or to a Redis, is lost."""
        self._linked_again.discard(link)

    # ---- commands

    def greeting(self) -> list[Command]:
        """Return the command that a new connection to a writer sends before REPLICATE.

        If relays follow each other in a circle, this process receives it: see ``forward``.
        """
        return [ClearUserSync(self._reporter.instance_id)]

    def forward(self, peer: ReplicationProtocol | None, command: Command) -> None:
        """Send a follower's command to every connected writer; ``peer`` is None if this process sends it.

        The own CLEAR_USER_SYNC of ``greeting`` means that relays follow each other in a circle.
        """
        if not isinstance(command, UP):
            return
        if isinstance(command, ClearUserSync) and command.instance_id == self._reporter.instance_id:
            if peer is not None:
                peer.fail(Fault("relays follow each other in a circle; check connect of each", "circle"))
            return
        try:
            self._reporter.send(command)
        except LocalProtocolError as error:  # it was parsed, but it cannot be sent: it had two CR at its end
            if peer is not None:
                peer.fail(Fault(str(error), "bad line"))

    def pass_down(self, command: Command) -> None:
        """Send a writer's command to every follower."""
        if isinstance(command, DOWN) and may_send(Role.MASTER, type(command)):
            with suppress(LocalProtocolError):  # as in ``forward``
                line = encode_line(command, self._limits.line_limit)
                for peer in self.broadcast:
                    peer.write(line, 1)

    # ---- inside

    def _position(self, key: _Key) -> EncodedLines:
        published = self._published[key]
        if published < FIRST_GAP and key in self._with_first_fact:
            return encode_gap(*key, published)
        return encode_position(*key, published, published)


class RelayedCursor(Cursor):
    """A cursor that reports to a relay what is applied and confirmed."""

    def __init__(
        self,
        relay: Relay,
        stream: StreamName,
        writer: InstanceName,
        position: Token,
        *,
        checks_history: bool,
        **limits: int,
    ) -> None:
        super().__init__(position, checks_history=checks_history, **limits)
        self._relay = relay
        self._key = stream, writer

    def position_received(self, link: Hashable, prev: Token, new: Token) -> None:
        """Process a POSITION; without a history, a new connection may be to another run of the writer."""
        lost, links = not self.linked and self._links > 0, self._links
        super().position_received(link, prev, new)
        if self._links > links:
            self._relay.linked(link, self._key, prev, new)
            if lost and not self._checks_history:
                self._relay.linked_again(link)
        self._report()
        self._relay.look_for_others()

    def link_lost(self, link: Hashable) -> None:
        """Drop the incomplete fact of a lost link."""
        super().link_lost(link)
        self._relay.link_lost(link)

    def checked(self, step: Check) -> None:
        """Note that a history was compared."""
        super().checked(step)
        self._report()

    def applied(self, step: Apply | Reset) -> None:
        """Note that a step is durable, and publish it."""
        super().applied(step)
        self._relay.applied(self._key, step)
        self._report()

    def _report(self) -> None:
        if self.confirmed:
            self._relay.confirmed(self._key, self.position)


def make_cursor(
    relay: Relay | None, stream: StreamName, writer: InstanceName, position: Token, *, checks_history: bool
) -> Cursor:
    """Return the cursor of a writer; it reports to the relay, if there is one."""
    if relay is None:
        return Cursor(position, checks_history=checks_history)
    return RelayedCursor(relay, stream, writer, position, checks_history=checks_history)


@attrs.define(eq=False, repr=False)
class RelayServer:
    """The followers of a relay that writes no stream: their connections, and their users that sync."""

    subscribers: Subscribers
    presence: PresenceTracker

    def begin(self) -> None:
        """Answer REPLICATE from now on."""
        self.presence.start()
        self.subscribers.begin()

    async def end(self) -> None:
        """Close every connection."""
        await self.subscribers.end()
        await self.presence.stop()

    def peer_statuses(self) -> list[PeerStatus]:
        """Return the status of every follower's connection."""
        return self.subscribers.statuses()

    def users_syncing(self) -> Mapping[str, Mapping[str, int]]:
        """Return the users that sync at followers, by instance ID, with the time of the last sync in ms."""
        return self.presence.syncing.processes()

    def samples(self) -> Iterable[Sample]:
        """Yield the metrics of the followers' connections."""
        yield from self.subscribers.samples()
        yield from self.presence.samples()


def make_relay(
    reporter: PresenceReporter,
    functions: CommandFunctions,
    *,
    alone: bool,
    server_name: str,
    limits: Limits,
    wall: Callable[[], float],
    reactor: IReactorTime,
) -> Relay:
    """Return a relay; it serves ``alone`` if this process writes no stream.  The options are those of ``Worker``."""
    relay = Relay(broadcast=Broadcast(reactor), limits=limits, reporter=reporter)
    if alone:
        syncing = SyncingUsers(functions.syncing_changed)
        ignore_acknowledgements = lambda _sender, _token: None  # noqa: E731 (the writers receive them)
        presence = PresenceTracker(reactor, syncing, None, ignore_acknowledgements, relay.forward)
        subscribers = Subscribers(
            reactor,
            relay.broadcast,
            positions=relay,
            presence=presence,
            functions=functions,
            server_name=server_name,
            limits=limits,
            wall=wall,
        )
        relay.server = RelayServer(subscribers, presence)
    return relay
