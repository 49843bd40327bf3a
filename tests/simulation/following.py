"""A machine with a worker, those who wait for its positions, and where it fetches what it missed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import Deferred

from replication.errors import CatchUpError, PositionTimeoutError, ReplicationError, StoreError, StreamError
from replication.follower import Keeping
from replication.streams.facts import fact_bytes
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.worker import Worker
from tests.simulation.disk import finish
from tests.simulation.node import LIMITS, PORT, SERVER_NAME, Node
from tests.simulation.witness import Account

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twisted.python.failure import Failure

    from replication.follower import ApplyTransaction
    from replication.streams.cursor import CatchUp
    from replication.streams.facts import Fact
    from replication.streams.seams import Page, Write
    from tests.simulation.world import World
    from tests.simulation.writing import MasterNode

T = TypeVar("T")

HELD_BYTES = 2_000  # what a cursor holds; a page comes on top
APPLY_ROWS = 4


class Question:
    """A page that a worker asked for: on its way, one way or the other."""

    def __init__(self, asked: MasterNode, by: WorkerNode) -> None:
        self.asked = asked
        self.by = by
        self.answer: Deferred[Page] = Deferred()
        self.page: Page | None = None  # once the master has answered
        self.error: str | None = None
        by.world.questions.append(self)
        self.answer.addBoth(self._forget)

    @property
    def waiting(self) -> bool:
        """Whether the worker still runs and waits for it."""
        return self in self.by.world.questions

    def fail(self, why: str) -> None:
        """Give the worker an error."""
        if self.waiting:
            self.answer.errback(CatchUpError(why))

    def pass_on(self) -> None:
        """Give the worker what the master said, if it has."""
        if self.error is not None:
            self.fail(self.error)
        elif self.page is not None and self.waiting:
            self.answer.callback(self.page)

    def _forget(self, result: T) -> T:
        self.by.world.questions.remove(self)
        return result


class SimulatedSources:
    """Stands where a worker has its ``Sources``: asks the master's ``page`` as its HTTP side does."""

    def __init__(self, node: WorkerNode) -> None:
        self._node = node

    async def fetch(
        self, endpoint: str | None, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int
    ) -> Page:
        """Return a page as the machine's ``page_rows`` allow, once its ``pages_held`` does."""
        node = self._node
        asked = node.world.masters[writer]
        assert endpoint == f"tcp:{writer}:{PORT}"
        if node.pages_fail or not asked.running or {node.name, asked.name} & node.world.network.unplugged:
            raise CatchUpError("no answer")
        question = Question(asked, node)
        page = Deferred.fromCoroutine(
            asked.master.page(stream, writer, after=step.after, upto=step.upto, limit=min(limit, node.page_rows))
        )

        def answered(page: Page) -> None:
            asked.ledgers[stream].check_page(page, step.after, step.upto)
            node.largest_page = max(node.largest_page, fact_bytes(page.facts))
            question.page = page

        def failed(failure: Failure) -> None:
            failure.trap(ReplicationError)
            question.error = failure.getErrorMessage()

        def pass_on(_: None) -> None:
            if not node.pages_held:
                question.pass_on()

        page.addCallbacks(answered, failed).addCallback(pass_on).addErrback(node.world.broken)
        return await question.answer

    async def close(self) -> None:
        """Drop what is on its way."""
        for question in [each for each in self._node.world.questions if each.by is self._node]:
            question.fail("closing")


class Wait:
    """Somebody who waits for a position."""

    def __init__(self, node: WorkerNode, stream: str, writer: str, token: int, timeout: float) -> None:
        self.ended = False
        self._node = node
        self._stream = StreamName(stream)
        self._writer = InstanceName(writer)
        self._token = token
        self._until = node.reactor.seconds() + timeout
        self.waiting = node.worker.wait_for(stream, writer, token, timeout)
        self.waiting.addCallbacks(self._reached, self._late).addErrback(node.world.broken)

    def check(self) -> None:
        """I12: nobody waits for what is there; a worker without a list must have heard of a stream to know it."""
        follower = self._node.worker._followers.get(self._stream)
        if not self.ended and follower is not None and follower._positions is not None:
            at = self._node.position(self._stream, self._writer)
            assert at < self._token, f"I12: somebody waits for {self._token} of {self._stream}, which is at {at}"
            assert self._node.reactor.seconds() < self._until, "I12: somebody waits for too long"

    def _reached(self, _: None) -> None:
        self.ended = True
        at = self._node.position(self._stream, self._writer)
        assert at >= self._token, f"I12: woken for {self._token} of {self._stream}, which is at {at}"

    def _late(self, failure: Failure) -> None:
        self.ended = True
        if self._node.stopping:
            failure.trap(StreamError)
            return
        failure.trap(PositionTimeoutError)
        assert self._node.reactor.seconds() >= self._until, "I12: given up too early"
        for word in (self._stream, self._writer, str(self._token), "links:"):
            assert word in failure.getErrorMessage()


