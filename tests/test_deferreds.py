"""Deferreds that are shared, shielded, bound to a lifetime, or retried."""

from __future__ import annotations

import asyncio
import gc
from threading import get_ident
from typing import TYPE_CHECKING
from unittest.mock import Mock

from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.python import threadable
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from replication.deferreds import (
    Lifetime,
    Lock,
    Semaphore,
    StartDeferred,
    call_function,
    check_reactor,
    check_thread,
    close_after,
    share,
    shield,
    start_alone,
)
from replication.errors import ConfigError
from replication.storage.transactions import CallGroup
from tests.doubles import begin, error_of, logged, now

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


class StartDeferredTests(SynchronousTestCase):
    def test_it_fires_with_the_work_and_its_cancellation_cancels_the_work(self) -> None:
        gate: Deferred[None] = Deferred()

        async def work() -> None:
            await gate

        starting = StartDeferred("worker.start()", work())
        outcome = begin(starting)
        self.assertEqual(outcome, [])
        gate.callback(None)
        self.assertEqual(outcome, [None])
        gate = Deferred()
        starting = StartDeferred("worker.start()", work())
        outcome = begin(starting)
        starting.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)

    def test_the_errors_of_asyncio_contain_how_to_await_it(self) -> None:
        async def work() -> None:
            await Deferred()

        async def main() -> None:
            starting = StartDeferred("worker.start()", work())
            await starting

        cure = r"in asyncio as worker\.start\(\)\.asFuture\(loop\); see docs/how-to/use-from-asyncio\.md"
        with self.assertRaisesRegex(ValueError, f"a coroutine was expected, got <Deferred of .*{cure}"):
            asyncio.run(StartDeferred("worker.start()", work()))  # type: ignore[arg-type]
        with self.assertRaisesRegex(RuntimeError, f"Task got bad yield: <Deferred of .*{cure}"):
            asyncio.run(main())


class CheckReactorTests(SynchronousTestCase):
    def test_only_a_reactor_that_does_not_run_is_refused_and_only_while_the_loop_runs(self) -> None:
        idle, runs = Mock(running=False), Mock(running=True)

        async def check(reactor: object) -> None:
            check_reactor(reactor)

        check_reactor(idle)  # before reactor.run()
        for each in (runs, Clock()):
            asyncio.run(check(each))
        with self.assertRaisesRegex(ConfigError, "Twisted's reactor does not run"):
            asyncio.run(check(idle))


class CheckThreadTests(SynchronousTestCase):
    """What is not locked is refused in other threads than the reactor's."""

    def test_only_another_thread_than_that_of_a_reactor_that_runs_is_refused(self) -> None:
        idle, runs = Mock(running=False), Mock(running=True)
        for here in (None, get_ident()):
            self.patch(threadable, "ioThread", here)
            check_thread(runs)
        self.patch(threadable, "ioThread", get_ident() + 1)
        for each in (idle, Clock()):
            check_thread(each)
        for check in (check_thread, check_reactor):
            with self.assertRaisesRegex(ConfigError, "the thread 'MainThread', not the reactor's: .*blockingCallFrom"):
                check(runs)


class CallFunctionTests(SynchronousTestCase):
    """A function that returns what nothing here awaits has not done its work."""

    def test_a_plain_a_coroutine_function_and_one_with_a_deferred_are_called(self) -> None:
        async def work(number: int) -> int:
            return number

        for function in (work, succeed, lambda number: number):
            self.assertEqual(now(call_function(function, 3)), 3)
        self.assertIsInstance(error_of(begin(call_function(lambda: 1 / 0))), ZeroDivisionError)

    def test_a_generator_or_an_awaitable_of_asyncio_is_an_error(self) -> None:
        def generate() -> Iterator[None]:
            yield

        async def generate_async() -> AsyncIterator[None]:
            yield

        for function in (generate, generate_async):
            with self.assertRaisesRegex(ConfigError, r"^generate.*\(\) has `yield`, so it does nothing when"):
                now(call_function(function))
        loop = asyncio.new_event_loop()
        with self.assertRaisesRegex(ConfigError, r"returned a .*Future, which Twisted cannot await: return Def"):
            now(call_function(loop.create_future))
        loop.close()


