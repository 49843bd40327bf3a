"""A stand-in for the reactor, for tests of code that works on threads."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_T = TypeVar("_T")

PATIENCE = 60.0  # seconds without a call from any thread: the test hangs


@implementer(IReactorFromThreads)
class Pump:
    """Calls of threads to the reactor run on the test's own thread, while the test waits for a result.

    ``pump.wait(store.open())`` runs a coroutine or Deferred to its end and returns or raises its result;
    ``pump.start(...)`` only begins it.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def callFromThread(self, callable: Callable[..., Any], *args: object, **kwargs: object) -> None:  # noqa: A002 - Twisted's
        """Queue the call until the test waits."""
        self._calls.put(lambda: callable(*args, **kwargs))

    def start(self, awaited: Coroutine[Any, Any, _T]) -> Deferred[_T]:
        """Start ``work``; it runs until it waits for a thread."""
        return Deferred.fromCoroutine(awaited)

    def run_call(self) -> None:
        """Wait until a call is queued, and run it."""
        self._calls.get(timeout=PATIENCE)()

    def wait(self, awaited: Coroutine[Any, Any, _T] | Deferred[_T]) -> _T:
        """Run queued calls until ``awaited`` has a result; raise it if it is an error."""
        outcome: list[_T | Failure] = []
        deferred = awaited if isinstance(awaited, Deferred) else Deferred.fromCoroutine(awaited)
        deferred.addBoth(outcome.append)
        while not outcome:
            self.run_call()
        if isinstance(outcome[0], Failure):
            outcome[0].raiseException()
        return outcome[0]


class PumpedClock(Pump, Clock):
    """A pump with a time of its own, which ``advance`` moves."""

    def __init__(self) -> None:
        Pump.__init__(self)
        Clock.__init__(self)


def threads_of(name: str) -> list[str]:
    """Return the names of the threads that do not end, of those with ``name`` in their name."""
    mine = [each for each in threading.enumerate() if name in each.name]
    for each in mine:
        each.join(PATIENCE)
    return [each.name for each in mine if each.is_alive()]
