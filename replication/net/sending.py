"""Sending on a socket at once, in the present turn of the reactor."""

from __future__ import annotations

from twisted.internet.abstract import FileDescriptor


def send_now(transport: object, data: bytes) -> bytes:
    """Send ``data`` if nothing else waits on this socket, and return what could not be sent, for ``transport.write``.

    Twisted's ``write`` sends in a later turn of the reactor.  For that it copies the data, and calls ``epoll_ctl``
    twice: to wait until the socket can be written, and to wait no more.  Other transports, such as TLS, send nothing.
    """
    if not isinstance(transport, FileDescriptor) or not _nothing_waits(transport):
        return data
    sent = transport.writeSomeData(data)
    return data[sent:] if isinstance(sent, int) else data  # after an error, ``write`` ends the connection


def _nothing_waits(transport: FileDescriptor) -> bool:
    ends = not transport.connected or transport.disconnecting
    return not (ends or transport.dataBuffer or transport._tempDataBuffer)  # noqa: SLF001
