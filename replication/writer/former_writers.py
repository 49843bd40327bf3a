"""Former writers: the names that have facts in the database, and no connected process.

A follower finds a writer by its POSITION.  A writer that was renamed or removed sends none, so its facts would never be
fetched.  So the processes that write its streams publish its position (docs/protocol/publishing.md D4).

A process may be configured as a writer no more, and go on under its name.  The others leave it alone, so it publishes
its own position, as a writer without new facts does (``PublishedStream.publishes``).

A raised position would hide from followers that a restore has lost facts of that writer.  So an epoch of the writer is
stored in the same transaction (docs/protocol/following.md E7).

A writer without a connection to the database may still run.  It may have IDs open below its newest row, and commit them
when it is connected again.  So this process takes over its name before it publishes a position above the stored one.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from twisted.logger import Logger, LogLevel

from replication.errors import PositionMovedError, StoreError
from replication.logs import TroubleLog
from replication.session.encoder import encode_new_epoch, encode_position, encode_withdrawn
from replication.streams.definitions import CACHES, StreamDefinition
from replication.streams.history import Epoch, raise_epoch, raised_name
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.publisher import INITIAL_POSITION, NO_WRITER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from replication.net.broadcast import Broadcast
    from replication.streams.interfaces import IStreamStore
    from replication.writer.stream import StreamWriter

# The number of polls without a connection after which a name is taken over.  A restart of the server ends all
# connections, too, but a process connects again within two polls.  After a takeover the process must be restarted.
ENDED_AFTER: Final = 5


def find_left(
    stored: Mapping[StreamName, Mapping[InstanceName, Token]], writer: InstanceName, streams: Collection[StreamName]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong, and the cure, where ``writer`` has written a stream that it does not have any more.

    ``stored`` are all stored positions, ``streams`` those that it has.  It cannot send its position in another one,
    and while it runs, no other process does.  A stream without another writer was perhaps given up.
    """
    for name in sorted(stored.keys() - set(streams)):
        if writer in stored[name] and stored[name].keys() - {writer, NO_WRITER}:
            what = f"{writer!r} has written it, and is configured without it now, so new followers lack these facts"
            cure = "add it to the streams of this process (of a worker: to writes) with the writers that write it now"
            yield f"stream {name!r}: {what}", f"{cure}, or give this process a new name"


def find_unwritten(writer: InstanceName, definitions: Iterable[StreamDefinition]) -> Iterator[tuple[str, str]]:
    """Yield a fault and its cure for each stream, if the process writes none of its streams.

    A process that writes one stream may have others that only other processes write: one file may serve them all.
    """
    found = [each for each in definitions if each.name != CACHES]
    if not any(each.written_by(writer) for each in found):
        for each in found:
            writers = ", ".join(each.writers)
            what = f"this process, {writer!r}, is not one of its writers ({writers}), and publishes nothing"
            yield f"stream {each.name!r}: {what}", f"give one of them as instance_name, or add {writer!r} to writers"


