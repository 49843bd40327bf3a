"""Up to where facts were compared: a first audit begins at the positions, and a new writer at its first fact."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from twisted.trial.unittest import SynchronousTestCase

from replication.storage import open_store
from replication.storage.tables.stream_audits import (
    begin_audit,
    end_audit,
    put_audited,
    put_searched,
    read_searched,
    take_former_audit,
)
from replication.storage.transactions import run_transaction
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Callable

    from replication.streams.interfaces import ISqlExecutor

T = TypeVar("T")
EVENTS = StreamName("events")
ONE, TWO = InstanceName("one"), InstanceName("two")


class SqliteTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pump = Pump()
        self.store = open_store(self.make_place(), self.pump)
        self.pump.wait(self.store.open())
        self.addCleanup(lambda: self.pump.wait(self.store.close()))

    def make_place(self) -> str:
        return f"sqlite:///{self.mktemp()}"

    def run_sql(self, function: Callable[[ISqlExecutor], T]) -> T:
        return self.pump.wait(run_transaction(self.store, function))

    def begin(self, follower: str = "us", **positions: int) -> dict[InstanceName, Token]:
        given = {InstanceName(writer): Token(each) for writer, each in positions.items()}
        return self.run_sql(lambda database: begin_audit(database, EVENTS, follower, given))

    def test_a_follower_takes_the_audit_of_its_former_names_on_sqlite(self) -> None:
        """One process uses an SQLite file, under any name; on PostgreSQL another name is another process."""
        for follower, position in (("", 7), ("former", 5), ("us", 4), ("older", 3)):
            self.begin(follower, one=position)
        self.run_sql(lambda database: take_former_audit(database, EVENTS, "us"))
        taken = self.run_sql(lambda database: database.dialect) == "sqlite"
        self.assertEqual(self.begin("us", one=9), {ONE: 5 if taken else 4})
        self.assertEqual(self.begin("former", one=9), {ONE: 9 if taken else 5})
        self.assertEqual(self.begin("", one=9), {ONE: 7})

    def test_a_first_audit_begins_at_the_positions(self) -> None:
        self.assertEqual(self.begin(one=5, two=7), {ONE: 5, TWO: 7})
        self.assertEqual(self.begin(one=9, two=9), {ONE: 5, TWO: 7})

    def test_a_writer_that_was_found_later_is_compared_from_its_first_fact_on(self) -> None:
        self.assertEqual(self.begin(), {})
        self.assertEqual(self.begin(one=5), {ONE: 0})

    def test_it_goes_on_where_it_has_ended_and_never_above_the_position(self) -> None:
        self.begin(one=5)
        self.run_sql(lambda database: put_audited(database, EVENTS, "us", {ONE: Token(8)}))
        self.assertEqual(self.begin(one=9), {ONE: 8})
        self.assertEqual(self.begin(one=6), {ONE: 6})
        self.assertEqual(self.begin("others", one=9), {ONE: 9})

    def test_up_to_where_former_writers_were_searched_is_stored_for_each_follower(self) -> None:
        def searched(follower: str) -> Token:
            return self.run_sql(lambda database: read_searched(database, EVENTS, follower))

        self.assertEqual(searched("us"), 0)
        self.begin(one=5)
        self.assertEqual(searched("us"), 0)
        self.run_sql(lambda database: put_searched(database, EVENTS, "us", Token(9)))
        self.assertEqual((searched("us"), searched("others"), self.begin(one=6)), (9, 0, {ONE: 5}))

    def test_after_its_end_it_begins_again(self) -> None:
        self.run_sql(lambda database: end_audit(database, EVENTS, "us"))
        self.begin(one=5)
        self.run_sql(lambda database: end_audit(database, EVENTS, "us"))
        self.assertEqual(self.begin(one=9), {ONE: 9})


class PostgresTests(HasDatabase, SqliteTests):
    def make_place(self) -> str:
        return self.url
