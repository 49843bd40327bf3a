"""Tests of traps of docs/protocol/traps.md with whole masters and workers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from twisted.internet.defer import CancelledError

from replication.bench.simulation.disk import Operation
from replication.bench.simulation.host import LIMITS
from replication.bench.simulation.writing import RollBackError
from tests.simulation.scenario import CACHES, MASTER, SECOND, SOON, TOO_LONG, A, B, Scenario

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred

    from replication.bench.simulation.following import WorkerHost
    from replication.bench.simulation.network import Connection


class SenderTests(Scenario):
    """Lines that the master sends."""

    def test_trap_5_a_row_that_no_line_can_hold_is_fetched(self) -> None:
        self.append(1)
        self.append(2, size=TOO_LONG)
        self.append(1)
        self.assertEqual(
            [line[:20] for line in self.sent_to(self.copy)[-3:]],
            ["RDATA a master 2 [1,", "POSITION a master 3 ", "RDATA a master 4 [4,"],
        )
        self.assertEqual(self.position(self.copy), 4)
        self.assert_well()

    def test_trap_6_a_peer_that_does_not_read_receives_the_reason_and_is_disconnected(self) -> None:
        """The ERROR is sent before the queued lines."""
        wire = self.wire(self.copy)
        wire.down.held = True
        while wire.server.open:
            self.append(1, 1, 1)
        self.assertTrue(wire.server.outgoing.endswith(b"ERROR Failed to keep up\n"))
        self.assertEqual(self.master.master.faults, {"slow peer": 1})

    def test_a_slow_peer_reconnects_and_catches_up_in_pages(self) -> None:
        """It catches up although facts are written meanwhile (docs/protocol/traps.md 51)."""
        wire = self.wire(self.copy)
        wire.down.held = True
        for _ in range(60):
            self.append(1, 3, 1)
        self.assertFalse(wire.server.open)
        wire.down.held = False
        self.copy.page_rows = 5
        for _ in range(60):
            self.append(1, 3)
            self.world.advance(0.1)
        self.assert_well()
        self.assertGreater(self.copy.worker._followed._followers[A].catch_ups, 30)
        self.assertEqual(len(self.sent_to(self.copy, "ERROR")), 1)
        self.assertEqual(self.sent_to(self.apply, "ERROR"), [])

    def test_a_burst_larger_than_the_queue_disconnects_no_peer_that_reads(self) -> None:
        self.append(*[1] * (LIMITS.max_queued_lines + 1))
        self.assertEqual(self.sent_to(self.copy, "POSITION a")[-1], "POSITION a master 27 27")
        self.assertEqual(self.sent_to(self.copy, "RDATA"), [])
        self.assert_well()

    def test_trap_18_a_position_is_sent_if_the_last_ids_have_no_rows(self) -> None:
        job = self.master.write("a", self.world.rows(1))
        self.append(0, 0)
        job.outcome.callback(None)
        self.world.turn()
        self.assertEqual(self.sent_to(self.copy)[-2:], ['RDATA a master 2 [1,""]', "POSITION a master 2 4"])
        wait = self.copy.wait_for("a", "master", 4, 1.0)
        self.assertTrue(wait.ended)
        self.assert_well()

    def test_trap_19_an_answer_to_replicate_in_the_turn_of_a_commit_overtakes_nothing(self) -> None:
        """The answer has the position that was sent on this connection."""
        self.wire(self.few).up.held = True
        self.few.worker._clients[0].request_positions()
        self.world.turn()
        self.master.append("b", self.world.rows(1))  # published at the end of this turn
        self.wire(self.few).up.deliver(100)
        self.wire(self.few).up.held = False
        self.world.turn()
        self.assertEqual(self.sent_to(self.few)[-2:], ['RDATA b master 2 [1,""]', "POSITION b master 2 2"])
        self.assert_well()

    def test_trap_21_facts_written_without_subscribers_reach_later_ones(self) -> None:
        for worker in self.world.workers.values():
            worker.kill()
        self.world.turn()
        self.append(1, 2)
        for worker in self.world.workers.values():
            worker.start()
        self.world.turn()
        self.assertIn("POSITION a master 3 3", self.sent_to(self.copy))
        self.assert_well()

    def test_trap_22_an_unreadable_stream_stops_no_other(self) -> None:
        """Facts that left memory are read from the store; while that fails, other streams are published."""
        job = self.master.write("a", self.world.rows(1))
        for _ in range(10):
            self.append(2, size=100)
        self.master.store.held = True
        job.outcome.callback(None)
        self.world.turn()
        self.master.store.release(self.master.store.waiting[0])
        self.world.turn()
        self.assertEqual([each.what for each in self.master.store.waiting], ["facts of a"])
        self.master.store.held = False
        self.master.store.release(self.master.store.waiting[0], Operation.fail)
        self.append(1, stream="b")
        self.assertEqual(self.position(self.copy, B), 2)
        self.assert_well()

    def test_a_worker_receives_the_streams_that_it_subscribes_to(self) -> None:
        self.append(1)
        self.append(1, stream="b")
        self.assertEqual([line.split()[1] for line in self.sent_to(self.few, "RDATA")], ["b"])
        self.assert_well()


class ReceiverTests(Scenario):
    """Lines that a worker receives; the test writes lines that a master would not send."""

    def receive(self, *lines: str, worker: WorkerHost | None = None) -> None:
        wire = self.wire(worker or self.copy)
        wire.down.carried += "".join(f"{line}\n" for line in lines).encode()
        self.world.turn()

    def test_trap_5_a_fact_without_its_last_row_is_not_joined_to_the_next(self) -> None:
        """Synapse drops a row that is too long, and with it possibly the token of the rows before it."""
        pipe = self.wire(self.copy).down
        pipe.held = True
        self.append(2)
        end = pipe.carried.index(b"RDATA a master 2")
        del pipe.carried[end : pipe.carried.index(b"\n", end) + 1]
        pipe.held = False
        self.append(0)
        self.append(1)
        self.assert_well()
        self.assertEqual([len(each.texts) for each in self.copy.applied[A, MASTER].facts], [2, 1])

    def test_f7_a_stale_position_is_ignored(self) -> None:
        self.append(1, 1, 1)
        self.receive("POSITION a master 1 1", "POSITION a master 1 2")
        self.append(1)
        self.assert_well()

    def test_trap_24_rows_at_or_below_the_position_are_dropped(self) -> None:
        self.append(1, 1)
        self.receive('RDATA a master 2 "again"', "RDATA a master batch 1", "RDATA a master 3 2")
        self.assertEqual(self.position(self.copy), 3)
        self.assertEqual(self.copy.worker._followed._followers[A].cursors[MASTER].duplicates, 3)
        self.assert_well()

    def test_trap_25_rows_before_the_first_position_of_a_connection_are_ignored(self) -> None:
        def hold(connection: Connection) -> None:
            on_connected(connection)
            connection.down.held = True

        self.append(1)
        on_connected, self.world.network.on_connected = self.world.network.on_connected, hold
        self.cut(self.copy)
        self.world.advance(1.0)
        pipe = self.wire(self.copy).down
        position = pipe.carried.index(b"POSITION")
        pipe.carried[position:position] = b"RDATA a master batch 1\nRDATA a master 9 2\nRDATA a master batch 3\n"
        pipe.held = False
        self.world.turn()
        self.assertEqual(self.copy.worker._followed._followers[A].cursors[MASTER].dropped, 3)
        self.assertEqual(self.position(self.copy), 2)

    def test_trap_27_a_failed_page_is_requested_again(self) -> None:
        """Other streams continue meanwhile, and the status has the reason."""
        self.copy.pages_fail = True
        self.append(1, size=TOO_LONG)
        self.append(1, stream="b")
        self.world.advance(60.0)
        self.assertEqual(self.position(self.copy), 1)
        self.assertEqual(self.position(self.copy, B), 2)
        (status,) = [each for each in self.copy.worker.served.stream_statuses() if each.definition.name == A]
        self.assertEqual(status.writers[0].state, "stopped")
        self.assertIn("no answer", str(status.writers[0].error))
        self.copy.pages_fail = False
        self.assert_well(11.0)

    def test_trap_28_a_complete_follower_fetches_nothing(self) -> None:
        self.append(1, 1)
        for _ in range(3):
            self.cut(self.copy)
            self.world.advance(SOON)
        self.copy.kill()
        self.copy.start()
        self.world.advance(SOON)
        self.append(1)
        self.assertEqual([each.catch_ups for each in self.copy.worker._followed._followers.values()], [0, 0, 0])
        self.assert_well()

    def test_trap_26_rows_of_two_writers_are_not_mixed(self) -> None:
        self.world = self.make_world(masters={"master": ("a",), "second": ("b",)}, workers={"copy": (None, ())})
        self.master, second = self.world.masters[MASTER], self.world.masters[SECOND]
        pipe = self.wire(self.copy).down
        pipe.held = True
        self.master.write("a", self.world.rows(1), caches=["x", "y", "z"]).outcome.callback(None)
        self.world.turn()
        caches = pipe.carried.index(b"RDATA caches")
        pipe.deliver(pipe.carried.index(b"\n", caches) + 1)
        second.append(CACHES, [[]])
        self.world.turn()
        self.assertEqual(self.position(self.copy, CACHES, SECOND), 2)
        self.assertEqual(self.position(self.copy, CACHES), 1)
        pipe.held = False
        self.assert_well()
        self.assertEqual([len(each.texts) for each in self.copy.applied[CACHES, MASTER].facts], [3])

    def test_f26_pages_do_not_cut_facts_and_can_be_empty(self) -> None:
        self.copy.kill()
        self.append(5, 0, 1, 0, 0, 3, 1)
        for _ in range(5):
            self.master.write("a", self.world.rows(1)).outcome.errback(RollBackError())
        self.append(2)
        self.copy.page_rows = 1
        self.copy.start()
        self.assert_well()
        self.assertEqual([len(each.texts) for each in self.copy.applied[A, MASTER].facts], [5, 1, 3, 1, 2])

    def test_f26_a_fact_of_ten_thousand_rows(self) -> None:
        self.append(10_000)
        self.assert_well()
        self.assertEqual([len(each.texts) for each in self.copy.applied[A, MASTER].facts], [10_000])


class WaitTests(Scenario):
    """I12: waiting for a position."""

    def test_trap_32_a_callback_of_wait_for_can_wait_again_or_cancel_another(self) -> None:
        wait = partial(self.copy.worker.wait_for, "a", "master")
        again: list[Deferred[None]] = []

        def woken(_: object) -> None:
            second.cancel()
            again.extend((wait(2), wait(3)))

        first, second = wait(2).addCallback(woken), wait(2)
        self.append(1)
        self.successResultOf(first)
        self.failureResultOf(second, CancelledError)
        self.successResultOf(again[0])
        self.assertNoResult(again[1])
        self.append(1)
        self.successResultOf(again[1])

    def test_trap_33_wait_for_uses_the_position_of_the_named_writer(self) -> None:
        self.world = self.make_world(masters={"master": ("a",), "second": ("b",)}, workers={"copy": (None, ())})
        self.master, second = self.world.masters[MASTER], self.world.masters[SECOND]
        wait = self.copy.wait_for("caches", "second", 2, 3.0)
        late = self.copy.wait_for("caches", "second", 2, 1.0)
        self.master.write("a", self.world.rows(1), caches=["x"]).outcome.callback(None)
        self.world.advance(2.0)
        self.assertEqual((wait.ended, late.ended), (False, True))
        second.append(CACHES, [[]])
        self.world.turn()
        self.assertTrue(wait.ended)

    def test_wait_for_uses_stored_positions_before_the_writer_connects(self) -> None:
        """A worker that starts while the writer is down uses its stored positions."""
        self.append(1, 2)
        self.append(1, stream="b")
        self.master.kill()
        for name, stream, token in (("apply", "a", 3), ("few", "b", 2)):
            worker = self.world.workers[name]
            worker.kill()
            worker.start()
            self.assertTrue(worker.wait_for(stream, "master", token, 1.0).ended)
            self.assertFalse(worker.wait_for(stream, "master", token + 1, 1.0).ended)

    def test_a_call_while_positions_are_read_fires_after_it(self) -> None:
        self.append(1)
        self.master.kill()
        self.apply.kill()
        self.apply.start(held=True)
        wait = self.apply.wait_for("a", "master", 2, 10.0)
        self.assertFalse(wait.ended)
        self.apply.store.release_all()
        self.assertTrue(wait.ended)

    def test_a_first_position_fires_waiting_calls(self) -> None:
        """Without stored facts, only the writer can send the position."""
        self.append(1, stream="b")
        self.apply.kill()
        self.master.kill()
        self.apply.start()
        wait = self.apply.wait_for("b", "master", 2, 10.0)
        self.world.turn()
        self.assertFalse(wait.ended)
        self.master.start()
        self.world.advance(SOON)
        self.assertTrue(wait.ended)
