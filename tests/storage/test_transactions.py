"""What both SQL stores share: their contracts hold them to most of it; here is who is told what of a shared commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred, DeferredLock
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.storage.transactions import CommitGroup

if TYPE_CHECKING:
    from collections.abc import Sequence


class CommitGroupTests(SynchronousTestCase):
    """Batches are names here, and a commit is done when the test says so."""

    def setUp(self) -> None:
        self.asked: list[tuple[list[str], Deferred[Sequence[Exception | None]]]] = []
        self.line = DeferredLock()
        self.group = CommitGroup(self.line, self.commit)

    def commit(self, batches: Sequence[str]) -> Deferred[Sequence[Exception | None]]:
        done: Deferred[Sequence[Exception | None]] = Deferred()
        self.asked.append(([*batches], done))
        return done

    def test_what_comes_during_a_commit_shares_the_next_one(self) -> None:
        each = [self.group.add(name) for name in ("one", "two", "three")]
        self.assertEqual([names for names, _ in self.asked], [["one"]])
        self.asked[0][1].callback([None])
        self.successResultOf(each[0])
        self.assertEqual([names for names, _ in self.asked], [["one"], ["two", "three"]])

    def test_each_is_told_what_became_of_it(self) -> None:
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

    def test_those_who_ask_while_others_gather_are_in_the_same_commit(self) -> None:
        gathered: Deferred[None] = Deferred()
        group = CommitGroup(self.line, self.commit, gather=lambda: gathered)
        group.add("one")
        group.add("two")
        self.assertEqual(self.asked, [])
        gathered.callback(None)
        self.assertEqual([names for names, _ in self.asked], [["one", "two"]])

    def test_whoever_no_longer_waits_is_committed_all_the_same(self) -> None:
        self.line.acquire()
        waiting = self.group.add("one")
        waiting.addErrback(lambda _: None)
        waiting.cancel()
        self.line.release()
        self.assertEqual([names for names, _ in self.asked], [["one"]])
        self.asked[0][1].callback([None])
