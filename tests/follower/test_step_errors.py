"""A step that fails is noted and logged, until it succeeds or is not needed any more."""

from __future__ import annotations

from twisted.logger import Logger

from replication.errors import CatchUpError
from replication.follower.step_errors import LAST_RETRY, StepErrors
from replication.streams.cursor import Apply, CatchUp
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import logged
from tests.follower.cases import MASTER, FollowerCase

FETCH = CatchUp(Token(3), Token(7))
APPLY = Apply((), Token(3), Token(7))
AWAY = CatchUpError("no source answers")


class StepErrorsTests(FollowerCase):
    def setUp(self) -> None:
        super().setUp()
        self.errors = StepErrors(StreamName("orders"), self.follower.application, Logger())

    def log_of(self, error: Exception, step: object = FETCH, delay: float = 0.25) -> list[str]:
        with logged() as messages:
            self.errors.failed(MASTER, step, error, delay)
        return messages

    def test_what_was_done_and_why_it_failed_is_noted(self) -> None:
        self.errors.failed(MASTER, FETCH, AWAY, 0.25)
        self.errors.failed(InstanceName(""), APPLY, AWAY, 0.25)
        self.assertEqual(
            self.errors.texts,
            {
                MASTER: "fetching orders of master after 3: CatchUpError: no source answers",
                "": "applying orders of all writers after 3: CatchUpError: no source answers",
            },
        )
        self.assertEqual(self.errors.count, 2)

    def test_an_error_is_logged_once_until_the_step_succeeds(self) -> None:
        first = ["fetching orders of master after 3: CatchUpError: no source answers; next attempt in 0.25 s"]
        self.assertEqual([self.log_of(AWAY), self.log_of(AWAY)], [first, []])
        self.errors.succeeded(MASTER, FETCH)
        self.assertEqual(self.errors.texts, {})
        self.assertEqual(self.log_of(AWAY), first)

    def test_another_kind_of_step_does_not_end_it(self) -> None:
        """A follower that applies what another connection has sent still lacks what it cannot fetch."""
        self.log_of(AWAY)
        self.errors.succeeded(MASTER, APPLY)
        self.assertEqual(self.log_of(AWAY), [])

    def test_a_step_that_is_not_needed_any_more_ends_it_once_the_writer_is_live(self) -> None:
        self.log_of(AWAY)
        self.errors.rested(MASTER, live=False)  # its connection has ended, and the next one may find the same
        self.assertEqual(self.errors.texts, {})
        self.assertEqual(self.log_of(AWAY), [])
        self.errors.rested(MASTER, live=True)
        self.assertEqual(len(self.log_of(AWAY)), 1)

    def test_a_source_that_is_only_behind_is_no_error_at_first(self) -> None:
        behind = CatchUpError("it is at 5", behind=True)
        self.assertEqual((self.log_of(behind), self.errors.texts), ([], {}))
        self.assertEqual(len(self.log_of(behind, delay=LAST_RETRY)), 1)

    def test_the_traceback_of_an_unexpected_error_is_logged_once(self) -> None:
        for _ in range(2):
            self.errors.failed(MASTER, APPLY, ZeroDivisionError("no"), 0.25)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.errors.succeeded(MASTER, APPLY)
        self.errors.failed(MASTER, APPLY, ZeroDivisionError("no"), 0.25)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
