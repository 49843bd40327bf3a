"""The tables of rooms, by one contract on both databases; and two writers at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from twisted.trial.unittest import SynchronousTestCase

from replication.rooms.event import Event
from replication.storage.tables.rooms import RoomTables, Sql
from tests.contract.rooms import RoomTablesContract
from tests.rooms.recorded import Keeper, in_memory
from tests.rooms.test_graph import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.streams.interfaces import ISqlExecutor
    from tests.postgres import PostgresServer


class SqliteRoomTests(RoomTablesContract, SynchronousTestCase):
    def make_statements(self) -> ISqlExecutor:
        return in_memory()


class PostgresqlStatements:
    """A connection of psycopg's, used on the test's own thread."""

    dialect = "postgresql"

    def __init__(self, url: str) -> None:
        import psycopg

        self.connection: Any = psycopg.connect(url, autocommit=True)

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(sql, parameters or None)
        return cursor.fetchall() if cursor.description else []

    def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        self.connection.cursor().executemany(sql, parameters)


class PostgresqlRoomTests(RoomTablesContract, SynchronousTestCase):
    scenarios = SCENARIOS[::4]  # each needs a database of its own

    @pytest.fixture(autouse=True)
    def _server(self, postgres: PostgresServer) -> Iterator[None]:
        self.server = postgres
        self.closing: list[Any] = []
        yield
        for context, connection in self.closing:
            connection.close()
            context.__exit__(None, None, None)

    def make_statements(self) -> PostgresqlStatements:
        context = self.server.database()
        statements = self.connect(context.__enter__())
        self.closing.append((context, statements.connection))
        return statements

    def connect(self, database: str) -> PostgresqlStatements:
        return PostgresqlStatements(self.server.url(database))

    def test_two_writers_in_different_rooms_at_once_stay_exact(self) -> None:
        with self.server.database() as database:
            keepers = [Keeper(statements=self.connect(database)) for _ in range(2)]

            def write(number: int) -> None:
                keeper, room = keepers[number], f"!{number}"
                keeper.positions["events"] = 1 + number * 1_000
                last: list[str] = []
                for step in range(40):
                    names = [f"{number}.{step}.{each}" for each in range(3)]
                    sources = [
                        {"event_id": name, "type": "t", "state_key": name[-1], "prev_event_ids": last} for name in names
                    ]
                    keeper.take(room, [Event.read(room, source) for source in sources])
                    last = names

            with ThreadPoolExecutor(2) as threads:
                list(threads.map(write, range(2)))
            tables = keepers[0].tables()
            for number in range(2):
                ends = {f"{number}.39.{each}" for each in range(3)}
                self.assertEqual(tables.forward(f"!{number}"), ends)
                self.assertEqual(set(tables.current_state(f"!{number}").values()), ends)
            ((groups, names),) = keepers[0].rows("SELECT count(*), count(DISTINCT id) FROM room_state_groups")
            self.assertEqual(groups, names)
            for keeper in keepers:
                keeper.statements.connection.close()  # type: ignore[attr-defined]

    def test_two_writers_of_one_room_take_turns(self) -> None:
        with self.server.database() as database:
            first, second = (Keeper(statements=self.connect(database)) for _ in range(2))
            first.statements.execute("BEGIN")
            RoomTables(first.statements).room("!r")
            second.statements.execute("SET lock_timeout = '50ms'")
            with self.assertRaisesRegex(Exception, "lock timeout"):
                RoomTables(second.statements).room("!r")
            first.statements.execute("COMMIT")
            for keeper in (first, second):
                keeper.statements.connection.close()  # type: ignore[attr-defined]


def test_one_text_of_a_statement_serves_both_databases() -> None:
    lite = in_memory()
    assert Sql(lite).among("SELECT ? WHERE 'b' AMONG", 1, texts=["a", "b"]) == [(1,)]
    assert Sql(lite).among("SELECT ? WHERE 'c' AMONG", 1, texts=["a", "b"]) == []
