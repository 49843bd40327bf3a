"""A disk that outlives its processes; between them and it, work waits, fails, or is cut off by a kill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from twisted.internet.defer import Deferred

from replication.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence

    from replication.storage.memory import MemoryStore
    from replication.streams.registry import StreamDefinition
    from replication.streams.seams import IStatements, ITransaction, Page, Receipt, Write
    from replication.wire.grammar import InstanceName, StreamName, Token

T = TypeVar("T")


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that does not wait for anything."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError(f"{work} waits")


class Operation(Generic[T]):
    """Something that a process asked its store for and has no answer to yet."""

    def __init__(self, what: str, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.what = what
        self.answer: Deferred[T] = Deferred()
        self._work = work

    def succeed(self) -> None:
        """Do it, and let the process know."""
        try:
            result = finish(self._work())
        except StoreError as error:
            self.answer.errback(error)
        else:
            self.answer.callback(result)

    def fail(self) -> None:
        """Do nothing of it, and let the process know."""
        self.answer.errback(StoreError(f"{self.what}: the disk says no"))

    def land(self) -> None:
        """Do it, and tell nobody: the process is killed before it could hear of it."""
        finish(self._work())


class SimulatedStore:
    """One process's IStreamStore over a ``disk`` that outlives it.

    While ``held``, what is asked for waits in ``waiting``; while ``failing``, it fails.  ``on_landed`` is told of every
    commit that reached the disk, with what the application's function noted in its transaction.
    """

    def __init__(self, disk: MemoryStore, on_landed: Callable[[Sequence[Write], Sequence[Any]], object]) -> None:
        self.disk = disk
        self.warnings: list[str] = []
        self.held = self.failing = self.killed = self.closed = False
        self.waiting: list[Operation[Any]] = []
        self.on_landed = on_landed
        self._idle: Deferred[None] | None = None

    def release(self, operation: Operation[Any], outcome: Callable[[Operation[Any]], None] = Operation.succeed) -> None:
        """Let an operation end."""
        self.waiting.remove(operation)
        outcome(operation)
        if self._idle is not None and not self.waiting and not self._idle.called:
            self._idle.callback(None)

    def release_all(self) -> None:
        """Let everything end well from now on."""
        self.held = self.failing = False
        while self.waiting:
            self.release(self.waiting[0])

    async def ask(self, what: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of ``work``, as soon as the simulation allows."""
        if self.killed:
            await Deferred()  # for ever: nothing is left that could go on
        if self.closed:
            raise StoreError(f"{what}: the store is closed")
        if self.held:
            operation = Operation(what, work)
            self.waiting.append(operation)
            return await operation.answer
        if self.failing:
            raise StoreError(f"{what}: the disk says no")
        return await work()

    # ---- IStreamStore

    async def open(self) -> None:
        await self.ask("open", self.disk.open)

    async def declare(self, definition: StreamDefinition) -> None:
        await self.ask(f"declare {definition.name}", lambda: self.disk.declare(definition))

    async def positions(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        return await self.ask(f"positions of {stream}", lambda: self.disk.positions(stream))

    async def applied(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, Token]:
        return await self.ask(f"positions of {stream}", lambda: self.disk.applied(stream, follower))

    async def fill(self, stream: StreamName, instance: InstanceName, *, copy: bool) -> None:
        await self.disk.fill(stream, instance, copy=copy)

    def watch(self) -> None:
        """Return None: only what is simulated writes here."""

    async def stored(self) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        return await self.ask("stored positions", self.disk.stored)

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        return await self.ask(
            f"facts of {stream}", lambda: self.disk.facts(stream, writer, after=after, upto=upto, limit=limit)
        )

    def transaction(self) -> ITransaction:
        return SimulatedTransaction(self)

    async def read(self, function: Callable[[IStatements], T]) -> T:
        return await self.disk.read(function)

    async def claim(self, instance: InstanceName) -> None:
        await self.disk.claim(instance)

    async def present(self, names: Collection[InstanceName]) -> Collection[InstanceName]:
        return await self.disk.present(names)

    def sequence(self, stream: StreamName) -> None:
        self.disk.sequence(stream)

    async def recall(self, key: str) -> Sequence[Token] | None:
        return await self.ask(f"recall {key}", lambda: self.disk.recall(key))

    async def check(self) -> None:
        await self.ask("check", self.disk.check)

    async def close(self) -> None:
        """Finish what runs."""
        self.closed = True
        if self.waiting:
            self._idle = Deferred()
            await self._idle


class SimulatedTransaction:
    """An ITransaction whose statements note something for the application, which lands with the commit or not."""

    def __init__(self, store: SimulatedStore) -> None:
        self._store = store
        self._on_disk = store.disk.transaction()
        self._notes: list[Any] = []

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        await self.executemany(sql, [parameters])
        return []

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        await self._store.ask(sql, lambda: self._note(parameters))

    async def run(self, function: Callable[[IStatements], T]) -> T:
        return await self._on_disk.run(function)

    async def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> None:
        what = ", ".join(f"{each.stream} of {each.writer} upto {each.upto}" for each in writes)
        await self._store.ask(f"commit {what}", lambda: self._commit(writes, receipt))

    async def rollback(self) -> None:
        if not self._store.killed:
            await self._on_disk.rollback()

    async def _note(self, parameters: Sequence[Sequence[object]]) -> None:
        self._notes.extend(parameters)

    async def _commit(self, writes: Sequence[Write], receipt: Receipt | None) -> None:
        await self._on_disk.commit(writes, receipt)
        self._store.on_landed(writes, self._notes)
