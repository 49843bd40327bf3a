"""A master: who connects is told where it stands and what is new; when it stops, nothing that was begun is torn off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import (
    ConfigError,
    NotAWriterError,
    RowError,
    SchemaError,
    StoreError,
    StreamError,
    UnknownStreamError,
)
from replication.master import Master
from replication.net.protocol import Limits
from replication.session.connection import Keepalive
from replication.storage import open_store
from replication.streams.registry import StreamDefinition
from replication.streams.seams import Write
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import FragileStore, Net, Wire, begin, connect, error_of, lines_of, logged, now
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Sequence

ORDERS = StreamDefinition("orders", row=("order_id", "state"))
POSITIONS = ["POSITION orders master 1 1", "POSITION caches master 1 1"]


class MasterCase(SynchronousTestCase):
    limits = Limits(keepalive=Keepalive(ping_after=1_000, give_up_after=3_000))

    def setUp(self) -> None:
        self.net, self.store = Net(), FragileStore()
        self.master = self.make_master()
        self.wires: list[Wire] = []

    def tearDown(self) -> None:
        self.store.gates.clear()
        self.store.errors.clear()
        stopped = begin(self.master.stop())
        for wire in self.wires:
            if not wire.lost:
                wire.read()
                wire.lose()
        self.assertEqual(stopped, [None])
        self.assertEqual(self.net.getDelayedCalls(), [])

    def make_master(self, **options: Any) -> Master:
        given: dict[str, Any] = {"server_name": "example.com", "streams": [ORDERS], "limits": self.limits, **options}
        return Master(database=self.store, reactor=self.net, wall=lambda: 1_700.5, **given)

    def connect(self, *lines: str, room: int = 64 * 1024) -> Wire:
        wire = connect(self.master.factory(), room)
        self.wires.append(wire)
        self.say(wire, *lines)
        return wire

    def say(self, wire: Wire, *lines: str) -> None:
        wire.protocol.dataReceived("".join(f"{line}\n" for line in lines).encode())

    def news(self, wire: Wire) -> list[str]:
        self.net.advance(0)
        return lines_of(wire.read())

    def greeted(self, *lines: str) -> Wire:
        """Connect, and take no notice of the greeting."""
        wire = self.connect(*lines)
        self.news(wire)
        return wire

    def append(self, *states: str) -> Sequence[Token]:
        return now(self.master.stream("orders").append([[["o", state]] for state in states]))

    def hold(self, stream: str = "orders") -> Any:
        reservation = self.master.stream(stream).reserve()
        return reservation, now(reservation.__aenter__())


class PositionTests(MasterCase):
    def leave_one_behind(self) -> None:
        """Let a fact commit while a smaller ID is open, which is rolled back then: no commit stores how far that is."""
        reservation, _ = self.hold()
        self.append("placed")
        now(reservation.__aexit__(ValueError, ValueError(), None))
        self.store.asked.clear()

    def test_a_position_that_commits_have_left_behind_is_stored_within_a_second(self) -> None:
        self.leave_one_behind()
        self.net.pump([0.5] * 2)
        self.assertEqual(self.store.asked.count("commit"), 1)
        self.net.pump([1.0] * 5)
        self.assertEqual(self.store.asked.count("commit"), 1)

    def test_a_store_that_fails_is_asked_again(self) -> None:
        self.leave_one_behind()
        self.store.errors["commit"] = StoreError("busy")
        self.net.pump([1.0] * 2)
        del self.store.errors["commit"]
        self.net.advance(1.0)
        self.assertEqual(self.store.asked.count("commit"), 3)

    def test_it_is_stored_at_the_end_too(self) -> None:
        self.leave_one_behind()
        now(self.master.stop())
        self.assertEqual(self.store.asked.count("commit"), 1)


class ConversationTests(MasterCase):
    def test_it_introduces_itself_without_waiting(self) -> None:
        wire = self.connect()
        self.assertEqual(self.news(wire), ["SERVER example.com", "PING 1700500"])

    def test_replicate_is_answered_at_once_with_a_position_per_stream(self) -> None:
        wire = self.greeted()
        self.say(wire, "NAME worker1", "REPLICATE ")
        self.assertEqual(lines_of(wire.read()), POSITIONS)

    def test_only_who_asks_is_answered(self) -> None:
        one, two = self.greeted(), self.greeted()
        self.say(one, "REPLICATE")
        self.assertEqual((self.news(one), self.news(two)), (POSITIONS, []))

    def test_it_may_be_asked_again_at_any_time(self) -> None:
        wire = self.greeted("REPLICATE")
        self.append("placed")
        self.say(wire, "REPLICATE")
        self.assertEqual(self.news(wire)[1:], ["POSITION orders master 2 2", "POSITION caches master 1 1"])

    def test_rows_come_without_asking(self) -> None:
        wire = self.greeted()
        self.append("placed")
        self.assertEqual(self.news(wire), ['RDATA orders master 2 ["o","placed"]'])

    def test_trap_19_a_position_never_overtakes_the_rows_before_it(self) -> None:
        """Rows of this very turn are said first, and none that the position covers comes after it."""
        wire = self.greeted()
        reservation, _ = self.hold()
        self.append("placed")
        self.say(wire, "REPLICATE")
        self.assertEqual(self.news(wire), POSITIONS)
        now(reservation.__aexit__(None, None, None))
        self.append("paid")
        self.say(wire, "REPLICATE")
        self.append("sent")
        self.assertEqual(
            self.news(wire),
            [
                'RDATA orders master 3 ["o","placed"]',
                'RDATA orders master 4 ["o","paid"]',
                "POSITION orders master 4 4",
                "POSITION caches master 1 1",
                'RDATA orders master 5 ["o","sent"]',
            ],
        )

    def test_who_asks_for_some_streams_hears_of_no_others(self) -> None:
        wire = self.greeted("REPLICATE caches unknown")
        self.append("placed")
        reservation, fact = self.hold()
        fact.invalidate("get", None)
        now(reservation.__aexit__(None, None, None))
        self.assertEqual(self.news(wire), ['RDATA caches master 2 ["get",null,1700500]'])
        self.say(wire, "REPLICATE")
        self.append("paid")
        self.assertEqual(len(self.news(wire)), 3)

    def test_who_asks_for_streams_that_are_not_here_gets_no_answer(self) -> None:
        wire = self.greeted()
        self.say(wire, "REPLICATE unknown")
        self.assertEqual(self.news(wire), [])

    def test_a_stream_that_others_write_has_no_position_here(self) -> None:
        self.master = self.make_master(streams=[StreamDefinition("theirs", writers=("worker2",)), ORDERS])
        wire = self.greeted()
        self.say(wire, "REPLICATE")
        self.assertEqual(self.news(wire), POSITIONS)

    def test_trap_9_a_server_that_is_up_again_is_told_to_all_others(self) -> None:
        one, two, three = (self.greeted() for _ in range(3))
        self.say(two, "REMOTE_SERVER_UP far.example")
        said = ["REMOTE_SERVER_UP far.example"]
        self.assertEqual([self.news(each) for each in (one, two, three)], [said, [], said])

    def test_what_cannot_be_passed_on_ends_nobody_but_who_said_it(self) -> None:
        origin, other = self.greeted(), self.greeted()
        self.say(origin, "REMOTE_SERVER_UP far.example\r\r")
        self.assertTrue(lines_of(origin.read())[0].startswith("ERROR "))
        self.assertTrue(origin.disconnecting)
        self.assertEqual(self.news(other), [])
        self.assertEqual(self.master.faults, {"bad line": 1})

    def test_words_of_other_servers_are_taken_and_left(self) -> None:
        wire = self.greeted()
        self.say(
            wire,
            "USER_SYNC abcde @u:h start 1",
            "CLEAR_USER_SYNC abcde",
            "FEDERATION_ACK sender1 7",
            'USER_IP @u:h ["t","1.2.3.4","UA",null,1]',
            "PING 1",
        )
        self.assertEqual(self.news(wire), [])
        self.assertEqual(self.master.peer_statuses()[0].last_command, "PING")

    def test_a_name_is_a_label_of_bounded_length(self) -> None:
        wire = self.greeted("NAME worker1")
        self.assertEqual(self.master.peer_statuses()[0].name, "worker1")
        self.say(wire, "NAME " + "x" * 16_000)
        self.assertEqual(self.master.peer_statuses()[0].name, "x" * 255)

    def test_what_a_peer_complains_of_is_logged_as_it_is(self) -> None:
        wire = self.greeted("NAME worker1")
        with logged() as said:
            self.say(wire, "ERROR 100% {x} \x1b[31m")
        self.assertEqual(said, ["'worker1' (127.0.0.1:40000) says: '100% {x} \\x1b[31m'"])
        self.assertFalse(wire.disconnecting)

    def test_a_peer_that_stops_is_no_trouble(self) -> None:
        wire = self.greeted("NAME worker1")
        with logged() as said:
            self.say(wire, "ERROR server stopping")
        self.assertEqual(said, [])

    def test_a_fault_is_logged_counted_and_nobody_elses(self) -> None:
        one, two = self.greeted(), self.greeted()
        with logged() as said:
            self.say(one, "FOO")
        self.assertEqual(len(said), 1)
        self.assertIn("unknown command: 'FOO'", said[0])
        self.assertEqual(self.master.faults, {"unknown command": 1})
        self.assertEqual([peer.address for peer in self.master.peer_statuses()], ["127.0.0.1:40000"])
        self.append("placed")
        self.assertEqual(len(self.news(two)), 1)


class StartTests(MasterCase):
    def test_the_first_reserve_starts_it(self) -> None:
        self.assertEqual(self.append("placed"), [2])

    def test_starting_twice_is_starting_once(self) -> None:
        self.store.close_gate("open")
        started = [begin(self.master.start()) for _ in range(2)]
        self.assertEqual(started, [[], []])
        self.store.open_gate("open")
        self.assertEqual(started, [[None], [None]])
        now(self.master.start())
        self.assertEqual(self.store.asked.count("open"), 1)

    def test_who_gives_up_waiting_for_the_start_gives_up_alone(self) -> None:
        self.store.close_gate("open")
        start = self.master.start()
        one, two = begin(start), begin(self.master.start())
        start.cancel()
        self.assertIsInstance(error_of(one), CancelledError)
        self.store.open_gate("open")
        self.assertEqual(two, [None])

    def test_peers_that_come_early_are_greeted_then_and_answered_once_it_has_started(self) -> None:
        """So a follower knows whom it talks to, and that it is alive, however long the start takes."""
        self.store.close_gate("positions")
        early, gone = self.connect("NAME early", "PING 1", "REPLICATE orders"), self.connect("REPLICATE")
        self.assertEqual(self.news(early), ["SERVER example.com", "PING 1700500"])
        gone.lose()
        self.store.open_gate("positions")
        self.assertEqual(self.news(early), ["POSITION orders master 1 1"])
        self.assertEqual([peer.name for peer in self.master.peer_statuses()], ["early"])
        self.append("placed")
        self.assertEqual(len(self.news(early)), 1)

    def test_an_early_peers_fault_is_its_own(self) -> None:
        self.store.close_gate("open")
        early, wrong = self.connect("REPLICATE"), self.connect("REPLICATE", "FOO")
        self.assertTrue(lines_of(wrong.read())[-1].startswith("ERROR "))
        self.store.open_gate("open")
        self.assertEqual(len(self.news(early)), 4)
        self.assertEqual(self.news(wrong), [])

    def test_a_start_that_fails_is_told_to_everybody_who_waits_for_it(self) -> None:
        self.store.close_gate("open")
        waiting = [begin(self.master.start()), begin(self.master.stream("orders").append([[["o", "p"]]]))]
        with logged() as said:
            early = self.connect("REPLICATE")
            self.store.errors["open"] = SchemaError("made by a newer version")
            self.store.open_gate("open")
            late = self.connect("REPLICATE")
        for outcome in (*waiting, begin(self.master.start()), begin(self.master.check())):
            self.assertIsInstance(error_of(outcome), SchemaError)
        for wire in (early, late):
            self.assertEqual(lines_of(wire.read())[-1], "ERROR made by a newer version")
        self.assertIn("cannot start: made by a newer version", said)

    def test_an_unexpected_error_is_told_to_all_of_them_too(self) -> None:
        """One who was told nothing would write, from ID 2 on."""
        self.store.errors["positions"] = OSError("too many open files")
        for _ in range(3):
            self.assertIsInstance(error_of(begin(self.master.start())), OSError)
        self.assertIsInstance(error_of(begin(self.master.stream("orders").append([[["o", "p"]]]))), OSError)

    def test_it_goes_on_where_the_store_says_that_streams_stand(self) -> None:
        now(self.store.open())
        now(self.store.declare(ORDERS))
        for writer, position in (("master", 7), ("an-older-name", 9)):
            write = Write(ORDERS.name, InstanceName(writer), Token(position))
            now(self.store.transaction().commit([write]))
        wire = self.greeted()
        self.say(wire, "REPLICATE")
        self.assertEqual(self.news(wire)[0], "POSITION orders master 9 9")
        self.assertEqual(self.append("placed"), [10])

    def test_a_server_name_that_cannot_be_said_is_refused_at_once(self) -> None:
        for name in ("two\nlines", "cr\r", "x" * 20_000, "\ud800"):
            with self.assertRaisesRegex(ConfigError, "server_name"):
                self.make_master(server_name=name)

    def test_two_streams_of_one_name_are_refused_at_once(self) -> None:
        with self.assertRaises(ConfigError):
            self.make_master(streams=["orders", ORDERS])

    def test_the_caches_stream_is_there_whoever_declares_it(self) -> None:
        self.assertIn("caches", self.make_master(streams=[]).registry)
        self.assertIn("caches", self.make_master(streams=["caches"]).registry)


class StopTests(MasterCase):
    def test_peers_are_told_and_it_waits_until_they_are_gone(self) -> None:
        wire = self.greeted()
        stopped = begin(self.master.stop())
        self.assertEqual(stopped, [])
        self.assertEqual(lines_of(wire.read()), ["ERROR server stopping"])
        self.assertEqual(stopped, [None])

    def test_a_peer_that_does_not_read_is_waited_for_only_so_long(self) -> None:
        wire = self.greeted()
        stopped = begin(self.master.stop())
        self.net.advance(4.9)
        self.assertEqual(stopped, [])
        self.net.advance(0.1)
        self.assertTrue(wire.aborted)
        self.assertEqual(stopped, [None])

    def test_one_that_was_being_closed_already_is_not_left_behind(self) -> None:
        wire = self.greeted()
        self.say(wire, "FOO")
        stopped = begin(self.master.stop())
        self.net.advance(5.0)
        self.assertEqual(stopped, [None])
        self.assertEqual(self.net.getDelayedCalls(), [])

    def test_open_facts_are_waited_for_and_announced(self) -> None:
        wire = self.greeted()
        reservation, fact = self.hold()
        stopped = begin(self.master.stop())
        now(fact.write(["o", "placed"]))
        self.assertEqual((stopped, self.news(wire)), ([], []))
        now(reservation.__aexit__(None, None, None))
        self.assertEqual(lines_of(wire.read()), ['RDATA orders master 2 ["o","placed"]', "ERROR server stopping"])
        self.assertEqual(stopped, [None])

    def test_appends_under_way_are_waited_for_answered_and_announced(self) -> None:
        wire = self.greeted()
        self.store.close_gate("commit")
        appended = begin(self.master.stream("orders").append([[["o", "placed"]]]))
        stopped = begin(self.master.stop())
        self.assertEqual(stopped, [])
        self.store.open_gate("commit")
        self.assertEqual(appended, [[2]])
        self.assertEqual(lines_of(wire.read()), ['RDATA orders master 2 ["o","placed"]', "ERROR server stopping"])
        self.assertEqual(stopped, [None])

    def test_an_append_that_had_not_begun_is_refused(self) -> None:
        now(self.master.start())
        self.store.close_gate("recall")
        appended = begin(self.master.stream("orders").append([[["o", "placed"]]], key="k"))
        stopped = begin(self.master.stop())
        self.assertEqual(stopped, [None])
        self.store.open_gate("recall")
        self.assertIsInstance(error_of(appended), StoreError)

    def test_facts_that_stay_open_are_rolled_back_in_the_end(self) -> None:
        reservation, fact = self.hold()
        now(fact.execute("UPDATE …"))
        stopped = begin(self.master.stop())
        self.net.advance(9.9)
        self.assertEqual((stopped, self.store.ends), ([], []))
        self.net.advance(0.1)
        self.assertEqual((stopped, self.store.ends[:1]), ([None], ["rolled back"]))
        self.assertIsInstance(error_of(begin(reservation.__aexit__(None, None, None))), StreamError)

    def test_a_rollback_that_fails_then_does_not_keep_it(self) -> None:
        _, fact = self.hold()
        now(fact.execute("UPDATE …"))
        self.store.errors["rollback"] = StoreError("disk gone")
        stopped = begin(self.master.stop())
        with logged() as said:
            self.net.advance(10.0)
        self.assertEqual(stopped, [None])
        self.assertEqual(said, ["rolling back at the end: disk gone"])

    def test_an_id_that_is_rolled_back_at_the_very_end_is_let_be(self) -> None:
        """A store that cannot be asked any more must not be asked for ever."""
        reservation, _ = self.hold()
        self.store.errors["commit"] = StoreError("disk full")
        stopped = begin(self.master.stop())
        with logged():
            error_of(begin(reservation.__aexit__(None, None, None)))
        self.assertEqual(stopped, [None])

    def test_stopping_ends_the_wait_for_a_store_that_fails(self) -> None:
        reservation, _ = self.hold()
        self.store.errors["commit"] = StoreError("disk full")
        with logged():
            now(reservation.__aexit__(ValueError, ValueError("no"), None))
        now(self.master.stop())
        self.assertEqual(self.net.getDelayedCalls(), [])

    def test_stopping_twice_is_stopping_once(self) -> None:
        reservation, _ = self.hold()
        stopped = [begin(self.master.stop()) for _ in range(2)]
        self.assertEqual(stopped, [[], []])
        now(reservation.__aexit__(None, None, None))
        self.assertEqual(stopped, [[None], [None]])
        self.assertEqual(self.store.asked.count("close"), 1)

    def test_stopping_what_was_never_started_is_no_work(self) -> None:
        now(self.master.stop())
        self.assertEqual(self.store.asked, ["close"])

    def test_stopping_in_the_middle_of_the_start_waits_for_that(self) -> None:
        self.store.close_gate("positions")
        early = self.connect("REPLICATE")
        entering = begin(self.master.stream("orders").reserve().__aenter__())
        stopped = begin(self.master.stop())
        self.assertEqual(stopped, [])
        self.store.open_gate("positions")
        self.assertIsInstance(error_of(entering), StreamError)
        self.assertEqual(lines_of(early.read())[-1], "ERROR server stopping")
        self.assertEqual(stopped, [None])

    def test_nothing_begins_afterwards(self) -> None:
        self.append("placed")
        now(self.master.stop())
        for outcome in (
            begin(self.master.start()),
            begin(self.master.stream("orders").reserve().__aenter__()),
            begin(self.master.stream("orders").append([[["o", "p"]]])),
            begin(self.master.check()),
        ):
            self.assertIn("'master' is stopping", str(error_of(outcome)))
        with logged():
            late = self.connect()
        self.assertEqual(lines_of(late.read()), ["ERROR server stopping"])

    def test_what_the_turn_brought_goes_out_first(self) -> None:
        wire = self.greeted()
        self.append("placed")
        begin(self.master.stop())
        self.assertEqual(lines_of(wire.read()), ['RDATA orders master 2 ["o","placed"]', "ERROR server stopping"])
        self.assertEqual(self.net.getDelayedCalls(), [])


class SlowTests(MasterCase):
    def test_ids_that_stay_open_are_named(self) -> None:
        with logged() as said:
            one = self.hold()[0]
            one._facts[self.master.stream("orders")][0].invalidate("get", None)
            self.net.pump([15.0, 15.0])
            two = self.hold()[0]
            self.net.pump([15.0, 14.0])
        self.assertEqual(said, [])
        with logged() as said:
            self.net.advance(1.0)
        self.assertEqual(
            said,
            [
                "ID 2 of stream orders has been open for 60 s: nothing after it can be announced",
                "ID 2 of stream caches has been open for 60 s: nothing after it can be announced",
            ],
        )
        statuses = {each.definition.name: each for each in self.master.stream_statuses()}
        self.assertEqual((statuses[ORDERS.name].open_count, statuses[ORDERS.name].oldest_open), (2, (2, 60.0)))
        self.assertEqual(statuses[StreamName("caches")].oldest_open, (2, 60.0))
        for each in (one, two):
            now(each.__aexit__(None, None, None))
        with logged() as said:
            self.net.advance(100.0)
        self.assertEqual(said, [])
        self.assertEqual([each.oldest_open for each in self.master.stream_statuses()], [None, None])

    def test_an_append_that_hangs_is_named_too(self) -> None:
        now(self.master.start())
        self.store.close_gate("commit")
        appended = begin(self.master.stream("orders").append([[["o", "p"]]]))
        with logged() as said:
            self.net.pump([15.0] * 4)
        self.assertEqual(len(said), 1)
        self.store.open_gate("commit")
        self.assertEqual(appended, [[2]])


class ServedTests(MasterCase):
    def test_a_page_never_reaches_beyond_what_was_announced(self) -> None:
        self.append("a")
        reservation, _ = self.hold()
        self.append("b")
        page = now(self.master.page("orders", None, after=0, upto=None, limit=10))
        self.assertEqual(([fact.token for fact in page.facts], page.upto, page.limited), ([2], 2, False))
        self.assertEqual(now(self.master.page("orders", "master", after=0, upto=4, limit=10)).upto, 2)
        now(reservation.__aexit__(None, None, None))
        page = now(self.master.page("orders", "master", after=2, upto=10**6, limit=10))
        self.assertEqual(([fact.token for fact in page.facts], page.upto), ([4], 4))
        self.assertEqual(self.master.catch_up_rows, 3)

    def test_beyond_the_end_there_is_an_empty_page(self) -> None:
        page = now(self.master.page("orders", None, after=50, upto=60, limit=10))
        self.assertEqual(([*page.facts], page.upto, page.limited), ([], 1, False))

    def test_facts_of_an_instance_that_wrote_here_before_are_served(self) -> None:
        now(self.store.open())
        now(self.store.declare(ORDERS))
        now(self.store.transaction().commit([Write(ORDERS.name, InstanceName("old"), Token(4))]))
        self.assertEqual(now(self.master.page("orders", "old", after=0, upto=None, limit=10)).upto, 4)
        self.assertEqual(now(self.master.page("orders", "nobody", after=0, upto=None, limit=10)).upto, 0)

    def test_unknown_streams_and_bad_rows_have_their_errors(self) -> None:
        self.assertIsInstance(
            error_of(begin(self.master.page("unknown", None, after=0, upto=None, limit=1))), UnknownStreamError
        )
        self.assertIsInstance(error_of(begin(self.master.append_texts("unknown", [[]], None))), UnknownStreamError)
        error = error_of(begin(self.master.append_texts("orders", [[["o", "p"]], [[1]]], None)))
        assert isinstance(error, RowError)
        self.assertEqual(error.fact, 1)
        other = self.make_master(streams=[StreamDefinition("theirs", writers=("other",))])
        self.assertIsInstance(error_of(begin(other.append_texts("theirs", [[]], None))), NotAWriterError)

    def test_what_is_appended_over_http_has_the_same_ids(self) -> None:
        self.assertEqual(now(self.master.append_texts("orders", [[["o", "p"]], []], "k")), [2, 3])
        self.assertEqual(now(self.master.append_texts("orders", [[["o", "p"]], []], "k")), [2, 3])

    def test_statuses_tell_settled_and_announced_apart(self) -> None:
        reservation, _ = self.hold()
        self.store.close_gate("commit")
        begin(reservation.__aexit__(ValueError, ValueError("no"), None))
        (writer,) = self.master.stream_statuses()[0].writers
        self.assertEqual((writer.position, writer.announced, writer.state), (2, 1, "writing"))
        self.store.open_gate("commit")
        (writer,) = self.master.stream_statuses()[0].writers
        self.assertEqual((writer.position, writer.announced), (2, 2))

    def test_every_figure_of_the_metrics_page_is_what_it_says(self) -> None:
        wire = self.greeted("NAME one", "REPLICATE")
        self.append("placed", "paid")
        self.news(wire)
        gone = self.greeted("PING 1")
        self.say(gone, "FOO")
        reservation, _ = self.hold()
        self.net.advance(2.5)
        samples = {(each.name, *each.labels.values()): each.value for each in self.master.samples()}
        now(reservation.__aexit__(None, None, None))
        for key, value in {
            ("connections",): 1,
            ("connections_total",): 2,
            ("queued_bytes",): 0,
            ("lines_total", "in"): 3,
            ("lines_total", "out"): 2 + 2 + 2 + 2 + 1,
            ("faults_total", "unknown command"): 1,
            ("catch_up_rows_total",): 0,
            ("open_ids", "orders"): 1,
            ("oldest_open_seconds", "orders"): 2.5,
            ("position", "orders", "master"): 3,
            ("lag", "orders", "master"): 0,
            ("position", "caches", "master"): 1,
        }.items():
            self.assertEqual(samples[key], value, key)
        self.assertEqual(samples["bytes_total", "in"], len("NAME one\nREPLICATE\nPING 1\nFOO\n"))

    def test_counters_never_go_back_when_connections_end(self) -> None:
        def total(way: str) -> float:
            return sum(
                each.value
                for each in self.master.samples()
                if each.name == "bytes_total" and way in each.labels.values()
            )

        wire = self.greeted("NAME one")
        before = total("in"), total("out")
        wire.lose()
        self.assertEqual((total("in"), total("out")), before)

    def test_health_is_the_stores(self) -> None:
        now(self.master.check())
        now(self.store.close())
        self.assertIsInstance(error_of(begin(self.master.check())), StoreError)


class SqliteTests(SynchronousTestCase):
    """On a real store, whose answers come from a thread."""

    def setUp(self) -> None:
        self.pump, self.net = Pump(), Net()
        self.store = open_store("sqlite://", self.pump)
        self.master = Master(database=self.store, streams=["orders"], reactor=self.net)

    def test_a_transaction_that_holds_the_database_does_not_keep_a_stop_for_ever(self) -> None:
        async def hang() -> None:
            async with self.master.stream("orders").reserve() as fact:
                await fact.execute("CREATE TABLE t (x)")
                await Deferred()

        hanging = self.pump.start(hang())
        self.pump.wait(self.master.start())
        while not self.master.stream_statuses()[0].open_count:
            self.pump.wait(self.store.recall("nothing"))
        stopped = self.master.stop()
        self.net.advance(10.0)
        self.pump.wait(stopped)
        self.assertEqual(self.net.getDelayedCalls(), [])
        outcome = begin(hanging)
        hanging.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)

    def test_stopping_with_a_rollback_in_its_last_moment_ends(self) -> None:
        async def fail() -> None:
            async with self.master.stream("orders").reserve() as fact:
                await fact.write("never")
                await gate
                raise ZeroDivisionError

        gate: Deferred[None] = Deferred()
        self.pump.wait(self.master.start())
        failing = self.pump.start(fail())
        stopped = self.master.stop()
        gate.callback(None)
        with self.assertRaises(ZeroDivisionError):
            self.pump.wait(failing)
        self.pump.wait(stopped)
        self.assertEqual(self.net.getDelayedCalls(), [])
