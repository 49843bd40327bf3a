"""Subscribers: each connection is greeted, receives positions on REPLICATE, and rows without asking."""

from __future__ import annotations

from unittest.mock import Mock, patch

from msgspec.structs import replace
from OpenSSL import SSL
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.logger import LogLevel
from twisted.python.failure import Failure

from replication.deferreds import share
from replication.errors import LocalProtocolError, StoreError
from replication.net.access import EVERY_RIGHT, Access, Rights
from replication.net.admission import Admission, Bounds
from replication.net.protocol import REST, Limits
from replication.net.slow_peers import HOLD
from replication.session.connection import Fault, Keepalive
from replication.streams.definitions import StreamDefinition
from replication.streams.history import UNKNOWN_HISTORY, Epoch, raised_name, read_part
from replication.wire.commands import Error, RemoteServerUp, Replicate
from replication.wire.grammar import Token
from replication.writer import subscribers
from replication.writer.subscribers import (
    CLOSED_AT_ONCE,
    CLOSING_PAUSE,
    ECHO_LENGTH,
    HISTORY_PATIENCE,
    MAX_QUICK_SILENT,
)
from tests.doubles import Wire, connect, lines_of, logged, now, shown_metrics
from tests.serving import ORDERS, POSITIONS, MasterCase


class FactoryTests(MasterCase):
    limits = Limits(keepalive=Keepalive(ping_after=1_000, give_up_after=3_000), line_limit=1_024)

    def test_each_accepted_connection_has_the_role_of_a_master(self) -> None:
        """All have the same limits, and accept what a worker may send."""
        one, two = self.greeted("NAME one"), self.greeted()
        self.assertFalse(one.disconnecting)
        self.send(two, "SERVER example.com")
        self.assertEqual(self.master.faults, {"wrong direction": 1})
        self.send(one, "x" * 1_025)
        self.net.advance(REST)
        self.assertEqual(self.master.faults, {"wrong direction": 1, "line too long": 1})

    def test_a_command_that_is_longer_than_a_line_is_not_sent(self) -> None:
        wire = self.greeted()
        with self.assertRaises(LocalProtocolError):
            self.master.send(Error("x" * 1_024))
        self.assertEqual(self.new_lines(wire), [])

    def test_a_ping_is_sent_back_if_that_is_requested(self) -> None:
        wire = self.connect("PING 7")
        lines = self.new_lines(wire)
        self.assertRegex(lines[1], r"^PING \d+ echo$")
        self.send(wire, "PING echo 1", "PING 8", "PING echo " + "x" * 900)
        self.assertEqual(self.new_lines(wire), ["PING echo 1", "PING echo " + "x" * (ECHO_LENGTH - 5)])

    def test_a_ping_that_names_a_writer_is_sent_back_with_its_history(self) -> None:
        wire = self.greeted()
        history = now(self.master.store.history(ORDERS.name, self.master.instance_name))
        self.send(wire, "PING echo 1 orders master 0", "PING echo 2 orders other 0", "PING echo 3 orders master 99999")
        lines = [line.split(" ") for line in self.new_lines(wire)]
        self.assertEqual([line[2] for line in lines], ["1", "2", "3"])
        self.assertEqual([read_part(line[6]) for line in lines], [(len(history), history), (0, []), (len(history), [])])
        others = [
            f"PING echo 4 {words}" for words in ("orders master", "orders master -1", "orders master 0 0", "orders")
        ]
        self.send(wire, *others)
        self.assertEqual(self.new_lines(wire), others)

    def test_a_long_history_is_sent_in_parts_that_a_line_can_have(self) -> None:
        """Each question is answered in a line of at most 1024 bytes here, as an option may require."""
        last, name, long = Token(2**63 - 1), raised_name(Token(2**63 - 1), "01234567.01234567"), "x" * 255
        history, found = [Epoch(name, last, last)] * 8, list[Epoch]()
        wire = self.greeted()
        with patch.object(self.master.store, "history", return_value=history):
            while len(found) < len(history):
                self.send(wire, f"PING echo {2**63} {long} {long} {len(found)}")
                (line,) = self.new_lines(wire)
                total, part = read_part(line.split(" ")[6])
                self.assertEqual(total, len(history))
                found += part
        self.assertEqual(found, history)

    def test_a_history_that_cannot_be_read_is_not_sent(self) -> None:
        wire = self.greeted()
        for error in (StoreError("locked"), ZeroDivisionError()):
            with patch.object(self.master.store, "history", side_effect=error):
                self.send(wire, "PING echo 1 orders master 0")
            self.assertEqual(self.new_lines(wire), [f"PING echo 1 orders master 0 {UNKNOWN_HISTORY}"])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_the_database_is_read_for_so_many_pings_of_a_connection_at_once(self) -> None:
        wire = self.greeted()
        arrives: Deferred[list[object]] = Deferred()
        with (
            patch.object(self.master.store, "history", Mock(side_effect=lambda *_: share(arrives))) as read,
            patch.object(subscribers, "MAX_ASKED", 3),
        ):
            self.send(wire, *[f"PING echo {number} orders master 0" for number in range(4)])
            self.assertEqual(read.call_count, 3)
            self.assertEqual(self.new_lines(wire), [f"PING echo 3 orders master 0 {UNKNOWN_HISTORY}"])
            arrives.callback([])
            self.send(wire, "PING echo 4 orders master 0")
        self.assertEqual(
            self.new_lines(wire), [f"PING echo {number} orders master 0 [0,[]]" for number in (0, 1, 2, 4)]
        )

    def test_a_database_that_does_not_answer_is_waited_for_a_while(self) -> None:
        """A follower waited with it, ready and without an error."""
        wire = self.greeted()
        arrives: Deferred[list[object]] = Deferred()
        with (
            patch.object(self.master.store, "history", Mock(side_effect=lambda *_: share(arrives))) as read,
            patch.object(subscribers, "MAX_ASKED", 1),
        ):
            self.send(wire, "PING echo 1 orders master 0")
            self.net.advance(HISTORY_PATIENCE)
            self.send(wire, "PING echo 2 orders master 0")
            self.assertEqual(read.call_count, 1, "that read goes on")
            arrives.errback(StoreError("too late"))
        answers = [line for line in self.new_lines(wire) if "echo" in line]
        self.assertEqual(answers, [f"PING echo {number} orders master 0 {UNKNOWN_HISTORY}" for number in (1, 2)])

    def test_it_does_not_log_each_connection(self) -> None:
        self.assertFalse(self.master.factory().noisy)


