"""Streams gathered from SQLite tables, through a store."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.storage.gathered import GatheredTable
from replication.storage.sqlite import SqliteStore
from replication.streams.registry import StreamDefinition
from replication.wire.grammar import Token
from tests.contract.gathered import PETS, GatheredContract
from tests.contract.stream_store import ME


class GatheredTests(GatheredContract, SynchronousTestCase):
    """What SQLite does."""

    DIALECT = "sqlite"
    MARK = "?"
    store: SqliteStore

    def make_store(self, now: object) -> SqliteStore:
        return SqliteStore(":memory:", self.pump)

    def test_each_table_is_sought_by_its_own_index(self) -> None:
        joins = "LEFT JOIN owners ON owners.id = source.owner"
        table = GatheredTable(
            StreamDefinition(PETS, row=["n"], tables=[self.source(joins=joins), self.source("dogs", joins=joins)])
        )
        for part in table.gathering.parts:
            sql = f"EXPLAIN QUERY PLAN {part.page}"
            plan = [step for *_, step in self.sql(sql, *part.parameters(ME, Token(0), Token(9), 9))]
            name = part.source.table
            self.assertEqual(plan[0], f"SEARCH source USING INDEX {name}_id (id>? AND id<?)")
            self.assertNotIn("USE TEMP B-TREE FOR ORDER BY", plan)
