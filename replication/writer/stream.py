"""One stream for its writer: ``reserve``, ``run_interaction`` and ``append``, and their checks."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextlib import contextmanager
from functools import partial
from operator import index, itemgetter
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar, overload

import attrs
from twisted.internet.task import deferLater

from replication.deferreds import check_thread, shield
from replication.errors import RowError, StoreError, StreamError
from replication.storage.contract import IdTakenError
from replication.storage.receipts import receipt_key
from replication.streams.facts import check_rows, check_size, facts_of, row_bytes
from replication.streams.interfaces import Receipt
from replication.web.pages import BLANK, PAUSE
from replication.writer.reservation import FactTransaction, OpenTransactions, Reservation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from replication.streams.definitions import StreamDefinition
    from replication.streams.facts import Fact
    from replication.streams.interfaces import ISqlExecutor
    from replication.wire.grammar import Token
    from replication.writer.interaction import NewFact
    from replication.writer.publisher import PublishedStream, Publisher

P = ParamSpec("P")
R = TypeVar("R")

SLICE: Final = 2**20  # bytes that are encoded in one turn of the reactor, which must not block others
FACT_BYTES: Final = 256  # and so many more for each row and each fact, which takes as long as such a text
SLICE_ROWS: Final = 5_000  # of one fact that are encoded in one turn
SLICE_FACTS: Final = 20_000  # that are made in one turn
ATTEMPTS: Final = 10  # of an append whose IDs other programs take

_first: Callable[[list[Reservation]], Reservation] = itemgetter(0)


def _call(function: Any, args: Any, kwargs: Any, txn: ISqlExecutor, fact: NewFact) -> Any:
    return function(txn, fact, *args, **kwargs)


@attrs.define(eq=False, repr=False)
class StreamWriter:
    """Writes facts to one stream; ``Master.stream(name)`` returns it.

    ``definition`` is the stream's.  ``outgoing`` holds its facts that wait and its positions, ``publisher`` sends them.
    """

    definition: StreamDefinition
    publisher: Publisher
    _transactions: OpenTransactions
    outgoing: PublishedStream = attrs.field(init=False)
    _run: str = attrs.field(init=False, default="")  # of a stream in memory: which run of the process has the facts

    def __attrs_post_init__(self) -> None:
        """Publish the stream from now on."""
        self.outgoing = self.publisher.add(self.definition)
        if self.definition.in_memory:
            self._run = secrets.token_hex(8)

    @overload
    def reserve(self) -> AbstractAsyncContextManager[Reservation]: ...

    @overload
    def reserve(self, count: int) -> AbstractAsyncContextManager[list[Reservation]]: ...

    def reserve(
        self, count: int | None = None
    ) -> AbstractAsyncContextManager[Reservation] | AbstractAsyncContextManager[list[Reservation]]:
        """Return the block in which one fact is written, or ``count`` facts in one transaction.

        ``async with`` gives the Reservation, or a list of ``count`` of them.  NotAWriterError: this instance may not
        write here.  StreamError: ``count`` is no integer, or below 1.  ConfigError: this is not the reactor's thread.
        The block commits at its end, and rolls back if it raises (docs/guarantees.md).
        """
        self._check_caller()
        if count is None:
            return FactTransaction(self._transactions, self.outgoing, 1, _first)
        try:
            count = index(count)  # also of another type of integers
        except TypeError as error:
            raise StreamError(f"reserve({count!r:.40}): the number of IDs is an integer") from error
        if count < 1:
            raise StreamError(f"reserve({count}): reserve one ID at least")
        return FactTransaction(self._transactions, self.outgoing, count, list[Reservation])

    async def run_interaction(
        self, function: Callable[Concatenate[ISqlExecutor, NewFact, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call ``function(txn, fact, *args, **kwargs)`` in a transaction on the database's thread; return its result.

        The fact of ``fact.write`` and the statements of ``txn.execute`` are durable when this returns.  If the function
        raises, both are rolled back, and this raises the same.  It is the fast way: ``reserve`` changes threads for
        each statement.  On SQLite, functions that wait share one commit (docs/how-to/embed-in-twisted.md).

        The function must be short, and must have no effect but on the database: it may be called again if an error of
        another one makes SQLite undo their common transaction.

        NotAWriterError or StoppingError: nothing is written.  ConfigError: this is not the reactor's thread, as inside
        a function of ``run_interaction``.  StreamError: ``function`` is a coroutine function.
        RowError: the fact is too large.  StoreError: the database refuses the transaction; if it refuses the COMMIT,
        the outcome may be unknown (docs/guarantees.md).
        """
        self._check_caller()
        await self._transactions.ready()
        transaction = FactTransaction(self._transactions, self.outgoing, 1, _first)
        return await shield(transaction.interact(partial(_call, function, args, kwargs)))

    async def append(self, facts: Iterable[Sequence[object]], key: str | None = None) -> Sequence[Token]:
        """Append facts in one transaction, and return their IDs once all are durable.

        Args:
            facts: each is a list of rows.  They are taken a slice at a time, with a turn of the reactor in between.
            key: an idempotency key.  For a day at least, an append to this stream with the same key appends nothing and
                returns the same IDs; to a stream in memory, until the process ends (docs/http.md, Idempotency keys).

        RowError: a fact is not a list of rows of this stream; ``fact`` is its index, from 0.  Nothing is appended.
        StreamError: ``key`` is not a text.  Nothing is appended.
        NotAWriterError, StoppingError, or ConfigError in another thread than the reactor's: nothing is appended.
        StoreError: the facts may be committed or not; call again with the same key (docs/guarantees.md).

        """
        self._check_caller()
        if not isinstance(facts, Iterable):
            raise RowError(f"append() takes a list of facts, each a list of rows, not a {type(facts).__name__}")
        if not (key is None or isinstance(key, str)):
            raise StreamError(f"append(key={key!r:.40}): an idempotency key is a str")
        texts = await self._encode(facts)
        await self._transactions.ready()
        stored = None if key is None else receipt_key(self.definition.name, key, self._run)
        if stored is not None and (known := await self._transactions.store.find_receipt(stored)) is not None:
            return known
        return await shield(self._append_again(texts, stored)) if texts else []

    @property
    def published(self) -> Token:
        """The position up to which everything was sent to the subscribers."""
        return self.outgoing.published

    @property
    def shared(self) -> bool:
        """Whether other processes allocate IDs from the same sequence."""
        return self.publisher.ids.sequence is not None

    def _check_caller(self) -> None:
        """Raise ConfigError in a wrong thread, NotAWriterError if this instance may not write here."""
        check_thread(self._transactions.clock)
        self.outgoing.check_writer()

    async def _append_again(self, texts: list[tuple[str, ...]], key: str | None) -> Sequence[Token]:
        """Append, and again with other IDs while other programs take those that this process has counted (SQLite)."""
        ids = self.publisher.ids
        for _ in range(1, ATTEMPTS):
            try:
                return await self._append(texts, key)
            except IdTakenError:  # nothing is stored
                if ids.horizon is None or ids.sequence is not None:
                    raise
                last = await self._transactions.store.last_row(self.definition.name)
                ids.pending.note(last)  # what is published stays within the horizon
        return await self._append(texts, key)

    async def _append(self, texts: list[tuple[str, ...]], key: str | None) -> Sequence[Token]:
        transaction = FactTransaction(self._transactions, self.outgoing, len(texts), list[Reservation])
        large = len(texts) > SLICE_FACTS  # each step then has turns of its own
        if large:
            await self._turn()
        tokens = await transaction.begin()
        receipt = None if key is None else Receipt(key, tokens)
        facts: list[Fact] = []
        for start in range(0, len(texts), SLICE_FACTS):
            if large:
                await self._turn()
            some = slice(start, start + SLICE_FACTS)
            facts += facts_of(tokens[some], texts[some])
        if large:
            await self._turn()
        try:
            await transaction.commit(facts, receipt)
        except StoreError:
            if key is not None and (known := await self._transactions.store.find_receipt(key)) is not None:
                return known  # an append with the same key ran beside this one, and committed first
            raise
        while large and facts:  # to free a million at once would take a turn of its own
            del facts[-SLICE_FACTS:], texts[-SLICE_FACTS:]
            await self._turn()
        return tokens

    async def _encode(self, facts: Iterable[Any]) -> list[tuple[str, ...]]:
        """Encode facts, with a turn of the reactor between slices."""
        texts: list[tuple[str, ...]] = []
        left = SLICE
        encode = self.definition.encode
        for rows in facts:
            if type(rows) is list and len(rows) == 1:  # the usual case, in half the time
                try:
                    text = encode(rows[0])
                    if len(text) > SLICE:
                        await self._turn()
                    check_size((text,))
                except RowError as error:
                    raise self._refusal(len(texts), str(error)) from error
                texts.append((text,))
                left -= 2 * FACT_BYTES + len(text)
            elif rows is BLANK:
                left -= FACT_BYTES
            elif rows is PAUSE:
                left = 0
            else:
                large = isinstance(rows, (list, tuple)) and len(rows) > SLICE_ROWS
                fact = await self._encode_slices(len(texts), rows) if large else self._encode_fact(len(texts), rows)
                size = row_bytes(fact)
                if size > SLICE:
                    await self._turn()
                with self._naming(len(texts)):
                    check_size(fact)
                texts.append(fact)
                left -= FACT_BYTES + size
            if left <= 0:
                left = SLICE
                await self._turn()
        return texts

    async def _turn(self) -> None:
        """Let the reactor do other work."""
        await deferLater(self._transactions.clock, 0)

    async def _encode_slices(self, index: int, rows: Sequence[object]) -> tuple[str, ...]:
        """Encode one fact of many rows, with a turn of the reactor between slices."""
        texts: list[str] = []
        with self._naming(index):
            check_rows(len(rows))
        for start in range(0, len(rows), SLICE_ROWS):
            with self._naming(index):
                texts += map(self.definition.encode, rows[start : start + SLICE_ROWS])
            await self._turn()
        return tuple(texts)

    def _encode_fact(self, index: int, rows: object) -> tuple[str, ...]:
        if not isinstance(rows, (list, tuple)):
            raise self._refusal(index, f"a fact is a list of rows, not a {type(rows).__name__}")
        with self._naming(index):
            return tuple(map(self.definition.encode, rows))

    @contextmanager
    def _naming(self, index: int) -> Iterator[None]:
        """Let RowError name the fact, and count it."""
        try:
            yield
        except RowError as error:
            raise self._refusal(index, str(error)) from error

    def _refusal(self, index: int, why: str) -> RowError:
        self.outgoing.refused += 1
        return RowError(f"fact {index + 1}: {why}", fact=index)
