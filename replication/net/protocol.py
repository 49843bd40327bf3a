"""The skin: a LineReceiver that carries one conversation.  ``session`` decides; this file moves bytes and keeps time.

``dataReceived`` hands whole reads to the session's bulk path.  ``lineReceived`` is there for whoever embeds or extends
the protocol as the LineReceiver that it is; a property in the tests holds the two to the same commands.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import connectionDone
from twisted.logger import Logger
from twisted.protocols.basic import LineReceiver
from zope.interface import implementer

from replication.errors import LocalProtocolError
from replication.session.connection import Fault, Keepalive, ReplicationConnection, Role, Rows
from replication.session.outbox import Outbox
from replication.streams.seams import PeerStatus
from replication.wire.commands import LINE_LIMIT, Error, Ping, Rdata, encode_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.internet.interfaces import IDelayedCall, IReactorTime
    from twisted.python.failure import Failure

    from replication.session.connection import Heard, Words
    from replication.wire.commands import Command


class Conversation(Protocol):
    """What a master or a worker does with a connection.  Called on the reactor's thread."""

    def peer_connected(self, peer: ReplicationProtocol) -> None:
        """A connection is up and may be written to."""

    def peer_said(self, peer: ReplicationProtocol, heard: Sequence[Heard]) -> None:
        """A read brought these, in order; faults are dealt with already and not among them."""

    def peer_faulted(self, peer: ReplicationProtocol, fault: Fault) -> None:
        """The conversation is over because of this; the ERROR line is on its way."""

    def peer_lost(self, peer: ReplicationProtocol) -> None:
        """The connection is gone, or about to be closed by us; called once."""

    def peer_gone(self, peer: ReplicationProtocol) -> None:
        """The transport is gone, too; called once, after ``peer_lost``."""


@attrs.frozen
class Limits:
    """What one connection may cost and how long it may be silent.

    ``line_limit`` in bytes without the LF; a peer that does not read has up to ``max_queued_bytes`` and
    ``max_queued_lines`` kept for it before it is told ``Failed to keep up``.
    """

    keepalive: Keepalive = attrs.field(factory=Keepalive)
    line_limit: int = LINE_LIMIT
    max_queued_bytes: int = 8 * 1024 * 1024
    max_queued_lines: int = 100_000


@implementer(IPushProducer)
class _Valve:
    """Told by the transport when it has had enough; a LineReceiver's own pauseProducing means the other direction."""

    __slots__ = ("_resumed", "paused")

    def __init__(self, resumed: Callable[[], None]) -> None:
        self.paused = False
        self._resumed = resumed

    def pauseProducing(self) -> None:
        self.paused = True

    def resumeProducing(self) -> None:
        self.paused = False
        self._resumed()

    def stopProducing(self) -> None:
        """Do nothing: connectionLost follows."""


