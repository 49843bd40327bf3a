"""A host with a worker, and its calls of ``wait_for``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from twisted.internet.defer import Deferred

from replication.bench.simulation.disk import finish
from replication.bench.simulation.host import LIMITS, PORT, SERVER_NAME, Host
from replication.bench.simulation.invariants import FollowerHistory, LinearOrder
from replication.bench.simulation.sources import SimulatedSources
from replication.errors import (
    PositionTimeoutError,
    StoreError,
    StreamError,
)
from replication.follower.stream import FollowMode
from replication.follower.worker import Worker
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twisted.python.failure import Failure

    from replication.bench.simulation.world import World
    from replication.follower.application import ApplyTransaction
    from replication.streams.facts import Fact
    from replication.streams.interfaces import Write

HELD_BYTES = 2_000  # that a cursor may hold, besides one page
APPLY_ROWS = 4


class Wait:
    """One call of ``wait_for``."""

    def __init__(self, host: WorkerHost, stream: str, writer: str, token: int, timeout: float) -> None:
        self.ended = False
        self._host = host
        self._stream = StreamName(stream)
        self._writer = InstanceName(writer)
        self._token = token
        self._until = host.reactor.seconds() + timeout
        self.waiting = host.worker.wait_for(stream, writer, token, timeout)
        self.waiting.addCallbacks(self._reached, self._late).addErrback(host.world.broken)

    def check(self) -> None:
        """I12: no call waits for a position that is reached and confirmed, nor longer than its timeout."""
        follower = self._host.worker._followed._followers.get(self._stream)
        if not self.ended and follower is not None and follower._positions is not None:
            at = self._host.position(self._stream, self._writer)
            cursor = follower.cursors.get(self._writer)
            confirmed = cursor is None or cursor.confirmed  # else the history is compared, or facts are to be undone
            assert at < self._token or not confirmed, (
                f"I12: a call waits for {self._token} of {self._stream}, which is at {at}"
            )
            assert self._host.reactor.seconds() < self._until, "I12: a call waits too long"

    def _reached(self, _: None) -> None:
        self.ended = True
        at = self._host.position(self._stream, self._writer)
        assert at >= self._token, f"I12: fired for {self._token} of {self._stream}, which is at {at}"

    def _late(self, failure: Failure) -> None:
        self.ended = True
        if self._host.stopping:
            failure.trap(StreamError)
            return
        failure.trap(PositionTimeoutError)
        assert self._host.reactor.seconds() >= self._until, "I12: timed out too early"
        for word in (self._stream, self._writer, str(self._token), "connections:"):
            assert word in failure.getErrorMessage()


class _Recorded(NamedTuple):
    """What a worker has applied: positions and facts by stream and writer, and the last token of each linear stream."""

    applied: dict[tuple[StreamName, InstanceName], tuple[Token, list[Fact]]]
    orders: dict[StreamName, Token]


class WorkerHost(Host):
    """A host with a worker of ``streams`` (None: all) and with ``functions`` for some of them.

    The functions of ``raising`` raise, those of ``hanging`` hang.  A page has at most ``page_rows`` rows.
    """

    def __init__(
        self, world: World, name: str, streams: Sequence[str] | None = None, functions: Sequence[str] = ()
    ) -> None:
        super().__init__(world, name)
        self.streams = streams
        self.functions = functions
        self.relay = world.relays.get(name)  # the name of the relay that it follows
        self.relays = name in world.relays.values()  # whether it is one
        self.applied: dict[tuple[StreamName, InstanceName], FollowerHistory] = {}
        self.orders = {StreamName(each): LinearOrder(f"{name}/{each}") for each in functions if each in world.linear}
        self.raising: set[str] = set()
        self.hanging: set[str] = set()
        self.hung: list[Deferred[None]] = []
        self.waits: list[Wait] = []
        self.pages_fail = self.pages_held = False
        self.page_rows = 1_000
        self.largest_page = 0  # received, in bytes
        self.calls = 0  # of the application's functions
        self.reported = False  # whether a report of its positions was ever answered

    @property
    def stopping(self) -> bool:
        """Whether the process is stopping."""
        return self.worker._lifetime.ended

    def stop(self) -> None:
        """Stop the process; it is killed when it has stopped."""
        worker = self.worker

        def stopped(_: object) -> None:
            if worker is self.worker and self.running:
                self.check()
                self.kill()

        worker.stop().addCallback(stopped).addErrback(self.world.broken)

    def wait_for(self, stream: str, writer: str, token: int, timeout: float) -> Wait:
        """Call ``wait_for`` as an application does."""
        wait = Wait(self, stream, writer, token, timeout)
        self.waits.append(wait)
        return wait

    def release_functions(self) -> None:
        """Let the application's functions work again."""
        self.raising.clear()
        self.hanging.clear()
        while self.hung:
            self.hung.pop(0).callback(None)

    def applied_by(self, stream: StreamName, writer: InstanceName) -> FollowerHistory:
        """Return what is durably applied of one writer's stream."""
        if (stream, writer) not in self.applied:
            self.applied[stream, writer] = FollowerHistory(
                self.world.masters[writer].histories[stream], restores=self.world.restores
            )
        return self.applied[stream, writer]

    def position(self, stream: StreamName, writer: InstanceName) -> int:
        """Return the applied position of one writer's stream."""
        if self.mode(stream) is not FollowMode.POSITION_ONLY:
            return self.applied_by(stream, writer).position
        followed = self.worker._followed._followers.get(stream)
        return followed.cursors[writer].position if followed and writer in followed.cursors else -1

    def mode(self, stream: StreamName) -> FollowMode:
        """Return how a stream is followed."""
        if stream in self.functions:
            return FollowMode.APPLIED
        stores = not self.functions and self.name not in self.world.without_copies
        return FollowMode.COPIED if stores else FollowMode.POSITION_ONLY

    def stores(self, stream: StreamName) -> bool:
        """Whether the worker stores a position of a stream."""
        return self.follows(stream) and self.mode(stream) is not FollowMode.POSITION_ONLY

    def leaves_out(self, stream: StreamName, writer: InstanceName, after: Token, upto: Token) -> None:
        """Note that facts are left out, which the writer has deleted; it is logged as an error."""
        if self.stores(stream):
            self.applied_by(stream, writer).left_out.append((after, upto))

    def follows(self, stream: str) -> bool:
        """Whether the worker follows a stream."""
        return self.streams is None or stream in self.streams

    def lags(self) -> Iterator[str]:
        """Yield the states that are not healthy, and the published facts that are missing."""
        for client in self.worker._clients:
            if client.state != "following":
                yield f"{self}: {client.endpoint} {client.state}"
        for master in self.world.masters.values():
            for stream in filter(self.follows, master.histories):
                at, published = self.position(stream, master.name), master.published(stream)
                if at != published:
                    yield f"{self} has {stream} of {master} at {at} of {published}"
                if self.mode(stream) is not FollowMode.POSITION_ONLY:
                    for fact in self.applied_by(stream, master.name).lacks():
                        yield f"{self} lacks {fact} of {stream}"
        for followed in self.worker._followed:
            for status in map(followed.status, followed.cursors):
                if status.state != "live" or status.error:
                    yield f"{self}: {followed.name} of {status.instance} is {status.state}: {status.error}"

    def check(self) -> None:
        """Check what must be true at any time."""
        if self.waits:
            for wait in self.waits:
                wait.check()
            self.waits = [each for each in self.waits if not each.ended]
        limit = HELD_BYTES + self.largest_page
        for followed in self.worker._followed._followers.values():
            assert followed.resets == 0 or self.world.restores, f"I3: {self} set {followed.name} back"
            for cursor in followed.cursors.values():
                assert cursor.held_bytes <= limit, f"I9: {self} holds {cursor.held_bytes} bytes of {limit}"

    def check_disk(self) -> None:
        """Check that the disk holds what was recorded."""
        for (stream, writer), applied_by in self.applied.items():
            if self.mode(stream) is FollowMode.COPIED:
                gone = finish(self.disk.gone(stream)).get(writer, Token(0))
                kept = finish(self.disk.facts(stream, writer, after=gone, upto=Token(10**9), limit=10**6))
                assert list(kept.facts) == [each for each in applied_by.facts if each.token > gone]
            assert finish(self.disk.positions(stream))[writer] == applied_by.position
            applied_by.check()

    # ---- inside

    def _start(self) -> None:
        worker = self.worker = Worker(
            connect=[f"tcp:{each}:{PORT}" for each in ([self.relay] if self.relay else self.world.masters)],
            server_name=SERVER_NAME,
            instance_name=self.name,
            database=self.store,
            streams=self.streams,
            reactor=self.reactor,
            limits=LIMITS,
            wall=self.wall,
            copy=False if self.name in self.world.without_copies else None,
            relay=self.relays,
            skip_gone=bool(self.world.retention),
        )
        if self.relays:
            self.reactor.listen(PORT, worker.factory())
        worker._followed.missed.sources = SimulatedSources(self)  # type: ignore[assignment]
        for stream in self.functions:
            worker.on(stream, linear=stream in self.orders)(self._apply)
            if self.world.restores:
                worker.on_reset(stream)(self._undo)
        starting = worker.start()
        starting.addErrback(lambda failure: self._not_started(worker, failure)).addErrback(self.world.broken)

    def _not_started(self, worker: Worker, failure: Failure) -> None:
        failure.trap(StreamError if worker._lifetime.ended else StoreError)
        if worker is self.worker and self.running and not worker._lifetime.ended:
            self.kill()  # twistd would exit

    def _killed(self) -> object:
        page_requests = [each for each in self.world.page_requests if each.by is self]
        for request in page_requests:
            self.world.page_requests.remove(request)
        for request in [each for each in self.world.page_requests if each.asked is self]:
            request.fail("the connection is gone")
        dead = self.worker, self.hung, self.waits, page_requests
        self.hung, self.waits = [], []
        return dead

    def recorded(self) -> _Recorded:
        """Return what has been applied, and the order of it."""
        applied = {key: (each.position, [*each.facts]) for key, each in self.applied.items()}
        return _Recorded(applied, {stream: order.last for stream, order in self.orders.items()})

    def disk_restored(self, recorded: _Recorded) -> None:
        """Go back to what had been applied before."""
        for key, each in self.applied.items():
            position, facts = recorded.applied.get(key, (Token(0), []))
            each.position, each.facts = position, [*facts]
        for stream, order in self.orders.items():
            order.last = recorded.orders[stream]

    def _undo(self, *_: object) -> None:
        """Go back as the application does: what it has applied above is removed with the position."""

    async def _apply(self, facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        self.calls += 1
        if txn.stream in self.hanging:
            hang: Deferred[None] = Deferred()
            self.hung.append(hang)
            await hang
        raises = txn.stream in self.raising
        noted = facts[1:] if raises else facts  # not even all of them
        await txn.executemany("note", [(txn.stream, txn.writer_of(fact), fact) for fact in noted])
        if raises:
            raise ValueError("a bug of the application")

    def _landed(self, writes: Sequence[Write], notes: Sequence[Any]) -> None:
        (stream,) = {write.stream for write in writes}
        assert len(writes) == 1 or stream in self.orders, f"{self} commits {stream} of several writers: {writes}"
        sources = {(stream, write.writer) for write in writes}
        assert all(note[:2] in sources for note in notes), f"I4: other writers: {notes}"
        if stream in self.orders:
            self.orders[stream].apply([note[1:] for note in notes])
        for write in writes:
            if write.reset:
                self.applied_by(stream, write.writer).go_back(write.upto)
                continue
            copied = self.mode(stream) is FollowMode.COPIED
            facts = write.facts if copied else [fact for _, writer, fact in notes if writer == write.writer]
            self.applied_by(stream, write.writer).move(write.upto, facts)
