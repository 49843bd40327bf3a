"""What other processes write into a file: SQLite has one writer at a time, so all IDs up to the last one are settled.

That holds for IDs that SQLite gives, and for ``max + 1`` in the transaction that inserts.  An ID below one that was
published reaches no follower: an ID that was deleted and is given again, which AUTOINCREMENT prevents, or an ID that an
application invents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from replication.errors import StoreError
from replication.streams.interfaces import SequenceState
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from replication.wire.grammar import StreamName


class SqliteWatch:
    """An IWatch of ``streams``.

    ``read`` takes the last version of the file, and returns the present one and, if that differs, the last IDs.
    If the last ID of a table cannot be read, there is an error in its place.  The other streams go on.
    """

    def __init__(
        self,
        streams: Sequence[StreamName],
        read: Callable[[int | None], Awaitable[tuple[int, Mapping[StreamName, Token | StoreError]]]],
    ) -> None:
        self.streams = streams
        self._read = read
        self._version: int | None = None
        self._states: Mapping[StreamName, SequenceState] = {}

    async def poll(self) -> Mapping[StreamName, SequenceState]:
        """Return the state of each mapped stream; for an unchanged file this reads one number."""
        self._version, last = await self._read(self._version)
        self._states = {**self._states, **{stream: self._state(stream, each) for stream, each in last.items()}}
        return self._states

    def _state(self, stream: StreamName, found: Token | StoreError) -> SequenceState:
        if isinstance(found, StoreError):
            return replace(self._states.get(stream, SequenceState(None, Token(0))), error=str(found))
        return SequenceState(found, found)
