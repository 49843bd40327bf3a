"""Tests of single faults: how masters and workers react, and the final state (docs/guarantees.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replication.bench.simulation.world import HEALED_WITHIN
from replication.bench.simulation.writing import RollBackError
from tests.simulation.scenario import CACHES, MASTER, SOON, TOO_LONG, A, B, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.internet.defer import Deferred

    from replication.streams.facts import Fact


class CutTests(Scenario):
    """A connection is lost in the middle of something."""

    def after_cut(self, at: int, facts: Callable[[Scenario], None]) -> int:
        """Deliver ``at`` bytes of what is sent about ``facts``, then cut; return the number of all bytes."""
        self.setUp()
        pipe = self.wire(self.copy).down
        pipe.held = True
        facts(self)
        size = len(pipe.carried)
        pipe.deliver(at)
        self.cut(self.copy)
        self.world.converge(SOON)
        self.assertEqual(self.position(self.copy), self.master.histories[A].published)
        return size

    def test_f1_a_connection_can_be_cut_at_every_byte(self) -> None:
        def facts(case: Scenario) -> None:
            case.append(1, 3, 0, 1)
            case.append(1, stream="b")
            case.append(1, size=TOO_LONG)

        size = self.after_cut(0, facts)
        self.assertGreater(size, 150)
        for at in range(1, size + 1):
            self.after_cut(at, facts)

    def test_f6_a_connection_is_cut_between_two_rows_of_a_fact(self) -> None:
        """The first rows are dropped, and are not joined to the next fact (I4)."""
        pipe = self.wire(self.copy).down
        pipe.held = True
        self.append(3)
        pipe.deliver(pipe.carried.index(b"\n") + 1)
        self.assertTrue(self.sent_to(self.copy, "RDATA a master batch"))
        self.cut(self.copy)
        self.append(2)
        self.assert_well()
        self.assertEqual([len(each.texts) for each in self.copy.applied[A, MASTER].facts], [3, 2])

    def test_f6_a_connection_is_cut_during_catch_up(self) -> None:
        """Pages that arrived are kept; the next one is requested with or without a connection."""
        self.copy.kill()
        self.append(1, 1, 1, 1)
        self.copy.page_rows = 1
        self.copy.pages_held = True
        self.copy.start()
        self.world.turn()
        for reached in (2, 3):
            self.world.page_requests[0].deliver_answer()
            self.world.turn()
            self.assertEqual(self.position(self.copy), reached)
        self.cut(self.copy)
        self.copy.pages_held = False
        self.world.page_requests[0].deliver_answer()
        self.world.turn()
        self.assertEqual(self.position(self.copy), 5)
        self.assert_well()

    def test_f3_a_link_dies_without_notice(self) -> None:
        """Both ends detect a dead link that neither was notified of."""
        self.wire(self.copy).cut([])
        self.append(1, 2, 3)
        self.assertEqual(self.position(self.copy), 1)
        self.assert_well(HEALED_WITHIN)

    def test_f3_a_link_dies_before_the_first_line_of_the_master(self) -> None:
        """A worker expects the first line within half a minute: without a PING it has no other timeout."""
        self.world.network.new_held = False, True
        self.cut(self.copy)
        self.world.advance(1.0)
        self.world.network.new_held = False, False
        self.wire(self.copy).cut([])
        self.append(1)
        self.assert_well(HEALED_WITHIN)

    def test_a_master_that_is_slow_to_start_keeps_its_followers(self) -> None:
        """It sends SERVER at once and positions once it has read them, so followers stay connected."""
        self.master.kill()
        self.master.start(held=True)
        self.world.advance(120.0)
        self.assertEqual([each.connections for each in self.copy.worker._clients], [2])
        self.assertEqual(self.copy.worker.faults, {})
        self.master.store.release_all()
        self.append(1)
        self.assert_well()

    def test_f6_a_master_is_down_for_two_minutes(self) -> None:
        self.master.kill(power=True)
        self.world.advance(120.0)
        self.master.start()
        self.append(1, 2)
        self.assert_well(HEALED_WITHIN)


class OrderTests(Scenario):
    """Lines that are received during catch-up."""

    def setUp(self) -> None:
        super().setUp()
        self.copy.kill()
        self.append(1, 1)
        self.copy.pages_held = True
        self.copy.start()
        self.world.turn()
        self.assertEqual(len(self.world.page_requests), 1)

    def test_f7_rows_received_during_catch_up_are_held_and_applied_after_it(self) -> None:
        self.append(1, 2)
        self.assertEqual(self.position(self.copy), 1)
        self.copy.pages_held = False
        self.world.page_requests[0].deliver_answer()
        self.world.turn()
        self.assertEqual(self.position(self.copy), 5)
        self.assertEqual(self.copy.worker._followed._followers[A].catch_ups, 1)
        self.assert_well()

    def test_f7_a_position_received_during_catch_up_moves_its_end(self) -> None:
        self.append(1, size=TOO_LONG)
        self.append(0)
        self.copy.pages_held = False
        self.world.page_requests[0].deliver_answer()
        self.world.turn()
        self.assertEqual(self.position(self.copy), 5)
        self.assert_well()

    def test_f7_a_page_requested_before_a_disconnect_arrives_after_it(self) -> None:
        self.cut(self.copy)
        self.append(1)
        self.world.advance(1.0)
        self.append(1)
        self.copy.pages_held = False
        for request in list(self.world.page_requests):
            request.deliver_answer()
        self.assert_well()


class KillTests(Scenario):
    """The master is killed at each step of a fact."""

    def restart(self) -> None:
        self.master.kill()
        self.master.start()

    def test_f9_the_master_is_killed_before_the_commit_is_durable(self) -> None:
        for how_far in ("reserved", "handed over"):
            with self.subTest(how_far):
                self.setUp()
                self.append(1)
                job = self.master.write("a", self.world.rows(2))
                self.world.turn()
                if how_far == "handed over":
                    self.master.store.held = True
                    job.outcome.callback(None)
                    self.world.turn()
                self.restart()
                self.append(1)  # the ID is allocated again: it was never published
                self.assert_well()
                self.assertEqual([*self.master.histories[A].committed], [2, 3])

    def test_f9_the_master_is_killed_after_the_commit_and_before_publishing(self) -> None:
        self.master.store.held = True
        self.master.append("a", self.world.rows(2))
        self.master.store.waiting[0].land()
        self.restart()
        self.assert_well()
        self.assertEqual(self.position(self.copy), 2)

    def test_f9_the_master_is_killed_after_some_bytes_were_sent(self) -> None:
        for size in (1, 30, 60):
            with self.subTest(size):
                self.setUp()
                self.wire(self.copy).down.held = True
                self.append(3)
                self.wire(self.copy).down.deliver(size)
                self.master.kill(power=True)
                self.master.start()
                self.assert_well(HEALED_WITHIN)

    def test_f9_the_master_is_killed_after_all_bytes_were_sent(self) -> None:
        self.append(3)
        self.restart()
        self.assert_well()
        self.assertEqual(len(self.sent_to(self.copy, "RDATA")), 3)

    def test_f9_the_master_is_killed_with_a_smaller_id_open_and_a_larger_one_committed(self) -> None:
        """The open one is lost; the committed one was not published before, and is now."""
        self.master.write("a", self.world.rows(1))
        self.world.turn()
        self.append(2)
        self.assertEqual(self.sent_to(self.copy, "RDATA"), [])
        self.restart()
        self.assert_well()
        self.assertEqual([*self.master.histories[A].committed], [3])
        self.assertEqual(self.position(self.copy), 3)

    def test_f9_a_worker_is_killed_after_its_commit_is_durable(self) -> None:
        """I2: the function receives facts again only if the transaction of the first call was lost."""
        for lands in (True, False):
            with self.subTest(lands=lands):
                self.setUp()
                self.apply.store.held = True
                self.append(2)
                self.apply.store.release(self.apply.store.waiting[0])  # what the function executes
                calls = self.apply.calls
                if lands:
                    self.apply.store.waiting[0].land()
                self.apply.kill()
                self.apply.start()
                self.assert_well()
                self.assertEqual(self.apply.calls, calls + (not lands))

    def test_trap_40_a_published_position_without_rows_survives_the_process(self) -> None:
        """A rolled-back ID is published only after the position is stored, so it is never allocated again."""
        self.master.store.held = True
        job = self.master.write("a", self.world.rows(1))
        job.outcome.errback(RollBackError())
        self.world.turn()
        self.assertEqual(self.sent_to(self.copy, "POSITION a master 1 2"), [])
        self.master.store.release_all()
        self.world.turn()
        self.assertEqual(self.sent_to(self.copy, "POSITION a")[-1], "POSITION a master 1 2")
        self.restart()
        self.append(1)
        self.assert_well()
        self.assertEqual([*self.master.histories[A].committed], [3])


class OpenTests(Scenario):
    """IDs that are not completed, or completed in another order."""

    def test_f11_a_block_that_fails_or_is_cancelled_blocks_no_other(self) -> None:
        def roll_back(job: Any) -> None:
            job.outcome.errback(RollBackError())

        for leave in (roll_back, lambda job: job.running.cancel(), lambda job: job.drop()):
            with self.subTest(leave):
                self.setUp()
                job = self.master.write("a", self.world.rows(1), caches=["x"])
                self.append(1)
                self.assertEqual(self.position(self.copy), 1)
                leave(job)
                self.assert_well()
                self.assertEqual(self.position(self.copy), 3)
                self.assertEqual(self.position(self.copy, CACHES), 1, "no ID is taken for what is rolled back")

    def test_f11_a_hung_writer_delays_only_its_stream(self) -> None:
        job = self.master.write("a", self.world.rows(1))
        self.append(1, 1)
        self.append(1, stream="b")
        self.world.advance(300.0)
        self.assertEqual(self.position(self.copy), 1)
        self.assertEqual(self.position(self.copy, B), 2)
        self.assertEqual(self.master.master.served.stream_statuses()[0].oldest_open, (2, 300.0))
        job.outcome.callback(None)
        self.assert_well()
        self.assertEqual(self.position(self.copy), 4)

    def test_f11_a_master_stops_despite_a_hung_writer(self) -> None:
        job = self.master.write("a", self.world.rows(1))
        self.append(1)
        self.master.stop()
        self.world.advance(30.0)
        self.assertFalse(self.master.running)
        self.master.start()
        self.assert_well(HEALED_WITHIN)
        self.assertFalse(job.ended)
        self.assertEqual([*self.master.histories[A].committed], [3])

    def test_f12_commits_in_any_order_are_published_in_token_order(self) -> None:
        jobs = [self.master.write("a", self.world.rows(1, 2), caches=["x"]) for _ in range(4)]
        for which in (2, 0, 3, 1):
            jobs[which].outcome.callback(None)
            self.world.turn()
        self.assertEqual([line.split()[3] for line in self.sent_to(self.copy, "RDATA caches")], ["2", "3", "4", "5"])
        self.assert_well()

    def test_f12_facts_beyond_the_memory_limit_are_read_from_the_store_again(self) -> None:
        job = self.master.write("a", self.world.rows(1))
        for _ in range(10):
            self.append(1, 2, 1, size=100)
        job.outcome.callback(None)
        self.assert_well()
        self.assertEqual(self.position(self.copy), 32)

    def test_trap_36_no_position_passes_an_id_that_was_just_allocated(self) -> None:
        """Another commit returns while an ID is reserved and nothing is written under it."""
        self.master.store.held = True
        self.master.append("a", self.world.rows(1))
        job = self.master.write("a", self.world.rows(1))
        self.master.append("a", self.world.rows(1))
        self.master.store.release_all()
        self.world.turn()
        self.assertEqual(self.position(self.copy), 2)
        job.outcome.callback(None)
        self.assert_well()


class FunctionTests(Scenario):
    """The application's own functions."""

    def test_f24_a_function_that_raises_stops_only_its_stream(self) -> None:
        self.apply.raising.add("a")
        self.append(2, 1)
        job = self.master.write("b", self.world.rows(1), caches=["x"])
        job.outcome.callback(None)
        self.world.advance(60.0)
        self.assertEqual(self.position(self.apply), 1)
        self.assertEqual(self.position(self.apply, CACHES), 2)
        self.assertEqual(self.position(self.apply, B), 2)
        (status,) = [each for each in self.apply.worker.served.stream_statuses() if each.definition.name == A]
        self.assertIn("ValueError: a bug of the application", str(status.writers[0].error))
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.apply.release_functions()
        self.assert_well(11.0)

    def test_f24_a_function_that_hangs_stops_only_its_stream(self) -> None:
        self.apply.hanging.add("a")
        self.append(1)
        self.append(1)
        self.append(1, stream="b")
        self.world.advance(60.0)
        self.assertEqual(self.position(self.apply), 1)
        self.assertEqual(self.position(self.apply, B), 2)
        self.apply.release_functions()
        self.assert_well()

    def test_f24_a_worker_stops_despite_a_hung_function(self) -> None:
        self.apply.hanging.add("a")
        self.append(1)
        self.apply.stop()
        self.world.advance(30.0)
        self.assertFalse(self.apply.running)
        self.apply.hanging.clear()
        self.apply.start()
        self.assert_well()

    def test_f24_a_function_can_wait_for_another_stream(self) -> None:
        """If the wait times out, the function fails and is called again."""
        waits: list[Deferred[None]] = []
        applied = self.apply._apply

        async def wait_first(facts: Sequence[Fact], txn: Any) -> None:
            waits.append(self.apply.worker.wait_for("b", "master", 2, timeout=1.0))
            await waits[-1]
            await applied(facts, txn)

        self.apply.worker._followed._followers[A].application.function = wait_first
        self.append(2)
        self.world.advance(2.0)
        self.assertEqual(self.position(self.apply), 1)
        self.append(1, stream="b")
        self.assert_well()

    def test_trap_30_caches_are_invalidated_before_the_position_moves(self) -> None:
        """When ``wait_for`` fires, the cache is already empty."""
        computed: list[int] = []

        def look_up() -> int:
            computed.append(len(computed))
            return computed[-1]

        cached = self.apply.worker.cached()(look_up)
        self.assertEqual((cached(), cached()), (0, 0))
        found: list[int] = []
        wait = self.apply.wait_for("caches", "master", 2, 10.0)
        wait.waiting.addCallback(lambda _: found.append(cached()))
        self.master.write("a", self.world.rows(1), caches=["look_up"]).outcome.callback(None)
        self.world.turn()
        self.assertEqual(found, [1])
        self.assert_well()

    def test_f24_a_failed_transaction_is_retried(self) -> None:
        for worker in (self.copy, self.apply):
            worker.store.failing = True
        self.append(2, 1)
        self.world.advance(60.0)
        self.assertEqual(self.position(self.copy), 1)
        for worker in (self.copy, self.apply):
            worker.store.failing = False
        self.assert_well(11.0)
