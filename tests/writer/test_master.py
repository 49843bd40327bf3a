"""A master starts at its stored positions, and stops without loss of what was begun."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from unittest.mock import call, patch

import msgspec
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import (
    CommitsLostError,
    ConfigError,
    SchemaError,
    StoppingError,
    StoreError,
    StreamError,
)
from replication.net.broadcast import Broadcast
from replication.net.protocol import Limits
from replication.session.encoder import encode_position
from replication.storage import open_store
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.history import Epoch, common_position
from replication.streams.interfaces import Write
from replication.wire.commands import UserSync
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer import master as master_module
from replication.writer.master import PART_STREAMS, Master
from replication.writer.publisher import NO_WRITER
from tests.doubles import Net, begin, error_of, lines_of, logged, now
from tests.serving import ORDERS, POSITIONS, MasterCase, SharedCase
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from replication.net.protocol import ReplicationProtocol
    from replication.session.encoder import EncodedLines
    from replication.wire.commands import Command
    from replication.writer.positions import IPositions


SECOND = InstanceName("second")


class SharedEpochTests(SharedCase):
    """A writer of several begins its epoch at its own last place."""

    def start(self) -> list[tuple[int, int]]:
        """Start another process, and return where its epochs begin."""
        second = self.make_master(instance_name="second")
        now(second.start())
        history = now(self.store.history(ORDERS.name, SECOND))
        self.assertEqual(now(self.store.stored_positions())[ORDERS.name][SECOND], second.stream("orders").published)
        now(second.stop())
        now(self.store.open())
        self.histories.append(history)
        return [(each.settled, each.start) for each in history]

    def test_a_follower_goes_back_to_the_backup_also_if_another_writer_was_started_before(self) -> None:
        """Else a function would keep the facts that the restore has lost: others have passed them since."""
        self.histories: list[Sequence[Epoch]] = []
        fact = Fact(Token(4), ('["o","placed"]',))
        self.shared.land([Write(ORDERS.name, SECOND, Token(4), [fact])], None)
        self.assertEqual(self.start(), [(4, 4)])
        self.shared.others_write("orders", "master", 20)  # since the restore; before it, this writer was at 11
        self.assertEqual(self.start(), [(4, 4), (4, 4)])
        before, since = self.histories
        lost = Epoch("lost", Token(4), Token(4))  # the run from before the restore, of which the backup has nothing
        self.assertEqual(common_position([*before, lost], since, Token(11)), 4)

    def test_the_last_place_is_what_was_published(self) -> None:
        """A fact without rows, an idle writer's position, and a stream that shares the IDs have moved it."""
        self.histories = []
        self.shared.others_write("orders", "second", 4)
        self.shared.others_write("orders", NO_WRITER, 6)
        self.shared.others_write("orders", "master", 20)
        self.assertEqual(self.start(), [(4, 6)])
        self.assertEqual(self.start()[-1], (20, 20), "the start has stored this position before it was published")


class CommitTests(SharedCase):
    def test_on_commit_is_called_with_committed_facts(self) -> None:
        received: list[object] = []
        master = self.make_master(instance_name="second", on_commit=lambda *what: received.append(what))
        now(master.start())
        now(master.stream("orders").append([[["o", "placed"]]]))
        self.assertEqual(received, [("orders", [Fact(Token(2), ('["o","placed"]',))])])
        now(master.stop())


