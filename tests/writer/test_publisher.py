"""Publishing: settled facts are sent in ID order, and a position is stored before it is sent."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.net.protocol import Limits
from replication.storage import open_store
from replication.streams.definitions import CACHES, StreamDefinition
from replication.streams.facts import Fact, fact_bytes
from replication.streams.interfaces import Write
from replication.streams.reorder_buffer import ReorderBuffer
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer import publisher as publisher_module
from replication.writer.publisher import NO_WRITER
from tests.doubles import begin, error_of, logged, now
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump
from tests.writer.cases import ME, Process, WriterCase

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from replication.streams.interfaces import IStreamStore
    from replication.writer.reservation import Reservation
    from replication.writer.stream import StreamWriter


class FailureTests(WriterCase):
    def test_a_position_of_rolled_back_ids_is_stored_before_it_is_published(self) -> None:
        reservation, _ = self.hold()
        self.store.close_gate("commit")
        self.assertEqual(len(self.leave(reservation, ValueError("no"))), 1, "the caller does not wait for the store")
        self.assertEqual((self.process.new_lines(), self.position()), ([], 0))
        self.store.open_gate("commit")
        self.assertEqual((self.process.new_lines(), self.position()), (["POSITION notes master 1 2"], 2))

    def test_rolled_back_ids_below_a_committed_id_need_no_transaction(self) -> None:
        one, two = self.hold()[0], self.hold()[0]
        self.leave(one, ValueError("no"))
        self.store.asked.clear()
        self.leave(two)
        self.assertEqual(self.store.asked.count("commit"), 1)

    def test_facts_that_commit_while_a_position_is_stored_are_published_after_it(self) -> None:
        reservation, _ = self.hold()
        self.store.close_gate("commit")
        self.leave(reservation, ValueError("no"))
        gate = self.store.gates.pop("commit")
        now(self.notes.append([["later"]]))
        self.assertEqual(self.process.new_lines(), [])
        gate.callback(None)
        self.assertEqual(self.process.new_lines(), ['RDATA notes master 3 "later"'])
        self.assertIsNone(self.notes.outgoing.unstored_position(), "the later commit has stored a larger one")

    def test_a_commit_that_ends_late_does_not_lower_the_stored_position(self) -> None:
        outgoing, (first, open_id, last) = self.notes.outgoing, now(self.notes.outgoing.reserve(3))
        for token in (last, first):
            outgoing.writes([Fact(token, ("1",))], alone=False)
        for token in (first, last):
            outgoing.complete([token], [Fact(token, ("1",))])
        self.assertEqual((outgoing.stored, outgoing.unstored_position()), (2, None))
        outgoing.complete([open_id], [])

    def test_a_position_of_no_writer_covers_facts_without_rows_above_an_open_id(self) -> None:
        outgoing, name = self.notes.outgoing, self.notes.definition.name
        open_id, *ids = now(outgoing.reserve(3))
        bare = [Fact(token, ()) for token in ids]
        self.assertEqual(
            outgoing.writes(bare, alone=False), [Write(name, ME, Token(1), []), Write(name, NO_WRITER, ids[-1])]
        )
        outgoing.complete(ids, bare)
        last = [Fact(open_id, ())]
        self.assertEqual(outgoing.writes(last, alone=False), [Write(name, ME, ids[-1], last)])
        outgoing.complete([open_id], last)

    def test_the_stored_position_covers_a_fact_without_rows_below_which_nothing_is_open(self) -> None:
        outgoing, name = self.notes.outgoing, self.notes.definition.name
        fact = Fact(now(outgoing.reserve(1))[0], ())
        self.assertEqual(outgoing.writes([fact], alone=False), [Write(name, ME, fact.token, [fact])])
        outgoing.complete([fact.token], [fact])

    def test_a_position_of_no_writer_covers_a_fact_without_rows_while_ids_are_allocated(self) -> None:
        outgoing, name = self.notes.outgoing, self.notes.definition.name
        floor = outgoing.ids.pending.expect()
        (token,) = now(outgoing.reserve(1))
        self.assertEqual(
            outgoing.writes([Fact(token, ())], alone=False),
            [Write(name, ME, Token(floor), []), Write(name, NO_WRITER, token)],
        )
        outgoing.complete([token], [])
        outgoing.ids.pending.abandon(floor)

    def test_a_failing_store_is_retried_every_second_and_logged_once(self) -> None:
        reservation, _ = self.hold()
        self.store.errors["commit"] = StoreError("disk full")
        with logged() as messages:
            self.leave(reservation, ValueError("no"))
            self.process.clock.pump([1.0] * 10)
            self.store.errors["commit"] = StoreError("disk on fire")
            self.process.clock.pump([1.0] * 10)
        self.assertEqual(
            messages, ["stream notes is not published: disk full", "stream notes is not published: disk on fire"]
        )
        self.assertEqual(self.store.asked.count("commit"), 21)
        del self.store.errors["commit"]
        self.process.clock.advance(1.0)
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 1 2"])

    def test_a_stop_ends_the_retries_of_a_failing_store(self) -> None:
        reservation, _ = self.hold()
        self.store.errors["commit"] = StoreError("disk full")
        with logged() as messages:
            self.leave(reservation, ValueError("no"))
            self.process.stop()
        self.assertEqual(len(messages), 1)
        self.assertEqual(self.process.new_lines(), [])

    def test_an_id_rolled_back_after_the_store_is_closed_is_not_published(self) -> None:
        reservation, _ = self.hold()
        self.process.stop()
        now(self.store.close())
        with logged() as messages:
            self.leave(reservation, ValueError("no"))
        self.assertEqual(messages, [])
        self.assertEqual(self.notes.publisher.ids.pending.open_count, 0)

    def test_an_unexpected_error_of_the_store_stops_publishing_and_is_logged(self) -> None:
        reservation, _ = self.hold()
        self.store.errors["commit"] = TypeError("a bug")
        with logged() as messages:
            self.leave(reservation, ValueError("no"))
        self.assertEqual(messages, ["publishing stream 'notes' has ended: restart this process"])
        self.assertEqual(len(self.flushLoggedErrors(TypeError)), 1)
        del self.store.errors["commit"]
        now(self.notes.append([["later"]]))
        self.assertEqual(self.process.new_lines(), [], "a row after the gap would hide the gap")


class MemoryTests(WriterCase):
    """No follower passes a committed fact because its writer had no memory to send it."""

    def test_facts_that_cannot_be_encoded_become_a_gap(self) -> None:
        with patch.object(publisher_module, "encode_only_row", side_effect=MemoryError):
            now(self.notes.append([["one"]]))
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 2 2"])

    def test_facts_that_could_not_be_sent_become_a_gap_together_with_the_next_ones(self) -> None:
        with patch.object(self.process, "publish", side_effect=MemoryError):
            self.assertIsInstance(error_of(begin(self.notes.append([["one"]]))), MemoryError)
        self.assertEqual(self.process.open, [])
        now(self.notes.append([["two"]]))
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 3 3"])
        now(self.notes.append([["three"]]))
        self.assertEqual(self.process.new_lines(), ['RDATA notes master 4 "three"'])

    def test_a_fact_is_read_from_the_store_if_the_error_came_after_its_commit(self) -> None:
        commit = self.store.commit

        async def commit_and_fail(*arguments: Any) -> None:
            await commit(*arguments)
            raise MemoryError

        with patch.object(self.store, "commit", commit_and_fail):
            self.assertIsInstance(error_of(begin(self.notes.append([["one"]]))), MemoryError)
        self.assertEqual(self.stored("notes"), {2: ('"one"',)})
        now(self.notes.append([["two"]]))
        self.assertEqual(self.process.new_lines(), ['RDATA notes master 2 "one"', 'RDATA notes master 3 "two"'])


class LargeTests(WriterCase):
    limits = Limits(max_queued_bytes=1_000, max_queued_lines=20)

    def test_trap_23_facts_beyond_the_queue_limit_are_published_as_a_gap(self) -> None:
        """More would close every connection, because no peer can read within the same reactor turn."""
        self.assertEqual(len(now(self.notes.append([[1]] * 20))), 20)
        self.assertEqual(len(self.process.new_lines()), 20)
        now(self.notes.append([[1]] * 21))
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 42 42"])
        now(self.notes.append([["x" * 400]] * 3))
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 45 45"])
        now(self.notes.append([[1]]))
        self.assertEqual(self.process.new_lines(), ["RDATA notes master 46 1"])

    def test_an_append_of_many_facts_is_neither_kept_nor_read_to_be_published_as_a_gap(self) -> None:
        """A million facts would take long, in one turn of the reactor."""
        reservation, _ = self.hold()
        now(self.notes.append([[1]] * 21))
        now(self.notes.append([["after it"]]))
        self.assertEqual(self.process.new_lines(), [])
        self.store.asked.clear()
        self.leave(reservation, ValueError("no"))
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 24 24"])
        self.assertNotIn("facts", self.store.asked)
        now(self.notes.append([[2]]))
        self.assertEqual(self.process.new_lines(), ["RDATA notes master 25 2"])

    def test_a_burst_of_exactly_the_bytes_that_may_be_queued_is_published_whole(self) -> None:
        now(self.notes.append([["x" * 20]] * 3))
        size = sum(len(line) + 1 for line in self.process.new_lines())
        for limit, lines in ((size, 3), (size - 1, 1)):
            self.notes.publisher._limits = Limits(max_queued_bytes=limit)
            now(self.notes.append([["x" * 20]] * 3))
            self.assertEqual(len(self.process.new_lines()), lines)

    def test_the_position_after_a_burst_counts_as_a_line(self) -> None:
        reservation, _ = self.hold()
        now(self.notes.append([[1]] * 20))
        now(self.notes.append([[]]))
        self.leave(reservation, ValueError("no"))
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 23 23"])

    def test_trap_5_a_row_beyond_the_line_limit_is_stored_and_published_as_a_gap(self) -> None:
        self.process.limits = Limits()
        now(self.notes.append([["x" * 20_000]]))
        self.assertEqual(self.process.new_lines(), ["POSITION notes master 2 2"])
        self.assertEqual(len(self.stored()[2][0]), 20_002)


class SpillTests(WriterCase):
    """Facts beyond the limit of the reorder buffer are dropped, and read from the store once they are settled."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(publisher_module, "PAGE_ROWS", 3)
        self.notes.outgoing.reorder_buffer = ReorderBuffer(Token(1), max_bytes=1_000)
        self.reservation, _ = self.hold()
        for number in range(8):
            now(self.notes.append([[number, "x" * 100]]))
        self.assertEqual(self.process.new_lines(), [])
        self.assertLess(self.notes.outgoing.reorder_buffer._bytes, 1_000)

    def test_spilled_facts_are_published_in_order(self) -> None:
        self.leave(self.reservation)
        rows = [line.split(" ", 4)[-1] for line in self.process.new_lines()]
        self.assertEqual([int(row) for row in rows if row.isdigit()], list(range(8)))
        self.assertEqual(self.notes.published, 10)

    def test_the_position_never_passes_what_is_published(self) -> None:
        self.store.close_gate("facts")
        self.leave(self.reservation)
        self.assertEqual(self.notes.outgoing.position().data, b"POSITION notes master 1 1\n")
        gate = self.store.gates["facts"]
        self.store.close_gate("facts")  # for the next page
        gate.callback(None)
        published = int(self.process.lines[-1].split(" ")[3])
        self.assertLess(published, 10)
        self.assertEqual(self.notes.outgoing.position().data, b"POSITION notes master %d %d\n" % (published, published))
        self.store.open_gate("facts")
        self.assertEqual(self.notes.outgoing.position().data, b"POSITION notes master 10 10\n")

    def test_facts_that_commit_meanwhile_are_published_after_the_spilled_facts(self) -> None:
        self.store.close_gate("facts")
        self.leave(self.reservation)
        now(self.notes.append([["later"]]))
        self.assertEqual(self.process.new_lines(), [])
        self.store.open_gate("facts")
        self.assertEqual(self.process.new_lines()[-1], 'RDATA notes master 11 "later"')

    def test_a_store_that_fails_between_pages_is_retried(self) -> None:
        self.store.errors["facts"] = StoreError("busy")
        with logged() as messages:
            self.leave(self.reservation)
            self.process.clock.pump([1.0] * 3)
        self.assertEqual(messages, ["stream notes is not published: busy"])
        self.assertEqual(self.process.new_lines(), [])
        del self.store.errors["facts"]
        self.process.clock.advance(1.0)
        self.assertEqual(self.notes.published, 10)

    def test_a_stop_between_pages_leaves_the_rest_to_the_next_start(self) -> None:
        self.store.errors["facts"] = StoreError("busy")
        with logged():
            self.leave(self.reservation)
        self.process.stop()
        self.assertEqual(self.process.new_lines(), [])
        self.assertEqual(self.position(), 10)

    def test_spilled_facts_beyond_half_the_queue_limit_are_published_as_a_gap(self) -> None:
        self.notes.publisher._limits = Limits(max_queued_lines=11)
        self.leave(self.reservation)
        lines = self.process.new_lines()
        self.assertEqual((len(lines), lines[-1]), (7, "POSITION notes master 10 10"))

    def test_spilled_facts_up_to_half_the_queue_limit_and_one_more_page_are_published(self) -> None:
        self.notes.publisher._limits = Limits(max_queued_lines=12)
        self.leave(self.reservation)
        lines = [line for line in self.process.new_lines() if line.startswith("RDATA")]
        self.assertEqual((len(lines), self.notes.published), (8, 10))


