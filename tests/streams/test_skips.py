"""Facts that were skipped, as values."""

from __future__ import annotations

from replication.streams.facts import Fact
from replication.streams.skips import FailedFact, SkippedFact, SkipState
from replication.wire.grammar import InstanceName, StreamName, Token

ORDERS, MASTER = StreamName("orders"), InstanceName("master")


def test_a_failed_fact_has_its_reason_in_one_line() -> None:
    assert FailedFact(ORDERS, MASTER, Fact(Token(2), ()), KeyError("x"), 3).reason == "KeyError: 'x'"


def test_a_skipped_fact_is_known_by_writer_and_token() -> None:
    assert SkippedFact(ORDERS, MASTER, Fact(Token(2), ()), SkipState.SKIPPED).key == (MASTER, 2)
