"""Instance numbers never change, and a token has one text in every process of a database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError, StreamError
from replication.storage import open_store
from replication.storage.tables.instances import TokenCodec, number_instances
from replication.streams.positions import MultiWriterToken, token_of
from replication.wire.grammar import InstanceName, Token
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from replication.streams.interfaces import IStreamStore

ONE, TWO, THREE = (InstanceName(each) for each in ("one", "two", "three"))


PLACES = st.dictionaries(st.sampled_from(["one", "two", "three"]).map(InstanceName), st.integers(0, 50).map(Token))


class SqliteTests(SynchronousTestCase):
    synapse = "CREATE TABLE instance_map (instance_id INTEGER PRIMARY KEY, instance_name TEXT NOT NULL)"
    add = "INSERT INTO instance_map (instance_name) VALUES ('two')"

    def setUp(self) -> None:
        self.pump = Pump()
        self.store = self.make_store()

    def make_store(self) -> IStreamStore:
        store = open_store("sqlite://", self.pump)
        self.pump.wait(store.open())
        self.addCleanup(lambda: self.pump.wait(store.close()))
        return store

    def number(self, *names: InstanceName) -> dict[InstanceName, int]:
        return self.pump.wait(number_instances(self.store, names))

    def execute(self, sql: str) -> None:
        transaction = self.store.transaction()
        self.pump.wait(transaction.execute(sql))
        self.pump.wait(transaction.commit([]))

    def test_a_name_keeps_its_number(self) -> None:
        self.assertEqual(self.number(), {})
        self.assertEqual(self.number(TWO), {TWO: 1})
        self.assertEqual(self.number(ONE, TWO, THREE), {ONE: 2, THREE: 3, TWO: 1})
        self.assertEqual(self.number(), {ONE: 2, THREE: 3, TWO: 1})

    def test_the_table_of_a_synapse_is_used_as_it_is(self) -> None:
        self.execute(self.synapse)
        self.execute(self.add)
        self.assertEqual(self.number(ONE), {TWO: 1, ONE: 2})

    def test_a_table_of_that_name_that_is_another_is_named(self) -> None:
        self.execute("CREATE TABLE instance_map (mine integer)")
        self.assertIn("instance_", str(self.assertRaises(StoreError, self.number, ONE)))
        self.pump.wait(self.store.check())


class PostgresTests(HasDatabase, SqliteTests):
    synapse = (
        "CREATE TABLE instance_map (instance_id serial PRIMARY KEY, instance_name text NOT NULL); "
        "CREATE UNIQUE INDEX instance_map_idx ON instance_map (instance_name)"
    )

    def make_store(self) -> IStreamStore:
        store = open_store(self.url, self.pump)
        self.pump.wait(store.open())
        self.addCleanup(lambda: self.pump.wait(store.close()))
        return store

    def execute(self, sql: str) -> None:
        self.sql(sql)

    def test_two_processes_that_ask_at_once_get_the_same(self) -> None:
        other = self.make_store()
        both = [self.pump.start(number_instances(store, [ONE, TWO])) for store in (self.store, other)]
        first, second = (self.pump.wait(each) for each in both)
        self.assertEqual(first, second)


class TokensTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pump = Pump()
        self.store = open_store("sqlite://", self.pump)
        self.pump.wait(self.store.open())
        self.addCleanup(lambda: self.pump.wait(self.store.close()))
        self.tokens = TokenCodec(self.store)

    def test_one_place_for_all_needs_no_numbers(self) -> None:
        self.assertEqual(self.pump.wait(self.tokens.encode(MultiWriterToken(Token(5)))), "5")
        for text in ("5", "s5", "m5~"):
            self.assertEqual(self.pump.wait(self.tokens.read(text)), MultiWriterToken(Token(5)))

    def test_writers_that_are_ahead_have_the_same_numbers_in_another_process(self) -> None:
        token = MultiWriterToken(Token(5), {TWO: Token(9), ONE: Token(7)})
        self.assertEqual(self.pump.wait(self.tokens.encode(token)), "m5~1.7~2.9")
        self.assertEqual(self.pump.wait(TokenCodec(self.store).read("m5~1.7~2.9")), token)
        self.assertEqual(self.pump.wait(self.tokens.read("m5~2.9~1.7")), token)

    def test_a_text_that_is_no_token_and_an_unused_number_are_refused(self) -> None:
        for text in ("", "x", "5.", "m5~7.9", "t3-5"):
            self.assertRaises(StreamError, self.pump.wait, self.tokens.read(text))

    @given(PLACES)
    def test_an_encoded_token_can_be_parsed(self, places: dict[InstanceName, Token]) -> None:
        token = token_of(places)
        text = self.pump.wait(self.tokens.encode(token))
        self.assertEqual(self.pump.wait(TokenCodec(self.store).read(text)), token)

    @given(one=PLACES, two=PLACES, three=PLACES)
    def test_protocol_f6_their_order_is_that_of_all_places(
        self, one: dict[InstanceName, Token], two: dict[InstanceName, Token], three: dict[InstanceName, Token]
    ) -> None:
        first, second, third = map(token_of, (one, two, three))
        if first <= second <= third:
            self.assertTrue(first <= third)
        if first <= second <= first:
            self.assertEqual(first, second)
