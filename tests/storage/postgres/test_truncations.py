"""TRUNCATE of a generic table leaves a mark, as a retention does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import FactsGoneError
from replication.streams.definitions import StreamDefinition
from replication.wire.grammar import StreamName, Token
from tests.contract.stream_store import ME, ORDERS, OTHER, facts, write
from tests.storage.on_postgres import OnPostgres

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.wire.grammar import InstanceName

TABLE = "stream_orders"


class TruncationTests(OnPostgres, SynchronousTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.wait(self.store.commit([write(4, facts(2, 3, 4))]))

    def find(self, position: int = 4, stream: str = ORDERS) -> Mapping[InstanceName, Token]:
        """Do what a master does once a second."""
        name = StreamName(stream)
        return self.wait(self.store.mark_truncated(ME, {name: Token(position)})).get(name, {})

    def tokens_after(self, after: int, writer: InstanceName = ME) -> list[int]:
        page = self.wait(self.store.facts(ORDERS, writer, after=Token(after), upto=Token(9), limit=9))
        return [token for token, _ in page.facts]

    def test_facts_of_a_truncated_table_are_marked_as_gone(self) -> None:
        self.assertEqual(self.find(), {})
        self.sql(f"TRUNCATE {TABLE}")
        self.assertEqual(self.find(), {ME: 4})
        self.assertRaises(FactsGoneError, self.tokens_after, 3)
        self.assertEqual(self.tokens_after(4), [])
        self.assertEqual(self.find(), {}, "once")

    def test_facts_that_were_written_after_it_are_not_gone(self) -> None:
        self.find()
        self.sql(f"TRUNCATE {TABLE}")
        self.wait(self.store.commit([write(6, facts(6))]))
        self.assertEqual(self.find(6), {ME: 5})
        self.assertEqual(self.tokens_after(5), [6])
        self.sql(f"TRUNCATE {TABLE}")
        self.assertEqual(self.find(7), {}, "the fact was not known")
        self.wait(self.store.commit([write(8, facts(8))]))
        self.assertEqual(self.find(8), {})
        self.sql(f"TRUNCATE {TABLE}")
        self.assertEqual(self.find(8), {ME: 8})

    def test_facts_of_other_writers_are_marked_too(self) -> None:
        self.wait(self.store.commit([write(6, facts(6), writer=OTHER)]))
        self.find()
        self.sql(f"TRUNCATE {TABLE}")
        self.assertEqual(self.find(), {ME: 4, OTHER: 6})

    def test_a_table_that_is_written_anew_keeps_its_facts(self) -> None:
        self.find()
        for statement in (f"VACUUM FULL {TABLE}", f"CLUSTER {TABLE} USING {TABLE}_pkey"):
            self.sql(statement)
            self.assertEqual(self.find(), {})
        self.assertEqual(self.tokens_after(0), [2, 3, 4])
        self.sql(f"TRUNCATE {TABLE}")
        self.assertEqual(self.find(), {ME: 4})

    def test_facts_that_a_retention_has_deleted_are_not_marked_again(self) -> None:
        self.find()
        self.wait(self.store.forget_facts(ORDERS, ME, Token(3)))
        self.sql(f"VACUUM FULL {TABLE}")
        self.assertEqual(self.find(), {})
        self.assertEqual(self.tokens_after(3), [4])
        self.sql(f"TRUNCATE {TABLE}")
        self.assertEqual(self.find(), {ME: 4})

    def test_a_negative_stream_is_marked_by_its_tokens(self) -> None:
        self.wait(self.store.declare(StreamDefinition("backfill", negative=True)))
        self.wait(self.store.commit([write(3, facts(2, 3), stream=StreamName("backfill"))]))
        self.find(3, "backfill")
        self.sql("TRUNCATE stream_backfill")
        self.assertEqual(self.find(3, "backfill"), {ME: 3})

    def test_a_mark_that_could_not_be_stored_is_stored_by_the_next_call(self) -> None:
        self.find()
        self.sql(f"TRUNCATE {TABLE}")
        forget = self.store.forget_facts

        async def fail(*_: object, **__: object) -> None:
            raise FactsGoneError("no", upto=None)

        self.store.forget_facts = fail  # type: ignore[method-assign]
        self.assertRaises(FactsGoneError, self.find)
        self.store.forget_facts = forget  # type: ignore[method-assign]
        self.assertEqual(self.find(), {ME: 4})

    def test_an_empty_table_and_one_that_was_dropped_have_no_mark(self) -> None:
        self.wait(self.store.declare(StreamDefinition("empty")))
        self.assertEqual(self.find(1, "empty"), {})
        self.sql("TRUNCATE stream_empty")
        self.assertEqual(self.find(1, "empty"), {})
        self.find()
        self.sql(f"ALTER TABLE {TABLE} RENAME TO away")
        self.assertEqual(self.find(), {})
