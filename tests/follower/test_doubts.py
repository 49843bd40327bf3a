"""After a failover, a fact may be lost below one that is kept: the facts of a follower are counted."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import CatchUpError, StoreError
from replication.follower.catch_up import CatchUpSources
from replication.follower.doubts import (
    SLOT,
    SLOTS,
    Doubts,
    FactCount,
    RecentFacts,
    Slot,
    count_ids,
    count_with_rows,
)
from replication.follower.history import FollowedHistories
from replication.follower.merge import MergingFollower
from replication.follower.stream import FollowMode, StreamFollower
from replication.streams.cursor import Apply, Reset
from replication.streams.definitions import CACHES
from replication.streams.history import Epoch
from replication.streams.interfaces import Page, Write
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import logged, now
from tests.follower.cases import HELLO, MASTER, ORDERS, FollowerCase, WorkerCase, fact, position, rdata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.facts import Fact
    from replication.streams.history import History
    from tests.follower.cases import First

FIRST = Epoch("a.00000001", Token(1), Token(1))
PROMOTED = Epoch("b.00000002", Token(4), Token(8))  # 5 to 8 are in doubt
LESS = [*map(fact, (2, 3, 4, 5, 7, 8))]  # 6 is lost
RESTARTED = Epoch("b.00000001", Token(4), Token(8))  # as after a kill


def facts(tokens: Iterable[int]) -> list[Fact]:
    return [*map(fact, tokens)]


def stored(upto: int, *slots: tuple[int, Iterable[int]]) -> str:
    """Return the text that is stored after these facts, each slot with what is below it."""
    counts = [(after, count_ids(facts(tokens))) for after, tokens in slots]
    return RecentFacts(Token(upto), tuple([Slot(Token(after), *each) for after, each in counts])).encode()


class DoubtsCase(FollowerCase):
    """The writer has the facts ``found`` after it has come back."""

    undo: Callable[..., object] | None = None
    undone = False
    linear = False

    def setUp(self) -> None:
        self.published: History = [FIRST]
        self.found: Sequence[Fact] | Exception | None = facts(range(2, 9))
        self.counted: list[tuple[int, int]] = []
        super().setUp()

    def make_follower(
        self, function: Callable[..., object] | None = None, first: First | None = None
    ) -> StreamFollower:
        copied = self.mode is FollowMode.COPIED
        doubts = Doubts(
            stream=ORDERS,
            copies=self.store if copied else None,
            clock=self.process.clock,
            count=self.count,
            undone=self.undone,
        )
        histories = FollowedHistories(
            stream=ORDERS,
            store=self.store,
            follower="" if copied else "worker1",
            lifetime=self.process.lifetime,
            fetch=self.history,
            doubts=doubts,
        )
        arguments: dict[str, Any] = {**self.process.arguments, "histories": histories, "undo": self.undo}
        if self.linear:
            arguments["all_positions_received"] = lambda: True
        made = MergingFollower if self.linear else StreamFollower
        return made(name=ORDERS, mode=self.mode, function=function, first=first, **arguments)

    async def history(self, stream: StreamName, writer: InstanceName) -> History:
        assert (stream, writer) == (ORDERS, MASTER)
        return self.published

    async def count(
        self, stream: StreamName, writer: InstanceName, history: History, *, after: Token, upto: Token
    ) -> FactCount | None:
        assert (stream, writer, [*history]) == (ORDERS, MASTER, [*self.published])
        self.counted.append((after, upto))
        if isinstance(self.found, Exception):
            raise self.found
        if self.found is None:
            return None
        return count_with_rows(stream, [each for each in self.found if after < each.token <= upto])

    def follow_to_eight(self) -> None:
        """Follow the writer up to 8, and lose the connection."""
        self.at(0, 1)
        self.rows(*map(fact, range(2, 5)))
        self.process.clock.advance(SLOT)
        for facts in (range(5, 7), range(7, 9)):
            self.rows(*map(fact, facts))
        self.follower.connection_lost("link")

    def come_back(self, *then: Epoch) -> list[str]:
        """Let the writer come back with these epochs, and at 9; return what is logged."""
        self.published = [FIRST, *then]
        with logged() as messages:
            self.at(9, 9, link="next")
        return messages


class CopyTests(DoubtsCase):
    def tokens(self) -> list[int]:
        return sorted(self.store._streams[ORDERS].facts)

    def test_a_copy_goes_back_if_an_external_writer_has_used_ids_of_a_lost_position(self) -> None:
        """It received 8 without facts 7 and 8, which were rolled back; new rows have these IDs."""
        self.at(0, 1)
        self.rows(*map(fact, range(2, 7)))
        self.at(6, 8)
        self.follower.connection_lost("link")
        self.found = facts(range(2, 9))
        self.process.pages = [Page([*map(fact, range(5, 10))], Token(9), limited=False)]
        self.assertIn("master went back from 8 to 4 on orders", self.come_back(PROMOTED)[0])
        self.assertEqual((self.counted, self.tokens()), ([(4, 8)], [*range(2, 10)]))

    def test_a_copy_goes_back_if_the_writer_has_fewer_facts(self) -> None:
        self.follow_to_eight()
        self.found = LESS
        self.process.pages = [Page([*map(fact, (5, 7, 8, 9))], Token(9), limited=False)]
        self.assertIn("master went back from 8 to 4 on orders", self.come_back(PROMOTED)[0])
        self.assertEqual((self.counted, self.process.asked), ([(4, 8)], [(4, 9)]))
        self.assertEqual(self.tokens(), [2, 3, 4, 5, 7, 8, 9])

    def test_a_copy_goes_back_if_as_many_facts_have_other_ids_or_other_rows(self) -> None:
        """External writers have inserted them before the writer came back."""
        for new in ([fact(5), fact(7)], [fact(5), fact(6, '["another"]')]):
            self.setUp()
            self.at(0, 1)
            self.rows(*map(fact, range(2, 7)))
            self.at(6, 8)
            self.follower.connection_lost("link")
            self.found = [*facts(range(2, 5)), *new]
            self.process.pages = [Page([*new, fact(9)], Token(9), limited=False)]
            self.assertIn("master went back from 8 to 4 on orders", self.come_back(PROMOTED)[0])
            stored = self.store._streams[ORDERS].facts
            self.assertEqual(self.tokens(), [2, 3, 4, *[each.token for each in new], 9])
            self.assertIn(new[1].texts[0], str(stored))

    def test_a_copy_stays_where_it_is_if_nothing_is_lost_or_that_cannot_be_known(self) -> None:
        for found in (facts(range(2, 9)), None):
            self.setUp()
            self.follow_to_eight()
            self.found = found
            self.process.pages = [Page([fact(9)], Token(9), limited=False)]
            self.assertEqual(self.come_back(PROMOTED), [])
            self.assertEqual((self.counted[0], self.process.asked, self.tokens()), ((4, 8), [(8, 9)], [*range(2, 10)]))

    def test_a_copy_of_which_facts_are_gone_stays_where_it_is(self) -> None:
        """A start with ``--skip-gone`` has left out facts of the range in doubt."""
        self.follow_to_eight()
        now(self.store.forget_facts(ORDERS, MASTER, Token(6), delete=False))
        self.process.pages = [Page([fact(9)], Token(9), limited=False)]
        self.assertEqual((self.come_back(PROMOTED), self.counted, self.process.asked), ([], [], [(8, 9)]))

    def test_nothing_is_counted_if_no_fact_is_in_doubt(self) -> None:
        self.follow_to_eight()
        self.process.pages = [Page([fact(9)], Token(9), limited=False)]
        self.assertEqual((self.come_back(Epoch("b.00000002", Token(8), Token(8))), self.counted), ([], []))

    def test_a_copy_counts_also_if_the_state_of_the_tables_does_not_show_a_restore(self) -> None:
        """An application has inserted as many rows in its table as the restore has lost, before the master started."""
        for epoch in (RESTARTED, Epoch("b", Token(4), Token(8))):
            self.setUp()
            self.follow_to_eight()
            new = [fact(token, '["new"]') for token in range(5, 9)]
            self.found = [*facts(range(2, 5)), *new]
            self.process.pages = [Page([*new, fact(9)], Token(9), limited=False)]
            self.assertIn("master went back from 8 to 4 on orders", self.come_back(epoch)[0])
            self.assertEqual((self.counted, self.tokens()), ([(4, 8)], [*range(2, 10)]))
            self.assertIn("new", str(self.store._streams[ORDERS].facts))

    def test_facts_that_are_received_and_in_doubt_are_fetched_again(self) -> None:
        self.at(0, 1)
        self.rows(*map(fact, range(2, 5)))
        self.follower.connection_lost("link")
        self.published = [FIRST, PROMOTED]
        self.at(8, 8, link="next")
        self.assertEqual((self.counted, self.process.asked), ([], [(4, 8)]))

    def test_facts_below_the_start_are_in_doubt_also_if_a_position_above_it_was_received(self) -> None:
        self.follow_to_eight()
        self.at(8, 8, link="next")
        self.at(13, 13, link="next")
        self.assertEqual(self.process.asked, [(8, 13)])  # no source has that
        self.follower.connection_lost("next")
        self.found, self.published = LESS, [FIRST, PROMOTED]
        self.process.pages = [Page([*map(fact, (5, 7, 8))], Token(8), limited=False)]
        self.at(8, 8, link="third")
        self.process.clock.advance(1.0)
        self.assertEqual((self.counted, self.tokens()), ([(4, 8)], [2, 3, 4, 5, 7, 8]))

    def test_facts_wait_while_no_source_can_be_counted(self) -> None:
        self.follow_to_eight()
        self.found = CatchUpError("down")
        self.assertIn(
            "checking the history of orders of master after 8: CatchUpError: down", self.come_back(PROMOTED)[0]
        )
        self.found = facts(range(2, 9))
        self.process.pages = [Page([fact(9)], Token(9), limited=False)]
        self.process.clock.advance(1.0)
        self.assertEqual(self.tokens(), [*range(2, 10)])


class CountTests(SynchronousTestCase):
    def test_a_count_is_the_same_in_any_order_and_however_it_is_divided(self) -> None:
        for count in (count_ids, partial(count_with_rows, ORDERS)):
            whole = count(facts(range(2, 9)))
            for one, other in ((range(2, 5), range(5, 9)), ((8, 3, 4, 7), (6, 2, 5)), ((), range(8, 1, -1))):
                self.assertEqual(count(facts(one)).plus(count(facts(other))), whole)
                self.assertLess(max(whole.ids or 0, whole.rows or 0), 2**32)

    def test_as_many_facts_with_other_ids_do_not_match(self) -> None:
        counts = [count_ids(facts(each)) for each in combinations(range(995, 1005), 5)]
        self.assertEqual(len(set(counts)), len(counts))
        self.assertFalse(counts[0].matches(counts[1]))
        self.assertTrue(counts[0].matches(counts[0]))

    def test_the_same_ids_with_other_rows_do_not_match(self) -> None:
        """Also if rows have exchanged their IDs, or are divided into other facts."""
        cases = [
            [fact(2, "[1]", "[2]"), fact(3, "[3]")],
            [fact(2, "[1]", "[2]"), fact(3, "[4]")],
            [fact(2, "[1]"), fact(3, "[2]", "[3]")],
            [fact(2, "[3]"), fact(3, "[1]", "[2]")],
            [fact(2, "[2]", "[1]"), fact(3, "[3]")],
            [fact(2, "[1]", "[2]"), fact(3, '["3\u00e9😀"]')],
        ]
        counts = [count_with_rows(ORDERS, each) for each in cases]
        self.assertEqual((len(set(counts)), len({each.ids for each in counts})), (len(cases), 1))
        for one, other in combinations(counts, 2):
            self.assertFalse(one.matches(other))

    def test_what_one_side_does_not_know_is_not_compared(self) -> None:
        known = count_with_rows(ORDERS, facts((2, 3)))
        for ids, rows in ((None, None), (known.ids, None), (None, known.rows)):
            self.assertTrue(known.matches(FactCount(2, ids, rows)))
            self.assertTrue(FactCount(2, ids, rows).matches(known))
            self.assertFalse(FactCount(3, ids, rows).matches(known))

    def test_a_hidden_access_token_changes_nothing(self) -> None:
        """A relay may hide what its writer shows."""
        rows = [f'["get_user_by_access_token",{keys},1]' for keys in ('["secret"]', '["other"]', "null")]
        self.assertEqual(len({count_with_rows(CACHES, [fact(2, row)]) for row in rows}), 1)
        self.assertEqual(len({count_with_rows(ORDERS, [fact(2, row)]) for row in rows}), 3)


class FunctionTests(DoubtsCase):
    mode = FollowMode.APPLIED

    def setUp(self) -> None:
        self.applied: list[int] = []
        super().setUp()

    def make_follower(
        self, function: Callable[..., object] | None = None, first: First | None = None
    ) -> StreamFollower:
        self.undo = self.forget
        return super().make_follower(self.apply, first)

    def apply(self, facts: Sequence[Fact], _: ApplyTransaction) -> None:
        self.applied += [each.token for each in facts]

    def forget(self, _: InstanceName, to: Token, __: ApplyTransaction) -> None:
        self.applied = [token for token in self.applied if token <= to]

    def test_the_facts_of_the_last_seconds_are_counted(self) -> None:
        self.follow_to_eight()
        self.found = LESS
        self.process.pages = [Page([*map(fact, (5, 7, 8, 9))], Token(9), limited=False)]
        self.come_back(PROMOTED)
        self.assertEqual((self.counted, self.applied), ([(4, 8)], [2, 3, 4, 5, 7, 8, 9]))

    def test_a_function_receives_rows_that_have_the_ids_of_a_lost_position(self) -> None:
        self.at(0, 1)
        self.rows(*map(fact, range(2, 5)))
        self.process.clock.advance(SLOT)
        self.at(4, 8)
        self.follower.connection_lost("link")
        self.found = facts((2, 3, 4, 7, 8))
        self.process.pages = [Page([fact(7), fact(8), fact(9)], Token(9), limited=False)]
        self.come_back(PROMOTED)
        self.assertEqual((self.position(), self.applied), (9, [2, 3, 4, 7, 8, 9]))

    def test_a_function_goes_back_if_as_many_facts_have_other_ids(self) -> None:
        self.at(0, 1)
        self.rows(*map(fact, range(2, 7)))
        self.at(6, 8)
        self.follower.connection_lost("link")
        self.found = facts((2, 3, 4, 5, 7))
        self.process.pages = [Page(facts((5, 7, 9)), Token(9), limited=False)]
        self.assertIn("master went back from 8 to 4 on orders", self.come_back(PROMOTED)[0])
        self.assertEqual((self.position(), self.applied), (9, [2, 3, 4, 5, 7, 9]))

    def test_a_function_that_is_undone_goes_back_if_the_same_ids_have_other_rows(self) -> None:
        """Without a function of ``on_reset``, the stream would stop because an application has changed a row."""
        for self.undone, after in ((True, 4), (False, 8)):
            self.setUp()
            self.follow_to_eight()
            self.start_again()
            self.found = [*facts(range(2, 8)), fact(8, '["another"]')]
            self.come_back(PROMOTED)
            self.assertEqual((self.counted, self.process.asked), ([(4, 8)], [(after, 9)]))

    def test_only_a_function_that_is_undone_counts_without_a_failover(self) -> None:
        """Rows of a mapped table may be deleted at any time: any other function would stop because of that."""
        for self.undone, counted in ((True, [(4, 8)]), (False, [])):
            for epoch in (RESTARTED, Epoch("b", Token(4), Token(8))):
                self.setUp()
                self.follow_to_eight()
                self.found = [*facts(range(2, 8)), fact(8, '["another"]')]
                self.process.pages = [Page([fact(9)], Token(9), limited=False)]
                self.come_back(epoch)
                self.assertEqual(self.counted, counted)

    def test_a_function_that_is_undone_stays_where_it_is_if_nothing_is_lost(self) -> None:
        self.undone = True
        self.setUp()
        self.follow_to_eight()
        rows = count_with_rows(ORDERS, facts(range(2, 5))).rows
        self.assertIn(f",{rows}],[4,4,", self.counts() or "")
        self.start_again()
        self.process.pages = [Page([fact(9)], Token(9), limited=False)]
        self.assertEqual((self.come_back(PROMOTED), self.process.asked), ([], [(8, 9)]))

    def test_a_text_without_checksums_compares_the_number_only(self) -> None:
        for found, after in (([*facts(range(2, 7)), fact(7, '["another"]'), fact(8)], 8), (LESS, 4)):
            self.setUp()
            self.follow_to_eight()
            self.store._counts[ORDERS, MASTER] = "[8,[[0,3],[4,4]]]"
            self.start_again()
            self.found = found
            self.come_back(PROMOTED)
            self.assertEqual((self.counted, self.process.asked), ([(4, 8)], [(after, 9)]))

    def start_again(self) -> None:
        """Start another process on the same store."""
        self.follower = self.make_follower()
        now(self.follower.open())

    def counts(self) -> str | None:
        return now(self.store.applied_counts(ORDERS, InstanceName("worker1"))).get(MASTER)

    def test_facts_that_an_earlier_process_applied_are_counted(self) -> None:
        self.follow_to_eight()
        self.assertEqual(self.counts(), stored(8, (0, range(2, 5)), (4, range(5, 9))))
        self.start_again()
        self.found = LESS
        self.process.pages = [Page([*map(fact, (5, 7, 8, 9))], Token(9), limited=False)]
        self.assertIn("master went back from 8 to 4 on orders", self.come_back(PROMOTED)[0])
        self.assertEqual((self.counted, self.applied), ([(4, 8)], [2, 3, 4, 5, 7, 8, 9]))
        self.assertEqual(self.counts(), stored(9, (4, (5, 7, 8, 9))))

    def test_a_new_process_adds_to_the_stored_number(self) -> None:
        self.at(0, 1)
        self.rows(*map(fact, range(2, 5)))
        self.follower.connection_lost("link")
        self.start_again()
        self.at(4, 4)
        self.rows(*map(fact, range(5, 9)))
        self.follower.connection_lost("link")
        self.start_again()
        self.found, self.process.pages = [*LESS, fact(9)], [Page([*map(fact, range(2, 10))], Token(9), limited=False)]
        self.come_back(PROMOTED)
        self.assertEqual((self.counted, self.position(), self.process.asked), ([(0, 8)], 9, [(4, 9)]))

    def test_a_transaction_that_is_repeated_is_counted_once(self) -> None:
        self.at(0, 1)
        self.store.errors["commit"] = StoreError("locked")
        self.rows(*map(fact, range(2, 5)))
        self.assertEqual(self.counts(), "[1,[[0,0,0,null]]]")
        self.store.errors.clear()
        self.process.clock.advance(1.0)
        self.assertEqual(self.counts(), stored(4, (0, range(2, 5))))

    def test_without_the_number_at_the_position_the_writer_is_trusted(self) -> None:
        """An older program stores none, and moves the position."""
        moved = Write(ORDERS, MASTER, Token(9), expected=Token(8), follower=InstanceName("worker1"))
        cases: list[tuple[Callable[[], object], int]] = [
            (lambda: self.store._counts.pop((ORDERS, MASTER)), 8),
            (lambda: now(self.store.commit([moved])), 9),
            (lambda: self.store._counts.update({(ORDERS, MASTER): '{"upto":8}'}), 8),
        ]
        for change, at in cases:
            self.setUp()
            self.follow_to_eight()
            change()
            self.start_again()
            self.found = LESS
            self.process.pages = [Page([fact(10)], Token(10), limited=False)]
            self.published = [FIRST, Epoch("b.00000002", Token(4), Token(9))]
            self.at(10, 10, link="next")
            self.assertEqual((self.counted, self.process.asked), ([], [(at, 10)]))

    def test_a_history_is_followed_anew_if_an_older_program_has_moved_the_position(self) -> None:
        """It stores no history: so facts of later epochs of the writer would look lost."""
        self.follow_to_eight()
        moved = Write(ORDERS, MASTER, Token(12), expected=Token(8), follower=InstanceName("worker1"))
        now(self.store.commit([moved]))
        with logged() as messages:
            self.start_again()
        self.assertEqual(len(messages), 1)
        self.assertIn("followed orders of master up to 12, and stores no history: that of master", messages[0])
        self.published = [FIRST, Epoch("b.00000001", Token(10), Token(10))]
        self.process.pages = [Page([fact(13)], Token(13), limited=False)]
        with logged() as messages:
            self.at(13, 13, link="next")
        self.assertEqual((messages, self.process.asked), ([], [(12, 13)]))
        self.assertEqual(now(self.store.history(ORDERS, MASTER, "worker1")), [*self.published])

    def test_a_function_that_is_undone_goes_back_if_its_facts_cannot_be_counted(self) -> None:
        """An older program stores no number; or the writer's position was settled more than ten seconds before."""
        for found, after in ((LESS, 4), (None, 8)):  # None: facts are gone
            self.undone = True
            self.setUp()
            self.follow_to_eight()
            self.store._counts.pop((ORDERS, MASTER))
            self.start_again()
            self.found = found
            self.come_back(PROMOTED)
            self.assertEqual((self.counted, self.process.asked), ([(4, 8)], [(after, 9)]))

    def test_a_fact_that_is_applied_again_is_not_counted_again(self) -> None:
        self.follow_to_eight()
        assert self.follower.histories is not None
        again = Apply([fact(5)], Token(8), Token(8))
        self.assertIsNone(self.follower.histories.counts_after(MASTER, again))
        self.follower.histories.applied(MASTER, again)
        self.assertEqual(
            self.follower.histories.counts_after(MASTER, Apply([], Token(8), Token(9))),
            stored(9, (0, range(2, 5)), (4, range(5, 9))),
        )

    def test_nothing_is_stored_for_a_writer_without_a_history(self) -> None:
        self.published = ()
        self.follow_to_eight()
        self.assertEqual((self.position(), self.counts()), (8, None))


