"""Retention: old facts of generic streams are deleted, a slice at a time (docs/operations.md, Retention).

The facts of this process are counted in slices, which are stored with the time for which the process has run.  A slice
that is beyond a limit is deleted in one transaction, together with the mark up to where facts are gone.  So a process
that is killed goes on where it was.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import attrs
from msgspec.structs import replace
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from replication.errors import ReplicationError
from replication.logs import TroubleLog
from replication.net.clock import steady_seconds
from replication.storage.tables.kept_facts import forget_marks, marked_streams
from replication.storage.transactions import run_transaction
from replication.streams.interfaces import FactSlice
from replication.streams.retention import KEEP_ALL, KeptSlices, Retention
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Coroutine, Iterable, Mapping, Sequence

    from replication.deferreds import Lifetime
    from replication.streams.interfaces import IStreamStore
    from replication.streams.retention import SegmentChain
    from replication.wire.grammar import InstanceName, StreamName
    from replication.writer.publisher import PublishedStream
    from replication.writer.stream import StreamWriter

Needed: TypeAlias = "Mapping[str, Token]"  # names for messages, and up to where each has the facts
log: Final = Logger()
INTERVAL: Final = 10.0  # seconds between two rounds
SLICE_ROWS: Final = 2_000  # that one transaction deletes; appends may wait for it for some milliseconds
SMALL_LIMIT: Final = (
    "retention: facts are deleted in slices of about {slice} rows, so up to {more} rows more than these limits are "
    "kept: {limits}"
)
SHARES: Final = 100  # a fact is deleted at most one share of the age after it is due
TIME_INTERVAL: Final = 600.0  # seconds between two writes of the running time: a crash loses as much at most


async def forget_lost_marks(store: IStreamStore, writer: InstanceName, streams: Container[StreamName]) -> None:
    """Forget what a retention has deleted and counted in a history that a restore has undone.

    ``pg_restore`` keeps a table that is not in the dump: the marks and slices may be from after the backup.  A mark
    with facts of ``writer`` at or below it is wrong: they are deleted in the transaction that stores the mark.
    ``streams`` are those of which only the retention deletes facts.
    """
    for stream in sorted(await store.read(lambda database: marked_streams(database, writer))):
        if stream not in streams:
            continue
        position = (await store.positions(stream)).get(writer, Token(1))
        gone = (await store.gone(stream)).get(writer, Token(0))
        slices = await store.slices(stream, writer)
        is_wrong = gone > 0 and (await store.measure(stream, writer, after=Token(0), upto=gone, limit=1)).rows > 0
        keep = Token(0) if is_wrong else min(gone, position)
        if keep < gone or any(each.upto > position for each in slices):
            await run_transaction(store, partial(forget_marks, stream=stream, writer=writer, keep_upto=keep))
            log.warn(
                "{stream}: a restore has undone what the retention of {writer} had deleted and counted, up to {upto}: "
                "that is forgotten",
                stream=stream,
                writer=writer,
                upto=max([gone, *(each.upto for each in slices)]),
            )


@attrs.define(eq=False, repr=False)
class StreamRetention:
    """Counts and deletes the facts of this process in one stream.

    ``gone`` is up to where facts are deleted.  ``held`` is why the oldest slice is kept although it is beyond a limit;
    empty if it is not.
    """

    _stream: PublishedStream
    _writer: InstanceName
    _store: IStreamStore
    _limits: Retention
    kept: KeptSlices = attrs.field(init=False, factory=KeptSlices)
    gone: Token = attrs.field(init=False, default=Token(0))
    held: str = attrs.field(init=False, default="")
    _counted: Token = attrs.field(init=False, default=Token(0))  # up to here, facts are in slices
    _seen: Token = attrs.field(init=False, default=Token(0))  # the published position of the last count
    _begun: float | None = attrs.field(init=False, default=None)  # the clock at age 0; None before the slices are read
    _cut: float = attrs.field(init=False, default=0.0)  # when the last slice ended
    _stored: float = attrs.field(init=False, default=0.0)  # the time that is stored

    async def read_mark(self) -> None:
        """Read the ID up to which facts are deleted, for the status."""
        self.gone = (await self._store.gone(self._stream.definition.name)).get(self._writer, Token(0))

    async def open(self, now: float) -> None:
        """Read what is stored, unless that was done; ``now`` is a steady time."""
        if self._begun is not None:
            return
        await self.read_mark()
        found = await self._store.slices(self._stream.definition.name, self._writer)
        self._stored = self._cut = max([each.seconds for each in found], default=0.0)
        for each in found:
            if each.upto > self.gone:
                self.kept.add(each)
        self._counted = self.kept.slices[-1].upto if self.kept.slices else self.gone
        self._begun = now - self._stored

    async def count(self, now: float) -> None:
        """Put facts that were published since into slices."""
        age = self._age(now)
        due = self._limits.age is not None and age - self._cut >= self._limits.age / SHARES
        published = self._stream.published
        name = self._stream.definition.name
        while self._counted < published and (due or published != self._seen):
            found = await self._store.measure(name, self._writer, after=self._counted, upto=published, limit=SLICE_ROWS)
            if found.rows < SLICE_ROWS and not (due and found.rows):
                self._seen = published
                break
            await self._add(replace(found, seconds=age))
            self._cut = age
        if self._limits.age is not None and age - self._stored >= min(TIME_INTERVAL, self._limits.age / SHARES):
            await self._store.store_slice(name, self._writer, FactSlice(Token(0), 0, 0, age))
            self._stored = age

    def is_due(self, now: float) -> bool:
        """Whether a slice is beyond a limit."""
        return self.kept.oldest_beyond(self._limits, self._age(now)) is not None

    async def delete(self, now: float, needed: Needed, lifetime: Lifetime) -> None:
        """Delete the slices that are beyond a limit, up to what one of ``needed`` lacks.

        ``needed`` has names for messages, and up to where each has the facts.
        """
        name, age, self.held = self._stream.definition.name, self._age(now), ""
        while not lifetime.ended and (upto := self.kept.oldest_beyond(self._limits, age)) is not None:
            lacking = sorted(each for each, has in needed.items() if has < upto)
            if lacking:
                self.held = f"stream {name!r}: facts up to {upto} are kept for {', '.join(lacking)}"
                return
            await self._store.forget_facts(name, self._writer, upto)
            self.kept.remove()
            self.gone = upto

    def _age(self, now: float) -> float:
        return now - (self._begun or 0.0)

    async def _add(self, new: FactSlice) -> None:
        await self._store.store_slice(self._stream.definition.name, self._writer, new)
        self.kept.add(new)
        self._counted = new.upto


class INeeds(Protocol):
    """What needs facts: a folder of segments, or the followers that report their positions."""

    async def needed(self, streams: Collection[StreamName], writer: InstanceName) -> Mapping[StreamName, Needed]:
        """Return, for each of ``streams``, what needs facts of ``writer``, and up to where each has them.

        ReplicationError: that is not known now, so nothing may be deleted.
        """
        ...

    async def segments(self) -> Sequence[SegmentChain]:
        """Return the segments of a folder; nothing of followers."""
        ...


@attrs.define(eq=False, repr=False)
class Retentions:
    """The retention of all streams of a master.

    ``default`` are the limits of each stream whose definition has none, as text; ``all`` keeps all facts.  Each of
    ``needs`` is asked before facts are deleted.  Both are set before the start.
    """

    log = Logger()

    _writer: InstanceName
    _store: IStreamStore
    _lifetime: Lifetime
    default: str = attrs.field(init=False, default=KEEP_ALL)
    needs: list[INeeds] = attrs.field(init=False, factory=list)
    _streams: dict[StreamName, StreamRetention] = attrs.field(init=False, factory=dict)
    _trouble: TroubleLog = attrs.field(init=False, factory=lambda: TroubleLog(Retentions.log))

    def start(self, writers: Iterable[StreamWriter]) -> None:
        """Begin to delete old facts of the streams that this process writes into tables of this package.

        Warn of limits that are smaller than a slice.
        """
        small = []
        for writer in writers:
            definition, stream = writer.definition, writer.outgoing
            limits = Retention.parse(definition.retention or self.default)
            if limits is not None and definition.may_forget and stream.may_write:
                self._streams[definition.name] = StreamRetention(stream, self._writer, self._store, limits)
                if limits.rows is not None and limits.rows < SLICE_ROWS:
                    small.append(f"{definition.name} ({limits.rows} rows)")
        if small:
            self.log.warn(SMALL_LIMIT, slice=SLICE_ROWS, more=2 * SLICE_ROWS, limits=", ".join(sorted(small)))
        if self._streams:
            self._lifetime.watch(Deferred.fromCoroutine(self._run()), "deleting old facts")

    @property
    def active(self) -> bool:
        """Whether any facts may be deleted."""
        return bool(self._streams)

    def get(self, stream: StreamName) -> StreamRetention | None:
        """Return the retention of a stream; None if all its facts are kept."""
        return self._streams.get(stream)

    async def _run(self) -> None:
        await self._attempt(self._read_marks)
        while True:
            await self._lifetime.sleep(INTERVAL)
            if self._lifetime.ended:
                return
            await self._attempt(self._round)

    async def _attempt(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except ReplicationError as error:
            self._trouble.report("retention: nothing more is deleted: {error}", error=error)
        else:
            self._trouble.end("retention goes on")

    async def _read_marks(self) -> None:
        for each in self._streams.values():
            await each.read_mark()

    async def _round(self) -> None:
        clock = self._lifetime.clock
        for each in self._streams.values():
            await each.open(steady_seconds(clock))
            await each.count(steady_seconds(clock))
        due = [name for name, each in self._streams.items() if each.is_due(steady_seconds(clock))]
        needed: dict[StreamName, dict[str, Token]] = {name: {} for name in due}
        for need in self.needs if due else ():
            for name, positions in (await need.needed(due, self._writer)).items():
                needed[name].update(positions)
        for name in due:
            await self._streams[name].delete(steady_seconds(clock), needed[name], self._lifetime)
