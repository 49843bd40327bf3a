"""A restore of Synapse's database is found at two looks of the audit; what is followed goes back to its end."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from replication.follower.database_restores import FAR, go_back
from replication.follower.stream import FollowMode
from replication.wire.grammar import Token
from tests.doubles import logged
from tests.follower.test_audit import ONE, TWO, AuditCase, FakeDatabase, Followed

WENT_BACK = "one went back from 10 to 5 on orders: was its database restored? Following from there"
BOTH = (FollowMode.APPLIED, FollowMode.COPIED)


class RestoreTests(AuditCase):
    def begin(self, **options: Any) -> Followed:
        """Follow a writer that has written 2 to 10, all of which are applied and compared."""
        followed = self.follow(**options)
        followed.at(ONE, 1)
        followed.database.write(ONE, *range(2, 11))
        followed.send(ONE, *range(2, 11))
        followed.check()
        followed.check()
        self.assertEqual(followed.follower.checked, {ONE: 10})
        return followed

    def check_goes_back(self, followed: Followed) -> None:
        """The facts above 5 are lost, and the next ones have their IDs."""
        with logged() as messages:
            followed.check()
        self.assertEqual(
            messages,
            [
                "orders: the database was restored: one was received up to 10, and is followed again from 5",
                WENT_BACK,
            ],
        )
        before = followed.applied()
        followed.database.write(ONE, 6, 7)
        followed.send(ONE, 6, 7)
        self.assertEqual(followed.applied(), [*before, 6, 7])
        followed.check()
        followed.check()
        followed.database.write(ONE, 8, 9)  # 8 is lost on its way
        followed.send(ONE, 9)
        with logged():
            followed.check()
        self.assertEqual(sorted(followed.applied()[len(before) :]), [6, 7, 8, 9])

    def test_what_was_compared_is_gone(self) -> None:
        for mode in BOTH:
            followed = self.begin(mode=mode)
            followed.database.restore(5)
            self.check_goes_back(followed)

    def test_it_is_killed_before_it_has_compared_new_facts(self) -> None:
        """What was compared before the restore has the IDs of facts that were not."""
        for mode in BOTH:
            followed = self.begin(mode=mode)
            followed.database.restore(5)
            with logged():
                followed.check()
                before = followed.applied()
                followed.database.write(ONE, 6, 7)  # 6 is lost on its way
                followed.send(ONE, 7)
                followed.restart()
                followed.at(ONE, 7)
                followed.check()
            self.assertEqual(sorted(followed.applied()[len(before) :]), [6, 7])

    def test_what_redis_lost_below_the_restore_is_found_if_it_was_not_compared_before(self) -> None:
        for mode in BOTH:
            followed = self.follow(mode=mode)
            followed.at(ONE, 1)
            followed.database.write(ONE, *range(2, 11))
            followed.send(ONE, 2, *range(4, 11))
            followed.database.restore(5)
            with logged() as messages:
                followed.check()
                followed.check()
            self.assertIn(WENT_BACK, messages)
            self.assertIn(3, followed.applied())

    def test_a_copy_deletes_what_is_lost(self) -> None:
        followed = self.begin(mode=FollowMode.COPIED)
        followed.database.restore(5)
        with logged():
            followed.check()
        self.assertEqual(followed.applied(), [2, 3, 4, 5])

    def test_a_copy_receives_rows_that_later_ones_had_replaced(self) -> None:
        """Fact 10 has replaced 3 before the worker was started; the restore has lost 10, and 3 is there again."""
        for killed in (False, True):
            followed = self.follow(mode=FollowMode.COPIED)
            followed.database.keeps = False
            followed.at(ONE, 1)
            followed.at(TWO, 1)
            followed.database.write(TWO, 2)
            followed.database.write(ONE, 4, 10)
            followed.send(TWO, 2)
            followed.send(ONE, 4, 10)
            followed.check()
            followed.check()
            self.assertEqual(followed.applied(), [2, 4, 10])
            followed.database.restore(4)
            followed.database.written[Token(3)] = ONE
            with logged():
                followed.check()
                if killed:
                    followed.restart()
                    followed.at(ONE, 4)
                    followed.at(TWO, 2)
                followed.check()
            self.assertEqual(followed.applied(), [2, 3, 4])

    def test_it_was_restored_while_the_worker_was_stopped(self) -> None:
        for mode in BOTH:
            followed = self.begin(mode=mode)
            followed.database.restore(5)
            followed.restart()
            followed.at(ONE, 10)  # the lower position of a Synapse does not count: it is kept at 10
            self.check_goes_back(followed)

    def test_what_was_applied_since_the_last_check_is_gone(self) -> None:
        for mode in BOTH:
            followed = self.begin(mode=mode)
            followed.database.write(ONE, 11, 12)
            followed.send(ONE, 11, 12)
            followed.database.restore(10)
            with logged() as messages:
                followed.check()
            self.assertIn("one went back from 12 to 10 on orders", messages[1])

    def test_a_position_far_above_the_end_is_wrong(self) -> None:
        """Else all later facts of the writer would be dropped as repeated ones, also after a restart."""
        for mode in BOTH:
            for restarts in (False, True):
                followed = self.begin(mode=mode)
                followed.at(ONE, 2 * FAR)
                followed.database.write(ONE, 11)
                followed.send(ONE, 11)
                if restarts:
                    followed.restart()
                    followed.at(ONE, 2 * FAR)  # the lower position of a Synapse does not count
                with logged() as messages:
                    followed.check()
                    followed.check()
                wrong = "the database lacks what a position in Redis announced"
                reached = f"one was received up to {2 * FAR}, and is followed again from 11"
                self.assertIn(f"orders: {wrong}: {reached}", messages)
                self.assertEqual(followed.applied(), [*range(2, 12)])
                followed.database.write(ONE, 12, 13)
                with logged() as messages:
                    followed.send(ONE, 12, 13)
                    self.assertEqual(followed.applied(), [*range(2, 14)])
                    followed.check()
                self.assertEqual(messages, [])

    def test_what_was_written_since_the_restore_is_fetched(self) -> None:
        followed = self.begin(mode=FollowMode.COPIED)
        followed.database.restore(5)
        followed.database.write(ONE, 6)  # Redis has sent it, and it was taken for a duplicate
        followed.send(ONE, 6)
        with logged():
            followed.check()
        followed.database.write(ONE, 7)
        followed.send(ONE, 7)
        self.assertEqual(followed.applied(), [2, 3, 4, 5, 6, 7])

    def test_an_id_below_the_end_of_the_backup_was_open_then(self) -> None:
        """Its writer's stored position is below it; the backup has a larger ID of another writer."""
        for mode in BOTH:
            followed = self.follow(mode=mode)
            followed.at(ONE, 1)
            followed.at(TWO, 1)
            for writer, tokens in ((ONE, (2, 3)), (TWO, (4,)), (ONE, (5,)), (TWO, (6,))):
                followed.database.write(writer, *tokens)
                followed.send(writer, *tokens)
            followed.check()
            followed.check()
            followed.database.restore(4)
            del followed.database.written[Token(3)]
            followed.database.positions[ONE] = Token(2)
            with logged() as messages:
                for _ in range(3):
                    followed.check()
            end = 2 if mode is FollowMode.COPIED else 4
            self.assertIn(f"one was received up to 5, and is followed again from {end}", messages[0])
            if mode is FollowMode.COPIED:
                self.assertEqual(followed.applied(), [2, 4])

    def test_other_writers_have_passed_the_lost_facts_already(self) -> None:
        """A function without ``on_reset`` receives no fact twice."""
        followed = self.begin()
        followed.at(TWO, 1)
        followed.database.restore(5)
        followed.database.write(TWO, 6, 7, 11)
        followed.send(TWO, 6, 7, 11)
        with logged() as messages:
            followed.check()
        self.assertEqual(messages[1:], [WENT_BACK])
        followed.database.write(ONE, 8, 12)
        followed.send(ONE, 8, 12)
        self.assertEqual(followed.applied(), [*range(2, 11), 6, 7, 11, 8, 12])

    def test_a_copy_stops_at_an_id_that_is_taken_until_the_restore_is_found(self) -> None:
        followed = self.begin(mode=FollowMode.COPIED)
        followed.at(TWO, 1)
        followed.database.restore(5)
        followed.database.write(TWO, 6, 7, 11)
        with logged() as messages:
            followed.receive(TWO, [(6, "[]"), (7, "[]"), (11, "[]")], settle=False)
            while not followed.follower.errors.texts:
                followed.pump.run_call()
            checking = Deferred.fromCoroutine(followed.audit.check())
            while not checking.called or followed.follower.errors.texts or followed.applied() != [2, 3, 4, 5, 6, 7, 11]:
                followed.clock.advance(1.0)
                followed.pump.wait(followed.store.sync())  # what was queued meanwhile has run
                if checking.called and not followed.follower.in_progress():
                    checking = Deferred.fromCoroutine(followed.audit.check())
        self.assertIn("UNIQUE constraint failed", messages[0])
        self.assertIn(WENT_BACK, messages)