class StartTests(MasterCase):
    def test_the_first_reserve_starts_the_master(self) -> None:
        self.assertEqual(self.append("placed"), [2])

    def test_two_calls_of_start_start_once(self) -> None:
        self.store.close_gate("open")
        started = [begin(self.master.start()) for _ in range(2)]
        self.assertEqual(started, [[], []])
        self.store.open_gate("open")
        self.assertEqual(started, [[None], [None]])
        now(self.master.start())
        self.assertEqual(self.store.asked.count("open"), 1)

    def test_cancelling_one_start_does_not_cancel_the_other(self) -> None:
        self.store.close_gate("open")
        start = self.master.start()
        one, two = begin(start), begin(self.master.start())
        start.cancel()
        self.assertIsInstance(error_of(one), CancelledError)
        self.store.open_gate("open")
        self.assertEqual(two, [None])

    def test_a_peer_that_connects_early_is_greeted_at_once_and_answered_after_the_start(self) -> None:
        """The follower can check the server name, and does not time out during a long start."""
        self.store.close_gate("positions")
        early, gone = self.connect("NAME early", "PING 1", "REPLICATE orders"), self.connect("REPLICATE")
        self.assertEqual(self.new_lines(early), ["SERVER example.com", "PING 1700500 echo"])
        gone.lose()
        self.store.open_gate("positions")
        self.assertEqual(self.new_lines(early), ["POSITION orders master 1 1"])
        self.assertEqual([peer.name for peer in self.master.served.peer_statuses()], ["early"])
        self.append("placed")
        self.assertEqual(len(self.new_lines(early)), 1)

    def test_a_fault_of_an_early_peer_closes_only_that_peer(self) -> None:
        self.store.close_gate("open")
        early, wrong = self.connect("REPLICATE"), self.connect("REPLICATE", "FOO")
        self.assertTrue(lines_of(wrong.read())[-1].startswith("ERROR "))
        self.store.open_gate("open")
        self.assertEqual(len(self.new_lines(early)), 4)
        self.assertEqual(self.new_lines(wrong), [])

    def test_every_caller_and_peer_receives_the_error_of_a_failed_start(self) -> None:
        self.store.close_gate("open")
        waiting = [begin(self.master.start()), begin(self.master.stream("orders").append([[["o", "p"]]]))]
        with logged() as messages:
            early = self.connect("REPLICATE")
            self.store.errors["open"] = SchemaError("made by a newer version")
            self.store.open_gate("open")
            late = self.connect("REPLICATE")
        for outcome in (*waiting, begin(self.master.start()), begin(self.master.served.check())):
            self.assertIsInstance(error_of(outcome), SchemaError)
        for wire in (early, late):
            self.assertEqual(lines_of(wire.read())[-1], "ERROR made by a newer version")
        self.assertIn("cannot start: made by a newer version", messages)
        self.assertEqual(self.store.asked.count("open"), 1)

    def test_peers_receive_only_the_kind_of_an_unexpected_error(self) -> None:
        self.store.errors["open"] = ZeroDivisionError("a detail of this machine")
        with logged():
            wire = self.connect("REPLICATE")
        self.assertEqual(lines_of(wire.read())[-1], "ERROR cannot start: ZeroDivisionError")

    def test_after_a_temporary_error_each_caller_tries_again_and_peers_wait(self) -> None:
        self.store.close_gate("open")
        waiting = [begin(self.master.start()) for _ in range(3)]
        early = self.connect("REPLICATE orders")
        for place in ("open", "declare", "positions"):
            self.store.errors = {place: StoreError("the database is locked", temporary=True)}
            if "open" in self.store.gates:
                self.store.open_gate("open")
            asked = self.store.asked.count("open")
            for outcome in (*waiting, begin(self.master.start()), begin(self.master.served.check())):
                self.assertIs(error_of(outcome), self.store.errors[place])
            self.assertEqual(self.store.asked.count("open"), asked + 1, "a check names the trouble at once")
            waiting = []
        self.assertEqual([line for line in self.new_lines(early) if line.startswith(("ERROR", "POSITION"))], [])
        self.store.errors = {}
        self.assertEqual(begin(self.master.start()), [None])
        self.assertEqual(self.new_lines(early), ["POSITION orders master 1 1"])
        self.assertEqual(self.append("placed"), [2])

    def test_all_streams_are_declared_before_the_first_is_read(self) -> None:
        """Each table that is created makes every connection to the database read the schema again."""
        master = self.make_master(instance_name="many", streams=[f"s{n}" for n in range(2 * PART_STREAMS)])
        now(master.start())
        asked = [each for each in self.store.asked if each in ("declare", "positions")]
        self.assertEqual(asked, ["declare"] * 3 + ["positions"] * 3)
        now(master.stop())

    def test_streams_that_count_down_are_declared_first_and_each_table_is_claimed_to_write(self) -> None:
        """One that counts up may have its rows in the table of one that counts down, which the store must know."""
        master = self.make_master(streams=["up", StreamDefinition("down", negative=True)])
        with patch.object(self.store, "claim_tables", wraps=self.store.claim_tables) as claim:
            now(master.start())
        self.assertEqual(claim.call_args_list, [call(["down", "up", "caches"], "master", copy=False)])
        now(master.stop())

    def test_a_stop_ends_a_start_with_many_streams_early(self) -> None:
        for place in ("declare", "positions"):
            master = self.make_master(instance_name=place, streams=[f"s{n}" for n in range(2 * PART_STREAMS)])
            self.store.asked.clear()
            self.store.close_gate(place)
            started = begin(master.start())
            stopped = begin(master.stop())
            self.store.open_gate(place)
            self.assertIsInstance(error_of(started), StoppingError)
            self.assertEqual((stopped, self.store.asked.count(place)), ([None], 1))
            now(self.store.open())

    def test_a_master_whose_start_failed_for_now_can_be_stopped(self) -> None:
        self.store.errors["positions"] = StoreError("the database is locked", temporary=True)
        self.assertIsInstance(error_of(begin(self.master.start())), StoreError)
        self.assertEqual(begin(self.master.stop()), [None])

    def test_every_caller_receives_an_unexpected_error_of_the_start(self) -> None:
        """A caller without the error would write from ID 2 on."""
        self.store.errors["positions"] = OSError("too many open files")
        for _ in range(3):
            self.assertIsInstance(error_of(begin(self.master.start())), OSError)
        self.assertIsInstance(error_of(begin(self.master.stream("orders").append([[["o", "p"]]]))), OSError)

    def test_a_stream_continues_at_its_largest_stored_position(self) -> None:
        now(self.store.open())
        now(self.store.declare(ORDERS))
        for writer, position in (("master", 7), ("an-older-name", 9)):
            write = Write(ORDERS.name, InstanceName(writer), Token(position))
            now(self.store.transaction().commit([write]))
        wire = self.greeted()
        self.send(wire, "REPLICATE")
        lines = ["POSITION orders an-older-name 9 9", "POSITION orders master 9 9"]
        self.assertEqual(sorted(self.new_lines(wire)[:2]), lines)
        self.assertEqual(self.append("placed"), [10])

    def test_a_restarted_master_is_no_former_writer_and_sends_its_position_once(self) -> None:
        self.append("placed")
        now(self.master.stop())
        self.store.closed = False
        self.master = self.make_master()
        wire = self.greeted()
        self.send(wire, "REPLICATE")
        self.assertEqual(self.new_lines(wire), ["POSITION orders master 2 2", "POSITION caches master 1 1"])

    def test_trap_17_streams_that_share_their_ids_continue_at_their_largest_position(self) -> None:
        streams = [StreamDefinition("tags", shares="data"), StreamDefinition("data")]
        master = self.make_master(streams=streams)
        for stream, tokens in (("tags", [2]), ("data", [3]), ("tags", [4])):
            self.assertEqual(now(master.stream(stream).append([[1]])), tokens)
        now(master.stop())
        self.master = self.make_master(streams=streams)
        now(self.master.start())
        wire = self.greeted("REPLICATE")
        self.assertEqual(now(self.master.stream("data").append([[1]])), [5])
        self.assertEqual(self.new_lines(wire), ["RDATA data master 5 1", "POSITION tags master 4 5"])
        page = now(self.master.served.page("tags", None, after=0, upto=9, limit=9))
        self.assertEqual(([fact.token for fact in page.facts], page.upto), ([2, 4], 5))

    def test_trap_17_after_a_kill_the_largest_position_counts_in_whichever_of_the_streams_it_is(self) -> None:
        """A kill leaves each stream at its last stored position; the next ID must be above all of them."""
        for largest, other in (("tags", "data"), ("data", "tags")):
            self.store = self.make_store()
            now(self.store.open())
            for name, token in ((largest, Token(7)), (other, Token(3))):
                now(self.store.declare(StreamDefinition(name)))
                write = Write(StreamName(name), InstanceName("master"), token, [Fact(token, ("1",))])
                now(self.store.transaction().commit([write]))
            self.master = self.make_master(streams=[StreamDefinition("tags", shares="data"), StreamDefinition("data")])
            self.assertEqual(now(self.master.stream("data").append([[1]])), [8])
            now(self.master.stop())

    def test_a_server_name_that_no_line_can_hold_is_refused(self) -> None:
        for name in ("two\nlines", "cr\r", "x" * 20_000, "\ud800"):
            with self.assertRaisesRegex(ConfigError, "server_name"):
                self.make_master(server_name=name)
        with self.assertRaisesRegex(ConfigError, "^server_name 'x{40}': "):
            self.make_master(server_name="x" * 20_000)

    def test_two_streams_of_one_name_are_refused(self) -> None:
        with self.assertRaises(ConfigError):
            self.make_master(streams=["orders", ORDERS])

    def test_a_stream_that_another_program_writes_is_refused(self) -> None:
        with self.assertRaisesRegex(ConfigError, "'orders' has a position_name: another program writes it"):
            self.make_master(streams=[StreamDefinition("orders", position_name="app_orders")])

    def test_a_name_or_a_definition_is_refused_as_the_list_of_streams(self) -> None:
        for streams, kind in (("orders", "str"), (ORDERS, "StreamDefinition")):
            with self.assertRaisesRegex(ConfigError, rf"^streams is a list, not a {kind}: write streams=\["):
                self.make_master(streams=streams)

    def test_a_decorator_without_parentheses_names_what_to_write(self) -> None:
        master: Any = self.master

        def show(*arguments: object) -> None:
            """Do nothing."""

        for decorator, use in (
            (master.on_command, r"@worker\.on_command\(RemoteServerUp\)"),
            (master.on_synapse_request, r"@master\.on_synapse_request\('send_event'\)"),
        ):
            with self.assertRaisesRegex(ConfigError, f"write {use} above show"):
                decorator(show)

    def test_the_caches_stream_is_always_declared(self) -> None:
        self.assertIn("caches", self.make_master(streams=[]).registry)
        self.assertIn("caches", self.make_master(streams=["caches"]).registry)
        refused = begin(self.master.stream("caches").append([[["get", None]]]))
        why = "fact 1: a row of 'caches' is [cache_func, keys, invalidation_ts], not an array of 2"
        self.assertEqual(str(error_of(refused)), why)

    def test_before_the_start_a_stream_is_at_its_first_position(self) -> None:
        self.assertEqual((self.master.stream("orders").published, self.master.token("orders").stream), (1, 1))

    def test_a_start_in_asyncio_without_the_reactor_is_refused_with_the_cure(self) -> None:
        async def main() -> None:
            master = Master(database="sqlite://")  # on the global reactor, which does not run
            await asyncio.wait_for(master.start().asFuture(asyncio.get_running_loop()), 10)

        with self.assertRaisesRegex(ConfigError, "Twisted's reactor does not run, .* call installReactor"):
            asyncio.run(main())

    def test_the_deferred_of_start_names_the_way_of_asyncio(self) -> None:
        self.assertIn("master.start().asFuture(loop)", repr(self.master.start()))

    def test_without_options_it_has_the_defaults_of_the_documents(self) -> None:
        with patch.object(master_module, "store_of", return_value=self.store) as store_of:
            master = Master(reactor=self.net)
        store_of.assert_called_once_with("sqlite:///replication.db", self.net)
        self.assertEqual((master.server_name, master.instance_name), ("localhost", "master"))
        self.assertEqual([each.name for each in master.registry], ["caches"])
        self.assertEqual(msgspec.structs.asdict(master.limits), msgspec.structs.asdict(Limits()))
        self.assertEqual((master.served.server_name, master.served.instance_name), ("localhost", "master"))


