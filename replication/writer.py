"""Writing facts: an ID is reserved, rows go into a transaction, the ID completes, the fact settles and is announced.

``reserve()`` opens a :class:`Reservation`; leaving its block commits the rows, or rolls them back; either way the ID is
then complete.  When every smaller ID of the stream is complete too, the fact is settled: it is spelt and handed on.
"""

from __future__ import annotations

from functools import partial
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from twisted.internet.defer import Deferred, succeed
from twisted.logger import Logger

from replication.caches import spell_key
from replication.errors import NotAWriterError, RowError, StoppingError, StoreError, StreamError
from replication.session.feed import spell_facts, spell_position
from replication.streams.facts import Fact, fact_bytes, facts_of, texts_of
from replication.streams.ids import StreamIds, draw
from replication.streams.kept import Kept
from replication.streams.seams import Receipt, Write
from replication.streams.settling import Settling
from replication.waiting import shield
from replication.wire import grammar
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
    from types import TracebackType

    from twisted.internet.interfaces import IReactorTime
    from twisted.python.failure import Failure

    from replication.net.protocol import Limits
    from replication.session.feed import Chunk
    from replication.streams.pending import PendingIds
    from replication.streams.registry import StreamDefinition
    from replication.streams.seams import ISequence, IStatements, IStreamStore, ITransaction, Page
    from replication.streams.settling import Batch
    from replication.waiting import Waits

T = TypeVar("T")
FIRST_SETTLED = Token(1)  # an empty stream: its first ID is 2, as everywhere in this protocol (protocol F5)
NOBODY = InstanceName("")  # whose position says which IDs were used, where no row does
LEAP = 10_000  # IDs that a stream without a table stores its position ahead: no restart uses one twice (trap 29)
RETRY_AFTER = 1.0  # seconds, when the store fails between commit and announcement
PAGE_ROWS = 5_000


class IWritingProcess(Protocol):
    """What a stream's writer needs from the process that it is part of."""

    instance_name: InstanceName
    limits: Limits
    store: IStreamStore
    clock: IReactorTime
    wall: Callable[[], float]
    waits: Waits
    stopping: bool

    async def started(self) -> None:
        """Return once facts can be written."""

    def caches_writer(self) -> StreamWriter:
        """Return the writer of the caches stream."""
        ...

    def tell(self, stream: StreamName, chunk: Chunk) -> None:
        """Hand lines to every connection that wants the stream."""

    def committed(self, stream: StreamName, facts: Sequence[Fact]) -> None:
        """Facts are durable that nobody has been told of yet."""

    def reservation_begins(self, reservation: Reservation) -> None:
        """IDs are about to be reserved; StoppingError if that may not be any longer."""

    def reservation_ended(self, reservation: Reservation) -> None:
        """All IDs of a reservation are complete."""