class NoRestoreTests(AuditCase):
    def check_stays(self, followed: Followed) -> None:
        with logged() as messages:
            followed.check()
            followed.check()
        self.assertEqual((messages, followed.follower.resets), ([], 0))

    def followed(self, database: FakeDatabase | None = None) -> Followed:
        followed = self.follow(database)
        followed.at(ONE, 1)
        followed.database.write(ONE, 2, 3, 4)
        followed.send(ONE, 2, 3, 4)
        return followed

    def test_a_standby_is_behind(self) -> None:
        followed = self.followed()
        followed.database.standby = True
        followed.database.restore(3)
        self.check_stays(followed)

    def test_an_id_was_rolled_back(self) -> None:
        followed = self.followed()
        followed.at(ONE, 9)
        self.check_stays(followed)

    def test_a_process_was_killed_before_it_stored_its_position(self) -> None:
        followed = self.followed()
        followed.database.positions[ONE] = followed.database.positions[ONE].__class__(3)
        self.check_stays(followed)

    def test_a_delivered_row_of_a_process_that_was_killed_is_deleted(self) -> None:
        """As in ``to_device``: neither the row nor the position of that fact is in the database."""
        followed = self.followed()
        followed.database.keeps = False
        followed.database.restore(3)
        self.check_stays(followed)

    def test_an_idle_writer_sends_the_positions_of_others(self) -> None:
        """Its own stored position stays where it has written last, also if the audit begins later."""
        for mode in FollowMode:
            followed = self.follow(mode=mode)
            followed.restart(audited=False)
            followed.at(ONE, 1)
            followed.database.write(ONE, 2)
            followed.send(ONE, 2)
            followed.at(TWO, 1)
            followed.database.write(TWO, 3, 4)
            followed.send(TWO, 3, 4)
            followed.at(ONE, 2, 4)
            followed.restart()
            followed.at(ONE, 4)
            followed.at(TWO, 4)
            self.check_stays(followed)

    def test_a_writer_that_has_written_nothing_sends_an_id_that_was_rolled_back(self) -> None:
        followed = self.followed()
        followed.at(TWO, 1)
        followed.at(TWO, 1, 9)
        self.check_stays(followed)
        self.check_stays(followed)

    def test_a_former_writer_has_no_stored_position_any_more(self) -> None:
        followed = self.followed()
        followed.check()
        followed.check()
        del followed.database.positions[ONE]
        self.check_stays(followed)

    def test_a_writer_that_was_removed_comes_back_with_a_lower_position(self) -> None:
        """If its rows are deleted, Synapse begins at another writer's position.

        It stores that while the first of two new facts is open.
        """
        followed = self.followed()
        followed.at(TWO, 1)
        followed.database.write(TWO, 2)
        followed.database.write(ONE, 5)
        followed.send(ONE, 5)
        followed.check()
        del followed.database.positions[ONE]
        followed.check()
        followed.database.positions[ONE] = followed.database.positions[TWO]
        followed.database.written[Token(7)] = ONE  # while 6 is open
        self.check_stays(followed)

    def test_only_one_look_shows_it(self) -> None:
        followed = self.followed()
        written, positions = followed.database.written, followed.database.positions
        followed.database.restore(2)

        def back() -> None:
            followed.database.written, followed.database.positions = written, positions

        with logged() as messages:
            followed.check(back)
        self.assertEqual((messages, followed.follower.resets), ([], 0))

    def test_a_stream_without_stored_positions_shows_nothing(self) -> None:
        """Synapse deletes old rows of ``caches``."""
        followed = self.followed(FakeDatabase("orders", stores_positions=False))
        followed.database.written.clear()
        self.check_stays(followed)


