"""The rooms' tables, for SQLite and PostgreSQL alike: ``IRoomTables`` of ``replication.rooms.seams``.

Everything here blocks; it runs on the database's thread, in one transaction or on one snapshot.  The numbers of events
are as ``protocol`` H has them: a live event's is above zero, a backfilled one's below.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from replication.errors import UnknownRoomError
from replication.rooms.event import Event
from replication.rooms.seams import Group, Room, Stored
from replication.storage.migrate import upgrade

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from replication.rooms.event import StateKey, StateMap
    from replication.rooms.seams import Change, Placed
    from replication.streams.seams import IStatements

VERSIONS: Final = "rooms_schema"

STEPS: Final = (
    (
        """
        CREATE TABLE room_summaries (
            room_id TEXT NOT NULL PRIMARY KEY, room_version TEXT, min_depth BIGINT, tangled SMALLINT NOT NULL
        )
        """,
        # depth is the topological ordering; text is what of an event never changes
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
        # state events that a full group has, but nobody knows yet for which key
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

_STORED: Final = (
    "SELECT event_id, room_id, depth, stream_ordering, outlier, rejected, soft_failed, state_group FROM room_events"
)

# A group and those below it, the nearest last, so that what comes later wins.
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
    """Statements of one text for both databases: ``?`` is a parameter, ``AMONG`` a list of texts as one parameter."""

    def __init__(self, database: IStatements) -> None:
        self._database = database
        self.is_sqlite = database.dialect == "sqlite"

    def run(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows."""
        return self._database.execute(self._spell(sql), parameters)

    def many(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run a statement for each item, if there are any."""
        if parameters:
            self._database.executemany(self._spell(sql), parameters)

    def texts(self, values: Collection[str]) -> object:
        """Return the parameter that stands for a list."""
        return json.dumps([*values]) if self.is_sqlite else [*values]

    def _spell(self, sql: str) -> str:
        if self.is_sqlite:
            return sql.replace("AMONG", "IN (SELECT value FROM json_each(?))")
        return sql.replace("AMONG", "= ANY(?)").replace("?", "%s")


def declare_rooms(database: IStatements) -> None:
    """Bring the rooms' tables up to date; SchemaError if they are newer than this code."""
    steps: Sequence[Sequence[str]] = STEPS
    if database.dialect == "postgresql":
        steps = [(*ours, *theirs) for ours, theirs in zip(STEPS, POSTGRESQL_STEPS, strict=True)]
        database.execute("SELECT pg_advisory_xact_lock(7236829)")  # two writers may begin at once
    upgrade(database.execute, _Here, steps, VERSIONS)


class RoomTables:
    """The tables, for one transaction: what it has learnt of state groups it forgets with it (trap 50)."""

    def __init__(self, database: IStatements, *, reading: bool = False) -> None:
        self._sql = Sql(database)
        self._locks = not (reading or self._sql.is_sqlite)
        self._groups: dict[int, Group] = {}
        self._fresh: dict[int, str] = {}  # groups that are not in the database yet, and their rooms
        self._next_group = 0
        self._room: Room | None = None

    # ---- rooms and events

    def room(self, room_id: str) -> Room | None:
        """Return a room and, in PostgreSQL, keep others from writing to it."""
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
        """Store what is held of a room, if that has changed."""
        if room == self._room:
            return
        self._sql.run(
            "INSERT INTO room_summaries (room_id, room_version, min_depth, tangled) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (room_id) DO UPDATE SET room_version = excluded.room_version, "
            "min_depth = excluded.min_depth, tangled = excluded.tangled",
            *(room_id, room.room_version, room.min_depth, int(room.tangled)),
        )
        self._room = room

    def stored(self, event_ids: Collection[str]) -> dict[str, Stored]:
        """Return those of the events that are stored."""
        if not event_ids:
            return {}
        rows = self._sql.run(f"{_STORED} WHERE event_id AMONG", self._sql.texts(event_ids))
        return {row[0]: _stored(row) for row in rows}

    def events(self, event_ids: Collection[str]) -> dict[str, Event]:
        """Return those of the events that are stored, whole."""
        if not event_ids:
            return {}
        rows = self._sql.run(
            "SELECT event_id, text, depth, rejected FROM room_events WHERE event_id AMONG", self._sql.texts(event_ids)
        )
        return {
            event_id: Event.from_text(text, depth=depth, rejected=rejected) for event_id, text, depth, rejected in rows
        }

    def add_events(self, instance_name: str, placed: Sequence[Placed]) -> None:
        """Store events that were not."""
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

    def de_outlier(self, instance_name: str, placed: Placed) -> None:
        """Make an ordinary event of an outlier."""
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
        if not event_ids:
            return []
        rows = self._sql.run(
            "SELECT event_id, prev_event_id FROM room_edges JOIN room_events USING (event_id) "
            "WHERE event_id AMONG AND outlier = 0",
            self._sql.texts(event_ids),
        )
        return [(event_id, prev) for event_id, prev in rows]

    def edges_to(self, event_ids: Collection[str]) -> list[tuple[str, str]]:
        """Return (event, prev_event) where the prev_event is one of those given."""
        if not event_ids:
            return []
        rows = self._sql.run(
            "SELECT event_id, prev_event_id FROM room_edges WHERE prev_event_id AMONG", self._sql.texts(event_ids)
        )
        return [(event_id, prev) for event_id, prev in rows]

    def behind_good(self, event_ids: Collection[str]) -> set[str]:
        """Return those that are a ``prev_event`` of a good event."""
        if not event_ids:
            return set()
        rows = self._sql.run(
            "SELECT DISTINCT prev_event_id FROM room_edges JOIN room_events USING (event_id) "
            "WHERE prev_event_id AMONG AND outlier = 0 AND rejected IS NULL AND soft_failed = 0",
            self._sql.texts(event_ids),
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
        """Add events that are missing, then remove those that are not any more."""
        self._sql.many(
            "INSERT INTO room_backward_extremities (room_id, event_id) VALUES (?, ?) ON CONFLICT DO NOTHING",
            [(room_id, each) for each in add],
        )
        self._sql.run(
            "DELETE FROM room_backward_extremities WHERE room_id = ? AND event_id AMONG",
            *(room_id, self._sql.texts(remove)),
        )

    # ---- state

    def group(self, number: int) -> Group:
        """Return a state group."""
        if number not in self._groups:
            found = self._sql.run("SELECT prev_group, chain FROM room_state_groups WHERE id = ?", number)
            if not found:
                raise UnknownRoomError(f"there is no state group {number}")
            rows = self._sql.run("SELECT type, state_key, event_id FROM room_state_rows WHERE state_group = ?", number)
            ((prev_group, chain),) = found
            self._groups[number] = Group(prev_group, _state(rows), chain)
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

    def merge(self, groups: Sequence[int]) -> int | None:
        """Return the group that ascending ``groups`` were found to resolve to."""
        rows = self._sql.run("SELECT result FROM room_state_merges WHERE merged = ?", _spell_groups(groups))
        return next((int(result) for (result,) in rows), None)

    def add_merge(self, groups: Sequence[int], result: int) -> None:
        """Remember what groups resolve to."""
        self._sql.run("INSERT INTO room_state_merges (merged, result) VALUES (?, ?)", _spell_groups(groups), result)

    def add_group(self, room_id: str, prev_group: int | None, chain: int, rows: StateMap) -> int:
        """Number a state group; ``flush`` stores it."""
        number = self._new_number()
        self._groups[number] = Group(prev_group, rows, chain)
        self._fresh[number] = room_id
        return number

    def flush(self) -> None:
        """Store the state groups that were added: the last thing in a transaction."""
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

    def await_state(self, group: int, event_ids: Collection[str]) -> None:
        """Remember state events of a full group that are not here yet."""
        self._sql.many(
            "INSERT INTO room_state_awaited (event_id, state_group) VALUES (?, ?)",
            [(each, group) for each in event_ids],
        )

    def state_came(self, keys: Mapping[str, StateKey]) -> None:
        """Put events, each with the key that it sets, into the groups that await them."""
        rows = self._sql.run(
            "SELECT event_id, state_group FROM room_state_awaited WHERE event_id AMONG", self._sql.texts(keys)
        )
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

    def change_state(self, instance_name: str, room_id: str, at: int, changes: Sequence[Change]) -> None:
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
        """Return the memberships of our own users, by user."""
        rows = self._sql.run("SELECT user_id, membership FROM room_local_members WHERE room_id = ?", room_id)
        return {user: membership for user, membership in rows}  # noqa: C416 - pairs, whatever the driver calls a row

    def set_local_members(self, room_id: str, memberships: Mapping[str, str | None]) -> None:
        """Change memberships of our own users; None forgets one."""
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
        if not self._next_group:  # SQLite has one writer at a time, and we are it
            ((self._next_group,),) = self._sql.run("SELECT coalesce(max(id), 0) FROM room_state_groups")
        self._next_group += 1
        return self._next_group


def _stored(row: tuple[Any, ...]) -> Stored:
    event_id, room_id, depth, stream_ordering, outlier, rejected, soft_failed, state_group = row
    return Stored(event_id, room_id, depth, stream_ordering, bool(outlier), rejected, bool(soft_failed), state_group)


def _spell_groups(groups: Sequence[int]) -> str:
    return " ".join(map(str, groups))


def _state(rows: Iterable[tuple[Any, ...]]) -> dict[StateKey, str]:
    return {(kind, state_key): event_id for kind, state_key, event_id in rows}


class _Here:
    """The transaction that we are in: whoever began it ends it."""

    def __enter__(self) -> None:
        """Begin nothing."""

    def __exit__(self, *_: object) -> None:
        """End nothing."""
