"""A process that writes: it goes on where its streams stand; when it stops, nothing that was begun is torn off."""

from __future__ import annotations

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
from replication.storage import open_store
from replication.streams.facts import Fact
from replication.streams.registry import StreamDefinition
from replication.streams.seams import Write
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import Net, SharedStore, begin, connect, error_of, lines_of, logged, now
from tests.serving import ORDERS, MasterCase
from tests.storage.pump import Pump


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


class SharedTests(MasterCase):
    """Other processes write the same streams."""

    def make_store(self) -> SharedStore:
        self.shared = SharedStore()
        return self.shared

    def setUp(self) -> None:
        super().setUp()
        now(self.master.start())

    def test_it_has_a_position_in_the_database_from_its_start(self) -> None:
        """Trap 37: else who reads the database would pass the first ID that it reserves."""
        self.assertEqual(now(self.store.stored()), {"orders": {"master": 1}, "caches": {"master": 1}})

    def test_it_begins_where_the_last_of_all_writers_was(self) -> None:
        self.shared.others_write("orders", "other", 9)
        now(self.master.stop())
        self.master = self.make_master()
        now(self.master.start())
        self.assertEqual(self.append("placed"), [10])
        self.assertEqual(now(self.store.stored())[ORDERS.name], {"master": 10, "other": 9})

    def test_while_it_is_idle_it_is_as_far_as_the_others_within_a_second(self) -> None:
        wire = self.greeted("REPLICATE")
        self.shared.others_write("orders", "other", 7)
        self.net.advance(1.0)
        self.assertEqual(self.news(wire), ["POSITION orders master 1 7"])
        self.assertEqual(now(self.store.stored())[ORDERS.name][InstanceName("master")], 7)

    def test_protocol_f6_whoever_has_got_less_far_is_where_a_token_begins(self) -> None:
        self.append("placed", "paid")
        self.shared.others_write("orders", "other", 2)
        self.net.advance(1.0)
        self.assertEqual(str(self.master.token("orders").ahead), "{'master': 3}")
        since, text = now(self.master.since("orders", "3", 10))
        self.assertEqual(([*since.written], text), ([], "3"))

    def test_quiet_is_quiet(self) -> None:
        """I11: with nothing to tell, one question a second, no commit, and no line."""
        wire = self.greeted("REPLICATE")
        self.net.advance(1.0)
        self.store.asked.clear()
        self.net.pump([1.0] * 10)
        self.assertEqual(self.store.asked, ["stored"] * 10)
        self.assertEqual(self.news(wire), [])

    def test_two_that_are_idle_do_not_wake_each_other(self) -> None:
        other = self.make_master(instance_name="other")
        now(other.start())
        self.append("placed")
        self.net.pump([1.0] * 3)
        self.store.asked.clear()
        self.net.pump([1.0] * 5)
        self.assertEqual(set(self.store.asked), {"stored"})
        self.assertEqual(now(self.store.stored())[ORDERS.name], {"master": 2, "other": 2})
        now(other.stop())

    def test_trap_20_nobody_echoes_the_positions_of_the_caches_stream(self) -> None:
        wire = self.greeted("REPLICATE")
        self.shared.others_write("caches", "other", 7)
        self.net.advance(1.0)
        self.assertEqual(self.news(wire), [])

    def test_a_stream_that_it_may_not_write_has_no_position_of_its(self) -> None:
        master = self.make_master(
            instance_name="second", streams=[StreamDefinition("theirs", writers=("other",)), ORDERS]
        )
        now(master.start())
        self.shared.others_write("theirs", "other", 7)
        self.net.advance(1.0)
        self.assertEqual(now(self.store.stored())[StreamName("theirs")], {"other": 7})
        now(master.stop())

    def test_a_store_that_fails_is_asked_again(self) -> None:
        wire = self.greeted("REPLICATE")
        self.shared.others_write("orders", "other", 7)
        self.store.errors["stored"] = StoreError("gone")
        self.net.advance(1.0)
        del self.store.errors["stored"]
        self.net.advance(1.0)
        self.assertEqual(self.news(wire), ["POSITION orders master 1 7"])

    def test_what_the_store_has_to_say_later_is_said_once(self) -> None:
        with logged() as said:
            self.store.warnings.append("sequence x went back")
            self.net.pump([1.0] * 3)
        self.assertEqual(said, ["sequence x went back"])

    def test_of_somebody_else_nothing_above_its_stored_position_is_served(self) -> None:
        """A fact there may be above an ID that is open at its writer."""
        fact = Fact(Token(6), ('["o","placed"]',))
        write = Write(ORDERS.name, InstanceName("other"), Token(4), [Fact(Token(4), fact.texts), fact])
        now(self.store.transaction().commit([write]))
        page = now(self.master.page("orders", "other", after=0, upto=None, limit=10))
        self.assertEqual(([each.token for each in page.facts], page.upto), ([4], 4))

    def test_others_are_shown_as_they_were_seen_last(self) -> None:
        self.shared.others_write("orders", "other", 7)
        self.net.advance(1.0)
        status = self.master.stream_statuses()[0]
        shown = [(each.instance, each.position, each.announced, each.state) for each in status.writers]
        self.assertEqual(shown, [("master", 7, 7, "writing"), ("other", 7, 7, "elsewhere")])

    def test_one_that_is_no_longer_among_the_writers_is_not_shown(self) -> None:
        """Else the least position would be its for ever."""
        definition = StreamDefinition("notes", writers=("second", "third"))
        master = self.make_master(instance_name="second", streams=[definition])
        now(master.start())
        self.shared.others_write("notes", "third", 4)
        self.shared.others_write("notes", "former", 7)
        self.net.advance(1.0)
        (status,) = [each for each in master.stream_statuses() if each.definition.name == "notes"]
        self.assertEqual([each.instance for each in status.writers], ["second", "third"])
        now(master.stop())

    def test_f17_who_was_renamed_is_told_by_those_who_are_there(self) -> None:
        """Else nobody who comes later would ever hear of what it wrote."""
        definition = StreamDefinition("notes", writers=("second", "third"))
        fact = Fact(Token(7), ("1",))
        now(self.store.declare(definition))
        now(self.store.transaction().commit([Write(definition.name, InstanceName("former"), Token(4), [fact])]))
        master = self.make_master(instance_name="second", streams=[definition])
        now(master.start())
        wire = connect(master.factory())
        self.wires.append(wire)
        self.say(wire, "REPLICATE notes")
        self.assertEqual(lines_of(wire.read())[-2:], ["POSITION notes former 7 7", "POSITION notes second 7 7"])
        page = now(master.page("notes", "former", after=0, upto=None, limit=10))
        self.assertEqual(([*page.facts], page.upto), ([fact], 7))
        stopped = begin(master.stop())
        wire.read()
        self.assertEqual(stopped, [None])

    def test_f17_where_anybody_may_write_those_who_are_gone_are_told_and_those_who_are_there_tell_themselves(
        self,
    ) -> None:
        """Two who told of one writer would break its line for those who follow both."""
        fact = Fact(Token(7), ('["o","placed"]',))
        names = [InstanceName(each) for each in ("gone", "away", "there")]
        now(
            self.store.transaction().commit(
                [
                    Write(ORDERS.name, name, Token(4), [fact._replace(token=Token(7 + n))])
                    for n, name in enumerate(names)
                ]
            )
        )
        self.shared.others_write("orders", "idle", 3)  # of whom there is nothing to tell
        self.shared.there = {names[2]}
        master = self.make_master(instance_name="second")
        now(master.start())
        wire = connect(master.factory())
        self.wires.append(wire)
        self.say(wire, "REPLICATE orders")
        told = ["POSITION orders gone 7 7", "POSITION orders away 8 8", "POSITION orders second 9 9"]
        self.assertEqual(sorted(lines_of(wire.read())[2:-1]), sorted(told[:-1]))
        page = now(master.page("orders", "gone", after=0, upto=None, limit=10))
        self.assertEqual(([*page.facts], page.upto), ([fact], 7))

        self.shared.there.add(names[1])  # comes back
        self.say(wire, "REPLICATE orders")
        self.assertEqual(lines_of(wire.read()), [told[0], told[2]])
        self.shared.others_write("orders", "away", 12)
        self.assertEqual(now(master.page("orders", "away", after=0, upto=None, limit=10)).upto, 12)
        self.shared.there.clear()  # and goes: it has told its followers
        self.say(wire, "REPLICATE orders")
        self.assertEqual(lines_of(wire.read()), [told[0], told[2]])

        self.store.errors["present"] = StoreError("away")
        self.say(wire, "REPLICATE orders")
        self.assertEqual(lines_of(wire.read()), ["ERROR away"])
        wire.lose()
        self.store.errors.clear()
        now(master.stop())

    def test_facts_are_told_to_this_process_before_anybody_else_hears_of_them(self) -> None:
        heard: list[object] = []
        master = self.make_master(instance_name="second", committed=lambda *what: heard.append(what))
        now(master.start())
        now(master.stream("orders").append([[["o", "placed"]]]))
        self.assertEqual(heard, [("orders", [Fact(Token(2), ('["o","placed"]',))])])
        now(master.stop())


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

    def test_trap_17_streams_that_share_their_ids_go_on_where_the_furthest_of_them_stands(self) -> None:
        streams = [StreamDefinition("tags", shares="data"), StreamDefinition("data")]
        master = self.make_master(streams=streams)
        for stream, tokens in (("tags", [2]), ("data", [3]), ("tags", [4])):
            self.assertEqual(now(master.stream(stream).append([[1]])), tokens)
        now(master.stop())
        self.master = self.make_master(streams=streams)
        now(self.master.start())
        wire = self.greeted("REPLICATE")
        self.assertEqual(now(self.master.stream("data").append([[1]])), [5])
        self.assertEqual(self.news(wire), ["RDATA data master 5 1", "POSITION tags master 4 5"])
        page = now(self.master.page("tags", None, after=0, upto=9, limit=9))
        self.assertEqual(([fact.token for fact in page.facts], page.upto), ([2, 4], 5))

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
            self.net.pump([15.0, 15.0])
            two = self.hold()[0]
            self.net.pump([15.0, 14.0])
        self.assertEqual(said, [])
        with logged() as said:
            self.net.advance(1.0)
        self.assertEqual(said, ["ID 2 of stream orders has been open for 60 s: nothing after it can be announced"])
        statuses = {each.definition.name: each for each in self.master.stream_statuses()}
        self.assertEqual((statuses[ORDERS.name].open_count, statuses[ORDERS.name].oldest_open), (2, (2, 60.0)))
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
