"""Rooms, read from a database by a program without a reactor."""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.python.failure import Failure
from zope.interface import implementer

from replication.storage import open_store
from replication.storage.tables.room_queries import RoomReads

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    T = TypeVar("T")


def read_rooms(url: str, read: Callable[[RoomReads], T]) -> T:
    """Open the database at ``url``, call ``read`` on one snapshot, and close it; StoreError if that fails."""
    calls = _CallQueue()
    store = open_store(url, calls, read_only=True)

    async def open_and_read() -> T:
        await store.open()
        try:
            return await store.read(lambda database: read(RoomReads(database)))
        finally:
            await store.close()

    return calls.wait(open_and_read())


@implementer(IReactorFromThreads)
class _CallQueue:
    """The reactor of a store: it runs the calls of the store's threads while the program waits."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def callFromThread(self, callable: Callable[..., Any], *args: object, **kwargs: object) -> None:  # noqa: A002
        """Queue the call."""
        self._calls.put(lambda: callable(*args, **kwargs))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run queued calls until ``work`` has ended; return its result or raise its error."""
        outcome: list[T | Failure] = []
        Deferred.fromCoroutine(work).addBoth(outcome.append)
        while not outcome:
            self._calls.get()()
        (result,) = outcome
        if isinstance(result, Failure):
            result.raiseException()
        return result
