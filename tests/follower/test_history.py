"""A follower compares histories before it trusts a position: copies go back, functions undo what is lost, or stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred, succeed

from replication.deferreds import share
from replication.errors import CatchUpError, CommitsLostError, StoreError
from replication.follower.history import FIRST_RETRY, FollowedHistories
from replication.follower.merge import MergingFollower
from replication.follower.stream import FollowMode, StreamFollower
from replication.streams.history import Epoch, begin_epoch
from replication.streams.interfaces import Page
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import begin, logged, now
from tests.follower.cases import MASTER, ORDERS, OTHER, FollowerCase, fact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.facts import Fact
    from replication.streams.history import History
    from tests.follower.cases import First


def epoch(name: str, start: int) -> Epoch:
    return Epoch(name, Token(start), Token(start))


A, B = epoch("a", 1), epoch("b", 5)


class HistoryCase(FollowerCase):
    """The writer's history is ``published``; an exception is raised instead."""

    accept_new = False
    gate: Deferred[None] | None = None  # that each answer waits for
    undo: Callable[..., object] | None = None

    def setUp(self) -> None:
        self.published: History | Exception = [A, B]
        self.asked = 0
        self.changed: list[tuple[StreamName, InstanceName]] = []
        self.answer: Deferred[bool] | None = None  # of the writer, which shows that the link is open
        super().setUp()

    def make_follower(
        self, function: Callable[..., object] | None = None, first: First | None = None
    ) -> StreamFollower:
        self.histories = FollowedHistories(
            stream=ORDERS,
            store=self.store,
            follower="" if self.mode is FollowMode.COPIED else "worker1",
            lifetime=self.process.lifetime,
            fetch=self.fetch_history,
            accept_new=self.accept_new,
            changed=lambda *which: self.changed.append(which),
        )
        arguments: dict[str, Any] = {**self.process.arguments, "histories": self.histories, "undo": self.undo}
        arguments["is_open"] = self.is_open
        return StreamFollower(name=ORDERS, mode=self.mode, function=function, first=first, **arguments)

    def is_open(self, link: str) -> Deferred[bool]:
        assert link
        return succeed(True) if self.answer is None else self.answer

    async def fetch_history(self, stream: StreamName, writer: InstanceName) -> History:
        self.asked += 1
        if self.gate is not None:
            await share(self.gate)
        assert (stream, writer) == (ORDERS, MASTER)
        if isinstance(self.published, Exception):
            raise self.published
        return self.published

    def follow_to_eleven(self) -> None:
        """Follow the epoch b up to 11, and lose the connection."""
        self.at(0, 1)
        self.rows(*map(fact, range(2, 12)))
        self.follower.connection_lost("link")

    def stored_history(self) -> list[str]:
        stored = now(self.store.history(ORDERS, MASTER, "" if self.mode is FollowMode.COPIED else "worker1"))
        return [each.name for each in stored]


