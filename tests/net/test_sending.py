"""What a socket can take is sent in the present turn of the reactor; the rest follows in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from twisted.internet.abstract import FileDescriptor
from twisted.internet.address import IPv4Address
from twisted.internet.error import ConnectionLost
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock, StringTransport

from replication.net.protocol import Limits, ReplicationProtocol
from replication.net.sending import send_now
from replication.session.connection import Role
from tests.net.test_protocol import Owner

if TYPE_CHECKING:
    from replication.net.protocol import IConnectionOwner

LINES = 100  # of 1,000 bytes, more than Twisted's buffer takes before it pauses the producer


class Socket(FileDescriptor):
    """A transport that sends ``room`` bytes at once, and the rest when the reactor calls it; None: it is broken."""

    connected = True

    def __init__(self, room: int | None) -> None:
        super().__init__(cast("Any", MemoryReactorClock()))
        self.room, self.sent = room, b""

    def writeSomeData(self, data: bytes) -> int | BaseException:
        if self.room is None:
            return ConnectionLost()
        part = data[: self.room]
        self.sent += part
        return len(part)

    def getPeer(self) -> IPv4Address:
        return IPv4Address("TCP", "127.0.0.1", 9092)

    @property
    def waits(self) -> bool:
        """Whether the reactor calls when more can be sent."""
        return self in cast("Any", self.reactor).getWriters()


def write(socket: Socket, data: bytes) -> None:
    if rest := send_now(socket, data):
        socket.write(rest)


def test_what_has_room_is_sent_at_once() -> None:
    socket = Socket(room=100)
    write(socket, b"lines")
    assert socket.sent == b"lines"
    assert not socket.waits


def test_what_has_no_room_is_sent_later_and_in_order() -> None:
    socket = Socket(room=3)
    write(socket, b"lines")
    write(socket, b"next")
    assert socket.sent == b"lin"
    assert socket.waits
    while socket.waits:
        socket.doWrite()
    assert socket.sent == b"linesnext"


def test_a_broken_connection_is_left_to_the_reactor() -> None:
    socket = Socket(room=None)
    write(socket, b"lines")
    assert socket.waits
    assert isinstance(socket.doWrite(), ConnectionLost)


@pytest.mark.parametrize("end", [{"connected": False}, {"disconnecting": True}])
def test_nothing_is_sent_at_once_over_a_connection_that_ends(end: dict[str, bool]) -> None:
    socket = Socket(room=100)
    vars(socket).update(end)
    write(socket, b"lines")
    assert socket.sent == b""


def test_a_transport_that_is_no_socket_receives_all_later() -> None:
    """TLS encrypts what is written: nothing may reach the socket below it directly."""
    transport = StringTransport()
    assert send_now(transport, b"lines") == b"lines"
    assert transport.value() == b""


def test_lines_for_a_peer_that_does_not_read_wait_and_are_sent_in_order() -> None:
    socket = Socket(room=300)
    protocol = ReplicationProtocol(Role.MASTER, cast("IConnectionOwner", Owner()), Clock(), Limits())
    protocol.makeConnection(cast("Any", socket))
    lines = [f"{number:03}{'x' * 996}\n".encode() for number in range(LINES)]
    for line in lines:
        protocol.write(line, 1)
    assert socket.sent == lines[0][:300]
    assert protocol.queued_bytes > 0
    while socket.waits:
        socket.doWrite()
    assert socket.sent == b"".join(lines)
    assert protocol.queued_bytes == 0
    assert protocol.lines_out == LINES
