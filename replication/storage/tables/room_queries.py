"""Queries about rooms: pages of history, new events, gaps, ancestors and descendants.  Everything here blocks.

A timeline leaves out outliers, and rejected and soft-failed events.  New events include invitations of local users,
which are outliers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from replication.errors import UnknownRoomError
from replication.rooms.event import Event
from replication.rooms.ordering import Between, Place, between
from replication.rooms.views import EventView, RoomView, StateGroupView, StoredEvent
from replication.storage.tables.rooms import RoomTables, Sql
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from replication.rooms.event import StateKey
    from replication.streams.interfaces import ISqlExecutor
    from replication.streams.positions import MultiWriterToken

_COLUMNS: Final = (  # the fields of StoredEvent, with the text of the event
    "SELECT text, depth, stream_ordering, instance_name, outlier, rejected, soft_failed, out_of_band, state_group "
    "FROM room_events "
)
_SHOWN: Final = "outlier = 0 AND rejected IS NULL AND soft_failed = 0"
_ANCESTORS: Final = """
    WITH RECURSIVE found (event_id) AS (
        SELECT prev_event_id FROM room_edges WHERE event_id = ?
        UNION
        SELECT edge.prev_event_id FROM found JOIN room_edges edge ON edge.event_id = found.event_id
    )
    SELECT event_id FROM found JOIN room_events USING (event_id) WHERE outlier = 0
    ORDER BY depth DESC, stream_ordering DESC LIMIT ?
"""
_DESCENDANTS: Final = """
    WITH RECURSIVE found (event_id) AS (
        SELECT event_id FROM room_edges WHERE prev_event_id = ?
        UNION
        SELECT edge.event_id FROM found JOIN room_edges edge ON edge.prev_event_id = found.event_id
    )
    SELECT event_id FROM found JOIN room_events USING (event_id) WHERE outlier = 0
    ORDER BY depth, stream_ordering LIMIT ?
"""
_GAPS: Final = """
    SELECT gap.event_id, max(above.depth) FROM room_backward_extremities gap
    JOIN room_edges edge ON edge.prev_event_id = gap.event_id
    JOIN room_events above ON above.event_id = edge.event_id AND above.outlier = 0
    WHERE gap.room_id = ? GROUP BY gap.event_id ORDER BY max(above.depth) DESC, gap.event_id LIMIT ?
