"""The tables of rooms, in SQLite and PostgreSQL: ``IRoomTables`` of ``replication.rooms.interfaces``.

Everything here blocks.  It runs on the database's thread, in one transaction or on one snapshot.  A live event
has a stream ordering above zero, a backfilled event one below (docs/protocol/rooms.md H1).
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from replication.errors import UnknownRoomError
from replication.rooms.event import Event
from replication.rooms.interfaces import EventMetadata, Room, StateGroup
from replication.storage.migrations import upgrade

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from replication.rooms.event import StateKey, StateMap
    from replication.rooms.interfaces import PlacedEvent, StateChange
    from replication.streams.interfaces import ISqlExecutor

VERSIONS: Final = "rooms_schema"

STEPS: Final = (
    (
        """
        CREATE TABLE room_summaries (
            room_id TEXT NOT NULL PRIMARY KEY, room_version TEXT, min_depth BIGINT, tangled SMALLINT NOT NULL
        )
        """,
        # depth is the topological ordering; text is the part of an event that never changes
        """
        CREATE TABLE room_events (
            event_id TEXT NOT NULL PRIMARY KEY, room_id TEXT NOT NULL, depth BIGINT NOT NULL,
            stream_ordering BIGINT NOT NULL UNIQUE, instance_name TEXT NOT NULL, outlier SMALLINT NOT NULL,
            rejected TEXT, soft_failed SMALLINT NOT NULL, out_of_band SMALLINT NOT NULL, state_group BIGINT,
            text TEXT NOT NULL
        )
        """,
        "CREATE INDEX room_events_history ON room_events (room_id, depth, stream_ordering)",
        "CREATE INDEX room_events_arrival ON room_events (room_id, stream_ordering)",
        """
        CREATE TABLE room_edges (
            event_id TEXT NOT NULL, prev_event_id TEXT NOT NULL, room_id TEXT NOT NULL,
            PRIMARY KEY (event_id, prev_event_id)
        )
        """,
        "CREATE INDEX room_edges_prev ON room_edges (prev_event_id, event_id)",
        """
        CREATE TABLE room_ex_outliers (
            stream_ordering BIGINT NOT NULL PRIMARY KEY, event_id TEXT NOT NULL, instance_name TEXT NOT NULL,
            state_group BIGINT
        )
        """,
        """
        CREATE TABLE room_forward_extremities (
            room_id TEXT NOT NULL, event_id TEXT NOT NULL, PRIMARY KEY (room_id, event_id)
        )
        """,
        """
        CREATE TABLE room_backward_extremities (
            room_id TEXT NOT NULL, event_id TEXT NOT NULL, PRIMARY KEY (room_id, event_id)
        )
        """,
        """
        CREATE TABLE room_extremity_log (
            room_id TEXT NOT NULL, stream_ordering BIGINT NOT NULL, event_id TEXT NOT NULL,
            PRIMARY KEY (room_id, stream_ordering, event_id)
        )
        """,
        """
        CREATE TABLE room_state_groups (
            id BIGINT NOT NULL PRIMARY KEY, room_id TEXT NOT NULL, prev_group BIGINT, chain SMALLINT NOT NULL
        )
        """,
        "CREATE TABLE room_state_merges (merged TEXT NOT NULL PRIMARY KEY, result BIGINT NOT NULL)",
        """
        CREATE TABLE room_state_rows (
            state_group BIGINT NOT NULL, type TEXT NOT NULL, state_key TEXT NOT NULL, event_id TEXT NOT NULL,
            PRIMARY KEY (state_group, type, state_key)
        )
        """,
        # state events of a full group whose key is not known yet
        """
        CREATE TABLE room_state_awaited (
            event_id TEXT NOT NULL, state_group BIGINT NOT NULL, PRIMARY KEY (event_id, state_group)
        )
        """,
        """
        CREATE TABLE room_current_state (
            room_id TEXT NOT NULL, type TEXT NOT NULL, state_key TEXT NOT NULL, event_id TEXT NOT NULL,
            PRIMARY KEY (room_id, type, state_key)
        )
        """,
        """
        CREATE TABLE room_state_deltas (
            stream_ordering BIGINT NOT NULL, ord BIGINT NOT NULL, instance_name TEXT NOT NULL, room_id TEXT NOT NULL,
            type TEXT NOT NULL, state_key TEXT NOT NULL, event_id TEXT, prev_event_id TEXT,
            PRIMARY KEY (stream_ordering, ord)
        )
        """,
        """
        CREATE TABLE room_local_members (
            room_id TEXT NOT NULL, user_id TEXT NOT NULL, membership TEXT NOT NULL, PRIMARY KEY (room_id, user_id)
        )
        """,
    ),
)
POSTGRESQL_STEPS: Final = (("CREATE SEQUENCE room_state_group_ids",),)

_METADATA: Final = (  # the fields of EventMetadata
    "SELECT event_id, room_id, depth, stream_ordering, outlier, rejected, soft_failed, state_group FROM room_events "
    "WHERE event_id AMONG"
)

# A group and those below it, the nearest last, so that the last value for a key counts.
_GROUP_STATE: Final = """
    WITH RECURSIVE chain (id, prev_group, place) AS (
        SELECT id, prev_group, 0 FROM room_state_groups WHERE id = ?
        UNION ALL
        SELECT below.id, below.prev_group, chain.place + 1
        FROM chain JOIN room_state_groups below ON below.id = chain.prev_group
    )
    SELECT type, state_key, event_id FROM chain JOIN room_state_rows ON state_group = chain.id ORDER BY place DESC
