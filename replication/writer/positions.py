"""The positions in one database: once a second, those of this process are stored, and those of others are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from replication.errors import StoreError
from replication.session.encoder import EncodedLines, encode_position
from replication.streams.definitions import CACHES
from replication.streams.positions import MultiWriterToken, token_of
from replication.wire.grammar import Token
from replication.writer.former_writers import find_left
from replication.writer.publisher import INITIAL_POSITION, NO_WRITER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from replication.deferreds import Lifetime
    from replication.net.broadcast import Broadcast
    from replication.net.protocol import ReplicationProtocol
    from replication.streams.history import History
    from replication.streams.interfaces import IStreamStore
    from replication.wire.commands import Command
    from replication.wire.grammar import InstanceName, StreamName
    from replication.writer.former_writers import FormerWriters
    from replication.writer.stream import StreamWriter

POLL_INTERVAL: Final = 1.0  # seconds


class IPositions(Protocol):
    """What answers REPLICATE, and a PING that asks for a history."""

    @property
    def is_complete(self) -> bool:
        """Whether ``lines`` has a position of each stream and writer, as followers were sent it.

        A relay may not have found all writers.  A stream of a mapped table has no position until it has a horizon.
        """
        ...

    async def refresh(self) -> None:
        """Return once ``lines`` has the positions of this moment."""

    def lines(self, streams: Collection[StreamName]) -> Sequence[EncodedLines]:
        """Return the POSITION lines for ``streams``, or for all streams if that is empty."""
        ...

    async def history(self, stream: StreamName, writer: InstanceName) -> History:
        """Return the history of a writer as it is known here; empty if it has none.  Raises ReplicationError."""
        ...


class IRelay(IPositions, Protocol):
    """What a process publishes of other writers; ``own`` are the positions that it answers beside its own."""

    broadcast: Broadcast
    own: IPositions | None

    def look_for_others(self) -> None:
        """Send to followers whether ``is_complete``, if that has changed."""
        ...

    def forward(self, peer: ReplicationProtocol | None, command: Command) -> None:
        """Send a follower's command to the writers."""
        ...


