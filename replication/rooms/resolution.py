"""State resolution: the state of a room where branches of its graph meet (docs/protocol/rooms.md H6).

A resolver receives the states of the branches and returns one state.  ``resolve_deepest`` is for graphs that are not
Matrix rooms.  If branches set a key to different events, the event with the greatest depth wins, then the one with the
latest ``origin_server_ts``, then the one with the greatest event ID.  A key that only some branches have is kept.  The
result depends only on the events, and no permission is checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.rooms.matrix.v1 import resolve_v1, split
from replication.rooms.matrix.v2 import resolve_v2

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from replication.rooms.event import Event, StateMap

    Fetch = Callable[[Collection[str]], Mapping[str, Event]]  # returns the stored events among these IDs
    # The states of the branches, and the room version in ``m.room.create``, None if the room has none.
    Resolver = Callable[[Sequence[StateMap], Fetch, str | None], StateMap]


def resolve(states: Sequence[StateMap], fetch: Fetch, room_version: str | None) -> StateMap:
    """Resolve by the Matrix specification; without ``m.room.create`` by :func:`resolve_deepest`."""
    if room_version is None:
        return resolve_deepest(states, fetch, None)
    if room_version == "1":
        return resolve_v1(states, fetch)
    return resolve_v2(states, fetch, room_version)


def resolve_deepest(states: Sequence[StateMap], fetch: Fetch, room_version: str | None) -> StateMap:  # noqa: ARG001
    """Resolve by depth, as the module's docstring describes."""
    agreed, disputed = split(states)
    events = fetch({each for candidates in disputed.values() for each in candidates})

    def weight(event_id: str) -> tuple[int, int, str]:
        event = events.get(event_id)  # an event that is not stored yet loses
        return (-1, 0, event_id) if event is None else (event.depth or 0, event.origin_server_ts, event_id)

    return {**agreed, **{key: max(candidates, key=weight) for key, candidates in disputed.items()}}


def version_of(create: Event) -> str:
    """Return the room version of an ``m.room.create`` event, "1" if it has none."""
    version = create.room_version or create.content.get("room_version", "1")
    return version if isinstance(version, str) else "1"
