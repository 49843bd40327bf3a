"""The followers that report up to where they have applied facts: a retention keeps what they lack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from replication.deferreds import Lock
from replication.errors import StreamError
from replication.streams.interfaces import IStreamStore, KnownFollower
from replication.wire import grammar
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from replication.streams.retention import SegmentChain
    from replication.wire.grammar import InstanceName, StreamName

    Positions = Mapping[StreamName, Mapping[InstanceName, Token]]
    WritersOf = Callable[[StreamName], Collection[InstanceName] | None]

SOON: Final = 30.0  # seconds to the next report, if facts may be deleted; each is stored
LATER: Final = 60.0  # if none is
STORED_AGAIN: Final = 3_600.0  # seconds until a report is stored again, if none is
MAX_FOLLOWERS: Final = 10_000


def only_known(positions: Positions, writers: WritersOf) -> Positions:
    """Return the positions of known writers: any number of other names would be kept for each follower."""
    known = {stream: writers(stream) for stream in positions}
    return {
        stream: {writer: token for writer, token in positions[stream].items() if writer in found}
        for stream, found in known.items()
        if found is not None
    }


def replace_positions(before: Positions, positions: Positions, streams: Collection[StreamName] | None) -> Positions:
    """Return the positions after a report that replaces those of ``streams``; None: of all."""
    if streams is None:
        return positions
    return {**{name: each for name, each in before.items() if name not in streams}, **positions}


@attrs.define(eq=False, repr=False)
class KnownFollowers:
    """What followers have reported, in the database of a writer.

    ``wall`` returns seconds since 1970.  ``ready`` is awaited before the database is used.  ``deletes`` returns whether
    this process deletes facts.  ``writers`` returns the known writers of a stream, None of an unknown stream.
    """

    _store: IStreamStore
    _wall: Callable[[], float]
    _ready: Callable[[], Awaitable[None]]
    _deletes: Callable[[], bool]
    _writers: WritersOf
    _latest: dict[InstanceName, KnownFollower] = attrs.field(init=False, factory=dict)  # since the start
    _stored_at: dict[InstanceName, float] = attrs.field(init=False, factory=dict)
    _lock: Lock = attrs.field(init=False, factory=Lock)  # one report at a time

    async def report(self, name: str, positions: Positions, streams: Collection[StreamName] | None = None) -> float:
        """Keep the positions of a follower, and return the seconds after which it should report again.

        They are stored for a retention.  Without one, a commit an hour is enough.  ``streams``: those whose positions
        are replaced; None: all.
        """
        await self._ready()
        async with self._lock:
            return await self._keep(grammar.instance_name(name), positions, streams)

    async def _keep(
        self, instance: InstanceName, positions: Positions, streams: Collection[StreamName] | None
    ) -> float:
        now, deletes = self._wall(), self._deletes()
        if streams is not None:
            before = {each.name: each.positions for each in await self.followers()}
            positions = replace_positions(before.get(instance, {}), positions, streams)
        follower = KnownFollower(instance, only_known(positions, self._writers), now)
        if deletes or abs(now - self._stored_at.get(instance, -STORED_AGAIN)) >= STORED_AGAIN:
            known = {each.name for each in await self._store.known_followers()}
            if instance not in known and len(known) >= MAX_FOLLOWERS:
                raise StreamError(f"{len(known)} followers are known, which is the limit: forget those that are gone")
            await self._store.store_follower(follower)
            self._stored_at[instance] = now
        self._latest[instance] = follower
        return SOON if deletes else LATER

    async def followers(self) -> Sequence[KnownFollower]:
        """Return all that have reported, by name."""
        await self._ready()
        return [self._latest.get(each.name, each) for each in await self._store.known_followers()]

    async def forget(self, name: str) -> None:
        """Forget a follower: what it lacks may be deleted."""
        await self._ready()
        instance = grammar.instance_name(name)
        await self._store.forget_follower(instance)
        self._latest.pop(instance, None)
        self._stored_at.pop(instance, None)

    async def needed(
        self, streams: Collection[StreamName], writer: InstanceName
    ) -> Mapping[StreamName, Mapping[str, Token]]:
        """Return, for each stream, up to where each follower of it has the facts of a writer."""
        found = await self._store.known_followers()
        return {
            stream: {
                f"follower {each.name}": each.positions[stream].get(writer, Token(0))
                for each in found
                if stream in each.positions
            }
            for stream in streams
        }

    async def segments(self) -> Sequence[SegmentChain]:
        """Return nothing: followers have no segments."""
        return ()
