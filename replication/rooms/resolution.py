"""What the state is where branches meet: who decides, and the small way to do it.

A resolver is given the states of the branches and returns one.  The small one, for graphs that are not Matrix rooms: a
key that branches set to different events goes to the event with the greatest depth, then the latest
``origin_server_ts``, then the greatest event ID; a key that only some branches have is kept.  So the outcome depends on
the events alone, not on the order in which they came or were merged, and nobody's rights are looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from replication.rooms import matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from replication.rooms.event import Event, StateKey, StateMap

    Fetch = Callable[[Collection[str]], Mapping[str, Event]]


class Resolver(Protocol):
    """Decides what the state is."""

    def __call__(self, states: Sequence[StateMap], fetch: Fetch, room_version: str | None, /) -> StateMap:
        """Return the one state of several different ones.

        ``fetch`` returns those events that are stored, whole, of the IDs that it is given.  ``room_version`` is what
        the room's creation says, None if the room has no ``m.room.create``.
        """
        ...


def resolve(states: Sequence[StateMap], fetch: Fetch, room_version: str | None) -> StateMap:
    """Resolve as Matrix does in a room that has a creation, and in the small way elsewhere."""
    if room_version is None:
        return resolve_deepest(states, fetch, room_version)
    return matrix.resolve(states, fetch, room_version)


def resolve_deepest(states: Sequence[StateMap], fetch: Fetch, room_version: str | None) -> StateMap:  # noqa: ARG001
    """Resolve in the small way that the module's head describes."""
    agreed, disputed = split(states)
    events = fetch({each for candidates in disputed.values() for each in candidates})

    def weight(event_id: str) -> tuple[int, int, str]:
        event = events.get(event_id)  # one that is not here yet has no weight
        return (0, 0, event_id) if event is None else (event.depth or 0, event.origin_server_ts, event_id)

    return {**agreed, **{key: max(candidates, key=weight) for key, candidates in disputed.items()}}


def split(states: Sequence[StateMap]) -> tuple[dict[StateKey, str], dict[StateKey, set[str]]]:
    """Return the keys on which all states agree that have them, and the candidates for the others."""
    found: dict[StateKey, set[str]] = {}
    for state in states:
        for key, event_id in state.items():
            found.setdefault(key, set()).add(event_id)
    agreed = {key: next(iter(candidates)) for key, candidates in found.items() if len(candidates) == 1}
    return agreed, {key: candidates for key, candidates in found.items() if len(candidates) > 1}


def version_of(create: Event) -> str:
    """Return the room version that a creation says; without a word it is the first."""
    version = create.room_version or create.content.get("room_version", "1")
    return version if isinstance(version, str) else "1"