class EpochTests(MasterCase):
    def test_a_start_begins_an_epoch_of_each_stream_with_a_table(self) -> None:
        streams = [StreamDefinition("orders"), StreamDefinition("typing", in_memory=True)]
        for _ in range(3):
            master = Master(server_name="example.com", database=self.store, streams=streams, reactor=self.net)
            started = begin(master.start())
            self.net.run()
            self.assertEqual(started, [None])
            now(master.stream("orders").append([["a"]]))
            found = {name: now(master.served.history(name, "master")) for name in ("orders", "caches", "typing")}
            begin(master.stop())
            self.net.run()
        self.assertEqual([each.start for each in found["orders"]], [1, 2, 3])
        self.assertEqual(({name: len(found[name]) for name in ("caches", "typing")}), {"caches": 2, "typing": 0})

    def test_a_stream_that_other_processes_write_gets_no_epoch(self) -> None:
        master = self.make_master(streams=[StreamDefinition("stock", writers=("other",))])
        now(master.start())
        self.assertEqual(now(self.store.history(StreamName("stock"), InstanceName("master"))), ())
        now(master.stop())


class LostCommitsTests(MasterCase):
    def test_a_database_that_has_lost_commits_ends_the_master(self) -> None:
        """A later fact would hide from followers that others are lost."""
        early = self.greeted()
        error = CommitsLostError("the database has lost commits")
        failed = begin(self.master.failed)
        self.store.commits_lost.callback(error)
        with logged():
            late = self.connect()
        for wire in (early, late):
            self.assertEqual(lines_of(wire.read()), ["ERROR the database has lost commits"])
        self.assertEqual(failed, [error])
        for outcome in (
            begin(self.master.start()),
            begin(self.master.stream("orders").append([[["o", "p"]]])),
            begin(self.master.served.check()),
        ):
            self.assertIs(error_of(outcome), error)
        asked = len(self.store.asked)
        self.net.pump([1.0] * 3)
        self.assertEqual(len(self.store.asked), asked, "no position is stored any more")