class WithoutStoredPositionsTests(AuditCase):
    def test_it_goes_back_with_the_other_streams(self) -> None:
        caches = self.follow(FakeDatabase("caches", stores_positions=False))
        caches.at(ONE, 1)
        caches.database.write(ONE, 2, 3, 4)
        caches.send(ONE, 2, 3, 4)
        caches.database.restore(3)
        with logged() as messages:
            caches.pump.wait(go_back(caches.database, [caches.follower], {}, {}))
            caches.settle()
        self.assertEqual(
            messages[0], "caches: the database was restored: one was received up to 4, and is followed again from 3"
        )
        self.assertEqual(caches.follower.position(ONE), 3)

    def test_a_position_far_above_the_newest_row_is_wrong(self) -> None:
        for empty in (False, True):  # all rows may be deleted, as after a week without a new one
            followed = self.follow(FakeDatabase("caches", stores_positions=False))
            followed.at(ONE, 1)
            if not empty:
                followed.database.write(ONE, 2)
                followed.send(ONE, 2)
            followed.check()
            followed.at(ONE, 2 * FAR)
            with logged():
                followed.check()
            self.assertEqual(followed.follower.position(ONE), 2 * FAR if empty else 2)

    def test_only_its_facts_were_lost(self) -> None:
        """All other streams end where they did: the new facts had the IDs of lost ones, and were never applied."""
        for mode in BOTH:
            caches = self.follow(FakeDatabase("caches", stores_positions=False), mode=mode)
            caches.at(ONE, 1)
            caches.at(TWO, 1)
            caches.database.write(TWO, 2, 5)
            caches.database.write(ONE, 3, 4)
            caches.send(TWO, 2, 5)
            caches.send(ONE, 3, 4)
            with logged() as messages:
                caches.check()
                for each in (2, 5):  # they are a week old
                    del caches.database.written[Token(each)]
                del caches.database.positions[TWO]
                caches.check()
                self.assertEqual(messages, [])
                caches.database.restore(3)
                caches.check()
            self.assertEqual(
                messages[0], "caches: the database was restored: one was received up to 4, and is followed again from 3"
            )
            self.assertEqual(caches.follower.position(ONE), 3)
            caches.database.write(ONE, 4)
            caches.send(ONE, 4)
            self.assertEqual(caches.follower.position(ONE), 4)
            if mode is FollowMode.APPLIED:
                self.assertEqual([token for token, _ in caches.effects()], [2, 3, 4, 4, 5])

    def test_a_writer_whose_last_ids_were_rolled_back_gets_lost_ones(self) -> None:
        """Its newest row has not gone back, but it was compared up to an ID that is given again."""
        for mode in BOTH:
            caches = self.follow(FakeDatabase("caches", stores_positions=False), mode=mode)
            caches.at(ONE, 1)
            caches.at(TWO, 1)
            caches.database.write(TWO, 2)
            caches.database.write(ONE, 3, 7)
            caches.send(TWO, 2)
            caches.send(ONE, 3, 7)
            caches.at(TWO, 2, 6)
            with logged():
                for _ in range(3):
                    caches.check()
                caches.database.restore(3)
                caches.check()
                caches.database.write(TWO, 4)
                caches.database.write(ONE, 5)
                caches.send(TWO, 4)
                caches.send(ONE, 5)
                caches.check()
            if mode is FollowMode.APPLIED:
                self.assertEqual([token for token, _ in caches.effects()], [2, 3, 4, 5, 7])
            else:
                page = caches.pump.wait(
                    caches.store.facts(caches.database.stream, TWO, after=Token(0), upto=Token(9), limit=9)
                )
                self.assertEqual([token for token, _ in page.facts], [2, 4])

    def test_a_fact_with_a_lost_id_does_not_arrive(self) -> None:
        """A fact with this ID did not arrive before the restore either: for the second one, nothing was requested."""
        caches = self.follow(FakeDatabase("caches", stores_positions=False))
        caches.at(ONE, 1)
        caches.database.write(ONE, 2, 3)
        with logged():
            caches.check()
            caches.at(ONE, 3)
            caches.check()
            caches.database.restore(2)
            caches.check()
            self.assertEqual((caches.follower.position(ONE), caches.requests), (2, 1))
            caches.database.write(ONE, 3)
            caches.check()
        self.assertEqual(caches.requests, 2)

    def test_without_copy_and_function_a_lost_fact_with_the_id_of_an_earlier_one_is_applied(self) -> None:
        """Cached functions follow only the position: a missed invalidation leaves an old value for ever."""
        caches = self.follow(FakeDatabase("caches", stores_positions=False), mode=FollowMode.POSITION_ONLY)
        caches.database.ended = Token(0)  # a transaction is open, so all is compared again
        caches.at(ONE, 1)
        caches.database.write(ONE, 2, 3, 4, 5)
        caches.send(ONE, 2, 3, 4, 5)
        with logged():
            caches.check()
            caches.database.restore(3)
            caches.check()
            self.assertEqual(caches.follower.position(ONE), 3)
            caches.database.write(ONE, 4, 5)  # 4 is lost on its way
            caches.send(ONE, 5)
            caches.check()
        self.assertEqual(caches.follower.late, {ONE: 1})
