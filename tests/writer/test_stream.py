"""Appends: IDs are allocated, a key appends once, and a bad fact refuses the whole append."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from twisted.internet.defer import CancelledError, Deferred

from replication.errors import RowError, StoreError, StreamError
from replication.streams import facts
from replication.streams.definitions import CACHES, StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import Write
from replication.web.pages import PAUSE, AddedLines
from replication.wire.grammar import StreamName, Token
from replication.writer.publisher import NO_WRITER
from replication.writer.stream import FACT_BYTES, SLICE, SLICE_FACTS, SLICE_ROWS
from tests.doubles import FragileStore, SharedStore, begin, error_of, logged, now
from tests.writer.cases import ME, Process, WriterCase


class SequenceTests(WriterCase):
    """Several processes write the stream, so IDs are allocated from a sequence."""

    def make_store(self) -> FragileStore:
        self.shared = SharedStore()
        return self.shared

    def follow(self, seen: int) -> None:
        self.notes.publisher.follow(Token(seen))
        self.notes.publisher.publish()

    def test_ids_are_allocated_from_the_shared_sequence(self) -> None:
        self.shared.others_write("notes", "other", 6)
        self.assertEqual(now(self.notes.append([["a"], ["b"]])), [7, 8])
        self.assertEqual(self.process.new_lines(), ['RDATA notes master 7 "a"', 'RDATA notes master 8 "b"'])
        self.assertEqual(now(self.store.positions(StreamName("notes")))[ME], 8)

    def test_an_append_waits_until_the_sequence_returns_ids(self) -> None:
        self.store.close_gate("draw")
        appended = begin(self.notes.append([["a"]]))
        self.assertEqual((appended, len(self.process.open)), ([], 1))
        self.assertEqual([*self.process.transactions.oldest_first()], [], "no ID is known to be open")
        self.store.open_gate("draw")
        self.assertEqual(appended, [[2]])

    def test_trap_36_a_position_does_not_pass_an_id_that_is_being_allocated(self) -> None:
        self.store.close_gate("draw")
        appended = begin(self.notes.append([["a"]]))
        self.follow(9)
        self.assertEqual(self.process.new_lines(), [])
        self.store.open_gate("draw")
        self.assertEqual(appended, [[2]])
        self.assertEqual(self.process.new_lines(), ['RDATA notes master 2 "a"', "POSITION notes master 2 9"])

    def test_a_transaction_with_statements_stores_no_position_but_that_of_ids_without_rows(self) -> None:
        """The row of the position would be locked until the commit is durable."""
        for rows in ([], ["a"]):
            reservation, fact = self.hold()
            now(fact.execute("UPDATE …"))
            for row in rows:
                now(fact.write(row))
            with patch.object(self.shared, "land", wraps=self.shared.land) as land:
                self.leave(reservation)
            name, token = self.notes.definition.name, fact.token
            written = Write(name, ME, Token(0), [Fact(token, ('"a"',))]) if rows else Write(name, NO_WRITER, token)
            self.assertEqual(land.call_args_list[0].args[0], [written])

    def test_a_position_that_no_row_of_this_writer_shows_is_stored_under_its_name_before_it_is_sent(self) -> None:
        """Otherwise followers would go back, if this process is killed, and another one sends its position."""
        now(self.notes.append([["a"]]))
        self.assertEqual(self.process.new_lines(), ['RDATA notes master 2 "a"'])
        reservation, fact = self.hold()
        now(fact.execute("UPDATE …"))
        self.leave(reservation)  # without a row
        self.assertEqual(now(self.store.stored_positions())[self.notes.definition.name], {ME: 3, NO_WRITER: 3})
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 2 3"])

    def test_the_position_of_an_idle_writer_follows_the_other_writers(self) -> None:
        self.store.close_gate("commit")
        for seen in (5, 5, 4):
            self.follow(seen)
        self.assertEqual(self.process.new_lines(), [], "others may send the stored position if this process ends")
        self.store.open_gate("commit")
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 5"])
        self.assertEqual(self.store.asked.count("commit"), 1)

    def test_the_position_of_a_writer_with_an_open_id_stays(self) -> None:
        reservation, _ = self.hold()
        self.follow(5)
        self.assertEqual(self.process.new_lines(), [])
        self.leave(reservation)
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 5"])

    def test_a_failed_allocation_leaves_no_open_id(self) -> None:
        self.store.close_gate("draw")
        failing = [begin(self.notes.append([["a"]])), begin(self.notes.reserve(2).__aenter__())]
        self.follow(9)
        self.store.errors["draw"] = StoreError("gone")
        self.store.open_gate("draw")
        for each in failing:
            self.assertEqual(str(error_of(each)), "gone")
        self.assertEqual(self.process.open, [])
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 9"])

    def test_a_caller_cancelled_during_the_allocation_leaves_no_open_id(self) -> None:
        self.store.close_gate("draw")
        entering = Deferred.fromCoroutine(self.notes.reserve().__aenter__())
        outcome = begin(entering)
        entering.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.store.open_gate("draw")
        self.assertEqual((self.process.open, self.notes.publisher.ids.pending.open_count), ([], 0))

    def test_a_block_abandoned_during_the_allocation_completes_its_ids(self) -> None:
        self.store.close_gate("draw")
        entering = begin(self.notes.reserve().__aenter__())
        now(self.process.open[0].abandon())
        self.assertEqual(self.process.open, [])
        self.store.open_gate("draw")
        self.assertIn("this process is stopping", str(error_of(entering)))
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 2"])

    def test_a_reservation_that_waits_for_its_ids_is_not_entered_twice(self) -> None:
        self.store.close_gate("draw")
        reservation = self.notes.reserve()
        entering = begin(reservation.__aenter__())
        self.assertIn("used once", str(error_of(begin(reservation.__aenter__()))))
        self.store.open_gate("draw")
        self.assertEqual(len(entering), 1)
        self.leave(reservation)

    def test_an_invalidation_reserves_its_id_at_commit(self) -> None:
        reservation, fact = self.hold()
        fact.invalidate("get", ["a"])
        self.assertNotIn(CACHES, self.shared.last_value)
        self.leave(reservation)
        self.assertEqual(self.stored("caches"), {2: ('["get",["a"],1700500]',)})

    def test_a_commit_without_an_id_for_the_invalidation_is_rolled_back(self) -> None:
        reservation, fact = self.hold()
        now(fact.execute("UPDATE …"))
        fact.invalidate("get", ["a"])
        self.store.errors["draw"] = StoreError("gone")
        self.assertEqual(str(error_of(self.leave(reservation))), "gone")
        self.assertEqual((self.store.ends[0], self.stored()), ("rolled back", {}))
        self.assertEqual((self.process.open, self.notes.publisher.ids.pending.open_count), ([], 0))


class AppendTests(WriterCase):
    def test_append_returns_ascending_ids_once_the_facts_are_durable(self) -> None:
        self.store.close_gate("commit")
        appended = begin(self.notes.append([["a"], [], ["b", "c"]]))
        self.assertEqual((appended, self.process.new_lines()), ([], []))
        self.store.open_gate("commit")
        self.assertEqual(appended, [[2, 3, 4]])
        self.assertEqual(self.stored(), {2: ('"a"',), 4: ('"b"', '"c"')})
        self.assertEqual(
            self.process.new_lines(),
            ['RDATA notes master 2 "a"', 'RDATA notes master batch "b"', 'RDATA notes master 4 "c"'],
        )

    def test_facts_without_rows_have_ids(self) -> None:
        self.assertEqual(now(self.notes.append([[], []])), [2, 3])
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 3"])

    def test_an_append_of_no_facts_returns_no_ids(self) -> None:
        self.assertEqual(now(self.notes.append([])), [])
        self.assertEqual(now(self.notes.append([], key="k")), [])
        self.assertNotIn("commit", self.store.asked)

    def test_a_bad_row_refuses_the_append_and_the_error_names_its_fact(self) -> None:
        error = error_of(begin(self.orders.append([[["o", "p"]], [["o", "p"], ["o"]]])))
        assert isinstance(error, RowError)
        self.assertEqual(str(error), "fact 2: a row of 'orders' is [order_id, state], not an array of 1")
        self.assertEqual((error.fact, self.orders.outgoing.refused), (1, 1))
        self.assertEqual(self.orders.publisher.ids.pending.highest, 1)
        error_of(begin(self.orders.append([[["o"]]])))
        self.assertEqual(self.orders.outgoing.refused, 2)

    def test_a_fact_that_is_too_large_is_refused_and_counted(self) -> None:
        """docs/configuration.md, Fixed limits."""
        limits: dict[str, tuple[list[object], str]] = {
            "MAX_FACT_ROWS": ([1] * 4, "3 rows"),
            "MAX_FACT_BYTES": (["x" * 9], "3 bytes"),
        }
        for limit, (rows, text) in limits.items():
            with patch.object(facts, "_SMALL", 0), patch.object(facts, limit, 3):
                error = error_of(begin(self.notes.append([[], rows])))
            assert isinstance(error, RowError)
            self.assertIn(f"fact 2: a fact has {text} at most, and this one has ", str(error))
            self.assertEqual(error.fact, 1)
        self.assertEqual(self.notes.outgoing.refused, 2)
        self.assertEqual(self.notes.publisher.ids.pending.highest, 1)

    def append_in_turns(self, facts: Any) -> tuple[Any, int]:
        """Append; return the outcome, and how many turns of the reactor came in between."""
        clock = self.process.clock
        with patch.object(clock, "callLater", wraps=clock.callLater) as call_later:
            appended = begin(self.notes.append(facts))
            self.assertEqual(appended, [])
            clock.advance(0)
        return appended[0], call_later.call_count

    def test_a_large_append_takes_turns(self) -> None:
        tokens, turns = self.append_in_turns([[1]] * 45_000)
        self.assertEqual(len(tokens), 45_000)
        self.assertGreater(turns, 45_000 * 2 * FACT_BYTES // SLICE)

    def test_a_million_facts_are_freed_in_turns(self) -> None:
        _, once = self.append_in_turns([[1]] * SLICE_FACTS)
        _, turns = self.append_in_turns([[1]] * (SLICE_FACTS + 1))
        self.assertGreaterEqual(turns, once + 6, "before the IDs; two to make facts; the commit; two to free them")

    def test_lines_are_parsed_when_they_are_encoded_and_blank_ones_take_turns(self) -> None:
        lines = AddedLines([*[b"\n"] * 45_000, b'{"rows":[1]}'])
        begin(self.notes.append(lines))
        self.assertEqual(lines.number, SLICE // FACT_BYTES)
        self.process.clock.advance(0)
        self.assertEqual(lines.number, 45_001)

    def test_a_large_fact_takes_turns(self) -> None:
        self.assertEqual(self.append_in_turns([[1] * (2 * SLICE_ROWS + 1)]), ([2], 3))
        refusal, turns = self.append_in_turns([[2], [1] * (2 * SLICE_ROWS) + [{1}]])
        self.assertEqual((turns, refusal.value.fact, self.notes.outgoing.refused), (2, 1, 1))
        self.assertIn("fact 2: a row must be JSON", str(refusal.value))
        self.assertEqual(begin(self.notes.append([[1] * SLICE_ROWS])), [[3]], "a fact of one slice takes none")

    def test_a_long_row_takes_turns_before_and_after_it_is_encoded(self) -> None:
        long = "x" * SLICE
        decoded_before = [PAUSE, [long]]
        self.assertEqual(self.append_in_turns(decoded_before), ([2], 3), "decoding, encoding, measuring")
        self.assertEqual(self.append_in_turns([[1, long]]), ([3], 2))
        with patch.object(facts, "MAX_FACT_BYTES", SLICE):
            refusal, _ = self.append_in_turns([[1], [long]])
            self.assertIn(f"fact 2: a fact has {SLICE} bytes at most", str(refusal.value))
            refusal, _ = self.append_in_turns([[1], [1, long]])
            self.assertIn(f"fact 2: a fact has {SLICE} bytes at most", str(refusal.value))
        self.assertEqual(self.notes.outgoing.refused, 2)

    def test_a_large_fact_beyond_a_limit_is_refused_and_the_error_names_it(self) -> None:
        for limit, most in (("MAX_FACT_ROWS", SLICE_ROWS), ("MAX_FACT_BYTES", 1_000)):
            with patch.object(facts, limit, most):
                refused = begin(self.notes.append([[1], [1] * (SLICE_ROWS + 1)]))
                self.process.clock.advance(0)
            error = error_of(refused)
            assert isinstance(error, RowError)
            self.assertIn(f"fact 2: a fact has {most} ", str(error))
            self.assertEqual(error.fact, 1)

    def test_a_slice_is_of_so_many_rows_and_facts(self) -> None:
        """A fact counts as FACT_BYTES, and so does its one row."""
        cases: tuple[tuple[list[list[object]], bool], ...] = (
            ([[1]], False),
            ([[1], [1]], True),
            ([[], []], False),
            ([[], [], []], True),
            ([["x" * (FACT_BYTES - 3)]], False),
            ([["x" * (FACT_BYTES - 2)]], True),
            ([["x", "x" * (2 * FACT_BYTES - 2 * 64 - 6)]], False),
            ([["x", "x" * (2 * FACT_BYTES - 2 * 64 - 5)]], True),
        )
        for some, waits in cases:
            with patch("replication.writer.stream.SLICE", 3 * FACT_BYTES):
                appended = begin(self.notes.append(some))
                self.assertEqual(appended == [], waits, some)
                self.process.clock.advance(0)
            self.assertEqual(len(appended), 1, some)

    def test_a_string_is_refused_as_a_fact(self) -> None:
        error = error_of(begin(self.notes.append([["a"], "abc"])))
        self.assertEqual(str(error), "fact 2: a fact is a list of rows, not a str")

    def test_a_failed_append_completes_its_ids(self) -> None:
        self.store.errors["commit"] = StoreError("disk full")
        with logged():
            self.assertEqual(str(error_of(begin(self.notes.append([["a"]])))), "disk full")
        del self.store.errors["commit"]
        self.process.clock.advance(1.0)
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 2"])

    def test_an_append_without_a_key_asks_for_no_receipt_and_stores_none(self) -> None:
        with patch.object(self.store, "land", wraps=self.store.land) as land:
            now(self.notes.append([["a"]]))
        self.assertEqual([call.args[1] for call in land.call_args_list], [None])
        self.store.errors["commit"] = StoreError("disk full")
        with logged():
            error_of(begin(self.notes.append([["a"]])))
        self.assertNotIn("recall", self.store.asked)
        del self.store.errors["commit"]
        self.process.clock.advance(1.0)

    def test_the_same_key_appends_once(self) -> None:
        self.assertEqual(now(self.notes.append([["a"], ["b"]], key="k")), [2, 3])
        self.assertEqual(now(self.notes.append([["a"], ["b"]], key="k")), [2, 3])
        self.assertEqual(now(self.notes.append([["a"], ["b"]], key="other")), [4, 5])
        self.assertEqual(len(self.stored()), 4)

    def test_a_key_of_another_stream_is_another_key(self) -> None:
        """An append to the second stream was acknowledged with the IDs of the first, and not stored."""
        self.assertEqual(now(self.notes.append([["a"], ["b"]], key="k")), [2, 3])
        for _ in range(2):
            self.assertEqual(now(self.orders.append([[["o1", "placed"]]], key="k")), [2])
        self.assertEqual(self.stored("orders"), {2: ('["o1","placed"]',)})

    def test_a_key_of_a_stream_in_memory_is_forgotten_with_its_facts(self) -> None:
        """After a restart, an append was acknowledged with the ID of a fact that no process had any more."""
        typing = StreamDefinition("typing", in_memory=True)
        found: list[int] = []
        for process in (Process(self.store), Process(self.store)):
            now(process.declare(typing))
            writer = process.writers[typing.name]
            tokens = [now(writer.append([["a"]], key="k")) for _ in range(2)]
            self.assertEqual(tokens[0], tokens[1])
            page = now(writer.publisher.page(writer.outgoing, after=Token(0), upto=tokens[0][0], limit=10))
            self.assertEqual([fact.token for fact in page.facts], tokens[0])
            found += tokens[0]
        self.assertLess(found[0], found[1])

    def test_the_same_key_at_the_same_time_appends_once(self) -> None:
        self.store.close_gate("commit")
        outcomes = [begin(self.notes.append([["a"]], key="k")) for _ in range(3)]
        self.store.open_gate("commit")
        self.assertEqual(outcomes, [[[2]]] * 3)
        self.assertEqual(self.stored(), {2: ('"a"',)})
        self.assertEqual(self.process.new_lines()[0], 'RDATA notes master 2 "a"')
        self.assertEqual(self.notes.published, 4)

    def test_a_key_of_a_failed_append_can_be_used_again(self) -> None:
        self.store.errors["commit"] = StoreError("disk full")
        with logged():
            error_of(begin(self.notes.append([["a"]], key="k")))
        del self.store.errors["commit"]
        self.process.clock.advance(1.0)
        self.assertEqual(now(self.notes.append([["a"]], key="k")), [3])

    def test_cancelling_the_caller_does_not_stop_the_append(self) -> None:
        self.store.close_gate("commit")
        appending = Deferred.fromCoroutine(self.notes.append([["a"]], key="k"))
        outcome = begin(appending)
        appending.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.assertEqual(len(self.process.open), 1, "a stop waits for the append")
        self.store.open_gate("commit")
        self.assertEqual(now(self.notes.append([["a"]], key="k")), [2])

    def test_no_append_begins_while_the_process_stops(self) -> None:
        self.store.close_gate("recall")
        appending = begin(self.notes.append([["a"]], key="k"))
        self.process.transactions.stopping = True
        self.store.open_gate("recall")
        self.assertIsInstance(error_of(appending), StreamError)
        self.assertEqual(self.notes.publisher.ids.pending.highest, 1)

    def test_arguments_of_other_types_are_named_before_an_id_is_allocated(self) -> None:
        for count in (2.5, "2"):
            with self.assertRaisesRegex(StreamError, r"reserve\(.*\): the number of IDs is an integer"):
                self.notes.reserve(count)  # type: ignore[call-overload]
        for wrong, what in ((None, "NoneType"), (5, "int")):
            with self.assertRaisesRegex(RowError, f"append\\(\\) takes a list of facts, each a .* not a {what}"):
                now(self.notes.append(wrong))  # type: ignore[arg-type]
        with self.assertRaisesRegex(StreamError, r"append\(key=5\): an idempotency key is a str"):
            now(self.notes.append([["a"]], key=5))  # type: ignore[arg-type]
        self.assertEqual(self.notes.publisher.ids.pending.highest, 1)

    def test_an_appended_fact_waits_for_an_earlier_reservation(self) -> None:
        reservation, _ = self.hold()
        now(self.notes.append([["a"]]))
        self.assertEqual(self.process.new_lines(), [])
        self.leave(reservation)
        self.assertEqual(self.process.new_lines(), ['RDATA notes master 3 "a"'])