class FakeRelay:
    """What a process publishes of the writer ``far``.

    ``forwarded`` are the commands of followers, ``answers`` how many REPLICATEs were answered.
    """

    def __init__(self, net: Net) -> None:
        self.broadcast = Broadcast(net)
        self.own: IPositions | None = None
        self.is_complete = True
        self.forwarded: list[Command] = []
        self.answers = 0

    async def refresh(self) -> None:
        self.answers += 1

    def lines(self, streams: Collection[StreamName]) -> Sequence[EncodedLines]:
        assert self.own is not None
        return [encode_position(StreamName("stock"), InstanceName("far"), Token(7), Token(7)), *self.own.lines(streams)]

    def look_for_others(self) -> None: ...

    def forward(self, _: ReplicationProtocol | None, command: Command) -> None:
        self.forwarded.append(command)


class RelayTests(MasterCase):
    def test_a_master_beside_a_relay_has_its_connections_and_passes_it_positions_and_commands(self) -> None:
        relay = FakeRelay(self.net)
        self.master = self.make_master(relay=relay)
        wire = self.greeted("NAME worker1", "USER_SYNC abcde @u:h start 1700")
        self.assertEqual([peer.name for peer in relay.broadcast], ["worker1"])
        self.assertIn(UserSync("abcde", "@u:h", syncing=True, last_sync_ms=1700), relay.forwarded)
        self.send(wire, "REPLICATE")
        self.assertEqual(self.new_lines(wire), ["POSITION stock far 7 7", *POSITIONS])
        self.append("placed")
        self.assertEqual(self.new_lines(wire), ['RDATA orders master 2 ["o","placed"]'])

    def test_a_peer_that_was_lost_before_the_start_is_not_answered(self) -> None:
        relay = FakeRelay(self.net)
        self.master = self.make_master(relay=relay)
        self.store.close_gate("open")
        for wire in [self.connect("REPLICATE") for _ in range(2)][1:]:
            wire.lose()
        self.store.open_gate("open")
        self.assertEqual(relay.answers, 1)


