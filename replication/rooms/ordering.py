"""The two orders of events, places in them, and the events between two sets of events.

History is read by (depth, stream ordering), an order that respects ``prev_events``.  New events are read by stream
ordering, the order in which they were persisted.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Self

import attrs
import msgspec

from replication.errors import RoomError

if TYPE_CHECKING:
    from collections.abc import Collection

    from replication.rooms.interfaces import IRoomTables

_PLACE: Final = re.compile(r"t([0-9]{1,16})(?:-|_)(-?[0-9]{1,18})", re.ASCII)


@attrs.frozen(order=True)
class Place:
    """A place in a room's history: just after one event.  New events do not change it."""

    depth: int
    stream_ordering: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``tDEPTH_STREAM``; RoomError if ``text`` is not a place."""
        match = _PLACE.fullmatch(text)
        if match is None:
            raise RoomError(f"not a place in a room's history: {text[:100]!r}; it looks like t12_345")
        return cls(int(match[1]), int(match[2]))

    def encode(self) -> str:
        """Return ``tDEPTH_STREAM``."""
        return f"t{self.depth}_{self.stream_ordering}"


class Between(msgspec.Struct, frozen=True):
    """The events that one side lacks.

    Attributes:
        events: their IDs, oldest first.
        heads: the latest of them; every other one precedes a head.
        ground: events that the side has; no missing event precedes one of them.
        limited: whether older events were left out.

    """

    events: tuple[str, ...]
    heads: tuple[str, ...]
    ground: tuple[str, ...]
    limited: bool


def between(tables: IRoomTables, room_id: str, have: Collection[str], want: Collection[str], limit: int) -> Between:
    """Return the events of ``want`` and its past that are not in ``have`` and its past.

    The walk follows ``prev_events`` from both sets, deepest event first.  It ends when only the past of ``have`` is
    left; in a room whose depths are not reliable, at the first events.
    """
    room = tables.room(room_id)
    tangled = room is not None and room.tangled
    known = tables.metadata({*have, *want})
    depths = {each: stored.depth for each, stored in known.items()}
    prevs: dict[str, list[str]] = {}
    had = set(have) & known.keys()
    edge = had | (set(want) & known.keys())
    while edge - had if not tangled else edge:
        deepest = max(depths[each] for each in edge)
        level = {each for each in edge if depths[each] == deepest}
        edge -= level
        below: set[str] = set()
        for event_id, prev in tables.edges_from(level):
            prevs.setdefault(event_id, []).append(prev)
            below.add(prev)
        new = below - depths.keys()
        depths |= {each: stored.depth for each, stored in tables.metadata(new).items()}
        below &= depths.keys()
        received = {prev for each in level & had for prev in prevs.get(each, ())} & depths.keys()
        edge |= (below - prevs.keys()) | (received - had)
        had |= received
        for each in level:
            prevs.setdefault(each, [])
    missing = {each for each in prevs if each not in had}
    named = {prev for each in missing for prev in prevs[each]}
    ordered = sorted(missing, key=lambda each: (depths[each], each))
    return Between(
        events=tuple(ordered[-limit:]),
        heads=tuple(sorted(missing - named)),
        ground=tuple(sorted(named & had)),
        limited=len(ordered) > limit,
    )
