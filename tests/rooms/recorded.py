"""Recordings of a real Synapse: written scenarios and a used server; and a way to persist them."""

from __future__ import annotations

import gzip
import json
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replication.rooms.event import Event
from replication.rooms.graph import CHUNK, Rules, persist, recalculate
from replication.rooms.resolution import resolve
from replication.storage.sqlite.session import SqliteSession
from replication.storage.tables.rooms import RoomTables, declare_rooms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from replication.rooms.resolution import Resolver
    from replication.streams.interfaces import ISqlExecutor

DATA = Path(__file__).parent.parent / "data"


def lines_of(name: str) -> list[Any]:
    """Return the JSON lines of a packed file."""
    return [json.loads(line) for line in gzip.decompress((DATA / name).read_bytes()).splitlines()]


def in_memory() -> SqliteSession:
    """Return a session of a database in memory."""
    session = SqliteSession(":memory:")
    session.connect()
    weakref.finalize(session, session.database.close)
    return session


class Keeper:
    """Persists events without a reactor, by default in memory; it counts IDs as a master does."""

    def __init__(
        self, server: str = "local.test", resolver: Resolver = resolve, statements: ISqlExecutor | None = None
    ) -> None:
        self.statements: ISqlExecutor = statements or in_memory()
        declare_rooms(self.statements)
        self.rules = Rules("master", resolver, lambda user: user.endswith(f":{server}"), int, lambda: 1_800_000_000_000)
        self.positions = {"events": 1, "backfill": 1}

    def tables(self) -> RoomTables:
        """Return the tables, as in a new transaction."""
        return RoomTables(self.statements)

    def take(self, room: str, events: Sequence[Event], *, backfilled: bool = False) -> list[tuple[int, str]]:
        """Persist events in chunks, and return the rows with their IDs; a refused chunk is rolled back."""
        stream = "backfill" if backfilled else "events"
        sent = []
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
            sent += [(each, encode(row)) for each, of_id in zip(ids, rows, strict=True) for row in of_id]
        return sent

    def recalculate(self, room: str, number: int) -> list[list[object]]:
        """Resolve the current state of a room again, and return the rows."""
        tables = self.tables()
        rows = recalculate(tables, self.rules, room, number)
        tables.flush()
        return rows

    def rows(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run a query."""
        return self.statements.execute(sql, parameters)


def encode(row: object) -> str:
    """Return a row as JSON text."""
    return json.dumps(row, separators=(",", ":"))


def read_all(room: str, sources: Iterable[Any], known: Callable[[str], Any] | None = None) -> list[Event]:
    """Return recorded events; ``known`` returns state events that the recorder had before they were stored."""
    events = []
    for source in sources:
        values = dict(source)
        if known is not None and values.get("state_before") is not None:
            values["state_before"] = [
                [of["type"], of["state_key"], each] for each in values["state_before"] for of in [known(each)]
            ]
        events.append(Event.read(room, values))
    return events
