"""How many pages of facts are made at a time, and of how many rows (docs/security.md, Bounds).

A database is read on one thread.  So whatever else reads it, such as an append with a key, would wait for all pages
that clients have requested; and to encode a long page holds up the reactor.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar

from twisted.internet.defer import Deferred

from replication.errors import StreamError
from replication.streams.facts import count_rows
from replication.web.pages import MAX_PAGE_ROWS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from replication.streams.facts import Fact
    from replication.web.request import ApiRequest

PAGE_AIM: Final = 2_097_152  # bytes; a page has about so many
MOST_READ: Final = 2 * PAGE_AIM  # bytes of pages: one is read while another one is encoded
FIRST_ROWS: Final = 1_000  # of the first page of a stream

_T = TypeVar("_T")


class PageTurns:
    """Lets pages of about MOST_READ bytes all together be read from the database at a time, in the requests' order."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}  # of PAGE_AIM bytes, by stream
        self._bytes = 0  # of the pages that are read
        self._waiting: deque[Deferred[None]] = deque()
        self._goes_on = False

    async def read(self, request: ApiRequest, stream: str, limit: int, read: Callable[[int], Awaitable[_T]]) -> _T:
        """Call ``read`` with a number of rows, at most ``limit``, and return its result.

        A page that this process reads waits for its turn; one that another process sends does not.

        StreamError: the client has disconnected meanwhile.
        """
        if not request.api.served.stores(stream):
            return await read(min(limit, self._fitting(stream)))
        if self._bytes >= MOST_READ:
            turn: Deferred[None] = Deferred()
            self._waiting.append(turn)
            await turn
        rows = min(limit, self._fitting(stream))
        size = PAGE_AIM * rows // self._fitting(stream)
        self._bytes += size
        try:
            if request.disconnected:
                raise StreamError("the client has disconnected")
            return await read(rows)
        finally:
            self._bytes -= size
            self._go_on()

    def note(self, stream: str, facts: Sequence[Fact], size: int) -> None:
        """Note that a page of ``stream`` had these facts and so many bytes.

        A page of few rows does not show that the others are as short.
        """
        rows = len(facts)
        if 0 < PAGE_AIM * rows < size * MAX_PAGE_ROWS:  # else there are enough rows, even if each fact has one
            rows = count_rows(facts)
        fitting = max(1, PAGE_AIM * rows // size)
        if rows and (2 * rows >= self._fitting(stream) or 2 * fitting < self._fitting(stream)):
            self._rows[stream] = fitting

    def _fitting(self, stream: str) -> int:
        return self._rows.get(stream, FIRST_ROWS)

    def _go_on(self) -> None:
        """Let the next pages be read, while the last one is encoded; in a loop, or a thousand would nest as calls."""
        if self._goes_on:
            return
        self._goes_on = True
        while self._waiting and self._bytes < MOST_READ:
            self._waiting.popleft().callback(None)
        self._goes_on = False
