"""Blocking work off the reactor thread."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

from twisted.internet.defer import Deferred

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twisted.internet.interfaces import IReactorFromThreads

    from replication.streams.seams import Reach
    from replication.wire.grammar import StreamName

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _ICloses(Protocol):
    def close(self) -> None: ...


class _ILooks(_ICloses, Protocol):
    streams: Sequence[StreamName]

    def look(self) -> Mapping[StreamName, Reach]: ...


_Connection_co = TypeVar("_Connection_co", bound=_ICloses, covariant=True)


class Lane:
    """One thread that does what it is given, in order; results come back on the reactor's thread.

    A database connection lives on a lane, so nothing else of ours ever touches it.  ``reactor`` needs nothing but
    ``callFromThread``: a test brings its own and decides when results arrive.  A one-thread ``ThreadPool`` would do as
    well, but its coordination costs 15 % of a small commit.
    """

    def __init__(self, reactor: IReactorFromThreads, name: str) -> None:
        self._reactor = reactor
        self._jobs: SimpleQueue[tuple[Deferred[Any], Callable[[], Any] | None]] = SimpleQueue()
        Thread(target=self._work, name=name, daemon=True).start()

    def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Deferred[_T]:
        """Do ``work`` after all that was given before; cancelling the Deferred stops the waiting, not the work."""
        done: Deferred[_T] = Deferred()
        self._jobs.put((done, lambda: work(*args, **kwargs)))
        return done

    def stop(self) -> Deferred[None]:
        """End the thread after all that was given before."""
        done: Deferred[None] = Deferred()
        self._jobs.put((done, None))
        return done

    def _work(self) -> None:
        while True:
            done, job = self._jobs.get()
            if job is None:
                self._reactor.callFromThread(done.callback, None)
                return
            try:
                result = job()
            except BaseException as error:  # noqa: BLE001 - whoever waits for the result gets it
                self._reactor.callFromThread(done.errback, error)
            else:
                self._reactor.callFromThread(done.callback, result)
            del done, job


class Desk(Generic[_Connection_co]):
    """A connection and the lane that it lives on."""

    def __init__(self, reactor: IReactorFromThreads, connection: _Connection_co, name: str) -> None:
        self._connection = connection
        self._lane = Lane(reactor, f"replication {name}")

    @property
    def connection(self) -> _Connection_co:
        """To be used by ``run`` only."""
        return self._connection

    def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Deferred[_T]:
        """Do something on the connection's thread; cancelling the Deferred stops the waiting, not the work."""
        return self._lane.run(work, *args, **kwargs)

    async def close(self) -> None:
        """Close the connection after all that was given before, and end its thread."""
        await self._lane.run(self._connection.close)
        await self._lane.stop()


class Watch:
    """An IWatch whose looks happen on a thread of their own."""

    def __init__(self, desk: Desk[_ILooks]) -> None:
        self.streams = desk.connection.streams
        self._desk = desk

    async def look(self) -> Mapping[StreamName, Reach]:
        """Return how far each mapped stream has come."""
        return await self._desk.run(self._desk.connection.look)
