"""An answer of HTTP that a blocking client reads: a server cannot make it last, or grow, without an end."""

from __future__ import annotations

from http.client import HTTPException, HTTPResponse
from io import BufferedReader, RawIOBase
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, cast

from replication.web.pages import MAX_ANSWER

if TYPE_CHECKING:
    from socket import socket

MAX_HEADERS: Final = 2**20  # bytes, with all answers 100 before the answer
MAX_SENT: Final = 2 * MAX_ANSWER  # bytes: a body in many small chunks is sent in more bytes than it has
SLOWEST: Final = 2**14  # bytes a second, once the first wait is over


class BoundedResponse(HTTPResponse):
    """Is whole within the timeout of its socket, and one second more for each SLOWEST bytes.

    TimeoutError if it is not; HTTPException if it is too large, or no HTTP.
    """

    def __init__(self, sock: socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._reader = _BoundedReader(sock, self.fp.detach())
        self.fp = BufferedReader(self._reader)

    def begin(self) -> None:
        """Read the headers."""
        super().begin()
        self._reader.limit = MAX_SENT

    def read(self, amt: int | None = None) -> bytes:
        """Read a part of the body."""
        try:
            return super().read(amt)
        except ValueError as error:
            raise HTTPException(f"its answer is no HTTP: {error}") from error


class _BoundedReader(RawIOBase):
    """Reads from ``raw``, that of ``sock``; ``limit`` is in bytes."""

    def __init__(self, sock: socket, raw: Any) -> None:
        super().__init__()
        self.limit = MAX_HEADERS
        self._socket = sock
        self._raw = raw
        self._timeout = cast("float", sock.gettimeout())
        self._since = monotonic()
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._since + self._timeout + self._count / SLOWEST - monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        if self._count > self.limit:
            raise HTTPException(f"its answer has more than {self.limit} bytes")
        self._socket.settimeout(min(self._timeout, left))
        count: int | None = self._raw.readinto(buffer)
        self._count += count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