class CopyTests(HistoryCase):
    def test_the_first_facts_wait_for_the_history(self) -> None:
        """Else a copy could not notice that the database was exchanged at once, and would delete them."""
        self.gate = Deferred()
        self.at(0, 1)
        self.rows(*map(fact, range(2, 7)))
        self.assertEqual((self.stored(), self.stored_history()), (([], 0), []))
        self.gate.callback(None)
        self.assertEqual((self.stored()[1], self.stored_history()), (6, ["a", "b"]))
        self.follower.connection_lost("link")
        self.published = [epoch("other", 1)]
        with logged() as messages:
            self.at(0, 2, link="next")
        self.assertIn("Nothing is deleted here", messages[0])
        self.assertEqual(self.stored()[1], 6)

    def test_first_facts_of_a_connection_that_is_lost_before_the_history_is_known_are_not_applied(self) -> None:
        self.gate, self.answer = Deferred(), succeed(False)
        self.at(0, 1)
        self.rows(*map(fact, range(2, 7)))
        self.follower.connection_lost("link")
        self.published = CatchUpError("refused")
        self.gate.callback(None)
        self.answer, self.published = None, [epoch("other", 1)]
        self.process.pages = [Page([fact(2, '"new"')], Token(2), limited=False)]
        self.at(2, 2, link="next")
        self.process.clock.advance(1.0)
        self.assertEqual((self.stored(), self.stored_history()), (([fact(2, '"new"')], 2), ["other"]))

    def test_facts_that_were_received_before_the_first_history_are_fetched_again(self) -> None:
        """The database may have been restored since."""
        self.gate, self.answer = Deferred(), succeed(False)
        self.at(0, 1)
        self.rows(fact(2, '"lost"'))
        self.follower.connection_lost("link")
        self.published = CatchUpError("refused")
        self.gate.callback(None)
        self.answer, self.published = None, [A]
        self.process.pages = [Page([fact(3, '"new"')], Token(3), limited=False)]
        self.at(3, 3, link="next")
        self.process.clock.advance(1.0)
        self.assertEqual(self.stored(), ([fact(3, '"new"')], 3))

    def test_a_source_that_does_not_answer_delays_no_first_facts(self) -> None:
        self.published = CatchUpError("refused")
        self.at(0, 1)
        self.rows(fact(2))
        self.assertEqual((self.stored(), self.state(), self.stored_history()), (([fact(2)], 2), "live", []))
        self.published = [A]
        self.process.clock.advance(FIRST_RETRY)
        self.assertEqual((self.stored_history(), self.asked), (["a"], 2))
        self.assertEqual(self.changed, [(ORDERS, MASTER)])

    def test_a_first_history_is_fetched_for_the_newest_connection_at_once(self) -> None:
        """What an earlier connection brought may be of another start of the writer."""
        self.published = CatchUpError("refused")
        self.at(0, 1, link="one")
        self.published, self.gate = [A], Deferred()
        self.process.clock.advance(FIRST_RETRY)
        self.follower.connection_lost("one")
        self.at(1, 1, link="two")
        self.published = [A, B]
        self.gate.callback(None)
        self.assertEqual((self.stored_history(), self.asked), (["a", "b"], 3))
        self.process.clock.advance(10_000)
        self.assertEqual(self.asked, 3)

    def test_a_first_history_of_a_lost_connection_is_not_stored(self) -> None:
        self.answer = succeed(False)
        self.at(0, 1, link="one")
        self.follower.connection_lost("one")
        self.assertEqual((self.stored_history(), self.asked), ([], 1))
        self.answer = None
        self.at(1, 1, link="two")
        self.process.clock.advance(1.0)
        self.assertEqual((self.stored_history(), self.asked), (["a", "b"], 3))

    def test_a_connection_that_is_lost_while_the_audit_is_confirmed_is_no_error(self) -> None:
        self.follow_to_eleven()
        confirmed: Deferred[None] = Deferred()

        async def confirm(_: StreamFollower, writer: InstanceName) -> None:
            assert writer == MASTER
            await confirmed

        self.follower._confirm_audit = confirm
        with logged() as lines:
            self.at(11, 11, link="lost")
            self.follower.connection_lost("lost")
            confirmed.callback(None)
        self.assertEqual(lines, [])
        self.at(11, 12, link="new")
        self.process.clock.advance(1)
        self.assertEqual(self.histories.checks, 1)

    def test_facts_of_a_connection_that_is_not_confirmed_are_not_applied(self) -> None:
        """The writer was restored and started again, and the last lines of the old connection are read only now."""
        self.follow_to_eleven()
        self.published = [A, B, epoch("c", 11), epoch("d", 11)]
        answer: Deferred[bool] = Deferred()
        self.answer = answer
        self.at(11, 11, link="old")
        self.rows(fact(12), link="old")
        self.assertEqual((self.stored()[1], self.stored_history()), (11, ["a", "b"]))
        self.follower.connection_lost("old")
        self.answer = None
        answer.callback(False)
        self.process.pages = [Page([fact(12, '"new"')], Token(12), limited=False)]
        self.at(12, 12, link="new")
        with logged() as messages:
            self.process.clock.advance(1.0)
        self.assertEqual((self.stored(), messages), (([*map(fact, range(2, 12)), fact(12, '"new"')], 12), []))

    def test_a_writer_without_a_history_is_asked_once_per_connection(self) -> None:
        self.published = ()
        for link in ("one", "two"):
            self.at(1, 1, link=link)
            self.follower.connection_lost(link)
        self.process.clock.advance(10_000)
        self.assertEqual((self.asked, self.stored_history()), (2, []))

    def test_an_ordinary_restart_of_the_writer_changes_nothing(self) -> None:
        self.follow_to_eleven()
        self.published = [A, B, epoch("c", 11)]
        self.at(11, 11, link="next")
        self.rows(fact(12), link="next")
        self.assertEqual(self.stored(), ([*map(fact, range(2, 13))], 12))
        self.assertEqual(self.stored_history(), ["a", "b", "c"])
        self.assertEqual((self.follower.resets, self.histories.checks, self.histories.mismatches), (0, 1, 0))

    def test_received_facts_of_the_same_history_need_not_be_fetched_again(self) -> None:
        self.follow_to_eleven()
        self.published = [A, B, epoch("c", 8)]
        compared = self.histories.compare(MASTER, Token(4), Token(11), lambda: succeed(True))
        self.assertEqual(now(compared), (8, self.published))

    def test_a_writer_whose_position_was_raised_while_it_was_connected_is_compared_again(self) -> None:
        """The process that raises it has begun an epoch, which a relay must have for later followers."""
        self.at(0, 1)
        self.rows(fact(2))
        self.published = [A, B, epoch("c", 9)]
        self.follower.cursors[MASTER].compare_again()
        self.follower.resume()
        self.assertEqual((self.stored_history(), self.stored()), (["a", "b", "c"], ([fact(2)], 2)))
        self.assertEqual(self.changed[-1], (ORDERS, MASTER))

    def test_a_restored_writer_that_has_passed_the_follower_is_followed_from_the_backup(self) -> None:
        """At 11; the backup ends at 6; 7 to 14 are new facts."""
        self.follow_to_eleven()
        self.published = [A, B, epoch("c", 6)]
        new = [fact(token, '"new"') for token in range(7, 15)]
        self.process.pages = [Page(new, Token(14), limited=False)]
        with logged() as messages:
            self.at(14, 14, link="next")
            self.rows(fact(15, '"new"'), link="next")
        self.assertEqual(self.process.asked, [(6, 14)])
        self.assertEqual(self.stored(), ([*map(fact, range(2, 7)), *new, fact(15, '"new"')], 15))
        self.assertEqual(
            messages, ["master went back from 11 to 6 on orders: was its database restored? Following from there"]
        )
        self.assertEqual((self.stored_history(), self.histories.mismatches), (["a", "b", "c"], 1))

    def test_a_backup_from_before_the_first_fact_is_followed_from_the_start(self) -> None:
        """Its only epoch has no facts, and stays: the two histories share it."""
        self.published = [A]
        self.follow_to_eleven()
        self.published = begin_epoch([A], epoch("c", 1))
        self.process.pages = [Page([fact(2, '"new"')], Token(14), limited=False)]
        with logged():
            self.at(14, 14, link="next")
        self.assertEqual((self.process.asked, self.stored()), ([(1, 14)], ([fact(2, '"new"')], 14)))

    def test_a_database_of_version_0_1_may_start_twice_before_its_next_fact(self) -> None:
        self.published = begin_epoch([], epoch("first", 11))
        self.follow_to_eleven()
        self.published = begin_epoch(self.published, epoch("second", 11))
        self.at(11, 11, link="next")
        self.rows(fact(12), link="next")
        self.assertEqual((self.state(), self.stored()), ("live", ([*map(fact, range(2, 13))], 12)))

    def test_checks_and_mismatches_are_counted_since_the_start(self) -> None:
        self.follow_to_eleven()
        for number, (start, link) in enumerate(((6, "next"), (4, "last")), 1):
            self.published = [A, B, epoch(link, start)]
            self.process.pages = [Page([], Token(11), limited=False)]
            with logged():
                self.at(11, 11, link=link)
            self.follower.connection_lost(link)
            self.assertEqual((self.histories.checks, self.histories.mismatches), (2 * number, number))

    def test_a_restored_writer_that_is_behind_is_followed_from_the_backup_too(self) -> None:
        """At 11; the backup ends at 6; 7 and 8 are new facts."""
        self.follow_to_eleven()
        self.published = [A, B, epoch("c", 6)]
        new = [fact(7, '"new"'), fact(8, '"new"')]
        self.process.pages = [Page(new, Token(8), limited=False)]
        with logged():
            self.at(8, 8, link="next")
        self.assertEqual(self.stored(), ([*map(fact, range(2, 7)), *new], 8))

    def test_received_facts_that_were_not_applied_are_dropped(self) -> None:
        self.at(0, 1)
        self.store.close_gate("commit")
        self.rows(*map(fact, range(2, 5)))
        self.rows(*map(fact, range(5, 12)))
        self.follower.connection_lost("link")
        self.published = [A, epoch("c", 3)]
        new = [fact(4, '"new"')]
        self.process.pages = [Page(new, Token(14), limited=False)]
        with logged():
            self.at(14, 14, link="next")
            self.store.open_gate("commit")
        self.assertEqual(self.stored(), ([fact(2), fact(3), *new], 14))

    def test_facts_wait_while_no_source_answers(self) -> None:
        self.follow_to_eleven()
        self.published = CatchUpError("refused")
        with logged() as messages:
            self.at(11, 11, link="next")
            self.rows(fact(12), link="next")
            self.process.clock.advance(0.25)
        self.assertEqual((self.position(), self.state(), len(messages)), (11, "stopped", 1))
        self.assertIn("checking the history of orders of master after 11: CatchUpError: refused", messages[0])
        self.published = [A, B]
        self.process.clock.advance(10)
        self.assertEqual((self.position(), self.state()), (12, "live"))

    def test_a_source_that_has_not_seen_the_last_start_of_the_writer_is_waited_for(self) -> None:
        """It is a relay that is behind: nothing is lost."""
        self.published = [A, epoch("c", 8)]
        self.follow_to_eleven()
        self.published = [A]
        with logged() as messages:
            self.at(9, 9, link="relay")
            self.process.clock.advance(0.25)
        self.assertEqual((self.position(), self.state(), len(messages)), (11, "stopped", 1))
        self.assertIn("lacks the last start of master and facts above 8: waiting 60 s for them", messages[0])
        self.published = [A, epoch("c", 8)]
        with logged() as messages:
            self.rows(fact(12), link="relay")
            self.process.clock.advance(10)
        self.assertEqual((self.stored()[1], self.state(), self.follower.resets), (12, "live", 0))

    def test_after_a_minute_such_a_source_is_followed_from_the_last_start_in_common(self) -> None:
        """The writer was restored and renamed: no process begins another epoch for it."""
        self.published = [A, epoch("c", 8)]
        self.follow_to_eleven()
        self.published = [A]
        with logged() as messages:
            for seconds in range(60):
                self.at(8, 8, link=f"at {seconds} s")
                self.process.clock.advance(1)
                self.assertEqual(self.position(), 11)
                self.follower.connection_lost(f"at {seconds} s")
            self.at(8, 8, link="restored")
            self.process.clock.advance(10)
        self.assertEqual((self.position(), self.state()), (8, "live"))
        self.assertIn("master went back from 11 to 8 on orders", messages[-1])

    def test_each_source_that_is_behind_has_a_minute(self) -> None:
        """The connection to a relay ended within its minute, and that relay is behind later: nothing is lost."""
        self.published = [A, epoch("c", 8)]
        self.follow_to_eleven()
        self.published = [A]
        with logged():
            self.at(8, 8, link="relay")
            self.process.clock.advance(0.25)
            self.follower.connection_lost("relay")
            self.process.clock.advance(3600)
            self.at(8, 8, link="again")
            self.process.clock.advance(0.25)
        self.assertEqual((self.position(), self.state(), self.follower.resets), (11, "stopped", 0))

    def test_a_source_that_is_behind_has_a_minute_although_the_writer_went_back_before(self) -> None:
        self.published = [A, epoch("c", 8), epoch("d", 9)]
        self.follow_to_eleven()
        self.published = [A, epoch("c", 8)]
        with logged():
            for second in range(61):
                self.at(9, 9, link=f"at {second} s")
                self.process.clock.advance(1)
                self.follower.connection_lost(f"at {second} s")
            self.at(9, 9, link="restored")
            self.process.clock.advance(10)
            self.assertEqual((self.position(), self.state()), (9, "live"))
            self.follower.connection_lost("restored")
            self.published = [A]
            self.at(8, 8, link="relay")
            self.process.clock.advance(0.25)
        self.assertEqual((self.position(), self.state()), (9, "stopped"))

    def test_a_source_that_stays_away_is_logged_once_though_connections_come_and_go(self) -> None:
        self.follow_to_eleven()
        for _ in range(2):
            self.published = CatchUpError("refused")
            with logged() as messages:
                for link in ("a", "b", "c"):
                    self.at(11, 11, link=link)
                    self.rows(fact(12), link=link)
                    self.follower.connection_lost(link)
                    self.process.clock.advance(10)
            self.assertEqual(len(messages), 1, messages)
            self.published = [A, B]
            self.at(11, 11, link="works")
            self.follower.connection_lost("works")

    def test_an_exchanged_database_that_has_our_position_too_is_reported_as_lost_commits(self) -> None:
        self.follow_to_eleven()
        self.published = [epoch("y", 1)]
        self.store.errors["verify"] = CommitsLostError("lost commits: restart it")
        with logged() as messages:
            self.at(50, 50, link="next")
        self.assertIn("CommitsLostError: lost commits: restart it", messages[0])

    def test_an_emptied_or_exchanged_database_deletes_nothing(self) -> None:
        for position, published in ((1, [epoch("x", 1)]), (50, [epoch("y", 1), epoch("z", 20)])):
            with self.subTest(published), logged():
                self.follow_to_eleven()
                self.published = published
                self.at(position, position, link="next")
                self.process.clock.advance(100)
                self.assertEqual(self.stored(), ([*map(fact, range(2, 12))], 11))
                self.assertEqual(
                    self.follower.errors.texts[MASTER],
                    "checking the history of orders of master after 11: StreamError: master has another "
                    "history of orders: not the one that was followed up to 11. Was its database emptied or "
                    "exchanged? Nothing is deleted here. Start the writer with the right database, or start once with "
                    "--accept-new-history to follow this one from the beginning. Before that, undo by hand what a "
                    "function without on_reset has applied: it receives all facts again",
                )
                self.published = [A, B]
                self.follower.connection_lost("next")
                self.at(11, 11)
                self.process.clock.advance(10)
                self.assertEqual(self.state(), "live")

    def test_a_writer_without_a_history_as_one_of_0_1_deletes_nothing(self) -> None:
        """The error advised to undo all effects by hand, as all facts came again.  None comes again."""
        self.follow_to_eleven()
        self.published = []
        with logged():
            self.at(11, 11, link="next")
            self.rows(fact(12), link="next")
            self.process.clock.advance(100)
        self.assertEqual(self.stored(), ([*map(fact, range(2, 12))], 11))
        self.assertEqual(
            self.follower.errors.texts[MASTER],
            "checking the history of orders of master after 11: StreamError: master has no history of orders now, but "
            "one was followed up to 11. Nothing is deleted here. Version 0.1 has no histories: if the writer "
            "runs it, install this version there. Else start the writer with the right database. Or start with "
            "--accept-new-history as long as the writer has none, to go on after 11: what was applied stays, and is "
            "not received again",
        )
        self.published = [A, B]  # of today's version again
        self.follower.connection_lost("next")
        self.at(12, 12)
        self.process.clock.advance(10)
        self.assertEqual((self.state(), self.stored()[1]), ("live", 12))

    def test_a_position_without_facts_needs_no_common_epoch(self) -> None:
        self.at(0, 1)
        self.follower.connection_lost("link")
        self.published = [epoch("x", 1)]
        self.at(1, 1, link="next")
        self.assertEqual((self.state(), self.stored_history()), ("live", ["x"]))

    def test_received_facts_do_not_make_an_empty_stream_one_of_another_history(self) -> None:
        """The epoch that was followed had no facts, so the next one has replaced it; its facts were received only."""
        self.at(0, 1)
        self.follower.connection_lost("link")
        self.published = CatchUpError("refused")
        with logged():
            self.at(1, 1, link="next")
            self.rows(fact(2), fact(3), link="next")
            self.follower.connection_lost("next")
            self.published = [epoch("x", 1), epoch("y", 3)]
            self.process.pages = [Page([fact(2), fact(3)], Token(3), limited=False)]
            self.at(3, 3, link="last")
            self.process.clock.advance(10)
        self.assertEqual(
            (self.stored(), self.state(), self.stored_history()), (([fact(2), fact(3)], 3), "live", ["x", "y"])
        )
        self.assertEqual((self.follower.resets, self.histories.mismatches), (0, 0))

    def test_the_next_process_compares_what_was_stored(self) -> None:
        self.follow_to_eleven()
        self.follower = self.make_follower()
        now(self.follower.open())
        self.published = [A, B, epoch("c", 6)]
        self.process.pages = [Page([], Token(14), limited=False)]
        with logged():
            self.at(14, 14, link="next")
        self.assertEqual(self.stored(), ([*map(fact, range(2, 7))], 14))

    def test_a_history_that_cannot_be_stored_holds_the_facts_back(self) -> None:
        self.follow_to_eleven()
        self.published = [A, B, epoch("c", 11)]
        self.store.errors["store histories"] = StoreError("disk full")
        with logged():
            self.at(11, 11, link="next")
            self.rows(fact(12), link="next")
        self.assertEqual(self.position(), 11)
        self.store.errors.clear()
        self.process.clock.advance(1)
        self.assertEqual((self.position(), self.stored_history()), (12, ["a", "b", "c"]))


