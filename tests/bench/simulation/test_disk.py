"""The simulated disk."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from replication.bench.simulation.disk import Operation, SharedDisk, SimulatedStore, finish
from replication.errors import StoreError
from replication.storage.memory import MemoryStore
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, StreamName, Token

A, MASTER = StreamName("a"), InstanceName("master")
WRITE = Write(A, MASTER, Token(2), [Fact(Token(2), ("1",))])


class StoreTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.landed: list[Any] = []
        self.disk = MemoryStore()
        self.store = SimulatedStore(self.disk, lambda *what: self.landed.append(what))
        finish(self.store.open())
        finish(self.store.declare(StreamDefinition("a")))

    def commit(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self.store.commit([WRITE]))

    def position(self) -> int:
        return finish(self.disk.positions(A)).get(MASTER, 0)

    def test_a_held_operation_waits_until_it_is_released(self) -> None:
        self.store.held = True
        done = self.commit()
        self.assertEqual(self.position(), 0)
        self.store.release_all()
        self.successResultOf(done)
        self.assertEqual((self.position(), len(self.landed)), (2, 1))

    def test_a_released_operation_can_fail(self) -> None:
        self.store.held = True
        done = self.commit()
        self.store.release(self.store.waiting[0], Operation.fail)
        self.failureResultOf(done, StoreError)
        self.store.held, self.store.failing = False, True
        self.failureResultOf(self.commit(), StoreError)
        self.assertEqual(self.position(), 0)

    def test_one_operation_fails_after_some_that_succeed(self) -> None:
        self.store.works_for = 1
        self.successResultOf(Deferred.fromCoroutine(self.store.check()))
        self.failureResultOf(self.commit(), StoreError)
        self.successResultOf(self.commit())

    def test_an_operation_lands_although_its_process_is_killed(self) -> None:
        self.store.held = True
        done = self.commit()
        self.store.waiting[0].land()
        self.store.killed = True
        self.assertNoResult(done)
        self.assertNoResult(self.commit())
        self.assertEqual(self.position(), 2)

    def test_a_closed_store_waits_for_what_is_in_progress_and_refuses_the_rest(self) -> None:
        self.store.held = True
        self.commit()
        closing = Deferred.fromCoroutine(self.store.close())
        self.assertNoResult(closing)
        self.store.release(self.store.waiting[0])
        self.successResultOf(closing)
        self.failureResultOf(self.commit(), StoreError)

    def test_several_writers_take_ids_from_one_sequence(self) -> None:
        shared = SharedDisk()
        finish(shared.open())
        finish(shared.declare(StreamDefinition("a")))
        one, two = (SimulatedStore(shared, lambda *_: None).sequence(A) for _ in range(2))
        assert one is not None
        assert two is not None
        self.assertEqual([list(finish(each.allocate(2))) for each in (one, two)], [[2, 3], [4, 5]])

    def test_a_coroutine_that_waits_is_an_error(self) -> None:
        async def wait() -> None:
            await Deferred()

        self.assertRaises(AssertionError, finish, wait())
