"""What a writer does with its followers' commands, over connections."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

from replication.errors import StoreError
from replication.presence.last_seen import LastSeen
from replication.streams.definitions import StreamDefinition
from replication.wire.commands import Ping, RemoteServerUp, UserSync
from tests.doubles import lines_of, logged, now
from tests.serving import MasterCase

if TYPE_CHECKING:
    from replication.writer.master import Master

FEDERATION = StreamDefinition("federation", row=("type", "data"), in_memory=True)


class SyncingTests(MasterCase):
    def setUp(self) -> None:
        super().setUp()
        self.changes: list[tuple[str, bool]] = []
        self.master.on_syncing(lambda user, syncing: self.changes.append((user, syncing)))
        now(self.master.start())

    def test_users_that_sync_are_tracked_and_passed_on(self) -> None:
        wire = self.connect("USER_SYNC abcde @u:h start 5", "USER_SYNC abcde @v:h start 6")
        self.assertEqual(self.master.syncing.processes(), {"abcde": {"@u:h": 5, "@v:h": 6}})
        self.send(wire, "USER_SYNC abcde @u:h end 7", "CLEAR_USER_SYNC abcde")
        self.assertEqual(self.changes, [("@u:h", True), ("@v:h", True), ("@u:h", False), ("@v:h", False)])

    def test_a_process_that_is_lost_is_cleared_after_300_s(self) -> None:
        self.connect("USER_SYNC abcde @u:h start 5").lose()
        self.net.run(290)
        self.assertIn("@u:h", self.master.syncing)
        with logged() as lines:
            self.net.run(20)
        self.assertNotIn("@u:h", self.master.syncing)
        self.assertEqual(lines, ["process abcde was silent for 300 s: its users no longer count as syncing"])

    def test_a_relay_forwards_every_command_and_the_end_of_a_silent_process(self) -> None:
        forwarded: list[tuple[object, str]] = []
        self.master._presence.forward = lambda peer, command: forwarded.append((peer, command.WORD))
        wire = self.connect("USER_SYNC abcde @u:h start 5", "REMOTE_SERVER_UP h")
        wire.lose()
        with logged():
            self.net.run(310)
        for each in ((wire.protocol, "USER_SYNC"), (wire.protocol, "REMOTE_SERVER_UP"), (None, "CLEAR_USER_SYNC")):
            self.assertIn(each, forwarded)

    def test_a_process_that_reconnects_and_repeats_user_sync_is_not_cleared(self) -> None:
        self.connect("USER_SYNC abcde @u:h start 5").lose()
        self.net.run(200)
        self.connect("USER_SYNC abcde @u:h start 9")
        self.net.run(200)
        self.assertEqual(self.changes, [("@u:h", True)])

    def test_a_user_that_stopped_while_the_connection_was_lost_is_cleared_after_300_s(self) -> None:
        forwarded: list[object] = []
        self.master._presence.forward = lambda peer, command: forwarded.append(command) if peer is None else None
        names = [f"USER_SYNC abcde @{each}:h start 5" for each in "uvw"]
        first = self.connect(*names)
        second = self.connect(*names[:2])
        first.lose()
        for _ in range(6):
            self.assertIn("@w:h", self.master.syncing)
            self.net.run(51)
            self.send(second, "USER_SYNC abcde @u:h start 9", "PING 1")
        self.assertEqual(self.changes[3:], [("@w:h", False)])
        self.assertEqual(forwarded, [UserSync(instance_id="abcde", user_id="@w:h", syncing=False, last_sync_ms=5)])
        for _ in range(6):
            self.send(second, "PING 1")
            self.net.run(51)
        self.assertEqual(self.master.syncing.processes(), {"abcde": {"@u:h": 9, "@v:h": 5}})

    def test_a_process_that_pings_is_not_cleared_and_a_silent_one_is(self) -> None:
        wire = self.connect("USER_SYNC abcde @u:h start 5", "PING 1")
        self.connect("USER_SYNC other @v:h start 5")
        for _ in range(10):
            self.net.run(60)
            self.send(wire, "PING 1")
        self.assertEqual(self.changes, [("@u:h", True), ("@v:h", True), ("@v:h", False)])

    def test_users_beyond_the_memory_for_them_are_counted_and_logged_once(self) -> None:
        self.master.syncing.max_bytes = 1_000
        with logged() as lines:
            self.connect(*[f"USER_SYNC p{number} @u{number} start 5" for number in range(100)])
            self.net.run(1)
        self.assertLess(len(self.master.syncing), 10)
        (line,) = lines
        self.assertIn("the users that sync take 1000 bytes, so no further user counts", line)
        figures = {each.name: each.value for each in self.master.served.samples()}
        self.assertEqual(figures["users_refused_total"], 100 - len(self.master.syncing))

    def test_instance_ids_of_processes_without_users_are_not_kept(self) -> None:
        self.connect(*[f"USER_SYNC p{number} @u {state} 5" for number in range(100) for state in ("start", "end")])
        self.net.run(1)
        self.connect(*[f"USER_SYNC p{number} @u start 5" for number in range(100)])
        self.net.run(1)
        self.connect(*[f"CLEAR_USER_SYNC p{number}" for number in range(100)])
        self.net.run(6)
        tracker = self.master._presence
        self.assertEqual([*map(len, tracker._instance_ids.values())], [0, 0])


class OthersTests(MasterCase):
    def make_master(self, **options: object) -> Master:
        return super().make_master(streams=[FEDERATION], **options)

    def emit(self, *types: str) -> None:
        now(self.master.stream("federation").append([[[each, {}]] for each in types]))

    def kept(self) -> list[int]:
        page = now(self.master.served.page("federation", None, after=0, upto=None, limit=100))
        return [fact.token for fact in page.facts]

    def test_the_federation_stream_is_dropped_up_to_what_all_senders_have_acknowledged(self) -> None:
        self.emit("e", "e", "e", "e")
        one, two = self.greeted(), self.greeted()
        self.send(one, "FEDERATION_ACK one 3")
        self.assertEqual(self.kept(), [4, 5])
        self.send(two, "FEDERATION_ACK two 2")
        self.send(one, "FEDERATION_ACK one 5")
        self.assertEqual(self.kept(), [4, 5])
        self.send(two, "FEDERATION_ACK two 4")
        self.assertEqual(self.kept(), [5])

    def test_an_acknowledgement_beyond_the_stream_drops_no_later_facts(self) -> None:
        self.emit("e")
        self.send(self.greeted(), "FEDERATION_ACK one 999999999")
        self.emit("e")
        self.assertEqual(self.kept(), [3])

    def test_user_ips_are_written_every_5_s(self) -> None:
        self.send(self.greeted(), 'USER_IP @u:h ["tok","1.2.3.4","UA",null,5]')
        with patch.object(LastSeen, "_write") as write:
            self.net.run(4.5)
            write.assert_not_called()
            self.net.run(1)
            write.assert_called_once()
            self.net.run(10)
            write.assert_called_once()

    def test_a_failing_database_does_not_stop_the_loop(self) -> None:
        self.send(self.greeted(), 'USER_IP @u:h ["tok","1.2.3.4","UA",null,5]')
        with patch.object(LastSeen, "_write", side_effect=ZeroDivisionError):
            self.net.run(6)
            self.net.run(6)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)
        with patch.object(LastSeen, "_write", side_effect=StoreError("full")), logged() as lines:
            self.net.run(6)
        self.assertEqual(lines, ["cannot write users_last_seen: full"])

    def test_samples(self) -> None:
        wire = self.greeted("USER_SYNC abcde @u:h start 5", 'USER_IP @u:h ["tok","1.2.3.4","UA",null,5]', "PING 1")
        self.send(wire, "PING 2")
        figures = {(each.name, *each.labels.values()): each.value for each in self.master.served.samples()}
        self.assertEqual(figures["users_syncing",], 1)
        self.assertEqual(figures["user_ips_waiting",], 1)
        self.assertEqual(figures["commands_total", "PING"], 2)
        self.assertEqual(figures["commands_total", "USER_SYNC"], 1)

    def test_users_are_served(self) -> None:
        self.send(self.greeted(), "USER_SYNC abcde @u:h start 5")
        self.assertEqual(self.master.served.users_syncing(), {"abcde": {"@u:h": 5}})
        with patch.object(LastSeen, "of", return_value=["a place"]):
            self.assertEqual(now(self.master.served.places_of("@u:h")), ["a place"])

    def test_the_in_memory_log_is_in_the_status(self) -> None:
        self.emit("e", "e")
        self.send(self.greeted(), "FEDERATION_ACK one 2")
        [status, _] = self.master.served.stream_statuses()
        self.assertIsNotNone(status.kept)
        assert status.kept is not None
        self.assertEqual((status.kept.facts, status.kept.acknowledged), (1, {"one": 2}))
        figures = {(each.name, *each.labels.values()): each.value for each in self.master.served.samples()}
        self.assertEqual(figures["kept_bytes", "federation"], status.kept.bytes)


class ApplicationTests(MasterCase):
    def test_an_application_receives_and_sends_commands(self) -> None:
        received: list[object] = []

        @self.master.on_command(RemoteServerUp)
        def up(command: RemoteServerUp, peer: object) -> None:
            received.append(command)
            self.master.remote_server_up("echo")

        one, two = self.greeted(), self.greeted()
        self.send(one, "REMOTE_SERVER_UP example.org")
        self.assertEqual(received, [RemoteServerUp("example.org")])
        self.assertEqual(lines_of(one.read()), ["REMOTE_SERVER_UP echo"])
        self.assertEqual(lines_of(two.read()), ["REMOTE_SERVER_UP example.org", "REMOTE_SERVER_UP echo"])

    def test_commands_that_a_master_may_not_send_are_refused(self) -> None:
        wire = self.greeted()
        with self.assertRaisesRegex(Exception, "USER_SYNC may not be sent by a master"):
            self.master.send(Ping("1"), UserSync("a", "@u", syncing=True, last_sync_ms=1))
        self.assertEqual(wire.read(), b"")