class AcknowledgementTests(MasterCase):
    def test_facts_for_federation_that_a_sender_has_acknowledged_are_dropped(self) -> None:
        self.master = self.make_master(streams=[StreamDefinition("federation", in_memory=True)])
        wire = self.greeted()
        now(self.master.stream("federation").append([[1], [2]]))
        self.send(wire, "FEDERATION_ACK sender1 2")
        (kept,) = [each.kept for each in self.master.served.stream_statuses() if each.kept is not None]
        self.assertEqual((kept.facts, kept.acknowledged), (1, {"sender1": 2}))

    def test_without_a_federation_stream_an_acknowledgement_is_ignored(self) -> None:
        wire = self.greeted()
        self.send(wire, "FEDERATION_ACK sender1 2", "PING 1")
        self.assertFalse(wire.disconnecting)


class StopTests(MasterCase):
    def test_peers_receive_server_stopping_and_stop_waits_until_they_are_closed(self) -> None:
        wire = self.greeted()
        stopped = begin(self.master.stop())
        self.assertEqual(stopped, [])
        self.assertEqual(lines_of(wire.read()), ["ERROR server stopping"])
        self.assertEqual(stopped, [None])

    def test_a_peer_that_does_not_read_is_aborted_after_five_seconds(self) -> None:
        wire = self.greeted()
        stopped = begin(self.master.stop())
        self.net.advance(4.9)
        self.assertEqual(stopped, [])
        self.net.advance(0.1)
        self.assertTrue(wire.aborted)
        self.assertEqual(stopped, [None])

    def test_a_peer_that_is_already_closing_is_aborted_too(self) -> None:
        wire = self.greeted()
        self.send(wire, "FOO")
        stopped = begin(self.master.stop())
        self.net.advance(5.0)
        self.assertEqual(stopped, [None])
        self.assertEqual(self.net.getDelayedCalls(), [])

    def test_stop_waits_for_open_facts_and_publishes_them(self) -> None:
        wire = self.greeted()
        reservation, fact = self.hold()
        stopped = begin(self.master.stop())
        now(fact.write(["o", "placed"]))
        self.assertEqual((stopped, self.new_lines(wire)), ([], []))
        now(reservation.__aexit__(None, None, None))
        self.assertEqual(lines_of(wire.read()), ['RDATA orders master 2 ["o","placed"]', "ERROR server stopping"])
        self.assertEqual(stopped, [None])

    def test_stop_waits_for_appends_in_progress_and_publishes_them(self) -> None:
        wire = self.greeted()
        self.store.close_gate("commit")
        appended = begin(self.master.stream("orders").append([[["o", "placed"]]]))
        stopped = begin(self.master.stop())
        self.assertEqual(stopped, [])
        self.store.open_gate("commit")
        self.assertEqual(appended, [[2]])
        self.assertEqual(lines_of(wire.read()), ['RDATA orders master 2 ["o","placed"]', "ERROR server stopping"])
        self.assertEqual(stopped, [None])

    def test_an_append_that_has_no_ids_yet_is_refused(self) -> None:
        now(self.master.start())
        self.store.close_gate("recall")
        appended = begin(self.master.stream("orders").append([[["o", "placed"]]], key="k"))
        stopped = begin(self.master.stop())
        self.assertEqual(stopped, [None])
        self.store.open_gate("recall")
        self.assertIsInstance(error_of(appended), StoreError)

    def test_facts_that_stay_open_are_rolled_back_after_ten_seconds(self) -> None:
        reservation, fact = self.hold()
        now(fact.execute("UPDATE …"))
        stopped = begin(self.master.stop())
        self.net.advance(9.9)
        self.assertEqual((stopped, self.store.ends), ([], []))
        self.net.advance(0.1)
        self.assertEqual((stopped, self.store.ends[:1]), ([None], ["rolled back"]))
        self.assertIsInstance(error_of(begin(reservation.__aexit__(None, None, None))), StreamError)

    def test_a_failed_rollback_does_not_delay_the_stop(self) -> None:
        _, fact = self.hold()
        now(fact.execute("UPDATE …"))
        self.store.errors["rollback"] = StoreError("disk gone")
        stopped = begin(self.master.stop())
        with logged() as messages:
            self.net.advance(10.0)
        self.assertEqual(stopped, [None])
        self.assertEqual(messages, ["cannot roll back while stopping: disk gone"])

    def test_an_id_rolled_back_at_the_end_of_the_stop_is_not_published(self) -> None:
        """A closed store must not be retried for ever."""
        reservation, _ = self.hold()
        self.store.errors["commit"] = StoreError("disk full")
        stopped = begin(self.master.stop())
        with logged():
            error_of(begin(reservation.__aexit__(None, None, None)))
        self.assertEqual(stopped, [None])

    def test_stop_ends_the_retries_of_a_failing_store(self) -> None:
        reservation, _ = self.hold()
        self.store.errors["commit"] = StoreError("disk full")
        with logged():
            now(reservation.__aexit__(ValueError, ValueError("no"), None))
        now(self.master.stop())
        self.assertEqual(self.net.getDelayedCalls(), [])

    def test_two_calls_of_stop_stop_once(self) -> None:
        reservation, _ = self.hold()
        stopped = [begin(self.master.stop()) for _ in range(2)]
        self.assertEqual(stopped, [[], []])
        now(reservation.__aexit__(None, None, None))
        self.assertEqual(stopped, [[None], [None]])
        self.assertEqual(self.store.asked.count("close"), 1)

    def test_stop_of_a_master_that_was_never_started_only_closes_the_store(self) -> None:
        now(self.master.stop())
        self.assertEqual(self.store.asked, ["close"])

    def test_a_stop_that_fails_closes_the_store(self) -> None:
        now(self.master.start())
        with patch.object(self.master._positions, "poll", side_effect=OSError("too many open files")):
            self.assertIsInstance(error_of(begin(self.master.stop())), OSError)
        self.assertEqual(self.store.asked[-1], "close")

    def test_stop_during_the_start_waits_for_the_start(self) -> None:
        self.store.close_gate("positions")
        early = self.connect("REPLICATE")
        entering = begin(self.master.stream("orders").reserve().__aenter__())
        stopped = begin(self.master.stop())
        self.assertEqual(stopped, [])
        self.store.open_gate("positions")
        self.assertIsInstance(error_of(entering), StreamError)
        self.assertEqual(lines_of(early.read())[-1], "ERROR server stopping")
        self.assertEqual(stopped, [None])

    def test_after_stop_every_call_and_connection_is_refused(self) -> None:
        self.append("placed")
        now(self.master.stop())
        for outcome in (
            begin(self.master.start()),
            begin(self.master.stream("orders").reserve().__aenter__()),
            begin(self.master.stream("orders").append([[["o", "p"]]])),
            begin(self.master.served.check()),
        ):
            self.assertIn("'master' is stopping", str(error_of(outcome)))
        with logged():
            late = self.connect()
        self.assertEqual(lines_of(late.read()), ["ERROR server stopping"])

    def test_facts_of_the_same_reactor_turn_are_sent_before_the_error(self) -> None:
        wire = self.greeted()
        self.append("placed")
        begin(self.master.stop())
        self.assertEqual(lines_of(wire.read()), ['RDATA orders master 2 ["o","placed"]', "ERROR server stopping"])
        self.assertEqual(self.net.getDelayedCalls(), [])


