"""Child processes, in which scenarios call functions.

A child makes an object when it starts.  Then it calls functions with that object, one after the other, for the process
that measures.  All of them run in the thread of a reactor.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final, Self

from twisted.internet.defer import Deferred
from twisted.internet.task import react
from twisted.internet.threads import deferToThreadPool

from replication.errors import ReplicationError
from replication.net.clock import use_monotonic_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

PATIENCE: Final = 60.0  # seconds, far more than any single step takes

_SPAWN: Final = multiprocessing.get_context("spawn")  # a fork would inherit memory and open files


class BenchError(ReplicationError):
    """A scenario could not be measured."""


class ChildProcess:
    """A process with the object ``make(reactor, *arguments)``; it is killed at the end of the ``with`` block.

    ``make`` and the functions that are called may be coroutine functions.
    """

    def __init__(self, make: Callable[..., object], *arguments: object) -> None:
        self._name = make.__name__
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_run, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process's ID."""
        assert self._process.pid is not None  # noqa: S101 (it has been started)
        return self._process.pid

    def call(self, function: Callable[..., object], *arguments: object) -> Any:
        """Call ``function`` with the child's object and ``arguments``; return the result, or raise as ``result``."""
        self.begin(function, *arguments)
        return self.result()

    def begin(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function without waiting for its result."""
        try:
            self._pipe.send((function, arguments))
        except BrokenPipeError as error:
            raise self._ended() from error

    def result(self) -> Any:
        """Return the result of the call that has begun; BenchError if the child fails, ends, or takes too long."""
        if not self._pipe.poll(2 * PATIENCE):
            raise BenchError(f"the process {self._name!r} has sent nothing for {2 * PATIENCE:.0f} s")
        try:
            result = self._pipe.recv()
        except EOFError as error:
            raise self._ended() from error
        if isinstance(result, ReplicationError):
            raise BenchError(f"the process {self._name!r} failed: {result}")
        return result

    def _ended(self) -> BenchError:
        return BenchError(f"the process {self._name!r} has ended; see what it printed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # it may be waiting for a call
        self._process.join()
        self._pipe.close()


def _run(pipe: Connection[Any, Any], make: Callable[..., object], arguments: Sequence[object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Ctrl-C the parent kills this process
    gc.freeze()  # as the daemons do
    react(lambda reactor: Deferred.fromCoroutine(_serve(reactor, pipe, make, arguments)))


async def _serve(
    reactor: Any, pipe: Connection[Any, Any], make: Callable[..., object], arguments: Sequence[object]
) -> None:
    use_monotonic_clock(reactor)  # as the daemons do
    try:
        made = await _call(make, reactor, arguments)
        while True:
            function, given = await deferToThreadPool(reactor, reactor.getThreadPool(), pipe.recv)
            pipe.send(await _call(function, made, given))
    except ReplicationError as error:
        pipe.send(error)


async def _call(function: Callable[..., object], first: object, rest: Sequence[object]) -> Any:
    result = function(first, *rest)
    return await result if isawaitable(result) else result
