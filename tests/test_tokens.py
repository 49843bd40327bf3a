"""Texts of tokens: what one process spells another one of the same database reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StreamError
from replication.storage import open_store
from replication.streams.positions import MultiWriterToken, token_of
from replication.tokens import Tokens
from replication.wire.grammar import InstanceName, Token
from tests.storage.pump import Pump

ONE, TWO = InstanceName("one"), InstanceName("two")
PLACES = st.dictionaries(st.sampled_from(["one", "two", "three"]).map(InstanceName), st.integers(0, 50).map(Token))


class TokensTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pump = Pump()
        self.store = open_store("sqlite://", self.pump)
        self.pump.wait(self.store.open())
        self.addCleanup(lambda: self.pump.wait(self.store.close()))
        self.tokens = Tokens(self.store)

    def test_one_place_for_all_needs_no_numbers(self) -> None:
        self.assertEqual(self.pump.wait(self.tokens.spell(MultiWriterToken(Token(5)))), "5")
        for text in ("5", "s5", "m5~"):
            self.assertEqual(self.pump.wait(self.tokens.read(text)), MultiWriterToken(Token(5)))

    def test_writers_that_are_ahead_have_numbers_that_another_process_knows(self) -> None:
        token = MultiWriterToken(Token(5), {TWO: Token(9), ONE: Token(7)})
        self.assertEqual(self.pump.wait(self.tokens.spell(token)), "m5~1.7~2.9")
        self.assertEqual(self.pump.wait(Tokens(self.store).read("m5~1.7~2.9")), token)
        self.assertEqual(self.pump.wait(self.tokens.read("m5~2.9~1.7")), token)

    def test_what_is_no_token_and_the_number_of_nobody_are_refused(self) -> None:
        for text in ("", "x", "5.", "m5~7.9", "t3-5"):
            self.assertRaises(StreamError, self.pump.wait, self.tokens.read(text))

    @given(PLACES)
    def test_what_is_spelt_can_be_read(self, places: dict[InstanceName, Token]) -> None:
        token = token_of(places)
        text = self.pump.wait(self.tokens.spell(token))
        self.assertEqual(self.pump.wait(Tokens(self.store).read(text)), token)

    @given(one=PLACES, two=PLACES, three=PLACES)
    def test_protocol_f6_their_order_is_that_of_all_places(
        self, one: dict[InstanceName, Token], two: dict[InstanceName, Token], three: dict[InstanceName, Token]
    ) -> None:
        first, second, third = map(token_of, (one, two, three))
        if first <= second <= third:
            self.assertTrue(first <= third)
        if first <= second <= first:
            self.assertEqual(first, second)
