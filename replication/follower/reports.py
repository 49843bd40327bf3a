"""Reports to writers: up to where this process has applied facts, so that a retention does not delete what it lacks.

A report is sent over HTTP.  Version 0.1 and Synapse do not have the call: they receive it once an hour only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger, LogLevel

from replication.errors import CatchUpError
from replication.follower.stream import FollowMode
from replication.logs import TroubleLog
from replication.net.endpoints import is_redis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from replication.deferreds import Lifetime
    from replication.follower.stream import StreamFollower
    from replication.web.client import HttpCatchUp
    from replication.wire.grammar import InstanceName, StreamName, Token

CHECK_INTERVAL: Final = 5.0  # seconds, before the first report
LONGEST_INTERVAL: Final = 60.0  # seconds until a process that was not followed before receives its first report
RETRY_AFTER: Final = 60.0  # seconds, if a writer does not answer
UNKNOWN_AFTER: Final = 3_600.0  # seconds, if it does not have the call

Positions = dict["StreamName", "dict[InstanceName, Token]"]


@attrs.define(eq=False, repr=False, kw_only=True)
class PositionReports:
    """Reports the stored positions of this process to the HTTP of each writer that it follows.

    Args:
        instance_name: of this process.
        processes: returns the configured HTTP sources or, without any, that of the writer at an endpoint.
        endpoints: of the writers, by name.
        followers: of all streams.
        lifetime: of this process.

    """

    log = Logger()

    _instance_name: InstanceName
    _processes: Callable[[str], Sequence[HttpCatchUp]]
    _endpoints: Mapping[InstanceName, str]
    _followers: Iterable[StreamFollower]
    _lifetime: Lifetime
    _due: dict[HttpCatchUp, float] = attrs.field(init=False, factory=dict)  # when each process receives the next report
    _troubles: dict[HttpCatchUp, TroubleLog] = attrs.field(init=False, factory=dict)

    def start(self) -> None:
        """Report from now on."""
        Deferred.fromCoroutine(self._run()).addErrback(
            lambda failure: self.log.failure("positions are not reported any more", failure)
        )

    # ---- inside

    async def _run(self) -> None:
        pause = CHECK_INTERVAL
        while not self._lifetime.ended:
            await self._lifetime.sleep(pause)
            pause = CHECK_INTERVAL
            positions = self._positions()
            if self._lifetime.ended or not positions:
                continue
            endpoints = {each for each in self._endpoints.values() if not is_redis(each)}
            for process in dict.fromkeys(http for each in sorted(endpoints) for http in self._processes(each)):
                if self._due.get(process, 0.0) <= self._lifetime.clock.seconds():
                    await self._report(process, positions)
            next_due = min(self._due.values(), default=0.0) - self._lifetime.clock.seconds()
            pause = max(CHECK_INTERVAL, min(next_due, LONGEST_INTERVAL))

    async def _report(self, process: HttpCatchUp, positions: Positions) -> None:
        trouble = self._troubles.setdefault(process, TroubleLog(self.log, LogLevel.info))
        try:
            asking = Deferred.fromCoroutine(process.report(self._instance_name, positions))
            following = await self._lifetime.add(asking)
        except CancelledError:  # this process stops
            return
        except CatchUpError as error:
            following = RETRY_AFTER
            trouble.report("positions cannot be reported, so a retention may not wait for them: {error}", error=error)
        else:
            trouble.end("positions are reported again")
        wait = UNKNOWN_AFTER if following is None else following
        self._due[process] = self._lifetime.clock.seconds() + wait

    def _positions(self) -> Positions:
        """Return what is stored here, of the streams that are applied or copied."""
        stored = [each for each in self._followers if each.mode is not FollowMode.POSITION_ONLY and each.cursors]
        return {each.name: each.positions() for each in stored}