class SlowTransactionTests(MasterCase):
    def test_an_id_that_stays_open_is_logged(self) -> None:
        with logged() as messages:
            one = self.hold()[0]
            self.net.pump([15.0, 15.0])
            two = self.hold()[0]
            self.net.pump([15.0, 14.0])
        self.assertEqual(messages, [])
        with logged() as messages:
            self.net.advance(1.0)
            self.net.pump([15.0] * 3)
        slow = "ID {} of stream orders has been open for 60 s: no later fact can be published"
        self.assertEqual(messages, [slow.format(2), slow.format(3)])
        statuses = {each.definition.name: each for each in self.master.served.stream_statuses()}
        self.assertEqual((statuses[ORDERS.name].open_count, statuses[ORDERS.name].oldest_open), (2, (2, 105.0)))
        for each in (one, two):
            now(each.__aexit__(None, None, None))
        with logged() as messages:
            self.net.advance(100.0)
        self.assertEqual(messages, [])
        self.assertEqual([each.oldest_open for each in self.master.served.stream_statuses()], [None, None])

    def test_the_age_of_an_id_that_is_logged_is_an_option(self) -> None:
        """It is looked for four times in that time, and not more than once a second."""
        for seconds, before in ((8.0, [2.0] * 3), (2.0, [1.0])):
            self.master = self.make_master(slow_open=seconds)
            fact = self.hold()[0]
            for step, expected in ((before, 0), ([before[0]], 1), ([before[0] / 2], 0)):
                with logged() as messages:
                    self.net.pump(step)
                self.assertEqual(len(messages), expected, (seconds, step))
            now(fact.__aexit__(None, None, None))
            begin(self.master.stop())
            self.net.pump([1.0])
            self.store.closed = False

    def test_an_append_that_hangs_is_logged(self) -> None:
        now(self.master.start())
        self.store.close_gate("commit")
        appended = begin(self.master.stream("orders").append([[["o", "p"]]]))
        with logged() as messages:
            self.net.pump([15.0] * 4)
        self.assertEqual(len(messages), 1)
        self.store.open_gate("commit")
        self.assertEqual(appended, [[2]])


