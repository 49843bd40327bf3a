"""Publishing: settled facts are sent to subscribers, in the order of their IDs.

A fact waits in the reorder buffer of its stream until every smaller ID is complete.  Streams that share their IDs have
one publisher, which sends their facts in one order: a Synapse has one position for all of them (docs/protocol/traps.md
17).
"""

from __future__ import annotations

from functools import partial
from heapq import merge
from itertools import filterfalse, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from replication.errors import NotAWriterError, StoreError
from replication.logs import TroubleLog
from replication.net.clock import steady_seconds
from replication.session.encoder import EncodedLines, encode_facts, encode_gap, encode_only_row, encode_position
from replication.streams.facts import Fact, count_rows, fact_bytes, texts_of, tokens_of
from replication.streams.ids import StreamIds
from replication.streams.interfaces import ISequence, IStreamStore, Page, Write
from replication.streams.memory_log import InMemoryLog
from replication.streams.reorder_buffer import MAX_BYTES, ReorderBuffer
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from twisted.internet.interfaces import IReactorTime

    from replication.deferreds import Lifetime
    from replication.net.broadcast import Broadcast
    from replication.net.protocol import Limits
    from replication.streams.definitions import StreamDefinition
    from replication.wire.grammar import StreamName

T = TypeVar("T")
# Of an empty stream, whose first ID is 2.  Only tables of the application may have a fact at ID 1: a stream of an empty
# one begins at 0, unless ID 1 was used up (docs/protocol/ids.md F5).
INITIAL_POSITION: Final = Token(1)
NO_WRITER: Final = InstanceName("")  # its stored position covers IDs that no row of any writer shows
# An in-memory stream stores a position that is so many IDs ahead: a restart reuses no ID (docs/protocol/traps.md 29).
IDS_AHEAD: Final = 10_000
RETRY_AFTER: Final = 1.0  # seconds, when the store fails
PAGE_ROWS: Final = 5_000