class OpenFact:
    """A fact that is being written: its ID is reserved, its rows are not committed."""

    def __init__(self, writer: StreamWriter, token: Token, reservation: Reservation) -> None:
        self.token = token
        self.texts: list[str] = []
        self._writer = writer
        self._reservation = reservation

    def whole(self) -> Fact:
        """Return it as it is now."""
        return Fact(self.token, tuple(self.texts))

    @property
    def stream_id(self) -> int:
        """The ID as a table of this stream has it: below zero in a negative stream."""
        return -self.token if self._writer.definition.negative else self.token

    async def write(self, row: object) -> None:
        """Add a row; RowError if it is not JSON or does not have the stream's declared fields."""
        self._reservation.check_open()
        self.texts.append(self._writer.spell(row))

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run the application's own SQL in this fact's transaction and return the rows; StoreError if it fails.

        From the first statement on, the transaction holds the database's write lock: do not wait for the network here.
        """
        return await self._reservation.transaction().execute(sql, parameters)

    async def run(self, function: Callable[[IStatements], T]) -> T:
        """Run ``function`` in this fact's transaction, on the database's thread; returns or raises what it does."""
        return await self._reservation.transaction().run(function)

    def invalidate(self, cache: str, keys: Sequence[object] | None) -> Deferred[None]:
        """Add, to this transaction, a fact that empties ``cache`` at ``keys`` everywhere; all of it if None.

        It happens at once: the result may be awaited, but need not be.
        """
        self._reservation.invalidate(cache, keys)
        return succeed(None)


class Reservation:
    """Reserved IDs and one transaction, as an asynchronous context; leaving it completes the IDs, by whichever exit."""

    log = Logger()

    def __init__(self, process: IWritingProcess, writer: StreamWriter, count: int | None) -> None:
        self.writer = writer
        self.since = 0.0  # seconds of the process's clock
        self._process = process
        self._count = count
        self._transaction: ITransaction | None = None
        self._held: dict[StreamWriter, Sequence[Token]] = {}
        self._facts: list[OpenFact] = []
        self._invalidations: list[str] = []  # rows of one fact on the caches stream
        self._begun = False
        self._ended: str | None = None  # how, for whoever comes too late
        self._complete = False

    async def __aenter__(self) -> Any:
        """Reserve; returns the open fact, or a list of them if a count was given."""
        await self._process.started()
        self._facts = [OpenFact(self.writer, token, self) for token in await self.begin()]
        return self._facts[0] if self._count is None else self._facts

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit or roll back; whatever becomes of the caller, that runs to its end before the IDs are complete."""
        if kind is None:
            await shield(self.commit([each.whole() for each in self._facts]))
            return
        rolled_back = shield(self._roll_back())
        if issubclass(kind, GeneratorExit):  # the coroutine was dropped: it may not wait for anything
            rolled_back.addErrback(lambda failure: self.log.failure("rollback of a dropped fact", failure=failure))
        else:
            await rolled_back

    async def begin(self) -> Sequence[Token]:
        """Reserve, once, and return the IDs; StoppingError if the process is, StoreError if there are none."""
        if self._begun:
            raise StreamError("a reservation is used once: call reserve() again")
        self._begun = True
        self._process.reservation_begins(self)
        self.since = self._process.clock.seconds()
        try:
            return await self._hold(self.writer, 1 if self._count is None else self._count)
        except BaseException:
            self._complete_all({})
            raise

    async def commit(self, facts: Sequence[Fact], receipt: Receipt | None = None) -> None:
        """Store a fact for each ID, and what is invalidated with them; complete the IDs whatever comes of it."""
        try:
            self.check_open()
            shares = self._transaction is None  # its commit with others, because it has executed nothing
            self._ended = "complete: write inside its 'async with' block"
            whole = {self.writer: facts}
            if self._invalidations:
                whole |= await self._invalidate()
            writes = [write for writer, some in whole.items() for write in writer.writes_of(some, shares=shares)]
            if writes or receipt is not None or not shares:  # else all of it lives in memory
                transaction = self._transaction or self._process.store.transaction()
                await transaction.commit(writes, receipt)
        except BaseException:
            self._complete_all({})
            raise
        self._complete_all(whole)

    async def abandon(self) -> None:
        """Roll back what is still being written: nobody can wait for it any longer."""
        if self._ended is None:
            await self._roll_back("rolled back: this process is stopping")

    @property
    def held(self) -> Iterable[tuple[StreamWriter, Token]]:
        """The streams of which this reservation holds IDs, each with the first of those."""
        return [(writer, tokens[0]) for writer, tokens in self._held.items()]

    def check_open(self) -> None:
        """Raise StreamError if the block has been left, StoppingError if the process could not wait for that."""
        if self._ended is not None:
            raise self._end()

    def _end(self) -> StreamError:
        kind = StoppingError if self._process.stopping else StreamError
        return kind(f"this fact is {self._ended}")

    def transaction(self) -> ITransaction:
        """Return the one transaction of all these facts."""
        self.check_open()
        if self._transaction is None:
            self._transaction = self._process.store.transaction()
        return self._transaction

    def invalidate(self, cache: str, keys: Sequence[object] | None) -> None:
        """Add a row to this transaction's fact on the caches stream."""
        self.check_open()
        if isinstance(keys, (str, bytes)):
            raise RowError(f"keys are a list of arguments, not {keys!r}: write [{keys!r}]")
        caches = self._process.caches_writer()
        caches.check_writer()
        spelt = None if keys is None else list(spell_key(keys))
        text = caches.spell([cache, spelt, int(self._process.wall() * 1000)])
        (self._facts[0].texts if caches is self.writer else self._invalidations).append(text)

    async def _hold(self, writer: StreamWriter, count: int) -> Sequence[Token]:
        tokens = await writer.take(count)
        if self._complete:  # somebody abandoned us meanwhile
            writer.complete(tokens, ())
            raise self._end()
        self._held[writer] = tokens
        return tokens

    async def _invalidate(self) -> dict[StreamWriter, Sequence[Fact]]:
        """Return the fact of the caches stream: its ID is drawn last, so that the stream waits for the commit only."""
        caches = self._process.caches_writer()
        try:
            (token,) = await self._hold(caches, 1)
        except BaseException:
            if self._transaction is not None:
                await self._transaction.rollback()
            raise
        return {caches: [Fact(token, tuple(self._invalidations))]}

    async def _roll_back(self, how: str = "rolled back") -> None:
        self._ended = how
        try:
            if self._transaction is not None:
                await self._transaction.rollback()
        finally:
            self._complete_all({})

    def _complete_all(self, committed: Mapping[StreamWriter, Sequence[Fact]]) -> None:
        if self._complete:
            return
        self._complete = True
        for writer, tokens in self._held.items():
            writer.complete(tokens, committed.get(writer, ()))
        self._process.reservation_ended(self)


