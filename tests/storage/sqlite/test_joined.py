"""Joined streams on SQLite, through a store."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.storage.sqlite.joined import JoinedTable
from replication.storage.sqlite.store import SqliteStore
from replication.streams.definitions import StreamDefinition
from replication.wire.grammar import Token
from tests.contract.joined import PETS, JoinedContract
from tests.contract.stream_store import ME


class JoinedTests(JoinedContract, SynchronousTestCase):
    """The contract on SQLite."""

    DIALECT = "sqlite"
    MARK = "?"
    store: SqliteStore

    def make_store(self, now: object) -> SqliteStore:
        return SqliteStore(":memory:", self.pump)

    def test_each_table_is_sought_by_its_own_index(self) -> None:
        joins = "LEFT JOIN owners ON owners.id = source.owner"
        table = JoinedTable(
            StreamDefinition(PETS, row=["n"], tables=[self.source(joins=joins), self.source("dogs", joins=joins)])
        )
        for query in table.queries:
            sql = f"EXPLAIN QUERY PLAN {query.page}"
            plan = [step for *_, step in self.sql(sql, *query.parameters(ME, Token(0), Token(9), 9))]
            name = query.source.table
            self.assertEqual(plan[0], f"SEARCH source USING INDEX {name}_id (id>? AND id<?)")
            self.assertNotIn("USE TEMP B-TREE FOR ORDER BY", plan)

    def test_an_id_that_is_no_integer_is_refused(self) -> None:
        self.map_pets(self.source())
        self.add("cats", ("x", "a"))
        with self.assertRaisesRegex(StoreError, "column 'id' of table 'cats' holds 'x', not an integer"):
            self.wait(self.store.positions(PETS))
