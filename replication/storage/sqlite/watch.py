"""What other processes write into a file: SQLite has one writer at a time, so all IDs up to the last one are settled.

That holds for IDs that SQLite gives, and for ``max + 1`` in the transaction that inserts.  An ID below one that was
published reaches no follower: an ID that was deleted and is given again, which AUTOINCREMENT prevents, or an ID that an
application invents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.streams.interfaces import SequenceState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from replication.wire.grammar import StreamName, Token


class SqliteWatch:
    """An IWatch of ``streams``.

    ``read`` takes the last version of the file, and returns the present one and, if that differs, the last IDs.
    """

    def __init__(
        self,
        streams: Sequence[StreamName],
        read: Callable[[int | None], Awaitable[tuple[int, Mapping[StreamName, Token]]]],
    ) -> None:
        self.streams = streams
        self._read = read
        self._version: int | None = None
        self._states: Mapping[StreamName, SequenceState] = {}

    async def poll(self) -> Mapping[StreamName, SequenceState]:
        """Return the state of each mapped stream; for an unchanged file this reads one number."""
        self._version, last = await self._read(self._version)
        self._states = {**self._states, **{stream: SequenceState(token, token) for stream, token in last.items()}}
        return self._states
