"""Transactions of the application on a database, and groups of calls that share one, such as commits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from twisted.internet.defer import CancelledError, Deferred

from replication.deferreds import Lock, start_alone
from replication.errors import StoreError, UnknownStreamError
from replication.storage.contract import ended

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from replication.storage.connection import SqlConnection
    from replication.storage.store import HistoryStore, KeptFactsStore, SqlStore
    from replication.storage.threads import ConnectionThread
    from replication.streams.interfaces import ISqlExecutor, IStreamStore, Receipt, Write

_T = TypeVar("_T")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_UNDONE = "rolled back"


async def run_transaction(
    store: IStreamStore | HistoryStore | KeptFactsStore,
    function: Callable[[ISqlExecutor], _T],
    writes: Sequence[Write] = (),
) -> _T:
    """Call ``function`` in a transaction of its own, on the database's thread; commit, and return the result."""
    transaction = store.transaction()
    try:
        result = await transaction.run(function)
    except BaseException:
        await transaction.rollback()
        raise
    await transaction.commit(writes)  # if that fails, or goes on without its caller, nothing is left to roll back
    return result


class Transaction:
    """An ITransaction: statements, if any, then one commit or rollback.

    A commit whose caller is cancelled goes on.  Shield the call if the outcome matters.
    """

    def __init__(self, store: SqlStore[Any], *, synchronous: bool) -> None:
        self._store = store
        self._synchronous = synchronous
        self._lock = Lock()  # statements run one after the other
        self._connection: ConnectionThread[SqlConnection[Any]] | None = None  # from the first statement on
        self._end: str | None = None

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows; StoreError has the database's message."""
        self._store.check_statement(sql)
        return await self.run(lambda database: database.execute(sql, parameters))

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement once per item; if one is refused, those before it may have been executed."""
        self._store.check_statement(sql)
        await self.run(lambda database: database.executemany(sql, parameters))

    async def run(self, function: Callable[[ISqlExecutor], _T]) -> _T:
        """Run ``function`` inside the transaction, on the database's thread."""
        async with self._lock:
            thread = await self._acquire()
            return await thread.run(lambda connection: connection.run(function, synchronous=self._synchronous))

    async def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> None:
        """Store ``writes`` with all earlier statements; after an error nothing is stored or left to roll back."""
        async with self._lock:
            self._check_open()
            self._end = "handed over for its commit"
            try:
                await self._commit(writes, receipt)
            except CancelledError:
                raise  # the commit goes on without its caller
            except BaseException:
                self._end = _UNDONE
                raise
            self._end = "committed"

    async def rollback(self) -> None:
        """Undo all statements; do nothing after a commit that failed, StoreError after one that did not."""
        async with self._lock:
            if self._end == _UNDONE:
                return
            self._check_open()
            self._end = _UNDONE
            if self._connection is not None:
                await self._run_last(self._connection, lambda connection: connection.rollback())

    async def blockers(self) -> Sequence[str]:
        """Return what a call that has not returned waits for; empty if that is not known."""
        if self._connection is None and self._end is None:
            return [self._store.ALL_USED]
        return await self._store.blockers(self._connection)

    async def _acquire(self) -> ConnectionThread[SqlConnection[Any]]:
        self._check_open()
        if self._connection is None:
            self._connection = await self._store.acquire()
        return self._connection

    async def _commit(self, writes: Sequence[Write], receipt: Receipt | None) -> None:
        if self._connection is None:
            await self._store.commit(writes, receipt, synchronous=self._synchronous)
            return
        try:
            batch = self._store.batch(writes, receipt)
        except UnknownStreamError:
            await self._run_last(self._connection, lambda connection: connection.rollback())
            raise
        try:
            await self._run_last(self._connection, lambda connection: connection.commit(batch))
        except StoreError as error:
            if error.temporary:  # other errors may come from the application's statements
                self._store.proof.report(error)
            raise
        self._store.proof.end_trouble()

    async def _run_last(
        self, connection: ConnectionThread[SqlConnection[Any]], work: Callable[[SqlConnection[Any]], None]
    ) -> None:
        try:
            await connection.run(work)
        finally:
            self._store.release_connection(connection)

    def _check_open(self) -> None:
        if self._end is not None:
            raise ended(self._end)


class CallGroup(Generic[_Item, _Result]):
    """Group commit, and the like: items that wait for a ``lock`` share one call.

    ``call`` receives the items, and returns a result or an exception for each, or for the first ones only: then the
    others come first in the next call.  ``collect``, if given, is awaited between the lock and the call, and more items
    may join until it returns.
    """

    def __init__(
        self,
        lock: Lock,
        call: Callable[[Sequence[_Item]], Awaitable[Sequence[_Result | BaseException]]],
        collect: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._lock = lock
        self._call = call
        self._collect = collect
        self._waiting: list[tuple[_Item, Deferred[_Result]]] = []

    def add(self, item: _Item) -> Deferred[_Result]:
        """Join the next call.  To cancel the Deferred ends the waiting, not the call."""
        done: Deferred[_Result] = Deferred()
        self._waiting.append((item, done))
        if len(self._waiting) == 1:
            start_alone(self._call_once())
        return done

    async def _call_once(self) -> None:
        group: list[tuple[_Item, Deferred[_Result]]] = []
        results: Sequence[_Result | BaseException] = ()
        try:
            await self._lock.acquire()
            try:
                if self._collect is not None:
                    await self._collect()
                group, self._waiting = self._waiting, []
                results = await self._try_call(group)
                group, left = group[: len(results)], group[len(results) :]
                if left:
                    alone = not self._waiting
                    self._waiting[:0] = left
                    if alone:
                        start_alone(self._call_once())
            finally:
                self._lock.release()
        except BaseException as error:  # a bug, which is logged, or the garbage collector has found this coroutine lost
            if not group:
                group, self._waiting = self._waiting, []
            if not results:
                results = [error if isinstance(error, Exception) else StoreError("the work was lost")] * len(group)
            raise
        finally:  # no caller waits for ever
            for (_, done), result in zip(group, results, strict=False):
                if isinstance(result, BaseException):
                    done.errback(result)
                else:
                    done.callback(result)

    async def _try_call(self, group: Sequence[tuple[_Item, object]]) -> Sequence[_Result | BaseException]:
        try:
            return await self._call([item for item, _ in group])
        except Exception as error:  # noqa: BLE001 - every caller that waits receives it
            return [error] * len(group)
