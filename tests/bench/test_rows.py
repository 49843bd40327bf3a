"""The rows that scenarios write and read."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.rows import SHAPES, STREAM, WRITER
from replication.session.feed import spell_facts
from replication.streams.facts import Fact
from replication.wire.grammar import Token, spell_row


class RowTests(SynchronousTestCase):
    def test_lines_are_as_long_as_their_shape_is_called(self) -> None:
        """With the LF, and a token of six digits."""
        for shape, make_row in SHAPES.items():
            fact = Fact(Token(123_456), (spell_row(make_row(123_456)),))
            (chunk,) = spell_facts(STREAM, WRITER, [fact], after=Token(1), upto=fact.token)
            self.assertEqual(f"{len(chunk.data)}-byte lines", shape)

    def test_rows_differ(self) -> None:
        """Or a cache somewhere might make them cheap."""
        for make_row in SHAPES.values():
            self.assertEqual(len({spell_row(make_row(number)) for number in range(1_000)}), 1_000)