class BoundsTests(MasterCase):
    bounds = Bounds(max_connections=4, handshake_timeout=30, max_silent_connections=1)
    limits = Limits(keepalive=Keepalive(ping_after=1_000, give_up_after=3_000), bounds=bounds)

    def test_a_connection_beyond_the_bound_is_refused_and_the_others_go_on(self) -> None:
        wires = [self.greeted("REPLICATE") for _ in range(4)]
        self.assertIsNone(self.master.factory().buildProtocol(None))
        self.append("placed")
        for wire in wires:
            self.assertEqual(self.new_lines(wire)[-1], 'RDATA orders master 2 ["o","placed"]')
        wires[0].lose()
        self.greeted()
        self.assertEqual(self.figure("connections_refused_total socket=wire bound=max_connections"), 1)

    def test_connections_that_send_nothing_are_closed_but_a_few_may_watch(self) -> None:
        """A person with ``nc`` sends nothing, and a Synapse its first line at once."""
        watching, silent = self.greeted(), self.greeted()
        self.net.advance(10)
        good = self.greeted("REPLICATE")
        self.net.advance(19)
        self.assertEqual(self.figure("silent_connections"), 2)
        self.net.advance(1)
        text = "ERROR nothing was received for 30 s, and too many connections are silent"
        self.assertEqual((self.new_lines(watching), self.new_lines(silent)), ([], [text]))
        self.net.advance(20)
        self.assertEqual(self.master.faults, {"silent": 1})
        self.assertEqual(self.figure("silent_connections"), 1)
        self.append("placed")
        for wire in (watching, good):
            self.assertEqual(self.new_lines(wire), ['RDATA orders master 2 ["o","placed"]'])
        self.send(watching, "NAME nc")
        self.assertEqual(self.figure("silent_connections"), 0)
        another = self.greeted()
        self.net.advance(30)
        self.assertFalse(another.disconnecting, "there is room again")

    def test_without_a_bound_any_number_may_watch(self) -> None:
        self.limits = replace(self.limits, bounds=replace(self.bounds, max_silent_connections=0))
        self.master = self.make_master()
        wires = [self.greeted(), self.greeted()]
        self.net.advance(60)
        self.assertEqual((self.master.faults, [each.disconnecting for each in wires]), ({}, [False] * 2))

    def test_each_connection_has_its_own_time_to_send_the_first_line(self) -> None:
        watching = self.greeted()
        self.net.advance(29.5)
        late = self.greeted()
        self.net.advance(0.5)
        self.assertEqual(self.figure("silent_connections"), 2)
        self.net.advance(29.0)
        self.assertEqual([each.disconnecting for each in (watching, late)], [False, False])
        self.net.advance(1.0)
        self.assertEqual([each.disconnecting for each in (watching, late)], [False, True])

    def test_the_time_to_send_the_first_line_may_be_less_than_a_second(self) -> None:
        self.limits = replace(self.limits, bounds=replace(self.bounds, handshake_timeout=0.5))
        self.master = self.make_master()
        watching, silent = self.greeted(), self.greeted()
        self.net.advance(0.5)
        self.assertEqual([each.disconnecting for each in (watching, silent)], [False, True])

    def test_nothing_is_checked_before_the_first_one_is_late(self) -> None:
        self.greeted()
        self.net.advance(1.0)
        self.greeted()
        self.assertIn(30.0, [each.getTime() for each in self.net.getDelayedCalls()])

    def test_a_silent_connection_is_noticed_after_all_others_have_sent_a_line(self) -> None:
        self.send(self.greeted(), "NAME one")
        self.net.advance(31)
        watching, silent = self.greeted(), self.greeted()
        self.net.advance(30)
        self.assertEqual([each.disconnecting for each in (watching, silent)], [False, True])

    def test_a_wrong_line_is_a_fault_of_the_address_and_a_slow_peer_is_none(self) -> None:
        noted: list[object] = []
        with patch.object(Admission, "faulted", lambda _, address: noted.append(address)):
            wrong, slow = self.greeted(), self.connect(room=10)
            slow.peerAddr = IPv4Address("TCP", "127.0.0.2", 40_000)
            self.send(wrong, "nonsense")
            slow.protocol.fail(Fault("Failed to keep up", "slow peer"))
        self.assertEqual(noted, [wrong.getPeer()])

    def figure(self, name: str) -> float:
        return shown_metrics(self.master.served.samples())[name]


