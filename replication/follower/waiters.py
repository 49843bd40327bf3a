"""Waiting until a writer's facts are applied here."""

from __future__ import annotations

from bisect import bisect_right, insort
from operator import itemgetter
from typing import TYPE_CHECKING, NoReturn, TypeVar

from twisted.internet.defer import Deferred

from replication.errors import PositionTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.internet.interfaces import IReactorTime

    from replication.errors import StoppingError
    from replication.follower.stream import StreamFollower
    from replication.net.links import IWriterLink
    from replication.wire.grammar import InstanceName, StreamName, Token

T = TypeVar("T")
_token_of = itemgetter(0)


class PositionWaiters:
    """The Deferreds that fire when an applied position reaches a token."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._waiting: dict[tuple[StreamName, InstanceName], list[tuple[Token, Deferred[None]]]] = {}

    def add(
        self,
        stream: StreamName,
        writer: InstanceName,
        token: Token,
        timeout: float,
        error: Callable[[], PositionTimeoutError],
    ) -> Deferred[None]:
        """Return a Deferred that fires when the position reaches ``token``.

        It fails with ``error()`` after ``timeout`` seconds; soon if these are negative, as those up to a time that has
        passed.
        """
        key, waiting = (stream, writer), Deferred[None]()
        entry = (token, waiting)
        insort(self._waiting.setdefault(key, []), entry, key=_token_of)

        def late(_result: object, _seconds: float) -> NoReturn:
            raise error()

        def forget(result: T) -> T:
            entries = self._waiting.get(key, [])
            if entry in entries:  # else ``moved`` has removed it
                entries.remove(entry)
                if not entries:
                    del self._waiting[key]
            return result

        return waiting.addTimeout(max(0.0, timeout), self._clock, late).addBoth(forget)

    def moved(self, stream: StreamName, writer: InstanceName, position: Token) -> None:
        """Fire the Deferreds for ``position`` and smaller tokens."""
        entries = self._waiting.get((stream, writer))
        if entries is None:
            return
        ready = entries[: bisect_right(entries, position, key=_token_of)]
        del entries[: len(ready)]
        if not entries:
            del self._waiting[stream, writer]
        for _, waiting in ready:  # one may wait again, or cancel another (docs/protocol/traps.md 32)
            if not waiting.called:
                waiting.callback(None)

    def fail(self, error: StoppingError) -> None:
        """Fail every Deferred with ``error``."""
        for entries in list(self._waiting.values()):
            for _, waiting in list(entries):
                if not waiting.called:
                    waiting.errback(error)


def timeout_error(
    follower: StreamFollower | None,
    clients: Sequence[IWriterLink],
    stream: StreamName,
    writer: InstanceName,
    *,
    token: int,
    timeout: float,
) -> PositionTimeoutError:
    """Return the error of a Deferred that has waited too long: where the position is, and how each connection is."""
    position = None
    if follower is None or writer not in follower.cursors:
        error = None if follower is None else follower.error
        how = "no position of it was received" if error is None else f"it cannot be followed: {error}"
    else:
        status = follower.status(writer)
        position = status.position
        how = f"it is at {position}, {status.state}" + (f" ({status.error})" if status.error else "")
    states = [f"{each.endpoint} {each.state}" + (f" ({each.error})" if each.error else "") for each in clients]
    what = f"stream {stream!r} of {writer!r} did not reach {token} in {timeout:g} s"
    return PositionTimeoutError(
        f"{what}: {how}; connections: {', '.join(states)}",
        stream=stream,
        writer=writer,
        token=token,
        position=position,
        timeout=timeout,
    )
