"""External writers: programs that write rows of mapped streams with plain SQL.

This process polls the database for their IDs, all streams in one query.  The interval is an eighth of the time since
the last change: a row that comes once a second is published within about an eighth of a second.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.task import deferLater
from twisted.logger import Logger

from replication.errors import StoreError
from replication.logs import TroubleLog
from replication.streams.interfaces import Write
from replication.writer.epochs import begin_epochs
from replication.writer.publisher import INITIAL_POSITION, NO_WRITER, RETRY_AFTER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from replication.deferreds import Lifetime
    from replication.streams.definitions import StreamDefinition
    from replication.streams.interfaces import IStreamStore, IWatch, SequenceState
    from replication.wire.grammar import InstanceName, StreamName, Token
    from replication.writer.positions import Positions
    from replication.writer.stream import StreamWriter

SHORTEST: Final = 0.002  # seconds between two polls
LONGEST: Final = 0.6  # seconds: an idle database is polled less than twice a second
SHARE: Final = 8  # the interval is the time since the last change, divided by this
FIRST_POLLS: Final = 3  # that a start waits for: enough where no transaction is in progress


class ExternalWriters:
    """Polls for the IDs of mapped streams, and raises the horizon of each.

    ``states`` is what the last poll found.  ``positions`` sends to followers whether each stream has a horizon.
    """

    log = Logger()

    def __init__(
        self, lifetime: Lifetime, store: IStreamStore, instance_name: InstanceName, positions: Positions
    ) -> None:
        self.states: Mapping[StreamName, SequenceState] = {}
        self._lifetime = lifetime
        self._store = store
        self._instance_name = instance_name
        self._positions = positions
        self._streams: dict[StreamName, StreamWriter] = {}  # those that external writers may write
        self._trouble = TroubleLog(self.log)
        self._troubles = defaultdict[str, TroubleLog](lambda: TroubleLog(self.log))
        self._changed_at = lifetime.clock.seconds()
        self._woken = self._ended = False
        self._pause: Deferred[Any] = succeed(None)
        self._loop: Deferred[None] = succeed(None)
        self._watch: IWatch | None = None

    def error_of(self, stream: StreamName) -> str | None:
        """Return why the IDs of a stream cannot be polled; None if they can, or if it has no external writers."""
        if stream not in self._streams or stream not in self.states:
            return None
        return self._trouble.error or self.states[stream].error

    async def begin(self, streams: Iterable[StreamWriter]) -> None:
        """Poll until every mapped stream has a horizon, FIRST_POLLS times at most, and go on polling.

        Does nothing if the database has no external writers.  Adds to the store's warnings.  StoreError if one of these
        polls fails.  It may be called again then, and after ``end``.
        """
        watch = self._watch = self._watch or self._store.watch()
        if watch is None:
            return
        for stream in streams:
            definition = stream.definition
            alone = definition.name in watch.streams and len(stream.publisher.streams) == 1
            if alone and definition.written_by(self._instance_name):
                self._streams[definition.name] = stream
                await self._warn_of_unpublished_writers(definition)
        for stream in self._streams.values():
            stream.publisher.begin_with_external_writers()
        for _ in range(FIRST_POLLS):
            await self._poll(watch)
            if all(stream.publisher.ids.horizon_known for stream in self._streams.values()):
                break
        self._ended = False
        self._loop = Deferred.fromCoroutine(self._poll_on(watch))
        self._lifetime.watch(self._loop, "polling mapped streams")

    def wake(self, stream: StreamName) -> None:
        """Poll as soon as possible if ``stream`` is one of these: this process has written to it."""
        if stream in self._streams:
            self._woken, self._changed_at = True, self._lifetime.clock.seconds()
            self._pause.cancel()

    async def end(self) -> None:
        """Stop polling; returns after the poll in progress."""
        self._ended = True
        self._pause.cancel()
        await self._loop

    async def _poll_on(self, watch: IWatch) -> None:
        while not self._ended:
            seconds = await self._poll_once(watch)
            if not self._ended and not self._woken:
                self._pause = deferLater(self._lifetime.clock, seconds)
                with suppress(CancelledError):  # by ``wake`` or ``end``
                    await self._pause

    async def _poll_once(self, watch: IWatch) -> float:
        """Poll, and return the seconds until the next poll."""
        try:
            changed = await self._poll(watch)
        except StoreError as error:
            self._trouble.report("mapped streams cannot be polled: {error}", error=error)
            return RETRY_AFTER
        self._trouble.end("mapped streams are polled again")
        now = self._lifetime.clock.seconds()
        if changed:
            self._changed_at = now
        return min(LONGEST, max(SHORTEST, (now - self._changed_at) / SHARE))

    async def _poll(self, watch: IWatch) -> bool:
        """Poll, raise horizons, and return whether anything changed since the last poll."""
        self._woken = False
        found = await watch.poll()
        first = {
            stream: state.settled
            for stream, state in found.items()
            if state.settled is not None
            and stream in self._streams
            and not self._streams[stream].publisher.ids.horizon_known
        }
        if first:
            await self._begin_streams(first)
        before, self.states = self.states, found
        changed = False
        for stream, state in self.states.items():
            former = before.get(stream)
            writer = self._streams.get(stream)
            begins = writer is not None and not writer.publisher.ids.horizon_known
            if state is former and not begins:
                continue
            if former is not None and (state.settled, state.last_value) != (former.settled, former.last_value):
                changed = True
            if writer is None:
                continue
            if state.error is None:
                self._troubles[stream].end("stream {stream} is published again", stream=stream)
            else:
                self._troubles[stream].report(
                    "stream {stream} is not published: {error}", error=state.error, stream=stream
                )
            if state.settled is not None:
                if begins and state.settled <= INITIAL_POSITION:
                    await writer.publisher.find_first_facts()
                writer.publisher.raise_horizon(state.settled)
                if begins:
                    self._positions.look_for_missing()
        return changed

    async def _begin_streams(self, horizons: Mapping[StreamName, Token]) -> None:
        """Begin an epoch of streams whose horizons are known now; a horizon is stored before it is published.

        A sequence may be ahead of the rows: by IDs that were rolled back, or after a failover that lost the rows.  So
        no epoch begins above the last row and the stored positions: a follower may have facts there that are lost.
        """
        stored = await self._store.stored_positions()
        starts: dict[StreamName, Token] = {}
        reached: dict[StreamName, Token] = {}  # without the rows of other writers
        for stream, horizon in horizons.items():
            positions = stored.get(stream, {})
            known = [positions.get(each, INITIAL_POSITION) for each in (self._instance_name, NO_WRITER)]
            starts[stream] = min(horizon, max(await self._store.last_row(stream), *known))
            if starts[stream] > known[0] and self._streams[stream].definition.names_writers:
                found = await self._store.positions(stream)
                reached[stream] = found.get(self._instance_name, INITIAL_POSITION)
        await begin_epochs(self._store, self._instance_name, starts, reached=reached)
        ahead = [Write(each, self._instance_name, horizons[each]) for each in starts if starts[each] < horizons[each]]
        if ahead:
            await self._store.transaction().commit(ahead)

    async def _warn_of_unpublished_writers(self, definition: StreamDefinition) -> None:
        """Add a warning to the store's if the table has rows of a writer that no process publishes."""
        ours = self._instance_name
        found = await self._store.positions(definition.name)
        stored = (await self._store.stored_positions()).get(definition.name, {})
        former = (
            stored.keys() if definition.writers else stored.keys() & {NO_WRITER}
        )  # with a position, a former writer
        others = sorted(found.keys() - {ours, *definition.writers, *former})
        if others and definition.instance_column is not None:
            names = ", ".join(repr(each) if each else "'' (an empty name)" for each in others)
            rows = f"rows of {names}, which {ours!r} does not publish"
            cure = f"insert them again as {ours!r}, with new IDs, because followers have passed these"
            cure = f"{cure}; or list in writers the names of all processes, and run each: the rows of a process that "
            cure = f"{cure}has written the stream, and has ended, are then published, too"
            warning = f"stream {definition.name!r}: its table has {rows}: {cure}"
            if warning not in self._store.warnings:
                self._store.warnings.append(warning)