class SilenceTests(MasterCase):
    """Many connections that send nothing: what concerns all of them is done in many turns."""

    bounds = Bounds(handshake_timeout=30, max_silent_connections=1)
    limits = Limits(keepalive=Keepalive(ping_after=1_000, give_up_after=3_000), bounds=bounds)

    def test_beyond_ten_they_receive_facts_later_and_at_once_from_their_first_line_on(self) -> None:
        quick, slow = [self.greeted() for _ in range(MAX_QUICK_SILENT)], self.greeted()
        self.append("placed")
        self.net.advance(0)
        fact = 'RDATA orders master 2 ["o","placed"]'
        for wire in quick:
            self.assertEqual(lines_of(wire.read()), [fact])
        self.assertEqual(lines_of(slow.read()), [])
        self.net.advance(HOLD)
        self.assertEqual(lines_of(slow.read()), [fact])
        self.append("paid")
        self.send(slow, "REPLICATE orders")
        self.assertEqual(lines_of(slow.read()), ['RDATA orders master 3 ["o","paid"]', "POSITION orders master 3 3"])
        self.append("sent")
        self.net.advance(0)
        self.assertEqual(lines_of(slow.read()), ['RDATA orders master 4 ["o","sent"]'])

    def test_they_are_closed_a_few_in_each_turn(self) -> None:
        for _ in range(2 * CLOSED_AT_ONCE + 1):
            self.greeted()
        self.net.advance(29.9)
        self.assertEqual(self.master.faults, {})
        self.net.advance(0.1)
        closed = [self.master.faults["silent"]]
        for _ in range(2):
            self.net.advance(CLOSING_PAUSE)
            closed.append(self.master.faults["silent"])
        self.assertEqual(closed, [CLOSED_AT_ONCE - 1, 2 * CLOSED_AT_ONCE - 1, 2 * CLOSED_AT_ONCE])


