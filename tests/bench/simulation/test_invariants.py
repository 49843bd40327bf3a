"""The invariants notice what is wrong."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.simulation.invariants import FollowerHistory, LinearOrder, WireCheck, WriterHistory
from replication.streams.facts import Fact
from replication.streams.interfaces import Page
from replication.wire.grammar import InstanceName, StreamName, Token

A, MASTER = StreamName("a"), InstanceName("master")


def fact(token: int, *texts: str) -> Fact:
    return Fact(Token(token), texts or (str(token),))


class InvariantTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.history = WriterHistory("master/a")
        self.history.commit([fact(2, "1", "2"), fact(3)])

    def assert_broken(self, number: str, *lines: str) -> None:
        check = WireCheck({MASTER: {A: self.history}}, [], "here:")
        with self.assertRaisesRegex(AssertionError, number):
            check.read("".join(f"{line}\n" for line in lines).encode())

    def test_lines_that_are_right(self) -> None:
        trace: list[str] = []
        check = WireCheck({MASTER: {A: self.history}}, trace, "here:")
        check.read(b"POSITION a master 1 1\nPING 1\nRDATA a master batch 1\nRDATA a master 2 2\nRDATA a mas")
        check.read(b"ter 3 3\n")
        self.assertEqual((check.lines, len(trace), self.history.published), (4, 4, 3))

    def test_lines_that_are_wrong(self) -> None:
        first = "POSITION a master 1 1"
        self.assert_broken("I4, I5, I6", first, "RDATA a master 3 3")
        self.assert_broken("I4, I5, I6", first, "RDATA a master 2 2")
        self.assert_broken("I4: POSITION", first, "RDATA a master batch 1", "POSITION a master 1 1")
        self.assert_broken("I6: POSITION", first, "POSITION a master 1 2")
        self.assert_broken("I7", "POSITION a master 3 3", "POSITION a master 2 2")
        self.assert_broken("I7", "POSITION a master 3 3", "RDATA a master 3 3")
        self.assert_broken("backwards", "POSITION a master 3 2")

    def test_a_writer_neither_repeats_a_token_nor_commits_below_what_is_published(self) -> None:
        self.assertRaisesRegex(AssertionError, "twice", self.history.commit, [fact(2)])
        self.history.publish(Token(5))
        self.assertRaisesRegex(AssertionError, "I5", self.history.commit, [fact(4)])

    def test_a_page_has_all_facts_and_nothing_early(self) -> None:
        self.history.publish(Token(2))
        page = Page([fact(2, "1", "2")], Token(2), limited=False)
        self.history.check_page(page, Token(1), Token(3))
        for wrong in (Page([], Token(2), limited=False), Page([*page.facts, fact(3)], Token(3), limited=False)):
            self.assertRaises(AssertionError, self.history.check_page, wrong, Token(1), Token(3))

    def test_a_follower_applies_each_fact_once(self) -> None:
        self.history.publish(Token(3))
        follower = FollowerHistory(self.history)
        follower.move(Token(2), [fact(2, "1", "2")])
        self.assertEqual(follower.lacks(), [fact(3)])
        for upto, facts in ((2, []), (3, []), (3, [fact(3), fact(3)]), (4, [fact(3)])):
            self.assertRaises(AssertionError, follower.move, Token(upto), facts)

    def test_a_follower_lacks_only_facts_that_it_has_left_out(self) -> None:
        self.history.publish(Token(3))
        follower = FollowerHistory(self.history)
        follower.left_out.append((Token(1), Token(2)))
        self.assertRaisesRegex(AssertionError, "I1", follower.move, Token(3), [])
        follower.move(Token(3), [fact(3)])
        follower.check()
        follower.left_out.clear()
        self.assertRaisesRegex(AssertionError, "I1", follower.check)

    def test_a_stale_relay_may_send_what_its_writer_has_lost_but_in_order(self) -> None:
        check = WireCheck({MASTER: {A: self.history}}, [], "here:", stale=True)
        check.read(b"POSITION a master 1 1\nRDATA a master 7 7\n")
        self.assertEqual(self.history.published, 0)
        self.assertRaisesRegex(AssertionError, "I7", check.read, b"RDATA a master 6 6\n")

    def test_linear_order(self) -> None:
        order = LinearOrder("a")
        order.apply([(MASTER, fact(2)), (InstanceName("second"), fact(4))])
        self.assertRaisesRegex(AssertionError, "I17", order.apply, [(MASTER, fact(3))])
        order.excused.add(MASTER)
        order.apply([(MASTER, fact(3))])
