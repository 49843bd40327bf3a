"""Waiting for one thing from several places, or for a thing that goes on without us."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from twisted.internet.defer import Deferred

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from twisted.python.failure import Failure

T = TypeVar("T")


def share(original: Deferred[T]) -> Deferred[T]:
    """Return a Deferred that fires as ``original`` does; cancelling it leaves ``original`` alone.

    ``original`` keeps its result, so it may be shared again; its failure goes to whoever shares it first.
    """
    mine: Deferred[T] = Deferred()

    def succeeded(result: T) -> T:
        if not mine.called:
            mine.callback(result)
        return result

    def failed(failure: Failure) -> None:
        if not mine.called:
            mine.errback(failure)

    original.addCallbacks(succeeded, failed)
    return mine


def shield(work: Coroutine[Deferred[Any], Any, T]) -> Deferred[T]:
    """Start ``work`` and return a Deferred for its outcome; the work goes on to its end even if that is cancelled."""
    return share(Deferred.fromCoroutine(work))
