"""Former writers: the names that have facts in the database, and do not run.

A follower finds a writer by its POSITION.  A writer that was renamed or removed sends none, so its facts would never be
fetched.  So the processes that write its streams publish its position (docs/protocol/publishing.md D4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.session.encoder import encode_position
from replication.streams.definitions import CACHES, StreamDefinition
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.publisher import NO_WRITER

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from twisted.internet.interfaces import IReactorTime

    from replication.net.broadcast import Broadcast
    from replication.streams.interfaces import IStreamStore
    from replication.writer.stream import StreamWriter

# Seconds without a claim after which a writer that ran has ended: a restart of the server ends claims, too, and a
# process makes its claim again within two polls.
ENDED_AFTER: Final = 5.0


class FormerWriters:
    """The former writers of the streams that this process may write.

    Where the definition lists a stream's writers, every other instance name is a former writer while it does not run.
    Where it lists none, a writer that is absent at start counts as a former writer until it has come back.
    """

    def __init__(
        self,
        instance_name: InstanceName,
        store: IStreamStore,
        streams: Mapping[StreamName, StreamWriter],
        broadcast: Broadcast,
        clock: IReactorTime,
    ) -> None:
        self._instance_name = instance_name
        self._store = store
        self._streams = streams
        self._broadcast = broadcast
        self._clock = clock
        self._positions: dict[StreamName, Mapping[InstanceName, Token]] = {}
        self._absent: dict[StreamName, set[InstanceName]] = {}  # former writers that may come back
        self._removed: dict[StreamName, set[InstanceName]] = {}  # writers that the definition does not list
        self._running: dict[StreamName, set[InstanceName]] = {}  # the removed writers that ran at the last refresh
        self._ran: set[InstanceName] = set()  # writers that ran since the start
        self._missing: dict[InstanceName, float] = {}  # those that do not run now, with the time when that was found
        self._moved: dict[tuple[StreamName, InstanceName], Token] = {}  # where each former writer was at the last poll

    async def find(self, definition: StreamDefinition, positions: Mapping[InstanceName, Token]) -> None:
        """Find the former writers of a stream among the writers that have ``positions``."""
        name, others = definition.name, positions.keys() - {self._instance_name, NO_WRITER}
        if definition.in_tables:
            return
        if definition.writers:
            self._removed[name] = {each for each in others if not definition.written_by(each)}
            self._running[name] = await self._read(name, self._removed[name])
            return
        if not others or definition.in_memory:
            return
        others -= {*await self._store.claimed_elsewhere(others)}
        gone = await self._store.gone(name)
        pages = {
            writer: await self._store.facts(
                name, writer, after=gone.get(writer, Token(0)), upto=positions[writer], limit=1
            )
            for writer in others
        }
        self._absent[name] = {writer for writer, page in pages.items() if page.facts or writer in gone}

    def note(self, definition: StreamDefinition, found: Collection[InstanceName]) -> None:
        """Note writers that the definition does not list, and that began after the start of this process."""
        removed = self._removed.get(definition.name)
        if removed is not None:
            new = {each for each in found if each != NO_WRITER and not definition.written_by(each)} - removed
            removed |= new
            self._running[definition.name] |= new
            self._ran |= new

    def of(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return the position of each former writer of a stream, as the last refresh found it."""
        return self._positions.get(stream, {})

    async def refresh(self) -> None:
        """Read which former writers run now: stop or begin to publish their positions.

        A follower that is connected to both processes would otherwise receive those positions out of order.
        """
        for stream, absent in self._absent.items():
            absent.difference_update(await self._read(stream, absent))
        for stream, removed in self._removed.items():
            self._running[stream] = await self._read(stream, removed)

    async def poll(self) -> None:
        """Publish the positions of removed writers that ended since the last poll, and raise those of all former ones.

        Without the first, followers may lack facts.  Linear order waits for every position, and so for the second.
        """
        running = {stream: {*writers} for stream, writers in self._running.items()}
        reached = {  # read before the refresh, which reads the writers that run
            name: writer.published
            for name, writer in self._streams.items()
            if name != CACHES and writer.outgoing.may_write
        }
        if not any(running.values()) and not self._are_behind(reached):
            return
        await self.refresh()
        for stream, writers in running.items():
            for writer, position in self.of(stream).items():
                if writer in writers:
                    self._broadcast.publish(stream, encode_position(stream, writer, position, position))
        if self._are_behind(reached):
            await self._raise_to(reached)

    # ---- inside

    def _are_behind(self, reached: Mapping[StreamName, Token]) -> bool:
        """Whether the position of any former writer is below the one that this process has reached."""
        return any(position < reached.get(name, 0) for name in self._positions for position in self.of(name).values())

    async def _read(self, stream: StreamName, writers: Collection[InstanceName]) -> set[InstanceName]:
        """Read the positions of those of ``writers`` that do not run; return those that run.

        A writer may come back or end while positions are read.  A writer counts as running if it runs before or after.
        """
        if not writers:
            self._positions.pop(stream, None)
            return set()
        running = {*await self._store.claimed_elsewhere(writers)}
        positions = await self._store.positions(stream)
        running |= {*await self._store.claimed_elsewhere({*writers} - running)}
        running |= self._ended_lately({*writers} - running, running)
        self._positions[stream] = {each: positions[each] for each in {*writers} - running if each in positions}
        return running

    def _ended_lately(self, missing: set[InstanceName], running: set[InstanceName]) -> set[InstanceName]:
        """Return which of the writers that are missing may still run."""
        self._ran |= running
        for each in running:
            self._missing.pop(each, None)
        now = self._clock.seconds()
        return {each for each in missing & self._ran if now - self._missing.setdefault(each, now) < ENDED_AFTER}

    async def _raise_to(self, reached: Mapping[StreamName, Token]) -> None:
        """Raise the positions of former writers to those that this process has reached.

        A former writer does not run, and begins above this position if it comes back.  One process is enough: if
        another process has moved a position since the last poll, that position stays.
        """
        moves: list[tuple[StreamName, InstanceName, Token]] = []
        for name, upto in reached.items():
            for writer, position in self.of(name).items():
                before, self._moved[name, writer] = self._moved.get((name, writer)), position
                if position < upto and (before == position or not self._streams[name].shared):
                    moves.append((name, writer, position))
        if moves:
            await self._store.transaction().commit([Write(name, writer, reached[name]) for name, writer, _ in moves])
        for name, writer, position in moves:
            upto = self._moved[name, writer] = reached[name]
            if writer in self.of(name):
                self._positions[name] = {**self.of(name), writer: upto}
            self._broadcast.publish(name, encode_position(name, writer, position, upto))