class Positions:
    """The positions of the streams that this process publishes.

    ``lines`` answers REPLICATE; ``poll`` stores this process's positions and follows those of other writers.
    ``former`` are the writers whose positions this process publishes, too.  ``on_complete`` is called when
    ``is_complete`` has changed.
    """

    log = Logger()

    def __init__(
        self,
        instance_name: InstanceName,
        store: IStreamStore,
        streams: Mapping[StreamName, StreamWriter],
        former: FormerWriters,
        lifetime: Lifetime,
    ) -> None:
        self.is_complete = True
        self.on_complete: Callable[[], object] = lambda: None
        self._instance_name = instance_name
        self._store = store
        self._streams = streams
        self.former = former
        self._others: Mapping[StreamName, Mapping[InstanceName, Token]] = {}  # as the last poll found them
        self._reached: dict[StreamName, Token] = {}  # this writer's position before that poll, by shared stream
        self._warnings = 0  # how many of the store's warnings are logged
        self._lifetime = lifetime
        self._loop = LoopingCall(lambda: Deferred.fromCoroutine(self.poll()))
        self._loop.clock = lifetime.clock

    async def start(self) -> None:
        """Store the positions of streams with several writers, then poll once a second; StoreError if that fails."""
        shared = [each for each in self._streams.values() if each.shared]
        await self._store_positions(shared)
        if shared:
            await self._read_others()
            self._warn_of_left(self._others)
        self._log_warnings()
        self._lifetime.watch(self._loop.start(POLL_INTERVAL, now=False), "storing positions")

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
            await self.former.poll()
            self.look_for_missing()
            await self._mark_truncated()
        except StoreError:  # an append reports it; the next poll tries again
            return

    async def refresh(self) -> None:
        """Read which former writers run now; ``lines`` is called after this."""
        await self.former.refresh()
        self.look_for_missing()

    def lines(self, streams: Collection[StreamName]) -> Sequence[EncodedLines]:
        """Return the POSITION lines that answer REPLICATE for ``streams``, or for all streams if that is empty."""
        lines = []
        for name, writer in self._streams.items():
            ours = writer.outgoing.publishes and writer.publisher.ids.horizon_known
            if ours and (not streams or name in streams):
                former = self.former.of(name).items()
                lines += [encode_position(name, instance, position, position) for instance, position in former]
                lines.append(writer.outgoing.position())
        return lines

    def look_for_missing(self) -> None:
        """Note whether followers were sent a position of each writer of the streams that this process publishes.

        A mapped table has none while a transaction that has allocated an ID there is open since before the start.  A
        removed writer that has ended may have none until its name is taken over.
        """
        published = [each for each in self._streams.values() if each.outgoing.publishes]
        complete = all(
            each.publisher.ids.horizon_known and self.former.all_sent(each.definition.name) for each in published
        )
        if complete != self.is_complete:
            self.is_complete = complete
            self.on_complete()

    async def history(self, stream: StreamName, writer: InstanceName) -> History:
        """Return the history of a writer in the database; empty if it has none.  Raises StoreError."""
        return await self._store.history(stream, writer)

    def of_writers(self, writer: StreamWriter) -> dict[InstanceName, Token]:
        """Return each writer's position in a stream; those of other writers are as of the last poll."""
        return {**self._of_others(writer, self._others), **self._own(writer)}

    def of_former(self, writer: StreamWriter) -> dict[InstanceName, Token]:
        """Return the position of each former writer: that of this process if no other writes."""
        found = self.former.of(writer.definition.name)
        return {name: position if writer.shared else writer.published for name, position in found.items()}

    def token(self, writer: StreamWriter) -> MultiWriterToken:
        """Return the position of every writer of a stream, as of the last poll.

        A writer that the last poll did not find allocates only IDs above this writer's position before that poll.
        """
        positions = self.of_writers(writer)
        positions |= self._never_run(writer, positions)
        if not writer.shared:
            return token_of(positions)
        before = self._reached.get(writer.definition.name, Token(0))
        return MultiWriterToken(min([before, *positions.values()]), positions)

    def known_writers(self, stream: StreamName) -> Collection[InstanceName] | None:
        """Return the writers of a stream, former ones too; None if this process does not have the stream."""
        writer = self._streams.get(stream)
        return None if writer is None else {*self.of_writers(writer), *self.former.of(stream)}

    async def complete(self, writer: StreamWriter) -> dict[InstanceName, Token]:
        """Return up to where the facts of each writer are complete now, also those of former writers.

        Where only this process writes, a former writer gets its position: no older name holds back the minimum.
        """
        # Before the query: a writer that the query does not find allocates only IDs above this position.
        own = self._own(writer)
        await self.refresh()
        others = self._of_others(writer, await self._store.stored_positions() if writer.shared else {})
        found = {**others, **own}
        for name, position in self.of_former(writer).items():
            found[name] = max(position, found.get(name, position))
        return found | self._never_run(writer, found)

    def _own(self, writer: StreamWriter) -> dict[InstanceName, Token]:
        return {self._instance_name: writer.published} if writer.outgoing.publishes else {}

    def _of_others(
        self, writer: StreamWriter, stored: Mapping[StreamName, Mapping[InstanceName, Token]]
    ) -> dict[InstanceName, Token]:
        found = stored.get(writer.definition.name, {})
        return {name: found[name] for name in found if name not in (self._instance_name, NO_WRITER)}

    def _never_run(self, writer: StreamWriter, found: Collection[InstanceName]) -> dict[InstanceName, Token]:
        """Return 0 for each writer of tables without a position: other programs may have inserted rows in its name."""
        names = writer.definition.in_tables and writer.definition.names_writers and writer.shared
        return {each: Token(0) for each in writer.definition.writers if each not in found} if names else {}

    async def _follow_others(self) -> None:
        """Note the positions of other writers: an idle stream moves its own there, so that no follower waits for it.

        See docs/protocol/publishing.md D1 and docs/protocol/ids.md F4.  No follower waits for the caches stream, and
        its positions, repeated by all writers, would be a flood (docs/protocol/traps.md 20).
        """
        shared = [
            writer
            for writer in self._streams.values()
            if writer.shared and writer.publisher.ids.horizon is None and writer.outgoing.publishes
        ]
        if not shared:
            return
        known = {writer.definition.name: writer.outgoing.stored for writer in shared if not writer.outgoing.memory_log}
        await self._read_others()
        self._warn_of_left(self._others)
        if any(self._others.get(name, {}).get(self._instance_name, 0) < stored for name, stored in known.items()):
            await self._store.verify()
        for writer in shared:
            if writer.definition.name == CACHES:
                continue
            found = self._others.get(writer.definition.name, {})
            self.former.note(writer.definition, found)
            writer.publisher.follow(max(found.values(), default=INITIAL_POSITION))

    async def _read_others(self) -> None:
        reached = {name: each.published for name, each in self._streams.items() if each.shared}
        self._others, self._reached = await self._store.stored_positions(), reached

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

    def _warn_of_left(self, stored: Mapping[StreamName, Mapping[InstanceName, Token]]) -> None:
        """Add warnings of streams that this process has written, and does not have any more; each once."""
        for what, cure in find_left(stored, self._instance_name, self._streams):
            warning = f"{what}: {cure}"
            if warning not in self._store.warnings:
                self._store.warnings.append(warning)

    def _log_warnings(self) -> None:
        for warning in self._store.warnings[self._warnings :]:
            self.log.warn("{warning}", warning=warning)
        self._warnings = len(self._store.warnings)
