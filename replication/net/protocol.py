"""One connection on a Twisted transport: a LineReceiver that moves bytes and keeps time.

``replication.session`` decides what is valid and when to send PING.  ``dataReceived`` passes whole reads to the
session, which is fast.  ``lineReceived`` is for programs that use or extend this class as a LineReceiver; a property
test checks that both give the same commands.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import msgspec
from twisted.internet.interfaces import (
    IDelayedCall,
    IHalfCloseableDescriptor,
    IHandshakeListener,
    IPushProducer,
    IReactorTime,
    ISSLTransport,
)
from twisted.internet.protocol import connectionDone
from twisted.logger import Logger
from twisted.protocols.basic import LineReceiver
from zope.interface import implementer

from replication.errors import LocalProtocolError
from replication.net.access import OPEN, Access, Rights
from replication.net.admission import Bounds
from replication.net.endpoints import format_address
from replication.net.sending import send_now
from replication.net.tls import describe_tls_error
from replication.session.connection import Fault, Keepalive, Received, ReplicationConnection, Role, Rows
from replication.session.send_buffer import SendBuffer
from replication.streams.interfaces import PeerStatus
from replication.wire.commands import COMMANDS, LINE_LIMIT, Command, Error, Rdata, encode_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twisted.python.failure import Failure


# An accepted connection that sends more at once is processed in turns, between which others have theirs.
TURN_BYTES: Final = 1024  # a turn takes about 0.5 ms of CPU time
LATE: Final = 0.01  # seconds that a timer may be late; the clock moves while one is set
REST: Final = 0.0025  # seconds between two turns, times the number of connections that wait for one


class IConnectionOwner(Protocol):
    """What a connection calls, on the reactor's thread: ``Subscribers`` in a writer, ``WriterClient`` in a follower.

    ``resting`` counts the accepted connections that wait for a turn, because they have sent much.
    """

    resting: int

    def peer_connected(self, peer: ReplicationProtocol) -> None:
        """The connection is made; commands can be sent.  An accepted connection with TLS has been negotiated."""

    def commands_received(self, peer: ReplicationProtocol, received: Sequence[Received]) -> None:
        """These commands arrived in one read, in this order; never a Fault."""

    def peer_failed(self, peer: ReplicationProtocol, fault: Fault) -> None:
        """The connection is about to be closed because of ``fault``; its ERROR line is sent next."""

    def peer_disconnected(self, peer: ReplicationProtocol) -> None:
        """The connection is lost, or about to be closed from this end; called once."""

    def transport_closed(self, peer: ReplicationProtocol) -> None:
        """The transport is closed; called once, after ``peer_disconnected``."""


class Limits(msgspec.Struct, frozen=True):
    """The limits of one connection.

    ``keepalive``: when to send PING, and when silence ends the connection.  ``line_limit``: bytes of a line without
    its LF.  ``max_queued_bytes`` and ``max_queued_lines``: what may wait for a peer that does not read.  Beyond that
    the connection is closed with ``ERROR Failed to keep up`` (docs/protocol/connection.md B4).  ``bounds``: of the
    connections that a process accepts.
    """

    keepalive: Keepalive = msgspec.field(default_factory=Keepalive)
    line_limit: int = LINE_LIMIT
    max_queued_bytes: int = 8 * 1024 * 1024
    max_queued_lines: int = 100_000
    bounds: Bounds = msgspec.field(default_factory=Bounds)


@implementer(IPushProducer)
@attrs.define
class _SendProducer:
    """What the transport pauses while its own buffer is full.

    It is not the LineReceiver itself, whose ``pauseProducing`` pauses reading.
    """

    _connection: ReplicationProtocol
    paused: bool = False

    def pauseProducing(self) -> None:
        self.paused = True

    def resumeProducing(self) -> None:
        self.paused = False
        self._connection.write_queued()

    def stopProducing(self) -> None:
        """Do nothing: connectionLost follows."""


def _can_half_close(transport: object) -> bool:
    """Whether it can be closed for writing only; TLS cannot, although its transport has the interface."""
    return IHalfCloseableDescriptor.providedBy(transport) and not ISSLTransport.providedBy(transport)


_NO_RIGHTS: Final = Rights()


class _QuietConnection(LineReceiver):
    """The state that a quiet connection does not change.

    It is on a class because of memory: instances with more than 30 attributes take 1.5 KiB more.
    """

    tls_error: str | None = None
    refused = False
    asked = 0  # epochs that were asked for, and not answered yet
    _unread = b""
    _next_turn: IDelayedCall | None = None  # until it fires, nothing is read
    _ended = False  # closed from this end, or lost
    _lingers = False  # closed for writing only


@implementer(IHandshakeListener)
@attrs.define(eq=False, repr=False, slots=False)
class ReplicationProtocol(_QuietConnection):
    """One end of one connection.

    Args:
        role: of this end.
        owner: has a method for each event of the connection.
        clock: for the keep-alive timer.
        limits: of this connection.
        wall: the time in seconds since 1970, for PING and ``since``.
        commands: those that this end accepts, by name; by default the protocol's.

    ``access`` has the rights of the peers of accepted connections.  The owner sets ``rights``, those of this peer, and
    ``refused``: the peer has sent a command without the right to do so.

    Public attributes: ``name`` (the peer's, set by the owner), ``address`` (the peer's), ``since`` (when it connected,
    seconds since 1970), ``last_command`` (the name of the last command received), ``lines_in``, ``lines_out``,
    ``bytes_in``, ``bytes_out``, ``tls_error`` (why TLS failed, else None) and ``session``, the ReplicationConnection.
    Rules: docs/protocol/connection.md.

    """

    delimiter = b"\n"
    log = Logger()
    transport: Any = attrs.field(init=False)  # Twisted's annotation has only what every transport has

    _role: Role
    _owner: IConnectionOwner
    _clock: IReactorTime
    limits: Limits = attrs.field(factory=Limits)
    _wall: Callable[[], float] = attrs.field(kw_only=True, default=time.time)
    _commands: Mapping[str, type[Command]] = attrs.field(kw_only=True, default=COMMANDS)
    access: Access = attrs.field(kw_only=True, default=OPEN)

    def __attrs_post_init__(self) -> None:
        """Begin with a peer that has sent nothing."""
        self.MAX_LENGTH = self.limits.line_limit
        self.name = self.address = self.last_command = ""
        self.rights = _NO_RIGHTS
        self.has_pinged = False
        self.lines_in = self.lines_out = self.bytes_in = self.bytes_out = 0
        self._timer: IDelayedCall | None = None
        self._opened = False  # the owner knows this connection

    # ---- what the transport calls

    def connectionMade(self) -> None:
        """Start the session; of an accepted connection with TLS, once that is negotiated."""
        now = self._clock.seconds()
        self.since = self._wall()
        self.session = ReplicationConnection(
            self._role, now, self.limits.keepalive, self.limits.line_limit, self._commands
        )
        self._send_buffer = SendBuffer(self.limits.max_queued_bytes, self.limits.max_queued_lines)
        self._producer = _SendProducer(self)
        self.address = format_address(self.transport.getPeer())
        set_no_delay = getattr(self.transport, "setTcpNoDelay", None)  # a UNIX socket has none
        if set_no_delay is not None and not self.address.startswith("unix"):
            set_no_delay(True)
        self.transport.registerProducer(self._producer, True)
        if self._role is Role.MASTER and ISSLTransport.providedBy(self.transport):
            patience = self.limits.bounds.handshake_timeout
            self._set_timer(now + patience if patience else None)
        else:
            self._open()

    def handshakeCompleted(self) -> None:
        """Start the session of an accepted connection with TLS: the certificate of the peer is known now."""
        if not self._opened and not self._ended:
            self._open()

    def dataReceived(self, data: bytes) -> None:
        """Process one read; discard it after the end."""
        if self._role is Role.WORKER or (self._next_turn is None and len(data) <= TURN_BYTES):
            self._receive(data)
            return
        self.transport.pauseProducing()
        self._unread += b"" if self._ended else data
        if self._next_turn is None:
            self._owner.resting += 1
            self._take_turn()

    def lineReceived(self, line: bytes) -> None:
        """Process one line, for programs that use this class as a LineReceiver."""
        self.bytes_in += len(line) + 1
        self._process(self.session.receive_line(line, self._clock.seconds()))

    def lineLengthExceeded(self, line: bytes) -> None:
        """Process a line that the LineReceiver found too long: the session makes the Fault."""
        self.lineReceived(line)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Stop the timer and drop what is queued."""
        self.tls_error = (
            describe_tls_error(reason.value, self.transport, server=self._role is Role.MASTER) or self.tls_error
        )
        self._set_timer(None)
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._end_turns()
        self._send_buffer.clear()
        self._end()
        self._owner.transport_closed(self)

    # ---- what the owner calls

    @property
    def queued_bytes(self) -> int:
        """The number of bytes that wait here because the peer does not read."""
        return self._send_buffer.queued_bytes

    def send(self, *commands: Command) -> None:
        """Send commands in one write; nothing after the end of the connection.

        LocalProtocolError if this role may not send one of them, or if one cannot be encoded.
        """
        if self._ended:
            return
        now = self._clock.seconds()
        self.write(b"".join([self.session.send(command, now) for command in commands]), len(commands))

    def write(self, lines: bytes, count: int) -> None:
        """Send ``count`` encoded lines, now or when the peer reads again."""
        if self._ended or not lines:
            return
        self.session.sent(self._clock.seconds())
        if not self._producer.paused:
            self._write_now(lines, count)
        elif not self._send_buffer.push(lines, count):
            self.fail(Fault("Failed to keep up", "slow peer"))

    def fail(self, fault: Fault) -> None:
        """Send the fault as an ERROR line, before anything that is queued, and close."""
        if self._ended:
            return
        self._owner.peer_failed(self, fault)
        self.close(fault.text, linger=self._role is Role.MASTER)

    def close(self, why: str | None = None, *, linger: bool = False) -> None:
        """Drop what is queued, send an ERROR line if there is a reason, and close once the transport has sent it.

        With ``linger`` a TCP or UNIX socket is closed for writing only, until the peer closes too or the time of the
        keep-alive is over.  If a socket is closed whose input was not read, the system resets the connection, and a
        peer that is slow does not receive the ERROR line.  Rules: docs/protocol/connection.md B3.
        """
        if self._ended:
            return
        self._send_buffer.clear()
        if why is not None:
            try:
                self._write_now(encode_line(Error(why), self.limits.line_limit), 1)
            except LocalProtocolError:
                self.log.error("cannot encode an ERROR line: {why!r}", why=why)
        self.session.closed = True
        self._end()
        self.transport.unregisterProducer()
        self._set_timer(self._clock.seconds() + self.limits.keepalive.give_up_after)
        self._lingers = linger and _can_half_close(self.transport)
        if self._lingers:
            self.transport.resumeProducing()  # the owner may have paused it; what arrives is discarded
            self.transport.loseWriteConnection()
        else:
            self.transport.loseConnection()

    def abort(self) -> None:
        """Close at once, and drop what the transport still has to send."""
        self.transport.abortConnection()

    def write_queued(self) -> None:
        """Write what is queued, until the transport's buffer is full again."""
        while not self._producer.paused:
            before = self._send_buffer.queued_lines
            lines = self._send_buffer.pop()
            if lines is None:
                return
            self._write_now(lines, before - self._send_buffer.queued_lines)

    def status(self) -> PeerStatus:
        """Return what status pages show of this connection."""
        return PeerStatus(
            name=self.name,
            address=self.address,
            since=self.since,
            lines_out=self.lines_out,
            bytes_out=self.bytes_out,
            queued_bytes=self.queued_bytes,
            last_command=self.last_command,
        )

    # ---- inside

    def _receive(self, data: bytes) -> None:
        """Process one turn; nothing after the end."""
        if not self._ended:
            self.bytes_in += len(data)
            self._process(self.session.receive_data(data, self._clock.seconds()))

    def _take_turn(self) -> None:
        """Process a part of what was read; read on once all of it is processed."""
        if not self._unread and self._next_turn is not None:
            self._end_turns()
            self.transport.resumeProducing()
            return
        data, self._unread = self._unread[:TURN_BYTES], self._unread[TURN_BYTES:]
        self._next_turn = self._clock.callLater(REST * self._owner.resting, self._take_turn)
        self._receive(data)

    def _end_turns(self) -> None:
        self._next_turn, self._unread = None, b""
        self._owner.resting -= 1

    def _open(self) -> None:
        self._opened = True
        self._set_timer(self.session.wake_at())
        self._owner.peer_connected(self)

    def _process(self, received: list[Received]) -> None:
        if self._ended or not received:
            return
        fault = received.pop() if isinstance(received[-1], Fault) else None
        if received:
            last = received[-1]
            self.last_command = Rdata.WORD if isinstance(last, Rows) else last.WORD  # type: ignore[union-attr]
            self.lines_in += sum(len(each.texts) if isinstance(each, Rows) else 1 for each in received)
            self._owner.commands_received(self, received)
        if isinstance(fault, Fault):
            self.fail(fault)
        elif not self._ended and self._timer is not None and self.session.wake_at() < self._timer.getTime() - LATE:
            self._set_timer(self.session.wake_at())  # the peer's first PING: from now on silence counts

    def _write_now(self, lines: bytes, count: int) -> None:
        self.lines_out += count
        self.bytes_out += len(lines)
        if rest := send_now(self.transport, lines):
            self.transport.write(rest)

    def _set_timer(self, when: float | None) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
        if when is not None:
            self._timer = self._clock.callLater(max(0.0, when - self._clock.seconds()), self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        if not self._opened:
            self.tls_error = f"TLS failed: it was not negotiated in {self.limits.bounds.handshake_timeout:g} s"
            self.abort()
            return
        if self._lingers:
            self._lingers = False
            self._set_timer(self._clock.seconds())
            self.transport.loseConnection()  # closes before that timer, if all was sent
            return
        if self._ended:
            self.abort()  # the peer does not even read the ERROR line
            return
        due = self.session.tick(self._clock.seconds(), int(self._wall() * 1000))
        if isinstance(due, Fault):
            self.fail(due)
            return
        if due is not None:
            self.send(due)
        if not self._ended:
            self._set_timer(self.session.wake_at())

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._owner.peer_disconnected(self)
