"""A simulated disk, which outlives processes; operations can wait, fail, or be cut off by a kill."""

from __future__ import annotations

from collections import UserDict
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from twisted.internet.defer import Deferred

from replication.errors import FactsGoneError, StoreError
from replication.storage.memory import MemoryStore, NoSql, call_reactor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence

    from replication.errors import CommitsLostError
    from replication.streams.definitions import StreamDefinition
    from replication.streams.history import History
    from replication.streams.interfaces import (
        FactSlice,
        IAllocation,
        IReactorCalls,
        ISequence,
        ISqlExecutor,
        ITransaction,
        KnownFollower,
        Page,
        Receipt,
        Write,
    )
    from replication.streams.skips import SkippedFact, SkipState
    from replication.wire.grammar import InstanceName, StreamName, Token

T = TypeVar("T")


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that does not wait."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError(f"{work} waits")


class Operation(Generic[T]):
    """A call of a store that has not returned yet."""

    def __init__(self, what: str, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.what = what
        self.answer: Deferred[T] = Deferred()
        self._work = work

    def succeed(self) -> None:
        """Do it, and return the result to the process."""
        try:
            result = finish(self._work())
        except (StoreError, FactsGoneError) as error:
            self.answer.errback(error)
        else:
            self.answer.callback(result)

    def fail(self) -> None:
        """Do nothing, and return an error to the process."""
        self.answer.errback(StoreError(f"{self.what}: the disk fails"))

    def land(self) -> None:
        """Do it without returning: the process is killed meanwhile."""
        finish(self._work())


class SharedDisk(MemoryStore):
    """The database of several writers: each stream has a sequence.

    ``holders`` has the last claim of each name.  It is a UserDict, because a restore replaces each dict of a disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holders: UserDict[InstanceName, SimulatedStore] = UserDict()
        self._last_values: dict[StreamName, int] = {}

    async def allocate(self, stream: StreamName, count: int) -> Sequence[int]:
        """Return the next IDs of the sequence."""
        first = self._last_values.get(stream, 1) + 1
        self._last_values[stream] = first + count - 1
        return range(first, first + count)


class SimulatedSequence:
    """An ISequence of a ``SharedDisk``, as one process uses it."""

    def __init__(self, store: SimulatedStore, disk: SharedDisk, stream: StreamName) -> None:
        self._store = store
        self._disk = disk
        self._stream = stream

    async def allocate(self, count: int) -> Sequence[int]:
        return await self._store.ask(f"allocate {count}", lambda: self._disk.allocate(self._stream, count))


class DiskCalls:
    """The base of a simulated store: decides what happens to its calls.

    While ``held``, they wait in ``waiting``; while ``failing``, they fail; after ``works_for`` calls, one fails.
    """

    def __init__(self) -> None:
        self.held = self.failing = self.killed = self.closed = False
        self.waiting: list[Operation[Any]] = []
        self.before_asynchronous: Callable[[], object] = lambda: None  # before a commit that does not wait for the disk
        self.on_synced: Callable[[], object] = lambda: None  # once every commit is on the disk
        self.works_for: int | None = None
        self._idle: Deferred[None] | None = None

    def release(self, operation: Operation[Any], outcome: Callable[[Operation[Any]], None] = Operation.succeed) -> None:
        """End a waiting call."""
        self.waiting.remove(operation)
        outcome(operation)
        if self._idle is not None and not self.waiting and not self._idle.called:
            self._idle.callback(None)

    def release_all(self) -> None:
        """Let all calls succeed from now on."""
        self.held = self.failing = False
        self.works_for = None
        while self.waiting:
            self.release(self.waiting[0])

    async def ask(
        self, what: str, work: Callable[[], Coroutine[Any, Any, T]], writes: Sequence[Write] | None = None
    ) -> T:
        """Return the result of ``work`` when the simulation allows it; ``writes`` are those of a commit."""
        if self.killed:
            await Deferred()  # for ever: the process is dead
        if self.closed:
            raise StoreError(f"{what}: the store is closed")
        if self.held:
            if writes is not None:
                what += " " + ", ".join(f"{each.stream} of {each.writer} upto {each.upto}" for each in writes)
            operation = Operation(what, work)
            self.waiting.append(operation)
            return await operation.answer
        if self.failing or self.works_for == 0:
            self.works_for = None
            raise StoreError(f"{what}: the disk fails")
        if self.works_for is not None:
            self.works_for -= 1
        return await work()

    async def write(
        self, what: str, work: Callable[[], Coroutine[Any, Any, T]], writes: Sequence[Write] | None = None
    ) -> T:
        """Return the result of ``work``, which ends with a synchronous commit, as ``ask`` does."""

        async def synced() -> T:
            result = await work()
            self.on_synced()
            return result

        return await self.ask(what, synced, writes)


class UnheldStore(DiskCalls):
    """The calls of an IStreamStore over a ``disk`` that never wait nor fail."""

    def __init__(self, disk: MemoryStore, on_landed: Callable[[Sequence[Write], Sequence[Any]], object]) -> None:
        super().__init__()
        self.disk = disk
        self.warnings: list[str] = []
        self.commits_lost: Deferred[CommitsLostError] = Deferred()
        self.on_landed = on_landed
        self.on_deleted: Callable[[StreamName, InstanceName, Token], object] = lambda *_: None  # up to a token

    async def claim_tables(self, streams: Sequence[StreamName], instance: InstanceName, *, copy: bool) -> None:
        await self.disk.claim_tables(streams, instance, copy=copy)

    def watch(self) -> None:
        """Return None: there are no external writers."""

    async def read(self, function: Callable[[ISqlExecutor], T]) -> T:
        return await self.disk.read(function)

    async def last_row(self, stream: StreamName) -> Token:
        return await self.disk.last_row(stream)

    async def present(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token) -> set[Token]:
        return await self.disk.present(stream, writer, after=after, upto=upto)

    async def writers(self, stream: StreamName, *, after: Token, upto: Token) -> Mapping[InstanceName, Token]:
        return await self.disk.writers(stream, after=after, upto=upto)

    def note_former(self, stream: StreamName, writers: Collection[InstanceName]) -> None:
        self.disk.note_former(stream, writers)

    async def history(self, stream: StreamName, writer: InstanceName, follower: str = "") -> History:
        return await self.disk.history(stream, writer, follower)

    async def histories(self, writer: InstanceName) -> Mapping[StreamName, History]:
        return await self.disk.histories(writer)

    async def applied_counts(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, str]:
        return await self.disk.applied_counts(stream, follower)

    async def mark_truncated(
        self, writer: InstanceName, published: Mapping[StreamName, Token]
    ) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        return await self.disk.mark_truncated(writer, published)

    async def skipped_facts(
        self,
        follower: InstanceName,
        stream: StreamName | None = None,
        key: tuple[InstanceName, Token] | None = None,
        *,
        states: Collection[SkipState] = (),
        limit: int,
    ) -> Sequence[SkippedFact]:
        return await self.disk.skipped_facts(follower, stream, key, states=states, limit=limit)

    async def skipped_counts(self, follower: InstanceName, stream: StreamName) -> Mapping[InstanceName, int]:
        return await self.disk.skipped_counts(follower, stream)

    async def verify(self) -> None:
        """Return: the disk loses nothing."""


class SimulatedStore(UnheldStore):
    """One process's IStreamStore over a ``disk`` that outlives it.

    ``on_landed`` is called for every commit that reached the disk, with what the application's function wrote in its
    transaction.
    """

    # ---- IStreamStore

    async def open(self) -> None:
        await self.ask("open", self.disk.open)

    async def declare(self, *definitions: StreamDefinition) -> None:
        names = ", ".join(each.name for each in definitions)
        await self.ask(f"declare {names}", lambda: self.disk.declare(*definitions))

    async def positions(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        return (await self.positions_of([stream]))[stream]

    async def positions_of(self, streams: Sequence[StreamName]) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        return await self.ask(f"positions of {', '.join(streams)}", lambda: self.disk.positions_of(streams))

    async def applied_positions(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, Token]:
        return await self.ask(f"positions of {stream}", lambda: self.disk.applied_positions(stream, follower))

    async def stored_positions(self) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        return await self.ask("stored positions", self.disk.stored_positions)

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        return await self.ask(
            f"facts of {stream}", lambda: self.disk.facts(stream, writer, after=after, upto=upto, limit=limit)
        )

    async def gone(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        return await self.ask(f"gone of {stream}", lambda: self.disk.gone(stream))

    async def forget_facts(self, stream: StreamName, writer: InstanceName, upto: Token, *, delete: bool = True) -> None:
        async def forget() -> None:
            if delete:
                self.on_deleted(stream, writer, upto)
            await self.disk.forget_facts(stream, writer, upto, delete=delete)

        await self.write(f"forget {stream} upto {upto}", forget)

    async def measure(
        self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int
    ) -> FactSlice:
        return await self.ask(
            f"measure {stream}", lambda: self.disk.measure(stream, writer, after=after, upto=upto, limit=limit)
        )

    async def slices(self, stream: StreamName, writer: InstanceName) -> Sequence[FactSlice]:
        return await self.ask(f"slices of {stream}", lambda: self.disk.slices(stream, writer))

    async def store_slice(self, stream: StreamName, writer: InstanceName, new: FactSlice) -> None:
        await self.write(f"slice {stream} upto {new.upto}", lambda: self.disk.store_slice(stream, writer, new))

    async def known_followers(self) -> Sequence[KnownFollower]:
        return await self.ask("known followers", self.disk.known_followers)

    async def store_follower(self, follower: KnownFollower) -> None:
        await self.write(f"report of {follower.name}", lambda: self.disk.store_follower(follower))

    async def forget_follower(self, name: InstanceName) -> None:
        await self.write(f"forget {name}", lambda: self.disk.forget_follower(name))

    def transaction(self, *, synchronous: bool = True) -> ITransaction:
        return SimulatedTransaction(self, synchronous=synchronous)

    async def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> None:
        await self.transaction().commit(writes, receipt)

    async def interact(
        self,
        function: Callable[[ISqlExecutor, IReactorCalls], Sequence[Write]],
        allocation: IAllocation | None = None,
    ) -> None:
        if allocation is not None and (sequence := self.sequence(allocation.stream)) is not None:
            allocation.expect()
            (id_,) = await sequence.allocate(1)
            allocation.allocated(id_)
        await self.commit(function(NoSql(), call_reactor))

    async def claim(self, instance: InstanceName) -> None:
        await self.disk.claim(instance)
        if isinstance(self.disk, SharedDisk):
            self.disk.holders[instance] = self

    async def claimed_elsewhere(self, names: Collection[InstanceName]) -> Mapping[InstanceName, bool]:
        holders: Mapping[InstanceName, SimulatedStore] = self.disk.holders if isinstance(self.disk, SharedDisk) else {}
        return {name: not (holders[name].killed or holders[name].closed) for name in names if name in holders}

    async def take_over(self, name: InstanceName) -> bool:
        """End a claim; a process that was killed or has stopped commits nothing in any case."""
        ended = (await self.claimed_elsewhere([name])).get(name) is False
        if ended and isinstance(self.disk, SharedDisk):
            del self.disk.holders[name]
        return ended

    def sequence(self, stream: StreamName) -> ISequence | None:
        self.disk.sequence(stream)
        return SimulatedSequence(self, self.disk, stream) if isinstance(self.disk, SharedDisk) else None

    async def find_receipt(self, key: str) -> Sequence[Token] | None:
        return await self.ask(f"recall {key}", lambda: self.disk.find_receipt(key))

    async def store_histories(
        self, writer: InstanceName, histories: Mapping[StreamName, History], follower: str = ""
    ) -> None:
        await self.write("store histories", lambda: self.disk.store_histories(writer, histories, follower))

    async def raise_position(self, write: Write, history: History, former: History) -> None:
        await self.write("raise position", lambda: self.disk.raise_position(write, history, former))

    async def check(self) -> None:
        await self.write("check", self.disk.check)

    async def sync(self) -> None:
        await self.write("sync", self.disk.sync)

    async def close(self) -> None:
        """Wait for the calls in progress."""
        self.closed = True
        if self.waiting:
            self._idle = Deferred()
            await self._idle


class SimulatedTransaction:
    """An ITransaction; the parameters of its statements reach the disk with its commit."""

    def __init__(self, store: SimulatedStore, *, synchronous: bool) -> None:
        self._store = store
        self._synchronous = synchronous
        self._on_disk = store.disk.transaction()
        self._notes: list[Any] = []

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        await self.executemany(sql, [parameters])
        return []

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        await self._store.ask(sql, lambda: self._note(parameters))

    async def run(self, function: Callable[[ISqlExecutor], T]) -> T:
        return await self._on_disk.run(function)

    async def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> None:
        await self._store.ask("commit", lambda: self._commit(writes, receipt), writes)

    async def rollback(self) -> None:
        if not self._store.killed:
            await self._on_disk.rollback()

    async def blockers(self) -> Sequence[str]:
        return await self._on_disk.blockers()

    async def _note(self, parameters: Sequence[Sequence[object]]) -> None:
        self._notes.extend(parameters)

    async def _commit(self, writes: Sequence[Write], receipt: Receipt | None) -> None:
        if not self._synchronous:
            self._store.before_asynchronous()
        await self._on_disk.commit(writes, receipt)
        self._store.on_landed(writes, self._notes)
        if self._synchronous:
            self._store.on_synced()
