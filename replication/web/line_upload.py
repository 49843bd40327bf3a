"""A blocking client of ``POST /v1/streams/NAME/append`` (docs/http.md).  It imports no Twisted.

One thread sends lines and receives answers, whichever is possible: the server stops reading while its answers are not
read.  What is not answered is kept, and sent again over another connection after a cut.
"""

from __future__ import annotations

import select
import ssl
import uuid
from collections import deque
from http import HTTPStatus
from http.client import RemoteDisconnected
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypedDict
from urllib.parse import quote

from replication.web.blocking_client import TIMEOUT, HttpError
from replication.web.bounded_answer import MAX_HEADERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from socket import socket

    from replication.web.blocking_client import HttpClient

MAX_UNANSWERED: Final = 4 * 2**20  # bytes of lines
READ_BYTES: Final = 2**16
MAX_KEPT: Final = 2**24  # bytes of headers, or of one line: the IDs of MAX_UNANSWERED have fewer
_NOT_NOW: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class AnswerParser:
    """Parses one answer of HTTP 1.1 as it arrives; ``status`` is None until all its headers have arrived.

    ``reason`` is the phrase after the status.  ``rest`` is the body that was not returned as a line.  ``ended`` is
    whether the body is whole.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self.reason = ""
        self.rest = b""
        self.ended = False
        self._data = b""
        self._left: int | None = None  # bytes of the chunk, or of a body with a length
        self._chunked = False
        self._passed = 0  # bytes of answers 100

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines of an answer 200 that are whole now; ValueError if this is no HTTP, or has no end."""
        self._data += data
        if len(self._data) + len(self.rest) > MAX_KEPT:
            raise ValueError(f"a line of its answer has more than {MAX_KEPT} bytes")
        if self.status is None and not self._read_headers():
            return
        while not self.ended and (self._left is not None or self._read_size()):
            part, self._data = self._data[: self._left], self._data[self._left :]
            self.rest += part
            self._left = (self._left or 0) - len(part)
            if self._left:
                break
            self._left = None
            self.ended = self.ended or not self._chunked
        if self.status == HTTPStatus.OK:
            *lines, self.rest = self.rest.split(b"\n")
            yield from lines

    def _read_headers(self) -> bool:
        status = "100"
        while status == "100":
            head, found, rest = self._data.partition(b"\r\n\r\n")
            if not found:
                return False
            self._data = rest
            self._passed += len(head)
            if self._passed > MAX_HEADERS:
                raise ValueError(f"its answer has more than {MAX_HEADERS} bytes of headers")
            first, *others = head.decode("latin-1").split("\r\n")
            version, status, *reason = first.split(" ", 2)
            if not version.startswith("HTTP/1."):
                raise ValueError(f"not an answer of HTTP 1: {first[:40]!r}")
        self.status, self.reason = int(status), "".join(reason)
        headers = {name.lower(): text.strip() for name, _, text in (each.partition(":") for each in others)}
        self._chunked = headers.get("transfer-encoding") == "chunked"
        if not self._chunked:
            self._left = _size(headers.get("content-length", "0"), 10)
            self.ended = self._left == 0
        return True

    def _read_size(self) -> bool:
        """Read the size of the next chunk; the end of the one before it comes first."""
        line, found, rest = self._data.removeprefix(b"\r\n").partition(b"\r\n")
        if not found:
            return False
        self._data, self._left = rest, _size(line.partition(b";")[0].decode("latin-1"), 16)
        self.ended = self._left == 0
        return True


def _size(text: str, base: int) -> int:
    if (size := int(text, base)) < 0:
        raise ValueError(f"a part of its answer has the size {size}")
    return size


class _Refusal(TypedDict):
    status: int
    error: str


