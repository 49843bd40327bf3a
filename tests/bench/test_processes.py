"""Tests of the processes of scenarios."""

from __future__ import annotations

import os
from typing import Any

from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase

from replication.bench.processes import BenchError, ChildProcess
from replication.errors import PositionTimeoutError


class Account:
    """What a child makes."""

    def __init__(self, reactor: Any, balance: int) -> None:
        self.reactor = reactor
        self.balance = balance

    def add(self, amount: int) -> int:
        self.balance += amount
        return self.balance

    async def add_later(self, amount: int) -> int:
        await deferLater(self.reactor, 0)
        return self.add(amount)


async def fail(reactor: Any) -> None:
    raise PositionTimeoutError("stream 'orders' did not reach 59")


def end(reactor: Any) -> None:
    os._exit(0)


class ChildProcessTests(SynchronousTestCase):
    def test_functions_are_called_with_the_object_of_the_child(self) -> None:
        """Plain functions and coroutine functions; the object remains."""
        with ChildProcess(Account, 21) as child:
            self.assertEqual(child.call(Account.add, 1), 22)
            self.assertEqual(child.call(Account.add_later, 20), 42)

    def test_a_call_may_end_later(self) -> None:
        """Until then another child can be called."""
        with ChildProcess(Account, 1) as one, ChildProcess(Account, 2) as two:
            one.begin(Account.add_later, 1)
            self.assertEqual((two.call(Account.add, 1), one.result()), (3, 2))

    def test_a_child_that_has_ended_is_an_error(self) -> None:
        """The error names the function."""
        with ChildProcess(end) as child, self.assertRaisesRegex(BenchError, "'end' has ended"):
            child.result()

    def test_an_error_of_a_child_is_raised_in_the_parent(self) -> None:
        """The error is one line."""
        with (
            ChildProcess(fail) as child,
            self.assertRaisesRegex(BenchError, "'fail' failed: stream 'orders' did not reach"),
        ):
            child.result()

    def test_leaving_the_block_ends_the_child(self) -> None:
        """Also while it waits for a call."""
        with ChildProcess(Account, 21) as child:
            child.call(Account.add, 1)
            pid = child.pid
        with self.assertRaises(ProcessLookupError):
            os.kill(pid, 0)
