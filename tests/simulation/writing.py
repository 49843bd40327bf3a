"""A machine with a master, and those who write facts there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError, Deferred

from replication.errors import ReplicationError, StoreError, StreamError
from replication.master import Master
from replication.streams.registry import CACHES
from replication.wire.grammar import StreamName, Token, spell_row
from tests.simulation.node import LIMITS, PORT, SERVER_NAME, Node
from tests.simulation.witness import Ledger

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from twisted.python.failure import Failure

    from replication.streams.seams import Write
    from replication.writer import OpenFact
    from tests.simulation.world import World


class RollBackError(Exception):
    """What the application raises when it has changed its mind."""


class Job:
    """Somebody who writes facts; in a block, he is ``open`` until he is told how to leave it."""

    def __init__(self, ledger: Ledger, contents: Sequence[Sequence[object]]) -> None:
        self.ledger = ledger
        self.texts = [tuple(map(spell_row, rows)) for rows in contents]
        self.tokens: list[Token] = []
        self.held: list[tuple[Ledger, Token]] = []  # open IDs
        self.wish: Deferred[None] = Deferred()  # what to do in the end
        self.running: Deferred[None] = Deferred()
        self.handed_over = False  # for its commit
        self.ended = False
        self._work: Coroutine[Any, Any, None] | None = None

    @property
    def open(self) -> bool:
        """Whether he has IDs, and may be told how to leave."""
        return bool(self.held)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine that does it."""
        self._work = work
        self.running = Deferred.fromCoroutine(work)

    def opened(self, facts: Sequence[OpenFact], ledgers: dict[StreamName, Ledger]) -> None:
        """The IDs are known."""
        self.tokens = [fact.token for fact in facts]
        reservation = facts[0]._reservation
        ledger = ledgers[reservation.writer.definition.name]
        for fact in facts:
            assert fact.token > ledger.told, f"I5: {ledger.name}: {fact.token} is reserved after {ledger.told}"
            ledger.open[fact.token] = reservation
            self.held.append((ledger, fact.token))

    def close(self) -> None:
        """The block is being left: from now on its IDs may be passed."""
        for ledger, token in self.held:
            del ledger.open[token]
        self.held.clear()

    def drop(self) -> None:
        """Let nobody go on with it, as when its coroutine is garbage."""
        assert self._work is not None
        self._work.close()
        self.ended = True
        self.check_undone()

    def succeeded(self) -> None:
        """All of it is durable, as it was written."""
        self.ended = True
        got = [self.ledger.committed.get(token, ()) for token in self.tokens]
        assert got == self.texts, f"{self.ledger.name}: acknowledged {self.tokens}, but {got} is committed"

    def failed(self, failure: Failure) -> None:
        """None of it is durable, unless somebody stopped to wait for the commit."""
        self.ended = True
        failure.trap(RollBackError, CancelledError, ReplicationError)
        if not (self.handed_over and failure.check(CancelledError)):
            self.check_undone()

    def check_undone(self) -> None:
        """None of it is durable; its IDs may be somebody else's by now."""
        stayed = set(filter(None, self.texts)) & set(self.ledger.committed.values())
        assert not stayed, f"{self.ledger.name}: {stayed} was rolled back, but is committed"


class MasterNode(Node):
    """A machine with a master that writes ``streams``."""

    def __init__(self, world: World, name: str, streams: Sequence[str]) -> None:
        super().__init__(world, name)
        self.streams = streams
        self.ledgers = {StreamName(each): Ledger(f"{name}/{each}") for each in (*streams, CACHES)}
        self.jobs: list[Job] = []

    @property
    def stopping(self) -> bool:
        """Whether the process was asked to end."""
        return self.master.stopping

    def stop(self) -> None:
        """Ask the process to end; it is gone once it has."""
        master = self.master

        def stopped(_: object) -> None:
            if master is self.master and self.running:
                self.kill()

        master.stop().addCallback(stopped).addErrback(self.world.broken)

    def write(self, stream: str, contents: Sequence[Sequence[object]], caches: Sequence[str] = ()) -> Job:
        """Begin to write facts in a block; ``caches`` are invalidated in its transaction."""
        job = Job(self.ledgers[StreamName(stream)], contents)
        return self._begin(job, self._write(job, stream, contents, caches))

    def append(self, stream: str, contents: Sequence[Sequence[object]], key: str | None = None) -> Job:
        """Append facts in one call."""
        job = Job(self.ledgers[StreamName(stream)], contents)
        job.handed_over = True
        return self._begin(job, self._append(job, stream, contents, key))

    def announced(self, stream: str) -> Token:
        """Return the position that the process has told."""
        return self.master.stream(stream).announced

    # ---- inside

    def _start(self) -> None:
        master = self.master = Master(
            server_name=SERVER_NAME,
            instance_name=self.name,
            database=self.store,
            streams=self.streams,
            reactor=self.reactor,
            limits=LIMITS,
            wall=self.reactor.seconds,
        )
        self.reactor.listen(PORT, master.factory())
        starting = master.start()
        starting.addCallbacks(lambda _: self._started(master), lambda failure: self._not_started(master, failure))
        starting.addErrback(self.world.broken)

    def _started(self, master: Master) -> None:
        for name, ledger in self.ledgers.items():
            announced = master.stream(name).announced
            assert announced >= ledger.told, f"I13: {ledger.name} starts at {announced} after it told {ledger.told}"

    def _not_started(self, master: Master, failure: Failure) -> None:
        failure.trap(StreamError if master.stopping else StoreError)
        if master is self.master and self.running and not master.stopping:
            self.kill()  # twistd would exit

    def _killed(self) -> object:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job.close()
        for question in list(self.world.questions):
            if question.asked is self:
                question.fail("the connection is gone")
        return self.master, jobs

    def _begin(self, job: Job, work: Coroutine[Any, Any, None]) -> Job:
        job.begin(work)
        job.running.addCallbacks(lambda _: job.succeeded(), job.failed).addErrback(self.world.broken)
        self.jobs = [each for each in self.jobs if not each.ended]
        self.jobs.append(job)
        return job

    async def _write(self, job: Job, stream: str, contents: Sequence[Sequence[object]], caches: Sequence[str]) -> None:
        async with self.master.stream(stream).reserve(len(contents)) as facts:
            for fact, rows in zip(facts, contents, strict=True):
                for row in rows:
                    await fact.write(row)
            for cache in caches:
                facts[0].invalidate(cache, None)
            job.opened(facts, self.ledgers)
            try:
                await job.wish
                job.handed_over = True
            finally:
                job.close()

    async def _append(self, job: Job, stream: str, contents: Sequence[Sequence[object]], key: str | None) -> None:
        job.tokens = list(await self.master.stream(stream).append(contents, key))

    def _landed(self, writes: Sequence[Write], notes: Sequence[Any]) -> None:
        for write in writes:
            self.ledgers[write.stream].commit(write.facts)
