"""A host of the simulation: it has a name, a disk, and most of the time a process."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

from twisted.python.failure import Failure

from replication.bench.simulation.disk import SimulatedStore, finish
from replication.bench.simulation.network import SimulatedReactor
from replication.net.protocol import Limits
from replication.storage.memory import MemoryStore
from replication.storage.receipts import ReceiptClock
from replication.wire.grammar import InstanceName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.bench.simulation.world import World
    from replication.streams.interfaces import Write

PORT = 9092
SERVER_NAME = "simulated"
LINE_LIMIT = 256  # bytes
WALL_STEADY: Final = 5.0  # seconds between two jumps of a wall clock
WALL_JUMPS: Final = (0.0, 0.0, 0.3, -0.3, 3_600.0, -3_600.0, 1e8, -1e8)  # seconds from the right time
RIGHT_TIME: Final = 1.7e9  # of the wall at the start, in seconds since 1970
LIMITS = Limits(line_limit=LINE_LIMIT, max_queued_bytes=1_000, max_queued_lines=25)


class Saved(NamedTuple):
    """The content of a disk at one time, and what the host had recorded about it then."""

    disk: bytes
    recorded: Any


class Host(ABC):
    """A host, which outlives its processes; ``running`` is set while it has one."""

    def __init__(self, world: World, name: str, disk: MemoryStore | None = None) -> None:
        self.world = world
        self.name = InstanceName(name)
        self._wall_period = -1  # in which the wall clock has its present jump
        self._wall_jump = 0.0
        self.disk = disk or MemoryStore(ReceiptClock(self.wall, lambda: world.network.clock.now))
        finish(self.disk.open())
        self.running = False
        self.backup: Saved | None = None
        self._synced: Saved | None = None  # what is left after a power loss; None: all of the disk
        self.restored = False  # whether its disk was ever replaced by a backup

    def __repr__(self) -> str:
        return self.name

    def start(self, *, held: bool = False) -> None:
        """Start a process; while ``held``, operations of its disk wait."""
        self.running = True
        self.reactor = SimulatedReactor(self.world.network, self.name)
        self.store = SimulatedStore(self.disk, self._record)
        self.store.held = held
        self.store.before_asynchronous = self._keep_synced
        self.store.on_synced = self._forget_synced
        self._start()

    def wall(self) -> float:
        """Return what the wall clock shows, in seconds; it differs from those of other hosts, and jumps."""
        now = self.world.network.clock.now
        period = int(now / WALL_STEADY)
        if period != self._wall_period:
            self._wall_period = period
            drawn = crc32(f"{self.world.seed} {self.name} {period}".encode())
            self._wall_jump = WALL_JUMPS[drawn % len(WALL_JUMPS)]
        return RIGHT_TIME + now + self._wall_jump

    def kill(self, *, power: bool = False) -> None:
        """Kill the process; with ``power`` lost, its peers are not notified, and unsynced commits are undone."""
        self.running = False
        self.reactor.kill(power=power)
        # Keep its coroutines: if they were collected as garbage, they would run on in a dead process.
        self.world.remains.append((self.store, [*self.store.waiting], self._killed()))
        self.store.killed = True
        self.store.waiting.clear()
        if power and self._synced is not None:
            self._put_back(self._synced)

    def save(self) -> None:
        """Take a backup of the disk."""
        disk = self._saved()
        for each in self.sharing:
            each.backup = Saved(disk, each.recorded())

    def restore(self) -> None:
        """Replace the disk by the backup, if there is one: kill the processes that have it, and start this one."""
        if self.backup is None:
            return
        for each in self.sharing:
            if each.running:
                each.kill()
        for each in self.sharing:
            if each.backup is not None:
                each._put_back(each.backup)
            each.restored = True
        self.start()

    @property
    def sharing(self) -> Sequence[Host]:
        """The hosts that have this disk; this host is the first."""
        return [self, *(each for each in self.world.hosts if each.disk is self.disk and each is not self)]

    @abstractmethod
    def recorded(self) -> object:
        """Return what ``disk_restored`` needs."""

    @abstractmethod
    def disk_restored(self, recorded: Any) -> None:
        """Note what the disk has lost, given what was recorded before."""

    def _put_back(self, saved: Saved) -> None:
        vars(self.disk).update(pickle.loads(saved.disk))  # noqa: S301 (its own)
        self._synced = None
        self.disk_restored(saved.recorded)

    def _keep_synced(self) -> None:
        if self._synced is None:
            self._synced = Saved(self._saved(), self.recorded())

    def _forget_synced(self) -> None:
        self._synced = None

    def _saved(self) -> bytes:
        return pickle.dumps({name: kept for name, kept in vars(self.disk).items() if isinstance(kept, dict)})

    def _record(self, writes: Sequence[Write], notes: Sequence[Any]) -> None:
        try:
            self._landed(writes, notes)
        except AssertionError:
            self.world.broken(Failure())
            raise

    @property
    @abstractmethod
    def stopping(self) -> bool:
        """Whether the process is stopping."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the process; it is killed when it has stopped."""

    @abstractmethod
    def _start(self) -> None:
        """Start a master or worker."""

    @abstractmethod
    def _killed(self) -> object:
        """Remove the objects of the process, and return them."""

    @abstractmethod
    def _landed(self, writes: Sequence[Write], notes: Sequence[Any]) -> None:
        """Record a commit that has reached the disk."""
