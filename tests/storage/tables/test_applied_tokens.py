"""The tokens that a follower has applied: found by range, forgotten below the lowest position, undone by writer."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from twisted.trial.unittest import SynchronousTestCase

from replication.storage import open_store
from replication.storage.tables.applied_tokens import find_applied, find_copied, note_applied, undo_applied
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Callable

    from replication.streams.interfaces import ISqlExecutor

T = TypeVar("T")
LISTS, US = StreamName("device_lists"), InstanceName("us")
ONE, TWO = InstanceName("one"), InstanceName("two")


class SqliteTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pump = Pump()
        self.store = open_store(self.make_place(), self.pump)
        self.pump.wait(self.store.open())
        self.addCleanup(lambda: self.pump.wait(self.store.close()))

    def make_place(self) -> str:
        return f"sqlite:///{self.mktemp()}"

    def write(self, function: Callable[[ISqlExecutor], None]) -> None:
        transaction = self.store.transaction()
        self.pump.wait(transaction.run(function))
        self.pump.wait(transaction.commit([]))

    def found(
        self, first: int = 1, last: int = 99, stream: StreamName = LISTS, follower: InstanceName = US
    ) -> set[Token]:
        return self.pump.wait(
            self.store.read(lambda database: find_applied(database, stream, follower, Token(first), Token(last)))
        )

    def note(self, writer: InstanceName, *tokens: int, floor: int = 0) -> None:
        numbers = [Token(each) for each in tokens]
        self.write(lambda database: note_applied(database, LISTS, US, writer, tokens=numbers, floor=Token(floor)))

    def test_nothing_is_found_before_anything_is_noted(self) -> None:
        self.assertEqual(self.found(), set())

    def test_tokens_are_found_by_range_stream_and_follower(self) -> None:
        self.note(ONE, 3, 5, 8)
        self.assertEqual(self.found(), {3, 5, 8})
        self.assertEqual(self.found(4, 5), {5})
        self.assertEqual(self.found(stream=StreamName("other")), set())
        self.assertEqual(self.found(follower=InstanceName("another")), set())

    def test_tokens_up_to_the_lowest_position_are_forgotten(self) -> None:
        self.note(ONE, 3, 5, 8)
        self.note(TWO, 4, 9, floor=5)
        self.assertEqual(self.found(), {8, 9})

    def test_the_tokens_of_a_writer_that_went_back_are_undone(self) -> None:
        self.note(ONE, 3, 5)
        self.note(TWO, 4, 6)
        self.write(lambda database: undo_applied(database, LISTS, US, ONE, Token(3)))
        self.assertEqual(self.found(), {3, 4, 6})

    def test_a_reset_before_anything_is_noted_undoes_nothing(self) -> None:
        self.write(lambda database: undo_applied(database, LISTS, US, ONE, Token(3)))
        self.assertEqual(self.found(), set())

    def test_of_a_copy_the_tokens_of_all_writers_are_found(self) -> None:
        self.pump.wait(self.store.declare(StreamDefinition(LISTS)))
        for writer, token in ((ONE, 3), (TWO, 4), (ONE, 7)):
            transaction = self.store.transaction()
            fact = Fact(Token(token), ("[1]", "[2]"))
            self.pump.wait(transaction.commit([Write(LISTS, writer, Token(token), [fact])]))
        found = self.pump.wait(self.store.read(lambda database: find_copied(database, LISTS, Token(4), Token(9))))
        self.assertEqual(found, {4, 7})


class PostgresTests(HasDatabase, SqliteTests):
    def make_place(self) -> str:
        return self.url