class InMemoryTests(WriterCase):
    """A stream that is kept in memory only."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(publisher_module, "IDS_AHEAD", 100)  # its next position is then soon stored
        self.begin()

    def begin(self) -> None:
        definition = StreamDefinition("typing", row=("room_id", "user_ids"), in_memory=True)
        now(self.process.declare(definition))
        self.typing = self.process.writers[definition.name]
        self.store.ends.clear()

    def tokens(self, after: int = 0) -> list[int]:
        page = now(
            self.typing.publisher.page(self.typing.outgoing, after=Token(after), upto=self.typing.published, limit=100)
        )
        return [fact.token for fact in page.facts]

    def test_facts_are_published_and_paged_and_only_a_position_is_stored(self) -> None:
        self.assertEqual(now(self.typing.append([[["!a", []]], [["!b", []], ["!c", []]]])), [2, 3])
        for _ in range(publisher_module.IDS_AHEAD - 3):
            now(self.typing.append([[["!d", []]]]))
        self.assertEqual(
            self.process.new_lines()[:3],
            [
                'RDATA typing master 2 ["!a",[]]',
                'RDATA typing master batch ["!b",[]]',
                'RDATA typing master 3 ["!c",[]]',
            ],
        )
        self.assertEqual(
            self.tokens(after=publisher_module.IDS_AHEAD - 2),
            [publisher_module.IDS_AHEAD - 1, publisher_module.IDS_AHEAD],
        )
        self.assertEqual(self.store.ends, ["committed"])
        self.assertEqual(self.stored("typing"), {})

    def test_trap_29_tokens_of_an_in_memory_stream_ascend_over_a_restart(self) -> None:
        """A follower from before the restart is behind, fetches what is kept, and follows on."""
        now(self.typing.append([[["!a", []]]] * 3))
        self.assertEqual(self.typing.published, 4)
        self.process.new_lines()
        self.begin()
        start = self.typing.published
        self.assertGreater(start, 4)
        self.assertEqual(self.typing.outgoing.position().data, b"POSITION typing master %d %d\n" % (start, start))
        self.assertEqual(self.tokens(after=4), [])
        now(self.typing.append([[["!b", []]]]))
        self.assertEqual(self.process.new_lines(), [f'RDATA typing master {start + 1} ["!b",[]]'])
        self.assertEqual(self.tokens(after=4), [start + 1])

    def test_a_fact_is_published_only_after_a_position_beyond_it_is_stored(self) -> None:
        self.store.close_gate("commit")
        now(self.typing.append([[["!a", []]]]))
        self.assertEqual((self.process.new_lines(), self.typing.published), ([], 1))
        self.store.open_gate("commit")
        self.assertEqual(self.process.new_lines(), ['RDATA typing master 2 ["!a",[]]'])

    def test_the_database_has_no_position_of_this_instance(self) -> None:
        """Otherwise a follower that reads the database would skip facts that are in memory."""
        now(self.typing.append([[["!a", []]]]))
        self.assertIsNone(self.typing.outgoing.unstored_position())
        self.assertEqual(self.position("typing"), 0)

    def test_a_key_appends_once(self) -> None:
        for _ in range(2):
            self.assertEqual(now(self.typing.append([[["!a", []]]], key="k")), [2])
        self.assertEqual(self.tokens(), [2])

    def test_statements_of_the_application_are_committed(self) -> None:
        reservation, fact = self.hold(self.typing)
        now(fact.execute("UPDATE"))
        self.store.ends.clear()
        self.leave(reservation)
        self.assertEqual(self.store.ends[0], "committed")

    def test_a_rolled_back_fact_is_not_kept(self) -> None:
        reservation, fact = self.hold(self.typing)
        now(fact.write(["!a", []]))
        self.leave(reservation, ZeroDivisionError())
        self.assertEqual(self.tokens(), [])
        self.assertEqual(self.process.new_lines(), ["POSITION typing master 1 2"])

    def test_a_fact_is_kept_only_if_its_transaction_commits(self) -> None:
        reservation, fact = self.hold(self.typing)
        now(fact.write(["!a", []]))
        now(fact.execute("UPDATE"))
        fact.invalidate("get", None)
        self.store.errors["commit"] = StoreError("full")
        self.leave(reservation)
        self.assertEqual(self.tokens(), [])
        del self.store.errors["commit"]
        self.process.clock.pump([1.0] * 2)
        reservation, fact = self.hold(self.typing)
        now(fact.write(["!a", []]))
        fact.invalidate("get", None)
        self.assertEqual(fact.caches_token, 0)
        self.leave(reservation)
        self.assertEqual((self.tokens(), fact.caches_token), ([3], 3))
        self.assertEqual(self.stored(CACHES), {3: ('["get",null,1700500]',)})

    def test_facts_that_would_wait_beyond_the_limit_are_refused_and_none_is_lost(self) -> None:
        self.typing.outgoing.reorder_buffer = ReorderBuffer(Token(1), max_bytes=700, spills=False)
        reservation, fact = self.hold(self.typing)
        accepted = [*now(self.typing.append([[["!a", ["x" * 50]]]])), *now(self.typing.append([[["!b", []]]]))]
        block, late = self.hold(self.typing)
        now(late.write(["!c", ["x" * 500]]))
        now(late.execute("SELECT 1"))
        for refused in (self.leave(block), begin(self.typing.append([[["!d", ["x" * 500]]]]))):
            self.assertIn(
                "bytes of its facts wait for ID 2, which is open: try again when it is complete", str(error_of(refused))
            )
        self.assertEqual(self.store.ends, ["rolled back"])
        now(fact.write(["!e", ["x" * 900]]))
        self.leave(reservation)
        self.assertEqual(self.tokens(), [2, *accepted])
        self.assertEqual(self.typing.published, 6)

    def test_facts_whose_commits_are_in_progress_count_to_the_limit(self) -> None:
        """A commit takes time if statements, a key or invalidations are stored with the fact."""
        self.typing.outgoing.reorder_buffer = ReorderBuffer(Token(1), max_bytes=700, spills=False)
        reservation, fact = self.hold(self.typing)
        self.store.close_gate("commit")
        first, refused = (begin(self.typing.append([[[room, ["x" * 400]]]], key=room)) for room in ("!a", "!b"))
        self.assertIn("bytes of its facts wait for ID 2, which is open", str(error_of(refused)))
        self.store.open_gate("commit")
        self.assertEqual(first, [[3]])
        now(fact.write(["!c", []]))
        self.leave(reservation)
        self.assertEqual(now(self.typing.append([[["!d", ["x" * 400]]]], key="!d")), [5])
        self.assertEqual(self.tokens(), [2, 3, 5])

    def test_an_acknowledgement_drops_facts_of_in_memory_streams_only(self) -> None:
        now(self.typing.append([[["!a", []]]] * 3))
        self.typing.outgoing.acknowledge(InstanceName("sender"), Token(3))
        self.assertEqual(self.tokens(), [4])
        log = self.typing.outgoing.memory_log
        assert log is not None
        self.assertEqual(log.acknowledged, {"sender": 3})
        now(self.notes.append([[1]]))
        self.notes.outgoing.acknowledge(InstanceName("sender"), Token(3))
        self.assertEqual(self.stored(), {2: ("1",)})


class SharedIdsTests(WriterCase):
    """Two streams with one ID generator: docs/protocol/traps.md 17."""

    limits = Limits(max_queued_lines=20)

    def setUp(self) -> None:
        super().setUp()
        data, tags = StreamDefinition("data"), StreamDefinition("tags", shares="data")
        now(self.process.declare(data, tags))
        self.data, self.tags = self.process.writers[data.name], self.process.writers[tags.name]

    def test_trap_17_facts_of_two_streams_with_shared_ids_are_published_in_id_order(self) -> None:
        """A Synapse has one position for both streams, and drops facts at or below it."""
        reservation, fact = self.hold(self.data)
        tags = [now(self.tags.append([[each]])) for each in ("a", "b")]
        self.assertEqual((fact.token, tags), (2, [[3], [4]]))
        self.assertEqual(now(self.data.append([[1]])), [5])
        self.assertEqual(now(self.tags.append([["c"]])), [6])
        self.assertEqual(self.process.new_lines(), [])
        now(fact.write(0))
        self.leave(reservation)
        self.assertEqual(
            self.process.new_lines(),
            [
                "RDATA data master 2 0",
                'RDATA tags master 3 "a"',
                'RDATA tags master 4 "b"',
                "RDATA data master 5 1",
                'RDATA tags master 6 "c"',
                "POSITION data master 5 6",
            ],
        )
        self.assertEqual((self.data.published, self.tags.published), (6, 6))

    def test_a_fact_of_one_stream_waits_for_an_open_id_of_the_other(self) -> None:
        reservation, _ = self.hold(self.tags)
        now(self.data.append([[1]]))
        self.assertEqual(self.process.new_lines(), [])
        self.leave(reservation, ZeroDivisionError())
        self.assertEqual(self.process.new_lines(), ["RDATA data master 3 1", "POSITION tags master 1 3"])

    def test_rolled_back_ids_move_the_positions_of_both_streams(self) -> None:
        reservation, _ = self.hold(self.tags, 3)
        self.leave(reservation, ZeroDivisionError())
        self.assertEqual(self.process.new_lines(), ["POSITION data master 1 4", "POSITION tags master 1 4"])
        unstored = self.tags.outgoing.unstored_position()
        self.assertEqual((self.position("data"), None if unstored is None else unstored.upto), (4, 4))

    def test_a_burst_is_published_as_a_gap_in_both_streams(self) -> None:
        reservation, _ = self.hold(self.data)
        for _ in range(11):
            now(self.data.append([[1]]))
            now(self.tags.append([[1]]))
        self.leave(reservation, ZeroDivisionError())
        self.assertEqual(self.process.new_lines(), ["POSITION data master 24 24", "POSITION tags master 24 24"])

    def test_a_burst_of_exactly_the_queue_limit_is_published_whole(self) -> None:
        for facts, lines in ((10, 21), (11, 2)):
            reservation, _ = self.hold(self.data)
            for _ in range(facts):
                now(self.data.append([[1]]))
                now(self.tags.append([[1]]))
            self.leave(reservation, ZeroDivisionError())
            self.assertEqual(len(self.process.new_lines()), lines)

    def test_a_burst_of_exactly_the_bytes_of_the_queue_limit_is_published_whole(self) -> None:
        size = fact_bytes([Fact(Token(3), ('"a"',)), Fact(Token(4), ('"b"',))])
        for limit, sent in ((size, "RDATA"), (size - 1, "POSITION")):
            self.data.publisher._limits = Limits(max_queued_bytes=limit)
            reservation, _ = self.hold(self.data)
            now(self.data.append([["a"]]))
            now(self.tags.append([["b"]]))
            self.leave(reservation, ZeroDivisionError())
            self.assertEqual({line.split(" ")[0] for line in self.process.new_lines()[:2]}, {sent})

    def test_spilled_facts_are_published_as_a_gap_in_both_streams(self) -> None:
        self.tags.outgoing.reorder_buffer = ReorderBuffer(Token(1), max_bytes=100)
        reservation, _ = self.hold(self.data)
        for _ in range(3):
            now(self.tags.append([["x" * 50]]))
        self.leave(reservation, ZeroDivisionError())
        self.assertEqual(self.process.new_lines(), ["POSITION data master 5 5", "POSITION tags master 5 5"])


def store_position(writer: StreamWriter, store: IStreamStore, pump: Pump) -> None:
    """Store the position, as the process does every second."""
    write = writer.outgoing.unstored_position()
    if write is not None:
        pump.wait(store.transaction().commit([write]))
        writer.outgoing.stored = max(writer.outgoing.stored, write.upto)


class StoredPositionTests(SynchronousTestCase):
    """No ID at or below a stored position is open: a replay reads the database only."""

    def setUp(self) -> None:
        folder = TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name, "m.db")
        self.pump = Pump()
        self.start()

    def tearDown(self) -> None:
        self.pump.wait(self.store.close())

    def start(self) -> None:
        self.store = open_store(f"sqlite:///{self.path}", self.pump)
        self.process = Process(self.store)
        self.pump.wait(self.process.declare(StreamDefinition("notes")))
        self.notes = self.process.writers[StreamName("notes")]

    def positions(self) -> dict[str, int]:
        with closing(sqlite3.connect(self.path)) as database:
            return dict(database.execute("SELECT instance_name, stream_id FROM stream_positions").fetchall())

    def append(self, *rows: object) -> None:
        self.pump.wait(self.notes.append([list(rows)]))

    def test_the_stored_position_stays_below_an_open_id(self) -> None:
        self.append("2")
        reservation = self.notes.reserve()
        self.pump.wait(reservation.__aenter__())
        self.append("4")
        self.append("5")
        self.assertEqual(self.positions(), {ME: 2})
        self.pump.wait(reservation.__aexit__(None, None, None))
        self.assertEqual(self.positions()[ME], 5)

    def test_the_stored_position_reaches_facts_that_were_committed_together(self) -> None:
        """Each of the facts was committed while the others were open."""
        appends = [Deferred.fromCoroutine(self.notes.append([[number]])) for number in range(3)]
        for each in appends:
            self.pump.wait(each)
        self.assertEqual(self.positions(), {ME: 2})
        store_position(self.notes, self.store, self.pump)
        self.assertEqual(self.positions(), {ME: 4})
        self.assertIsNone(self.notes.outgoing.unstored_position())
        self.append("5")
        self.assertIsNone(self.notes.outgoing.unstored_position())

    def test_the_id_of_a_fact_without_rows_above_an_open_id_is_not_reused(self) -> None:
        """Trap 40: the ID has no row, and it is not settled."""
        reservation = self.notes.reserve()
        self.pump.wait(reservation.__aenter__())
        self.append()
        self.append()
        self.assertEqual(self.positions(), {ME: 1, "": 4})
        self.pump.wait(reservation.__aexit__(ValueError, ValueError(), None))
        self.pump.wait(self.store.close())
        self.start()
        self.assertEqual(self.pump.wait(self.notes.append([["next"]])), [5])
        self.assertEqual(self.positions()[ME], 5)

    def test_after_a_restart_every_stored_fact_counts_as_complete(self) -> None:
        self.pump.wait(self.notes.reserve().__aenter__())
        self.append("3")
        self.assertEqual(self.positions(), {ME: 1})
        self.pump.wait(self.store.close())
        self.start()
        store_position(self.notes, self.store, self.pump)
        self.assertEqual(self.positions(), {ME: 3})


class PostgresPositionTests(HasDatabase, SynchronousTestCase):
    """Transactions with statements run in parallel, so the position is stored once a second."""

    def setUp(self) -> None:
        self.pump = Pump()
        self.store = open_store(self.url, self.pump)
        self.addCleanup(lambda: self.pump.wait(self.store.close()))
        self.process = Process(self.store)
        self.pump.wait(self.process.declare(StreamDefinition("notes")))
        self.notes = self.process.writers[StreamName("notes")]

    def test_trap_17_streams_that_share_their_ids_allocate_from_one_sequence(self) -> None:
        """Also if another process has allocated from it."""
        data, tags = StreamDefinition("data"), StreamDefinition("tags", shares="data")
        self.pump.wait(self.process.declare(data, tags))
        writers = [self.process.writers[each.name] for each in (tags, data, tags)]
        sequence = self.store.sequence(data.name)
        self.assertIsNotNone(sequence)
        for writer in writers:
            writer.publisher.ids.sequence = sequence
        tokens = [token for writer in writers for token in self.pump.wait(writer.append([[1]]))]
        self.sql("SELECT nextval('stream_data_seq')")
        tokens += self.pump.wait(writers[0].append([[1]]))
        self.assertEqual(tokens, [2, 3, 4, 6])
        self.assertEqual(self.process.new_lines()[-2:], ["RDATA tags master 6 1", "POSITION data master 4 6"])

    def test_rows_of_one_fact_have_the_order_of_their_table_also_if_the_stream_shares_its_ids(self) -> None:
        """They were sent in the order of ``append``, and pages had another one: copies differed."""
        self.sql("CREATE TABLE tags (id bigint NOT NULL, tag text) PARTITION BY LIST (tag)")
        self.sql("CREATE TABLE tags_b PARTITION OF tags FOR VALUES IN ('b')")
        self.sql("CREATE TABLE tags_a PARTITION OF tags FOR VALUES IN ('a')")
        data = StreamDefinition("data")
        tags = StreamDefinition("tags", shares="data", table="tags", id_column="id", row=["tag"])
        self.pump.wait(self.process.declare(data, tags))
        writer = self.process.writers[tags.name]
        writer.publisher.ids.sequence = self.store.sequence(data.name)
        (token,) = self.pump.wait(writer.append([[["a"], ["b"]]]))
        page = self.pump.wait(self.store.facts(tags.name, ME, after=Token(0), upto=token, limit=9))
        self.assertEqual(page.facts[0].texts, ('["b"]', '["a"]'))
        self.assertEqual([each for each in self.process.new_lines() if "tags" in each], ["POSITION tags master 2 2"])
        self.pump.wait(writer.append([[["a"]]]))
        self.assertIn('RDATA tags master 3 ["a"]', self.process.new_lines())

    def test_trap_29_tokens_of_a_stream_without_a_table_ascend_over_a_restart(self) -> None:
        typing = StreamDefinition("typing", in_memory=True)
        ends: list[Token] = []
        for _ in range(2):
            self.pump.wait(self.process.declare(typing))
            writer = self.process.writers[typing.name]
            ends += self.pump.wait(writer.append([[1]] * 3))[-1:]
            # When another commit ends, the position is stored and the facts are published.
            self.pump.wait(self.store.transaction().commit([]))
        self.assertGreater(ends[1], ends[0] + 1_000)
        self.assertEqual(self.positions(), [("", ends[0] - 3 + 2 * publisher_module.IDS_AHEAD + 6)])
        self.assertEqual(self.sql("SELECT relname FROM pg_class WHERE relname = 'stream_typing'"), [])

    def hold(self, sql: str = "SELECT 1") -> tuple[AbstractAsyncContextManager[Reservation], Reservation]:
        reservation = self.notes.reserve()
        fact: Reservation = self.pump.wait(reservation.__aenter__())
        self.pump.wait(fact.execute(sql))
        return reservation, fact

    def positions(self) -> list[tuple[object, ...]]:
        return self.sql("SELECT instance_name, stream_id FROM stream_positions ORDER BY 1")

    def test_the_position_is_stored_after_the_commit(self) -> None:
        reservation, fact = self.hold()
        self.pump.wait(fact.write(7))
        self.pump.wait(reservation.__aexit__(None, None, None))
        self.assertEqual(self.positions(), [])
        self.assertEqual(self.process.new_lines(), ["RDATA notes master 2 7"])
        store_position(self.notes, self.store, self.pump)
        self.assertEqual(self.positions(), [(ME, 2)])

    def test_the_id_of_a_fact_without_rows_is_stored_in_its_transaction(self) -> None:
        """Trap 40: no row shows the ID."""
        reservation, _ = self.hold()
        self.pump.wait(reservation.__aexit__(None, None, None))
        self.assertEqual(self.positions(), [("", 2)])

    def test_the_stored_position_does_not_pass_an_open_id(self) -> None:
        first, _ = self.hold()
        second, fact = self.hold()
        self.pump.wait(fact.write(7))
        self.pump.wait(second.__aexit__(None, None, None))
        store_position(self.notes, self.store, self.pump)
        self.assertEqual(self.positions(), [(ME, 1)])
        self.pump.wait(first.__aexit__(ValueError, ValueError(), None))
        store_position(self.notes, self.store, self.pump)
        self.assertEqual(self.positions(), [(ME, 3)])
