"""Reports to writers: up to where this process has applied facts, so that a retention does not delete what it lacks.

A report is sent over HTTP.  Version 0.1 and Synapse do not have the call: they receive it once an hour only.  A relay
passes the reports of its followers on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
from msgspec.structs import replace
from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger, LogLevel

from replication import __version__
from replication.errors import CatchUpError, StoreError, StreamError
from replication.follower.stream import FollowMode
from replication.logs import TroubleLog
from replication.streams.interfaces import KnownFollower
from replication.wire import grammar
from replication.writer.known_followers import LATER, MAX_FOLLOWERS, only_known, replace_positions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from replication.deferreds import Lifetime
    from replication.follower.stream import StreamFollower
    from replication.web.client import HttpCatchUp
    from replication.web.followers import IFollowers
    from replication.wire.grammar import InstanceName, StreamName, Token

CHECK_INTERVAL: Final = 5.0  # seconds, before the first report
LONGEST_INTERVAL: Final = 60.0  # seconds until a process that was not followed before receives its first report
UNCHANGED_AFTER: Final = 600.0  # seconds between reports while nothing changes and nothing is missing
RETRY_AFTER: Final = 60.0  # seconds, if a writer does not answer
UNKNOWN_AFTER: Final = 3_600.0  # seconds, if it does not have the call

Positions = dict["StreamName", "dict[InstanceName, Token]"]


@attrs.define(eq=False, repr=False, kw_only=True)
class PositionReports:
    """Reports the stored positions of this process to the HTTP of each writer that it follows.

    Args:
        instance_name: of this process.
        processes: returns the HTTP of the writers.
        followers: of all streams.
        copied: returns the streams of which copies are stored.
        sync: ``IStreamStore.sync``, called before each report: no power loss may undo what is reported.
        lifetime: of this process.

    """

    log = Logger()

    _instance_name: InstanceName
    _processes: Callable[[], Sequence[HttpCatchUp]]
    _followers: Iterable[StreamFollower]
    _copied: Callable[[], Awaitable[Collection[StreamName]]]
    _sync: Callable[[], Awaitable[None]]
    _lifetime: Lifetime
    _names: Collection[StreamName] | None = attrs.field(init=False, default=None)  # of copies, as the start found them
    _due: dict[HttpCatchUp, float] = attrs.field(init=False, factory=dict)  # when each process receives the next report
    _reported: dict[HttpCatchUp, tuple[Positions, float]] = attrs.field(init=False, factory=dict)  # the last, and when
    _troubles: dict[HttpCatchUp, TroubleLog] = attrs.field(init=False, factory=dict)

    def start(self) -> None:
        """Report from now on."""
        self._lifetime.watch(Deferred.fromCoroutine(self._run()), "reporting positions")

    # ---- inside

    async def _run(self) -> None:
        pause = CHECK_INTERVAL
        while not self._lifetime.ended:
            await self._lifetime.sleep(pause)
            pause = CHECK_INTERVAL
            try:
                positions = await self._positions()
            except StoreError:  # it is read again
                continue
            if self._lifetime.ended or not positions:
                continue
            for process in self._processes():
                if self._due.get(process, 0.0) > self._lifetime.clock.seconds():
                    continue
                if self._is_known(process, positions):
                    self._due[process] = self._lifetime.clock.seconds() + LONGEST_INTERVAL
                    continue
                try:
                    await self._sync()
                except StoreError:  # it is reported later
                    break
                await self._report(process, positions)
            next_due = min(self._due.values(), default=0.0) - self._lifetime.clock.seconds()
            pause = max(CHECK_INTERVAL, min(next_due, LONGEST_INTERVAL))

    def _is_known(self, process: HttpCatchUp, positions: Positions) -> bool:
        """Whether the last report is still true, and so new that it need not be repeated."""
        reported, at = self._reported.get(process, ({}, 0.0))
        new = self._lifetime.clock.seconds() - at < UNCHANGED_AFTER
        return new and reported == positions and all(map(_is_live, self._followers))

    async def _report(self, process: HttpCatchUp, positions: Positions) -> None:
        trouble = self._troubles.setdefault(process, TroubleLog(self.log, LogLevel.info))
        try:
            asking = Deferred.fromCoroutine(process.report(self._instance_name, positions, __version__))
            following = await self._lifetime.add(asking)
        except CancelledError:  # this process stops
            return
        except CatchUpError as error:
            following = RETRY_AFTER
            self._reported.pop(process, None)
            trouble.report("positions cannot be reported, so a retention may not wait for them: {error}", error=error)
        else:
            trouble.end("positions are reported again")
            self._reported[process] = positions, self._lifetime.clock.seconds()
        wait = UNKNOWN_AFTER if following is None else following
        self._due[process] = self._lifetime.clock.seconds() + wait

    async def _positions(self) -> Positions:
        """Return what is stored here, of the streams that are applied or copied.

        A writer that has sent no position yet has none here: everything is kept.  Likewise one that may be restored: it
        may have other facts up to the position.
        """
        if self._names is None:
            self._names = await self._copied()
        stored = [each for each in self._followers if each.mode is not FollowMode.POSITION_ONLY]
        return {**{name: {} for name in self._names}, **{each.name: _confirmed(each) for each in stored}}


def _not_passed_on(name: str, why: object) -> StoreError:
    return StoreError(f"the report of {name!r} cannot be passed on: {why}", temporary=True)


def _confirmed(follower: StreamFollower) -> dict[InstanceName, Token]:
    """Return the position of each connected writer, unless it may count facts that the writer has lost."""
    return {name: each.position for name, each in follower.cursors.items() if each.linked and each.confirmed}


def _is_live(follower: StreamFollower) -> bool:
    return all(follower.status(each).state == "live" for each in follower.cursors)


@attrs.define(eq=False, repr=False, kw_only=True)
class RelayedReports:
    """The reports of followers behind a relay: they are passed on to the writers, whose retention waits for them.

    Args:
        processes: returns the HTTP of the writers that have sent a position since the start.
        missing: returns the endpoints of the other writers: no report can be passed on to them yet.
        wall: seconds since 1970.
        own: keeps reports for the streams that this process writes; None if it writes none.
        follower_of: returns the follower of a stream; None if the stream is unknown.

    A position is not passed on if it is above the position here, or if the histories were not compared yet: it may
    count facts that the writer has lost.  The writer then keeps its facts.  Only positions of known writers are kept.

    """

    _processes: Callable[[], Collection[HttpCatchUp]]
    _missing: Callable[[], Collection[str]]
    _wall: Callable[[], float]
    _follower_of: Callable[[StreamName], StreamFollower | None]
    _own: IFollowers | None = None
    _known: dict[InstanceName, KnownFollower] = attrs.field(init=False, factory=dict)  # since the start, oldest first

    async def report(
        self,
        name: str,
        positions: Mapping[StreamName, Mapping[InstanceName, Token]],
        streams: Collection[StreamName] | None = None,
    ) -> float:
        """Pass a report on, and return the seconds to the next one; StoreError if it does not reach each writer."""
        instance = grammar.instance_name(name)
        following = [LATER if self._own is None else await self._own.report(name, positions, streams)]
        try:
            passed_on = self._safe_positions(positions)
            answers = [await each.report(instance, passed_on, streams=streams) for each in self._processes()]
        except CatchUpError as error:
            raise _not_passed_on(name, error) from error
        if missing := self._missing():
            raise _not_passed_on(name, f"no position was received from {', '.join(missing)} yet")
        before = self._known.pop(instance, None)
        after = replace_positions({} if before is None else before.positions, passed_on, streams)
        self._known[instance] = KnownFollower(instance, only_known(after, self._writers), self._wall())
        if len(self._known) > MAX_FOLLOWERS:
            del self._known[next(iter(self._known))]
        return min([*following, *(each for each in answers if each is not None)])

    async def followers(self) -> Sequence[KnownFollower]:
        """Return those that have reported since this process started, or to its own streams, by name."""
        own = [] if self._own is None else await self._own.followers()
        known = {each.name: each for each in own}
        for name, each in self._known.items():
            ours = known[name].positions if name in known else {}
            known[name] = replace(each, positions={**each.positions, **ours})
        return [known[name] for name in sorted(known)]

    async def forget(self, name: str) -> None:
        """Forget a follower here; StreamError if the writers know it, too."""
        if self._own is not None:
            await self._own.forget(name)
        if self._known.pop(grammar.instance_name(name), None) is not None and self._processes():
            raise StreamError(f"{name!r} is forgotten here, but its reports were passed on: forget it at the writers")

    def _safe_positions(self, positions: Mapping[StreamName, Mapping[InstanceName, Token]]) -> Positions:
        return {
            stream: {writer: token for writer, token in of.items() if not self._may_be_lost(stream, writer, token)}
            for stream, of in positions.items()
        }

    def _may_be_lost(self, stream: StreamName, writer: InstanceName, token: Token) -> bool:
        follower = self._follower_of(stream)
        if follower is None or writer not in follower.cursors:
            return False
        ours = _confirmed(follower).get(writer)
        return ours is None or token > ours

    def _writers(self, stream: StreamName) -> Collection[InstanceName] | None:
        follower = self._follower_of(stream)
        return None if follower is None else follower.all_positions()
