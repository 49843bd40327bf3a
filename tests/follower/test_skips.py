"""What people decide about facts that a function cannot take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from twisted.internet.defer import Deferred

from replication.errors import StoppingError, StoreError, StreamError, UnknownStreamError
from replication.streams.interfaces import Write
from replication.streams.skips import FailedFact, FailedFactAction, SkippedFact, SkipState
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import begin, error_of, logged, now
from tests.follower.cases import HELLO, WorkerCase, fact, position, rdata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.facts import Fact


class SkipsTests(WorkerCase):
    def setUp(self) -> None:
        super().setUp()
        self.poison = {3}
        self.applied: list[int] = []
        self.writer = self.serve(HELLO + position(1, 1) + position(1, 1, "stock"))

    def make_it_fail(self) -> None:
        @self.worker.on("orders")
        def apply(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            if self.poison & {fact.token for fact in facts}:
                raise ValueError("no")
            self.applied += [fact.token for fact in facts]

        self.start()
        with logged():
            self.send(self.writer, rdata(2), rdata(3), rdata(4))
            self.net.run(3.0)
        self.flushLoggedErrors(ValueError)

    def decide(self, what: str, stream: str = "orders", token: int = 3, writer: str = "master") -> list[Any]:
        return begin(getattr(self.worker.served.skips, what)(stream, writer, Token(token)))

    def test_the_fact_that_fails_is_skipped_and_applied_later(self) -> None:
        self.make_it_fail()
        with logged():
            (skipped,) = self.decide("skip")
            (again,) = self.decide("skip")
        self.assertEqual((skipped.state, again, self.at()), (SkipState.SKIPPED, skipped, 4))
        self.assertEqual(now(self.worker.served.skips.skipped("orders", 9)), [skipped])  # type: ignore[union-attr]
        self.poison.clear()
        with logged():
            (applied,) = self.decide("retry")
            (again,) = self.decide("retry")
        self.assertEqual((applied.state, again.state), (SkipState.APPLIED, SkipState.APPLIED))
        samples = {each.name: each.value for each in self.worker.served.samples() if "stream" in each.labels}
        self.assertEqual(samples["facts_skipped_total"], 1)

    def test_two_requests_at_once_are_one(self) -> None:
        """The database answers the first one late: the second one would be done before."""
        self.make_it_fail()
        for what, state in (("skip", SkipState.SKIPPED), ("retry", SkipState.APPLIED)):
            if what == "retry":
                self.poison.clear()
            find, delayed = self.store.skipped_facts, Deferred[None]()

            async def late(*args: Any, find: Any = find, delayed: Deferred[None] = delayed, **kwargs: Any) -> Any:
                found = await find(*args, **kwargs)
                await delayed
                return found

            with logged():
                with patch.object(self.store, "skipped_facts", late):
                    first = self.decide(what)
                second = self.decide(what)
                delayed.callback(None)
            self.assertEqual([each.state for each in (*first, *second)], [state] * 2)
        self.assertEqual(self.applied, [2, 4, 3])

    def test_the_function_of_the_application_decides(self) -> None:
        failed: list[FailedFact] = []

        @self.worker.on_failed_fact("orders", attempts=1)
        def decide(each: FailedFact, _: ApplyTransaction) -> FailedFactAction:
            failed.append(each)
            return FailedFactAction.SKIP

        self.make_it_fail()
        self.assertEqual(([(each.fact.token, each.attempts) for each in failed], self.at()), ([(3, 1)], 4))
        skips = self.worker.served.skips
        assert skips is not None
        self.assertEqual([each.decided_by for each in now(skips.skipped("orders", 9))], ["function"])

    def test_what_cannot_be_is_refused(self) -> None:
        self.make_it_fail()
        for what, stream, token, kind, why in (
            ("skip", "orders", 2, StreamError, "fact 2 of stream 'orders' by 'master' does not fail: 3 does"),
            ("retry", "orders", 3, StreamError, "fact 3 of stream 'orders' by 'master' was not skipped here"),
            ("skip", "stock", 3, StreamError, "stream 'stock' has no function here, so no fact of it can fail"),
            ("skip", "x" * 200, 3, UnknownStreamError, f"stream '{'x' * 100}' is not followed here"),
        ):
            error = error_of(self.decide(what, stream, token))
            self.assertEqual((type(error), str(error)), (kind, why))
        for writer, near in (("maste", "; did you mean master?"), ("other", "; known: master")):
            error = error_of(self.decide("skip", writer=writer))
            self.assertEqual(str(error), f"no writer {writer!r} of stream 'orders' is followed here{near}")
            if isinstance(error, UnknownStreamError):
                self.assertEqual(error.stream, stream)

    def test_a_copy_skips_nothing(self) -> None:
        self.start()
        self.assertEqual(
            str(error_of(self.decide("skip"))),
            "stream 'orders' is copied here, and a copy is complete: others read it. Correct what its error names, "
            "and the copy goes on",
        )

    def keep(self, token: int, state: SkipState, stream: str = "orders", writer: str = "old") -> None:
        """Store a fact of a former run as skipped, or as requested to be."""
        skipped = SkippedFact(StreamName(stream), InstanceName(writer), fact(token), state)
        write = Write(skipped.stream, skipped.writer, Token(token), follower=InstanceName("worker1"), skipped=[skipped])
        now(self.store.transaction().commit([write]))

    def test_a_fact_whose_skip_is_only_requested_is_not_applied_again(self) -> None:
        self.make_it_fail()
        self.keep(5, SkipState.SKIP_REQUESTED)
        self.assertIn(
            "fact 5 of stream 'orders' by 'old' was not skipped",
            str(error_of(self.decide("retry", token=5, writer="old"))),
        )

    def test_a_fact_of_a_writer_that_was_not_received_is_not_applied_again(self) -> None:
        self.make_it_fail()
        self.keep(5, SkipState.SKIPPED)
        self.assertEqual(
            str(error_of(self.decide("retry", token=5, writer="old"))),
            "no position of 'old' was received since the start: try again once it is connected",
        )

    def test_the_latest_of_one_stream_or_of_all_are_listed(self) -> None:
        self.make_it_fail()
        for token in (5, 6):
            self.keep(token, SkipState.SKIPPED)
        self.keep(7, SkipState.SKIPPED, "stock")
        skips = self.worker.served.skips
        assert skips is not None
        tokens = [
            [each.fact.token for each in now(skips.skipped(*which))]
            for which in ((None, 9), ("orders", 9), ("stock", 9), (None, 2), ("orders", 1))
        ]
        self.assertEqual(tokens, [[7, 6, 5], [6, 5], [7], [7, 6], [6]])

    def test_a_skip_that_is_not_stored_at_the_end_fails(self) -> None:
        self.make_it_fail()
        self.store.errors["commit"] = StoreError("locked", temporary=True)
        with logged():
            waiting = self.decide("skip")
            self.assertEqual(waiting, [])
            begin(self.worker.stop())
            self.net.run()
        error = error_of(waiting)
        assert isinstance(error, StoppingError)
        self.assertEqual((str(error), error.instance), ("'worker1' is stopping", "worker1"))
