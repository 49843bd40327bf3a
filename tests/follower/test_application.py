"""The transaction of a function; tests/follower/test_failures.py has what happens if it raises."""

from __future__ import annotations

from replication.follower.application import ApplyTransaction
from replication.streams.cursor import Apply
from replication.wire.grammar import InstanceName, Token
from tests.doubles import FragileStore
from tests.follower.cases import MASTER, ORDERS, OTHER, fact


def test_the_writer_of_a_fact_is_known_among_several() -> None:
    parts = {MASTER: Apply([fact(2)], Token(1), Token(3)), OTHER: Apply([fact(3)], Token(1), Token(3))}
    transaction = ApplyTransaction(ORDERS, InstanceName(""), FragileStore().transaction(), parts)
    assert [transaction.writer_of(fact(token)) for token in (2, 3)] == [MASTER, OTHER]
