"""Faults of field.md 3.2, one by one: what the whole product does about each, and what is there in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.scenario import CACHES, MASTER, TOO_LONG, A, B, Scenario
from tests.simulation.world import HEALED_WITHIN
from tests.simulation.writing import RollBackError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.internet.defer import Deferred

    from replication.streams.facts import Fact


class CutTests(Scenario):
    """F1, F6: a connection is lost in the middle of something."""

    def after_cut(self, at: int, facts: Callable[[Scenario], None]) -> int:
        """Let ``at`` bytes of what is told about ``facts`` through, then cut; returns how many bytes there were."""
        self.setUp()
        pipe = self.wire(self.copy).down
        pipe.held = True
        facts(self)
        size = len(pipe.carried)
        pipe.deliver(at)
        self.cut(self.copy)
        self.assert_well()
        self.assertEqual(self.position(self.copy), self.master.ledgers[A].told)
        return size

    def test_f1_a_connection_may_be_cut_at_every_byte(self) -> None:
        def facts(case: Scenario) -> None:
            case.append(1, 3, 0, 1)
            case.append(1, stream="b")
            case.append(1, size=TOO_LONG)

        size = self.after_cut(0, facts)
        self.assertGreater(size, 150)
        for at in range(1, size + 1):
            self.after_cut(at, facts)

    def test_f6_between_two_rows_of_a_fact_and_before_the_rows_of_another(self) -> None:
        """The first half is forgotten, and does not come before the rows of what is heard next (I4)."""
        pipe = self.wire(self.copy).down
        pipe.held = True
        self.append(3)
        pipe.deliver(pipe.carried.index(b"\n") + 1)
        self.assertTrue(self.told(self.copy, "RDATA a master batch"))
        self.cut(self.copy)
        self.append(2)
        self.assert_well()
        self.assertEqual([len(each.texts) for each in self.copy.accounts[A, MASTER].facts], [3, 2])

    def test_f6_in_the_middle_of_catching_up(self) -> None:
        """The pages that came are kept, and the next is asked for whether or not the wire is up."""
        self.copy.kill()
        self.append(1, 1, 1, 1)
        self.copy.page_rows = 1
        self.copy.pages_held = True
        self.copy.start()
        self.world.turn()
        for reached in (2, 3):
            self.world.questions[0].pass_on()
            self.world.turn()
            self.assertEqual(self.position(self.copy), reached)
        self.cut(self.copy)
        self.copy.pages_held = False
        self.world.questions[0].pass_on()
        self.world.turn()
        self.assertEqual(self.position(self.copy), 5)
        self.assert_well()

    def test_f3_in_silence(self) -> None:
        """A dead link that nobody was told of is found out by both ends."""
        self.wire(self.copy).cut([])
        self.append(1, 2, 3)
        self.assertEqual(self.position(self.copy), 1)
        self.assert_well(HEALED_WITHIN)

    def test_f3_before_the_master_has_said_anything(self) -> None:
        """A worker expects its master's first line within half a minute: it has never heard a PING to time out on."""
        self.world.network.new_held = False, True
        self.cut(self.copy)
        self.world.advance(1.0)
        self.world.network.new_held = False, False
        self.wire(self.copy).cut([])
        self.append(1)
        self.assert_well(HEALED_WITHIN)

    def test_a_master_that_is_slow_to_start_keeps_its_followers(self) -> None:
        """It greets them at once, and tells positions when it knows them; so nobody takes it for somebody else."""
        self.master.kill()
        self.master.start(held=True)
        self.world.advance(120.0)
        self.assertEqual([each.connections for each in self.copy.worker._links], [2])
        self.assertEqual(self.copy.worker.faults, {})
        self.master.store.release_all()
        self.append(1)
        self.assert_well()

    def test_f6_while_the_master_is_away_longer(self) -> None:
        self.master.kill(power=True)
        self.world.advance(120.0)
        self.master.start()
        self.append(1, 2)
        self.assert_well(HEALED_WITHIN)


class OrderTests(Scenario):
    """F7: what is heard while something is being fetched."""

    def setUp(self) -> None:
        super().setUp()
        self.copy.kill()
        self.append(1, 1)
        self.copy.pages_held = True
        self.copy.start()
        self.world.turn()
        self.assertEqual(len(self.world.questions), 1)

    def test_f7_rows_while_catching_up_are_kept_until_then(self) -> None:
        self.append(1, 2)
        self.assertEqual(self.position(self.copy), 1)
        self.copy.pages_held = False
        self.world.questions[0].pass_on()
        self.world.turn()
        self.assertEqual(self.position(self.copy), 5)
        self.assertEqual(self.copy.worker._followers[A].catch_ups, 1)
        self.assert_well()

    def test_f7_a_position_while_catching_up_moves_the_end(self) -> None:
        self.append(1, size=TOO_LONG)
        self.append(0)
        self.copy.pages_held = False
        self.world.questions[0].pass_on()
        self.world.turn()
        self.assertEqual(self.position(self.copy), 5)
        self.assert_well()

    def test_f7_what_was_asked_before_the_wire_was_lost_comes_after_it(self) -> None:
        self.cut(self.copy)
        self.append(1)
        self.world.advance(1.0)
        self.append(1)
        self.copy.pages_held = False
        for question in list(self.world.questions):
            question.pass_on()
        self.assert_well()


