"""The time that all simulated processes share; Twisted's own ``Clock`` sorts all its calls at each new one."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from twisted.internet.error import AlreadyCalled, AlreadyCancelled
from twisted.internet.interfaces import IDelayedCall
from zope.interface import implementer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@implementer(IDelayedCall)
class Timer:
    """A call at a later time: Twisted's ``IDelayedCall``."""

    __slots__ = ("_args", "_clock", "_ended", "_function", "_kwargs", "number", "owner", "time")

    def __init__(
        self,
        clock: SimulatedClock,
        time: float,
        function: Callable[..., object],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        owner: object,
    ) -> None:
        self._clock = clock
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._ended: type[Exception] | None = None
        self.time = time
        self.owner = owner
        self.number = clock.add(self)

    def active(self) -> bool:
        """Return whether it is still to come."""
        return self._ended is None

    def getTime(self) -> float:
        """Return the time at which it comes, in seconds."""
        return self.time

    def cancel(self) -> None:
        """Do not call; raise if it was called or cancelled."""
        self._check()
        self._ended = AlreadyCancelled

    def reset(self, seconds: float) -> None:
        """Call in ``seconds`` from now."""
        self._move(self._clock.now + seconds)

    def delay(self, seconds: float) -> None:
        """Call later by ``seconds``."""
        self._move(self.time + seconds)

    def call(self) -> None:
        """Call it."""
        self._ended = AlreadyCalled
        self._function(*self._args, **self._kwargs)

    def _move(self, time: float) -> None:
        self._check()
        self.time = time
        self.number = self._clock.add(self)

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended


class SimulatedClock:
    """Time that passes only if it is set; ``now`` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = 0
        self._queue: list[tuple[float, int, Timer]] = []  # a timer that was moved has older entries, too

    def add(self, timer: Timer) -> int:
        """Put a timer into the queue, and return its number there."""
        self._numbers += 1
        heappush(self._queue, (timer.time, self._numbers, timer))
        return self._numbers

    def timers_of(self, owner: object) -> list[Timer]:
        """Return the timers of one owner that are still to come."""
        return [
            each for _, number, each in self._queue if each.owner is owner and each.number == number and each.active()
        ]

    def next_time(self) -> float | None:
        """Return when the next timer comes; None if there is none."""
        queue = self._queue
        while queue:
            time, number, timer = queue[0]
            if timer.number == number and timer._ended is None:
                return time
            heappop(queue)
        return None

    def run_due(self) -> bool:
        """Call the timers that are due, in order; return whether there were any."""
        queue, now, found = self._queue, self.now, False
        while queue and queue[0][0] <= now:
            _, number, timer = heappop(queue)
            if timer.number == number and timer._ended is None:
                found = True
                timer.call()
        return found