class ShareTests(SynchronousTestCase):
    def test_each_shared_deferred_gets_the_result_and_the_original_keeps_it(self) -> None:
        original: Deferred[int] = Deferred()
        early = [begin(share(original)) for _ in range(2)]
        original.callback(7)
        self.assertEqual(early, [[7], [7]])
        self.assertEqual(now(share(original)), 7)
        self.assertEqual(now(original), 7)

    def test_cancelling_a_shared_deferred_leaves_the_others_alone(self) -> None:
        original: Deferred[int] = Deferred()
        shared = share(original)
        cancelled, other = begin(shared), begin(share(original))
        shared.cancel()
        self.assertIsInstance(error_of(cancelled), CancelledError)
        self.assertFalse(original.called)
        original.callback(7)
        self.assertEqual(other, [7])

    def test_a_failure_goes_to_the_first_shared_deferred_that_is_not_cancelled(self) -> None:
        original: Deferred[int] = Deferred()
        shared = share(original)
        cancelled, other = begin(shared), begin(share(original))
        shared.cancel()
        original.errback(ValueError("no"))
        self.assertIsInstance(error_of(cancelled), CancelledError)
        self.assertIsInstance(error_of(other), ValueError)

    def test_a_failure_is_logged_if_every_shared_deferred_was_cancelled(self) -> None:
        original: Deferred[int] = Deferred()
        shared = share(original)
        begin(shared)
        shared.cancel()
        original.errback(ValueError("no"))
        del original, shared
        gc.collect()
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)


class ShieldTests(SynchronousTestCase):
    def test_the_work_continues_when_its_deferred_is_cancelled(self) -> None:
        gate: Deferred[None] = Deferred()
        done: list[str] = []

        async def work() -> str:
            await gate
            done.append("done")
            return "result"

        shielded = shield(work())
        outcome = begin(shielded)
        shielded.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        gate.callback(None)
        self.assertEqual(done, ["done"])

    def test_the_result_or_error_of_the_work_is_returned(self) -> None:
        async def work() -> int:
            return 7

        async def fails() -> int:
            raise ValueError("no")

        self.assertEqual(now(shield(work())), 7)
        self.assertIsInstance(error_of(begin(shield(fails()))), ValueError)


class CloseAfterTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1

    def test_it_closes_after_the_work_and_after_a_failure(self) -> None:
        work: Deferred[None] = Deferred()
        outcome = begin(close_after(work, self.close))
        self.assertEqual((outcome, self.closed), ([], 0))
        work.callback(None)
        self.assertEqual((outcome, self.closed), ([None], 1))
        failed: Deferred[None] = fail(ZeroDivisionError())
        self.assertIsInstance(error_of(begin(close_after(failed, self.close))), ZeroDivisionError)
        self.assertEqual(self.closed, 2)

    def test_a_coroutine_that_is_deleted_before_its_end_waits_for_nothing(self) -> None:
        closing = close_after(Deferred(), self.close)
        closing.send(None)
        closing.close()  # a RuntimeError, if it awaits
        self.assertEqual(self.closed, 0)


class StartAloneTests(SynchronousTestCase):
    def test_an_error_is_logged_at_once_and_not_only_by_the_garbage_collector(self) -> None:
        """Without memory a process ends by that: it stayed for minutes, without its database and live."""
        lock = Lock()

        async def work() -> None:
            async with lock:
                raise MemoryError

        gc.disable()
        self.addCleanup(gc.enable)
        start_alone(work())
        self.assertEqual(len(self.flushLoggedErrors(MemoryError)), 1)

    def test_a_group_commit_that_cannot_go_on_is_logged_at_once(self) -> None:
        class Broken(Lock):
            def release(self) -> None:
                raise MemoryError

        gc.disable()
        self.addCleanup(gc.enable)
        group: CallGroup[str, None] = CallGroup(Broken(), lambda _: succeed([None]))
        group.add("one")
        self.assertEqual(len(self.flushLoggedErrors(MemoryError)), 1)


class LifetimeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.lifetime = Lifetime(self.clock)

    def tearDown(self) -> None:
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_sleep_returns_after_its_seconds(self) -> None:
        sleep = begin(self.lifetime.sleep(2.0))
        self.clock.advance(1.9)
        self.assertEqual(sleep, [])
        self.clock.advance(0.1)
        self.assertEqual(sleep, [None])

    def test_end_ends_every_sleep_and_leaves_no_timer(self) -> None:
        sleeps = [begin(self.lifetime.sleep(seconds)) for seconds in (1.0, 2.0)]
        self.lifetime.end()
        self.assertEqual(sleeps, [[None], [None]])

    def test_after_end_sleep_returns_at_once(self) -> None:
        self.lifetime.end()
        self.assertEqual(begin(self.lifetime.sleep(5.0)), [None])

    def test_end_cancels_what_was_added(self) -> None:
        waiting: Deferred[int] = Deferred()
        outcome = begin(self.lifetime.add(waiting))
        self.lifetime.end()
        self.assertIsInstance(error_of(outcome), CancelledError)

    def test_a_task_that_fails_is_logged_and_named(self) -> None:
        task: Deferred[None] = Deferred()
        self.lifetime.watch(task, "counting")
        self.lifetime.watch(succeed(None), "a task without an error")
        self.assertEqual(self.lifetime.failed_tasks, [])
        with logged() as messages:
            task.errback(ZeroDivisionError())
        self.assertEqual(messages, ["counting has ended: restart this process"])
        self.assertEqual(self.lifetime.failed_tasks, ["counting"])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_a_task_that_fails_while_the_process_stops_is_no_fault(self) -> None:
        task: Deferred[None] = Deferred()
        self.lifetime.watch(task, "counting")
        self.lifetime.end()
        task.errback(CancelledError())
        self.assertEqual(self.lifetime.failed_tasks, [])

    def test_end_leaves_alone_what_has_fired(self) -> None:
        waiting: Deferred[int] = Deferred()
        outcome = begin(self.lifetime.add(waiting))
        waiting.callback(7)
        self.lifetime.end()
        self.assertEqual(outcome, [7])
        self.assertEqual(self.lifetime._waiting, {})

    def test_an_error_is_passed_on(self) -> None:
        waiting: Deferred[int] = Deferred()
        outcome = begin(self.lifetime.add(waiting))
        waiting.errback(Failure(ValueError("no")))
        self.assertIsInstance(error_of(outcome), ValueError)

    def test_a_callback_may_fire_another_deferred_while_end_runs(self) -> None:
        one: Deferred[int] = Deferred()
        two: Deferred[int] = Deferred()
        first = begin(self.lifetime.add(one).addErrback(lambda _: two.callback(7)))
        second = begin(self.lifetime.add(two))
        self.lifetime.end()
        self.assertEqual(first, [None])
        self.assertEqual(len(second), 1)


class LockTests(SynchronousTestCase):
    def test_any_number_may_wait(self) -> None:
        """Each ran inside the release of the one before: of a few hundred, some never ran, and the lock was lost."""
        for lock in (Lock(), Semaphore(1)):
            lock.acquire()
            ran: list[int] = []

            async def run(number: int, lock: Lock | Semaphore = lock, ran: list[int] = ran) -> None:
                async with lock:
                    ran.append(number)

            waiting = [begin(Deferred.fromCoroutine(run(number))) for number in range(2000)]
            lock.release()
            self.assertEqual((ran, [outcome for (outcome,) in waiting]), ([*range(2000)], [None] * 2000))
            self.assertTrue(lock.acquire().called)

    def test_a_waiter_that_is_cancelled_or_that_fails_leaves_the_others_their_turn(self) -> None:
        lock = Lock()
        lock.acquire()
        first, second, third = lock.acquire(), lock.acquire(), lock.acquire()
        outcome = begin(first)
        first.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        second.addCallback(lambda held: held.release())
        lock.release()
        self.assertTrue(now(third).locked)
