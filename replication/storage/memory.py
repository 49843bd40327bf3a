"""A store in memory: the reference for what every store does."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from replication.errors import CommitsLostError, PositionMovedError, SchemaError, StoreError
from replication.storage.contract import (
    ReceiptTakenError,
    UsedByOneProcess,
    ended,
    facts_gone,
    moved,
    undeclared,
)
from replication.storage.pages import Rows, check_limit, cut_rows
from replication.storage.receipts import ReceiptClock
from replication.streams.interfaces import FactSlice, KnownFollower, Write
from replication.streams.skips import LEFT_OUT
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence

    from replication.streams.definitions import StreamDefinition
    from replication.streams.history import History
    from replication.streams.interfaces import IAllocation, IReactorCalls, ISqlExecutor, IWatch, Page, Receipt
    from replication.streams.skips import SkippedFact, SkipState
    from replication.wire.grammar import InstanceName, StreamName

_T = TypeVar("_T")


class _NoTables:
    """A database without tables, for functions that look for one."""

    dialect: str = "sqlite"

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Find nothing."""
        return []

    def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Raise StoreError: there is no table."""
        raise StoreError("the memory store has no SQL: use a database")


class NoSql(_NoTables):
    """An executor that refuses every statement."""

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Raise StoreError: there is no SQL."""
        raise StoreError("the memory store has no SQL: use a database")