class Given(Access):
    """Gives these rights to every peer."""

    def __init__(self, rights: Rights | None) -> None:
        super().__init__()
        self._given = rights

    def of_transport(self, transport: object) -> Rights | None:
        return self._given


class RightsTests(MasterCase):
    reader = Rights(("reader",), {"orders"})

    def connect_with(self, rights: Rights | None, *lines: str) -> Wire:
        wire = connect(self.master.factory(Given(rights)))
        self.wires.append(wire)
        self.new_lines(wire)
        self.send(wire, *lines)
        return wire

    def invalidate(self) -> None:
        reservation, fact = self.hold()
        fact.invalidate("get", None)
        now(reservation.__aexit__(None, None, None))

    def test_a_follower_receives_the_streams_that_it_may_read_and_no_others(self) -> None:
        asked, silent = self.connect_with(self.reader, "REPLICATE"), self.connect_with(self.reader)
        self.assertEqual(self.new_lines(asked), ["POSITION orders master 1 1"])
        self.append("placed")
        self.invalidate()
        for wire in (asked, silent):
            self.assertEqual(
                self.new_lines(wire), ['RDATA orders master 2 ["o","placed"]', "POSITION orders master 2 3"]
            )

    def test_no_right_to_read_is_not_the_right_to_read_all(self) -> None:
        for lines in (["REPLICATE"], ["REPLICATE orders"], []):
            wire = self.connect_with(Rights(("none",), (), {"*"}, commands=True), *lines)
            self.append("placed")
            self.assertEqual([each for each in self.new_lines(wire) if not each.startswith("ERROR")], [])

    def test_commands_of_this_process_need_no_right(self) -> None:
        wire = self.connect_with(Rights(("none",)))
        self.connect_with(EVERY_RIGHT, "REMOTE_SERVER_UP other.example")
        self.assertEqual(self.new_lines(wire), ["REMOTE_SERVER_UP other.example"])

    def test_a_stream_that_it_requests_without_the_right_is_refused_with_the_cure(self) -> None:
        text = "the right to read 'caches' is missing: add it to read in [access.reader]"
        with logged() as messages:
            wire = self.connect_with(self.reader, "NAME worker1", "REPLICATE caches orders")
        self.assertEqual(self.new_lines(wire), ["POSITION orders master 1 1", f"ERROR {text}"])
        self.assertEqual(messages, [f"'worker1' (127.0.0.1:40000): {text}"])
        self.append("placed")
        self.assertEqual(self.new_lines(wire), ['RDATA orders master 2 ["o","placed"]'])

    def test_commands_without_the_right_are_ignored_and_the_follower_follows(self) -> None:
        other = self.greeted()
        text = "USER_SYNC is ignored: the right 'commands' is missing: set commands = true in [access.reader]"
        sync = "USER_SYNC abcde @u:h start 5"
        with logged() as messages:
            wire = self.connect_with(
                self.reader, sync, "NAME worker1", "REMOTE_SERVER_UP h", "FEDERATION_ACK w 5", sync
            )
        self.assertEqual(self.new_lines(wire), [f"ERROR {text}"])
        self.assertEqual(messages, [f"'worker1' (127.0.0.1:40000): {text}"])
        self.assertEqual((self.new_lines(other), self.master.syncing.processes()), ([], {}))
        metrics = shown_metrics(self.master.served.samples())
        self.assertEqual(metrics["commands_refused_total command=USER_SYNC"], 2)
        self.send(wire, sync)
        self.append("placed")
        self.assertEqual(len(self.new_lines(wire)), 1, "one ERROR was enough")

    def test_with_the_right_commands_count(self) -> None:
        self.connect_with(Rights(("worker",), commands=True), "USER_SYNC abcde @u:h start 5")
        self.assertEqual([*self.master.syncing.processes()], ["abcde"])

    def test_a_certificate_that_no_table_names_is_disconnected(self) -> None:
        wire = connect(self.master.factory(Given(None)))
        self.wires.append(wire)
        text = "ERROR no [access] table names the certificate: add one of its names to certificates in one"
        self.assertEqual(lines_of(wire.read()), [text])
        self.assertEqual(self.master.faults, {"no right": 1})


