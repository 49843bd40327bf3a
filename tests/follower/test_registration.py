"""Functions for streams are registered before the start."""

from __future__ import annotations

from typing import Any, cast

from replication.errors import ConfigError, StreamError
from replication.streams.skips import FailedFactAction
from tests.doubles import begin, error_of
from tests.follower.cases import HELLO, WorkerCase, position


def stop(failed: object, txn: object) -> FailedFactAction:
    return FailedFactAction.STOP


class OnFailedFactTests(WorkerCase):
    def test_it_needs_a_function_of_the_stream(self) -> None:
        self.worker.on_failed_fact("orders")(stop)
        error = error_of(begin(self.worker.start()))
        self.assertEqual(str(error), "on_failed_fact('orders'): no function is registered with on('orders')")

    def test_it_takes_the_name_of_a_stream_and_a_number_of_attempts(self) -> None:
        with self.assertRaisesRegex(ConfigError, "above stop"):
            self.worker.on_failed_fact(cast("Any", stop))
        with self.assertRaisesRegex(ConfigError, "must be 1 or more"):
            self.worker.on_failed_fact("orders", attempts=0)

    def test_it_is_registered_before_the_start(self) -> None:
        self.apply()
        self.serve(HELLO + position(1, 1))
        self.start()
        with self.assertRaises(StreamError):
            self.worker.on_failed_fact("orders")(stop)