class SqliteTests(SynchronousTestCase):
    """On SQLite, whose answers come from a thread."""

    def setUp(self) -> None:
        self.pump, self.net = Pump(), Net()
        self.store = open_store("sqlite://", self.pump)
        self.master = Master(database=self.store, streams=["orders"], reactor=self.net)

    def test_a_transaction_that_holds_the_database_is_rolled_back_at_stop(self) -> None:
        async def hang() -> None:
            async with self.master.stream("orders").reserve() as fact:
                await fact.execute("CREATE TABLE t (x)")
                await Deferred()

        hanging = self.pump.start(hang())
        self.pump.wait(self.master.start())
        while not self.master.served.stream_statuses()[0].open_count:
            self.pump.wait(self.store.find_receipt("nothing"))
        stopped = self.master.stop()
        self.net.advance(10.0)
        self.pump.wait(stopped)
        self.assertEqual(self.net.getDelayedCalls(), [])
        outcome = begin(hanging)
        hanging.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)

    def test_stop_during_the_last_rollback_ends(self) -> None:
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


class ClockTests(MasterCase):
    limits = Limits()

    def test_every_ping_has_the_time_of_the_masters_clock(self) -> None:
        wire = self.connect()
        self.net.advance(5.0)
        pings = [line for line in lines_of(wire.read()) if line.startswith("PING")]
        self.assertEqual(pings, ["PING 1700500 echo", "PING 1700500"])