class AcceptedCopyTests(HistoryCase):
    accept_new = True

    def test_another_history_is_copied_from_the_beginning(self) -> None:
        self.follow_to_eleven()
        self.published = [epoch("x", 1)]
        self.process.pages = [Page([fact(5, '"other"')], Token(20), limited=False)]
        with logged():
            self.at(20, 20, link="next")
        self.assertEqual(self.process.asked, [(0, 20)])
        self.assertEqual((self.stored(), self.stored_history()), (([fact(5, '"other"')], 20), ["x"]))

    def test_the_beginning_of_the_history_is_followed(self) -> None:
        """The database of a writer was restored, and the writer does not run any more: so it begins no epoch."""
        self.follow_to_eleven()
        self.published = [A]
        with logged():
            self.at(5, 5, link="next")
        self.assertEqual((self.position(), self.stored_history(), self.follower.resets), (5, ["a"], 1))

    def test_a_writer_that_has_no_history_any_more_is_followed(self) -> None:
        self.follow_to_eleven()
        self.published = []
        self.at(11, 11, link="next")
        self.rows(fact(12), link="next")
        self.assertEqual((self.position(), self.stored_history()), (12, ["a", "b"]))


class FunctionTests(HistoryCase):
    mode = FollowMode.APPLIED

    def setUp(self) -> None:
        self.seen: list[list[int]] = []
        self.undone: list[tuple[str, int]] = []
        super().setUp()

    def make_follower(
        self, function: Callable[..., object] | None = None, first: First | None = None
    ) -> StreamFollower:
        return super().make_follower(function or self.apply, first)

    def apply(self, facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        self.seen.append([each.token for each in facts])

    async def undo_orders(self, writer: InstanceName, to: Token, txn: ApplyTransaction) -> None:
        self.undone.append((writer, to))
        await txn.execute("DELETE …")

    def restore(self, new: int = 14) -> None:
        """Restore the backup that ends at 6, and write up to ``new``."""
        self.follow_to_eleven()
        self.seen.clear()
        self.published = [A, B, epoch("c", 6)]
        self.process.pages = [Page([*map(fact, range(7, new + 1))], Token(new), limited=False)]
        self.at(new, new, link="next")

    def test_without_a_function_that_undoes_the_stream_stops_with_the_cure(self) -> None:
        for new in (14, 8):
            with self.subTest(new), logged() as messages:
                self.restore(new)
                self.process.clock.advance(20)
                self.assertEqual((self.position(), self.state(), self.seen), (11, "stopped", []))
                self.assertEqual(self.stored_history(), ["a", "b"])
                self.tearDown()
                self.setUp()
            self.assertEqual(len(messages), 1)
            self.assertIn(
                "StreamError: master went back from 11 to 6 on orders, and nothing undoes what was applied: register "
                "a function with @worker.on_reset('orders'), or correct the effects of the facts above 6 by hand, and "
                "then start once with --accept-new-history",
                messages[0],
            )


class UndoneFunctionTests(FunctionTests):
    @property
    def undo(self) -> Callable[..., object]:  # type: ignore[override]
        return self.undo_orders

    def test_without_a_function_that_undoes_the_stream_stops_with_the_cure(self) -> None:
        """With one, it is called in the transaction that lowers the position, and the new facts are applied."""
        with logged():
            self.restore()
        self.assertEqual((self.undone, self.store.executed), ([("master", 6)], ["DELETE …"]))
        self.assertEqual((self.seen, self.position()), ([[*range(7, 15)]], 14))
        self.assertEqual(self.stored_history(), ["a", "b", "c"])

    def test_it_is_called_for_a_writer_that_has_no_history_too(self) -> None:
        """As of a Synapse, or an in-memory stream."""
        self.published = ()
        self.follow_to_eleven()
        with logged():
            self.at(4, 4, link="next")
        self.assertEqual((self.undone, self.position()), ([("master", 4)], 4))


class AcceptedFunctionTests(FunctionTests):
    accept_new = True

    def test_without_a_function_that_undoes_the_stream_stops_with_the_cure(self) -> None:
        """With accept_new_history the position is lowered without undoing anything."""
        with logged():
            self.restore()
        self.assertEqual((self.seen, self.position()), ([[*range(7, 15)]], 14))


class ForgottenFunctionTests(FunctionTests):
    def test_without_a_function_that_undoes_the_stream_stops_with_the_cure(self) -> None:
        """Where no history was ever known, as before version 0.2, the position is lowered as ever."""
        self.published = ()
        self.follow_to_eleven()
        with logged():
            self.at(4, 4, link="next")
        self.assertEqual((self.position(), self.state()), (4, "live"))


class LinearTests(HistoryCase):
    """In linear order no fact of a writer is applied before its history is checked, and others wait for that."""

    mode = FollowMode.APPLIED

    def setUp(self) -> None:
        self.seen: list[int] = []
        self.undone: list[tuple[str, int]] = []
        super().setUp()

    def make_follower(
        self, function: Callable[..., object] | None = None, first: First | None = None
    ) -> MergingFollower:
        super().make_follower()
        return MergingFollower(
            name=ORDERS,
            mode=self.mode,
            function=lambda facts, txn: self.seen.extend([each.token for each in facts]),
            undo=lambda writer, to, txn: self.undone.append((writer, to)),
            histories=self.histories,
            all_positions_received=lambda: True,
            **self.process.arguments,
        )

    async def fetch_history(self, stream: StreamName, writer: InstanceName) -> History:
        return await super().fetch_history(stream, MASTER) if writer == MASTER else [epoch("other", 1)]

    def test_a_restored_writer_goes_back_before_anything_above_is_applied(self) -> None:
        self.at(0, 1, MASTER, "one")
        self.at(0, 1, OTHER, "two")
        self.rows(fact(2), fact(4), fact(6), writer=MASTER, link="one")
        self.rows(fact(3), fact(7), writer=OTHER, link="two")
        self.assertEqual(self.seen, [2, 3, 4, 6])
        self.follower.connection_lost("one")
        self.gate = Deferred()
        self.published = [A, epoch("c", 4)]
        again = Page([fact(7), fact(10)], Token(10), limited=False)
        self.process.pages = [again, Page([fact(5, '"new"'), fact(8, '"new"')], Token(9), limited=False)]
        with logged():
            self.at(9, 9, MASTER, "next")
            self.rows(fact(10), writer=OTHER, link="two")
            self.assertEqual(self.seen, [2, 3, 4, 6])
            self.gate.callback(None)
        self.assertEqual((self.undone, self.seen), ([(OTHER, 4), (MASTER, 4)], [2, 3, 4, 6]))
        self.at(9, 10, OTHER, "two")  # so it has lost nothing
        self.assertEqual(self.seen, [2, 3, 4, 6, 5, 7, 8])

    def test_nothing_is_applied_while_the_history_of_another_writer_is_compared(self) -> None:
        self.at(0, 8, MASTER, "one")
        self.at(0, 1, OTHER, "two")
        self.follower.connection_lost("one")
        self.gate = Deferred()
        self.at(0, 8, MASTER, "next")
        self.rows(fact(5), writer=OTHER, link="two")
        self.assertEqual(self.seen, [])
        self.gate.callback(None)
        self.assertEqual(self.seen, [5])


class StopTests(HistoryCase):
    def test_the_end_of_the_process_ends_the_fetch_of_a_first_history(self) -> None:
        self.published = CatchUpError("refused")
        self.at(1, 1)
        self.process.lifetime.end()
        self.process.clock.advance(10_000)
        self.assertEqual((self.asked, self.flushLoggedErrors()), (1, []))

    def test_the_end_of_the_process_ends_a_first_fetch_that_waits(self) -> None:
        self.gate = Deferred()
        self.at(1, 1)
        self.process.lifetime.end()
        self.assertEqual((self.asked, self.flushLoggedErrors()), (1, []))

    def test_an_unexpected_error_of_a_first_fetch_is_logged(self) -> None:
        self.published = CatchUpError("refused")
        self.at(1, 1)
        self.published = ZeroDivisionError("a bug")
        with logged() as messages:
            self.process.clock.advance(FIRST_RETRY)
        self.assertEqual(messages, ["reading the history of orders"])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(begin(self.histories.followed(MASTER)), [()])
