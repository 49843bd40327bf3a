"""A connection of HTTP 1.1 whose requests have time limits: headers and bodies cannot be sent for ever.

Twisted closes a connection that is idle for 60 s, but one byte a minute would keep it open.  Here all headers, and each
body, have an end (docs/security.md, Bounds).  A request that arrives in one read costs no timer.

Of requests that arrive together, Twisted answers all in one turn of the reactor.  Thousands of them would hold up every
other connection, and their answers would take memory while the client does not read.  So here one is answered in a
turn, and the next one waits until the client has read.

Likewise, Twisted takes a fifth of a second for a read with ten thousand chunks of one byte.  So a read with many ends
of lines is processed in parts, and other connections have their turns between them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, cast

from twisted.internet.interfaces import ITCPTransport
from twisted.internet.protocol import connectionDone
from twisted.web.http import HTTPChannel

from replication.net.endpoints import format_address
from replication.net.sending import send_now
from replication.net.tls import describe_tls_error
from replication.web.whole_request import VERSION, parse_whole

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress, IDelayedCall, ITransport
    from twisted.python.failure import Failure

    from replication.web.request import ApiRequest
    from replication.web.site import ApiSite
    from replication.web.whole_request import WholeRequest

BYTES_PER_SECOND: Final = 1024  # of a body, beyond the time that each has
MANY_ENDS: Final = 256  # ends of lines, as chunks and headers have them; a read with more is processed in parts
PART: Final = 1_024  # bytes of such a part: 170 chunks of one byte take about 2.5 ms of CPU time
PAUSE: Final = 0.001  # seconds until the next part, times the number of other connections with parts
_ABSOLUTE: Final = re.compile(rb"(?i:https?)://([^/?]*)(.*)", re.DOTALL)  # a target: the host, and the path
_IDLE: Final = ""
_HEADERS: Final = "headers"
_BODY: Final = "body"
_ANSWER: Final = "answer"


class Channel(HTTPChannel):
    """A connection of ``ApiSite``, which logs why its TLS failed, and closes if a request is late."""

    site: ApiSite
    name = address = ""  # as the wire's peers have them
    _part = _HEADERS  # what is received now; the first headers are due from the connection on
    _timed = _IDLE  # the part that the timer is for
    _timer: IDelayedCall | None = None
    _lines_wait = False  # whether so many lines wait that no more are read
    _unread = b""  # of a read that is processed in parts
    _starts_next_request = False  # whether Twisted begins with the next request
    _next_part: IDelayedCall | None = None  # until it is called, nothing is read
    _answered: ApiRequest | None = None  # the request after which another one has to wait

    def connectionMade(self) -> None:
        """Begin to wait for the first headers, and for TLS."""
        super().connectionMade()  # type: ignore[no-untyped-call]
        transport = cast("ITransport", self.transport)
        self.peer_address, self._own_address = transport.getPeer(), transport.getHost()
        self.address = format_address(self.peer_address)
        self._watch()

    def dataReceived(self, data: bytes) -> None:
        """Receive a part of a request; then note what is still missing."""
        if self._part == _IDLE:
            self._part = _HEADERS
        if self._starts_next_request:  # with what Twisted has kept of the last read
            super().dataReceived(data)  # type: ignore[no-untyped-call]
            self._watch()
            return
        if self._next_part is not None:  # one more read, which something has allowed
            self._unread += data
            self._networkProducer.pauseProducing()
            return
        whole = parse_whole(data) if self._begins_request() else None
        if whole is not None:
            self._receive(whole)
        elif data.count(b"\r\n") > MANY_ENDS:
            self._unread = data
            self.site.in_parts += 1
            self._networkProducer.pauseProducing()
            self._process_part()
        else:
            super().dataReceived(data)  # type: ignore[no-untyped-call]
            self._watch()

    def _process_part(self) -> None:
        """Process a part of what was read, unless something waits; read on once all of it is processed."""
        if cast("Any", self.transport).disconnecting:
            self._end_parts()
            return
        waits = self._lines_wait or self._waitingForTransport or self._handlingRequest or self._answered is not None
        others = self.site.in_parts - 1
        if waits:
            self._next_part = self.site.reactor.callLater(PAUSE * max(1, others), self._process_part)
            return
        part, self._unread = self._unread[:PART], self._unread[PART:]
        if self._unread:
            self._next_part = self.site.reactor.callLater(PAUSE * others, self._process_part)
        else:
            self._end_parts()
            self._networkProducer.resumeProducing()
        if self._part == _IDLE:
            self._part = _HEADERS
        super().dataReceived(part)  # type: ignore[no-untyped-call]
        self._watch()

    def _end_parts(self) -> None:
        self._unread, self._next_part = b"", None
        self.site.in_parts -= 1

    def _begins_request(self) -> bool:
        """Return whether what arrives now is the beginning of a request."""
        idle = not (self._buffer or self.requests or self._busyReceiving)
        return bool(idle and self.line_mode and self.persistent and not cast("Any", self.transport).disconnecting)

    def _receive(self, whole: WholeRequest) -> None:
        """Do what Twisted does for each part of a request."""
        self._command, self._path, self._version = whole.method, whole.target, VERSION
        self.length = len(whole.body)
        request = cast("ApiRequest", self.requestFactory(self))
        request.requestHeaders = whole.headers
        cast("list[ApiRequest]", self.requests).append(request)
        self.allHeadersReceived()
        if whole.body:
            request.handleContentChunk(whole.body)
        self.allContentReceived()

    def send(self, data: bytes) -> None:
        """Send ``data`` at once, unless something else waits."""
        if rest := send_now(self.transport, data):
            self.write(rest)  # type: ignore[no-untyped-call]
            if self._waitingForTransport:
                self.site.unread.wait(self, len(rest))

    def getPeer(self) -> IAddress:
        """Return the address of the client, which each request needs."""
        return self.peer_address

    def getHost(self) -> IAddress:
        """Return the address of this end, which each request needs."""
        return self._own_address

    def headerReceived(self, line: bytes) -> bool:
        """Receive a header; 400 for a length of more digits than Python reads."""
        try:
            return bool(super().headerReceived(line))  # type: ignore[no-untyped-call]
        except ValueError:
            self._respondToBadRequestAndDisconnect()  # type: ignore[no-untyped-call]
            return False

    def allHeadersReceived(self) -> None:
        """Begin with the body.

        The target may be a whole URL, as clients send it that take this process for a proxy.  The host in it counts
        then, not the header (RFC 9112, 3.2.2).
        """
        self._part = _BODY
        if found := _ABSOLUTE.fullmatch(self._path):
            host, path = found.groups()
            cast("list[ApiRequest]", self.requests)[-1].requestHeaders.setRawHeaders(b"host", [host])
            self._path = path if path.startswith(b"/") else b"/" + path
        super().allHeadersReceived()  # type: ignore[no-untyped-call]

    @property
    def first_line(self) -> tuple[bytes, bytes, bytes]:
        """Method, path and version of the request whose headers have arrived; Twisted gives them to it at its end."""
        return self._command, self._path, self._version

    def wait_for_lines(self) -> None:
        """Let the body of this request take as long as it needs, and close the connection after it."""
        self._part = _ANSWER
        self.setTimeout(None)  # type: ignore[no-untyped-call]
        self.persistent = False
        if ITCPTransport.providedBy(self.transport):
            self.transport.setTcpKeepAlive(True)

    def read_lines(self, *, wanted: bool) -> None:
        """Read further lines, or not.  While the client does not read its answers, it is not read either."""
        self._lines_wait = not wanted
        if not wanted:
            self._networkProducer.pauseProducing()
        elif not self._waitingForTransport:
            self._networkProducer.resumeProducing()

    def resumeProducing(self) -> None:
        """Read on: the client has read its answers.  Not so while too many lines wait."""
        self.site.unread.end(self)
        super().resumeProducing()  # type: ignore[no-untyped-call]
        if self._lines_wait:
            self._networkProducer.pauseProducing()
        self._go_on()

    def allContentReceived(self) -> None:
        """End the time of the request; the answer may take as long as it needs."""
        self._part = _ANSWER
        self._watch()
        super().allContentReceived()  # type: ignore[no-untyped-call]

    def _finishRequestBody(self, data: bytes) -> None:
        """Store ``data``, which follows the body, before the request is answered.

        Twisted stores it after the answer, so ``requestDone`` would not find it.
        """
        if data:
            self._dataBuffer.append(data)
        self.allContentReceived()

    def requestDone(self, request: Any) -> None:
        """Wait for the next request.

        One that was sent already waits until the client has read this answer, and until others had their turn.  Else a
        client that sends requests and reads nothing would have any number of answers in memory.
        """
        if self.persistent and (self._waitingForTransport or self._buffer or self._dataBuffer):
            self._answered = request
            self._networkProducer.pauseProducing()
            self.setTimeout(self._savedTimeOut)  # type: ignore[no-untyped-call]
            self.callLater(0, self._go_on)  # type: ignore[no-untyped-call]
        else:
            self._part = _IDLE
            super().requestDone(request)  # type: ignore[no-untyped-call]

    def _go_on(self) -> None:
        """Process the next request, unless the client has still to read the answer to the last one."""
        request = self._answered
        closing = cast("Any", self.transport).disconnecting
        if request is not None and not (self._waitingForTransport or closing):
            self._answered, self._part = None, _IDLE
            self._starts_next_request = self._next_part is not None
            super().requestDone(request)  # type: ignore[no-untyped-call]
            self._starts_next_request = False

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """End; count and log a failure of TLS."""
        self._part, self._answered = _IDLE, None
        if self._next_part is not None:
            if self._next_part.active():
                self._next_part.cancel()
            self._end_parts()
        self.site.unread.end(self)
        self._watch()
        self.site.resource.admission.leave(self.peer_address)
        error = describe_tls_error(reason.value, self.transport, server=True)
        if error is not None:
            self.site.resource.tls_failed(self, error)
        super().connectionLost(reason)  # type: ignore[no-untyped-call]

    def _watch(self) -> None:
        """Let the timer run for the part that is missing now."""
        part = self._part if self._part in (_HEADERS, _BODY) else _IDLE
        if part == self._timed:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timed, bounds = part, self.site.resource.bounds
        seconds = {_HEADERS: bounds.header_timeout, _BODY: bounds.body_timeout}.get(part)
        if seconds:
            self._ends = self.site.reactor.seconds() + seconds
            self._timer = self.site.reactor.callLater(seconds, self._late)

    def _late(self) -> None:
        self._timer = None
        request = cast("list[ApiRequest]", self.requests)[-1] if self._timed == _BODY else None
        more = (
            0.0 if request is None else self._ends + request.received / BYTES_PER_SECOND - self.site.reactor.seconds()
        )
        if more > 0:
            self._timer = self.site.reactor.callLater(more, self._late)
            return
        self.site.resource.request_late(self, self._timed)
        cast("Any", self.transport).abortConnection()
