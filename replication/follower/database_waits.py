"""Transactions of one stream that wait: logged once for each wait, and shown in the stream's status.

A transaction waits for the database, or for a function that awaits something else.  A wait is a delay, like an open ID:
the stream goes on by itself, so the process stays ready (docs/operations.md, Transactions that wait).  If the database
refuses a statement instead, there is an error, and the stream is stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredList, TimeoutError  # noqa: A004 - Twisted's name
from twisted.logger import Logger

from replication.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from replication.deferreds import Lifetime
    from replication.follower.stream import StreamFollower
    from replication.streams.interfaces import ISqlExecutor, ITransaction, Receipt, Write
    from replication.wire.grammar import StreamName

_T = TypeVar("_T")

# SQLite refuses a statement after 5 s, if another process holds the lock: then there is an error, and no wait.
NOTED_AFTER: Final = 6.0  # seconds without an answer; it is noted after twice this time and PATIENCE at the latest
FUNCTION_NOTED_AFTER: Final = 60.0  # seconds without a statement: a function that awaits something else
PATIENCE: Final = 2.0  # seconds in which the database must answer what a transaction waits for


@attrs.define(eq=False, repr=False)
class WatchedTransaction:
    """An ITransaction that counts its calls."""

    _transaction: ITransaction
    begun: int = attrs.field(init=False, default=0)
    returned: int = attrs.field(init=False, default=0)

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows."""
        return await self._counted(self._transaction.execute(sql, parameters))

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement once per item of ``parameters``."""
        await self._counted(self._transaction.executemany(sql, parameters))

    async def run(self, function: Callable[[ISqlExecutor], _T]) -> _T:
        """Call ``function`` inside the transaction."""
        return await self._counted(self._transaction.run(function))

    async def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> None:
        """Store ``writes`` and ``receipt`` with all earlier statements."""
        await self._counted(self._transaction.commit(writes, receipt))

    async def _counted(self, call: Awaitable[_T]) -> _T:
        self.begun += 1
        try:
            return await call
        finally:
            self.returned += 1

    async def rollback(self) -> None:
        """Undo all statements."""
        await self._transaction.rollback()

    async def blockers(self) -> Sequence[str]:
        """Return what a call that has not returned waits for."""
        return await self._transaction.blockers()


class _Look(NamedTuple):
    """A call that had not returned when it was looked at, or a function that had made no further one."""

    transaction: WatchedTransaction
    begun: int
    returned: int
    at: float  # seconds: the time of the first look

    @property
    def in_call(self) -> bool:
        """Whether it is a call that had not returned."""
        return self.returned < self.begun


@attrs.define(eq=False, repr=False)
class DatabaseWaits:
    """Finds the waits of a stream, which has one transaction at a time.

    Args:
        stream: its name.
        whose: what runs the transactions, for people: ``function`` or ``copy``.
        lifetime: of this process.

    """

    log = Logger()

    _stream: StreamName
    _whose: str
    _lifetime: Lifetime
    _open: WatchedTransaction | None = attrs.field(init=False, default=None)
    _waiting: _Look | None = attrs.field(init=False, default=None)  # what went on at the last look
    # What it waits for, "" if that is not known; None unless a wait was noted.
    _why: str | None = attrs.field(init=False, default=None)

    def begin(self, transaction: ITransaction) -> WatchedTransaction:
        """Return a watched transaction, to use in place of ``transaction`` until ``end``."""
        self._open = WatchedTransaction(transaction)
        return self._open

    def end(self) -> None:
        """Note that the transaction has ended."""
        self._open = None
        self._note_answer()
        self._waiting = None

    @property
    def is_open(self) -> bool:
        """Whether a transaction has begun and not ended."""
        return self._open is not None

    async def look(self) -> None:
        """Note a call that has not returned since the last look, and a function that makes none for long."""
        watched, before, seconds = self._open, self._waiting, self._lifetime.clock.seconds()
        if before is None or not self._is_same(before):
            self._note_answer()
            self._waiting = None if watched is None else _Look(watched, watched.begun, watched.returned, seconds)
        elif self._why is None and (before.in_call or seconds - before.at >= FUNCTION_NOTED_AFTER):
            why = await self._ask(before.transaction) if before.in_call else ""
            if self._is_same(before):
                self._why = why
                self.log.warn("{stream}: {what}", stream=self._stream, what=self._describe(why))

    @property
    def note(self) -> str | None:
        """A sentence about the present wait; None if there is none that was noted."""
        return None if self._why is None else f"stream {self._stream!r}: {self._describe(self._why)}"

    # ---- inside

    def _is_same(self, look: _Look) -> bool:
        transaction = look.transaction
        return self._open is transaction and (transaction.begun, transaction.returned) == (look.begun, look.returned)

    async def _ask(self, watched: WatchedTransaction) -> str:
        asking = Deferred.fromCoroutine(watched.blockers()).addTimeout(PATIENCE, self._lifetime.clock)
        try:
            found = await self._lifetime.add(asking)
        except (StoreError, TimeoutError, CancelledError):
            return ""
        return ", ".join(found)

    def _describe(self, why: str) -> str:
        seconds = self._seconds()
        if not self._is_in_call():
            return (
                f"its {self._whose} has run for more than {seconds:.0f} s, and awaits something other than the "
                "database: give what it awaits a timeout"
            )
        waits = f"a transaction of its {self._whose} has waited for the database for more than {seconds:.0f} s"
        return f"{waits}: it waits for {why}" if why else waits

    def _note_answer(self) -> None:
        if self._why is not None:
            self._why = None
            what = "database" if self._is_in_call() else self._whose
            text = "{stream}: the wait for the {what} is over, after {s:.0f} s"
            self.log.info(text, stream=self._stream, what=what, s=self._seconds())

    def _is_in_call(self) -> bool:
        return self._waiting is not None and self._waiting.in_call

    def _seconds(self) -> float:
        return 0.0 if self._waiting is None else self._lifetime.clock.seconds() - self._waiting.at


async def look_for_waits(followers: Iterable[StreamFollower], lifetime: Lifetime) -> None:
    """Look at the transactions of all streams, every NOTED_AFTER seconds, until the process ends."""
    while not lifetime.ended:
        await lifetime.sleep(NOTED_AFTER)
        begun = [each.application.waits for each in followers if each.application.waits.is_open]
        await DeferredList([Deferred.fromCoroutine(each.look()) for each in begun])
