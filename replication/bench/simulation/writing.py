"""A host with a master, and the application's tasks that write facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError, Deferred

from replication.bench.simulation.disk import finish
from replication.bench.simulation.host import LIMITS, PORT, SERVER_NAME, Host
from replication.bench.simulation.invariants import WriterHistory
from replication.errors import ReplicationError, StoreError, StreamError
from replication.streams.definitions import CACHES
from replication.streams.retention import KEEP_ALL
from replication.wire.grammar import StreamName, Token, encode_row
from replication.writer.master import Master

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from twisted.python.failure import Failure

    from replication.bench.simulation.world import World
    from replication.storage.memory import MemoryStore
    from replication.streams.interfaces import Write
    from replication.wire.grammar import InstanceName
    from replication.writer.reservation import Reservation


class RollBackError(Exception):
    """Raised by the application to roll back."""


class Job:
    """A task that writes facts; in a ``reserve`` block it is ``open`` until its ``outcome`` is decided."""

    def __init__(self, history: WriterHistory, contents: Sequence[Sequence[object]]) -> None:
        self.history = history
        self.texts = [tuple(map(encode_row, rows)) for rows in contents]
        self.tokens: list[Token] = []
        self.held: list[tuple[WriterHistory, Token]] = []  # open IDs
        self.outcome: Deferred[None] = Deferred()  # fires to commit, fails to roll back
        self.running: Deferred[None] = Deferred()
        self.handed_over = False  # whether its commit was requested
        self.ended = False
        self._work: Coroutine[Any, Any, None] | None = None

    @property
    def open(self) -> bool:
        """Whether it has open IDs and its outcome can be decided."""
        return bool(self.held)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Start the coroutine."""
        self._work = work
        self.running = Deferred.fromCoroutine(work)

    def opened(self, facts: Sequence[Reservation], histories: dict[StreamName, WriterHistory]) -> None:
        """Record the reserved IDs."""
        self.tokens = [fact.token for fact in facts]
        reservation = facts[0]._transaction
        history = histories[reservation.stream.definition.name]
        for fact in facts:
            assert fact.token > history.published, (
                f"I5: {history.name}: {fact.token} is reserved after {history.published}"
            )
            history.open[fact.token] = reservation
            self.held.append((history, fact.token))

    def close(self) -> None:
        """Record the end of the block: from now on its IDs may be passed."""
        for history, token in self.held:
            del history.open[token]
        self.held.clear()

    def drop(self) -> None:
        """Close the coroutine, as the garbage collector does."""
        assert self._work is not None
        self._work.close()
        self.ended = True
        self.check_undone()

    def succeeded(self) -> None:
        """Check that all of it is durable, as it was written."""
        self.ended = True
        got = [self.history.committed.get(token, ()) for token in self.tokens]
        assert got == self.texts, f"{self.history.name}: acknowledged {self.tokens}, but {got} is committed"

    def failed(self, failure: Failure) -> None:
        """Check that none of it is durable, unless the wait for the commit was cancelled."""
        self.ended = True
        failure.trap(RollBackError, CancelledError, ReplicationError)
        if not (self.handed_over and failure.check(CancelledError)):
            self.check_undone()

    def check_undone(self) -> None:
        """Check that none of it is durable; its IDs may have been used again."""
        stayed = set(filter(None, self.texts)) & set(self.history.committed.values())
        assert not stayed, f"{self.history.name}: {stayed} was rolled back, but is committed"


