"""A world of masters and workers in one thread; the test controls network, clock and disks.

``trace`` lists the steps of the test and the lines on the wire.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Self

from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.error import ConnectionLost
from twisted.logger import LogLevel, globalLogPublisher

import replication.follower.relay
import replication.follower.reports
import replication.net.client
import replication.writer.epochs
import replication.writer.known_followers
import replication.writer.publisher
import replication.writer.retention
from replication.bench.simulation.disk import SharedDisk
from replication.bench.simulation.following import APPLY_ROWS, HELD_BYTES, WorkerHost
from replication.bench.simulation.host import LIMITS
from replication.bench.simulation.invariants import WireCheck
from replication.bench.simulation.network import Network
from replication.bench.simulation.segments import SimulatedSegments
from replication.bench.simulation.writing import MasterHost
from replication.follower.relay import RelayedCursor
from replication.streams.cursor import Cursor
from replication.streams.reorder_buffer import ReorderBuffer
from replication.wire.grammar import InstanceName

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from twisted.logger import LogEvent
    from twisted.python.failure import Failure

    from replication.bench.simulation.host import Host
    from replication.bench.simulation.network import Connection
    from replication.bench.simulation.sources import PageRequest

# Seconds.  A dead link is noticed after 15 and closed after 15 more; a retry waits up to 10.
HEALED_WITHIN = 45.0

MASTERS: Mapping[str, Sequence[str]] = {"master": ("a", "b")}
# For each worker: the streams that it follows (None: all) and those with a function.
WORKERS: Mapping[str, tuple[Sequence[str] | None, Sequence[str]]] = {
    "copy": (None, ()),
    "apply": (None, ("a", "caches")),
    "few": (("b",), ()),
}
NO_RELAYS: Mapping[str, str] = {}


class _Secrets:
    """The module ``secrets``, with random numbers from the seed."""

    @staticmethod
    def token_hex(size: int) -> str:
        return random.randbytes(size).hex()


def _endpoint_of(reactor: Any, text: str) -> TCP4ClientEndpoint:
    """Return what Twisted's parser returns, in less time: all endpoints have one form here."""
    _, host, port = text.split(":")
    return TCP4ClientEndpoint(reactor, host, int(port))


# Small limits of memory, which are reached soon.
_REPLACED = (
    (replication.follower.relay, "Cursor", partial(Cursor, max_held_bytes=HELD_BYTES, max_apply_rows=APPLY_ROWS)),
    (
        replication.follower.relay,
        "RelayedCursor",
        partial(RelayedCursor, max_held_bytes=HELD_BYTES, max_apply_rows=APPLY_ROWS),
    ),
    (replication.writer.publisher, "ReorderBuffer", partial(ReorderBuffer, max_bytes=HELD_BYTES)),
    (replication.writer.epochs, "secrets", _Secrets),
    (replication.net.client, "client_endpoint", _endpoint_of),
)


# A retention deletes a few facts at once, and followers report their positions often.
_SOONER = (
    (replication.writer.retention, "INTERVAL", 1.0),
    (replication.writer.retention, "SLICE_ROWS", 2),
    (replication.writer.known_followers, "SOON", 2.0),
    (replication.follower.reports, "CHECK_INTERVAL", 0.5),
    (replication.follower.reports, "RETRY_AFTER", 1.0),
)