class LinearTests(DoubtsCase):
    """A transaction of all writers may be in progress while the history of one of them is compared."""

    mode = FollowMode.APPLIED
    linear = True

    def make_follower(
        self, function: Callable[..., object] | None = None, first: First | None = None
    ) -> StreamFollower:
        self.answers: list[Deferred[None]] = []
        self.applied: list[int] = []
        return super().make_follower(self.apply, first)

    def apply(self, facts: Sequence[Fact], _: ApplyTransaction) -> None:
        self.applied += [each.token for each in facts]

    async def history(self, stream: StreamName, writer: InstanceName) -> History:
        for answer in self.answers:
            await answer
        return await super().history(stream, writer)

    async def count(
        self, stream: StreamName, writer: InstanceName, history: History, *, after: Token, upto: Token
    ) -> FactCount | None:
        return count_ids(facts(range(max(after, 1) + 1, upto + 1)))  # nothing is lost

    def test_facts_whose_transaction_ends_during_the_comparison_are_not_taken_for_lost_ones(self) -> None:
        for answer in ([], [Deferred[None]()]):
            self.setUp()
            self.at(0, 1)
            self.rows(*map(fact, range(2, 6)))
            self.store.close_gate("commit")
            self.rows(fact(6))
            self.follower.connection_lost("link")
            self.published = [FIRST, PROMOTED]
            self.answers = [*answer]
            self.process.pages = [Page([fact(7), fact(8)], Token(8), limited=False)]
            with logged() as messages:
                self.at(8, 8, link="next")
                self.store.open_gate("commit")  # before the history arrives, or after
                for each in answer:
                    each.callback(None)
            self.assertEqual((messages, self.applied, self.position()), ([], [2, 3, 4, 5, 6, 7, 8], 8))
            texts = now(self.store.applied_counts(ORDERS, InstanceName("worker1")))
            self.assertEqual(texts, {MASTER: stored(8, (0, range(2, 9)))})


class RecentFactsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.time = 0.0
        self.recent = RecentFacts(Token(0))

    def note(self, after: int, *tokens: int) -> None:
        self.recent = self.recent.with_step(Apply([*map(fact, tokens)], Token(after), Token(max(tokens))), self.time)

    def above(self, token: int) -> tuple[int, int] | None:
        found = self.recent.above(Token(token))
        return None if found is None else (found[0], found[1].facts)

    def test_a_place_at_or_below_the_token_is_found(self) -> None:
        self.note(0, 2, 3)
        self.note(3, 5)
        self.time += SLOT
        self.note(5, 6, 9)
        self.assertEqual([self.above(token) for token in (0, 4, 5, 7)], [(0, 5), (0, 5), (5, 2), (5, 2)])
        self.assertEqual(self.recent.above(Token(0)), (0, count_ids(facts((2, 3, 5, 6, 9)))))

    def test_older_facts_are_forgotten(self) -> None:
        for token in range(2, SLOTS + 4):
            self.note(token - 1, token)
            self.time += SLOT
        self.assertEqual((self.above(2), self.above(3)), (None, (3, SLOTS)))

    def test_steps_without_facts_let_no_facts_be_forgotten(self) -> None:
        """The position of a former writer is raised again and again."""
        self.note(0, 2, 3)
        for upto in range(4, SLOTS + 6):
            self.time += SLOT
            self.recent = self.recent.with_step(Apply([], Token(upto - 1), Token(upto)), self.time)
        self.assertEqual((self.recent.upto, self.above(1)), (SLOTS + 5, (0, 2)))
        self.note(SLOTS + 5, SLOTS + 7)
        self.assertEqual(self.above(3), (0, 3))
        self.time += SLOT
        self.note(SLOTS + 7, SLOTS + 8)
        self.assertEqual((self.above(SLOTS + 7), self.above(3)), ((SLOTS + 7, 1), (0, 4)))

    def test_a_reset_or_a_gap_begins_anew(self) -> None:
        self.note(0, 2, 3)
        self.recent = self.recent.with_step(Reset(Token(3), Token(2)), self.time)
        self.assertIsNone(self.above(3))
        self.note(2, 3)
        self.assertEqual((self.above(2), self.above(1)), ((2, 1), None))
        self.note(7, 8)
        self.assertEqual((self.above(7), self.above(2)), ((7, 1), None))

    def test_a_text_is_read_as_if_its_last_slot_began_now(self) -> None:
        self.note(0, 2, 3)
        self.time += SLOT
        self.note(3, 5)
        self.assertEqual(self.recent.encode(), "[5,[[0,2,3061161602,null],[3,1,3725584964,null]]]")
        found = RecentFacts.decode(self.recent.encode(), 100.0)
        slots = Slot(Token(0), 2, 3061161602), Slot(Token(3), 1, 3725584964)
        self.assertEqual(found, RecentFacts(Token(5), slots, 100.0))

    def test_a_text_without_checksums_is_read_and_its_facts_have_none(self) -> None:
        """An older program has stored it."""
        found = RecentFacts.decode("[5,[[0,2],[3,1]]]", 0.0)
        assert found is not None
        self.recent = found
        self.note(5, 6)
        self.assertEqual(self.recent.encode(), "[6,[[0,2,null,null],[3,2,null,null]]]")
        self.assertEqual(self.recent.above(Token(2)), (0, FactCount(4, None, None)))
        self.time += SLOT
        self.note(6, 8)
        self.assertEqual(self.recent.above(Token(6)), (6, count_ids([fact(8)])))
        self.assertEqual(self.recent.above(Token(3)), (3, FactCount(3, None, None)))

    def test_a_text_of_another_form_is_not_read(self) -> None:
        for text in ("", "[5]", "[5,[[0]]]", '{"upto":5}'):
            self.assertIsNone(RecentFacts.decode(text, 0.0))


