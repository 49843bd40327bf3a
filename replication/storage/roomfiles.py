"""Rooms read straight from a database, by a program that has no reactor."""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.python.failure import Failure
from zope.interface import implementer

from replication.storage import open_store
from replication.storage.roomreads import RoomReads

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    T = TypeVar("T")


def read_rooms(url: str, ask: Callable[[RoomReads], T]) -> T:
    """Open the database that ``url`` names, ask on one snapshot, and close it; StoreError if it cannot be read."""
    turns = _Turns()
    store = open_store(url, turns, read_only=True)

    async def open_and_ask() -> T:
        await store.open()
        try:
            return await store.read(lambda database: ask(RoomReads(database)))
        finally:
            await store.close()

    return turns.wait(open_and_ask())


@implementer(IReactorFromThreads)
class _Turns:
    """What threads ask of a reactor, done while we wait for them."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def callFromThread(self, callable: Callable[..., Any], *args: object, **kwargs: object) -> None:  # noqa: A002
        """Keep the call."""
        self._calls.put(lambda: callable(*args, **kwargs))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Do what is asked until ``work`` has ended; return its result or raise its error."""
        outcome: list[T | Failure] = []
        Deferred.fromCoroutine(work).addBoth(outcome.append)
        while not outcome:
            self._calls.get()()
        (result,) = outcome
        if isinstance(result, Failure):
            result.raiseException()
        return result