class World:
    """Masters and workers; the context starts them all, with small limits of memory."""

    def __init__(
        self,
        masters: Mapping[str, Sequence[str]] = MASTERS,
        workers: Mapping[str, tuple[Sequence[str] | None, Sequence[str]]] = WORKERS,
        relays: Mapping[str, str] = NO_RELAYS,  # for each worker that follows a relay, its name
        without_copies: Sequence[str] = (),  # workers that store no copies
        linear: Sequence[str] = (),  # streams of all masters, which share a database; functions need linear order
        segments: Sequence[str] = (),  # workers whose first catch-up source is a folder of segments
        seed: int = 0,  # of what the processes draw
        *,
        restores: bool = False,  # whether masters, too, are restored from backups
        shared: bool = False,  # whether all masters share a database, without linear order
        retention: str = "",  # of the masters; workers then leave out what is gone, and log that
        forces: bool = False,  # whether the retention deletes also what followers lack
    ) -> None:
        self.seed = seed
        self.retention, self.forces = retention, forces
        self.restores, self.shared = restores, shared
        self.trace: list[str] = []
        self.failures: list[str] = []  # logged bugs, and failed checks in callbacks
        self.remains: list[object] = []  # objects of killed processes
        self.page_requests: list[PageRequest] = []
        self.network = Network(high_water=300, window=300)
        self.network.on_connected = self._watch
        disk = SharedDisk() if linear or shared else None
        self.masters = {InstanceName(name): MasterHost(self, name, streams, disk) for name, streams in masters.items()}
        self.relays, self.without_copies, self.linear = relays, without_copies, linear
        self.segments = SimulatedSegments() if segments else None
        self.read_segments = segments
        self.workers = {name: WorkerHost(self, name, *what) for name, what in workers.items()}
        self._watches: list[WireCheck] = []
        self._serial = count(1)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.callback(random.setstate, random.getstate())
        random.seed(self.seed)
        for module, name, value in (*_REPLACED, *(_SOONER if self.retention else ())):
            self._stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        globalLogPublisher.addObserver(self._logged)  # type: ignore[arg-type]
        self._stack.callback(globalLogPublisher.removeObserver, self._logged)  # type: ignore[arg-type]
        for host in self.hosts:
            host.start()
        self.turn()
        if self.restores:  # backups of a master have facts of each stream, or it would be taken for another one
            for master in self.masters.values():
                for stream in master.streams:
                    master.write(stream, self.rows(1), ["x"]).outcome.callback(None)
            self.turn()
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            if host.running:
                host.kill()
        self._stack.close()

    @property
    def hosts(self) -> list[Host]:
        """All hosts, masters first."""
        return [*self.masters.values(), *self.workers.values()]

    # ---- for tests

    def row(self, size: int = 0) -> list[object]:
        """Return a unique row; with ``size`` 240 or more it does not fit in a line."""
        return [next(self._serial), "x" * size]

    def rows(self, *counts: int, size: int = 0) -> list[list[list[object]]]:
        """Return facts with these numbers of rows."""
        return [[self.row(size) for _ in range(each)] for each in counts]

    def turn(self) -> None:
        """Do everything that is due now, and check the invariants."""
        self.network.turn()
        self.check()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        for _ in self.network.passing(seconds):
            self.check()

    def heal(self) -> None:
        """End every fault: processes, links, disks and functions work again, and open blocks commit."""
        self.trace.append("---- heal")
        self.network.heal()
        for worker in self.workers.values():
            worker.pages_held = worker.pages_fail = False
        for host in self.hosts:
            host.store.release_all()
        for worker in self.workers.values():
            worker.release_functions()
        self.turn()
        for request in list(self.page_requests):
            request.deliver_answer()
        for master in self.masters.values():
            for job in [each for each in master.jobs if each.open]:
                job.outcome.callback(None)
        for connection in self.network.connections:
            if connection.dead:
                self._give_up(connection)
        for host in self.hosts:
            if host.running and host.stopping:
                host.kill()  # it had time to stop
            if not host.running:
                host.start()

    def converge(self, within: float = HEALED_WITHIN) -> float:
        """Let time pass until all followers are complete, at most ``within`` seconds (I10); return the seconds."""
        since = self.network.clock.now
        for _ in self.network.passing(within):
            self.check()
            if not any(self.lags()):
                break
        else:
            raise AssertionError(f"I10: after {within} s: {[*self.lags()]}")
        for worker in self.workers.values():
            worker.check_disk()
            for order in worker.orders.values():
                order.excused.clear()
        return self.network.clock.now - since

    def lags(self) -> Iterator[str]:
        """Yield what is not complete or not working; first what is cheap to see."""
        for each in self.network.connections:
            if each.dead:
                yield f"connection {each.number} is dead"
        for worker in self.workers.values():
            yield from worker.lags()
        for master in self.masters.values():
            for status in master.master.served.stream_statuses():
                (writer,) = [each for each in status.writers if each.instance == master.name]
                if status.open_count or writer.published != writer.position:
                    yield f"{master} has {status} open"

    def check_quiet(self, seconds: float = 30.0) -> None:
        """I11: while nothing is written, only PING is sent."""
        if self.shared:
            self.advance(2.0)  # the position of an idle writer follows those of the others
        before = self._lines_sent()
        self.advance(seconds)
        assert self._lines_sent() == before, "I11: lines other than PING were sent"

    def check(self) -> None:
        """Check what must be true at any time."""
        assert not self.failures, "\n".join(self.failures)
        for worker in self.workers.values():
            if worker.running:
                worker.check()
        for connection in self.network.connections:
            outbox = connection.server.protocol._send_buffer
            assert outbox.queued_bytes <= LIMITS.max_queued_bytes, "I9"
            assert outbox.queued_lines <= LIMITS.max_queued_lines, "I9"

    def broken(self, failure: Failure) -> None:
        """Record a failed check in a callback, which Twisted would only log."""
        self.failures.append(failure.getTraceback())

    # ---- inside

    def _watch(self, connection: Connection) -> None:
        client, server = connection.client.reactor.host, connection.server.reactor.host
        histories = {name: master.histories for name, master in self.masters.items()}
        stale = self.restores and server in self.workers
        watch = WireCheck(histories, self.trace, f"{connection.number} {server} -> {client}:", stale=stale)
        self._watches.append(watch)
        connection.server.on_write = watch.read

    def _give_up(self, connection: Connection) -> None:
        """End a dead connection as a kernel does, for an end that has no timeout (docs/protocol/connection.md B2).

        An end has no timeout before it has received PING; a worker has one until it has received SERVER.
        """
        for pipe, first in ((connection.up, b""), (connection.down, b"SERVER")):
            received = pipe.delivered[: pipe.delivered.rfind(b"\n") + 1]
            if received.startswith(first) and b"PING" not in received:
                pipe.target.lose(ConnectionLost())

    def _lines_sent(self) -> int:
        return sum(each.lines for each in self._watches)

    def _logged(self, event: LogEvent) -> None:
        if event["log_format"].startswith("{stream}: facts of {writer} after {after} up to {upto} are gone"):
            for worker in self.workers.values():
                if event["log_source"] is worker.worker._followed.missed:
                    worker.leaves_out(*(event[each] for each in ("stream", "writer", "after", "upto")))
        if event["log_format"].startswith("{stream} does not wait for {writers}"):
            for worker in self.workers.values():
                if event["log_source"] in worker.worker._followed:
                    worker.orders[event["stream"]].excused |= set(event["writers"].split(", "))
        ours = event["log_namespace"].startswith("replication.")
        if ours and event["log_level"] is LogLevel.critical and "application's function" not in event["log_format"]:
            failure = event.get("log_failure")
            self.failures.append(event["log_format"] + ": " + (failure.getTraceback() if failure else ""))
