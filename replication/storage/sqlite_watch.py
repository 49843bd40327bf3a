"""Watching what other processes write into a file: one at a time does, so what can be seen is complete.

That holds for IDs as SQLite gives them, or max + 1 in the transaction that inserts.  An ID below one that was announced
comes too late for who follows: one that was deleted and is given again, which AUTOINCREMENT prevents, or one that an
application makes up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.streams.seams import Reach

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from replication.wire.grammar import StreamName, Token


class SqliteWatch:
    """An IWatch of ``streams``.

    ``read`` takes the version of the file that is known, and returns the present one and, if that is new, the last IDs.
    """

    def __init__(
        self,
        streams: Sequence[StreamName],
        read: Callable[[int | None], Awaitable[tuple[int, Mapping[StreamName, Token]]]],
    ) -> None:
        self.streams = streams
        self._read = read
        self._version: int | None = None
        self._reached: Mapping[StreamName, Reach] = {}

    async def look(self) -> Mapping[StreamName, Reach]:
        """Return how far each mapped stream has come; a file that nobody has changed costs next to nothing."""
        self._version, last = await self._read(self._version)
        self._reached = {**self._reached, **{stream: Reach(token, token) for stream, token in last.items()}}
        return self._reached