class MasterHost(Host):
    """A host with a master that writes ``streams``; masters may share a ``disk``."""

    def __init__(self, world: World, name: str, streams: Sequence[str], disk: MemoryStore | None = None) -> None:
        super().__init__(world, name, disk)
        self.streams = streams
        self.histories = {StreamName(each): WriterHistory(f"{name}/{each}") for each in (*streams, CACHES)}
        self.jobs: list[Job] = []

    @property
    def stopping(self) -> bool:
        """Whether the process is stopping."""
        return self.master._transactions.stopping

    def stop(self) -> None:
        """Stop the process; it is killed when it has stopped."""
        master = self.master

        def stopped(_: object) -> None:
            if master is self.master and self.running:
                self.kill()

        master.stop().addCallback(stopped).addErrback(self.world.broken)

    def write(self, stream: str, contents: Sequence[Sequence[object]], caches: Sequence[str] = ()) -> Job:
        """Start to write facts in a block; ``caches`` are invalidated in its transaction."""
        job = Job(self.histories[StreamName(stream)], contents)
        return self._begin(job, self._write(job, stream, contents, caches))

    def append(self, stream: str, contents: Sequence[Sequence[object]], key: str | None = None) -> Job:
        """Append facts in one call."""
        job = Job(self.histories[StreamName(stream)], contents)
        job.handed_over = True
        return self._begin(job, self._append(job, stream, contents, key))

    def published(self, stream: str) -> Token:
        """Return the published position."""
        return self.master.stream(stream).published

    def lacks_facts(self) -> bool:
        """Return whether a stream has no fact yet."""
        return not all(any(each.committed.values()) for each in self.histories.values())

    # ---- inside

    def _start(self) -> None:
        master = self.master = Master(
            server_name=SERVER_NAME,
            instance_name=self.name,
            database=self.store,
            streams=self.streams,
            reactor=self.reactor,
            limits=LIMITS,
            wall=self.wall,
        )
        master.retention.default = self.world.retention or KEEP_ALL
        if self.world.forces:
            master.retention.needs.remove(master.followers)
        else:
            self.store.on_deleted = self._deleted
        self.reactor.listen(PORT, master.factory())
        starting = master.start()
        starting.addCallbacks(lambda _: self._started(master), lambda failure: self._not_started(master, failure))
        starting.addErrback(self.world.broken)

    def _started(self, master: Master) -> None:
        for name, history in self.histories.items():
            published = master.stream(name).published
            assert published >= history.published, (
                f"I13: {history.name} starts at {published} after publishing {history.published}"
            )
            if self.world.restores:
                history.publish(published)  # a page may reach it before a line is sent

    def _not_started(self, master: Master, failure: Failure) -> None:
        failure.trap(StreamError if master._transactions.stopping else StoreError)
        if master is self.master and self.running and not master._transactions.stopping:
            self.kill()  # twistd would exit

    def _killed(self) -> object:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job.close()
        for request in list(self.world.page_requests):
            if request.asked is self:
                request.fail("the connection is gone")
        return self.master, jobs

    def _begin(self, job: Job, work: Coroutine[Any, Any, None]) -> Job:
        job.begin(work)
        job.running.addCallbacks(lambda _: job.succeeded(), job.failed).addErrback(self.world.broken)
        self.jobs = [each for each in self.jobs if not each.ended]
        self.jobs.append(job)
        return job

    def recorded(self) -> None:
        """Return nothing: the disk has what is needed."""

    def disk_restored(self, _: object) -> None:
        """Forget what the disk has lost."""
        for stream, history in self.histories.items():
            position = finish(self.disk.positions(stream)).get(self.name, Token(0))
            history.restore(finish(self.disk.present(stream, self.name, after=Token(0), upto=position)), position)

    async def _write(self, job: Job, stream: str, contents: Sequence[Sequence[object]], caches: Sequence[str]) -> None:
        async with self.master.stream(stream).reserve(len(contents)) as facts:
            for fact, rows in zip(facts, contents, strict=True):
                for row in rows:
                    await fact.write(row)
            for cache in caches:
                facts[0].invalidate(cache, None)
            job.opened(facts, self.histories)
            try:
                await job.outcome
                job.handed_over = True
            finally:
                job.close()

    async def _append(self, job: Job, stream: str, contents: Sequence[Sequence[object]], key: str | None) -> None:
        job.tokens = list(await self.master.stream(stream).append(contents, key))

    def _deleted(self, stream: StreamName, writer: InstanceName, upto: Token) -> None:
        """Check that no known follower lacks facts that are deleted: one whose report of positions was answered."""
        for worker in self.world.workers.values():
            if worker.reported and not worker.restored and worker.stores(stream):
                at = finish(worker.disk.applied_positions(stream, worker.name)).get(writer, Token(0))
                assert at >= upto, f"I14: {stream} up to {upto} is deleted, but {worker} is at {at}"

    def _landed(self, writes: Sequence[Write], notes: Sequence[Any]) -> None:
        for write in writes:
            self.histories[write.stream].commit(write.facts)
            if write.writer == self.name:
                self.histories[write.stream].store(write.upto)
        if self.world.segments is not None:
            self.world.segments.committed(self.disk, self.name)
