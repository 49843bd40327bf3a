"""The positions in one database: once a second, those of this process are stored, and those of others are read.

This process also publishes the positions of former writers.  A follower finds a writer by its POSITION.  A writer
that was renamed or removed sends none, so its facts would never be fetched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from replication.errors import StoreError
from replication.session.encoder import EncodedLines, encode_position
from replication.streams.definitions import CACHES, StreamDefinition
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.publisher import INITIAL_POSITION, NO_WRITER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from twisted.internet.interfaces import IReactorTime

    from replication.net.broadcast import Broadcast
    from replication.net.protocol import ReplicationProtocol
    from replication.streams.interfaces import IStreamStore
    from replication.wire.commands import Command
    from replication.writer.stream import StreamWriter

POLL_INTERVAL: Final = 1.0  # seconds
# Seconds without a claim after which a writer that ran has ended: a restart of the server ends claims, too, and a
# process makes its claim again within two polls.
ENDED_AFTER: Final = 5.0


class IPositions(Protocol):
    """What answers REPLICATE."""

    async def refresh(self) -> None:
        """Return once ``lines`` has the positions of this moment."""

    def lines(self, streams: Collection[StreamName]) -> Sequence[EncodedLines]:
        """Return the POSITION lines for ``streams``, or for all streams if that is empty."""
        ...


class IRelay(IPositions, Protocol):
    """What a process publishes of other writers; ``own`` are the positions that it answers beside its own."""

    broadcast: Broadcast
    own: IPositions | None

    def forward(self, peer: ReplicationProtocol | None, command: Command) -> None:
        """Send a follower's command to the writers."""
        ...