class StreamWriter:
    """One stream, as its writer holds it; ``owner`` is the one whose IDs it shares.

    Facts of streams that share their IDs are told in the order of these: a Synapse has one position for all of them, so
    it would take what comes late for old (trap 17).
    """

    log = Logger()

    def __init__(
        self, process: IWritingProcess, definition: StreamDefinition, owner: StreamWriter | None = None
    ) -> None:
        self.definition = definition
        self.ids: StreamIds[StreamWriter] = StreamIds(FIRST_SETTLED) if owner is None else owner.ids
        self.ids.writers.append(self)
        self.kept: Kept | None = None  # the facts, if there is no table
        self.error: str | None = None  # why the store does not give what is to be announced
        self._process = process
        self._busy = False  # the store is being asked before more can be announced
        self.begin(FIRST_SETTLED)

    def begin(self, start: Token, sequence: ISequence | None = None) -> None:
        """Take up where the store says that the stream stands; without a ``sequence`` nobody else writes it."""
        self.ids.begin(start, None if self.definition.in_memory else sequence)
        self.announced = start  # how far every connection has been told
        self._settling = Settling(start)
        if self.definition.in_memory:
            self.kept = Kept(self.definition)
        # The position in the database: everything up to it is complete.  Of several writers each has one at once.
        self._stored = FIRST_SETTLED if self.ids.sequence is None else Token(0)
        self._storing: dict[Token, Token] = {}  # what will be, by the first ID of the facts that are being committed

    def watch(self) -> None:
        """Announce only what ``reach`` lets pass, and from the store: others write there who know nothing of us."""
        self.announced = self.ids.reached = Token(0)

    @property
    def settled(self) -> Token:
        """How far everything is complete that is announced here."""
        return self.ids.within_reach(self.pending.settled)

    def reach(self, upto: Token) -> None:
        """Learn that nobody else's ID at or below ``upto`` is open any more; at first, that the stream begins there.

        No crash takes it back, and it is at or above all that was announced: nothing need be stored before it is said.
        """
        opens = not self.ids.are_known
        self.ids.reach(upto)
        if opens:
            self.announced = self.settled
            self._process.tell(self.definition.name, self.position())
        self.announce()

    @property
    def pending(self) -> PendingIds:
        """The IDs, and which of them are open."""
        return self.ids.pending

    def reserve(self, count: int | None = None) -> Reservation:
        """Return the context in which one fact, or a list of ``count`` facts in one transaction, is written.

        NotAWriterError if this instance may not write here, StreamError for a ``count`` below 1.
        """
        self.check_writer()
        if count is not None and count < 1:
            raise StreamError(f"reserve({count}): reserve one ID at least")
        return Reservation(self._process, self, count)

    async def append(self, facts: Sequence[Sequence[object]], key: str | None = None) -> Sequence[Token]:
        """Append facts, each a list of rows, in one transaction; returns their IDs once all are durable.

        ``key`` names this append for a day: another one under the same key appends nothing and gets the same answer.
        RowError says which fact (counted from 1) is bad; then nothing is appended.
        """
        self.check_writer()
        texts = [self._spell_all(index, rows) for index, rows in enumerate(facts)]
        await self._process.started()
        if key is not None and (known := await self._process.store.recall(key)) is not None:
            return known
        return await shield(self._append(texts, key)) if texts else []

    def spell(self, row: object) -> str:
        """Return the text of a row if it has the declared fields, else RowError."""
        fields = self.definition.row
        if fields is not None and not (isinstance(row, (list, tuple)) and len(row) == len(fields)):
            got = f"an array of {len(row)}" if isinstance(row, (list, tuple)) else f"a {type(row).__name__}"
            raise RowError(f"a row of {self.definition.name!r} is [{', '.join(fields)}], not {got}")
        return grammar.spell_row(row)

    def writes_of(self, facts: Sequence[Fact], *, shares: bool) -> Sequence[Write]:
        """Return this stream's part of a transaction that commits ``facts``, and ``shares`` its commit with others.

        No ID is open at or below the position that is stored: who reads the database alone relies on it (replay).  So a
        fact without rows that is above it has nothing to be remembered by but a position of nobody's.

        Where several transactions go on at once, one that commits by itself leaves the position to ``unstored``: from
        there until it is on the disk, no other one of this stream could move it.
        """
        if self.kept is not None:
            return []
        name, me = self.definition.name, self._process.instance_name
        settled = Token(0)
        if shares or self.ids.sequence is None:
            settled = self.ids.within_reach(self.pending.settled_with([token for token, _ in facts]))
            self._storing[facts[0].token] = settled
        bare = [token for token, texts in facts if not texts and token > settled]
        if not bare:
            return [Write(name, me, settled, facts)]
        kept = [fact for fact in facts if fact.texts]
        mine = [Write(name, me, settled, kept)] if kept or settled else []
        return [*mine, Write(name, NOBODY, bare[-1])]

    async def take(self, count: int) -> Sequence[Token]:
        """Open the next IDs: of our own counter, or of the sequence that all writers share."""
        if self.ids.sequence is None:
            return [Token(each) for each in self.pending.reserve(count)]
        try:
            return await draw(self.pending, self.ids.sequence, count)
        except BaseException:
            self.ids.writers[0].announce()  # what had to wait for the IDs that do not come
            raise

    @property
    def shared(self) -> bool:
        """Whether other processes write the stream, too."""
        return self.ids.sequence is not None

    def note(self, seen: Token) -> None:
        """Learn that somebody else's facts reach up to ``seen``: where nothing of ours is open, we are as far.

        That need not be stored first: whoever begins anew begins where the last of all writers was.
        """
        if seen > self.pending.highest:
            self.pending.note(seen)
            self.ids.durable = max(self.ids.durable, seen)
            self.ids.writers[0].announce()

    def complete(self, tokens: Sequence[Token], facts: Sequence[Fact]) -> None:
        """Note that IDs are complete and what they committed (nothing: rolled back), and announce what settled."""
        self.pending.complete(tokens)
        stored = self._storing.pop(tokens[0], self._stored)
        if facts:
            if self.kept is None:
                self._stored = max(self._stored, stored)
                self.ids.durable = max(self.ids.durable, facts[-1].token)
            if self.ids.reached is None:
                self._settling.add([fact for fact in facts if fact.texts])
            self._process.committed(self.definition.name, facts)
        self.ids.writers[0].announce()

    def announce(self) -> None:
        """Tell all connections what has settled since the last time."""
        if self._busy:
            return
        settled = self.settled
        if self.ids.reached is not None:
            if self.ids.are_known and settled > self.announced:
                self._ask_store(self._announce_from_store(self.announced, settled))
            return
        if len(self.ids.writers) > 1:
            self._announce_together(min(settled, self.ids.durable))
        elif (batch := self._settling.release(min(settled, self.ids.durable))) is not None:
            if batch.spilled:
                self._ask_store(self._announce_from_store(batch.after, batch.upto))
                return
            self.tell(batch.facts, batch.after, batch.upto)
        if settled > self.ids.durable:  # the last IDs have no rows in the database: store a position before saying them
            self._ask_store(self._store_position(settled))

    def unstored(self) -> Write | None:
        """Return what stores how far everything is complete, unless the last commit has."""
        settled = self.settled
        if self.kept is not None or settled <= self._stored:
            return None
        if not self.definition.written_by(self._process.instance_name):
            return None
        return Write(self.definition.name, self._process.instance_name, settled)

    def stored(self, upto: Token) -> None:
        """Hear that the position ``upto`` is in the database."""
        self._stored = max(self._stored, upto)

    def position(self) -> Chunk:
        """Return the line that answers REPLICATE."""
        return spell_position(self.definition.name, self._process.instance_name, self.announced, self.announced)

    def _announce_together(self, upto: Token) -> None:
        """Tell what has settled in all streams that share our IDs, in the order of these."""
        batches = [(writer, batch) for writer in self.ids.writers if (batch := writer.release(upto)) is not None]
        limits = self._process.limits
        facts = [fact for _, batch in batches for fact in batch.facts]
        too_much = fact_bytes(facts) > limits.max_queued_bytes or len(texts_of(facts)) > limits.max_queued_lines
        if too_much or any(batch.spilled for _, batch in batches):
            for writer, _ in batches:
                writer.tell_gap(upto)
            return
        each_in_order = ([(fact.token, writer, fact) for fact in batch.facts] for writer, batch in batches)
        in_order = merge(*each_in_order, key=itemgetter(0))
        for writer, run in groupby(in_order, itemgetter(1)):
            some = [fact for _, _, fact in run]
            writer.tell(some, writer.announced, some[-1].token)
        for writer, _ in batches:
            if writer.announced < upto:
                writer.tell((), writer.announced, upto)

    def release(self, upto: Token) -> Batch | None:
        """Return what may be told now that everything up to a token has settled."""
        return self._settling.release(upto)

    def tell_gap(self, upto: Token) -> None:
        """Tell of more than may wait for a peer: each is to fetch it in pages."""
        name, me = self.definition.name, self._process.instance_name
        self._process.tell(name, spell_position(name, me, upto, upto))
        self.announced = upto

    def tell(self, facts: Sequence[Fact], after: Token, upto: Token) -> None:
        """Tell all connections of ``facts``, all there are in ``(after, upto]``."""
        if self.kept is not None:
            self.kept.add(facts, self._process.clock.seconds())
        name, me, limits = self.definition.name, self._process.instance_name, self._process.limits
        chunks = list(spell_facts(name, me, facts, after=after, upto=upto, line_limit=limits.line_limit))
        size, lines = sum(len(each.data) for each in chunks), sum(each.lines for each in chunks)
        if size > limits.max_queued_bytes or lines > limits.max_queued_lines:
            self.tell_gap(upto)
            return
        for chunk in chunks:
            self._process.tell(name, chunk)
        self.announced = upto

    async def _append(self, texts: Sequence[tuple[str, ...]], key: str | None) -> Sequence[Token]:
        reservation = Reservation(self._process, self, len(texts))
        tokens = await reservation.begin()
        receipt = None if key is None else Receipt(key, tokens)
        try:
            await reservation.commit(facts_of(tokens, texts), receipt)
        except StoreError:
            if key is not None and (known := await self._process.store.recall(key)) is not None:
                return known  # the same append came twice at once, and the other one was first
            raise
        return tokens

    def _spell_all(self, index: int, rows: Sequence[object]) -> tuple[str, ...]:
        if not isinstance(rows, (list, tuple)):
            raise _bad_fact(index, f"a fact is a list of rows, not a {type(rows).__name__}")
        try:
            return tuple([self.spell(row) for row in rows])
        except RowError as error:
            raise _bad_fact(index, str(error)) from error

    def _ask_store(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` while nothing else is announced, then look again.

        If it fails, which it does only when we stop, nothing is announced any more: rows after a part that is left out
        would tell followers that there is no such part.
        """
        self._busy = True

        async def work_and_look() -> None:
            await work
            self._busy = False
            self.announce()

        def failed(failure: Failure) -> None:
            if not self._process.stopping:
                self.log.failure("{name}: nothing is announced any more", failure, name=self.definition.name)

        Deferred.fromCoroutine(work_and_look()).addErrback(failed)

    async def _store_position(self, settled: Token) -> None:
        writer = self._process.instance_name
        if self.kept is not None:  # some more than that, so that it is done seldom; and nobody may fetch from there
            settled, writer = Token(settled + LEAP), NOBODY
        write = Write(self.definition.name, writer, settled)
        await self._until_it_works(lambda: self._process.store.transaction().commit([write]))
        self.stored(settled)
        self.ids.durable = max(self.ids.durable, settled)

    async def facts(self, *, after: Token, upto: Token, limit: int) -> Page:
        """Return facts as ``IStreamStore.facts`` does, from memory if that is where they are."""
        if self.kept is not None:
            self.kept.expire(self._process.clock.seconds())
            return self.kept.page(after=after, upto=upto, limit=limit)
        name, me = self.definition.name, self._process.instance_name
        return await self._process.store.facts(name, me, after=after, upto=upto, limit=limit)

    def acknowledged(self, sender: InstanceName, token: Token) -> None:
        """Forget what every sender has sent on, if this stream lives in memory (protocol A4, FEDERATION_ACK)."""
        if self.kept is not None:
            self.kept.acknowledge(sender, min(token, self.announced))

    async def _announce_from_store(self, after: Token, upto: Token) -> None:
        room = self._process.limits.max_queued_lines // 2
        while after < upto:
            if room < 0:  # a bulk of others, which each follower had better fetch at its own pace
                self.tell_gap(upto)
                return
            ask = partial(self.facts, after=after, upto=upto, limit=PAGE_ROWS)
            page = await self._until_it_works(ask)
            self.tell(page.facts, after, page.upto)
            after = page.upto
            room -= len(texts_of(page.facts))

    async def _until_it_works(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the store until it answers: what is committed has to be announced, however long that takes."""
        while True:
            try:
                answer = await ask()
            except StoreError as error:
                if self._process.stopping:
                    raise
                if self.error != str(error):
                    self.error = str(error)
                    self.log.error("{name} waits: {error}", name=self.definition.name, error=self.error)
                await self._process.waits.nap(RETRY_AFTER)
                continue
            if self.error is not None:
                self.error = None
                self.log.info("{name} goes on", name=self.definition.name)
            return answer

    def check_writer(self) -> None:
        """Raise NotAWriterError if this instance may not write here."""
        if not self.definition.written_by(self._process.instance_name):
            raise NotAWriterError(
                f"{self._process.instance_name!r} may not write to {self.definition.name!r}; "
                f"its writers: {', '.join(self.definition.writers)}"
            )


def _bad_fact(index: int, why: str) -> RowError:
    error = RowError(f"fact {index + 1}: {why}")
    error.fact = index
    return error
