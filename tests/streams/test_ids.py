"""IDs from a sequence that has to be waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import SequenceRegressedError
from replication.streams.ids import StreamIdGenerator
from replication.streams.pending import PendingIds

if TYPE_CHECKING:
    from collections.abc import Sequence


class Asked:
    """A sequence whose answers a test gives."""

    def __init__(self) -> None:
        self.pending = PendingIds(1)
        self.answers: list[Deferred[Sequence[int]]] = []
        self.settled: list[int] = []
        self.ids = StreamIdGenerator(self.pending, self.ask, self.settled.append)
        self.go_on: Deferred[None] = Deferred()

    def ask(self, count: int) -> Deferred[Sequence[int]]:
        self.answers.append(Deferred())
        return self.answers[-1]

    async def work(self) -> Sequence[int]:
        async with self.ids.reserve(2) as ids:
            assert self.pending.open_count == 2
            await self.go_on
        return ids


class StreamIdGeneratorTests(SynchronousTestCase):
    def test_ids_are_open_inside_the_block_and_complete_behind_it(self) -> None:
        asked = Asked()
        working = Deferred.fromCoroutine(asked.work())
        asked.answers[0].callback([4, 5])
        self.assertEqual((asked.pending.settled, asked.pending.open_count), (3, 2))  # 2 and 3 are somebody else's
        asked.go_on.callback(None)
        self.assertEqual(self.successResultOf(working), [4, 5])
        self.assertEqual(asked.settled, [5])

    def test_a_block_that_raises_completes_too(self) -> None:
        asked = Asked()
        working = Deferred.fromCoroutine(asked.work())
        asked.answers[0].callback([4, 5])
        asked.go_on.errback(KeyError("x"))
        self.failureResultOf(working, KeyError)
        self.assertEqual(asked.pending.settled, 5)

    def test_cancelled_while_it_asks(self) -> None:
        asked = Asked()
        working = Deferred.fromCoroutine(asked.work())
        working.cancel()
        self.failureResultOf(working, CancelledError)
        self.assertEqual((asked.pending.settled, asked.pending.open_count, asked.settled), (1, 0, [1]))
        asked.pending.reserve()  # no floor was left behind

    def test_cancelled_while_it_works(self) -> None:
        asked = Asked()
        working = Deferred.fromCoroutine(asked.work())
        asked.answers[0].callback([4, 5])
        working.cancel()
        self.failureResultOf(working, CancelledError)
        self.assertEqual(asked.pending.settled, 5)

    def test_a_coroutine_that_is_dropped_leaves_nothing_open(self) -> None:
        asked = Asked()
        asked.answers.append(Deferred())
        work = asked.work()
        work.send(None)
        work.close()
        self.assertEqual((asked.pending.settled, asked.pending.open_count), (1, 0))

    def test_a_sequence_that_fails_leaves_no_floor(self) -> None:
        asked = Asked()
        working = Deferred.fromCoroutine(asked.work())
        asked.answers[0].errback(OSError("gone"))
        self.failureResultOf(working, OSError)
        asked.pending.reserve()
        self.assertEqual(asked.pending.settled, 1)

    def test_a_sequence_that_repeats_itself_is_refused(self) -> None:
        asked = Asked()
        working = Deferred.fromCoroutine(asked.work())
        asked.answers[0].callback([1, 2])
        self.failureResultOf(working, SequenceRegressedError)
        with pytest.raises(StopIteration):
            next(iter(asked.pending.reserve(0)))
        self.assertEqual(asked.pending.open_count, 0)