class SubscribersTests(MasterCase):
    def test_a_new_connection_receives_server_and_ping_at_once(self) -> None:
        wire = self.connect()
        self.assertEqual(self.new_lines(wire), ["SERVER example.com", "PING 1700500 echo"])

    def test_replicate_is_answered_at_once_with_a_position_per_stream(self) -> None:
        wire = self.greeted()
        self.send(wire, "NAME worker1", "REPLICATE ")
        self.assertEqual(lines_of(wire.read()), POSITIONS)

    def test_only_the_connection_that_sent_replicate_is_answered(self) -> None:
        one, two = self.greeted(), self.greeted()
        self.send(one, "REPLICATE")
        self.assertEqual((self.new_lines(one), self.new_lines(two)), (POSITIONS, []))

    def test_a_flood_of_replicate_is_answered_once_per_read(self) -> None:
        """Otherwise one connection could occupy the process with answers."""
        wire = self.greeted()
        self.send(wire, *["REPLICATE"] * 40, "REPLICATE orders", *["REPLICATE"] * 40)
        self.assertEqual(self.new_lines(wire), [*(each for each in POSITIONS if " orders " in each), *POSITIONS])

    def test_nothing_that_was_read_is_done_after_the_connection_is_closed(self) -> None:
        wire, other = self.greeted(), self.greeted()
        self.send(wire, "REMOTE_SERVER_UP a\r\r", "REMOTE_SERVER_UP b")
        self.assertEqual(self.new_lines(other), [])

    def test_replicate_may_be_sent_again(self) -> None:
        wire = self.greeted("REPLICATE")
        self.append("placed")
        self.send(wire, "REPLICATE")
        self.assertEqual(self.new_lines(wire)[1:], ["POSITION orders master 2 2", "POSITION caches master 1 1"])

    def test_rows_are_sent_without_replicate(self) -> None:
        wire = self.greeted()
        self.append("placed")
        self.assertEqual(self.new_lines(wire), ['RDATA orders master 2 ["o","placed"]'])

    def test_trap_19_a_position_never_overtakes_the_rows_before_it(self) -> None:
        """Rows of the same reactor turn are sent first, and no row that the position covers is sent after it."""
        wire = self.greeted()
        reservation, _ = self.hold()
        self.append("placed")
        self.send(wire, "REPLICATE")
        self.assertEqual(self.new_lines(wire), POSITIONS)
        now(reservation.__aexit__(None, None, None))
        self.append("paid")
        self.send(wire, "REPLICATE")
        self.append("sent")
        self.assertEqual(
            self.new_lines(wire),
            [
                'RDATA orders master 3 ["o","placed"]',
                'RDATA orders master 4 ["o","paid"]',
                "POSITION orders master 4 4",
                "POSITION caches master 1 1",
                'RDATA orders master 5 ["o","sent"]',
            ],
        )

    def test_replicate_with_names_restricts_the_connection_to_those_streams(self) -> None:
        wire = self.greeted("REPLICATE caches unknown")
        self.append("placed")
        reservation, fact = self.hold()
        fact.invalidate("get", None)
        now(reservation.__aexit__(None, None, None))
        self.assertEqual(self.new_lines(wire), ['RDATA caches master 2 ["get",null,1700500]'])
        self.send(wire, "REPLICATE")
        self.append("paid")
        self.assertEqual(len(self.new_lines(wire)), 3)

    def test_replicate_of_an_unknown_stream_is_not_answered(self) -> None:
        wire = self.greeted()
        self.send(wire, "REPLICATE unknown")
        self.assertEqual(self.new_lines(wire), [])

    def test_a_stream_of_other_writers_has_no_position(self) -> None:
        self.master = self.make_master(streams=[StreamDefinition("stock", writers=("worker2",)), ORDERS])
        wire = self.greeted()
        self.send(wire, "REPLICATE")
        self.assertEqual(self.new_lines(wire), POSITIONS)

    def test_trap_9_remote_server_up_is_sent_on_to_all_other_connections(self) -> None:
        one, two, three = (self.greeted() for _ in range(3))
        self.send(two, "REMOTE_SERVER_UP far.example")
        messages = ["REMOTE_SERVER_UP far.example"]
        self.assertEqual([self.new_lines(each) for each in (one, two, three)], [messages, [], messages])
        sent = {
            each.labels["direction"]: each.value for each in self.master.served.samples() if each.name == "lines_total"
        }
        self.assertEqual(sent, {"in": 1, "out": 3 * 2 + 2})

    def test_a_master_itself_reports_that_a_server_answers_again(self) -> None:
        one, two = self.greeted(), self.greeted()
        self.master.remote_server_up("far.example")
        self.assertEqual([self.new_lines(each) for each in (one, two)], [["REMOTE_SERVER_UP far.example"]] * 2)

    def test_twisted_logs_the_factory_as_the_wire(self) -> None:
        prefixes = [self.master.factory(access).logPrefix() for access in (None, Access())]
        self.assertEqual(prefixes, ["the wire"] * 2)

    def test_what_closed_connections_have_sent_and_received_stays_counted(self) -> None:
        wires = [self.greeted("REPLICATE"), self.greeted("REPLICATE")]
        names = [f"{unit}_total direction={way}" for unit in ("lines", "bytes") for way in ("in", "out")]
        before = shown_metrics(self.master.served.samples())
        self.assertEqual([before[name] for name in names[::2]], [2, 2 * len(b"REPLICATE\n")])
        for wire in wires:
            wire.lose()
        after = shown_metrics(self.master.served.samples())
        self.assertEqual(after["connections"], 0)
        self.assertEqual([after[name] for name in names], [before[name] for name in names])

    def test_commands_of_the_application_are_sent_to_every_connection(self) -> None:
        one, two = self.greeted(), self.greeted()
        self.master.send(RemoteServerUp("a.example"), Error("soon"))
        lines = ["REMOTE_SERVER_UP a.example", "ERROR soon"]
        self.assertEqual([self.new_lines(each) for each in (one, two)], [lines, lines])
        with self.assertRaises(LocalProtocolError):
            self.master.send(Error("soon"), Replicate())
        self.assertEqual(self.new_lines(one), [])
        sent = {
            each.labels["direction"]: each.value for each in self.master.served.samples() if each.name == "lines_total"
        }
        self.assertEqual(sent["out"], 2 * (2 + 2))

    def test_a_command_that_cannot_be_sent_on_closes_only_its_sender(self) -> None:
        origin, other = self.greeted(), self.greeted()
        self.send(origin, "REMOTE_SERVER_UP far.example\r\r")
        self.assertIn("ERROR REMOTE_SERVER_UP", lines_of(origin.read())[0])
        self.assertTrue(origin.disconnecting)
        self.assertEqual(self.new_lines(other), [])
        self.assertEqual(self.master.faults, {"bad line": 1})

    def test_other_commands_of_synapse_are_accepted(self) -> None:
        wire = self.greeted()
        self.send(
            wire,
            "USER_SYNC abcde @u:h start 1",
            "CLEAR_USER_SYNC abcde",
            "FEDERATION_ACK sender1 7",
            'USER_IP @u:h ["t","1.2.3.4","UA",null,1]',
            "PING 1",
        )
        self.assertEqual(self.new_lines(wire), [])
        self.assertEqual(self.master.served.peer_statuses()[0].last_command, "PING")

    def test_functions_of_the_application_receive_the_commands_of_each_peer(self) -> None:
        received: list[object] = []
        self.master.on_command(RemoteServerUp)(lambda command, peer: received.append((command, peer.name)))
        self.master.on_syncing(lambda user, syncing: received.append((user, syncing)))
        self.greeted("NAME worker1", "REMOTE_SERVER_UP far.example", "USER_SYNC abcde @u:h start 1")
        self.assertEqual(received, [(RemoteServerUp("far.example"), "worker1"), ("@u:h", True)])

    def test_each_command_is_counted(self) -> None:
        self.greeted("PING 1", "PING 2", "NAME worker1")
        metrics = shown_metrics(self.master.served.samples())
        counts = [metrics[f"commands_total command={word}"] for word in ("PING", "NAME")]
        self.assertEqual(counts, [2, 1])

    def test_a_name_is_cut_to_255_characters(self) -> None:
        wire = self.greeted("NAME worker1")
        self.assertEqual(self.master.served.peer_statuses()[0].name, "worker1")
        self.send(wire, "NAME " + "x" * 1_000)
        self.assertEqual(self.master.served.peer_statuses()[0].name, "x" * 255)

    def test_the_text_of_an_error_is_logged_as_a_value(self) -> None:
        wire = self.greeted("NAME worker1")
        with logged() as messages:
            self.send(wire, "ERROR 100% {x} \x1b[31m")
        self.assertEqual(messages, ["'worker1' (127.0.0.1:40000) sent ERROR: '100% {x} \\x1b[31m'"])
        self.assertFalse(wire.disconnecting)
        with logged() as messages:
            self.send(wire, "ERROR " + "x" * 201)
        self.assertTrue(messages[0].endswith(f" sent ERROR: '{'x' * 200}'"))

    def test_server_stopping_is_not_a_warning(self) -> None:
        wire = self.greeted("NAME worker1")
        with logged() as messages:
            self.send(wire, "ERROR server stopping")
        self.assertEqual(messages, [])
        with logged(LogLevel.info) as messages:
            self.send(wire, "ERROR server stopping")
        self.assertEqual(messages, ["'worker1' (127.0.0.1:40000) is stopping"])

    def test_two_processes_with_one_name_are_logged_once_both_are_alive(self) -> None:
        one, two = self.greeted("NAME worker1"), self.greeted("NAME worker1")
        with logged() as messages:
            for _ in range(3):
                self.send(one, "PING 1")
                self.send(two, "PING 1")
        self.assertEqual(len(messages), 1)
        self.assertIn("two processes have the instance name 'worker1'", messages[0])
        self.greeted("NAME worker2")
        statuses = self.master.served.peer_statuses()
        self.assertEqual([each.shares_name for each in statuses], [True, True, False])
        self.assertEqual({each.lines_out for each in statuses[:2]}, {2})

    def test_users_of_a_lost_connection_sync_until_its_processes_have_been_silent(self) -> None:
        wire = self.greeted("USER_SYNC abcde @u:h start 1700")
        for _ in range(4):
            self.net.advance(100.0)
            self.send(wire, "PING 1")
        wire.lose()
        self.net.pump([100.0] * 2)
        self.assertEqual(self.master.served.users_syncing(), {"abcde": {"@u:h": 1700}})
        self.net.pump([100.0] * 2)
        self.assertEqual(self.master.served.users_syncing(), {})

    def test_why_tls_failed_is_logged_and_counted(self) -> None:
        with logged() as messages:
            for count in (1, 2):
                wire = self.connect()
                wire.protocol.connectionLost(Failure(SSL.Error([("", "", "unknown ca")])))
                wire.lost = True
                shown = shown_metrics(self.master.served.samples())
                self.assertEqual(shown["tls_failures_total socket=wire"], count)
        why = "the peer does not trust the authority of this end's certificate (unknown ca)"
        self.assertEqual(messages, [f"a peer (127.0.0.1:40000): TLS failed: {why}"])

    def test_a_fault_is_logged_and_counted_and_closes_only_its_connection(self) -> None:
        one, two = self.greeted(), self.greeted()
        with logged() as messages:
            self.send(one, "FOO")
        self.assertEqual(messages, ["closing a peer (127.0.0.1:40000): line 1: unknown command: 'FOO', in 'FOO'"])
        self.assertEqual(self.master.faults, {"unknown command": 1})
        self.assertEqual([peer.address for peer in self.master.served.peer_statuses()], ["127.0.0.1:40000"])
        self.append("placed")
        self.assertEqual(len(self.new_lines(two)), 1)
