"""What the single cases share: a small world, and short words for what is done to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from replication.wire.grammar import InstanceName, StreamName
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.following import WorkerNode
    from tests.simulation.network import Connection
    from tests.simulation.writing import MasterNode

A, B, CACHES = map(StreamName, ("a", "b", "caches"))
MASTER, SECOND = map(InstanceName, ("master", "second"))
SOON = 5.0  # seconds: I10, where nothing has to be found out by waiting for it
TOO_LONG = 240  # a row that is so full does not fit into a line


class Scenario(SynchronousTestCase):
    """A master with streams ``a`` and ``b``; workers: ``copy`` all, ``apply`` a and caches, copy a ``few``."""

    def setUp(self) -> None:
        self.world = self.make_world()
        self.master = self.world.masters[MASTER]

    def make_world(self, **what: Any) -> World:
        world = World(**what).__enter__()
        self.addCleanup(world.__exit__)
        return world

    @property
    def copy(self) -> WorkerNode:
        return self.world.workers["copy"]

    @property
    def apply(self) -> WorkerNode:
        return self.world.workers["apply"]

    @property
    def few(self) -> WorkerNode:
        return self.world.workers["few"]

    def append(self, *rows: int, stream: str = "a", size: int = 0) -> None:
        """Append facts of so many rows."""
        self.master.append(stream, self.world.rows(*rows, size=size))
        self.world.turn()

    def wire(self, worker: WorkerNode, master: MasterNode | None = None) -> Connection:
        """Return the worker's newest connection."""
        return self.world.network.between(worker.name, (master or self.master).name)[-1]

    def cut(self, worker: WorkerNode) -> None:
        """Lose the worker's connection; both ends notice."""
        wire = self.wire(worker)
        wire.cut([wire.client, wire.server])

    def told(self, worker: WorkerNode, word: str = "") -> list[str]:
        """Return the lines of that word that the worker was sent, over all its connections."""
        lines = [line.partition(f" -> {worker.name}: ")[2] for line in self.world.trace]
        return [line for line in lines if line and line.startswith(word)]

    def position(self, worker: WorkerNode, stream: StreamName = A, writer: InstanceName = MASTER) -> int:
        return worker.position(stream, writer)

    def assert_well(self, within: float = SOON) -> None:
        """Everybody gets everything, without anybody's help."""
        self.world.converge(within)
        self.world.check_quiet()