class FormerWriters:
    """The former writers of the streams that this process publishes.

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
    ) -> None:
        self._instance_name = instance_name
        self._store = store
        self._streams = streams
        self._broadcast = broadcast
        self._positions: dict[StreamName, Mapping[InstanceName, Token]] = {}
        self._absent: dict[StreamName, set[InstanceName]] = {}  # former writers that may come back
        self._removed: dict[StreamName, set[InstanceName]] = {}  # writers that the definition does not list
        self._in_tables: set[StreamName] = set()  # streams in tables of the application
        # The absent and removed writers with a claim at the last refresh, each with whether it was connected.
        self._claimed: dict[StreamName, dict[InstanceName, bool]] = {}
        self._ran: set[InstanceName] = set()  # writers that were connected since the start
        self._missing: dict[InstanceName, int] = {}  # names that must be taken over: polls without a connection
        self._unsent: set[tuple[StreamName, InstanceName]] = set()  # found by a refresh since the last poll
        self._moved: dict[tuple[StreamName, InstanceName], Token] = {}  # where each former writer was at the last poll
        self._epochs: dict[tuple[StreamName, InstanceName], Epoch] = {}  # in which this process raises positions
        self._trouble = TroubleLog(self.log, LogLevel.warn)  # of takeovers

    async def find(self, definition: StreamDefinition, positions: Mapping[InstanceName, Token]) -> None:
        """Find the former writers of a stream among the writers that have ``positions``.

        A process that publishes no position of its own in the stream leaves them to the processes that do.
        """
        name, others = definition.name, positions.keys() - {self._instance_name, NO_WRITER}
        if not (definition.written_by(self._instance_name) or self._instance_name in positions):
            return
        if definition.in_tables:
            if not (definition.writers and definition.names_writers):
                return
            self._in_tables.add(name)
            # A name without a stored position is no process: another program put it into its rows.
            others &= (await self._store.stored_positions()).get(name, {}).keys()
        if self._store.sequence(definition.generator) is None:
            # The file of a worker has the positions of writers that its functions follow, too.
            others = {each for each in others if not await self._is_followed(name, each)}
        if definition.writers:
            self._removed[name] = {each for each in others if not definition.written_by(each)}
            await self._read(name, self._removed[name])
            return
        if not others or definition.in_memory:
            return
        claimed = await self._store.claimed_elsewhere(others)
        others = {each for each in others if not claimed.get(each)}
        # One that has stored a position and no fact counts, too: a follower may have received that position.
        self._absent[name] = {each for each in others if positions[each] > INITIAL_POSITION}
        if not claimed:  # in SQLite; a status shows them although no follower has connected
            await self._read(name, self._absent[name])

    def note(self, definition: StreamDefinition, found: Mapping[InstanceName, Token]) -> None:
        """Note writers that the definition does not list, and that began after the start of this process."""
        removed = self._removed.get(definition.name)
        if removed is not None:
            others = found.keys() - {self._instance_name, NO_WRITER}
            new = {each for each in others if not definition.written_by(each)} - removed
            removed |= new
            self._ran |= new
            self._claimed[definition.name].update(dict.fromkeys(new, True))  # the next poll reads which are connected

    def of(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return the position of each former writer of a stream, as the last refresh found it."""
        return self._positions.get(stream, {})

    def to_take_over(self, stream: StreamName) -> Collection[InstanceName]:
        """Return the names that will be former writers of a stream: they are claimed, and no process is connected."""
        return [each for each, connected in self._claimed.get(stream, {}).items() if not connected]

    def all_sent(self, stream: StreamName) -> bool:
        """Whether followers were sent a position of each former writer of a stream, and of each name to take over."""
        unsent = any(name == stream for name, _ in self._unsent)
        return not unsent and self.of(stream).keys() >= {*self.to_take_over(stream)}

    async def refresh(self) -> None:
        """Read which former writers run now: stop or begin to publish their positions.

        A follower that is connected to both processes would otherwise receive those positions out of order.  A relay
        would keep sending the position of a writer that has come back, and take followers back to it.
        """
        for stream, absent in self._absent.items():
            await self._read(stream, absent)
            back = {each for each, connected in self._claimed[stream].items() if connected}
            absent.difference_update(back)
            for each in back:
                del self._claimed[stream][each]
        for stream, removed in self._removed.items():
            await self._read(stream, removed)

    async def poll(self) -> None:
        """Publish the positions of writers that have ended since the last poll, and raise those of all former ones.

        Without published positions, followers may lack facts.  Without raised ones, linear order waits for ever.
        """
        # Read before the claims: a writer that comes back after the claims are read begins above these positions.
        reached = {
            name: writer.published
            for name, writer in self._streams.items()
            if name != CACHES and writer.outgoing.publishes
        }
        may_end = any(claimed.keys() - self.of(stream).keys() for stream, claimed in self._claimed.items())
        unread = self._absent.keys() - self._positions.keys()  # no follower has connected since the start
        news = may_end or unread or self._unsent or self._are_behind(reached)
        if not news and not await self._is_any_back():
            return
        await self._take_over([name for name, polls in self._missing.items() if polls >= ENDED_AFTER])
        await self.refresh()
        self._missing = {name: self._missing.get(name, 0) + 1 for name in self._find_missing(reached)}
        for stream, writer in sorted(self._unsent):
            position = self.of(stream).get(writer)
            if position is not None:
                self._broadcast.publish(stream, encode_position(stream, writer, position, position))
        self._unsent.clear()
        if self._are_behind(reached):
            await self._raise_to(reached)

    # ---- inside

    async def _is_followed(self, stream: StreamName, writer: InstanceName) -> bool:
        """Whether a function of this process has followed ``writer``, and no process of that name has written here."""
        if await self._store.history(stream, writer):
            return False
        return bool(await self._store.history(stream, writer, self._instance_name))

    def _are_behind(self, reached: Mapping[StreamName, Token]) -> bool:
        """Whether the position of any former writer is below the one that this process has reached."""
        return any(position < reached.get(name, 0) for name in self._positions for position in self.of(name).values())

    async def _is_any_back(self) -> bool:
        """Read whether any former writer is connected now."""
        former = {each for positions in self._positions.values() for each in positions}
        return bool(former) and any((await self._store.claimed_elsewhere(former)).values())

    async def _read(self, stream: StreamName, writers: Collection[InstanceName]) -> None:
        """Read which of ``writers`` are former writers, and their positions.

        A writer may come back or end while positions are read.  A claim counts if it is there before or after.
        """
        claimed: dict[InstanceName, bool] = {}
        positions: Mapping[InstanceName, Token] = {}
        stored: Mapping[InstanceName, Token] = {}
        if writers:
            claimed = {**await self._store.claimed_elsewhere(writers)}
            positions = await self._store.positions(stream)
            if claimed or stream in self._in_tables:
                stored = (await self._store.stored_positions()).get(stream, {})
            if stream in self._in_tables:  # other programs may insert rows of any name, above what is complete
                reached = self._streams[stream].published if stream in self._streams else INITIAL_POSITION
                ends = {each: min(token, reached) for each, token in positions.items()}
                positions = {each: max(ends.get(each, Token(0)), token) for each, token in stored.items()}
            for each, connected in (await self._store.claimed_elsewhere(writers)).items():
                claimed[each] = connected or claimed.get(each, False)

        self._ran |= {each for each, connected in claimed.items() if connected}
        # No ID is open at or below a stored position, so that position needs no takeover.
        settled = {each for each in writers if each not in claimed or positions.get(each) == stored.get(each)}
        former = {each: positions[each] for each in settled - (claimed.keys() & self._ran) if each in positions}
        if stream in self._positions:  # otherwise no line was sent yet
            self._unsent |= {(stream, each) for each in former.keys() - self.of(stream).keys()}
            for each in self.of(stream).keys() - former.keys():
                self._broadcast.publish(stream, encode_withdrawn(stream, each))
        self._positions[stream], self._claimed[stream] = former, claimed

    def _find_missing(self, reached: Mapping[StreamName, Token]) -> set[InstanceName]:
        """Return the names to take over: no process is connected, and a position must be sent or raised."""
        return {
            writer
            for stream, claimed in self._claimed.items()
            for writer, connected in claimed.items()
            if not connected and self.of(stream).get(writer, Token(0)) < reached.get(stream, 1)
        }

    async def _take_over(self, names: Collection[InstanceName]) -> None:
        """End the claims of ``names``; if that fails, a later poll tries again."""
        taken, errors = [], []
        for name in names:
            self._missing.pop(name, None)
            try:
                if await self._store.take_over(name):
                    taken.append(name)
            except StoreError as error:
                errors.append(f"{name}: {error}")
        if errors:
            message = "the positions of former writers stay, because their names cannot be taken over: {error}"
            self._trouble.report(message, error="; ".join(errors))
        elif names:
            self._trouble.end()
        if taken:
            message = "took over the names of former writers, which have no connection to the database: {names}"
            self.log.info(message, names=", ".join(taken))

    async def _raise_to(self, reached: Mapping[StreamName, Token]) -> None:
        """Raise the positions of former writers to those that this process has reached.

        A name with a claim is left out.  Without one, the writer commits nothing, and begins above if it comes back.
        One process is enough: if another process has moved a position since the last poll, that position stays.
        """
        moves: list[tuple[StreamName, InstanceName, Token]] = []
        for name, upto in reached.items():
            for writer, position in self.of(name).items():
                before, self._moved[name, writer] = self._moved.get((name, writer)), position
                still = before == position or not self._streams[name].shared
                if position < upto and still and writer not in self._claimed[name]:
                    moves.append((name, writer, position))
        if moves:
            await self._raise_all(moves, reached)

    async def _raise_all(
        self, moves: Sequence[tuple[StreamName, InstanceName, Token]], reached: Mapping[StreamName, Token]
    ) -> None:
        """Store an epoch and the new position of each former writer, and publish the position.

        One transaction stores the two of one writer.  Each run of this process has one epoch a writer.  A writer may
        claim its name again after the claims are read here.  Its own epoch then follows this one, or it has changed the
        history, and nothing is stored here.
        """
        stored = await self._store.stored_positions()
        histories = {(name, writer): await self._store.history(name, writer) for name, writer, _ in moves}
        claimed = await self._store.claimed_elsewhere({writer for _, writer, _ in moves})
        for name, writer, position in moves:
            if writer in claimed:
                continue
            upto, before = reached[name], stored.get(name, {}).get(writer, Token(0))
            if before > position:
                continue  # another process has raised it since the claims were read
            history, epoch = histories[name, writer], self._epochs.get((name, writer))
            begins = epoch is None or not history or history[-1].name != epoch.name
            if epoch is None or begins:
                settled = min(position, before or INITIAL_POSITION)
                random_part = f"{secrets.token_hex(4)}.{secrets.token_hex(4)}"
                epoch = Epoch(raised_name(max(position, before), random_part), settled, position)
            epoch = epoch._replace(start=upto)
            write = Write(name, writer, upto, expected=before)
            try:
                await self._store.raise_position(write, raise_epoch(history, epoch, position), history)
            except PositionMovedError:
                continue  # another process raises it
            self._epochs[name, writer], self._moved[name, writer] = epoch, upto
            if writer not in self.of(name):
                continue  # it is back, and its position is withdrawn
            self._positions[name] = {**self.of(name), writer: upto}
            if begins:  # followers, also relays, store it before they move their position
                self._broadcast.publish(name, encode_new_epoch(name, writer))
            self._broadcast.publish(name, encode_position(name, writer, position, upto))
