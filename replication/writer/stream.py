"""One stream for its writer: ``reserve`` and ``append``, and their checks."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Final, overload

import attrs
from twisted.internet.task import deferLater

from replication.deferreds import shield
from replication.errors import RowError, StoreError, StreamError
from replication.streams.facts import check_rows, check_size, facts_of
from replication.streams.interfaces import Receipt
from replication.writer.reservation import FactTransaction, OpenTransactions, Reservation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from replication.streams.definitions import StreamDefinition
    from replication.wire.grammar import Token
    from replication.writer.publisher import PublishedStream, Publisher

SLICE_ROWS: Final = 20_000  # that are encoded in one turn of the reactor, which must not block others

_first: Callable[[list[Reservation]], Reservation] = itemgetter(0)


@attrs.define(eq=False, repr=False)
class StreamWriter:
    """Writes facts to one stream; ``Master.stream(name)`` returns it.

    ``definition`` is the stream's.  ``outgoing`` holds its facts that wait and its positions, ``publisher`` sends them.
    """

    definition: StreamDefinition
    publisher: Publisher
    _transactions: OpenTransactions
    outgoing: PublishedStream = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Publish the stream from now on."""
        self.outgoing = self.publisher.add(self.definition)

    @overload
    def reserve(self) -> AbstractAsyncContextManager[Reservation]: ...

    @overload
    def reserve(self, count: int) -> AbstractAsyncContextManager[list[Reservation]]: ...

    def reserve(
        self, count: int | None = None
    ) -> AbstractAsyncContextManager[Reservation] | AbstractAsyncContextManager[list[Reservation]]:
        """Return the block in which one fact is written, or ``count`` facts in one transaction.

        ``async with`` gives the Reservation, or a list of ``count`` of them.  NotAWriterError: this instance may not
        write here.  StreamError: ``count`` is below 1.  The block commits at its end, and rolls back if it raises
        (docs/guarantees.md).
        """
        self.outgoing.check_writer()
        if count is None:
            return FactTransaction(self._transactions, self.outgoing, 1, _first)
        if count < 1:
            raise StreamError(f"reserve({count}): reserve one ID at least")
        return FactTransaction(self._transactions, self.outgoing, count, list[Reservation])

    async def append(self, facts: Sequence[Sequence[object]], key: str | None = None) -> Sequence[Token]:
        """Append facts in one transaction, and return their IDs once all are durable.

        Args:
            facts: each is a list of rows.
            key: an idempotency key.  For a day at least, an append with the same key appends nothing and returns the
                same IDs (docs/http.md, Idempotency keys).

        RowError: a fact is not a list of rows of this stream; ``fact`` is its index, from 0.  Nothing is appended.
        NotAWriterError or StoppingError: nothing is appended.  StoreError: the facts may be committed or not; call
        again with the same key (docs/guarantees.md).

        """
        self.outgoing.check_writer()
        texts = await self._encode(facts)
        await self._transactions.ready()
        if key is not None and (known := await self._transactions.store.find_receipt(key)) is not None:
            return known
        return await shield(self._append(texts, key)) if texts else []

    @property
    def published(self) -> Token:
        """The position up to which everything was sent to the subscribers."""
        return self.outgoing.published

    @property
    def shared(self) -> bool:
        """Whether other processes allocate IDs from the same sequence."""
        return self.publisher.ids.sequence is not None

    async def _append(self, texts: Sequence[tuple[str, ...]], key: str | None) -> Sequence[Token]:
        transaction = FactTransaction(self._transactions, self.outgoing, len(texts), list[Reservation])
        tokens = await transaction.begin()
        receipt = None if key is None else Receipt(key, tokens)
        try:
            await transaction.commit(facts_of(tokens, texts), receipt)
        except StoreError:
            if key is not None and (known := await self._transactions.store.find_receipt(key)) is not None:
                return known  # an append with the same key ran beside this one, and committed first
            raise
        return tokens

    async def _encode(self, facts: Sequence[Sequence[object]]) -> list[tuple[str, ...]]:
        """Encode facts, with a turn of the reactor between slices."""
        texts, left = [], SLICE_ROWS
        for index, rows in enumerate(facts):
            texts.append(self._encode_fact(index, rows))
            left -= 1 + len(texts[-1])
            if left <= 0:
                left = SLICE_ROWS
                await deferLater(self._transactions.clock, 0)
        return texts

    def _encode_fact(self, index: int, rows: object) -> tuple[str, ...]:
        try:
            if isinstance(rows, (list, tuple)):
                encode = self.definition.encode
                if len(rows) == 1:  # the usual case, in half the time
                    texts: tuple[str, ...] = (encode(rows[0]),)
                else:
                    check_rows(len(rows))
                    texts = tuple([encode(row) for row in rows])
                check_size(texts)
                return texts
            why, cause = f"a fact is a list of rows, not a {type(rows).__name__}", None
        except RowError as error:
            why, cause = str(error), error
        self.outgoing.refused += 1
        raise RowError(f"fact {index + 1}: {why}", fact=index) from cause