class KillTests(Scenario):
    """F9, I13: the master is killed, at each point of a fact's way."""

    def restart(self) -> None:
        self.master.kill()
        self.master.start()

    def test_f9_before_its_commit_has_landed(self) -> None:
        for how_far in ("reserved", "handed over"):
            with self.subTest(how_far):
                self.setUp()
                self.append(1)
                job = self.master.write("a", self.world.rows(2))
                self.world.turn()
                if how_far == "handed over":
                    self.master.store.held = True
                    job.wish.callback(None)
                    self.world.turn()
                self.restart()
                self.append(1)  # the ID is given out again: nobody was ever told of it
                self.assert_well()
                self.assertEqual([*self.master.ledgers[A].committed], [2, 3])

    def test_f9_after_its_commit_and_before_anybody_is_told(self) -> None:
        self.master.store.held = True
        self.master.append("a", self.world.rows(2))
        self.master.store.waiting[0].land()
        self.restart()
        self.assert_well()
        self.assertEqual(self.position(self.copy), 2)

    def test_f9_after_some_of_its_bytes_were_sent(self) -> None:
        for size in (1, 30, 60):
            with self.subTest(size):
                self.setUp()
                self.wire(self.copy).down.held = True
                self.append(3)
                self.wire(self.copy).down.deliver(size)
                self.master.kill(power=True)
                self.master.start()
                self.assert_well(HEALED_WITHIN)

    def test_f9_after_all_of_it_was_sent(self) -> None:
        self.append(3)
        self.restart()
        self.assert_well()
        self.assertEqual(len(self.told(self.copy, "RDATA")), 3)

    def test_f9_with_an_older_id_open_and_a_newer_one_committed(self) -> None:
        """The one that was open is gone; the other was never announced, and is now."""
        self.master.write("a", self.world.rows(1))
        self.world.turn()
        self.append(2)
        self.assertEqual(self.told(self.copy, "RDATA"), [])
        self.restart()
        self.assert_well()
        self.assertEqual([*self.master.ledgers[A].committed], [3])
        self.assertEqual(self.position(self.copy), 3)

    def test_f9_a_worker_that_did_not_hear_that_its_commit_landed(self) -> None:
        """I2: the function sees the facts again only if the transaction it saw them in was lost."""
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

    def test_trap_40_a_position_without_a_row_outlives_the_process(self) -> None:
        """An ID that was rolled back is announced once that is stored, so it is never given out again."""
        self.master.store.held = True
        job = self.master.write("a", self.world.rows(1))
        job.wish.errback(RollBackError())
        self.world.turn()
        self.assertEqual(self.told(self.copy, "POSITION a master 1 2"), [])
        self.master.store.release_all()
        self.world.turn()
        self.assertEqual(self.told(self.copy, "POSITION a")[-1], "POSITION a master 1 2")
        self.restart()
        self.append(1)
        self.assert_well()
        self.assertEqual([*self.master.ledgers[A].committed], [3])