class ReplicationProtocol(LineReceiver):
    """One end of one connection, in either role."""

    delimiter = b"\n"
    log = Logger()
    transport: Any  # Twisted's annotation knows only what every transport has

    def __init__(
        self,
        role: Role,
        conversation: Conversation,
        clock: IReactorTime,
        limits: Limits | None = None,
        *,
        wall: Callable[[], float] = time.time,
        words: Words | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.MAX_LENGTH = self.limits.line_limit
        self.name = ""
        self.address = ""
        self.last_word = ""
        self.lines_in = self.lines_out = self.bytes_in = self.bytes_out = 0
        self._role = role
        self._conversation = conversation
        self._clock = clock
        self._wall = wall
        self._words = words
        self._timer: IDelayedCall | None = None
        self._over = False

    # ---- what the transport calls

    def connectionMade(self) -> None:
        """Start the session."""
        now = self._clock.seconds()
        self.since = self._wall()
        self.session = ReplicationConnection(
            self._role, now, self.limits.keepalive, self.limits.line_limit, self._words
        )
        self._outbox = Outbox(self.limits.max_queued_bytes, self.limits.max_queued_lines)
        self._valve = _Valve(self._drain)
        self.address = _spell_address(self.transport.getPeer())
        set_no_delay = getattr(self.transport, "setTcpNoDelay", None)  # a UNIX socket has none
        if set_no_delay is not None and not self.address.startswith("unix"):
            set_no_delay(True)
        self.transport.registerProducer(self._valve, True)
        self._arm(self.session.wake_at())
        self._conversation.peer_connected(self)

    def dataReceived(self, data: bytes) -> None:
        """Read all that one read brought."""
        self.bytes_in += len(data)
        self._heard(self.session.receive_data(data, self._clock.seconds()))

    def lineReceived(self, line: bytes) -> None:
        """Read one line: for those who drive this class as a LineReceiver."""
        self.bytes_in += len(line) + 1
        self._heard(self.session.receive_line(line, self._clock.seconds()))

    def lineLengthExceeded(self, line: bytes) -> None:
        """Refuse what a LineReceiver found too long: the session says why."""
        self.lineReceived(line)

    def connectionLost(self, reason: Failure = connectionDone) -> None:  # noqa: ARG002 (Twisted's signature)
        """Let go of everything."""
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
        self._outbox.clear()
        self._finish()
        self._conversation.peer_gone(self)

    # ---- what the owner calls

    @property
    def queued_bytes(self) -> int:
        """What waits on our side because the peer does not read."""
        return self._outbox.queued_bytes

    def say(self, *commands: Command) -> None:
        """Send commands in one write; LocalProtocolError if one is not ours to say or not sayable."""
        if self._over:
            return
        now = self._clock.seconds()
        self.write(b"".join([self.session.send(command, now) for command in commands]), len(commands))

    def write(self, lines: bytes, count: int) -> None:
        """Send ``count`` whole lines that were spelt elsewhere, now or once the peer reads again."""
        if self._over or not lines:
            return
        self.session.sent(self._clock.seconds())
        if not self._valve.paused:
            self._put(lines, count)
        elif not self._outbox.push(lines, count):
            self.fail(Fault("Failed to keep up", "slow peer"))

    def fail(self, fault: Fault) -> None:
        """Tell the peer why, past anything that is queued for it, and close."""
        if self._over:
            return
        self._conversation.peer_faulted(self, fault)
        self.close(fault.text)

    def close(self, why: str | None = None) -> None:
        """Close after what has been handed to the transport, with an ERROR line if there is something to say."""
        if self._over:
            return
        self._outbox.clear()
        if why is not None:
            try:
                self._put(encode_line(Error(why), self.limits.line_limit), 1)
            except LocalProtocolError:
                self.log.error("an ERROR line could not be spelt: {why!r}", why=why)
        self.session.closed = True
        self._finish()
        self.transport.unregisterProducer()
        self._arm(self._clock.seconds() + self.limits.keepalive.give_up_after)
        self.transport.loseConnection()

    def abort(self) -> None:
        """Drop the connection, with whatever the transport still holds."""
        self.transport.abortConnection()

    def status(self) -> PeerStatus:
        """Return what a status page shows of this connection."""
        return PeerStatus(
            name=self.name,
            address=self.address,
            since=self.since,
            lines_out=self.lines_out,
            bytes_out=self.bytes_out,
            queued_bytes=self.queued_bytes,
            last_command=self.last_word,
        )

    # ---- inside

    def _heard(self, heard: list[Heard]) -> None:
        if self._over or not heard:
            return
        fault = heard.pop() if isinstance(heard[-1], Fault) else None
        if heard:
            last = heard[-1]
            self.last_word = Rdata.WORD if isinstance(last, Rows) else last.WORD  # type: ignore[union-attr]
            self.lines_in += sum(len(each.texts) if isinstance(each, Rows) else 1 for each in heard)
            self._conversation.peer_said(self, heard)
        if isinstance(fault, Fault):
            self.fail(fault)
        elif not self._over and self._timer is not None and self.session.wake_at() < self._timer.getTime():
            self._arm(self.session.wake_at())  # its first PING: from now on its silence counts

    def _put(self, lines: bytes, count: int) -> None:
        self.lines_out += count
        self.bytes_out += len(lines)
        self.transport.write(lines)

    def _drain(self) -> None:
        """Write what waited, for as long as the transport takes it."""
        while not self._valve.paused:
            before = self._outbox.queued_lines
            lines = self._outbox.pop()
            if lines is None:
                return
            self._put(lines, before - self._outbox.queued_lines)

    def _arm(self, when: float) -> None:
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = self._clock.callLater(max(0.0, when - self._clock.seconds()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._over:
            self.abort()  # it will not even take its ERROR line
            return
        said = self.session.tick(self._clock.seconds(), int(self._wall() * 1000))
        if isinstance(said, Fault):
            self.fail(said)
            return
        if isinstance(said, Ping):
            self.say(said)
        if not self._over:
            self._arm(self.session.wake_at())

    def _finish(self) -> None:
        if not self._over:
            self._over = True
            self._conversation.peer_lost(self)


def _spell_address(address: object) -> str:
    host, port = getattr(address, "host", None), getattr(address, "port", None)
    if host is None:
        return f"unix:{os.fsdecode(getattr(address, 'name', None) or b'')}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
