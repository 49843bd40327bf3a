"""Which IDs may be open shows what transactions have ended since."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
from twisted.trial.unittest import SynchronousTestCase

from replication.follower.ended_transactions import EndedTransactions
from replication.follower.sources import DatabaseCatchUp
from replication.streams.definitions import StreamDefinition
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.storage.pump import PumpedClock

if TYPE_CHECKING:
    from tests.postgres import PostgresServer

CACHES, ONE = StreamName("caches"), InstanceName("one")


class LookTests(SynchronousTestCase):
    def check(self, *looks: tuple[int, int, int, int]) -> None:
        """Each look has the newest ID, the oldest transaction, the next one, and the expected end."""
        ended = EndedTransactions()
        for newest, oldest, following, upto in looks:
            self.assertTrue(ended.needs_look(Token(newest)))
            ended.look(Token(newest), oldest, following)
            self.assertEqual(ended.upto, upto, (newest, oldest, following))
            self.assertEqual(ended.needs_look(Token(newest)), newest != upto)

    def test_ids_up_to_the_newest_are_closed_once_the_transactions_of_that_time_have_ended(self) -> None:
        self.check((5, 100, 100, 5), (7, 100, 102, 5), (9, 101, 103, 5), (9, 102, 104, 7), (9, 104, 104, 9))

    def test_a_restore_gives_ids_again(self) -> None:
        self.check((9, 100, 100, 9), (4, 100, 101, 4), (6, 100, 102, 4), (6, 102, 102, 6))
        self.check((9, 100, 105, 0), (4, 105, 105, 4))

    def test_another_server_counts_anew(self) -> None:
        self.check((9, 100, 105, 0), (9, 50, 50, 9))


def test_an_id_that_is_open_while_later_ones_are_committed_is_not_passed(postgres: PostgresServer) -> None:
    pump = PumpedClock()
    with postgres.database() as name:
        postgres.sql(
            "CREATE TABLE changes (stream_id BIGINT PRIMARY KEY, writer TEXT, key TEXT); "
            "CREATE TABLE stream_positions (stream_name TEXT, instance_name TEXT, stream_id BIGINT)",
            database=name,
        )
        definition = StreamDefinition(
            "caches", table="changes", instance_column="writer", row=["key"], position_name=""
        )
        source = DatabaseCatchUp(postgres.url(name), pump, [definition])

        def look() -> int:
            pump.wait(source.newest(CACHES))
            return source.settled(CACHES, ONE)

        add = "INSERT INTO changes VALUES (%s, 'one', 'a')"
        with psycopg.connect(postgres.url(name)) as late:
            late.execute(add, [3])
            postgres.sql(add, 4, database=name)
            found = [look()]
            postgres.sql(add, 5, database=name)
            found += [look(), look()]
        found += [look()]
        pump.wait(source.close())
    assert found == [0, 0, 0, 5]
