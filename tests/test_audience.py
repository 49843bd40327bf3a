"""Those who follow: who connects is told where we stand and what is new."""

from __future__ import annotations

from replication.streams.registry import StreamDefinition
from tests.doubles import lines_of, logged, now
from tests.serving import ORDERS, POSITIONS, MasterCase


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
