"""The histories that a process has followed, compared with those of the writers (docs/protocol/following.md E7)."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from replication.errors import CatchUpError, ReplicationError, StreamError
from replication.session.backoff import Backoff
from replication.session.encoder import FIRST_GAP
from replication.streams.history import common_position, is_behind
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from twisted.python.failure import Failure

    from replication.deferreds import Lifetime
    from replication.follower.doubts import Doubts
    from replication.streams.cursor import Apply, Reset
    from replication.streams.history import History
    from replication.streams.interfaces import IStreamStore

FIRST_RETRY: Final = 5.0  # seconds
LAST_RETRY: Final = 3600.0  # a Synapse without an HTTP listener never answers
BEHIND_PATIENCE: Final = 60.0  # seconds: a relay connects to a writer that has started again within 10
ACCEPT: Final = "start once with --accept-new-history"


@attrs.define(eq=False, repr=False, kw_only=True)
class FollowedHistories:
    """The histories of the writers of one stream.

    Args:
        stream: its name.
        store: has the histories that were followed; None if they are only remembered, as no position is stored.
        follower: under which name; empty for a copy.
        lifetime: of the process.
        fetch: returns the history of a writer from the sources, empty if they have none; CatchUpError if one fails.
        accept_new: whether another history is followed from the beginning, a writer without one is followed from the
            stored position, a history that lacks the writer's last start is followed without waiting, and a function's
            position is lowered without a function that undoes what was applied.
        changed: is called with the stream and a writer whose stored history has changed.
        begun_again: is called once a writer is known to have started again, before its facts are applied.
        doubts: counts facts after a start of the writer; None if that is not possible.

    """

    log = Logger()

    _stream: StreamName
    _store: IStreamStore | None
    _follower: str
    _lifetime: Lifetime
    _fetch: Callable[[StreamName, InstanceName], Coroutine[Deferred[Any], Any, History]]
    accept_new: bool = False
    _changed: Callable[[StreamName, InstanceName], object] | None = None
    _begun_again: Callable[[], object] | None = None
    _doubts: Doubts | None = None
    checks: int = attrs.field(init=False, default=0)
    mismatches: int = attrs.field(init=False, default=0)
    _followed: dict[InstanceName, History] = attrs.field(init=False, factory=dict)
    # When the other end was found to be behind, at first and at last, in seconds.
    _behind: dict[InstanceName, tuple[float, float]] = attrs.field(init=False, factory=dict)
    _learning: dict[InstanceName, Deferred[None]] = attrs.field(init=False, factory=dict)

    async def followed(self, writer: InstanceName) -> History:
        """Return the history that was followed; empty if none was stored."""
        if writer not in self._followed:
            stored = () if self._store is None else await self._store.history(self._stream, writer, self._follower)
            self._followed[writer] = stored
        return self._followed[writer]

    async def compare(
        self, writer: InstanceName, after: Token, upto: Token, is_open: Callable[[], Awaitable[bool]]
    ) -> tuple[Token, History]:
        """Return the token up to which our facts are of the writer's history, and that history.

        Facts up to ``after`` are applied, facts up to ``upto`` are received.  If only facts above ``after`` may be of
        another history, the result is at least ``after``: these facts are fetched again, and nothing is undone.

        If no history was stored, as before the first fact, applied facts are trusted.  Received ones wait until a
        source has answered with the history.  If no source answers, they are applied without one: a Synapse has none.
        The history is then stored later, if the connection ``is_open``.

        CatchUpError: a history is stored, and no source answers now, or the other end lacks the writer's last start.
        StreamError: no epoch is in common.
        """
        ours = await self.followed(writer)
        if not ours:
            theirs = await self._first(writer, is_open)
            # What an earlier connection brought may be of another history.  Without one, there is nothing to compare.
            return after if theirs else upto, theirs
        self.checks += 1
        theirs = await self._lifetime.add(Deferred.fromCoroutine(self._fetch(self._stream, writer)))
        common = common_position(ours, theirs, after)
        self._wait_if_behind(writer, ours, theirs, after, common)
        if common is None:
            common = self._without_common(writer, theirs, after)
        elif common == after:
            common = max(after, common_position(ours, theirs, upto) or after)
        if self._doubts is not None and common >= after:
            comparing = Deferred.fromCoroutine(self._doubts.common(writer, ours, theirs, after=after, upto=upto))
            certain = await self._lifetime.add(comparing)
            common = common if certain is None else min(common, certain)
        self.mismatches += common < after
        return common, theirs

    async def store(self, writer: InstanceName, history: History) -> None:
        """Store the history of a writer; all applied facts are of this history."""
        followed = await self.followed(writer)
        if history and [*history] != [*followed]:
            if followed and self._begun_again is not None:
                self._begun_again()
            if self._store is not None:
                await self._store.store_histories(writer, {self._stream: history}, self._follower)
            self._followed[writer] = history
            if self._changed is not None:
                self._changed(self._stream, writer)

    async def resume(self, stored: Mapping[InstanceName, str], positions: Mapping[InstanceName, Token]) -> None:
        """Go on counting facts from the texts that ``counts_after`` has returned, at the stored positions.

        An older program stores no histories.  Where it has moved a position, the stored history is not used: it lacks
        the epochs in which that program has followed the writer, and their facts would look lost.
        """
        for writer in () if self._doubts is None else self._doubts.resume(stored, positions):
            if await self.followed(writer):
                self._followed[writer] = ()
                self.log.warn(
                    "an older version of this package has followed {stream} of {writer} up to {upto}, and stores no "
                    "history: that of {writer} is followed anew",
                    stream=self._stream,
                    writer=writer,
                    upto=positions[writer],
                )

    def counts_after(self, writer: InstanceName, step: Apply | Reset) -> str | None:
        """Return the text that is stored with a step; None if none is, as for a writer without a history."""
        return self._doubts.after(writer, step) if self._doubts is not None and self._followed.get(writer) else None

    def applied(self, writer: InstanceName, step: Apply | Reset) -> None:
        """Note that a step was applied."""
        if self._doubts is not None:
            self._doubts.note(writer, step)

    async def check_reset(self, writer: InstanceName, after: Token, to: Token) -> None:
        """Raise StreamError because no function undoes what was applied, unless ``accept_new`` allows that."""
        if not self.accept_new and await self.followed(writer):
            raise StreamError(
                f"{writer} went back from {after} to {to} on {self._stream}, and nothing undoes what was applied: "
                f"register a function with @worker.on_reset({self._stream!r}), or correct the effects of the facts "
                f"above {to} by hand, and then {ACCEPT}"
            )

    def _wait_if_behind(
        self, writer: InstanceName, ours: History, theirs: History, after: Token, common: Token | None
    ) -> None:
        """Raise CatchUpError for a minute if the other end lacks an epoch that was followed: a relay may be behind.

        The database of a former writer may have been restored, too, and no process begins an epoch for it.
        """
        now = self._lifetime.clock.seconds()
        since, before = self._behind.pop(writer, (now, now))
        if common is None or common >= after or self.accept_new or not is_behind(theirs, ours):
            return
        if now - before > BEHIND_PATIENCE:  # the connection was lost meanwhile: this is another trouble
            since = now
        self._behind[writer] = since, now
        if now - since < BEHIND_PATIENCE:
            raise CatchUpError(
                f"the other end lacks the last start of {writer} and facts above {common}: waiting "
                f"{BEHIND_PATIENCE:g} s for them, because a relay may be behind"
            )

    def _without_common(self, writer: InstanceName, theirs: History, after: Token) -> Token:
        if after < FIRST_GAP:
            return after  # of an empty stream
        if self.accept_new:
            return Token(0) if theirs else after
        if not theirs:
            raise StreamError(
                f"{writer} has no history of {self._stream} now, but one was followed up to {after}. Nothing "
                "is deleted here. Version 0.1 has no histories: if the writer runs it, install this version there. "
                "Else start the writer with the right database. Or start with --accept-new-history as long as the "
                f"writer has none, to go on after {after}: what was applied stays, and is not received again"
            )
        raise StreamError(
            f"{writer} has another history of {self._stream}: not the one that was followed up to {after}. "
            "Was its database emptied or exchanged? Nothing is deleted here. Start the writer with the right database, "
            f"or {ACCEPT} to follow this one from the beginning. Before that, undo by hand what a function without "
            "on_reset has applied: it receives all facts again"
        )

    async def _first(self, writer: InstanceName, is_open: Callable[[], Awaitable[bool]]) -> History:
        """Return the history of a writer of which none is stored; empty if it has none, or no source answers now.

        If no source answers, it is fetched again later for this connection.  A fetch for an earlier one is cancelled.
        """
        if writer in self._learning:
            self._learning[writer].cancel()
        try:
            return await self._lifetime.add(Deferred.fromCoroutine(self._fetch(self._stream, writer)))
        except ReplicationError:  # a fetch of facts reports it
            learning = self._learning[writer] = Deferred.fromCoroutine(self._learn(writer, is_open))
            self._lifetime.add(learning).addErrback(self._not_learned)
            return ()

    def _not_learned(self, failure: Failure) -> None:
        if not failure.check(CancelledError):  # that is the end of the process, or of the connection
            self.log.failure("reading the history of {stream}", failure, stream=self._stream)

    async def _learn(self, writer: InstanceName, is_open: Callable[[], Awaitable[bool]]) -> None:
        """Fetch the history of a writer and store it; retry while no source answers."""
        backoff = Backoff(FIRST_RETRY, LAST_RETRY)
        while not self._lifetime.ended:
            await self._lifetime.add(deferLater(self._lifetime.clock, backoff.next()))
            with suppress(ReplicationError):
                history = await self._fetch(self._stream, writer)
                if await is_open():  # else the next connection learns it
                    await self.store(writer, history)
                return
