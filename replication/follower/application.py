"""The functions of the application for one stream, each called in the transaction that stores what follows from it."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
from msgspec.structs import replace
from twisted.internet.defer import CancelledError
from twisted.logger import Logger

from replication.deferreds import call_function, start_alone
from replication.errors import ConfigError, PositionMovedError, StoreError, ValueRefusedError
from replication.follower.failures import DEFAULT_ATTEMPTS, Again, FailingFacts
from replication.logs import OF_APPLICATION
from replication.net import traces
from replication.streams.cursor import Apply, Reset
from replication.streams.facts import Fact
from replication.streams.skips import FailedFact, FailedFactAction, SkippedFact, SkipState, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from twisted.python.failure import Failure

    from replication.deferreds import Lock
    from replication.follower.database_waits import DatabaseWaits
    from replication.follower.failures import Step
    from replication.follower.transaction_size import TransactionSize
    from replication.streams.cursor import Cursor
    from replication.streams.interfaces import IStreamStore, ITransaction, Write
    from replication.streams.merge import ApplyMerged
    from replication.wire.grammar import InstanceName, StreamName, Token

    Note = Callable[[ITransaction], Coroutine[Any, Any, None]]
    WriteOf = Callable[[InstanceName, Apply | Reset], Write]
    Call = Callable[["ApplyTransaction"], Coroutine[Any, Any, Sequence[SkippedFact]]]


@attrs.define(eq=False, repr=False)
class ApplyTransaction:
    """The transaction in which a function applies facts; it also stores the position.

    ``stream`` and ``writer`` name where the facts come from; ``writer`` is empty where facts of several writers come in
    one order.  On SQLite the transaction holds the database's write lock from its first statement on.
    """

    stream: StreamName
    writer: InstanceName
    _transaction: ITransaction
    _parts: Mapping[InstanceName, Apply] = attrs.field(factory=dict)

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one SQL statement and return its rows.

        ``parameters`` replace ``?`` on SQLite and ``%s`` on PostgreSQL.  StoreError: the database refuses.
        """
        return await self._transaction.execute(sql, parameters)

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one SQL statement once for each item of ``parameters``; StoreError as ``execute``."""
        await self._transaction.executemany(sql, parameters)

    def writer_of(self, fact: Fact) -> InstanceName:
        """Return the writer of one of the facts."""
        return self._writers.get(fact.token, self.writer)

    @cached_property
    def _writers(self) -> dict[Token, InstanceName]:
        return {token: writer for writer, part in self._parts.items() for token, _ in part.facts}


class FailedFactFunction(msgspec.Struct, frozen=True):
    """A function of ``@worker.on_failed_fact``, and after how many attempts in a row it is called."""

    function: Callable[[FailedFact, ApplyTransaction], object]
    attempts: int = DEFAULT_ATTEMPTS


@attrs.define(eq=False, repr=False, kw_only=True)
class Application:
    """Applies steps of one stream.

    Args:
        stream: its name.
        store: holds the positions.
        failing: the facts that the function cannot take.
        waits: finds transactions that wait for the database.
        size: of the function's transactions.
        synchronous: whether a step is on the disk before the next one begins.  Otherwise a power loss may undo the last
            steps, each with its position.  Then they are applied again.
        function: ``function(facts, transaction)``; None if there is none, as of a copy.
        undo: ``undo(writer, to, transaction)``.
        on_failed: decides about a fact that fails.

    """

    log = Logger()

    _stream: StreamName
    _store: IStreamStore
    failing: FailingFacts
    waits: DatabaseWaits
    _size: TransactionSize
    _synchronous: bool
    function: Callable[..., object] | None = None
    undo: Callable[..., object] | None = None
    on_failed: FailedFactFunction | None = None
    _raised: MemoryError | None = attrs.field(init=False, default=None)  # that the function has raised last

    def origin(self, error: Exception) -> str:
        """Return the beginning of the text that logs ``error``.

        ``end_without_memory`` ends the process after a MemoryError, unless the text begins with OF_APPLICATION.  An
        error that the function has not raised may come after COMMIT, when the position has moved.
        """
        raised, self._raised = self._raised, None  # its frames would keep their facts, and look like a lost error
        ours = self.function is None or (isinstance(error, MemoryError) and error is not raised)
        return "following" if ours else OF_APPLICATION + " for"

    def cut(self, line: InstanceName, step: Step) -> Step:
        """Return the part of a step that one transaction applies now."""
        step = self.failing.cut(line, step)
        return step if self.function is None else self._size.cut(step)

    async def count_skipped(self, instance_name: InstanceName) -> None:
        """Count the skipped facts again, after a reset; the numbers are only shown."""
        if self.function is not None:
            with suppress(StoreError):
                await self.failing.count(self._store, instance_name)

    async def apply(
        self,
        line: InstanceName,
        step: Apply | ApplyMerged | Reset,
        parts: Mapping[InstanceName, Apply | Reset],
        write_of: WriteOf,
        note: Note,
    ) -> None:
        """Apply a step, of which each writer has a part.

        ``write_of`` returns what a part stores beside what the function does, and ``note`` stores more.  ``line`` is
        that of FailingFacts.
        """
        work = _Work(self._stream, line, parts, write_of, note)
        tried: list[Fact] = []  # what the function has received
        try:
            await self._commit(work, partial(self._call, step, tried))
        except Exception as error:
            if isinstance(step, Reset) or self.function is None or await self._is_broken(error):
                raise
            failed = self.failing.note(line, tried, work.writer_of, error)
            if failed is None or self.on_failed is None or failed.attempts < self.on_failed.attempts:
                raise
            await self._commit(work, partial(self._decide, self.on_failed, failed))

    async def apply_again(self, again: Again, position: Token, write_of: WriteOf) -> None:
        """Apply a fact that was skipped; if the function raises, the fact stays skipped, with the new reason."""
        skipped, error = again.skipped, None
        writer = skipped.writer
        part = Apply([skipped.fact], position, position)

        async def call(transaction: ApplyTransaction) -> Sequence[SkippedFact]:
            assert self.function is not None  # noqa: S101 - else nothing is skipped
            await self._run(self.function, [skipped.fact], transaction)
            return [replace(skipped, state=SkipState.APPLIED)]

        async def keep(_: ApplyTransaction) -> Sequence[SkippedFact]:
            return [replace(skipped, state=SkipState.SKIPPED, error=describe_error(error or ValueError()))]

        work = _Work(self._stream, writer, {writer: part}, write_of, _note_nothing)
        try:
            await self._transact(work, call)
        except CancelledError:
            raise
        except Exception as raised:  # noqa: BLE001 (an application's function may raise anything)
            error = raised
            await self._transact(work, keep)
        self.failing.end_retry(again, error)

    def drop_unmatched(self, cursors: Mapping[InstanceName, Cursor], write_of: WriteOf, lock: Lock) -> None:
        """Drop the skips that were requested for IDs that no fact has: a later fact with such an ID is applied."""
        for writer, token in self.failing.take_unmatched(cursors):
            dropped = SkippedFact(self._stream, writer, Fact(token, ()), SkipState.DROPPED)
            start_alone(self._drop(dropped, cursors[writer], write_of, lock))

    # ---- inside

    async def _drop(self, dropped: SkippedFact, cursor: Cursor, write_of: WriteOf, lock: Lock) -> None:
        what = {"token": dropped.fact.token, "stream": self._stream, "writer": dropped.writer}
        self.log.warn("no fact of {stream} by {writer} has the ID {token}: the request to skip it is dropped", **what)
        try:
            async with lock:
                write = write_of(dropped.writer, Apply((), cursor.position, cursor.position))
                await self._store.transaction().commit([replace(write, skipped=[dropped])])
        except StoreError as error:  # the next start reads the request again
            self.log.error("cannot drop the request to skip {token}: {error}", error=str(error), **what)

    async def _is_broken(self, error: Exception) -> bool:
        """Return whether the database cannot do anything else either, such as a damaged file: no fact causes that."""
        if not isinstance(error, StoreError) or isinstance(error, ValueRefusedError):
            return False
        try:
            await self._store.check()
        except StoreError:
            return True
        return False

    async def _call(
        self, step: Apply | ApplyMerged | Reset, tried: list[Fact], transaction: ApplyTransaction
    ) -> Sequence[SkippedFact]:
        """Call the function for a step; returns the facts that it did not receive."""
        if isinstance(step, Reset):
            if self.undo is not None:
                await self._run(self.undo, transaction.writer, step.to, transaction)
            return ()
        if self.function is None or not step.facts:
            return ()
        facts, skipped = self.failing.divide(step.facts, transaction.writer_of)
        tried += facts
        if facts:
            with self._size.timing(len(facts)):
                await self._run(self.function, facts, transaction)
        return skipped

    async def _decide(
        self, on_failed: FailedFactFunction, failed: FailedFact, transaction: ApplyTransaction
    ) -> Sequence[SkippedFact]:
        """Call the application's function for a fact that fails; raise its error again unless it is to be skipped."""
        action = await self._run(on_failed.function, failed, transaction)
        if not isinstance(action, FailedFactAction):
            raise ConfigError(
                f"the function of on_failed_fact({self._stream!r}) returned {action!r:.80}: return "
                "FailedFactAction.SKIP or FailedFactAction.STOP"
            ) from failed.error
        if action is FailedFactAction.STOP:
            raise failed.error
        return [
            SkippedFact(self._stream, failed.writer, failed.fact, SkipState.SKIPPED, failed.reason, "function"),
        ]

    async def _run(self, function: Callable[..., object], *arguments: object) -> object:
        """Call a function of the application.

        An exception that elsewhere ends a process, or the work of this class, is raised as a RuntimeError, so that the
        stream stops as after any other: SystemExit, GeneratorExit, or a cancellation of something that is awaited.
        """
        return await call_function(function, *arguments).addErrback(self._raise_again)

    def _raise_again(self, failure: Failure) -> Failure:
        error = failure.value
        assert error is not None  # noqa: S101 - it is the function's
        self._raised = error if isinstance(error, MemoryError) else None  # others would keep what their frames have
        if self.failing.stopping or (isinstance(error, Exception) and not isinstance(error, CancelledError)):
            return failure
        raise RuntimeError(f"the function raised {describe_error(error)}") from error

    async def _commit(self, work: _Work, call: Call) -> None:
        skipped = await self._transact(work, call)
        if self.function is None:
            return
        self.failing.committed(work.line, skipped, sum(len(part.facts) for part in work.of_facts.values()))
        for writer, part in work.parts.items():
            if isinstance(part, Reset):
                self.failing.went_back(writer, part.to)

    async def _transact(self, work: _Work, call: Call) -> Sequence[SkippedFact]:
        """Call a function, and store the rest in the same transaction; returns what was skipped."""
        goes_back = len(work.of_facts) < len(work.parts)
        transaction = self.waits.begin(self._store.transaction(synchronous=self._synchronous or goes_back))
        with traces.applying(self._stream, work.of_facts):
            try:
                skipped = await call(ApplyTransaction(self._stream, work.line, transaction, work.of_facts))
                await work.note(transaction)
                await transaction.commit(work.writes(skipped))
            except BaseException as raised:
                try:
                    await transaction.rollback()
                except StoreError as error:
                    self.log.error("cannot roll back {stream}: {error}", stream=self._stream, error=str(error))
                if isinstance(raised, PositionMovedError):
                    await self._store.verify()  # CommitsLostError: a restore has moved the position
                raise
            finally:
                self.waits.end()
        if skipped:  # an operator or ``on_failed`` has decided that: a power loss must not undo it
            try:
                await self._store.sync()
            except StoreError as error:  # the step is committed: to raise it would let the step be applied again
                self.log.error("{stream}: a power loss may undo a skip: {error}", stream=self._stream, error=str(error))
        return skipped


@attrs.define
class _Work:
    """What one transaction applies and stores; ``of_facts`` are the parts with facts.

    The other fields are the parameters of ``Application.apply``.
    """

    stream: StreamName
    line: InstanceName
    parts: Mapping[InstanceName, Apply | Reset]
    write_of: WriteOf
    note: Note
    of_facts: dict[InstanceName, Apply] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Find the parts with facts."""
        self.of_facts = {writer: part for writer, part in self.parts.items() if isinstance(part, Apply)}

    def writer_of(self, fact: Fact) -> InstanceName:
        """Return the writer of one of the facts."""
        return next(writer for writer, part in self.of_facts.items() if fact in part.facts)

    def writes(self, skipped: Sequence[SkippedFact]) -> list[Write]:
        """Return what is stored beside what the function does."""
        if not skipped:
            return [self.write_of(writer, part) for writer, part in self.parts.items()]
        return [
            replace(self.write_of(writer, part), skipped=[each for each in skipped if each.writer == writer])
            for writer, part in self.parts.items()
        ]


async def _note_nothing(_: ITransaction) -> None:
    """Store nothing more."""
