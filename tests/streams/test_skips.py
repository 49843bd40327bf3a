"""Facts that were skipped, as values."""

from __future__ import annotations

from replication.streams.facts import Fact
from replication.streams.skips import MAX_REASON, FailedFact, SkippedFact, SkipState, describe_error
from replication.wire.grammar import InstanceName, StreamName, Token

ORDERS, MASTER = StreamName("orders"), InstanceName("master")


def test_a_failed_fact_has_its_reason_in_one_line() -> None:
    assert FailedFact(ORDERS, MASTER, Fact(Token(2), ()), KeyError("x"), 3).reason == "KeyError: 'x'"


def test_a_skipped_fact_is_known_by_writer_and_token() -> None:
    assert SkippedFact(ORDERS, MASTER, Fact(Token(2), ()), SkipState.SKIPPED).key == (MASTER, 2)


class NoTextError(Exception):
    def __str__(self) -> str:
        raise TypeError


def test_an_error_becomes_a_line_that_every_database_can_hold() -> None:
    """PostgreSQL holds no NUL, and no database a lone surrogate: then the fact could not be skipped."""
    assert describe_error(ValueError("a bad order, 5 \u20ac")) == "ValueError: a bad order, 5 \u20ac"
    assert describe_error(ValueError("a\0b\ud800\nc")) == "ValueError: a\\x00b\\ud800\\nc"
    assert describe_error(NoTextError()) == "NoTextError: its text cannot be made: TypeError"
    assert describe_error(ValueError("x" * 1_000_000)) == f"ValueError: {'x' * 1_000_000}"[:MAX_REASON] + " …"
