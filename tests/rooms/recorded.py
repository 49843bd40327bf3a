"""What a real Synapse made of hand-made and of lived-in rooms, and how to give it to our tables."""

from __future__ import annotations

import gzip
import json
import sqlite3
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replication.rooms.event import Event
from replication.rooms.graph import CHUNK, Rules, persist
from replication.rooms.resolution import resolve
from replication.storage.connection import SqliteStatements
from replication.storage.rooms import RoomTables, declare_rooms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from replication.rooms.resolution import Resolver
    from replication.streams.seams import IStatements

DATA = Path(__file__).parent.parent / "data"


def lines_of(name: str) -> list[Any]:
    """Return the JSON lines of a packed file."""
    return [json.loads(line) for line in gzip.decompress((DATA / name).read_bytes()).splitlines()]


def in_memory() -> SqliteStatements:
    """Return the statements of a database that goes, closed, with them."""
    database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)  # any thread may collect it
    statements = SqliteStatements(database)
    weakref.finalize(statements, database.close)
    return statements


class Keeper:
    """Rooms in a database, in memory unless one is given, without a reactor; counts IDs as a master does."""

    def __init__(
        self, server: str = "local.test", resolver: Resolver = resolve, statements: IStatements | None = None
    ) -> None:
        self.statements = statements or in_memory()
        declare_rooms(self.statements)
        self.rules = Rules("master", resolver, lambda user: user.endswith(f":{server}"), int, lambda: 1_800_000_000_000)
        self.positions = {"events": 1, "backfill": 1}

    def tables(self) -> RoomTables:
        """Return the tables, as a new transaction finds them."""
        return RoomTables(self.statements)

    def take(self, room: str, events: Sequence[Event], *, backfilled: bool = False) -> list[tuple[int, str]]:
        """Persist events in chunks, and return the rows with their IDs; if one is refused, its chunk leaves nothing."""
        stream = "backfill" if backfilled else "events"
        told = []
        for start in range(0, len(events), CHUNK):
            chunk = events[start : start + CHUNK]
            first = self.positions[stream] + 1
            ids = range(first, first + len(chunk))
            self.positions[stream] += len(chunk)
            tables = self.tables()
            self.statements.execute("BEGIN")
            try:
                rows = persist(tables, self.rules, room, chunk, ids, backfilled=backfilled)
                tables.flush()
            except BaseException:
                self.statements.execute("ROLLBACK")
                raise
            self.statements.execute("COMMIT")
            told += [(each, spell(row)) for each, of_id in zip(ids, rows, strict=True) for row in of_id]
        return told

    def rows(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Ask the database itself."""
        return self.statements.execute(sql, parameters)


def spell(row: object) -> str:
    """Return a row as it travels."""
    return json.dumps(row, separators=(",", ":"))


def read_all(room: str, sources: Iterable[Any], known: Callable[[str], Any] | None = None) -> list[Event]:
    """Return recorded events; ``known`` tells a state event that the recorder had at hand before it was stored."""
    events = []
    for source in sources:
        values = dict(source)
        if known is not None and values.get("state_before") is not None:
            values["state_before"] = [
                [of["type"], of["state_key"], each] for each in values["state_before"] for of in [known(each)]
            ]
        events.append(Event.read(room, values))
    return events