class OpenTests(Scenario):
    """F11, F12: IDs that are not completed, or in another order."""

    def test_f11_whoever_leaves_by_another_exit_blocks_nobody(self) -> None:
        def roll_back(job: Any) -> None:
            job.wish.errback(RollBackError())

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

    def test_f11_a_hung_writer_holds_back_its_stream_and_no_other(self) -> None:
        job = self.master.write("a", self.world.rows(1))
        self.append(1, 1)
        self.append(1, stream="b")
        self.world.advance(300.0)
        self.assertEqual(self.position(self.copy), 1)
        self.assertEqual(self.position(self.copy, B), 2)
        self.assertEqual(self.master.master.stream_statuses()[0].oldest_open, (2, 300.0))
        job.wish.callback(None)
        self.assert_well()
        self.assertEqual(self.position(self.copy), 4)

    def test_f11_a_hung_writer_does_not_keep_the_master_from_stopping(self) -> None:
        job = self.master.write("a", self.world.rows(1))
        self.append(1)
        self.master.stop()
        self.world.advance(30.0)
        self.assertFalse(self.master.running)
        self.master.start()
        self.assert_well(HEALED_WITHIN)
        self.assertFalse(job.ended)
        self.assertEqual([*self.master.ledgers[A].committed], [3])

    def test_f12_commits_in_any_order_are_told_in_one(self) -> None:
        jobs = [self.master.write("a", self.world.rows(1, 2), caches=["x"]) for _ in range(4)]
        for which in (2, 0, 3, 1):
            jobs[which].wish.callback(None)
            self.world.turn()
        self.assertEqual([line.split()[3] for line in self.told(self.copy, "RDATA caches")], ["2", "3", "4", "5"])
        self.assert_well()

    def test_f12_more_than_memory_is_for_waits_and_is_read_again(self) -> None:
        job = self.master.write("a", self.world.rows(1))
        for _ in range(10):
            self.append(1, 2, 1, size=100)
        job.wish.callback(None)
        self.assert_well()
        self.assertEqual(self.position(self.copy), 32)

    def test_trap_36_no_position_passes_an_id_that_was_just_given_out(self) -> None:
        """Another writer's commit comes back while one has his ID and has not written yet."""
        self.master.store.held = True
        self.master.append("a", self.world.rows(1))
        job = self.master.write("a", self.world.rows(1))
        self.master.append("a", self.world.rows(1))
        self.master.store.release_all()
        self.world.turn()
        self.assertEqual(self.position(self.copy), 2)
        job.wish.callback(None)
        self.assert_well()


class FunctionTests(Scenario):
    """F24, I16: the application's own functions."""

    def test_f24_one_that_raises_stops_its_stream_and_no_other(self) -> None:
        self.apply.raising.add("a")
        self.append(2, 1)
        job = self.master.write("b", self.world.rows(1), caches=["x"])
        job.wish.callback(None)
        self.world.advance(60.0)
        self.assertEqual(self.position(self.apply), 1)
        self.assertEqual(self.position(self.apply, CACHES), 2)
        self.assertEqual(self.position(self.apply, B), 2)
        (status,) = [each for each in self.apply.worker.stream_statuses() if each.definition.name == A]
        self.assertIn("ValueError: the application does not want this", str(status.writers[0].error))
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.apply.release_functions()
        self.assert_well(11.0)

    def test_f24_one_that_hangs_stops_its_stream_and_no_other(self) -> None:
        self.apply.hanging.add("a")
        self.append(1)
        self.append(1)
        self.append(1, stream="b")
        self.world.advance(60.0)
        self.assertEqual(self.position(self.apply), 1)
        self.assertEqual(self.position(self.apply, B), 2)
        self.apply.release_functions()
        self.assert_well()

    def test_f24_one_that_hangs_does_not_keep_the_worker_from_stopping(self) -> None:
        self.apply.hanging.add("a")
        self.append(1)
        self.apply.stop()
        self.world.advance(30.0)
        self.assertFalse(self.apply.running)
        self.apply.hanging.clear()
        self.apply.start()
        self.assert_well()

    def test_f24_one_may_wait_for_another_stream(self) -> None:
        """If it waits in vain, that is as if it had raised: it is called again."""
        waits: list[Deferred[None]] = []
        applied = self.apply._apply

        async def wait_first(facts: Sequence[Fact], txn: Any) -> None:
            waits.append(self.apply.worker.wait_for("b", "master", 2, timeout=1.0))
            await waits[-1]
            await applied(facts, txn)

        self.apply.worker._followers[A]._function = wait_first
        self.append(2)
        self.world.advance(2.0)
        self.assertEqual(self.position(self.apply), 1)
        self.append(1, stream="b")
        self.assert_well()

    def test_trap_30_caches_are_invalidated_before_the_position_moves(self) -> None:
        """Whoever is woken by the position finds the cache empty."""
        computed: list[int] = []

        def look_up() -> int:
            computed.append(len(computed))
            return computed[-1]

        cached = self.apply.worker.cached()(look_up)
        self.assertEqual((cached(), cached()), (0, 0))
        found: list[int] = []
        wait = self.apply.wait_for("caches", "master", 2, 10.0)
        wait.waiting.addCallback(lambda _: found.append(cached()))
        self.master.write("a", self.world.rows(1), caches=["look_up"]).wish.callback(None)
        self.world.turn()
        self.assertEqual(found, [1])
        self.assert_well()

    def test_f24_a_disk_that_fails_is_tried_again(self) -> None:
        for worker in (self.copy, self.apply):
            worker.store.failing = True
        self.append(2, 1)
        self.world.advance(60.0)
        self.assertEqual(self.position(self.copy), 1)
        for worker in (self.copy, self.apply):
            worker.store.failing = False
        self.assert_well(11.0)
