"""Tests of the master and worker of scenarios, and of their rows."""

from __future__ import annotations

from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from replication.bench.daemons import ROWS, STREAM, WRITER, MasterAddress, make_worker
from replication.errors import RemoteProtocolError
from replication.session.encoder import encode_facts
from replication.streams.facts import Fact
from replication.wire.grammar import Token, encode_row

MASTER = MasterAddress(9092, "http://127.0.0.1:9093")


class WorkerTests(SynchronousTestCase):
    def test_the_function_decodes_and_counts_rows(self) -> None:
        made = make_worker(MemoryReactorClock(), MASTER, "sqlite://")
        apply = made.worker._followed.functions.apply[STREAM]
        apply([Fact(Token(2), ("[1]", "[2]")), Fact(Token(3), ("{}",))], None)
        self.assertEqual(made.taken, [3])
        with self.assertRaisesRegex(RemoteProtocolError, "not JSON"):
            apply([Fact(Token(4), ("[",))], None)


class RowTests(SynchronousTestCase):
    def test_lines_have_the_length_of_their_name(self) -> None:
        """With the line feed, and a token of six digits."""
        for shape, make_row in ROWS.items():
            fact = Fact(Token(123_456), (encode_row(make_row(123_456)),))
            (chunk,) = encode_facts(STREAM, WRITER, [fact], after=Token(1), upto=fact.token)
            self.assertEqual(f"{len(chunk.data)}-byte lines", shape)

    def test_rows_differ(self) -> None:
        """Otherwise a cache could make them cheap."""
        for make_row in ROWS.values():
            self.assertEqual(len({encode_row(make_row(number)) for number in range(1_000)}), 1_000)