class WorkerTests(WorkerCase):
    def test_facts_in_doubt_are_counted_at_the_process_that_sent_the_position(self) -> None:
        """The writer comes back from a failover; see docs/protocol/following.md E7."""
        published = [Epoch("a.1", Token(1), Token(1))]
        counted: list[object] = []

        async def history(*_: object) -> History:
            return [*published]

        async def count(_: object, *of: object, **tokens: int) -> FactCount:
            counted.extend([*of, tokens])
            return FactCount(1, None, None)

        self.patch(CatchUpSources, "history", history)
        self.patch(CatchUpSources, "count", count)
        writer = self.serve(HELLO + position(1, 1), HELLO + position(3, 3))
        self.start()
        self.send(writer, rdata(3))
        published.append(Epoch("b.2", Token(2), Token(3)))
        self.net.cut()
        self.net.run(1.0)
        self.assertEqual(counted, ["tcp:127.0.0.1:9092", "orders", "master", published, {"after": 2, "upto": 3}])

    def test_rows_are_counted_for_a_function_with_another_that_undoes_it(self) -> None:
        for undo, rows in ((False, None), (True, count_with_rows(ORDERS, [fact(3, "[]")]).rows)):
            self.setUp()
            self.apply()
            if undo:
                self.worker.on_reset("orders")(lambda writer, to, txn: None)

            async def history(*_: object) -> History:
                return [FIRST]

            self.patch(CatchUpSources, "history", history)
            writer = self.serve(HELLO + position(1, 1))
            self.start()
            self.send(writer, rdata(3))
            text = now(self.store.applied_counts(ORDERS, InstanceName("worker1")))[MASTER]
            found = RecentFacts.decode(text, 0.0)
            assert found is not None
            self.assertEqual(found.slots[-1].rows, rows)
