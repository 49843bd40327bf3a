"""The transaction of a function; tests/follower/test_failures.py has what happens if it raises."""

from __future__ import annotations

from typing import Any

from replication.errors import StoreError
from replication.follower.application import ApplyTransaction
from replication.streams.cursor import Apply
from replication.streams.skips import FailedFactAction
from replication.wire.grammar import InstanceName, Token
from tests.doubles import FragileStore, logged
from tests.follower.cases import HELLO, MASTER, ORDERS, OTHER, WorkerCase, fact, position, rdata


def test_the_writer_of_a_fact_is_known_among_several() -> None:
    parts = {MASTER: Apply([fact(2)], Token(1), Token(3)), OTHER: Apply([fact(3)], Token(1), Token(3))}
    transaction = ApplyTransaction(ORDERS, InstanceName(""), FragileStore().transaction(), parts)
    assert [transaction.writer_of(fact(token)) for token in (2, 3)] == [MASTER, OTHER]


class DiskTests(WorkerCase):
    """Which steps wait for the disk (docs/guarantees.md, A follower applies each fact once)."""

    def waits(self, stream: str = "orders", *, function: bool = True, **options: Any) -> set[bool]:
        """Return whether the transactions of one step wait for the disk; both if some do."""
        self.worker = self.make_worker(**options)
        if function:
            self.apply(stream)
        writer = self.serve(HELLO + position(1, 1, stream))
        self.start()
        del self.store.synchronous[:]
        self.send(writer, rdata(2, stream=stream))
        self.assertEqual(self.at(stream), 2)
        return {*self.store.synchronous}

    def test_a_function_does_not_wait(self) -> None:
        self.assertEqual(self.waits(), {False})

    def test_a_copy_waits(self) -> None:
        self.assertEqual(self.waits(function=False), {True})

    def test_a_function_of_a_relay_waits(self) -> None:
        self.assertEqual(self.waits(relay=True), {True})

    def test_a_function_of_federation_waits_because_its_facts_are_acknowledged(self) -> None:
        self.assertEqual(self.waits("federation"), {True})

    def test_a_decision_to_skip_a_fact_is_on_the_disk(self) -> None:
        @self.worker.on("orders")
        def refuse(*_: object) -> None:
            raise ValueError("no")

        @self.worker.on_failed_fact("orders", attempts=1)
        def skip(*_: object) -> FailedFactAction:
            return FailedFactAction.SKIP

        writer = self.serve(HELLO + position(1, 1))
        self.start()
        for token, error in ((2, None), (3, StoreError("the disk fails"))):
            del self.store.asked[:]
            if error is not None:
                self.store.errors["sync"] = error
            with logged() as messages:
                self.send(writer, rdata(token))
            self.assertEqual((self.at(), self.store.asked[-2:]), (token, ["commit", "sync"]))
            found = [each for each in messages if "a power loss may undo a skip: the disk fails" in each]
            self.assertEqual(len(found), 0 if error is None else 1)
