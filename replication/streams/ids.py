"""The awaiting half of :mod:`replication.streams.pending`: IDs from a sequence that others draw from too."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from replication.streams.pending import PendingIds


class StreamIdGenerator:
    """Hands out stream IDs that stay unsettled for as long as somebody works under them."""

    def __init__(
        self,
        pending: PendingIds,
        allocate: Callable[[int], Awaitable[Sequence[int]]],
        on_settled: Callable[[int], object],
    ) -> None:
        """Draw IDs with ``allocate(count)``; tell ``on_settled`` the settled ID whenever it may have moved."""
        self._pending = pending
        self._allocate = allocate
        self._on_settled = on_settled

    @asynccontextmanager
    async def reserve(self, count: int = 1) -> AsyncIterator[Sequence[int]]:
        """Allocate IDs that are completed when the block is left, by whichever exit.

        SequenceRegressedError if the sequence repeats itself; whatever else it raises is passed on.
        """
        floor = self._pending.expect()
        try:
            ids = await self._allocate(count)
            self._pending.open(floor, ids)
        except BaseException:  # a cancelled task and a closed coroutine count too
            self._pending.abandon(floor)
            self._on_settled(self._pending.settled)
            raise
        try:
            yield ids
        finally:
            self._pending.complete(ids)
            self._on_settled(self._pending.settled)
