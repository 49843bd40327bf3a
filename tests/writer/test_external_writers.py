"""Rows of external writers are polled for, more often while rows arrive, and published like own facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, patch

from twisted.internet.defer import succeed
from twisted.logger import LogLevel

from replication.errors import StoreError
from replication.net.protocol import Limits
from replication.session.connection import Keepalive
from replication.storage.contract import IdTakenError
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import SequenceState, Write
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.external_writers import LONGEST
from replication.writer.publisher import NO_WRITER, RETRY_AFTER
from replication.writer.stream import ATTEMPTS
from tests.doubles import FragileStore, begin, error_of, logged, now
from tests.serving import MasterCase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.writer.master import Master
    from tests.doubles import Wire

ORDERS = StreamName("orders")
ME = InstanceName("master")


class ExternallyWrittenStore(FragileStore):
    """A store that external writers write to; the next poll returns ``state``."""

    streams: Sequence[StreamName] = (ORDERS,)
    others: Mapping[StreamName, SequenceState] = {}

    def __init__(self) -> None:
        super().__init__()
        self.state = SequenceState(Token(1), Token(1))
        self.other_positions: dict[InstanceName, Token] = {}

    async def declare(self, *definitions: StreamDefinition) -> None:
        await super().declare(*[StreamDefinition(each.name) for each in definitions])

    async def positions_of(self, streams: Sequence[StreamName]) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        found = await super().positions_of(streams)
        return dict.fromkeys(streams, self.other_positions) if self.other_positions else found

    def watch(self) -> ExternallyWrittenStore:
        return self

    async def poll(self) -> Mapping[StreamName, SequenceState]:
        await self.operation("poll")
        return {**self.others, ORDERS: self.state}

    def insert(self, *tokens: int, writer: InstanceName = ME) -> None:
        """Insert rows as an external writer."""
        facts = [Fact(Token(each), (f'["o","{each}"]',)) for each in tokens]
        now(super().transaction().commit([Write(ORDERS, writer, Token(0), facts)]))

    @property
    def polls(self) -> int:
        return self.asked.count("poll")


class ExternalCase(MasterCase):
    store: ExternallyWrittenStore

    def make_store(self) -> ExternallyWrittenStore:
        return ExternallyWrittenStore()

    def next_poll(
        self, settled: int | None, last_value: int | None = None, waits: float = 0.0, blockers: str = ""
    ) -> None:
        """Set what the next poll returns, and wait for that poll."""
        self.store.state = SequenceState(
            None if settled is None else Token(settled),
            Token(last_value or settled or 0),
            waits,
            [blockers] if blockers else [],
        )
        self.net.advance(LONGEST)

    def published_lines(self, wire: Wire) -> list[str]:
        return [line for line in self.new_lines(wire) if " orders " in line]


class TakenIdTests(ExternalCase):
    """On SQLite plain SQL may take an ID that an append has reserved."""

    def setUp(self) -> None:
        super().setUp()
        self.stream = self.master.stream(ORDERS)
        now(self.master.start())

    def append_beside(self, taken: int) -> Any:
        """Append, while other programs take the IDs of the first ``taken`` attempts; return the outcome."""
        commit, left = self.store.commit, [IdTakenError("taken")] * taken

        async def refuse(*args: Any) -> None:
            if left:
                self.last += 1
                raise left.pop()
            await commit(*args)

        async def last_row(_: StreamName) -> Token:
            return Token(self.last)

        self.last = 5
        with patch.object(self.store, "commit", refuse), patch.object(self.store, "last_row", last_row):
            return now(self.stream.append([[["o1", "placed"]]]))

    def test_an_append_takes_another_id(self) -> None:
        self.assertEqual(self.append_beside(taken=ATTEMPTS - 1), [5 + ATTEMPTS])
        self.assertEqual(self.stream.published, 1, "the horizon is where the last poll has found it")
        self.next_poll(5 + ATTEMPTS)
        self.assertEqual(self.stream.published, 5 + ATTEMPTS)

    def test_it_does_not_go_on_for_ever(self) -> None:
        with self.assertRaises(IdTakenError):
            self.append_beside(taken=ATTEMPTS)

    def test_an_id_of_a_sequence_is_refused_at_once(self) -> None:
        """PostgreSQL gives each ID once, so the other program has invented its ID."""
        self.stream.publisher.ids.sequence = sequence = Mock()
        sequence.allocate.side_effect = lambda _: succeed([7])
        with self.assertRaises(IdTakenError):
            self.append_beside(taken=1)


class PublishingTests(ExternalCase):
    def test_rows_of_external_writers_wait_until_no_smaller_id_can_commit(self) -> None:
        wire = self.greeted("REPLICATE")
        self.store.insert(3)
        self.next_poll(1, last_value=3)
        self.assertEqual(self.published_lines(wire), [])
        self.store.insert(2)
        self.next_poll(3)
        self.assertEqual(
            self.published_lines(wire), ['RDATA orders master 2 ["o","2"]', 'RDATA orders master 3 ["o","3"]']
        )

    def test_trap_18_ids_without_rows_are_published_as_a_position(self) -> None:
        wire = self.greeted("REPLICATE")
        self.store.insert(2)
        self.next_poll(5)
        self.assertEqual(self.published_lines(wire), ['RDATA orders master 2 ["o","2"]', "POSITION orders master 2 5"])

    def test_own_facts_and_external_rows_are_published_in_id_order(self) -> None:
        wire = self.greeted("REPLICATE")
        reservation, mine = self.hold()
        self.assertEqual(mine.token, 2)
        now(mine.write(["o", "mine"]))
        self.store.insert(3)
        self.next_poll(3)
        self.assertEqual(self.published_lines(wire), [])  # ID 2 is open
        now(reservation.__aexit__(None, None, None))
        self.assertEqual(
            self.published_lines(wire), ['RDATA orders master 2 ["o","mine"]', 'RDATA orders master 3 ["o","3"]']
        )

    def test_own_facts_wait_for_smaller_ids_of_external_writers(self) -> None:
        wire = self.greeted("REPLICATE")
        self.append("mine")
        self.net.advance(LONGEST)
        self.assertEqual(self.published_lines(wire), [])
        self.next_poll(2)
        self.assertEqual(self.published_lines(wire), ['RDATA orders master 2 ["o","mine"]'])

    def test_no_position_above_the_horizon_is_stored(self) -> None:
        self.greeted("REPLICATE")
        self.append("one")
        reservation, _ = self.hold()
        self.append("two")
        now(reservation.__aexit__(ValueError, ValueError(), None))
        self.net.pump([1.0] * 3)
        self.assertEqual(now(self.store.stored_positions())[ORDERS][ME], 1)
        self.next_poll(4)
        self.net.pump([1.0] * 3)
        self.assertEqual(now(self.store.stored_positions())[ORDERS][ME], 4)

    def stored(self) -> int | None:
        return now(self.store.stored_positions())[ORDERS].get(ME)

    def test_a_position_that_no_row_shows_is_stored_before_it_is_published(self) -> None:
        """At the next start, it would look like the position of rows that a failover has lost."""
        wire = self.greeted("REPLICATE")
        self.store.insert(2, 3)
        self.next_poll(3)
        self.assertEqual(len(self.published_lines(wire)), 2)
        self.net.advance(1.0)
        self.assertEqual(self.stored(), 3)
        self.store.close_gate("commit")
        self.next_poll(5)
        self.assertEqual(self.published_lines(wire), [])
        self.store.gates.pop("commit").callback(None)
        self.assertEqual((self.published_lines(wire), self.stored()), (["POSITION orders master 3 5"], 5))

    def test_a_position_below_a_row_is_published_at_once(self) -> None:
        """The row may be of another writer, or be left out by ``where``."""
        wire = self.greeted("REPLICATE")
        self.store.insert(9)
        self.next_poll(5, last_value=9)
        self.assertEqual(self.published_lines(wire), ["POSITION orders master 1 5"])

    def test_a_position_at_a_row_of_another_writer_is_published_at_once(self) -> None:
        wire = self.greeted("REPLICATE")
        self.store.insert(5, writer=InstanceName("other"))
        self.store.close_gate("commit")
        self.next_poll(5)
        self.assertEqual(self.published_lines(wire), ["POSITION orders master 1 5"])


class OpeningTests(ExternalCase):
    def setUp(self) -> None:
        super().setUp()
        self.store.state = SequenceState(None, Token(9))

    def test_a_stream_has_no_position_before_its_horizon_is_known(self) -> None:
        """A smaller POSITION would look like a restored database to a follower from before the restart."""
        wire = self.greeted()
        self.send(wire, "REPLICATE")
        self.assertEqual(self.new_lines(wire), ["POSITION caches master 1 1"])
        self.assertEqual(self.master.served.stream_statuses()[0].writers[0].state, "opening")
        self.assertEqual(list(now(self.master.served.page("orders", None, after=5, upto=9, limit=10)).facts), [])
        self.store.insert(7, 9)
        self.next_poll(9)
        self.assertEqual(self.published_lines(wire), ["POSITION orders master 9 9"])
        self.send(wire, "REPLICATE orders")
        self.assertEqual(self.published_lines(wire), ["POSITION orders master 9 9"])
        page = now(self.master.served.page("orders", None, after=5, upto=9, limit=10))
        self.assertEqual([token for token, _ in page.facts], [7, 9])

    def test_followers_learn_that_a_position_is_missing(self) -> None:
        """Its facts may be below those of other writers: without that, programs that poll a follower missed them."""
        self.store.close_gate("poll")
        early = self.connect("REPLICATE")
        self.assertRegex(self.new_lines(early)[1], r"^PING \d+ echo$")
        self.store.gates.pop("poll").callback(None)
        self.assertEqual(self.new_lines(early), ["PING partial", "POSITION caches master 1 1"])
        late = self.connect("REPLICATE")
        self.assertRegex(self.new_lines(late)[1], r"^PING \d+ partial echo$")
        self.next_poll(9)
        for wire in (early, late):
            self.assertEqual(self.new_lines(wire), ["POSITION orders master 9 9", "PING complete"])
        self.assertRegex(self.new_lines(self.connect())[1], r"^PING \d+ echo$")
        self.next_poll(12)
        self.assertEqual(self.new_lines(late), ["POSITION orders master 9 12"])

    def test_a_stream_without_transactions_in_progress_has_a_position_at_start(self) -> None:
        self.store.state = SequenceState(Token(9), Token(9))
        wire = self.greeted()
        self.send(wire, "REPLICATE")
        self.assertEqual(self.new_lines(wire)[0], "POSITION orders master 9 9")
        self.assertEqual(self.store.polls, 2)  # the poll of the start, and the first of the loop

    def test_no_epoch_begins_above_the_last_row(self) -> None:
        """A sequence is ahead of the rows after a failover that has lost them: followers may have facts up to there."""
        now(self.store.open())
        now(self.store.declare(StreamDefinition("orders")))
        self.store.insert(2, 3, 4)
        self.store.state = SequenceState(Token(34), Token(34))
        wire = self.greeted()
        self.assertEqual([(each.settled, each.start) for each in now(self.store.history(ORDERS, ME))], [(0, 4)])
        self.assertEqual(now(self.store.stored_positions())[ORDERS][ME], 34, "no follower goes back at the next start")
        self.send(wire, "REPLICATE")
        self.assertEqual(self.new_lines(wire)[0], "POSITION orders master 34 34")

    def test_an_epoch_begins_at_a_stored_position_above_the_last_row(self) -> None:
        """The rows up to there were deleted, or IDs without rows were published."""
        for writer, position in ((ME, 9), (InstanceName(""), 9), (InstanceName("other"), 4)):
            self.store = self.make_store()
            now(self.store.open())
            now(self.store.declare(StreamDefinition("orders")))
            self.store.insert(2, 3, 4)
            now(self.store.transaction().commit([Write(ORDERS, writer, Token(position))]))
            self.store.state = SequenceState(Token(34), Token(34))
            master = self.make_master()
            now(master.start())
            self.assertEqual([each.start for each in now(self.store.history(ORDERS, ME))], [position], writer)
            stopped = begin(master.stop())
            self.net.pump([1.0] * 20)
            self.assertEqual(stopped, [None])

    def test_a_stream_that_another_instance_publishes_is_not_published_here(self) -> None:
        self.master = self.make_master(streams=[StreamDefinition("orders", writers=("w2",))])
        wire = self.greeted("REPLICATE")
        self.next_poll(9)
        self.assertEqual(self.published_lines(wire), [])

    def test_a_stream_of_another_instance_does_not_hold_up_the_others_with_or_without_a_change(self) -> None:
        name = StreamName("notes")
        unchanged, changed = ({name: SequenceState(Token(each), Token(each))} for each in (5, 6))
        self.store.streams, self.store.others = (name, ORDERS), unchanged
        streams = [StreamDefinition(name, writers=("w2",)), StreamDefinition("orders", writers=("master",))]
        self.store.state = SequenceState(Token(1), Token(1))
        self.master = self.make_master(streams=streams)
        wire = self.greeted("REPLICATE")
        for token, self.store.others in ((2, unchanged), (3, changed)):
            self.store.insert(token)
            self.next_poll(token)
            self.assertEqual(self.published_lines(wire), [f'RDATA orders master {token} ["o","{token}"]'])


class FirstRowTests(ExternalCase):
    """A row with ID 1 reaches every follower (docs/protocol/ids.md F5)."""

    def make_store(self) -> ExternallyWrittenStore:
        store = super().make_store()
        store.state = SequenceState(Token(0), Token(0))  # of an empty table without a sequence
        return store

    def make_master(self, **options: Any) -> Master:
        columns: dict[str, Any] = {"table": "orders", "id_column": "id", "row": ["id", "state"]}
        return super().make_master(**{"streams": [StreamDefinition("orders", **columns)], **options})

    def insert_first(self) -> None:
        """Insert a row with ID 1 before the master starts."""
        now(self.store.open())
        now(self.store.declare(StreamDefinition("orders")))
        self.store.insert(1)
        self.store.state = SequenceState(Token(1), Token(1))

    def test_an_empty_table_begins_at_0_and_its_first_row_is_published(self) -> None:
        wire = self.greeted()
        self.send(wire, "REPLICATE orders")
        self.assertEqual(self.published_lines(wire), ["POSITION orders master 0 0"])
        self.store.insert(1)
        self.next_poll(1)
        self.assertEqual(self.published_lines(wire), ['RDATA orders master 1 ["o","1"]'])
        self.send(wire, "REPLICATE orders")
        self.assertEqual(self.published_lines(wire), ["POSITION orders master 2 1"], "a follower at 0 has a gap")
        self.store.insert(2)
        self.next_poll(2)
        self.send(wire, "REPLICATE orders")
        self.assertEqual(self.published_lines(wire), ['RDATA orders master 2 ["o","2"]', "POSITION orders master 2 2"])

    def test_an_id_1_that_a_rollback_uses_up_after_the_start_is_no_gap(self) -> None:
        wire = self.greeted("REPLICATE orders")
        self.next_poll(1)
        self.assertEqual(self.published_lines(wire), ["POSITION orders master 0 1"])
        self.send(wire, "REPLICATE orders")
        self.assertEqual(self.published_lines(wire), ["POSITION orders master 1 1"])

    def test_a_first_row_is_looked_for_once_and_not_above_id_1(self) -> None:
        for settled, pages in ((0, 2), (9, 1)):  # one of them before it is known who else writes
            self.store.asked.clear()
            self.store.state = SequenceState(Token(settled), Token(settled))
            self.master = self.make_master()
            self.greeted()
            self.next_poll(settled)
            self.assertEqual(self.store.asked.count("rows"), pages)
            self.wires.clear()
            stopped = begin(self.master.stop())
            self.net.pump([1.0] * 20)
            self.assertEqual(stopped, [None])
            self.store.closed = False

    def test_a_run_whose_only_row_is_the_first_stays_in_the_history(self) -> None:
        """Otherwise a follower at 1 would find no common run after a restart (docs/protocol/following.md E7)."""
        self.greeted()
        self.store.insert(1)
        self.next_poll(1)
        (run,) = now(self.store.history(ORDERS, ME))
        self.assertEqual((run.settled, run.start), (0, 0))
        self.wires.clear()
        stopped = begin(self.master.stop())
        self.net.pump([1.0] * 20)
        self.assertEqual(stopped, [None])
        self.store.closed = False
        self.master = self.make_master()
        self.greeted()
        self.assertEqual([each.start for each in now(self.store.history(ORDERS, ME))], [0, 1])
        self.assertEqual(now(self.store.history(ORDERS, ME))[0].name, run.name)

    def test_a_first_row_from_before_the_start_is_a_gap(self) -> None:
        self.insert_first()
        wire = self.greeted()
        self.send(wire, "REPLICATE orders")
        self.assertEqual(self.published_lines(wire), ["POSITION orders master 2 1"])

    def test_a_first_row_is_a_gap_where_only_this_process_writes_too(self) -> None:
        self.insert_first()
        self.patch(self.store, "watch", lambda: None)
        wire = self.greeted()
        self.send(wire, "REPLICATE orders")
        self.assertEqual(self.published_lines(wire), ["POSITION orders master 2 1"])

    def test_a_first_row_that_is_too_large_to_queue_is_a_gap(self) -> None:
        wire = self.greeted("REPLICATE orders")
        with patch("replication.writer.publisher.encode_within", lambda *_, **__: None):
            for token, line in ((1, "POSITION orders master 2 1"), (2, "POSITION orders master 2 2")):
                self.store.insert(token)
                self.next_poll(token)
                self.assertEqual(self.published_lines(wire), [line])
                self.send(wire, "REPLICATE orders")
                self.assertEqual(self.published_lines(wire), [line])

    def test_an_id_1_that_was_used_up_is_no_gap(self) -> None:
        self.store.state = SequenceState(Token(1), Token(1))
        wire = self.greeted()
        self.send(wire, "REPLICATE orders")
        self.assertEqual(self.published_lines(wire), ["POSITION orders master 1 1"])

    def test_a_first_row_whose_transaction_ends_after_the_start_is_a_gap(self) -> None:
        self.store.state = SequenceState(None, Token(1))
        wire = self.greeted("REPLICATE orders")
        self.store.insert(1)
        self.next_poll(1)
        self.assertEqual(self.published_lines(wire), ["POSITION orders master 2 1"])

    def test_a_first_row_that_cannot_be_read_is_read_again(self) -> None:
        self.store.state = SequenceState(None, Token(1))
        wire = self.greeted("REPLICATE orders")
        self.store.insert(1)
        self.store.errors["rows"] = StoreError("disk I/O error")
        self.next_poll(1)
        self.assertEqual(self.published_lines(wire), [])
        del self.store.errors["rows"]
        self.net.advance(RETRY_AFTER)
        self.assertEqual(self.published_lines(wire), ["POSITION orders master 2 1"])

    def test_a_first_row_with_a_value_that_is_no_json_does_not_keep_a_master_from_starting(self) -> None:
        self.insert_first()
        self.store.errors["facts"] = StoreError("what is no JSON")
        wire = self.greeted()
        self.send(wire, "REPLICATE orders")
        self.assertEqual(self.published_lines(wire), ["POSITION orders master 2 1"])

    def test_the_position_of_a_first_row_is_stored(self) -> None:
        self.insert_first()
        self.greeted()
        self.net.pump([1.0] * 2)
        self.assertEqual(now(self.store.stored_positions())[ORDERS][ME], 1)


class BulkInsertTests(ExternalCase):
    limits = Limits(Keepalive(ping_after=1_000, give_up_after=3_000), max_queued_lines=6_000)

    def test_a_bulk_insert_is_published_as_a_gap_after_half_the_queue_limit(self) -> None:
        wire = self.greeted("REPLICATE")
        self.store.insert(*range(2, 20_002))
        self.next_poll(20_001)
        lines = self.published_lines(wire)
        self.assertEqual((len(lines), lines[-1]), (5_001, "POSITION orders master 20001 20001"))
        self.store.insert(20_002)
        self.next_poll(20_002)
        self.assertEqual(self.published_lines(wire), ['RDATA orders master 20002 ["o","20002"]'])


class LargeAppendTests(ExternalCase):
    limits = Limits(Keepalive(ping_after=1_000, give_up_after=3_000), max_queued_lines=20)

    def test_each_part_of_a_large_append_below_a_horizon_is_published_as_a_gap(self) -> None:
        wire = self.greeted("REPLICATE")
        self.append(*["placed"] * 21)  # 2 to 22
        for settled in (18, 21, 22):
            self.next_poll(settled)
            self.assertEqual(self.published_lines(wire), [f"POSITION orders master {settled} {settled}"])


class PollingTests(ExternalCase):
    def polls_in(self, seconds: float) -> int:
        before = self.store.polls
        self.net.pump([0.001] * int(seconds * 1000))
        return self.store.polls - before

    def test_the_pause_between_polls_grows_while_nothing_changes(self) -> None:
        now(self.master.start())
        self.assertGreater(self.polls_in(0.016), 4)
        self.net.pump([0.1] * 100)
        self.assertEqual(self.polls_in(60.0), 100)

    def test_a_change_shortens_the_pause_between_polls(self) -> None:
        now(self.master.start())
        self.net.pump([0.1] * 100)
        self.next_poll(2)
        self.assertGreater(self.polls_in(0.016), 4)

    def test_a_commit_of_this_process_polls_at_once(self) -> None:
        now(self.master.start())
        self.net.pump([0.1] * 100)
        before = self.store.polls
        now(self.master.stream("caches").append([[["get", None, 1]]]))
        self.assertEqual(self.store.polls, before)
        self.append("mine")
        self.assertEqual(self.store.polls, before + 1)

    def test_a_commit_during_a_poll_is_polled_for_after_it(self) -> None:
        now(self.master.start())
        self.net.pump([0.1] * 100)
        self.store.close_gate("poll")
        self.net.advance(LONGEST)
        before = self.store.polls
        self.append("mine")
        self.assertEqual(self.store.polls, before)
        self.store.open_gate("poll")
        self.assertEqual(self.store.polls, before + 1)

    def test_a_failing_database_is_polled_again_and_logged_once(self) -> None:
        wire = self.greeted("REPLICATE")
        with logged(LogLevel.info) as messages:
            self.store.errors["poll"] = StoreError("the server is away")
            self.net.pump([RETRY_AFTER] * 5)
            self.store.insert(2)
            self.store.state = SequenceState(Token(2), Token(2))
            del self.store.errors["poll"]
            self.net.pump([RETRY_AFTER] * 2)
        self.assertEqual(
            messages, ["mapped streams cannot be polled: the server is away", "mapped streams are polled again"]
        )
        self.assertEqual(self.published_lines(wire), ['RDATA orders master 2 ["o","2"]'])

    def test_an_unexpected_error_is_shown_until_the_restart(self) -> None:
        self.greeted("REPLICATE")
        self.store.errors["poll"] = OSError("a bug")
        with logged() as messages:
            self.net.advance(LONGEST)
        self.assertEqual(messages, ["polling mapped streams has ended: restart this process"])
        self.assertEqual(self.master.served.failed_tasks(), ["polling mapped streams"])
        self.assertEqual(len(self.flushLoggedErrors(OSError)), 1)

    def test_the_start_fails_if_the_first_poll_fails(self) -> None:
        self.store.errors["poll"] = StoreError("the server is away")
        with logged():
            self.assertRaises(StoreError, now, self.master.start())
        del self.store.errors["poll"]

    def test_stop_waits_for_a_poll_in_progress(self) -> None:
        now(self.master.start())
        self.store.close_gate("poll")
        self.net.advance(LONGEST)
        stopped = begin(self.master.stop())
        self.assertEqual(stopped, [])
        self.store.open_gate("poll")
        self.assertEqual(stopped, [None])


class StatusTests(ExternalCase):
    def test_the_status_shows_how_many_ids_wait_how_long_and_for_which_transaction(self) -> None:
        now(self.master.start())
        self.next_poll(3, last_value=8, waits=12.5, blockers="session 4711 of anna")
        status = self.master.served.stream_statuses()[0]
        self.assertEqual((status.open_count, status.oldest_open), (5, (4, 12.5)))
        self.assertEqual(list(status.notes), ["stream 'orders': 5 IDs from 4 on wait for session 4711 of anna"])
        samples = {
            each.name: each.value for each in self.master.served.samples() if each.labels.get("stream") == "orders"
        }
        self.assertEqual((samples["open_ids"], samples["oldest_open_seconds"]), (5, 12.5))
        self.next_poll(8)
        status = self.master.served.stream_statuses()[0]
        self.assertEqual((status.open_count, status.oldest_open, list(status.notes)), (0, None, []))

    def test_ids_wait_only_if_a_transaction_does(self) -> None:
        now(self.master.start())
        for last_value, waits, expected in ((8, 0.0, (0, None)), (8, 0.5, (5, (4, 0.5))), (3, 9.0, (0, None))):
            self.next_poll(3, last_value=last_value, waits=waits)
            status = self.master.served.stream_statuses()[0]
            self.assertEqual((status.open_count, status.oldest_open), expected)

    def state_of(self, stream: str) -> tuple[str, str | None]:
        (status,) = [each for each in self.master.served.stream_statuses() if each.definition.name == stream]
        return status.writers[0].state, status.writers[0].error

    def test_the_status_before_the_first_poll_is_opening(self) -> None:
        self.store.close_gate("poll")
        started = begin(self.master.start())
        self.assertEqual(self.state_of("orders"), ("opening", None))
        self.assertEqual(self.master.served.stream_statuses()[0].writers[0].published, 0)
        self.store.open_gate("poll")
        self.assertEqual(started, [None])

    def test_a_start_that_failed_for_now_is_tried_again_and_polls_once_afterwards(self) -> None:
        """The first attempt fails at its poll, the second one after it."""
        store_histories, temporary = self.store.store_histories, StoreError("the database is locked", temporary=True)
        self.store.errors["poll"] = temporary
        self.assertIs(error_of(begin(self.master.start())), temporary)
        del self.store.errors["poll"]

        async def fail(*_: object) -> None:
            raise temporary

        self.store.store_histories = fail  # type: ignore[method-assign, assignment]
        self.assertIs(error_of(begin(self.master.start())), temporary)
        polls = self.store.polls
        self.net.advance(10 * LONGEST)
        self.assertEqual(self.store.polls, polls)
        self.store.store_histories = store_histories  # type: ignore[method-assign]
        self.assertEqual(begin(self.master.start()), [None])
        self.next_poll(2)
        polls = self.store.polls
        for _ in range(10):
            self.net.advance(10 * LONGEST)
        self.assertEqual(self.store.polls, polls + 10)

    def test_mapped_streams_are_stopped_while_the_poll_fails(self) -> None:
        now(self.master.start())
        self.store.errors["poll"] = StoreError("no such table: orders")
        with logged():
            self.net.advance(RETRY_AFTER)
        why = "no such table: orders; the stream is published again once that is mended"
        self.assertEqual(self.state_of("orders"), ("stopped", why))
        self.assertEqual(self.state_of("caches"), ("writing", None))
        del self.store.errors["poll"]
        self.net.advance(RETRY_AFTER)
        self.assertEqual(self.state_of("orders"), ("writing", None))

    def test_a_stream_is_stopped_while_its_sequence_cannot_be_read(self) -> None:
        now(self.master.start())
        with logged(LogLevel.info) as messages:
            self.store.state = SequenceState(Token(1), Token(1), error="no sequence")
            self.net.pump([LONGEST] * 3)
            state = self.state_of("orders")
            self.next_poll(1)
        self.assertEqual(state, ("stopped", "no sequence; the stream is published again once that is mended"))
        self.assertEqual(messages, ["stream orders is not published: no sequence", "stream orders is published again"])
        self.assertEqual(self.state_of("orders"), ("writing", None))

    def test_a_stream_is_stopped_while_its_rows_cannot_be_read(self) -> None:
        mapped = StreamDefinition("orders", table="orders", row=["order_id", "state"])
        self.master = self.make_master(streams=[mapped])
        wire = self.greeted("REPLICATE")
        self.store.errors["facts"] = StoreError("no such column: source.state")
        self.store.insert(2)
        with logged(LogLevel.info) as messages:
            self.next_poll(2)
            self.net.pump([RETRY_AFTER] * 3)
            state, why = self.state_of("orders")
            del self.store.errors["facts"]
            self.net.pump([RETRY_AFTER] * 3)
        cure = "the stream is published again once that is mended; after a change of its mapping, restart this process"
        self.assertEqual((state, why), ("stopped", f"no such column: source.state; {cure}"))
        self.assertEqual(
            messages,
            ["stream orders is not published: no such column: source.state", "stream orders is published again"],
        )
        self.assertEqual(self.state_of("orders"), ("writing", None))
        self.assertEqual(self.published_lines(wire), ['RDATA orders master 2 ["o","2"]'])

    def test_a_warning_about_the_table_is_a_note_of_the_status(self) -> None:
        self.store.warnings += ["stream 'orders': no index", "stream 'other': no index"]
        with logged():
            now(self.master.start())
        self.assertEqual(list(self.master.served.stream_statuses()[0].notes), ["stream 'orders': no index"])

    def test_rows_of_an_unknown_writer_are_logged_as_a_warning(self) -> None:
        mapped = StreamDefinition("orders", table="orders", row=["order_id", "state"], instance_column="writer")
        self.master = self.make_master(streams=[mapped])
        others = [InstanceName(name) for name in ("import", "batch", "")]
        self.store.other_positions = {ME: Token(9), **dict.fromkeys(others, Token(7))}
        now(self.store.open())
        now(self.store.declare(StreamDefinition("orders")))
        now(self.store.transaction().commit([Write(ORDERS, NO_WRITER, Token(7))]))  # "" is then no name in a row
        with logged() as messages:
            now(self.master.start())
        rows = "stream 'orders': its table has rows of 'batch', 'import', which 'master' does not publish"
        cure = "insert them again as 'master', with new IDs, because followers have passed these"
        cure = f"{cure}; or list in writers the names of all processes, and run each: the rows of a process that has "
        cure = f"{cure}written the stream, and has ended, are then published, too"
        self.assertEqual(messages, [f"{rows}: {cure}"])

    def test_rows_of_an_empty_name_are_logged_as_a_warning(self) -> None:
        """A column of names with the default '' is not NULL: no process publishes these rows."""
        mapped = StreamDefinition("orders", table="orders", row=["order_id", "state"], instance_column="writer")
        self.master = self.make_master(streams=[mapped])
        self.store.other_positions = {ME: Token(9), NO_WRITER: Token(7)}
        with logged() as messages:
            now(self.master.start())
        self.assertIn("its table has rows of '' (an empty name), which 'master' does not publish", messages[0])

    def test_without_rows_of_an_unknown_writer_or_a_column_for_its_name_no_warning_is_logged(self) -> None:
        others = {ME: Token(9), InstanceName("import"): Token(7)}
        for column, positions in (("writer", {ME: Token(9)}), (None, others)):
            self.store = self.make_store()
            self.store.other_positions = positions
            mapped = StreamDefinition("orders", table="orders", row=["order_id", "state"], instance_column=column)
            self.master = self.make_master(streams=[mapped])
            with logged() as messages:
                now(self.master.start())
            self.assertEqual(messages, [])
            stopped = begin(self.master.stop())
            self.net.pump([1.0] * 20)
            self.assertEqual(stopped, [None])

    def test_an_older_open_id_of_this_process_is_the_oldest_open_id(self) -> None:
        now(self.master.start())
        reservation, _ = self.hold()
        self.net.advance(100.0)
        self.next_poll(1, last_value=8, waits=5.0)
        self.assertEqual(self.master.served.stream_statuses()[0].oldest_open, (2, 100.0 + LONGEST))
        now(reservation.__aexit__(None, None, None))
