"""Waiting for one thing from several places, for a thing that goes on without us, and only while a process runs."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from twisted.internet.interfaces import IReactorTime
    from twisted.python.failure import Failure

T = TypeVar("T")


def share(original: Deferred[T]) -> Deferred[T]:
    """Return a Deferred that fires as ``original`` does; cancelling it leaves ``original`` alone.

    ``original`` keeps its result, so it may be shared again; its failure goes to the first who still waits for it.  If
    nobody does, Twisted logs it.
    """
    mine: Deferred[T] = Deferred()

    def succeeded(result: T) -> T:
        if not mine.called:
            mine.callback(result)
        return result

    def failed(failure: Failure) -> Failure | None:
        if mine.called:
            return failure
        mine.errback(failure)
        return None

    original.addCallbacks(succeeded, failed)
    return mine


def shield(work: Coroutine[Deferred[Any], Any, T]) -> Deferred[T]:
    """Start ``work`` and return a Deferred for its outcome; the work goes on to its end even if that is cancelled."""
    return share(Deferred.fromCoroutine(work))


class Waits:
    """What a process waits for only as long as it runs."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._under_way: set[Deferred[Any]] = set()
        self._ended = False

    def add(self, waiting: Deferred[T]) -> Deferred[T]:
        """Return ``waiting``, which ``end`` cancels; at once if that has been."""
        self._under_way.add(waiting)

        def forget(result: T) -> T:
            self._under_way.discard(waiting)
            return result

        waiting.addBoth(forget)
        if self._ended:
            waiting.cancel()
        return waiting

    async def nap(self, seconds: float) -> None:
        """Return after so many seconds, or once ``end`` is called."""
        with suppress(CancelledError):  # that is how ``end`` ends it
            await self.add(deferLater(self._clock, seconds))

    def end(self) -> None:
        """Cancel all, and whatever is added from now on."""
        self._ended = True
        for each in list(self._under_way):
            each.cancel()
