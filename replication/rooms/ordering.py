"""Two orders of events and the places in them; and what lies between two ends of a graph.

History is read by (depth, stream ordering), which says what came before what; what is new is read by stream ordering,
which says when it came here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Self

import attrs

from replication.errors import RoomError

if TYPE_CHECKING:
    from collections.abc import Collection

    from replication.rooms.seams import IRoomTables

_PLACE: Final = re.compile(r"t([0-9]{1,16})(?:-|_)(-?[0-9]{1,18})", re.ASCII)


@attrs.frozen(order=True)
class Place:
    """A place in a room's history: right after the event that is there.  It stays right whatever comes."""

    depth: int
    stream_ordering: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``tDEPTH_STREAM``; RoomError if it is none."""
        match = _PLACE.fullmatch(text)
        if match is None:
            raise RoomError(f"not a place in a room's history: {text[:100]!r}; it looks like t12_345")
        return cls(int(match[1]), int(match[2]))

    def spell(self) -> str:
        """Return the text."""
        return f"t{self.depth}_{self.stream_ordering}"


@attrs.frozen
class Between:
    """What one side lacks: ``events``, oldest first.  ``heads`` and ``ground`` describe them most shortly.

    They are all that lies at or before ``heads`` and not at or before ``ground``.  ``limited`` says that there were
    more, and that the oldest are left out.
    """

    events: tuple[str, ...]
    heads: tuple[str, ...]
    ground: tuple[str, ...]
    limited: bool


def between(tables: IRoomTables, room_id: str, have: Collection[str], want: Collection[str], limit: int) -> Between:
    """Return what somebody lacks who has ``have``, and all before it, to have ``want``.

    The walk goes down from both, deepest first, and ends where only ``have``'s past is left; in a room whose depths
    cannot be trusted it goes to the bottom.
    """
    room = tables.room(room_id)
    tangled = room is not None and room.tangled
    known = tables.stored({*have, *want})
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
        depths |= {each: stored.depth for each, stored in tables.stored(new).items()}
        below &= depths.keys()
        heard = {prev for each in level & had for prev in prevs.get(each, ())} & depths.keys()
        edge |= (below - prevs.keys()) | (heard - had)
        had |= heard
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
