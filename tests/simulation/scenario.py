"""The base of single test cases: a small world, and short methods for what happens in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.simulation.world import World
from replication.wire.grammar import InstanceName, StreamName

if TYPE_CHECKING:
    from replication.bench.simulation.following import WorkerHost
    from replication.bench.simulation.network import Connection
    from replication.bench.simulation.writing import MasterHost

A, B, CACHES = map(StreamName, ("a", "b", "caches"))
MASTER, SECOND = map(InstanceName, ("master", "second"))
SOON = 5.0  # seconds (I10) if no timeout has to pass first
TOO_LONG = 240  # the size of a row that does not fit in a line


class Scenario(SynchronousTestCase):
    """A master of streams ``a`` and ``b``; workers ``copy`` (all), ``apply`` (a, caches) and ``few`` (copies b)."""

    def setUp(self) -> None:
        self.world = self.make_world()
        self.master = self.world.masters[MASTER]

    def make_world(self, **what: Any) -> World:
        world = World(**what).__enter__()
        self.addCleanup(world.__exit__)
        return world

    @property
    def copy(self) -> WorkerHost:
        return self.world.workers["copy"]

    @property
    def apply(self) -> WorkerHost:
        return self.world.workers["apply"]

    @property
    def few(self) -> WorkerHost:
        return self.world.workers["few"]

    def append(self, *rows: int, stream: str = "a", size: int = 0) -> None:
        """Append facts with these numbers of rows."""
        self.master.append(stream, self.world.rows(*rows, size=size))
        self.world.turn()

    def wire(self, worker: WorkerHost, master: MasterHost | None = None) -> Connection:
        """Return the worker's newest connection."""
        return self.world.network.between(worker.name, (master or self.master).name)[-1]

    def cut(self, worker: WorkerHost) -> None:
        """Cut the worker's connection; both ends notice."""
        wire = self.wire(worker)
        wire.cut([wire.client, wire.server])

    def sent_to(self, worker: WorkerHost, word: str = "") -> list[str]:
        """Return the lines that were sent to the worker, over all connections, and begin with ``word``."""
        lines = [line.partition(f" -> {worker.name}: ")[2] for line in self.world.trace]
        return [line for line in lines if line and line.startswith(word)]

    def position(self, worker: WorkerHost, stream: StreamName = A, writer: InstanceName = MASTER) -> int:
        return worker.position(stream, writer)

    def assert_well(self, within: float = SOON) -> None:
        """Check that every follower catches up without help, and that the world is quiet then."""
        self.world.converge(within)
        self.world.check_quiet()