"""


class Sql:
    """Runs SQL written for both databases: ``?`` is a parameter, ``AMONG`` a list of texts as one parameter."""

    def __init__(self, database: ISqlExecutor) -> None:
        self._database = database
        self.is_sqlite = database.dialect == "sqlite"

    def run(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows."""
        return self._database.execute(self._translated(sql), parameters)

    def many(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run a statement for each item, if there are any."""
        if parameters:
            self._database.executemany(self._translated(sql), parameters)

    def among(self, sql: str, *parameters: object, texts: Collection[str]) -> list[tuple[Any, ...]]:
        """Run a statement whose last parameter is a list, unless that is empty, and return its rows."""
        if not texts:
            return []
        return self.run(sql, *parameters, json.dumps([*texts]) if self.is_sqlite else [*texts])

    def _translated(self, sql: str) -> str:
        if self.is_sqlite:
            return sql.replace("AMONG", "IN (SELECT value FROM json_each(?))")
        return sql.replace("AMONG", "= ANY(?)").replace("?", "%s")


def declare_rooms(database: ISqlExecutor) -> None:
    """Upgrade the tables of rooms; SchemaError if they are newer than this code."""
    steps: Sequence[Sequence[str]] = STEPS
    if database.dialect == "postgresql":
        steps = [(*common, *own) for common, own in zip(STEPS, POSTGRESQL_STEPS, strict=True)]
        database.execute("SELECT pg_advisory_xact_lock(7236829)")  # two writers may start at once
    upgrade(database.execute, nullcontext, steps, VERSIONS)


class RoomTables:
    """The tables, for one transaction, which caches state groups (docs/protocol/traps.md 50)."""

    def __init__(self, database: ISqlExecutor, *, reading: bool = False) -> None:
        self._sql = Sql(database)
        self._locks = not (reading or self._sql.is_sqlite)
        self._groups: dict[int, StateGroup] = {}
        self._fresh: dict[int, str] = {}  # groups that are not stored yet, with their rooms
        self._next_group = 0
        self._room: Room | None = None

    # ---- rooms and events

    def room(self, room_id: str) -> Room | None:
        """Return a room; in PostgreSQL, lock it against other writers."""
        sql = "SELECT room_version, min_depth, tangled FROM room_summaries WHERE room_id = ?"
        if self._locks:
            self._sql.run(
                "INSERT INTO room_summaries (room_id, tangled) VALUES (?, 0) ON CONFLICT (room_id) DO NOTHING", room_id
            )
            sql += " FOR UPDATE"
        self._room = None
        for version, min_depth, tangled in self._sql.run(sql, room_id):
            self._room = Room(version, min_depth, bool(tangled))
        return self._room

    def put_room(self, room_id: str, room: Room) -> None:
        """Store a room, if it has changed."""
        if room == self._room:
            return
        self._sql.run(
            "INSERT INTO room_summaries (room_id, room_version, min_depth, tangled) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (room_id) DO UPDATE SET room_version = excluded.room_version, "
            "min_depth = excluded.min_depth, tangled = excluded.tangled",
            *(room_id, room.room_version, room.min_depth, int(room.tangled)),
        )
        self._room = room

    def metadata(self, event_ids: Collection[str]) -> dict[str, EventMetadata]:
        """Return those of the events that are stored."""
        return {row[0]: EventMetadata(*row) for row in self._sql.among(_METADATA, texts=event_ids)}

    def events(self, event_ids: Collection[str]) -> dict[str, Event]:
        """Return those of the events that are stored, whole."""
        rows = self._sql.among("SELECT text, depth, rejected FROM room_events WHERE event_id AMONG", texts=event_ids)
        events = [Event.from_text(text, depth=depth, rejected=rejected) for text, depth, rejected in rows]
        return {event.event_id: event for event in events}

    def add_events(self, instance_name: str, placed: Sequence[PlacedEvent]) -> None:
        """Store new events."""
        self._sql.many(
            "INSERT INTO room_events (event_id, room_id, depth, stream_ordering, instance_name, outlier, rejected, "
            "soft_failed, out_of_band, state_group, text) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    *(it.event_id, it.room_id, each.depth, each.stream_ordering, instance_name, int(it.outlier)),
                    *(it.rejected, int(it.soft_failed), int(it.out_of_band_membership), each.state_group, it.text),
                )
                for each in placed
                for it in [each.event]
            ],
        )

    def de_outlier(self, instance_name: str, placed: PlacedEvent) -> None:
        """Turn an outlier into an ordinary event."""
        event = placed.event
        self._sql.run(
            "UPDATE room_events SET outlier = 0, rejected = NULL, soft_failed = ?, state_group = ? WHERE event_id = ?",
            *(int(event.soft_failed), placed.state_group, event.event_id),
        )
        self._sql.run(
            "INSERT INTO room_ex_outliers (stream_ordering, event_id, instance_name, state_group) VALUES (?, ?, ?, ?)",
            *(placed.stream_ordering, event.event_id, instance_name, placed.state_group),
        )

    # ---- edges and extremities

    def edges_from(self, event_ids: Collection[str]) -> list[tuple[str, str]]:
        """Return (event, prev_event) for those of the events that are not outliers."""
        edges = "SELECT event_id, prev_event_id FROM room_edges JOIN room_events USING (event_id)"
        rows = self._sql.among(f"{edges} WHERE event_id AMONG AND outlier = 0", texts=event_ids)
        return [(event_id, prev) for event_id, prev in rows]

    def edges_to(self, event_ids: Collection[str]) -> list[tuple[str, str]]:
        """Return (event, prev_event) where the prev_event is one of those given."""
        edges = "SELECT event_id, prev_event_id FROM room_edges"
        rows = self._sql.among(f"{edges} WHERE prev_event_id AMONG", texts=event_ids)
        return [(event_id, prev) for event_id, prev in rows]

    def followed_by_good(self, event_ids: Collection[str]) -> set[str]:
        """Return those that are a ``prev_event`` of an event that is no outlier, not rejected and not soft-failed."""
        rows = self._sql.among(
            "SELECT DISTINCT prev_event_id FROM room_edges JOIN room_events USING (event_id) "
            "WHERE prev_event_id AMONG AND outlier = 0 AND rejected IS NULL AND soft_failed = 0",
            texts=event_ids,
        )
        return {prev for (prev,) in rows}

    def add_edges(self, edges: Iterable[tuple[str, str]], room_id: str) -> None:
        """Store (event, prev_event)."""
        self._sql.many(
            "INSERT INTO room_edges (event_id, prev_event_id, room_id) VALUES (?, ?, ?)",
            [(event_id, prev, room_id) for event_id, prev in edges],
        )

    def forward(self, room_id: str) -> set[str]:
        """Return the forward extremities."""
        rows = self._sql.run("SELECT event_id FROM room_forward_extremities WHERE room_id = ?", room_id)
        return {event_id for (event_id,) in rows}

    def set_forward(self, room_id: str, event_ids: Collection[str], at: int | None) -> None:
        """Replace the forward extremities, and log them."""
        self._sql.run("DELETE FROM room_forward_extremities WHERE room_id = ?", room_id)
        self._sql.many(
            "INSERT INTO room_forward_extremities (room_id, event_id) VALUES (?, ?)",
            [(room_id, each) for each in event_ids],
        )
        if at is not None:
            self._sql.many(
                "INSERT INTO room_extremity_log (room_id, stream_ordering, event_id) VALUES (?, ?, ?)",
                [(room_id, at, each) for each in event_ids],
            )

    def backward(self, room_id: str) -> set[str]:
        """Return the backward extremities."""
        rows = self._sql.run("SELECT event_id FROM room_backward_extremities WHERE room_id = ?", room_id)
        return {event_id for (event_id,) in rows}

    def change_backward(self, room_id: str, add: Collection[str], remove: Collection[str]) -> None:
        """Add missing events to the backward extremities, then remove events that are not missing any more."""
        self._sql.many(
            "INSERT INTO room_backward_extremities (room_id, event_id) VALUES (?, ?) ON CONFLICT DO NOTHING",
            [(room_id, each) for each in add],
        )
        self._sql.among(
            "DELETE FROM room_backward_extremities WHERE room_id = ? AND event_id AMONG", room_id, texts=remove
        )

    # ---- state

    def group(self, number: int) -> StateGroup:
        """Return a state group."""
        if number not in self._groups:
            found = self._sql.run("SELECT prev_group, chain FROM room_state_groups WHERE id = ?", number)
            if not found:
                raise UnknownRoomError(f"there is no state group {number}")
            rows = self._sql.run("SELECT type, state_key, event_id FROM room_state_rows WHERE state_group = ?", number)
            ((prev_group, chain),) = found
            self._groups[number] = StateGroup(prev_group, _state(rows), chain)
        return self._groups[number]

    def group_state(self, number: int) -> dict[StateKey, str]:
        """Return the full state of a group."""
        deltas: list[StateMap] = []
        at: int | None = number
        while at is not None and at in self._fresh:
            deltas.append(self._groups[at].delta)
            at = self._groups[at].prev_group
        state = {} if at is None else _state(self._sql.run(_GROUP_STATE, at))
        for delta in reversed(deltas):
            state.update(delta)
        return state

    def resolved_group(self, groups: Sequence[int]) -> int | None:
        """Return the stored result of resolving ``groups``, ascending; None if there is none."""
        rows = self._sql.run("SELECT result FROM room_state_merges WHERE merged = ?", _encode_groups(groups))
        return next((int(result) for (result,) in rows), None)

    def add_resolved_group(self, groups: Sequence[int], result: int) -> None:
        """Store the result of resolving groups."""
        self._sql.run("INSERT INTO room_state_merges (merged, result) VALUES (?, ?)", _encode_groups(groups), result)

    def add_group(self, room_id: str, prev_group: int | None, chain: int, rows: StateMap) -> int:
        """Give a state group a number; ``flush`` stores it."""
        number = self._new_number()
        self._groups[number] = StateGroup(prev_group, rows, chain)
        self._fresh[number] = room_id
        return number

    def flush(self) -> None:
        """Store the added state groups; this is the last call of a transaction."""
        fresh = [(number, room_id, self._groups[number]) for number, room_id in self._fresh.items()]
        self._sql.many(
            "INSERT INTO room_state_groups (id, room_id, prev_group, chain) VALUES (?, ?, ?, ?)",
            [(number, room_id, group.prev_group, group.chain) for number, room_id, group in fresh],
        )
        self._sql.many(
            "INSERT INTO room_state_rows (state_group, type, state_key, event_id) VALUES (?, ?, ?, ?)",
            [(number, *key, event_id) for number, _, group in fresh for key, event_id in group.delta.items()],
        )
        self._fresh.clear()

    def add_awaited_state(self, group: int, event_ids: Collection[str]) -> None:
        """Store which state events of a full group are missing."""
        self._sql.many(
            "INSERT INTO room_state_awaited (event_id, state_group) VALUES (?, ?)",
            [(each, group) for each in event_ids],
        )

    def fill_awaited_state(self, keys: Mapping[str, StateKey]) -> None:
        """Add events, each with the key that it sets, to the groups in which they are missing."""
        rows = self._sql.among("SELECT event_id, state_group FROM room_state_awaited WHERE event_id AMONG", texts=keys)
        self._sql.many(
            "INSERT INTO room_state_rows (state_group, type, state_key, event_id) VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO NOTHING",
            [(group, *keys[event_id], event_id) for event_id, group in rows],
        )
        self._sql.many("DELETE FROM room_state_awaited WHERE event_id = ?", [(event_id,) for event_id, _ in rows])

    def current_state(self, room_id: str) -> dict[StateKey, str]:
        """Return the current state."""
        return _state(
            self._sql.run("SELECT type, state_key, event_id FROM room_current_state WHERE room_id = ?", room_id)
        )

    def change_state(self, instance_name: str, room_id: str, at: int, changes: Sequence[StateChange]) -> None:
        """Change the current state, and log the changes."""
        self._sql.many(
            "INSERT INTO room_state_deltas (stream_ordering, ord, instance_name, room_id, type, state_key, event_id, "
            "prev_event_id) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (at, place, instance_name, room_id, *each.key, each.event_id, each.was)
                for place, each in enumerate(changes)
            ],
        )
        self._sql.many(
            "DELETE FROM room_current_state WHERE room_id = ? AND type = ? AND state_key = ?",
            [(room_id, *each.key) for each in changes if each.was is not None],
        )
        self._sql.many(
            "INSERT INTO room_current_state (room_id, type, state_key, event_id) VALUES (?, ?, ?, ?)",
            [(room_id, *each.key, each.event_id) for each in changes if each.event_id is not None],
        )

    def local_members(self, room_id: str) -> dict[str, str]:
        """Return the memberships of local users, by user."""
        rows = self._sql.run("SELECT user_id, membership FROM room_local_members WHERE room_id = ?", room_id)
        return {user: membership for user, membership in rows}  # noqa: C416 - the driver's rows are no pairs

    def set_local_members(self, room_id: str, memberships: Mapping[str, str | None]) -> None:
        """Change memberships of local users; None deletes one."""
        self._sql.many(
            "DELETE FROM room_local_members WHERE room_id = ? AND user_id = ?",
            [(room_id, user) for user in memberships],
        )
        self._sql.many(
            "INSERT INTO room_local_members (room_id, user_id, membership) VALUES (?, ?, ?)",
            [(room_id, user, membership) for user, membership in memberships.items() if membership is not None],
        )

    def _new_number(self) -> int:
        if not self._sql.is_sqlite:
            ((number,),) = self._sql.run("SELECT nextval('room_state_group_ids')")
            return int(number)
        if not self._next_group:  # SQLite has one writer at a time
            ((self._next_group,),) = self._sql.run("SELECT coalesce(max(id), 0) FROM room_state_groups")
        self._next_group += 1
        return self._next_group


def _encode_groups(groups: Sequence[int]) -> str:
    return " ".join(map(str, groups))


def _state(rows: Iterable[tuple[Any, ...]]) -> dict[StateKey, str]:
    return {(kind, state_key): event_id for kind, state_key, event_id in rows}