class PublishedStream:
    """One stream of this process: the facts that wait, the published position and the stored one.

    ``published`` is the position up to which everything was sent to the subscribers.  ``stored`` is the position in
    the database; every ID up to it is complete.  ``reorder_buffer`` holds the facts that wait.  ``memory_log`` holds
    the facts of an in-memory stream, and is None for others.  ``publishes`` is whether a position of this process is
    sent: as long as it may write, and also later if it has written (docs/protocol/publishing.md D4).
    """

    def __init__(self, definition: StreamDefinition, instance_name: InstanceName, publisher: Publisher) -> None:
        self.definition = definition
        self.ids = publisher.ids
        self.may_write = self.publishes = definition.written_by(instance_name)
        self._instance_name = instance_name
        self._publisher = publisher
        self.refused = 0  # facts with a row that is none of this stream, or too large
        self.begin(INITIAL_POSITION)

    def begin(self, start: Token) -> None:
        """Start over with every ID up to ``start`` published."""
        self.published = start
        self.memory_log = InMemoryLog(self.definition) if self.definition.in_memory else None
        # Several writers each store a position, also at INITIAL_POSITION.  A table of the application may have ID 1.
        alone = self.ids.sequence is None and not self.definition.in_tables
        self.stored = INITIAL_POSITION if alone else Token(0)
        self.too_many_upto = Token(0)  # up to here, facts of one append are too many to queue
        self.has_first_fact = False  # whether there is a fact at ID 1; it matters while ``published`` is 1
        self.reorder_buffer = ReorderBuffer(start, spills=self.memory_log is None)
        self._storing: dict[Token, Token] = {}  # positions that commits in progress store, by the first ID of each
        self._committing: dict[Token, int] = {}  # bytes of facts of an in-memory stream, likewise

    def check_writer(self) -> None:
        """Raise NotAWriterError if this instance may not write here."""
        if not self.may_write:
            raise NotAWriterError(
                f"{self._instance_name!r} may not write to {self.definition.name!r}; "
                f"its writers: {', '.join(self.definition.writers)}",
                stream=self.definition.name,
                instance=self._instance_name,
            )

    async def reserve(self, count: int) -> Sequence[Token]:
        """Return ``count`` new IDs, which are open until ``complete`` is called with them."""
        try:
            return await self.ids.reserve(count)
        except BaseException:
            self.publish()
            raise

    def publish(self) -> None:
        """Publish facts that waited for IDs that were not allocated."""
        self._publisher.publish()

    def writes(self, facts: Sequence[Fact], *, alone: bool) -> Sequence[Write]:
        """Return what a transaction stores to commit ``facts``; nothing for an in-memory stream.

        No ID is open at or below a stored position: replay relies on it.  A fact without rows above that position is
        covered by a position of ``NO_WRITER``.

        A transaction that commits ``alone`` leaves the position to ``unstored_position``.  Otherwise it would lock the
        row of the position until its commit is durable, and delay other transactions of the stream.
        """
        return self.writes_upto(self.position_with(tokens_of(facts), alone=alone), facts)

    def position_with(self, tokens: Sequence[Token], *, alone: bool) -> Token:
        """Return the position that the transaction of these open IDs stores; 0 for none."""
        if self.memory_log is not None or (alone and self.ids.sequence is not None):
            return Token(0)
        settled = self.ids.within_horizon(self.ids.pending.settled_with(tokens))
        self._storing[tokens[0]] = settled
        return settled

    def writes_upto(self, settled: Token, facts: Sequence[Fact]) -> Sequence[Write]:
        """Return what a transaction stores that commits ``facts`` and ``position_with`` them; on any thread."""
        if self.memory_log is not None:
            return []
        name = self.definition.name
        bare = [token for token, _ in filterfalse(itemgetter(1), facts) if token > settled]
        if not bare:
            return [Write(name, self._instance_name, settled, facts)]
        with_rows = [fact for fact in facts if fact.texts]
        writes = [Write(name, self._instance_name, settled, with_rows)] if with_rows or settled else []
        return [*writes, Write(name, NO_WRITER, bare[-1])]

    def check_room(self, facts: Sequence[Fact]) -> None:
        """Raise StoreError if facts of an in-memory stream would wait for a smaller ID, and too many wait already.

        Facts that have passed count until they are complete: their commits may be in progress.
        """
        first, token = self.ids.pending.oldest(), facts[0].token
        if self.memory_log is None or token == first:
            return
        self._committing.pop(token, None)  # a function runs again
        if self.reorder_buffer.has_room(facts, sum(self._committing.values())):
            self._committing[token] = fact_bytes(facts)
            return
        raise StoreError(
            f"stream {self.definition.name!r} is in memory, and {MAX_BYTES} bytes of its facts wait for ID {first}, "
            "which is open: try again when it is complete"
        )

    def complete(self, tokens: Sequence[Token], facts: Sequence[Fact], *, unknown: bool = False) -> None:
        """Complete IDs whose ``facts`` were committed, none after a rollback, and publish what has settled.

        If it is ``unknown`` whether they were committed, they are read from the store.
        """
        if unknown:
            self.reorder_buffer.spill(tokens[-1])
        self.ids.pending.complete(tokens)
        stored = self._storing.pop(tokens[0], self.stored)
        self._committing.pop(tokens[0], None)
        if facts:
            if self.memory_log is None:
                self.stored = max(self.stored, stored)
                shown = facts[-1].token
                if self.ids.sequence is not None:  # others send the position that the database has of this writer
                    shown = max(self.stored, next((token for token, texts in reversed(facts) if texts), self.stored))
                self.ids.durable = max(self.ids.durable, shown)
            if self.memory_log is None and self._publisher.are_too_many(facts):
                self.too_many_upto = facts[-1].token
                self.reorder_buffer.spill(self.too_many_upto)
            elif self._may_be_reordered(facts):
                self.reorder_buffer.spill(facts[-1].token)
            elif self.ids.horizon is None:
                self.reorder_buffer.add(list(filter(itemgetter(1), facts)))
        self._publisher.publish()

    def _may_be_reordered(self, facts: Sequence[Fact]) -> bool:
        """Whether a table may have the rows of a fact in another order: PostgreSQL puts each where there is room."""
        shared = self.ids.horizon is None and self.ids.sequence is not None
        return shared and self.definition.table is not None and any(len(texts) > 1 for _, texts in facts)

    def acknowledge(self, sender: InstanceName, token: Token) -> None:
        """Drop facts of an in-memory stream that every sender has acknowledged (docs/protocol/wire.md A4)."""
        if self.memory_log is not None:
            self.memory_log.acknowledge(sender, min(token, self.published))

    def unstored_position(self) -> Write | None:
        """Return what stores the settled position; None if the database has it, or if no position is sent."""
        settled = self.ids.settled
        if self.memory_log is not None or settled <= self.stored or not self.publishes:
            return None
        return Write(self.definition.name, self._instance_name, settled)

    def position_stored(self, upto: Token) -> None:
        """Note that the database has this position, and publish what has settled."""
        self.stored = max(self.stored, upto)
        self.ids.durable = max(self.ids.durable, upto)
        self._publisher.publish()

    def position(self) -> EncodedLines:
        """Return the POSITION line that answers REPLICATE (docs/protocol/publishing.md D4)."""
        if self.has_first_fact and self.published == INITIAL_POSITION:
            return self.gap(self.published)
        return encode_position(self.definition.name, self._instance_name, self.published, self.published)

    def gap(self, upto: Token) -> EncodedLines:
        """Return the POSITION with which every follower fetches what it lacks up to ``upto``."""
        return encode_gap(self.definition.name, self._instance_name, upto)


