"""Processes of our own, and what the measuring one and they say to each other.

A child runs one function, which gets a pipe to its parent first.  A coroutine function runs in a reactor, which it gets
before the pipe.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, Self

from twisted.internet.defer import Deferred
from twisted.internet.task import react
from twisted.internet.threads import deferToThreadPool

from replication.errors import ReplicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

PATIENCE: Final = 60.0  # seconds; no single step takes nearly as long

_SPAWN: Final = multiprocessing.get_context("spawn")  # a fork would bring our memory and our open files along


class BenchError(ReplicationError):
    """A scenario could not be measured."""


class Child:
    """A process that runs ``work(pipe, *arguments)``; leaving the ``with`` block ends it."""

    def __init__(self, work: Callable[..., object], *arguments: object) -> None:
        self._name = work.__name__
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_run, args=(theirs, work, arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process's ID."""
        assert self._process.pid is not None  # noqa: S101 (it has been started)
        return self._process.pid

    def hear(self) -> Any:
        """Return the next thing that the child says; BenchError if it fails, ends, or takes too long."""
        if not self._pipe.poll(2 * PATIENCE):
            raise BenchError(f"the process {self._name!r} has said nothing for {2 * PATIENCE:.0f} s")
        try:
            said = self._pipe.recv()
        except EOFError as error:
            raise BenchError(f"the process {self._name!r} has ended; what it printed says why") from error
        if isinstance(said, ReplicationError):
            raise BenchError(f"the process {self._name!r} failed: {said}")
        return said

    def say(self, what: object) -> None:
        """Tell the child something."""
        try:
            self._pipe.send(what)
        except BrokenPipeError as error:
            raise BenchError(f"the process {self._name!r} has ended; what it printed says why") from error

    def ask(self, what: object) -> Any:
        """Tell the child something and return its answer."""
        self.say(what)
        return self.hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # it may be waiting for us to say something
        self._process.join()
        self._pipe.close()


async def hear(reactor: Any, pipe: Connection[Any, Any]) -> Any:
    """Return the next thing that the parent says, without keeping the reactor from its work."""
    return await deferToThreadPool(reactor, reactor.getThreadPool(), pipe.recv)


def _run(pipe: Connection[Any, Any], work: Callable[..., Any], arguments: Sequence[object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    gc.freeze()  # as our daemons do
    if iscoroutinefunction(work):
        react(lambda reactor: Deferred.fromCoroutine(_run_in(reactor, pipe, work, arguments)))
    else:
        work(pipe, *arguments)


async def _run_in(
    reactor: Any, pipe: Connection[Any, Any], work: Callable[..., Any], arguments: Sequence[object]
) -> None:
    try:
        await work(reactor, pipe, *arguments)
    except ReplicationError as error:
        pipe.send(error)
