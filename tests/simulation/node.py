"""A machine of the simulation: it has a name, a disk, and most of the time a process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from replication.net.protocol import Limits
from replication.storage.memory import MemoryStore
from replication.wire.grammar import InstanceName
from tests.simulation.disk import SimulatedStore, finish
from tests.simulation.network import SimulatedReactor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.seams import Write
    from tests.simulation.world import World

PORT = 9092
SERVER_NAME = "simulated"
LINE_LIMIT = 256  # bytes
LIMITS = Limits(line_limit=LINE_LIMIT, max_queued_bytes=1_000, max_queued_lines=25)


class Node(ABC):
    """What goes on while processes come and go; ``running`` says that one is there."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = InstanceName(name)
        self.disk = MemoryStore()
        finish(self.disk.open())
        self.running = False

    def __repr__(self) -> str:
        return self.name

    def start(self, *, held: bool = False) -> None:
        """Start a process, with a disk that is ``held`` or not."""
        self.running = True
        self.reactor = SimulatedReactor(self.world.network, self.name)
        self.store = SimulatedStore(self.disk, self._landed)
        self.store.held = held
        self._start()

    def kill(self, *, power: bool = False) -> None:
        """End the process, whatever it is doing; if ``power`` is lost, nobody hears of it."""
        self.running = False
        self.reactor.kill(power=power)
        # Its coroutines may not be closed as garbage while the test runs: in a dead process nothing goes on.
        self.world.graveyard.append((self.store, [*self.store.waiting], self._killed()))
        self.store.killed = True
        self.store.waiting.clear()

    @property
    @abstractmethod
    def stopping(self) -> bool:
        """Whether the process was asked to end."""

    @abstractmethod
    def stop(self) -> None:
        """Ask the process to end; it is gone once it has."""

    @abstractmethod
    def _start(self) -> None:
        """Start the product."""

    @abstractmethod
    def _killed(self) -> object:
        """Forget what belonged to the process, and return it."""

    @abstractmethod
    def _landed(self, writes: Sequence[Write], notes: Sequence[Any]) -> None:
        """Hear of a commit that has reached the disk."""
