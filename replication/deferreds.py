"""Deferreds that are shared, shielded from cancellation, or bound to a process's lifetime; locks of many waiters."""

from __future__ import annotations

import sys
from contextlib import suppress
from threading import current_thread
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from twisted.internet.defer import CancelledError, Deferred, DeferredLock, DeferredSemaphore, maybeDeferred
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python import threadable

from replication.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from twisted.internet.interfaces import IReactorTime
    from twisted.python.failure import Failure

T = TypeVar("T")
NO_GENERATOR: Final = "write `async def` and `await`, or `@inlineCallbacks` above it"
_log = Logger()


def share(original: Deferred[T]) -> Deferred[T]:
    """Return a new Deferred that fires with the result of ``original``; to cancel it does not cancel ``original``.

    ``original`` keeps its result, so it can be shared any number of times.  A failure of ``original`` goes to the first
    shared Deferred that is not cancelled; if all are cancelled, Twisted logs the failure.
    """
    shared: Deferred[T] = Deferred()

    def succeeded(result: T) -> T:
        if not shared.called:
            shared.callback(result)
        return result

    def failed(failure: Failure) -> Failure | None:
        if shared.called:
            return failure
        shared.errback(failure)
        return None

    original.addCallbacks(succeeded, failed)
    return shared


def call_function(function: Callable[..., object], *arguments: object) -> Deferred[Any]:
    """Call a function of an application that may be plain, ``async`` or return a Deferred.

    The Deferred fails with ConfigError if the function returned what has not run and nothing here awaits: a generator,
    as without ``@inlineCallbacks``, or an awaitable of asyncio.
    """

    def call() -> object:
        result = function(*arguments)
        check_has_run(getattr(function, "__name__", repr(function)), result)
        return result

    return maybeDeferred(call)


def check_has_run(name: str, result: object) -> None:
    """Raise ConfigError if ``result`` shows that the function ``name`` has not done its work."""
    if isinstance(result, (GeneratorType, AsyncGeneratorType)):
        raise ConfigError(f"{name}() has `yield`, so it does nothing when it is called: {NO_GENERATOR}")
    if hasattr(result, "__await__") and not isinstance(result, (Deferred, CoroutineType)):
        raise ConfigError(
            f"{name}() returned a {type(result).__name__}, which Twisted cannot await: return "
            "Deferred.fromFuture(asyncio.ensure_future(…))"
        )


class StartDeferred(Deferred[None]):
    """A Deferred whose repr is the cure of ``asyncio.run(worker.start())``: asyncio's errors contain it.

    ``name`` is the method that returns it.  To cancel it cancels ``work``.
    """

    def __init__(self, name: str, work: Coroutine[Deferred[Any], Any, None]) -> None:
        started = Deferred.fromCoroutine(work)
        super().__init__(lambda _: started.cancel())
        self._name = name
        started.chainDeferred(self)

    def __repr__(self) -> str:
        """Return the method and how asyncio awaits its Deferred."""
        return (
            f"<Deferred of {self._name}: await it on Twisted's reactor, or in asyncio as {self._name}.asFuture(loop); "
            "see docs/how-to/use-from-asyncio.md>"
        )


def check_reactor(reactor: Any) -> None:
    """Raise ConfigError if asyncio's loop runs in this thread and the reactor does not: nothing would ever fire.

    It also raises ConfigError in another thread than the running reactor's.
    """
    check_thread(reactor)
    asyncio = sys.modules.get("asyncio")  # a program without it need not import it
    if asyncio is None or getattr(reactor, "running", True):
        return
    with suppress(RuntimeError):  # no loop runs here: the program may call reactor.run() later
        asyncio.get_running_loop()
        raise ConfigError(
            "Twisted's reactor does not run, but asyncio's loop does: before any import of twisted.internet.reactor, "
            "call installReactor(reactor) with reactor = AsyncioSelectorReactor(asyncio.get_running_loop()), then "
            "reactor.startRunning(installSignalHandlers=False); see docs/how-to/use-from-asyncio.md, The four rules"
        )


def check_thread(reactor: Any) -> None:
    """Raise ConfigError unless this is the running reactor's thread: this package is not thread-safe."""
    if getattr(reactor, "running", False) and threadable.ioThread is not None and not threadable.isInIOThread():
        raise ConfigError(
            f"this is the thread {current_thread().name!r}, not the reactor's: call this by "
            "twisted.internet.threads.blockingCallFromThread(reactor, function, …)"
        )


async def close_after(work: Awaitable[None], close: Callable[[], Awaitable[None]]) -> None:
    """Await ``work``, then ``close()``, also if ``work`` fails.

    ``finally`` would await in a coroutine that is deleted before its end, which Python does not allow.
    """
    try:
        await work
    except Exception:
        await close()
        raise
    await close()


def start_alone(work: Coroutine[Deferred[Any], Any, None]) -> None:
    """Start ``work``, which nothing awaits, and log its error at once.

    Twisted logs such an error when the garbage collector finds it, which may take hours in a process that does little.
    Until then, a process without memory would run on with this part broken.
    """
    Deferred.fromCoroutine(work).addErrback(lambda failure: _log.failure("work that nothing awaits failed", failure))


def shield(work: Coroutine[Deferred[Any], Any, T]) -> Deferred[T]:
    """Start ``work`` and return a Deferred for its result; to cancel that Deferred does not stop the work."""
    return share(Deferred.fromCoroutine(work))


class _Released:
    """Lets each waiter run after the release of the one before, not inside it: some hundreds would exceed the stack."""

    _due = 0
    _is_releasing = False

    def release(self) -> None:
        """Let the next one in."""
        self._due += 1
        if self._is_releasing:
            return  # the release below goes on
        self._is_releasing = True
        try:
            while self._due:
                self._due -= 1
                super().release()  # type: ignore[misc]
        finally:
            self._is_releasing = False


class Lock(_Released, DeferredLock):
    """A DeferredLock for which any number may wait."""


class Semaphore(_Released, DeferredSemaphore):
    """A DeferredSemaphore for which any number may wait."""


class Lifetime:
    """The waits and the tasks of a process: ``end`` cancels all waits when the process stops.

    ``failed_tasks`` names the tasks that have ended with an error, which is a bug: only a restart begins them again.
    """

    log = Logger()

    def __init__(self, clock: IReactorTime) -> None:
        self.ended = False
        self.clock = clock
        self.failed_tasks: list[str] = []
        self._waiting: dict[Deferred[Any], None] = {}  # oldest first

    def add(self, waiting: Deferred[T]) -> Deferred[T]:
        """Return ``waiting``, and cancel it when ``end`` is called; at once if ``end`` was called before."""
        self._waiting[waiting] = None

        def forget(result: T) -> T:
            self._waiting.pop(waiting, None)
            return result

        waiting.addBoth(forget)
        if self.ended:
            waiting.cancel()
        return waiting

    def watch(self, task: Deferred[Any], name: str) -> None:
        """Log the error with which a task ends before the process does, and note its name."""

        def failed(failure: Failure) -> None:
            if not self.ended:
                self.failed_tasks.append(name)
                self.log.failure("{task} has ended: restart this process", failure, task=name)

        task.addErrback(failed)

    async def sleep(self, seconds: float) -> None:
        """Return after that many seconds, or as soon as ``end`` is called."""
        with suppress(CancelledError):  # by ``end``
            await self.add(deferLater(self.clock, seconds))

    def end(self) -> None:
        """Cancel every Deferred that was added, and from now on each that is added."""
        self.ended = True
        for each in list(self._waiting):
            each.cancel()
