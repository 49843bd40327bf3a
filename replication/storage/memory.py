"""The reference: what every store does, in dicts.  Nothing of it outlives the process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from replication.errors import PositionMovedError, SchemaError, StoreError, UnknownStreamError
from replication.storage.pages import Rows, check_limit, cut_rows
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from replication.streams.registry import StreamDefinition
    from replication.streams.seams import IStatements, IWatch, Page, Receipt, Write
    from replication.wire.grammar import InstanceName, StreamName

_T = TypeVar("_T")

RECEIPT_LIFE: Final = 86_400.0  # seconds: "the last day" of IStreamStore.recall


class _Shelf:
    """One stream: its facts by token, and the positions that were stored."""

    def __init__(self) -> None:
        self.facts: dict[Token, tuple[InstanceName, tuple[str, ...]]] = {}
        self.positions: dict[InstanceName, Token] = {}

    def copy(self) -> _Shelf:
        other = _Shelf()
        other.facts, other.positions = dict(self.facts), dict(self.positions)
        return other

    def take(self, write: Write) -> None:
        stored = self.positions.get(write.writer, Token(0))
        if write.expected is not None and write.expected != stored:
            raise moved(write, stored)
        upto = write.upto if write.reset else max(stored, write.upto)
        if write.reset:
            for token in [each for each, (writer, _) in self.facts.items() if writer == write.writer and each > upto]:
                del self.facts[token]
        for token, texts in write.facts:
            if not texts:  # no row to remember it by
                upto = max(upto, token)
            elif token in self.facts:
                raise StoreError(f"stream {write.stream!r} has a fact {token} already")
            else:
                self.facts[token] = (write.writer, texts)
        self.positions[write.writer] = upto


class MemoryStore:
    """An IStreamStore whose coroutines never wait.

    A fact without rows leaves nothing but the position that it raises: pages do not have it.  ``now`` tells the time in
    seconds, for receipts.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.now = now
        self.warnings: list[str] = []
        self.closed = True
        self._shelves: dict[StreamName, _Shelf] = {}
        self._receipts: dict[str, tuple[float, Sequence[Token]]] = {}

    async def open(self) -> None:
        """Begin; what was kept before a ``close`` is still there."""
        self.closed = False

    async def declare(self, definition: StreamDefinition) -> None:
        """Make a place for the stream; SchemaError for one that is mapped onto a table: there are none here."""
        self.check_open()
        if definition.table is not None or definition.tables:
            raise SchemaError(f"stream {definition.name!r} is mapped onto tables: use a database")
        self._shelves.setdefault(definition.name, _Shelf())

    async def claim(self, instance: InstanceName) -> None:  # noqa: ARG002
        """Return: nobody else comes here."""
        self.check_open()

    async def present(self, names: Collection[InstanceName]) -> Collection[InstanceName]:  # noqa: ARG002
        """Return none: nobody else comes here."""
        return ()

    def sequence(self, stream: StreamName) -> None:
        """Return None: whoever writes here counts by itself."""
        self._shelf(stream)

    async def positions(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return, per writer, the largest token that was ever committed or stored as a position."""
        shelf = self._shelf(stream)
        positions = dict(shelf.positions)
        for token, (writer, _) in shelf.facts.items():
            positions[writer] = max(positions[writer], token)
        return positions

    async def applied(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, Token]:  # noqa: ARG002 (the only one)
        """Return, per writer, the position of the process that this is."""
        self.check_open()
        return dict(self._shelves.get(stream, _Shelf()).positions)

    async def fill(self, stream: StreamName, instance: InstanceName, *, copy: bool) -> None:  # noqa: ARG002
        """Return: nobody else comes here."""
        self._shelf(stream)

    async def stored(self) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Return, per stream and writer, the positions that were stored."""
        self.check_open()
        return {name: dict(shelf.positions) for name, shelf in self._shelves.items() if shelf.positions}

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return the facts of ``writer`` with ``after < token <= upto``, about ``limit`` rows of them."""
        check_limit(limit)
        mine = sorted(
            (token, texts)
            for token, (source, texts) in self._shelf(stream).facts.items()
            if source == writer and after < token <= upto
        )
        rows = [(token, text) for token, texts in mine for text in texts][: limit + 1]
        cut = cut_rows([token for token, _ in rows], [text for _, text in rows], upto=upto, limit=limit)
        return (cut or Rows.of_fact(*mine[0], upto)).page()

    def watch(self) -> IWatch | None:
        """Return None: nobody else writes here."""
        return None

    def transaction(self) -> MemoryTransaction:
        """Return a transaction that has not begun."""
        return MemoryTransaction(self)

    async def read(self, function: Callable[[IStatements], _T]) -> _T:  # noqa: ARG002
        """Raise StoreError: there is no SQL here."""
        raise StoreError("the memory store knows no SQL: use a database")

    async def recall(self, key: str) -> Sequence[Token] | None:
        """Return the tokens of the receipt that was committed under ``key`` in the last day."""
        self.check_open()
        written_at, tokens = self._receipts.get(key, (0.0, ()))
        return list(tokens) if written_at > self.now() - RECEIPT_LIFE else None

    async def check(self) -> None:
        """Return if the store is open."""
        self.check_open()

    async def close(self) -> None:
        """Answer nothing from now on."""
        self.closed = True

    def check_open(self) -> None:
        """Raise StoreError unless the store is open."""
        if self.closed:
            raise StoreError("the memory store is not open")

    def commit(self, writes: Sequence[Write], receipt: Receipt | None) -> None:
        """Take all of it, or none."""
        shelves: dict[StreamName, _Shelf] = {}
        for write in writes:
            if write.follower is not None:
                self.check_open()
                self._shelves.setdefault(write.stream, _Shelf())
            if write.stream not in shelves:
                shelves[write.stream] = self._shelf(write.stream).copy()
            shelves[write.stream].take(write)
        if receipt is not None:
            now = self.now()
            if self._receipts.get(receipt.key, (0.0, ()))[0] > now - RECEIPT_LIFE:
                raise StoreError(f"there is a receipt {receipt.key!r} already")
            self._receipts[receipt.key] = (now, tuple(receipt.tokens))
        self._shelves.update(shelves)

    def _shelf(self, stream: StreamName) -> _Shelf:
        self.check_open()
        if stream not in self._shelves:
            raise undeclared(stream)
        return self._shelves[stream]


class MemoryTransaction:
    """An ITransaction without SQL."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._end: str | None = None

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:  # noqa: ARG002
        """Raise StoreError: there is no SQL here."""
        raise StoreError("the memory store knows no SQL: use a database")

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:  # noqa: ARG002
        """Raise StoreError: there is no SQL here."""
        raise StoreError("the memory store knows no SQL: use a database")

    async def run(self, function: Callable[[IStatements], _T]) -> _T:  # noqa: ARG002
        """Raise StoreError: there is no SQL here."""
        raise StoreError("the memory store knows no SQL: use a database")

    async def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> None:
        """Store ``writes``; StoreError: none of it is."""
        if self._end is not None:
            raise ended(self._end)
        self._store.check_open()
        self._end = "rolled back"
        self._store.commit(writes, receipt)
        self._end = "committed"

    async def rollback(self) -> None:
        """Undo nothing; harmless after a commit that failed, StoreError after one that did not."""
        if self._end == "committed":
            raise ended(self._end)
        self._end = "rolled back"


def undeclared(stream: StreamName) -> UnknownStreamError:
    """Return the error for a stream that the store has not been told of."""
    return UnknownStreamError(f"stream {stream[:100]!r} was not declared to the store")


def ended(end: str) -> StoreError:
    """Return the error for a transaction that is used after its end."""
    return StoreError(f"the transaction was {end}: begin another one")


def moved(write: Write, stored: Token) -> PositionMovedError:
    """Return the error for a position that is not where ``write`` takes it up."""
    return PositionMovedError(
        f"the position of {write.writer!r} in stream {write.stream!r} is {stored}, not {write.expected}: "
        "does another process use this database?"
    )
