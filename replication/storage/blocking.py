"""A store, used by a program without a reactor."""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.python.failure import Failure
from zope.interface import implementer

from replication.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from replication.streams.interfaces import IStreamStore
    from replication.urls import Url

T = TypeVar("T")


def use_store(
    url: str | Url,
    work: Callable[[IStreamStore], Coroutine[Any, Any, T]],
    *,
    read_only: bool,
    foreign: bool = False,
) -> T:
    """Open the database at ``url``, run ``work`` with its store, and close it; StoreError if that fails.

    ``read_only`` and ``foreign`` are those of ``open_store``.
    """
    calls = _CallQueue()
    store = open_store(url, calls, read_only=read_only, foreign=foreign)

    async def open_and_work() -> T:
        try:
            await store.open()
            return await work(store)
        finally:
            await store.close()

    return calls.wait(open_and_work())


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
