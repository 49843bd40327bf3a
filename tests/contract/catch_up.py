"""The contract of ICatchUp, a test for each sentence of ``streams.interfaces``; each implementation inherits it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import CatchUpError, StoreError
from replication.streams.facts import Fact
from replication.wire.grammar import InstanceName, StreamName, Token, encode_row

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from replication.streams.interfaces import ICatchUp, Page

T = TypeVar("T")
STREAM = StreamName("orders")
WRITER = InstanceName("master")
OTHER = InstanceName("worker2")
SETTLED = Token(40)

ROWS: tuple[Any, ...] = (
    ["a", None, True, -1, 1.5e-7, 2**70],
    {"k": {"": []}},
    'quotes " and \\ and / and a b',
    "\u00e9 \u2028 \U0001f600 \ud800 \x7f \x00",
    [[[[]]]],
    "",
    0,
    None,
)


def fact(token: int, *rows: object) -> Fact:
    """Return a fact with these rows, spelt."""
    return Fact(Token(token), tuple(encode_row(row) for row in rows))


HISTORY = [
    fact(2, *ROWS),
    fact(3, "b"),
    *[fact(token, ["row", token, 0], ["row", token, 1], ["row", token, 2]) for token in range(6, 26, 2)],
    *[fact(token, ["row", token]) for token in range(30, 40)],
]
OTHERS = [fact(token, "another's") for token in (4, 7, 31)]


class CatchUpContract(SynchronousTestCase):
    """A subclass has ``make_source``, and overrides ``start`` if its work needs a pump."""

    __test__ = False

    def make_source(self, histories: Mapping[InstanceName, Sequence[Fact]], settled: Token) -> ICatchUp:
        """Return a source that has these facts of STREAM, by writer; every writer has settled up to ``settled``."""
        raise NotImplementedError

    def start(self, work: Coroutine[Any, Any, T]) -> Deferred[T]:
        """Run ``work`` to its end."""
        return Deferred.fromCoroutine(work)

    def result(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` comes to, or raise what it fails with."""
        started = self.start(work)
        outcome: list[T | Failure] = []
        started.addBoth(outcome.append)
        [result] = outcome
        if isinstance(result, Failure):
            result.raiseException()
        return result

    def setUp(self) -> None:
        self.source = self.make_source({WRITER: HISTORY, OTHER: OTHERS}, SETTLED)

    def page(self, after: int, upto: int, limit: int = 1_000, writer: InstanceName = WRITER) -> Page:
        work = self.source.facts(STREAM, writer, after=Token(after), upto=Token(upto), limit=limit)
        return self.result(work)

    def test_everything_is_there_in_ascending_order_byte_for_byte(self) -> None:
        page = self.page(0, SETTLED)
        self.assertEqual(list(page.facts), HISTORY)
        self.assertEqual((page.upto, page.limited), (SETTLED, False))

    def test_after_excludes_and_upto_includes(self) -> None:
        page = self.page(3, 8)
        self.assertEqual([each.token for each in page.facts], [6, 8])
        self.assertEqual((page.upto, page.limited), (8, False))

    def test_a_range_that_ends_between_facts_reaches_its_end(self) -> None:
        page = self.page(25, 33)
        self.assertEqual([each.token for each in page.facts], [30, 31, 32, 33])
        page = self.page(3, 5)
        self.assertEqual((list(page.facts), page.upto, page.limited), ([], 5, False))

    def test_an_empty_range_is_an_empty_page(self) -> None:
        page = self.page(8, 8)
        self.assertEqual((list(page.facts), page.upto, page.limited), ([], 8, False))

    def test_another_writers_facts_are_not_given(self) -> None:
        page = self.page(0, SETTLED, writer=OTHER)
        self.assertEqual(list(page.facts), OTHERS)

    def test_a_fact_larger_than_the_limit_comes_alone_and_whole(self) -> None:
        page = self.page(0, SETTLED, limit=1)
        self.assertEqual((list(page.facts), page.upto, page.limited), (HISTORY[:1], 2, True))

    def test_pages_of_any_size_put_together_are_the_history(self) -> None:
        for limit in (1, 2, 3, 4, 5, 7, 10, 49, 50, 1_000):
            found: list[Fact] = []
            after = 0
            while after < SETTLED:
                page = self.page(after, SETTLED, limit)
                self.assertGreater(page.upto, after)
                self.assertTrue(all(after < each.token <= page.upto for each in page.facts))
                self.assertLessEqual(
                    sum(len(each.texts) for each in page.facts), limit if len(page.facts) > 1 else len(ROWS)
                )
                self.assertEqual(page.limited, page.upto < SETTLED)
                found += page.facts
                after = page.upto
            self.assertEqual(found, HISTORY)

    def test_facts_without_rows_are_passed_over_and_never_cut_off_the_rest(self) -> None:
        """A source may leave out facts without rows: for a follower they only advance the position."""
        history = [fact(2), fact(3, "b"), fact(4), fact(5), fact(6, "c"), fact(7)]
        self.source = self.make_source({WRITER: history}, Token(9))
        for limit in (1, 2, 100):
            found: list[Fact] = []
            after = 0
            while after < 9:
                page = self.page(after, 9, limit)
                self.assertGreater(page.upto, after)
                found += [each for each in page.facts if each.texts]
                after = page.upto
            self.assertEqual(found, [history[1], history[4]])

    def test_a_stream_that_is_not_there_is_an_error(self) -> None:
        work = self.source.facts(StreamName("odrers"), WRITER, after=Token(0), upto=Token(9), limit=10)
        with self.assertRaises((CatchUpError, StoreError)):
            self.result(work)
