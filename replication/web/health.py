"""Health: whether a process lives, and whether it can do its work now (docs/http.md, Health).

The proofs are cheap, because probes may be frequent.  The store commits one small transaction in a second.  Timers are
proved by one that runs all the time, on the reactor's clock: if that clock goes back, timers stand still while requests
are still answered.
"""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING, Any, Final

from twisted.internet.defer import Deferred, TimeoutError  # noqa: A004 - Twisted's name
from twisted.internet.task import LoopingCall, deferLater

from replication.errors import StoreError, StreamError
from replication.logs import log_lost_errors
from replication.web.request import Answer, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.internet.interfaces import IReactorTime

    from replication.streams.interfaces import StreamStatus
    from replication.web.request import ApiRequest
    from replication.web.site import IServed

PATIENCE: Final = 5.0  # seconds in which the store must answer
BEAT: Final = 5.0  # seconds between two runs of the timer
LATE: Final = 10.0  # seconds without a run after which timers stand still


class Health:
    """What proves that a process works: one for all probes.

    The first probe starts a timer, which proves that timers run; ``stop`` ends it.  A process without probes has none.
    ``monotonic`` is a clock in seconds that no clock step changes.
    """

    def __init__(self, served: IServed, clock: IReactorTime, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._served = served
        self._clock = clock
        self._monotonic = monotonic
        self._ran = 0.0
        self._looked = -inf
        self._timer = LoopingCall(self._note_run)
        self._timer.clock = clock

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer.running:
            self._timer.stop()

    async def process_fault(self) -> str | None:
        """Return why this process must be restarted, or None: a task has ended, or timers do not work."""
        if tasks := self._served.failed_tasks():
            return f"{', '.join(tasks)}: ended by an error, which the log has. Restart this process"
        if not self._timer.running:
            self._timer.start(BEAT)
        if self._is_late():  # perhaps the whole process stood still until now: let its timers run once
            await deferLater(self._clock, 0.0)
        if not self._is_late():
            return None
        seconds = self._monotonic() - self._ran
        cure = "was the wall clock set back? Restart, and call use_monotonic_clock() at the start"
        return f"timers have not run for {seconds:.0f} s: {cure}"

    async def store_fault(self) -> str | None:
        """Return why the store cannot be written, or None."""
        try:
            await Deferred.fromCoroutine(self._served.check()).addTimeout(PATIENCE, self._clock)
        except (StoreError, StreamError) as error:
            return str(error)
        except TimeoutError:
            self._look_for_lost_errors()
            return f"the store has not answered for {PATIENCE:.0f} s"
        return None

    def stream_faults(self, statuses: Sequence[StreamStatus] | None = None) -> list[str]:
        """Return which streams are stopped, and which writers are not connected; ``statuses`` are read if not given."""
        stopped = [
            f"stream {stream.definition.name} of {writer.instance} is stopped"
            for stream in (self._served.stream_statuses() if statuses is None else statuses)
            for writer in stream.writers
            if writer.error
        ]
        unreachable = [f"no connection to the writer at {each}" for each in self._served.unreachable_writers()]
        return [*stopped, *unreachable, *self._served.absent_writers()]

    def _look_for_lost_errors(self) -> None:
        now = self._monotonic()
        if now - self._looked >= PATIENCE:  # probes may be many, and each would stop the process for a moment
            self._looked = now
            log_lost_errors()

    def _note_run(self) -> None:
        self._ran = self._monotonic()

    def _is_late(self) -> bool:
        return self._monotonic() - self._ran > LATE


async def check_live(request: ApiRequest) -> Answer:
    """Answer whether the reactor runs its timers, and all tasks run.  A restart cures what is missing here."""
    if fault := await request.api.health.process_fault():
        raise RequestError(503, fault)
    return Answer.json({"status": "live"})


async def check_ready(request: ApiRequest) -> Answer:
    """Answer whether the store was written, timers run, and all streams are followed and written."""
    health = request.api.health
    faults = [each for each in (await health.process_fault(), await health.store_fault()) if each is not None]
    if faults := [*faults, *health.stream_faults()]:
        raise RequestError(503, "; ".join(faults))
    return Answer.json({"status": "ready"})


async def check_health(request: ApiRequest) -> Answer:
    """Answer whether the store was written; also who this process is."""
    served = request.api.served
    identity: dict[str, Any] = {
        "role": served.role,
        "server_name": served.server_name,
        "instance_name": served.instance_name,
    }
    if fault := await request.api.health.store_fault():
        raise RequestError(503, fault, **identity)
    return Answer.json({"status": "ok", **identity})
