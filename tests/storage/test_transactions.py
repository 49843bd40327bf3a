"""Group commit: the outcome for each caller.  The contracts test the rest of transactions."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from replication.deferreds import Lock
from replication.errors import StoreError
from replication.storage.transactions import CallGroup

if TYPE_CHECKING:
    from collections.abc import Sequence


class CallGroupTests(SynchronousTestCase):
    """Batches are names here, and the test decides when a commit ends."""

    def setUp(self) -> None:
        self.asked: list[tuple[list[str], Deferred[Sequence[BaseException | None]]]] = []
        self.line = Lock()
        self.group: CallGroup[str, None] = CallGroup(self.line, self.commit)

    def commit(self, batches: Sequence[str]) -> Deferred[Sequence[BaseException | None]]:
        done: Deferred[Sequence[BaseException | None]] = Deferred()
        self.asked.append(([*batches], done))
        return done

    def test_what_comes_during_a_commit_shares_the_next_one(self) -> None:
        each = [self.group.add(name) for name in ("one", "two", "three")]
        self.assertEqual([names for names, _ in self.asked], [["one"]])
        self.asked[0][1].callback([None])
        self.successResultOf(each[0])
        self.assertEqual([names for names, _ in self.asked], [["one"], ["two", "three"]])

    def test_each_caller_receives_its_own_outcome(self) -> None:
        self.line.acquire()
        good, bad = self.group.add("good"), self.group.add("bad")
        self.line.release()
        self.asked[0][1].callback([None, StoreError("no")])
        self.successResultOf(good)
        self.failureResultOf(bad, StoreError)

    def test_a_commit_that_raises_fails_all_and_the_next_goes_on(self) -> None:
        first, second = self.group.add("one"), self.group.add("two")
        self.asked[0][1].errback(ZeroDivisionError())
        self.failureResultOf(first, ZeroDivisionError)
        self.asked[1][1].callback([None])
        self.successResultOf(second)
        self.assertFalse(self.line.locked)

    def test_batches_that_arrive_while_others_collect_join_the_same_commit(self) -> None:
        gathered: Deferred[None] = Deferred()
        group: CallGroup[str, None] = CallGroup(self.line, self.commit, collect=lambda: gathered)
        group.add("one")
        group.add("two")
        self.assertEqual(self.asked, [])
        gathered.callback(None)
        self.assertEqual([names for names, _ in self.asked], [["one", "two"]])

    def test_an_unexpected_error_before_the_call_fails_all_that_wait_and_the_next_goes_on(self) -> None:
        """Before, each later append waited for ever, and the process was ready."""
        gathered: Deferred[None] = Deferred()
        gathering = [gathered, succeed(None)]
        group: CallGroup[str, None] = CallGroup(self.line, self.commit, collect=lambda: gathering.pop(0))
        each = [group.add("one"), group.add("two")]
        gathered.errback(ZeroDivisionError())
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        for done in each:
            self.failureResultOf(done, ZeroDivisionError)
        self.assertFalse(self.line.locked)
        later = group.add("three")
        self.asked[0][1].callback([None])
        self.successResultOf(later)

    def test_callers_of_a_call_that_was_lost_receive_an_error(self) -> None:
        """The garbage collector ends a coroutine whose Deferred has lost its callbacks."""
        lost = self.group.add("one")
        self.asked.clear()
        gc.collect()
        self.failureResultOf(lost, StoreError)
        self.assertFalse(self.line.locked)

    def test_items_without_a_result_come_first_in_the_next_call(self) -> None:
        self.line.acquire()
        each = [self.group.add(name) for name in ("one", "two", "three")]
        self.line.release()
        late = self.group.add("late")
        self.asked[0][1].callback([None])
        self.successResultOf(each[0])
        self.assertEqual([names for names, _ in self.asked[1:]], [["two", "three", "late"]])
        self.asked[1][1].callback([None, StoreError("no")])
        self.successResultOf(each[1])
        self.failureResultOf(each[2], StoreError)
        self.assertEqual([names for names, _ in self.asked[2:]], [["late"]])
        self.asked[2][1].callback([None])
        self.successResultOf(late)
        self.assertFalse(self.line.locked)

    def test_any_base_exception_is_the_outcome_of_its_item(self) -> None:
        waiting = self.group.add("one")
        self.asked[0][1].callback([SystemExit()])
        self.failureResultOf(waiting, SystemExit)

    def test_a_batch_whose_caller_is_cancelled_is_committed(self) -> None:
        self.line.acquire()
        waiting = self.group.add("one")
        waiting.addErrback(lambda _: None)
        waiting.cancel()
        self.line.release()
        self.assertEqual([names for names, _ in self.asked], [["one"]])
        self.asked[0][1].callback([None])
