"""The subscribers of this process: the first lines to each, the answer to REPLICATE, and the end of all."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final, cast

import attrs
from msgspec.structs import replace
from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory
from twisted.logger import Logger

from replication.deferreds import shield
from replication.errors import LocalProtocolError, ReplicationError
from replication.net.access import ALL, OPEN, UNNAMED, Access
from replication.net.admission import Admission
from replication.net.peer_log import PeerLog
from replication.net.protocol import Limits, ReplicationProtocol
from replication.session.connection import Fault, Received, Role, Rows, check_direction
from replication.streams.history import UNKNOWN_HISTORY, encode_part
from replication.streams.interfaces import PeerStatus, Sample
from replication.wire.commands import Command, Error, Name, Ping, RemoteServerUp, Replicate, Server, encode_line
from replication.wire.grammar import InstanceName, StreamName

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime

    from replication.net.broadcast import Broadcast
    from replication.net.command_functions import CommandFunctions
    from replication.presence.tracker import PresenceTracker
    from replication.writer.positions import IPositions

CLOSE_PATIENCE: Final = 5.0  # seconds in which a peer must read what is queued for it when this process stops
ALWAYS: Final = (Name, Ping, Replicate, Error)  # commands that need no right
MAX_QUICK_SILENT: Final = 10  # connections without a good line that are not slowed down
CLOSED_AT_ONCE: Final = 10  # silent connections that are closed in one reactor turn
CLOSING_PAUSE: Final = 0.005  # seconds between two such turns
MAX_REPLICATE: Final = 100  # commands of one peer that wait until this process is ready; the newest ones
NOT_WRONG: Final = frozenset({"ping timeout", "slow peer", "silent"})  # faults without a wrong line
NAME_LENGTH: Final = 255  # characters of a peer's NAME that are kept: the longest instance name
ECHO_LENGTH: Final = 600  # characters of a PING that are sent back: a number, two of the longest names, a place
MAX_ASKED: Final = 100  # histories that one peer has asked for, without an answer
HISTORY_PATIENCE: Final = 10.0  # seconds in which the database must return a history
MAX_SENT_EPOCHS: Final = 100  # in one answer
EPOCH_LENGTH: Final = 120  # bytes of JSON of one epoch, at most


@attrs.define(eq=False, repr=False, slots=False)
class Subscribers(Factory):
    """The connections that follow this process: their protocol factory, and their ``IConnectionOwner``.

    A peer that connects before ``begin`` is greeted at once; its REPLICATE is answered after ``begin``.

    Args:
        clock: the reactor.
        broadcast: sends lines to all connections.
        positions: answers REPLICATE.
        presence: receives each command that is about users, and each disconnection.
        functions: the application's functions for commands.
        server_name: is sent in SERVER.
        limits: of each connection, and of their number.
        wall: seconds of the epoch, for PING.

    """

    noisy = False
    log = Logger()
    _clock: IReactorTime
    _broadcast: Broadcast
    _positions: IPositions
    _presence: PresenceTracker
    _functions: CommandFunctions
    _server_name: str
    _limits: Limits
    _wall: Callable[[], float]
    resting: int = attrs.field(init=False, default=0)  # see ``IConnectionOwner``
    faults: Counter[str] = attrs.field(init=False, factory=Counter)  # connections closed for one, by its kind
    _peer_log: PeerLog = attrs.field(init=False)
    _received: Counter[str] = attrs.field(init=False, factory=Counter)  # commands, by word
    _refused: Counter[str] = attrs.field(init=False, factory=Counter)  # commands without the right, by word
    _tls_failures: int = attrs.field(init=False, default=0)  # connections that failed in TLS
    _accepted: int = attrs.field(init=False, default=0)  # connections
    _closed: str | None = attrs.field(init=False, default=None)  # why no connection is accepted
    # By peer; None after ``begin``.
    _waiting: dict[ReplicationProtocol, list[Replicate]] | None = attrs.field(init=False, factory=dict)
    # Of all connections, also of those that are closing.
    _transports: dict[ReplicationProtocol, None] = attrs.field(init=False, factory=dict)  # oldest first
    _past: Counter[str] = attrs.field(init=False, factory=Counter)  # lines and bytes of connections that are gone
    _empty: Deferred[None] | None = attrs.field(init=False, default=None)  # fires when no transport is left
    # Connections that have sent no good line, and since when; and those that stay without one.
    _silent: dict[ReplicationProtocol, float] = attrs.field(init=False, factory=dict)
    _watching: set[ReplicationProtocol] = attrs.field(init=False, factory=set)
    _silence_timer: IDelayedCall | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        """Make the counters and the log of connections."""
        self._peer_log = PeerLog(self._clock)
        self._bounds = self._limits.bounds
        self._admission = Admission("wire", self._bounds, self._clock)

    def logPrefix(self) -> str:
        """Return the name of this factory in Twisted's log lines."""
        return "the wire"

    def buildProtocol(self, addr: IAddress | None) -> ReplicationProtocol | None:
        """Return a protocol in the role of a master; None if the connection is refused."""
        return self.accept(addr, OPEN)

    def accept(self, address: IAddress | None, access: Access) -> ReplicationProtocol | None:
        """Return a protocol whose peer has the rights that ``access`` gives it; None if it is refused."""
        if not self._admission.enter(address):
            return None
        return ReplicationProtocol(
            Role.MASTER,
            self,
            self._clock,
            self._limits,
            commands=self._functions.commands,
            wall=self._wall,
            access=access,
        )

    def listener(self, access: Access | None) -> Factory:
        """Return the factory to listen with; ``access`` has the rights of peers, None: every right."""
        return self if access is None else _Listener(self, access)

    def __iter__(self) -> Iterator[ReplicationProtocol]:
        """All connections, oldest first."""
        return iter(self._broadcast)

    def begin(self) -> None:
        """Answer the REPLICATE commands that wait, and from now on answer at once."""
        waiting, self._waiting = self._waiting or {}, None
        for peer, asked in waiting.items():
            for command in asked:
                self._answer(peer, command.streams)

    def refuse(self, why: str) -> None:
        """Close every connection that waits for ``begin``, and every new one, with ``ERROR why``."""
        self._closed = why
        for peer in list(self._waiting or ()):
            peer.close(why)

    def close_all(self, why: str) -> None:
        """Close every connection, and every new one, with ``ERROR why``; nothing that is queued is sent."""
        self._closed = why
        for peer in list(self._transports):
            peer.close(why)

    def send(self, *commands: Command) -> None:
        """Send commands to every connection; LocalProtocolError: a master may not send one, or it cannot be encoded."""
        for command in commands:
            check_direction(Role.MASTER, type(command))
        lines = b"".join([encode_line(each, self._limits.line_limit) for each in commands])
        for peer in self._broadcast:
            peer.write(lines, len(commands))

    def look_for_others(self) -> None:
        """Send to every connection whether the positions are complete: that has changed."""
        self._broadcast.flush()  # the POSITIONs first
        self.send(Ping(Ping.COMPLETE if self._positions.is_complete else Ping.PARTIAL))

    async def end(self) -> None:
        """Close every connection with ``ERROR server stopping``; abort those that do not read it in time."""
        self._broadcast.end()
        for peer in list(self._transports):
            peer.close(Error.STOPPING)
        if self._transports:
            self._empty = Deferred()
            await self._empty.addTimeout(CLOSE_PATIENCE, self._clock, lambda _result, _seconds: None)
        for peer in list(self._transports):
            peer.abort()

    def statuses(self) -> list[PeerStatus]:
        """Return the status of every connection, and which of them share a name."""
        shared = self._peer_log.shared_names
        statuses = [peer.status() for peer in self]
        return [replace(each, shares_name=True) if each.name in shared else each for each in statuses]

    def samples(self) -> Iterable[Sample]:
        """Yield the metrics of the connections."""
        peers = list(self._broadcast)
        yield Sample("connections", len(peers))
        yield Sample("connections_total", self._accepted)
        for word, count in self._received.items():
            yield Sample("commands_total", count, {"command": word})
        queued = sum(peer.queued_bytes for peer in peers)
        yield Sample("queued_bytes", queued)
        for unit in ("lines", "bytes"):
            for way in ("in", "out"):
                total = self._past[f"{unit}_{way}"] + sum(getattr(peer, f"{unit}_{way}") for peer in peers)
                yield Sample(f"{unit}_total", total, {"direction": way})
        for word, count in self._refused.items():
            yield Sample("commands_refused_total", count, {"command": word})
        for kind, count in self.faults.items():
            yield Sample("faults_total", count, {"kind": kind})
        if self._tls_failures:
            yield Sample("tls_failures_total", self._tls_failures, {"socket": "wire"})
        yield Sample("silent_connections", len(self._silent) + len(self._watching))
        yield from self._admission.samples()

    # ---- IConnectionOwner

    def peer_connected(self, peer: ReplicationProtocol) -> None:
        """Send SERVER and PING; from now on the connection receives what is published."""
        self._accepted += 1
        self._transports[peer] = None
        if self._closed is not None:
            peer.close(self._closed)
            return
        rights = peer.access.of_transport(peer.transport)
        if rights is None:
            peer.fail(Fault(UNNAMED, "no right"))
            return
        peer.rights = rights
        partial = "" if self._positions.is_complete else f"{Ping.PARTIAL} "
        peer.send(Server(self._server_name), Ping(f"{int(self._wall() * 1000)} {partial}{Ping.ECHO}"))
        self._broadcast.add(peer, _readable(peer, ()))
        if self._bounds.handshake_timeout:
            if len(self._silent) + len(self._watching) >= MAX_QUICK_SILENT:
                self._broadcast.slow_down(peer)
            self._silent[peer] = self._clock.seconds()
            self._wait_for_lines()
        if self._waiting is not None:
            self._waiting[peer] = []

    def commands_received(self, peer: ReplicationProtocol, received: Sequence[Received]) -> None:
        """Act on the commands that the peer may send, and ignore others; it still follows."""
        self._forget_silence(peer)
        allowed = received if peer.rights.commands else [each for each in received if isinstance(each, ALWAYS)]
        self._act(peer, allowed)
        if len(allowed) < len(received):
            self._refuse_commands(
                peer, [each.WORD for each in received if not isinstance(each, (Rows, Fault, *ALWAYS))]
            )

    def peer_failed(self, peer: ReplicationProtocol, fault: Fault) -> None:
        """Count and log the fault for which a connection is closed."""
        self.faults[fault.kind] += 1
        if fault.kind not in NOT_WRONG:
            self._admission.faulted(peer.transport.getPeer())
        self._peer_log.error(peer, "closing {name} ({address}): {error}", fault.text)

    def peer_disconnected(self, peer: ReplicationProtocol) -> None:
        """Remove a connection."""
        if peer.tls_error is not None:
            self._tls_failures += 1
            self._admission.faulted(peer.transport.getPeer())
            self._peer_log.error(peer, "{name} ({address}): {error}", peer.tls_error)
        self._broadcast.remove(peer)
        self._forget_silence(peer)
        self._peer_log.lost(peer)
        self._presence.lost(peer)
        if self._waiting is not None:
            self._waiting.pop(peer, None)
        for figure in ("lines_in", "lines_out", "bytes_in", "bytes_out"):
            self._past[figure] += getattr(peer, figure)

    def transport_closed(self, peer: ReplicationProtocol) -> None:
        """Remove a transport."""
        self._transports.pop(peer, None)
        self._admission.leave(peer.transport.getPeer())
        if self._empty is not None and not self._transports and not self._empty.called:
            self._empty.callback(None)

    # ---- inside

    def _act(self, peer: ReplicationProtocol, received: Sequence[Received]) -> None:
        """Act on commands; of equal REPLICATEs in one read, on the last: their answers would be the same."""
        last = {command: place for place, command in enumerate(received) if isinstance(command, Replicate)}
        for place, command in enumerate(received):
            if peer not in self._broadcast and self._closed is None:
                return  # the connection was closed for what came before
            match command:
                case Replicate() if place < last[command]:
                    pass
                case Replicate(streams):
                    if self._waiting is not None and peer in self._waiting:
                        self._waiting[peer] = [*self._waiting[peer], command][-MAX_REPLICATE:]
                    else:
                        self._answer(peer, streams)
                case Name(name):
                    self._peer_log.named(peer, name[:NAME_LENGTH])
                case Ping(text):
                    self._pinged(peer, text)
                case Error(Error.STOPPING):
                    self._peer_log.note(peer, "{name!r} ({address}) is stopping")
                case Error(text):
                    self._peer_log.error(peer, "{name} ({address}) sent ERROR: {error}", repr(text[:200]))
                case RemoteServerUp():
                    self._relay(peer, command)
            if not isinstance(command, Rows | Fault):
                self._received[command.WORD] += 1
                self._presence.receive(peer, command)
                self._functions.receive(peer, command)

    def _pinged(self, peer: ReplicationProtocol, text: str) -> None:
        if not text.startswith(Ping.ECHO):
            self._peer_log.pinged(peer)
            return
        match text[:ECHO_LENGTH].split():
            case [_, _, stream, writer, place] as words if place.isdecimal() and not peer.rights.missing(
                "read", [stream]
            ):
                reading = shield(self._read_history(peer, StreamName(stream), InstanceName(writer), int(place)))
                reading.addTimeout(HISTORY_PATIENCE, self._clock, lambda _failure, _seconds: UNKNOWN_HISTORY)
                reading.addCallback(lambda epochs: peer.send(Ping(" ".join([*words, epochs]))))
            case words:
                peer.send(Ping(" ".join(words)))

    async def _read_history(
        self, peer: ReplicationProtocol, stream: StreamName, writer: InstanceName, place: int
    ) -> str:
        """Return a part of a writer's history as JSON, beginning with the epoch at ``place``, which counts from 0."""
        if peer.asked >= MAX_ASKED:
            return UNKNOWN_HISTORY
        peer.asked += 1
        try:
            history = await self._positions.history(stream, writer)
            fit = (self._limits.line_limit - ECHO_LENGTH) // EPOCH_LENGTH
            return encode_part(history, place, min(fit, MAX_SENT_EPOCHS))
        except ReplicationError:
            return UNKNOWN_HISTORY
        except Exception:  # noqa: BLE001 (the peer must have an answer)
            self.log.failure("reading a history")
            return UNKNOWN_HISTORY
        finally:
            peer.asked -= 1

    def _forget_silence(self, peer: ReplicationProtocol) -> None:
        self._broadcast.speed_up(peer)
        self._silent.pop(peer, None)
        self._watching.discard(peer)
        if not self._silent and self._silence_timer is not None:
            self._silence_timer.cancel()
            self._silence_timer = None

    def _wait_for_lines(self, pause: float = 0.0) -> None:
        if self._silence_timer is None and self._silent:
            oldest = next(iter(self._silent.values()))
            left = oldest + self._bounds.handshake_timeout - self._clock.seconds()
            self._silence_timer = self._clock.callLater(max(left, pause), self._check_silence)

    def _check_silence(self) -> None:
        """Close connections that have sent nothing for too long; some may stay, to watch with ``nc``."""
        self._silence_timer, patience, now = None, self._bounds.handshake_timeout, self._clock.seconds()
        for peer, since in list(islice(self._silent.items(), CLOSED_AT_ONCE)):
            if now - since < patience:
                break
            del self._silent[peer]
            if 0 < self._bounds.max_silent_connections <= len(self._watching):
                peer.fail(
                    Fault(f"nothing was received for {patience:g} s, and too many connections are silent", "silent")
                )
            else:
                self._watching.add(peer)
        self._wait_for_lines(CLOSING_PAUSE)

    def _relay(self, origin: ReplicationProtocol, command: RemoteServerUp) -> None:
        """Send REMOTE_SERVER_UP on to all connections except ``origin`` (docs/protocol/traps.md 9)."""
        try:
            line = encode_line(command, self._limits.line_limit)
        except LocalProtocolError as error:  # it was parsed, but it cannot be sent: it had two CR at its end
            origin.fail(Fault(str(error), "bad line"))
            return
        for peer in self._broadcast:
            if peer is not origin:
                peer.write(line, 1)

    def _answer(self, peer: ReplicationProtocol, streams: tuple[StreamName, ...]) -> None:
        """Answer REPLICATE as soon as possible; close the connection if the database does not answer."""
        refreshed = Deferred.fromCoroutine(self._positions.refresh())
        refreshed.addCallback(lambda _: self._send_positions(peer, streams))
        refreshed.addErrback(lambda failure: peer.close(failure.getErrorMessage()))

    def _send_positions(self, peer: ReplicationProtocol, streams: tuple[StreamName, ...]) -> None:
        """Send positions to this connection only, after all that was published before (docs/protocol/traps.md 19)."""
        readable = _readable(peer, streams)
        self._broadcast.restrict(peer, readable)
        lines = self._positions.lines(readable or ()) if readable is None or readable else ()
        peer.write(b"".join(each.data for each in lines), len(lines))
        if why := peer.rights.missing("read", streams):
            self._refuse(peer, why)

    def _refuse_commands(self, peer: ReplicationProtocol, words: Sequence[str]) -> None:
        self._refused.update(words)
        if not peer.refused:
            peer.refused = True
            self._refuse(peer, f"{words[0]} is ignored: {peer.rights.missing('commands')}")

    def _refuse(self, peer: ReplicationProtocol, why: str) -> None:
        self._peer_log.error(peer, "{name} ({address}): {error}", why)
        peer.send(Error(why))


class _Listener(Factory):
    """The factory of an endpoint whose peers have the rights of ``access``."""

    noisy = False

    def __init__(self, subscribers: Subscribers, access: Access) -> None:
        self._subscribers, self._access = subscribers, access

    def logPrefix(self) -> str:
        """Return the name of this factory in Twisted's log lines."""
        return self._subscribers.logPrefix()

    def buildProtocol(self, addr: IAddress | None) -> ReplicationProtocol | None:
        """Return a protocol; None if the connection is refused."""
        return self._subscribers.accept(addr, self._access)


def _readable(peer: ReplicationProtocol, streams: Collection[StreamName]) -> frozenset[StreamName] | None:
    """Return which of ``streams``, or of all if that is empty, a peer may read; None: all streams."""
    may_read = cast("frozenset[StreamName]", peer.rights.read)
    if ALL in may_read:
        return frozenset(streams) or None
    return may_read & frozenset(streams) if streams else may_read
