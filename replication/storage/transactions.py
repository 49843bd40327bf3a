"""What both SQL stores do above their threads: transactions of the application, and commits that share one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

from twisted.internet.defer import CancelledError, Deferred, DeferredLock

from replication.errors import UnknownStreamError
from replication.storage.memory import ended

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from replication.streams.seams import IStatements, Receipt, Write

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Batch = TypeVar("_Batch")
_Batch_contra = TypeVar("_Batch_contra", contravariant=True)

_UNDONE = "rolled back"


class IConnection(Protocol[_Batch_contra]):
    """What a transaction asks of a connection, on the connection's thread."""

    def execute(self, sql: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
        """Run a statement of the application, the first one of a transaction after BEGIN."""
        ...

    def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run a statement once per item."""
        ...

    def run(self, function: Callable[[IStatements], _T]) -> _T:
        """Run ``function`` inside the transaction."""
        ...

    def commit(self, batch: _Batch_contra) -> None:
        """Store a batch with what was executed; if that fails, all of it is undone."""
        ...

    def rollback(self) -> None:
        """Undo what was executed."""
        ...


class IDesk(Protocol[_Batch_contra]):
    """A connection and the thread that it lives on."""

    @property
    def connection(self) -> IConnection[_Batch_contra]:
        """To be used by ``run`` only."""
        ...

    def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Deferred[_T]:
        """Do something on the thread."""
        ...


class ITransacting(Protocol[_Batch]):
    """What a transaction asks of its store."""

    def check_statement(self, sql: str) -> None:
        """Raise StoreError if the application may not say this in a transaction."""

    async def take_seat(self) -> Any:  # an IDesk[_Batch]; each store has its own, which its leave_seat takes
        """Wait in line for a connection that nobody else uses until ``leave_seat``."""
        ...

    def leave_seat(self, desk: Any) -> None:
        """Let the next in line have it.

        What was given to its thread is done before anything of the next one, so this is right even if the caller was
        cancelled and no longer waits for it.
        """

    def batch(self, writes: Sequence[Write], receipt: Receipt | None) -> _Batch:
        """Return what a commit stores; UnknownStreamError if a stream was not declared."""
        ...

    def commit_in_group(self, batch: _Batch) -> Deferred[None]:
        """Commit together with all that wait; cancelling the Deferred stops the waiting, not the commit."""
        ...


class Transaction(Generic[_Batch]):
    """A transaction: statements, if any, then one commit or rollback.

    A commit whose caller is cancelled goes on all the same: shield it if the outcome matters.
    """

    def __init__(self, store: ITransacting[_Batch]) -> None:
        self._store = store
        self._turn = DeferredLock()  # one statement after the other, whoever awaits what
        self._desk: IDesk[_Batch] | None = None  # from the first statement on
        self._end: str | None = None

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows; StoreError names what the database said."""
        self._store.check_statement(sql)
        async with self._turn:
            desk = await self._seat()
            return await desk.run(desk.connection.execute, sql, parameters)

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement once per item; if one is refused, those before it may have been done."""
        self._store.check_statement(sql)
        async with self._turn:
            desk = await self._seat()
            await desk.run(desk.connection.executemany, sql, parameters)

    async def run(self, function: Callable[[IStatements], _T]) -> _T:
        """Run ``function`` inside the transaction, on the database's thread."""
        async with self._turn:
            desk = await self._seat()
            return await desk.run(desk.connection.run, function)

    async def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> None:
        """Store ``writes`` with what was executed; after an error none of it is stored, and nothing is left to undo."""
        async with self._turn:
            self._check_open()
            self._end = "handed over for its commit"
            try:
                await self._commit(writes, receipt)
            except CancelledError:
                raise  # it goes on without its caller
            except BaseException:
                self._end = _UNDONE
                raise
            self._end = "committed"

    async def rollback(self) -> None:
        """Undo what was executed; harmless if a commit has failed, StoreError if it has not."""
        async with self._turn:
            if self._end == _UNDONE:
                return
            self._check_open()
            self._end = _UNDONE
            if self._desk is not None:
                await self._last(self._desk, self._desk.connection.rollback)

    async def _seat(self) -> IDesk[_Batch]:
        self._check_open()
        if self._desk is None:
            self._desk = await self._store.take_seat()
        return self._desk

    async def _commit(self, writes: Sequence[Write], receipt: Receipt | None) -> None:
        desk = self._desk
        try:
            batch = self._store.batch(writes, receipt)
        except UnknownStreamError:
            if desk is not None:
                await self._last(desk, desk.connection.rollback)
            raise
        if desk is not None:
            await self._last(desk, desk.connection.commit, batch)
        else:
            await self._store.commit_in_group(batch)

    async def _last(self, desk: IDesk[_Batch], work: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            await desk.run(work, *args, **kwargs)
        finally:
            self._store.leave_seat(desk)

    def _check_open(self) -> None:
        if self._end is not None:
            raise ended(self._end)


class CommitGroup(Generic[_Batch]):
    """Commits without statements: those that wait for their turn in the ``line`` share one, and one fsync.

    ``commit`` returns what became of each, None for good; ``gather`` is awaited between the turn and the commit, while
    more may join.
    """

    def __init__(
        self,
        line: DeferredLock,
        commit: Callable[[Sequence[_Batch]], Awaitable[Sequence[Exception | None]]],
        gather: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._line = line
        self._commit = commit
        self._gather = gather
        self._waiting: list[tuple[_Batch, Deferred[None]]] = []

    def add(self, batch: _Batch) -> Deferred[None]:
        """Commit with the others; cancelling the Deferred stops the waiting, not the commit."""
        done: Deferred[None] = Deferred()
        self._waiting.append((batch, done))
        if len(self._waiting) == 1:
            Deferred.fromCoroutine(self._commit_all())
        return done

    async def _commit_all(self) -> None:
        await self._line.acquire()
        if self._gather is not None:
            await self._gather()
        group, self._waiting = self._waiting, []
        try:
            outcomes = await self._commit([batch for batch, _ in group])
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            outcomes = [error] * len(group)
        self._line.release()
        for (_, done), outcome in zip(group, outcomes, strict=True):
            if outcome is None:
                done.callback(None)
            else:
                done.errback(outcome)
