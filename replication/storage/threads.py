"""Threads for work that blocks: a database connection lives on one of its own."""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, Protocol, TypeVar

from twisted.internet.defer import Deferred
from twisted.logger import Logger

from replication.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.internet.interfaces import IReactorFromThreads

THREADS_CURE: Final = "raise the limit of processes (ulimit -u, TasksMax, pids.max)"
_P = ParamSpec("_P")
_T = TypeVar("_T")


class ICloses(Protocol):
    """A connection, or what has one."""

    def close(self) -> None:
        """End it."""
        ...


_Connection_co = TypeVar("_Connection_co", bound=ICloses, covariant=True)


class SerialThread:
    """One thread that runs functions in the order in which they were given; results arrive on the reactor's thread.

    ``reactor`` needs nothing but ``callFromThread``, so a test decides when results arrive.  A ``ThreadPool`` with one
    thread would do the same, but costs 15 % of a small commit.  StoreError: the system has no thread left.
    """

    log = Logger()

    def __init__(self, reactor: IReactorFromThreads, name: str) -> None:
        self._reactor = reactor
        self._jobs: SimpleQueue[tuple[Deferred[Any], Callable[[], Any] | None]] = SimpleQueue()
        try:
            Thread(target=self._work, name=name, daemon=True).start()
        except RuntimeError as error:
            raise StoreError(f"the system starts no thread for {name!r}: {THREADS_CURE}") from error

    def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Deferred[_T]:
        """Run ``work`` after all earlier work.  To cancel the Deferred ends the waiting, not the work."""
        done: Deferred[_T] = Deferred()
        self._jobs.put((done, lambda: work(*args, **kwargs)))
        return done

    def stop(self) -> Deferred[None]:
        """End the thread after all earlier work."""
        done: Deferred[None] = Deferred()
        self._jobs.put((done, None))
        return done

    def _work(self) -> None:
        try:
            self._run_jobs()
        except BaseException:  # noqa: BLE001 - no memory, most likely: the log of that ends a daemon
            self.log.failure("a thread of the store has ended")

    def _run_jobs(self) -> None:
        while True:
            done, job = self._jobs.get()
            if job is None:
                self._reactor.callFromThread(done.callback, None)
                return
            try:
                result = job()
            except BaseException as error:  # noqa: BLE001 - the Deferred has it
                self._reactor.callFromThread(done.errback, error)
            else:
                self._reactor.callFromThread(done.callback, result)
            del done, job


class ConnectionThread(Generic[_Connection_co]):
    """A ``connection`` and the thread on which alone it is used."""

    def __init__(self, reactor: IReactorFromThreads, connection: _Connection_co, name: str) -> None:
        self._connection = connection
        self._thread = SerialThread(reactor, f"replication {name}")

    @property
    def connection(self) -> _Connection_co:
        """The connection; other threads may only read its counters."""
        return self._connection

    def run(self, work: Callable[[_Connection_co], _T]) -> Deferred[_T]:
        """Call ``work`` with the connection, on its thread.  To cancel the Deferred ends the waiting, not the work."""
        return self._thread.run(work, self._connection)

    async def close(self) -> None:
        """Close the connection after all earlier work, and end its thread."""
        await self._thread.run(self._connection.close)
        await self._thread.stop()
