"""Functions for streams are registered before the start."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import inlineCallbacks

from replication.errors import ConfigError, StreamError
from replication.follower.failures import DEFAULT_ATTEMPTS
from replication.streams.skips import FailedFactAction
from tests.doubles import begin, error_of
from tests.follower.cases import HELLO, ORDERS, WorkerCase, position

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


def stop(*_: object) -> FailedFactAction:
    return FailedFactAction.STOP


class DecoratorTests(WorkerCase):
    """What ``on``, ``on_reset`` and ``on_failed_fact`` have in common."""

    NAMES = ("on", "on_reset", "on_failed_fact")

    def test_each_takes_the_name_of_a_stream(self) -> None:
        for name in self.NAMES:
            with self.assertRaises(ConfigError) as caught:
                getattr(self.worker, name)(stop)
            wrong = f"{name}() takes the name of a stream: write @worker.{name}('orders') above stop"
            self.assertEqual(str(caught.exception), wrong)

    def test_each_is_refused_after_the_start_and_before_it_returns_the_function(self) -> None:
        self.serve(HELLO + position(1, 1))
        decorators = {name: getattr(self.worker, name)("orders") for name in self.NAMES}
        for decorate in decorators.values():
            self.assertIs(decorate(stop), stop)
        self.start()
        for name, decorate in decorators.items():
            with self.assertRaises(StreamError) as caught:
                decorate(stop)
            self.assertEqual(str(caught.exception), f"{name}('orders'): register functions before start()")

    def test_each_refuses_a_function_that_cannot_be_called_with_its_arguments(self) -> None:
        async def apply(facts: object) -> None:
            """Have no parameter for the transaction."""

        def more(*_: object, needed: object) -> None:
            """Have a parameter that is never given."""

        arguments = {"on": "facts, txn", "on_reset": "writer, to, txn", "on_failed_fact": "failed, txn"}
        for name in self.NAMES:
            decorate = getattr(self.worker, name)("orders")
            for function, why in ((apply, "too many positional arguments"), (more, "argument: 'needed'")):
                with self.assertRaises(ConfigError) as caught:
                    decorate(function)
                call = f"{function.__name__}({arguments[name]})"
                wrong = f"{name}('orders') calls {call}, which does not take these: "
                self.assertTrue(str(caught.exception).startswith(wrong), caught.exception)
                self.assertTrue(str(caught.exception).endswith(why), caught.exception)
            with self.assertRaises(ConfigError) as caught:
                decorate(3)
            self.assertIn("3 is not a callable object", str(caught.exception))
            self.assertIs(decorate(stop), stop)

    def test_each_refuses_a_function_whose_call_does_nothing(self) -> None:
        def generate(*_: object) -> Iterator[None]:
            yield

        async def generate_async(*_: object) -> AsyncIterator[None]:
            yield

        for name in self.NAMES:
            for function in (generate, generate_async):
                with self.assertRaises(ConfigError) as caught:
                    getattr(self.worker, name)("orders")(function)
                wrong = f"{name}('orders'): {function.__name__}() has `yield`, so a call does nothing: "
                self.assertTrue(str(caught.exception).startswith(wrong), caught.exception)
            decorated: Any = inlineCallbacks(generate)  # type: ignore[arg-type]
            self.assertIs(getattr(self.worker, name)("orders")(decorated), decorated)

    def test_a_function_without_a_signature_is_accepted(self) -> None:
        without = max  # of C
        self.assertRaises(ValueError, inspect.signature, without)
        for name in self.NAMES:
            self.assertIs(getattr(self.worker, name)("orders")(without), without)


class OnFailedFactTests(WorkerCase):
    def test_it_needs_a_function_of_the_stream(self) -> None:
        self.worker.on_failed_fact("orders")(stop)
        error = error_of(begin(self.worker.start()))
        self.assertEqual(str(error), "on_failed_fact('orders'): no function is registered with on('orders')")

    def test_it_takes_a_number_of_attempts(self) -> None:
        with self.assertRaises(ConfigError) as caught:
            self.worker.on_failed_fact("orders", attempts=0)
        self.assertEqual(str(caught.exception), "on_failed_fact('orders'): attempts is 0, and must be 1 or more")
        for attempts in (1, DEFAULT_ATTEMPTS):
            options = {} if attempts == DEFAULT_ATTEMPTS else {"attempts": attempts}
            self.worker.on_failed_fact("orders", **options)(stop)
            self.assertEqual(self.worker._followed.functions.on_failed[ORDERS].attempts, attempts)