def encode_within(
    limits: Limits, stream: StreamName, writer: InstanceName, facts: Sequence[Fact], *, after: Token, upto: Token
) -> Sequence[EncodedLines] | None:
    """Return the lines of ``encode_facts``; None if they are too many to queue, or if there is no memory for them.

    A gap is published instead: the facts are committed, so followers fetch them.
    """
    try:
        only = encode_only_row(stream, writer, facts, upto, limits.line_limit)  # the usual case
        if only is not None and len(only.data) <= limits.max_queued_bytes and limits.max_queued_lines:
            return [only]
        texts = texts_of(facts)
        if len(texts) > limits.max_queued_lines or sum(map(len, texts)) > limits.max_queued_bytes:
            return None
        chunks = [*encode_facts(stream, writer, facts, after=after, upto=upto, line_limit=limits.line_limit)]
        size, lines = sum([len(each.data) for each in chunks]), sum([each.lines for each in chunks])
        too_much = size > limits.max_queued_bytes or lines > limits.max_queued_lines
    except MemoryError:
        return None
    return None if too_much else chunks


@attrs.define(eq=False, repr=False)
class Publisher:
    """Publishes one stream, or several streams that share their IDs."""

    log = Logger()
    _instance_name: InstanceName
    _store: IStreamStore
    _broadcast: Broadcast
    _limits: Limits
    _lifetime: Lifetime
    _clock: IReactorTime
    ids: StreamIds = attrs.field(init=False, factory=lambda: StreamIds(INITIAL_POSITION))
    streams: list[PublishedStream] = attrs.field(init=False, factory=list)
    trouble: TroubleLog = attrs.field(init=False, factory=lambda: TroubleLog(Publisher.log))  # of the store
    # A call of the store is in progress: nothing else is published meanwhile.
    _busy: bool = attrs.field(init=False, default=False)

    def add(self, definition: StreamDefinition) -> PublishedStream:
        """Publish one more stream with these IDs; log lines name the first one."""
        stream = PublishedStream(definition, self._instance_name, self)
        self.streams.append(stream)
        return stream

    def begin(self, start: Token, sequence: ISequence | None = None) -> None:
        """Start over with every ID up to ``start`` published; ``sequence`` is None if only this process writes."""
        self.ids.begin(start, None if self.streams[0].definition.in_memory else sequence)
        for stream in self.streams:
            stream.begin(start)

    def begin_with_external_writers(self) -> None:
        """Publish from the database only, and only up to the horizon: external writers write there, too."""
        (stream,) = self.streams
        self.ids.begin_with_external_writers()
        stream.published = Token(0)

    async def find_first_facts(self) -> None:
        """Read which streams have a fact at ID 1; to be called before ID 1 is published."""
        for stream in [each for each in self.streams if each.definition.in_tables]:
            name, first = stream.definition.name, INITIAL_POSITION
            found = await self._store.present(name, self._instance_name, after=Token(0), upto=first)
            stream.has_first_fact = bool(found)

    def raise_horizon(self, upto: Token) -> None:
        """Note that no external writer can still commit an ID at or below ``upto``; publish what has settled.

        The first call starts the stream there.  ``upto`` survives a crash of the server, so no position is stored
        before it is published.
        """
        first = not self.ids.horizon_known
        self.ids.raise_horizon(upto)
        if first:
            (stream,) = self.streams
            stream.published = self.ids.settled
            self._broadcast.publish(stream.definition.name, stream.position())
        self.publish()

    def follow(self, seen: Token) -> None:
        """Note that other writers' facts reach ``seen``; with no open ID, this writer's position moves there, too.

        This writer's position is stored under its name before it is published: once this writer has ended, other
        processes send the stored position.
        """
        self.ids.pending.note(seen)

    def publish(self) -> None:
        """Send to all subscribers what has settled since the last call."""
        if self._busy:
            return
        ids = self.ids
        if ids.horizon is not None:
            (stream,) = self.streams
            if ids.horizon_known and ids.settled > stream.published:
                self._run(self._publish_from_store(stream, stream.published, ids.settled))
            return
        settled = Token(ids.pending.settled)
        if len(self.streams) > 1:
            self._publish_in_one_order(min(settled, ids.durable))
        else:
            (stream,) = self.streams
            batch = stream.reorder_buffer.release(min(settled, ids.durable))
            if batch is not None and batch.spilled:
                self._run(self._publish_from_store(stream, batch.after, batch.upto))
                return
            if batch is not None:
                self._send(stream, batch.facts, batch.after, batch.upto)
        if settled > ids.durable:  # the last IDs have no rows in the database: a position is stored before it is sent
            self._run(self._store_position(self.streams[0], settled))

    def are_too_many(self, facts: Sequence[Fact]) -> bool:
        """Whether facts are more than may be queued, whatever their rows are: followers fetch them.

        This takes no time, even for a million facts.
        """
        return len(facts) > self._limits.max_queued_lines

    async def page(self, stream: PublishedStream, *, after: Token, upto: Token, limit: int) -> Page:
        """Return facts of this process as ``IStreamStore.facts`` does; an in-memory stream reads its memory log."""
        if stream.memory_log is not None:
            stream.memory_log.expire(steady_seconds(self._clock))
            return stream.memory_log.page(after=after, upto=upto, limit=limit)
        name = stream.definition.name
        return await self._store.facts(name, self._instance_name, after=after, upto=upto, limit=limit)

    # ---- inside

    def _publish_in_one_order(self, upto: Token) -> None:
        """Send what has settled in all streams, in the order of the IDs that they share."""
        batches = [(each, batch) for each in self.streams if (batch := each.reorder_buffer.release(upto)) is not None]
        facts = [fact for _, batch in batches for fact in batch.facts]
        limits = self._limits
        too_much = fact_bytes(facts) > limits.max_queued_bytes or count_rows(facts) > limits.max_queued_lines
        if too_much or any(batch.spilled or batch.after != stream.published for stream, batch in batches):
            for stream, _ in batches:
                self._send_gap(stream, upto)
            return
        numbered = ([(fact.token, stream, fact) for fact in batch.facts] for stream, batch in batches)
        for stream, run in groupby(merge(*numbered), itemgetter(1)):  # no two facts have the same ID
            some = [fact for _, _, fact in run]
            self._send(stream, some, stream.published, some[-1].token)
        for stream, _ in batches:
            if stream.published < upto:
                self._send(stream, (), stream.published, upto)

    def _send(self, stream: PublishedStream, facts: Sequence[Fact], after: Token, upto: Token) -> None:
        """Send ``facts``, all that the stream has in ``(after, upto]``, to its subscribers.

        If ``after`` is above the published position, an earlier call has raised, and some subscribers lack its facts.
        Then a gap is sent.
        """
        if stream.memory_log is not None:
            stream.memory_log.add(facts, steady_seconds(self._clock))
        name = stream.definition.name
        chunks = None
        if after == stream.published:
            chunks = encode_within(self._limits, name, self._instance_name, facts, after=after, upto=upto)
        if chunks is None:
            self._send_gap(stream, upto)
            return
        for chunk in chunks:
            self._broadcast.publish(name, chunk)
        stream.has_first_fact = stream.has_first_fact or (after == 0 and bool(facts))
        stream.published = upto

    def _send_gap(self, stream: PublishedStream, upto: Token) -> None:
        """Send a POSITION that makes each subscriber fetch the facts in pages: they are too many to queue."""
        self._broadcast.publish(stream.definition.name, stream.gap(upto))
        stream.has_first_fact = stream.has_first_fact or stream.published == 0
        stream.published = upto

    async def _publish_from_store(self, stream: PublishedStream, after: Token, upto: Token) -> None:
        room = self._limits.max_queued_lines // 2 if stream.too_many_upto <= after else -1
        while after < upto:
            if room < 0:  # so many rows are better fetched, by each subscriber at its own pace
                await self._secure(stream, upto)
                self._send_gap(stream, upto)
                return
            page = await self._retry(partial(self.page, stream, after=after, upto=upto, limit=PAGE_ROWS))
            if page.upto > (page.facts[-1].token if page.facts else after):
                await self._secure(stream, page.upto)
            self._send(stream, page.facts, after, page.upto)
            after = page.upto
            room -= count_rows(page.facts)

    async def _secure(self, stream: PublishedStream, upto: Token) -> None:
        """Store a position of external writers that no row shows, before it is published.

        Otherwise the next start could not distinguish it from that of rows that the database has lost.
        """
        if self.ids.horizon is None or upto <= stream.stored:
            return
        name = stream.definition.name
        if await self._retry(lambda: self._store.last_row(name)) < upto:
            await self._store_position(stream, upto)

    async def _store_position(self, stream: PublishedStream, settled: Token) -> None:
        writer = self._instance_name
        if stream.memory_log is not None:  # far ahead, so that this is rare; no writer's own position may be there
            settled, writer = Token(settled + IDS_AHEAD), NO_WRITER
        write = Write(stream.definition.name, writer, settled)
        await self._retry(lambda: self._store.transaction().commit([write]))
        stream.stored = max(stream.stored, settled)
        self.ids.durable = max(self.ids.durable, settled)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` while nothing else is published, then publish what settled meanwhile.

        ``work`` fails only when this process stops.  Nothing is published after that: later rows would hide the gap.
        """
        self._busy = True

        async def publish_on() -> None:
            await work
            self._busy = False
            self.publish()

        self._lifetime.watch(
            Deferred.fromCoroutine(publish_on()), f"publishing stream {self.streams[0].definition.name!r}"
        )

    async def _retry(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeat ``ask`` while the store fails: what is committed must be published, however long that takes."""
        name = self.streams[0].definition.name
        while True:
            try:
                answer = await ask()
            except StoreError as error:
                if self._lifetime.ended:
                    raise
                self.trouble.report("stream {stream} is not published: {error}", error=error, stream=name)
            else:
                self.trouble.end("stream {stream} is published again", stream=name)
                return answer
            await self._lifetime.sleep(RETRY_AFTER)
