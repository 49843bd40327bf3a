"""Processes that scenarios start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.children import BenchError, Child, hear
from replication.errors import PositionTimeoutError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def double(pipe: Connection[Any, Any], number: int) -> None:
    pipe.send(2 * number)
    pipe.send(2 * pipe.recv())


async def double_in_a_reactor(reactor: Any, pipe: Connection[Any, Any], number: int) -> None:
    pipe.send(2 * number)
    pipe.send(2 * await hear(reactor, pipe))


async def fail(reactor: Any, pipe: Connection[Any, Any]) -> None:
    raise PositionTimeoutError("stream 'orders' did not reach 59")


def end(pipe: Connection[Any, Any]) -> None:
    pipe.close()


class ChildTests(SynchronousTestCase):
    def test_parent_and_child_talk(self) -> None:
        """A child is a function, or a coroutine function that gets a reactor."""
        for work in (double, double_in_a_reactor):
            with Child(work, 21) as child:
                self.assertEqual(child.hear(), 42)
                self.assertEqual(child.ask(4), 8)

    def test_a_child_that_has_ended(self) -> None:
        """Nobody waits for it; the error names what it ran."""
        with Child(end) as child, self.assertRaisesRegex(BenchError, "'end' has ended"):
            child.hear()

    def test_a_child_that_fails(self) -> None:
        """What it failed with is told in one line."""
        with Child(fail) as child, self.assertRaisesRegex(BenchError, "'fail' failed: stream 'orders' did not reach"):
            child.hear()

    def test_leaving_the_block_ends_the_child(self) -> None:
        """Even while it waits for us."""
        with Child(double_in_a_reactor, 21) as child:
            child.hear()
            pid = child.pid
        with self.assertRaises(ProcessLookupError):
            os.kill(pid, 0)