"""


class RoomReads:
    """The queries, on one snapshot."""

    def __init__(self, database: ISqlExecutor) -> None:
        self._sql = Sql(database)
        self._tables = RoomTables(database, reading=True)

    def view(self, room_id: str) -> RoomView:
        """Return a room; UnknownRoomError if nothing of it is stored."""
        room = self._tables.room(room_id)
        if room is None:
            raise UnknownRoomError(f"no room {room_id[:100]!r} is stored here")
        return RoomView(
            room_id,
            room.room_version,
            tuple(sorted(self._tables.forward(room_id))),
            tuple(sorted(self._tables.backward(room_id))),
            room.min_depth,
            self._tables.current_state(room_id),
        )

    def stored_events(self, event_ids: Collection[str]) -> dict[str, StoredEvent]:
        """Return those of the events that are stored."""
        rows = self._sql.among(f"{_COLUMNS} WHERE event_id AMONG", texts=event_ids)
        return {stored.event.event_id: stored for stored in map(_stored_event, rows)}

    def stored_event(self, room_id: str, event_id: str) -> StoredEvent:
        """Return one event of a room; UnknownRoomError if it is not stored."""
        stored = self.stored_events([event_id]).get(event_id)
        if stored is None or stored.event.room_id != room_id:
            raise UnknownRoomError(f"no event {event_id[:100]!r} of room {room_id[:100]!r} is stored here")
        return stored

    def event_view(self, room_id: str, event_id: str) -> EventView:
        """Return one event of a room with the events after it; UnknownRoomError if it is not stored."""
        stored = self.stored_event(room_id, event_id)
        children = sorted(child for child, _ in self._tables.edges_to([event_id]))
        de_outliered = self._sql.run("SELECT stream_ordering FROM room_ex_outliers WHERE event_id = ?", event_id)
        return EventView(stored, tuple(children), tuple([number for (number,) in de_outliered]))

    def group(self, number: int) -> StateGroupView:
        """Return a state group; UnknownRoomError if there is none."""
        group = self._tables.group(number)
        ((room_id,),) = self._sql.run("SELECT room_id FROM room_state_groups WHERE id = ?", number)
        return StateGroupView(number, room_id, group.prev_group, dict(group.delta), self._tables.group_state(number))

    def state_at(self, room_id: str, event_id: str) -> dict[StateKey, str]:
        """Return the state after an event; UnknownRoomError if it is an outlier, whose state is unknown."""
        group = self.stored_event(room_id, event_id).state_group
        if group is None:
            raise UnknownRoomError(f"the state at event {event_id[:100]!r} is not known: it is an outlier")
        return self._tables.group_state(group)

    def since(
        self, after: MultiWriterToken, upto: MultiWriterToken, limit: int, room_id: str | None = None
    ) -> list[StoredEvent]:
        """Return the new events after one token, up to another, by stream ordering, as ``/sync`` does."""
        here = "" if room_id is None else "room_id = ? AND "
        places = () if room_id is None else (room_id,)
        found: list[StoredEvent] = []
        low, high = int(after.stream), int(upto.maximum)
        while len(found) < limit and low < high:
            rows = self._sql.run(
                f"{_COLUMNS} WHERE {here} stream_ordering > ? AND stream_ordering <= ? "
                "AND (outlier = 0 OR out_of_band = 1) AND rejected IS NULL AND soft_failed = 0 "
                "ORDER BY stream_ordering LIMIT ?",
                *(*places, low, high, limit),
            )
            nodes = [_stored_event(row) for row in rows]
            found += [each for each in nodes if _covers(upto, each, after)]
            low = nodes[-1].stream_ordering if len(nodes) == limit else high
        return found[:limit]

    def history(
        self, room_id: str, start: Place | None, limit: int, *, backwards: bool, whole: bool
    ) -> list[StoredEvent]:
        """Return a page of a room's history from a place on; with ``whole`` no event is left out.

        Backwards, the page has the events at or before ``start``, and None is the end.  Forwards, it has the events
        after ``start``, and None is the beginning.
        """
        shown = "" if whole else f"AND {_SHOWN} "
        if backwards:
            sql = f"{_COLUMNS} WHERE room_id = ? {shown} AND (depth, stream_ordering) <= (?, ?)"
            sql += " ORDER BY depth DESC, stream_ordering DESC LIMIT ?"
            start = start or Place(2**62, 0)
        else:
            sql = f"{_COLUMNS} WHERE room_id = ? {shown} AND (depth, stream_ordering) > (?, ?)"
            sql += " ORDER BY depth, stream_ordering LIMIT ?"
            start = start or Place(-1, 0)
        return [_stored_event(row) for row in self._sql.run(sql, room_id, start.depth, start.stream_ordering, limit)]

    def gaps(self, room_id: str, limit: int) -> list[tuple[str, int]]:
        """Return the events to backfill next, each with the depth of the event after it; the latest gaps first."""
        return [(event_id, depth) for event_id, depth in self._sql.run(_GAPS, room_id, limit)]

    def ancestors(self, event_id: str, limit: int) -> list[str]:
        """Return the events before one, the nearest first."""
        return [each for (each,) in self._sql.run(_ANCESTORS, event_id, limit)]

    def descendants(self, event_id: str, limit: int) -> list[str]:
        """Return the events after one, the nearest first."""
        return [each for (each,) in self._sql.run(_DESCENDANTS, event_id, limit)]

    def between(self, room_id: str, have: Collection[str], want: Collection[str], limit: int) -> Between:
        """Return the events that a server lacks that has ``have`` and wants ``want``."""
        return between(self._tables, room_id, have, want, limit)

    def next_place(self, room_id: str, most: int) -> tuple[list[str], int]:
        """Return the ``prev_events`` of a new event, at most ``most`` of the deepest extremities, and its depth."""
        rows = self._sql.run(
            "SELECT event_id, depth FROM room_forward_extremities JOIN room_events USING (event_id) "
            "WHERE room_forward_extremities.room_id = ? ORDER BY depth DESC, event_id LIMIT ?",
            *(room_id, most),
        )
        return [event_id for event_id, _ in rows], max([depth for _, depth in rows], default=0) + 1

    def rooms(self) -> list[str]:
        """Return all rooms."""
        return [room_id for (room_id,) in self._sql.run("SELECT room_id FROM room_summaries ORDER BY room_id")]


def _covers(upto: MultiWriterToken, stored: StoredEvent, after: MultiWriterToken) -> bool:
    return upto.covers(InstanceName(stored.instance_name), Token(stored.stream_ordering), after=after)


def _stored_event(row: Sequence[Any]) -> StoredEvent:
    text, depth, _, _, _, rejected, *_ = row
    return StoredEvent(Event.from_text(text, depth=depth, rejected=rejected), *row[1:])