class LineUpload:
    """Appends lines, each the JSON of a fact, to ``stream``, and calls ``on_ids`` with the IDs of the next ones.

    All methods raise HttpError if the server refuses; ``first`` is then the number of facts before the first line of
    the request whose lines the error counts.  UnavailableError: nothing was answered for the patience of the client.

    Both bounds of time, that of a connection without answers and the patience, hold over all calls: lines that are
    added meanwhile do not begin them anew.
    """

    def __init__(self, client: HttpClient, stream: str, on_ids: Callable[[Sequence[int]], None]) -> None:
        self.first = 0
        self._client = client
        self._path = f"/v1/streams/{quote(stream, safe='')}/append"
        self._on_ids = on_ids
        self._key = uuid.uuid4().hex
        self._answered = 0  # facts
        self._unanswered: deque[bytes] = deque()
        self._size = 0  # bytes of these
        self._ends = False
        self._since = 0.0  # when the last answer arrived, or the first line that has none was added
        self._silent_since: float | None = None  # when all was sent to this connection, while it answers nothing
        self._stuck_since = 0.0  # when this connection last took a byte, or the first of those that wait came
        self._socket: socket | None = None
        self._out = bytearray()
        self._parser = AnswerParser()

    def is_offered(self) -> bool:
        """Whether the server has the call."""
        try:
            self._client.call("GET", self._path)
        except HttpError as error:
            if error.status in (HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_FOUND):
                return error.status == HTTPStatus.METHOD_NOT_ALLOWED
            raise
        return False

    def add(self, lines: Sequence[bytes]) -> None:
        """Send lines; wait for answers if too many have none."""
        if not self._unanswered:
            self._since = self._client.clock()
        self._unanswered.extend(lines)
        self._size += sum(map(len, lines))
        if self._socket is not None:
            self._put(lines)
        self._exchange(lambda: not self._out and self._size <= MAX_UNANSWERED)

    def wait_for(self, source: int) -> None:
        """Receive answers until the file descriptor ``source`` can be read."""
        if self._unanswered or self._socket is not None:
            self._exchange(lambda: False, source)

    def finish(self) -> None:
        """Return once all lines are answered."""
        if self._unanswered:
            self._ends = True
            if self._socket is not None:
                self._put(())
                self._out += b"0\r\n\r\n"
            self._exchange(lambda: not self._unanswered)
        self._close()

    # ---- inside

    def _exchange(self, is_done: Callable[[], bool], source: int | None = None) -> None:
        """Send and receive until it is done, or ``source`` can be read; again over another connection after a cut."""

        def exchange() -> None:
            try:
                connection = self._connected()
                while not is_done():
                    reads: list[Any] = [connection, source] if source is not None else [connection]
                    writes = [connection] if self._out else []
                    left = self._seconds_left()
                    readable, writable, _ = select.select(reads, writes, [], left)
                    if (not readable and not writable) or (left == 0 and connection not in readable):
                        raise TimeoutError("timed out")
                    if writable:
                        self._send(connection)
                    if connection in readable:
                        self._receive(connection)
                    if source in readable:
                        return
            except HttpError:
                self._close()
                raise
            except (OSError, ValueError) as error:
                self._close()
                if not self._unanswered:
                    return  # nothing is missing: the next lines are sent over another connection
                raise self._client.failure(error) from error

        self._client.retry(exchange, lambda: self._since)

    def _seconds_left(self) -> float | None:
        """Return how long nothing may happen, 0 if no answer has come for too long."""
        if not self._unanswered:
            return None
        if self._out:
            since = self._stuck_since
        else:
            since = self._silent_since = self._silent_since or monotonic()
        return max(0.0, since + TIMEOUT - monotonic())

    def _connected(self) -> socket:
        if self._socket is None:
            headers = {
                "Content-Type": "application/x-ndjson",
                "Idempotency-Key": self._key,
                "Transfer-Encoding": "chunked",
            }
            self._socket = self._client.open(f"{self._path}?after={self._answered}", headers)
            self._socket.setblocking(False)
            self.first, self._silent_since = self._answered, None
            self._parser = AnswerParser()
            self._out.clear()
            self._put(self._unanswered)
            if self._ends:
                self._out += b"0\r\n\r\n"
        return self._socket

    def _close(self) -> None:
        self._socket = None
        self._client.close()

    def _put(self, lines: Sequence[bytes]) -> None:
        if not self._out:
            self._stuck_since = monotonic()
        if lines:
            data = b"".join([b"%b\n" % line for line in lines])
            self._out += b"%x\r\n%b\r\n" % (len(data), data)

    def _send(self, connection: socket) -> None:
        try:
            del self._out[: connection.send(self._out)]
            self._stuck_since = monotonic()
        except _NOT_NOW:
            return

    def _receive(self, connection: socket) -> None:
        while True:
            try:
                data = connection.recv(READ_BYTES)
            except _NOT_NOW:
                return
            if not data:
                raise RemoteDisconnected("the connection was closed")
            for line in self._parser.feed(data):
                self._take(line)
            if self._parser.ended:
                if self._parser.status != HTTPStatus.OK:
                    raise self._client.refusal(self._parser.status or 0, self._parser.reason, self._parser.rest)
                if self._unanswered:
                    raise RemoteDisconnected("the answer ended")
                return

    def _take(self, line: bytes) -> None:
        answer: list[int] | _Refusal = self._client.decode(line, list[int] | _Refusal)
        if not isinstance(answer, list):
            raise self._client.refusal(answer["status"], answer["error"], line)
        if not 0 < len(answer) <= len(self._unanswered):
            what = f"{len(answer)} IDs for {len(self._unanswered)} lines"
            raise HttpError(f"{self._client.url} answers {what}; is that a replication daemon?")
        self._size -= sum([len(self._unanswered.popleft()) for _ in answer])
        self._answered += len(answer)
        self._since, self._silent_since = self._client.clock(), None
        self._on_ids(answer)
