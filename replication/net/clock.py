"""The clock of a reactor's timers (docs/operations.md, The clock)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from twisted.internet.base import ReactorBase

if TYPE_CHECKING:
    from twisted.internet.interfaces import IReactorTime


def use_monotonic_clock(reactor: IReactorTime | None = None) -> None:
    """Let ``reactor`` measure its timers by ``time.monotonic``, so that a change of the wall clock does not stop them.

    Twisted measures them by ``time.time``: after the wall clock is set back by an hour, no timer fires for an hour.
    Call this once, before the application starts its services; ``twistd replication`` does.  Calls that wait keep the
    rest of their time.  Afterwards ``reactor.seconds()`` is no longer the time of day: use ``time.time()`` for that.
    An access log of ``twisted.web`` has wrong dates, because it reads ``reactor.seconds()``.
    See docs/operations.md (The clock).

    Args:
        reactor: the reactor to change; without it, the global one.

    """
    if reactor is None:
        from twisted.internet import reactor as installed  # noqa: PLC0415 (importing it installs it)

        reactor = cast("IReactorTime", installed)
    changed = cast("Any", reactor)
    now = changed.seconds()
    changed.seconds = time.monotonic
    for call in changed.getDelayedCalls():
        left = call.getTime() - now
        call.seconds = time.monotonic
        call.reset(left)


def steady_seconds(clock: IReactorTime) -> float:
    """Return the seconds of a clock that no change of the wall clock moves, for ages after which facts are deleted.

    Without ``use_monotonic_clock``, a reactor's own seconds would make all facts too old when the wall clock is set
    forward, as at the first contact of a machine with a time server.  A clock of a test is its own.
    """
    return time.monotonic() if isinstance(clock, ReactorBase) else clock.seconds()