class Positions:
    """The positions of the streams that this process may write.

    ``lines`` answers REPLICATE; ``poll`` stores this process's positions and follows those of other writers.

    Where the definition lists a stream's writers, every other instance name is a former writer while it does not run.
    Where it lists none, a writer that is absent at start counts as a former writer until it has come back.
    """

    log = Logger()

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
        self._former: dict[StreamName, Mapping[InstanceName, Token]] = {}
        self._absent: dict[StreamName, set[InstanceName]] = {}  # former writers that may come back
        self._removed: dict[StreamName, set[InstanceName]] = {}  # writers that the definition does not list
        self._running: dict[StreamName, set[InstanceName]] = {}  # the removed writers that ran at the last refresh
        self._ran: set[InstanceName] = set()  # writers that ran since the start
        self._missing: dict[InstanceName, float] = {}  # those that do not run now, with the time when that was found
        self._moved: dict[tuple[StreamName, InstanceName], Token] = {}  # where each former writer was at the last poll
        self._others: Mapping[StreamName, Mapping[InstanceName, Token]] = {}  # as the last poll found them
        self._warnings = 0  # how many of the store's warnings are logged
        self._loop = LoopingCall(lambda: Deferred.fromCoroutine(self.poll()))
        self._clock = self._loop.clock = clock

    async def find_former_writers(self, definition: StreamDefinition, positions: Mapping[InstanceName, Token]) -> None:
        """Find the former writers of a stream among the writers that have ``positions``."""
        name, others = definition.name, positions.keys() - {self._instance_name, NO_WRITER}
        if definition.in_tables:
            return
        if definition.writers:
            self._removed[name] = {each for each in others if not definition.written_by(each)}
            self._running[name] = await self._find_former(name, self._removed[name])
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

    async def start(self) -> None:
        """Store the positions of streams with several writers, then poll once a second; StoreError if that fails."""
        await self._store_positions([each for each in self._streams.values() if each.shared])
        self._log_warnings()
        self._loop.start(POLL_INTERVAL, now=False)

    def stop(self) -> None:
        """Stop polling."""
        if self._loop.running:
            self._loop.stop()

    async def poll(self) -> None:
        """Follow other writers, store the positions, and claim the name again if the database has lost the claim.

        Also note which tables were truncated.
        """
        self._log_warnings()
        try:
            await self._follow_others()
            await self._store_positions([*self._streams.values()])
            await self._store.claim(self._instance_name)
            await self._publish_former()
            await self._move_former()
            await self._mark_truncated()
        except StoreError:  # an append reports it; the next poll tries again
            return

    def former(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return the position of each former writer of a stream."""
        return self._former.get(stream, {})

    async def refresh(self) -> None:
        """Read which former writers run now: stop or begin to publish their positions.  ``lines`` is called after this.

        A follower that is connected to both processes would otherwise receive those positions out of order.
        """
        for stream, absent in self._absent.items():
            absent.difference_update(await self._find_former(stream, absent))
        for stream, removed in self._removed.items():
            self._running[stream] = await self._find_former(stream, removed)

    def lines(self, streams: Collection[StreamName]) -> Sequence[EncodedLines]:
        """Return the POSITION lines that answer REPLICATE for ``streams``, or for all streams if that is empty."""
        lines = []
        for name, writer in self._streams.items():
            ours = writer.definition.written_by(self._instance_name) and writer.publisher.ids.horizon_known
            if ours and (not streams or name in streams):
                former = self.former(name).items()
                lines += [encode_position(name, instance, position, position) for instance, position in former]
                lines.append(writer.outgoing.position())
        return lines

    def of_writers(
        self, writer: StreamWriter, stored: Mapping[StreamName, Mapping[InstanceName, Token]] | None = None
    ) -> dict[InstanceName, Token]:
        """Return each writer's position in a stream; ``stored`` are newer positions than the last poll's."""
        definition = writer.definition
        found = (self._others if stored is None else stored).get(definition.name, {})
        others = {name: found[name] for name in found if name not in (self._instance_name, NO_WRITER)}
        if definition.written_by(self._instance_name):
            others[self._instance_name] = writer.published
        return others

    async def complete(self, writer: StreamWriter) -> dict[InstanceName, Token]:
        """Return up to where the facts of each writer are complete now, also those of former writers.

        Where only this process writes, a former writer gets its position: no older name holds back the minimum.
        """
        await self.refresh()
        found = self.of_writers(writer, await self._store.stored_positions() if writer.shared else {})
        for name, position in self.former(writer.definition.name).items():
            found[name] = max(position, found.get(name, position)) if writer.shared else writer.published
        return found

    async def _find_former(self, stream: StreamName, writers: Collection[InstanceName]) -> set[InstanceName]:
        """Read the positions of those of ``writers`` that do not run; return those that run.

        A writer may come back or end while positions are read.  A writer counts as running if it runs before or after.
        """
        if not writers:
            self._former.pop(stream, None)
            return set()
        running = {*await self._store.claimed_elsewhere(writers)}
        positions = await self._store.positions(stream)
        running |= {*await self._store.claimed_elsewhere({*writers} - running)}
        running |= self._ended_lately({*writers} - running, running)
        self._former[stream] = {each: positions[each] for each in {*writers} - running if each in positions}
        return running

    def _ended_lately(self, missing: set[InstanceName], running: set[InstanceName]) -> set[InstanceName]:
        """Return which of the writers that are missing may still run."""
        self._ran |= running
        for each in running:
            self._missing.pop(each, None)
        now = self._clock.seconds()
        return {each for each in missing & self._ran if now - self._missing.setdefault(each, now) < ENDED_AFTER}

    def _note_removed(self, definition: StreamDefinition, found: Collection[InstanceName]) -> None:
        """Note writers that the definition does not list, and that began after the start of this process."""
        removed = self._removed.get(definition.name)
        if removed is not None:
            new = {each for each in found if each != NO_WRITER and not definition.written_by(each)} - removed
            removed |= new
            self._running[definition.name] |= new
            self._ran |= new

    async def _publish_former(self) -> None:
        """Publish the positions of removed writers that ended since the last poll: followers may lack their facts."""
        before = {stream: {*running} for stream, running in self._running.items() if running}
        if not before:
            return
        await self.refresh()
        for stream, running in before.items():
            for writer, position in self.former(stream).items():
                if writer in running:
                    self._broadcast.publish(stream, encode_position(stream, writer, position, position))

    async def _move_former(self) -> None:
        """Raise the positions of former writers to that of this process: linear order waits for every position.

        A former writer does not run, and begins above this position if it comes back.  One process is enough: if
        another process has moved a position since the last poll, that position stays.
        """
        reached = {  # read before the refresh, which reads the writers that run
            name: writer.published
            for name, writer in self._streams.items()
            if name != CACHES and writer.outgoing.may_write
        }
        if not any(position < reached.get(name, 0) for name in self._former for position in self.former(name).values()):
            return
        await self.refresh()
        moves: list[tuple[StreamName, InstanceName, Token]] = []
        for name, upto in reached.items():
            for writer, position in self.former(name).items():
                before, self._moved[name, writer] = self._moved.get((name, writer)), position
                if position < upto and (before == position or not self._streams[name].shared):
                    moves.append((name, writer, position))
        if moves:
            await self._store.transaction().commit([Write(name, writer, reached[name]) for name, writer, _ in moves])
        for name, writer, position in moves:
            upto = self._moved[name, writer] = reached[name]
            if writer in self.former(name):
                self._former[name] = {**self.former(name), writer: upto}
            self._broadcast.publish(name, encode_position(name, writer, position, upto))

    async def _follow_others(self) -> None:
        """Note the positions of other writers: an idle stream moves its own there, so that no follower waits for it.

        See docs/protocol/publishing.md D1 and docs/protocol/ids.md F4.  No follower waits for the caches stream, and
        its positions, repeated by all writers, would be a flood (docs/protocol/traps.md 20).
        """
        shared = [
            writer
            for writer in self._streams.values()
            if writer.shared
            and writer.publisher.ids.horizon is None
            and writer.definition.written_by(self._instance_name)
            and writer.definition.name != CACHES
        ]
        if not shared:
            return
        known = {writer.definition.name: writer.outgoing.stored for writer in shared if not writer.outgoing.memory_log}
        self._others = await self._store.stored_positions()
        if any(self._others.get(name, {}).get(self._instance_name, 0) < stored for name, stored in known.items()):
            await self._store.verify()
        for writer in shared:
            found = self._others.get(writer.definition.name, {})
            self._note_removed(writer.definition, found)
            writer.publisher.follow(max(found.values(), default=INITIAL_POSITION))

    async def _store_positions(self, writers: Iterable[StreamWriter]) -> None:
        writes = {each.outgoing: write for each in writers if (write := each.outgoing.unstored_position()) is not None}
        if writes:
            await self._store.transaction().commit([*writes.values()])
        for outgoing, write in writes.items():
            outgoing.position_stored(write.upto)

    async def _mark_truncated(self) -> None:
        published = {
            name: writer.published
            for name, writer in self._streams.items()
            if writer.definition.may_forget and writer.outgoing.may_write
        }
        for stream, lost in (await self._store.mark_truncated(self._instance_name, published)).items():
            self.log.error(
                "stream {stream}: its table was truncated, so facts are gone: {lost}; a follower that lacks some of "
                "them stops, unless another source has them",
                stream=stream,
                lost=", ".join(f"of {writer} up to {upto}" for writer, upto in sorted(lost.items())),
            )

    def _log_warnings(self) -> None:
        for warning in self._store.warnings[self._warnings :]:
            self.log.warn("{warning}", warning=warning)
        self._warnings = len(self._store.warnings)
