"""``wait_for`` fires once a position is applied, or names what it is at when the time is over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import CancelledError

from replication.errors import (
    PositionTimeoutError,
    StoreError,
)
from replication.follower.waiters import timeout_error
from tests.doubles import begin, error_of, logged
from tests.follower.cases import HELLO, MASTER, ORDERS, WIRE, WorkerCase, position, rdata


class WaitTests(WorkerCase):
    def setUp(self) -> None:
        super().setUp()
        self.writer = self.serve(HELLO + position(1, 1))
        self.start()

    def wait(self, token: int, writer: str = "master", timeout: float = 10.0) -> list[Any]:
        return begin(self.worker.wait_for("orders", writer, token, timeout))

    def test_a_wait_for_an_applied_position_fires_at_once(self) -> None:
        self.assertEqual((self.wait(1), self.wait(0)), ([None], [None]))

    def test_a_wait_fires_when_the_position_is_applied(self) -> None:
        waits = {token: self.wait(token) for token in (4, 2, 3, 2)}
        twice = self.wait(2)
        self.send(self.writer, rdata(2))
        self.assertEqual((waits[2], twice, waits[3], waits[4]), ([None], [None], [], []))
        self.send(self.writer, position(2, 7))
        self.assertEqual((waits[3], waits[4]), ([None], [None]))
        self.assertEqual(self.worker._waiters._waiting, {})

    def test_trap_33_only_the_named_writers_position_counts(self) -> None:
        other, mine = self.wait(5, "other"), self.wait(5)
        self.send(self.writer, position(1, 9, writer="other"))
        self.assertEqual((other, mine), ([None], []))
        self.send(self.writer, position(1, 9))
        self.assertEqual(mine, [None])

    def test_a_time_that_has_passed_is_a_timeout_of_0(self) -> None:
        for timeout in (-1.0, float("nan")):
            waiting = self.wait(9, timeout=timeout)
            self.net.advance(0.0)
            self.assertIsInstance(error_of(waiting), PositionTimeoutError)

    def test_a_timeout_names_the_position_and_the_connections(self) -> None:
        self.send(self.writer, rdata(2))
        waiting = self.wait(9, timeout=2.5)
        self.net.advance(2.5)
        error = error_of(waiting)
        assert isinstance(error, PositionTimeoutError)
        facts = error.stream, error.writer, error.token, error.position, error.timeout
        self.assertEqual(facts, ("orders", "master", 9, 2, 2.5))
        self.assertEqual(
            str(error),
            "stream 'orders' of 'master' did not reach 9 in 2.5 s: it is at 2, live;"
            " connections: tcp:127.0.0.1:9092 following",
        )
        self.assertEqual(self.worker._waiters._waiting, {})
        self.send(self.writer, position(2, 9))
        self.assertEqual(self.wait(9), [None])

    def test_a_timeout_of_an_unknown_stream_names_the_connections(self) -> None:
        waiting = self.wait(9, "unknown", timeout=1.0)
        self.net.cut()
        del self.net.serving[WIRE]
        with logged():
            self.net.run(1.5)
        self.assertRegex(
            str(error_of(waiting)),
            r"no position of it was received; connections: tcp:127\.0\.0\.1:9092 not connected \(.*refused.*\)$",
        )

    def test_a_timeout_names_every_connection(self) -> None:
        links = [SimpleNamespace(endpoint=f"tcp:{name}:1", state="following", error=None) for name in "ab"]
        error = timeout_error(None, links, ORDERS, MASTER, token=9, timeout=1.0)  # type: ignore[arg-type]
        self.assertTrue(str(error).endswith("; connections: tcp:a:1 following, tcp:b:1 following"))

    def test_a_timeout_of_a_stream_of_which_nothing_was_received_has_no_position(self) -> None:
        waiting = begin(self.worker.wait_for("stock", "master", 9, 1.0))
        self.net.advance(1.0)
        error = error_of(waiting)
        assert isinstance(error, PositionTimeoutError)
        self.assertIsNone(error.position)
        self.assertIn("did not reach 9 in 1 s: no position of it was received; connections: ", str(error))

    def test_a_stream_of_which_nothing_was_received_has_not_reached_the_smallest_token(self) -> None:
        waiting = begin(self.worker.wait_for("stock", "master", 0, 1.0))
        self.assertEqual(waiting, [])
        self.net.advance(1.0)
        self.assertIsInstance(error_of(waiting), PositionTimeoutError)

    def test_a_timeout_names_the_error_that_stops_the_stream(self) -> None:
        self.store.errors["commit"] = StoreError("disk full")
        waiting = self.wait(2, timeout=0.1)
        with logged():
            self.send(self.writer, rdata(2))
            self.net.run(0.2)
        self.assertIn(
            "it is at 1, stopped (applying orders of master after 1: StoreError: disk full)", str(error_of(waiting))
        )

    def test_a_cancelled_wait_is_removed(self) -> None:
        waiting = self.worker.wait_for("orders", "master", 9)
        outcome = begin(waiting)
        waiting.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.assertEqual(self.worker._waiters._waiting, {})

    def test_trap_32_a_waiter_that_fires_may_wait_again_and_cancel_another(self) -> None:
        other = self.worker.wait_for("orders", "master", 2)
        outcome = begin(other)
        again: list[list[Any]] = []

        def wake(_: None) -> None:
            other.cancel()
            again.extend(self.wait(token) for token in (2, 3))

        first = self.worker.wait_for("orders", "master", 2)
        self.worker._waiters._waiting[ORDERS, MASTER].insert(0, self.worker._waiters._waiting[ORDERS, MASTER].pop())
        first.addCallback(wake)
        self.send(self.writer, rdata(2))
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.assertEqual(again, [[None], []])
        self.send(self.writer, rdata(3))
        self.assertEqual(again, [[None], [None]])

    def test_an_error_in_a_callback_of_one_waiter_does_not_reach_another(self) -> None:
        def fail(_: None) -> None:
            raise ZeroDivisionError

        failing = begin(self.worker.wait_for("orders", "master", 2).addCallback(fail))
        other = self.wait(2)
        self.send(self.writer, rdata(2))
        self.assertIsInstance(error_of(failing), ZeroDivisionError)
        self.assertEqual((other, self.at()), ([None], 2))

    def test_stop_fails_all_waits_and_later_waits(self) -> None:
        waits = [self.wait(9), self.wait(9, "unknown")]
        stopped = begin(self.worker.stop())
        self.net.run()
        self.assertEqual(stopped, [None])
        for outcome in (*waits, self.wait(9)):
            self.assertIn("'worker1' is stopping", str(error_of(outcome)))
        self.assertEqual(self.wait(1), [None])

    def test_a_position_that_was_reset_is_waited_for_again(self) -> None:
        self.send(self.writer, position(1, 9))
        again = self.serve(HELLO + position(5, 5))
        with logged():
            self.net.cut()
            self.net.run(1.0)
        waiting = self.wait(6)
        self.assertEqual(waiting, [])
        self.send(again, position(5, 6))
        self.assertEqual(waiting, [None])