def call_reactor(function: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Return what a coroutine returns that does not wait: this is the reactor's thread."""
    done = Deferred.fromCoroutine(function())
    outcome: list[_T | Failure] = []
    done.addBoth(outcome.append)
    (result,) = outcome
    if isinstance(result, Failure):
        result.raiseException()
    return result


class _Stream:
    """One stream: its facts by token, and the stored positions."""

    def __init__(self) -> None:
        self.facts: dict[Token, tuple[InstanceName, tuple[str, ...]]] = {}
        self.positions: dict[InstanceName, Token] = {}
        self.gone: dict[InstanceName, Token] = {}
        self.slices: dict[InstanceName, dict[Token, FactSlice]] = {}

    def copy(self) -> _Stream:
        other = _Stream()
        other.facts, other.positions = dict(self.facts), dict(self.positions)
        other.gone, other.slices = self.gone, self.slices
        return other

    def apply(self, write: Write) -> None:
        stored = self.positions.get(write.writer, Token(0))
        if write.expected is not None and write.expected != stored:
            raise moved(write, stored)
        upto = write.upto if write.reset else max(stored, write.upto)
        if write.reset:
            for token in [each for each, (writer, _) in self.facts.items() if writer == write.writer and each > upto]:
                del self.facts[token]
            if self.gone.get(write.writer, upto) > upto:
                self.gone = {**self.gone, write.writer: upto}
        for token, texts in write.facts:
            if not texts:  # without a row, only the position shows that the ID was used
                upto = max(upto, token)
            elif token in self.facts:
                raise StoreError(f"stream {write.stream!r} has a fact {token} already")
            else:
                self.facts[token] = (write.writer, texts)
        if write.gone is not None and write.gone > self.gone.get(write.writer, 0):
            self.gone = {**self.gone, write.writer: write.gone}
        self.positions[write.writer] = upto


class _MemoryNotes:
    """What a store has beside facts: histories, what followers count, and the facts that they leave out."""

    def __init__(self, clock: ReceiptClock) -> None:
        self.clock = clock
        self.closed = True
        self._histories: dict[tuple[StreamName, InstanceName, str], History] = {}
        self._counts: dict[tuple[StreamName, InstanceName], str] = {}
        self._skipped: dict[tuple[InstanceName, StreamName, tuple[InstanceName, Token]], SkippedFact] = {}
        self._known_followers: dict[InstanceName, KnownFollower] = {}

    async def mark_truncated(
        self,
        writer: InstanceName,
        published: Mapping[StreamName, Token],
    ) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Do nothing: there is no SQL here."""
        return {}

    async def sync(self) -> None:
        """Return: nothing is on a disk."""

    async def history(self, stream: StreamName, writer: InstanceName, follower: str = "") -> History:
        """Return the stored history of a writer; empty if there is none."""
        self.check_open()
        return self._histories.get((stream, writer, follower), ())

    async def histories(self, writer: InstanceName) -> Mapping[StreamName, History]:
        """Return the stored history of a writer in every stream that has one."""
        self.check_open()
        return {stream: each for (stream, of, by), each in self._histories.items() if (of, by) == (writer, "")}

    async def store_histories(
        self, writer: InstanceName, histories: Mapping[StreamName, History], follower: str = ""
    ) -> None:
        """Store the history of a writer in each of these streams."""
        self.check_open()
        for stream, history in histories.items():
            self._histories[stream, writer, follower] = history

    async def applied_counts(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, str]:
        """Return, per writer, the text that ``Write.counts`` has stored."""
        self.check_open()
        return {writer: text for (of, writer), text in self._counts.items() if of == stream}

    async def known_followers(self) -> Sequence[KnownFollower]:
        """Return what followers have reported, by name."""
        self.check_open()
        return [each for _, each in sorted(self._known_followers.items())]

    async def store_follower(self, follower: KnownFollower) -> None:
        """Store the report of a follower."""
        self.check_open()
        self._known_followers[follower.name] = follower

    async def forget_follower(self, name: InstanceName) -> None:
        """Delete the report of a follower."""
        self._known_followers.pop(name, None)

    async def skipped_facts(
        self,
        follower: InstanceName,
        stream: StreamName | None = None,
        key: tuple[InstanceName, Token] | None = None,
        *,
        states: Collection[SkipState] = (),
        limit: int,
    ) -> Sequence[SkippedFact]:
        """Return the facts that a follower leaves out, the latest first."""
        self.check_open()
        found = [
            skipped
            for (of, name, which), skipped in self._skipped.items()
            if of == follower
            and stream in (None, name)
            and key in (None, which)
            and (not states or skipped.state in states)
        ]
        return sorted(found, key=lambda each: (each.changed_at, each.fact.token), reverse=True)[:limit]

    async def skipped_counts(self, follower: InstanceName, stream: StreamName) -> Mapping[InstanceName, int]:
        """Return how many facts of each writer a follower leaves out."""
        found = await self.skipped_facts(follower, stream, states=LEFT_OUT, limit=1_000_000)
        return Counter(each.writer for each in found)

    def check_open(self) -> None:
        """Raise StoreError unless the store is open."""
        if self.closed:
            raise StoreError("the memory store is not open")

    def note_applied(self, write: Write, follower: InstanceName) -> None:
        """Store what a follower counts and skips, or forget what it goes back from."""
        if write.counts is not None:
            self._counts[write.stream, write.writer] = write.counts
        if write.reset:
            lost = [
                key
                for key in self._skipped
                if key[:2] == (follower, write.stream) and key[2][0] == write.writer and key[2][1] > write.upto
            ]
            for key in lost:
                del self._skipped[key]
        now, _ = self.clock.read()
        for each in write.skipped:
            self._skipped[follower, each.stream, each.key] = replace(each, changed_at=now)


class _MemoryRows:
    """The rows of a stream in memory; ``MemoryStore`` has the rest."""

    def _stream(self, stream: StreamName) -> _Stream:
        raise NotImplementedError

    async def last_row(self, stream: StreamName) -> Token:
        """Return the largest token."""
        return max(self._stream(stream).facts, default=Token(0))

    async def present(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token) -> set[Token]:
        """Return the tokens of ``writer`` with ``after < token <= upto``."""
        return {
            token for token, (of, _) in self._stream(stream).facts.items() if of == writer and after < token <= upto
        }

    async def writers(self, stream: StreamName, *, after: Token, upto: Token) -> Mapping[InstanceName, Token]:
        """Return the writers with facts in a range, each with its largest token there."""
        facts = sorted(self._stream(stream).facts.items())
        return {writer: token for token, (writer, _) in facts if after < token <= upto}

    def note_former(self, stream: StreamName, writers: Collection[InstanceName]) -> None:
        """Do nothing: this store is no standby."""


class MemoryStore(_MemoryRows, _MemoryNotes, UsedByOneProcess):
    """An IStreamStore whose coroutines never wait.

    A fact without rows only raises the position; it is in no page.  ``clock`` is for receipts.
    """

    def __init__(self, clock: ReceiptClock | None = None) -> None:
        super().__init__(clock or ReceiptClock())
        self.warnings: list[str] = []
        self.commits_lost: Deferred[CommitsLostError] = Deferred()
        self._streams: dict[StreamName, _Stream] = {}
        self._receipts: dict[str, tuple[float, Sequence[Token]]] = {}

    async def open(self) -> None:
        """Open; facts from before a ``close`` are still there."""
        self.closed = False

    async def declare(self, *definitions: StreamDefinition) -> None:
        """Declare the streams; SchemaError if one is mapped onto a table, because there is none."""
        self.check_open()
        for definition in definitions:
            if definition.table is not None or definition.tables:
                raise SchemaError(f"stream {definition.name!r} is mapped onto tables: use a database")
        for definition in definitions:
            self._streams.setdefault(definition.name, _Stream())

    async def claim(self, instance: InstanceName) -> None:
        """Do nothing: no other process uses this store."""
        self.check_open()

    def sequence(self, stream: StreamName) -> None:
        """Return None: the one writer counts by itself."""
        self._stream(stream)

    async def positions(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return, per writer, the largest token that was committed or stored as a position."""
        return (await self.positions_of([stream]))[stream]

    async def positions_of(self, streams: Sequence[StreamName]) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Return what ``positions`` returns, of several streams at once."""
        positions = {stream: dict(self._stream(stream).positions) for stream in streams}
        for stream, found in positions.items():
            for token, (writer, _) in self._stream(stream).facts.items():
                found[writer] = max(found[writer], token)
        return positions

    async def applied_positions(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, Token]:
        """Return, per writer, the position of this process."""
        self.check_open()
        return dict(self._streams.get(stream, _Stream()).positions)

    async def claim_tables(self, streams: Sequence[StreamName], instance: InstanceName, *, copy: bool) -> None:
        """Do nothing: no other process uses this store."""
        for stream in streams:
            self._stream(stream)

    async def stored_positions(self) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Return, per stream and writer, the stored positions."""
        self.check_open()
        return {name: dict(found.positions) for name, found in self._streams.items() if found.positions}

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return the facts of ``writer`` with ``after < token <= upto``, about ``limit`` rows of them."""
        check_limit(limit)
        if (gone := self._stream(stream).gone.get(writer, Token(0))) > after:
            raise facts_gone(stream, writer, gone)
        mine = sorted(
            (token, texts)
            for token, (source, texts) in self._stream(stream).facts.items()
            if source == writer and after < token <= upto
        )
        rows = [(token, text) for token, texts in mine for text in texts][: limit + 1]
        cut = cut_rows([token for token, _ in rows], [text for _, text in rows], upto=upto, limit=limit)
        return (cut or Rows.of_fact(*mine[0], upto)).page()

    async def gone(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return, per writer, up to where facts may be gone."""
        return dict(self._stream(stream).gone)

    async def forget_facts(self, stream: StreamName, writer: InstanceName, upto: Token, *, delete: bool = True) -> None:
        """Note that facts up to ``upto`` are gone and, with ``delete``, delete them."""
        found = self._stream(stream)
        found.gone[writer] = max(upto, found.gone.get(writer, upto))
        if delete:
            for token in [token for token, (of, _) in found.facts.items() if of == writer and token <= upto]:
                del found.facts[token]
            for end in [each for each in found.slices.get(writer, ()) if 0 < each <= upto]:
                del found.slices[writer][end]
            self.land([Write(stream, writer, upto)], None)

    async def measure(
        self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int
    ) -> FactSlice:
        """Return the first facts of a range as a slice of about ``limit`` rows."""
        rows = [
            (token, text)
            for token, (of, texts) in sorted(self._stream(stream).facts.items())
            if of == writer and after < token <= upto
            for text in texts
        ][:limit]
        return FactSlice(rows[-1][0] if rows else after, len(rows), sum(len(text) for _, text in rows))

    async def slices(self, stream: StreamName, writer: InstanceName) -> Sequence[FactSlice]:
        """Return the stored slices, ascending."""
        return [each for _, each in sorted(self._stream(stream).slices.get(writer, {}).items())]

    async def store_slice(self, stream: StreamName, writer: InstanceName, new: FactSlice) -> None:
        """Store a slice, or replace that with the same end."""
        self._stream(stream).slices.setdefault(writer, {})[new.upto] = new

    def watch(self) -> IWatch | None:
        """Return None: no other process writes here."""
        return None

    def transaction(self, *, synchronous: bool = True) -> MemoryTransaction:
        """Return a transaction that has not begun."""
        return MemoryTransaction(self)

    async def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> None:
        """Commit as a transaction without statements does."""
        await self.transaction().commit(writes, receipt)

    async def interact(
        self,
        function: Callable[[ISqlExecutor, IReactorCalls], Sequence[Write]],
        allocation: IAllocation | None = None,
    ) -> None:
        """Call ``function``, which can run no statement, and commit with what it returns."""
        transaction = self.transaction()
        await transaction.commit(function(NoSql(), call_reactor))

    async def read(self, function: Callable[[ISqlExecutor], _T]) -> _T:
        """Run ``function`` on an empty database: this store has none of the tables beside the streams."""
        return function(_NoTables())

    async def find_receipt(self, key: str) -> Sequence[Token] | None:
        """Return the tokens of the receipt that was committed under ``key``; None if there is none."""
        self.check_open()
        written_at, tokens = self._receipts.get(key, (-inf, ()))
        return list(tokens) if written_at > self.clock.read()[1] else None

    async def verify(self) -> None:
        """Return: nothing is lost while this process lives."""
        self.check_open()

    async def check(self) -> None:
        """Return if the store is open."""
        self.check_open()

    async def close(self) -> None:
        """Refuse every later call."""
        self.closed = True

    async def raise_position(self, write: Write, history: History, former: History) -> None:
        """Store a position and a history; PositionMovedError if what is stored is not ``expected`` and ``former``."""
        if [*await self.history(write.stream, write.writer)] != [*former]:
            raise PositionMovedError(f"the history of {write.writer!r} in stream {write.stream!r} has changed")
        self.land([write], None)
        await self.store_histories(write.writer, {write.stream: history})

    def land(self, writes: Sequence[Write], receipt: Receipt | None) -> None:
        """Store all of it, or nothing."""
        streams: dict[StreamName, _Stream] = {}
        for write in writes:
            if write.follower is not None:
                self.check_open()
                self._streams.setdefault(write.stream, _Stream())
            if write.stream not in streams:
                streams[write.stream] = self._stream(write.stream).copy()
            streams[write.stream].apply(write)
        if receipt is not None:
            now, expired = self.clock.read()
            if self._receipts.get(receipt.key, (-inf, ()))[0] > expired:
                raise ReceiptTakenError("memory")
            self._receipts[receipt.key] = (now, tuple(receipt.tokens))
        self._streams.update(streams)
        for write in writes:
            if write.follower is not None:
                self.note_applied(write, write.follower)

    def _stream(self, stream: StreamName) -> _Stream:
        self.check_open()
        if stream not in self._streams:
            raise undeclared(stream)
        return self._streams[stream]


class MemoryTransaction:
    """An ITransaction without SQL."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._end: str | None = None

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Raise StoreError: there is no SQL here."""
        raise StoreError("the memory store has no SQL: use a database")

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Raise StoreError: there is no SQL here."""
        raise StoreError("the memory store has no SQL: use a database")

    async def run(self, function: Callable[[ISqlExecutor], _T]) -> _T:
        """Raise StoreError: there is no SQL here."""
        raise StoreError("the memory store has no SQL: use a database")

    async def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> None:
        """Store ``writes``; if that raises StoreError, nothing is stored."""
        if self._end is not None:
            raise ended(self._end)
        self._store.check_open()
        self._end = "rolled back"
        self._store.land(writes, receipt)
        self._end = "committed"

    async def rollback(self) -> None:
        """Do nothing; StoreError after a commit that succeeded."""
        if self._end == "committed":
            raise ended(self._end)
        self._end = "rolled back"

    async def blockers(self) -> Sequence[str]:
        """Return nothing: no call waits here."""
        return ()