class WorkerNode(Node):
    """A machine with a worker that follows ``streams`` (None: all) and has ``functions`` for some.

    Those named in ``raising`` and ``hanging`` do so.  Catching up brings at most ``page_rows`` rows a page.
    """

    def __init__(
        self, world: World, name: str, streams: Sequence[str] | None = None, functions: Sequence[str] = ()
    ) -> None:
        super().__init__(world, name)
        self.streams = streams
        self.functions = functions
        self.accounts: dict[tuple[StreamName, InstanceName], Account] = {}
        self.raising: set[str] = set()
        self.hanging: set[str] = set()
        self.hung: list[Deferred[None]] = []
        self.waits: list[Wait] = []
        self.pages_fail = self.pages_held = False
        self.page_rows = 1_000
        self.largest_page = 0  # that came, in bytes
        self.calls = 0  # of the application's functions

    @property
    def stopping(self) -> bool:
        """Whether the process was asked to end."""
        return self.worker.stopping

    def stop(self) -> None:
        """Ask the process to end; it is gone once it has."""
        worker = self.worker

        def stopped(_: object) -> None:
            if worker is self.worker and self.running:
                self.check()
                self.kill()

        worker.stop().addCallback(stopped).addErrback(self.world.broken)

    def wait_for(self, stream: str, writer: str, token: int, timeout: float) -> Wait:
        """Wait for a position as an application does."""
        wait = Wait(self, stream, writer, token, timeout)
        self.waits.append(wait)
        return wait

    def release_functions(self) -> None:
        """Let the application's functions work again."""
        self.raising.clear()
        self.hanging.clear()
        while self.hung:
            self.hung.pop(0).callback(None)

    def account(self, stream: StreamName, writer: InstanceName) -> Account:
        """Return what is durably here of one writer's stream."""
        if (stream, writer) not in self.accounts:
            self.accounts[stream, writer] = Account(self.world.masters[writer].ledgers[stream])
        return self.accounts[stream, writer]

    def position(self, stream: StreamName, writer: InstanceName) -> int:
        """Return how far one writer's stream is applied here."""
        if self.keeping(stream) is not Keeping.WATCHED:
            return self.account(stream, writer).position
        followed = self.worker._followers.get(stream)
        return followed.cursors[writer].position if followed and writer in followed.cursors else -1

    def keeping(self, stream: StreamName) -> Keeping:
        """Return what is kept here of a stream."""
        if stream in self.functions:
            return Keeping.APPLIED
        return Keeping.WATCHED if self.functions else Keeping.COPIED

    def follows(self, stream: str) -> bool:
        """Whether a stream is followed here."""
        return self.streams is None or stream in self.streams

    def lags(self) -> list[str]:
        """Return what is missing here of all that was announced, and what says that it does not work."""
        lags = [f"{self}: {each.endpoint} {each.state}" for each in self.worker._links if each.state != "following"]
        for master in self.world.masters.values():
            for stream in filter(self.follows, master.ledgers):
                if self.keeping(stream) is not Keeping.WATCHED:
                    lags += [f"{self} lacks {each} of {stream}" for each in self.account(stream, master.name).lacks()]
                at, announced = self.position(stream, master.name), master.announced(stream)
                if at != announced:
                    lags.append(f"{self} has {stream} of {master} at {at} of {announced}")
        return lags + [
            f"{self}: {each.definition.name} of {writer.instance} is {writer.state}: {writer.error}"
            for each in self.worker.stream_statuses()
            for writer in each.writers
            if writer.state != "live" or writer.error
        ]

    def check(self) -> None:
        """Look at what must be true at any time."""
        for wait in self.waits:
            wait.check()
        self.waits = [each for each in self.waits if not each.ended]
        for followed in self.worker._followers.values():
            assert followed.resets == 0, f"I3: {self} set {followed.name} back"
            for cursor in followed.cursors.values():
                limit = HELD_BYTES + self.largest_page
                assert cursor.held_bytes <= limit, f"I9: {self} holds {cursor.held_bytes} bytes of {limit}"

    def check_disk(self) -> None:
        """What is on the disk is what was counted."""
        for (stream, writer), account in self.accounts.items():
            if self.keeping(stream) is Keeping.COPIED:
                kept = finish(self.disk.facts(stream, writer, after=Token(0), upto=Token(10**9), limit=10**6))
                assert list(kept.facts) == account.facts
            assert finish(self.disk.positions(stream))[writer] == account.position

    # ---- inside

    def _start(self) -> None:
        worker = self.worker = Worker(
            connect=[f"tcp:{master}:{PORT}" for master in self.world.masters],
            server_name=SERVER_NAME,
            instance_name=self.name,
            database=self.store,
            streams=self.streams,
            reactor=self.reactor,
            limits=LIMITS,
            wall=self.reactor.seconds,
        )
        worker._sources = SimulatedSources(self)  # type: ignore[assignment]
        for stream in self.functions:
            worker.on(stream)(self._apply)
        starting = worker.start()
        starting.addErrback(lambda failure: self._not_started(worker, failure)).addErrback(self.world.broken)

    def _not_started(self, worker: Worker, failure: Failure) -> None:
        failure.trap(StreamError if worker.stopping else StoreError)
        if worker is self.worker and self.running and not worker.stopping:
            self.kill()  # twistd would exit

    def _killed(self) -> object:
        questions = [each for each in self.world.questions if each.by is self]
        for question in questions:
            self.world.questions.remove(question)
        dead = self.worker, self.hung, self.waits, questions
        self.hung, self.waits = [], []
        return dead

    async def _apply(self, facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        self.calls += 1
        if txn.stream in self.hanging:
            hang: Deferred[None] = Deferred()
            self.hung.append(hang)
            await hang
        await txn.executemany("note", [(txn.stream, txn.writer, fact) for fact in facts])
        if txn.stream in self.raising:
            raise ValueError("the application does not want this")

    def _landed(self, writes: Sequence[Write], notes: Sequence[Any]) -> None:
        (write,) = writes
        assert not write.reset, f"I3: {self} sets {write.stream} back to {write.upto}"
        assert all(note[:2] == (write.stream, write.writer) for note in notes), f"I4: mixed writers: {notes}"
        copied = self.keeping(write.stream) is Keeping.COPIED
        facts = write.facts if copied else [fact for _, _, fact in notes]
        self.account(write.stream, write.writer).move(write.upto, facts)
