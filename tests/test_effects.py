"""What a writer does with what its followers say, over connections."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

from replication.errors import StoreError
from replication.lastseen import LastSeen
from replication.streams.registry import StreamDefinition
from replication.wire.commands import Ping, RemoteServerUp, UserSync
from tests.doubles import lines_of, logged, now
from tests.serving import MasterCase

if TYPE_CHECKING:
    from replication.master import Master

FEDERATION = StreamDefinition("federation", row=("type", "data"), in_memory=True)


class SyncingTests(MasterCase):
    def setUp(self) -> None:
        super().setUp()
        self.told: list[tuple[str, bool]] = []
        self.master.on_syncing(lambda user, syncing: self.told.append((user, syncing)))
        now(self.master.start())

    def test_who_syncs_is_known_and_passed_on(self) -> None:
        wire = self.connect("USER_SYNC abcde @u:h start 5", "USER_SYNC abcde @v:h start 6")
        self.assertEqual(self.master.syncing.at("@u:h"), {"abcde": 5})
        self.say(wire, "USER_SYNC abcde @u:h end 7", "CLEAR_USER_SYNC abcde")
        self.assertEqual(self.told, [("@u:h", True), ("@v:h", True), ("@u:h", False), ("@v:h", False)])

    def test_a_process_that_vanishes_is_cleared_after_five_minutes(self) -> None:
        self.connect("USER_SYNC abcde @u:h start 5").lose()
        self.net.run(290)
        self.assertIn("@u:h", self.master.syncing)
        with logged() as said:
            self.net.run(20)
        self.assertNotIn("@u:h", self.master.syncing)
        self.assertEqual(said, ["process abcde is gone or silent: its users sync no more"])

    def test_one_that_is_back_says_it_again_and_stays(self) -> None:
        self.connect("USER_SYNC abcde @u:h start 5").lose()
        self.net.run(200)
        self.connect("USER_SYNC abcde @u:h start 9")
        self.net.run(200)
        self.assertEqual(self.told, [("@u:h", True)])

    def test_one_that_only_pings_stays_and_one_that_is_silent_is_cleared(self) -> None:
        wire = self.connect("USER_SYNC abcde @u:h start 5", "PING 1")
        self.connect("USER_SYNC other @v:h start 5")
        for _ in range(10):
            self.net.run(60)
            self.say(wire, "PING 1")
        self.assertEqual(self.told, [("@u:h", True), ("@v:h", True), ("@v:h", False)])


class OthersTests(MasterCase):
    def make_master(self, **options: object) -> Master:
        return super().make_master(streams=[FEDERATION], **options)

    def emit(self, *types: str) -> None:
        now(self.master.stream("federation").append([[[each, {}]] for each in types]))

    def kept(self) -> list[int]:
        page = now(self.master.page("federation", None, after=0, upto=None, limit=100))
        return [fact.token for fact in page.facts]

    def test_the_federation_stream_is_dropped_up_to_what_all_senders_have_acknowledged(self) -> None:
        self.emit("e", "e", "e", "e")
        one, two = self.greeted(), self.greeted()
        self.say(one, "FEDERATION_ACK one 3")
        self.assertEqual(self.kept(), [4, 5])
        self.say(two, "FEDERATION_ACK two 2")
        self.say(one, "FEDERATION_ACK one 5")
        self.assertEqual(self.kept(), [4, 5])
        self.say(two, "FEDERATION_ACK two 4")
        self.assertEqual(self.kept(), [5])

    def test_an_acknowledgement_of_what_was_never_said_drops_nothing_to_come(self) -> None:
        self.emit("e")
        self.say(self.greeted(), "FEDERATION_ACK one 999999999")
        self.emit("e")
        self.assertEqual(self.kept(), [3])

    def test_places_of_users_are_written_every_few_seconds(self) -> None:
        self.say(self.greeted(), 'USER_IP @u:h ["tok","1.2.3.4","UA",null,5]')
        with patch.object(LastSeen, "_write") as write:
            self.net.run(4.5)
            write.assert_not_called()
            self.net.run(1)
            write.assert_called_once()
            self.net.run(10)
            write.assert_called_once()

    def test_a_database_that_fails_takes_nothing_else_with_it(self) -> None:
        self.say(self.greeted(), 'USER_IP @u:h ["tok","1.2.3.4","UA",null,5]')
        with patch.object(LastSeen, "_write", side_effect=ZeroDivisionError):
            self.net.run(6)
            self.net.run(6)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)
        with patch.object(LastSeen, "_write", side_effect=StoreError("full")), logged() as said:
            self.net.run(6)
        self.assertEqual(said, ["cannot write where users were last seen: full"])

    def test_figures(self) -> None:
        wire = self.greeted("USER_SYNC abcde @u:h start 5", 'USER_IP @u:h ["tok","1.2.3.4","UA",null,5]', "PING 1")
        self.say(wire, "PING 2")
        figures = {(each.name, *each.labels.values()): each.value for each in self.master.samples()}
        self.assertEqual(figures["users_syncing",], 1)
        self.assertEqual(figures["user_ips_waiting",], 1)
        self.assertEqual(figures["commands_total", "PING"], 2)
        self.assertEqual(figures["commands_total", "USER_SYNC"], 1)

    def test_what_is_known_of_users_is_served(self) -> None:
        self.say(self.greeted(), "USER_SYNC abcde @u:h start 5")
        self.assertEqual(self.master.users_syncing(), {"abcde": {"@u:h": 5}})
        with patch.object(LastSeen, "of", return_value=["a place"]):
            self.assertEqual(now(self.master.places_of("@u:h")), ["a place"])

    def test_what_is_kept_in_memory_is_shown(self) -> None:
        self.emit("e", "e")
        self.say(self.greeted(), "FEDERATION_ACK one 2")
        [status, _] = self.master.stream_statuses()
        self.assertIsNotNone(status.kept)
        assert status.kept is not None
        self.assertEqual((status.kept.facts, status.kept.acknowledged), (1, {"one": 2}))
        figures = {(each.name, *each.labels.values()): each.value for each in self.master.samples()}
        self.assertEqual(figures["kept_bytes", "federation"], status.kept.bytes)


class SayingTests(MasterCase):
    def test_the_application_hears_and_says(self) -> None:
        heard: list[object] = []

        @self.master.on_command(RemoteServerUp)
        def up(command: RemoteServerUp, peer: object) -> None:
            heard.append(command)
            self.master.remote_server_up("echo")

        one, two = self.greeted(), self.greeted()
        self.say(one, "REMOTE_SERVER_UP example.org")
        self.assertEqual(heard, [RemoteServerUp("example.org")])
        self.assertEqual(lines_of(one.read()), ["REMOTE_SERVER_UP echo"])
        self.assertEqual(lines_of(two.read()), ["REMOTE_SERVER_UP example.org", "REMOTE_SERVER_UP echo"])

    def test_what_a_master_may_not_say_is_not_said(self) -> None:
        wire = self.greeted()
        with self.assertRaisesRegex(Exception, "USER_SYNC is not for a master to say"):
            self.master.say(Ping("1"), UserSync("a", "@u", syncing=True, last_sync_ms=1))
        self.assertEqual(wire.read(), b"")
