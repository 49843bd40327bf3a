"""Transactions of one stream that wait for the database: logged once for each wait, and shown in the stream's status.

A wait is a delay, as an ID that is open is one: the stream goes on by itself, so the process stays ready
(docs/operations.md, Transactions that wait).  A database that refuses makes an error, and the stream is stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred, TimeoutError  # noqa: A004 - Twisted's name
from twisted.logger import Logger

from replication.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replication.deferreds import Lifetime
    from replication.streams.interfaces import ISqlExecutor, ITransaction, Receipt, Write
    from replication.wire.grammar import StreamName

_T = TypeVar("_T")

# SQLite refuses a statement after 5 s, if another process holds the lock: then there is an error, and no wait.
NOTED_AFTER: Final = 6.0  # seconds without an answer; it is noted before twice this time
PATIENCE: Final = 2.0  # seconds in which the database must answer what a transaction waits for


@attrs.define(eq=False, repr=False)
class WatchedTransaction:
    """An ITransaction that counts its calls."""

    _transaction: ITransaction
    begun: int = attrs.field(init=False, default=0)
    returned: int = attrs.field(init=False, default=0)

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows."""
        self.begun += 1
        try:
            return await self._transaction.execute(sql, parameters)
        finally:
            self.returned += 1

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement once per item of ``parameters``."""
        self.begun += 1
        try:
            await self._transaction.executemany(sql, parameters)
        finally:
            self.returned += 1

    async def run(self, function: Callable[[ISqlExecutor], _T]) -> _T:
        """Call ``function`` inside the transaction."""
        self.begun += 1
        try:
            return await self._transaction.run(function)
        finally:
            self.returned += 1

    async def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> None:
        """Store ``writes`` and ``receipt`` with all earlier statements."""
        self.begun += 1
        try:
            await self._transaction.commit(writes, receipt)
        finally:
            self.returned += 1

    async def rollback(self) -> None:
        """Undo all statements."""
        await self._transaction.rollback()

    async def blockers(self) -> Sequence[str]:
        """Return what a call that has not returned waits for."""
        return await self._transaction.blockers()


@attrs.define(eq=False, repr=False)
class DatabaseWaits:
    """Finds the waits of a stream, which has one transaction at a time.

    Args:
        stream: its name.
        whose: transactions they are, for people.
        lifetime: of this process.

    """

    log = Logger()

    _stream: StreamName
    _whose: str
    _lifetime: Lifetime
    _open: WatchedTransaction | None = attrs.field(init=False, default=None)
    _watching: bool = attrs.field(init=False, default=False)
    _since: float = attrs.field(init=False, default=0.0)  # since when ``_open`` is known to wait
    _why: str | None = attrs.field(init=False, default=None)  # what it waits for; None unless a wait was noted

    def begin(self, transaction: ITransaction) -> WatchedTransaction:
        """Return a transaction to use instead, until ``end``."""
        self._open = WatchedTransaction(transaction)
        if not self._watching:
            self._watching = True
            Deferred.fromCoroutine(self._watch()).addErrback(
                lambda failure: self.log.failure("waits of {name} are not logged any more", failure, name=self._stream)
            )
        return self._open

    def end(self) -> None:
        """Note that the transaction has ended."""
        self._open = None
        self._note_answer()

    @property
    def note(self) -> str | None:
        """A sentence about the present wait; None if there is none that was noted."""
        return None if self._why is None else f"stream {self._stream!r}: {self._describe(self._why)}"

    # ---- inside

    async def _watch(self) -> None:
        """Look each NOTED_AFTER seconds whether a call has returned, until no transaction is open."""
        while (watched := self._open) is not None and not self._lifetime.ended:
            calls, at = (watched.begun, watched.returned), self._lifetime.clock.seconds()
            await self._lifetime.sleep(NOTED_AFTER)
            if self._lifetime.ended:
                break
            if not self._is_waiting(watched, calls):
                self._note_answer()
            elif self._why is None:
                why = await self._ask(watched)
                if self._is_waiting(watched, calls):
                    self._since, self._why = at, why
                    self.log.warn("{stream}: {what}", stream=self._stream, what=self._describe(why))
        self._watching = False

    def _is_waiting(self, watched: WatchedTransaction, calls: tuple[int, int]) -> bool:
        begun, returned = calls
        return self._open is watched and returned < begun and watched.returned == returned

    async def _ask(self, watched: WatchedTransaction) -> str:
        asking = Deferred.fromCoroutine(watched.blockers()).addTimeout(PATIENCE, self._lifetime.clock)
        try:
            found = await self._lifetime.add(asking)
        except (StoreError, TimeoutError, CancelledError):
            return ""
        return ", ".join(found)

    def _describe(self, why: str) -> str:
        seconds = self._lifetime.clock.seconds() - self._since
        waits = f"a transaction of its {self._whose} has waited for the database for more than {seconds:.0f} s"
        return f"{waits}: it waits for {why}" if why else waits

    def _note_answer(self) -> None:
        if self._why is not None:
            seconds = self._lifetime.clock.seconds() - self._since
            self._why = None
            self.log.info(
                "{stream}: the wait for the database is over, after {s:.0f} s", stream=self._stream, s=seconds
            )
