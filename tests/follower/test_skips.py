"""What people decide about facts that a function cannot take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replication.errors import StoppingError, StoreError, StreamError, UnknownStreamError
from replication.streams.skips import SkipState
from replication.wire.grammar import Token
from tests.doubles import begin, error_of, logged, now
from tests.follower.cases import HELLO, WorkerCase, position, rdata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.facts import Fact


class SkipsTests(WorkerCase):
    def setUp(self) -> None:
        super().setUp()
        self.poison = {3}
        self.writer = self.serve(HELLO + position(1, 1) + position(1, 1, "stock"))

    def make_it_fail(self) -> None:
        @self.worker.on("orders")
        def apply(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            if self.poison & {fact.token for fact in facts}:
                raise ValueError("no")

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

    def test_what_cannot_be_is_refused(self) -> None:
        self.make_it_fail()
        for what, stream, token, kind, why in (
            ("skip", "orders", 2, StreamError, "3 does"),
            ("retry", "orders", 3, StreamError, "was not skipped here"),
            ("skip", "stock", 3, StreamError, "has no function here"),
            ("skip", "other", 3, UnknownStreamError, "is not followed here"),
        ):
            error = error_of(self.decide(what, stream, token))
            self.assertIsInstance(error, kind)
            self.assertIn(why, str(error))

    def test_a_copy_skips_nothing(self) -> None:
        self.start()
        self.assertIn("a copy is complete", str(error_of(self.decide("skip"))))

    def test_a_skip_that_is_not_stored_at_the_end_fails(self) -> None:
        self.make_it_fail()
        self.store.errors["commit"] = StoreError("locked", temporary=True)
        with logged():
            waiting = self.decide("skip")
            self.assertEqual(waiting, [])
            begin(self.worker.stop())
            self.net.run()
        self.assertIsInstance(error_of(waiting), StoppingError)
