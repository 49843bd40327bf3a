"""Status objects and writes."""

from __future__ import annotations

from replication.streams import interfaces as seams
from replication.streams.definitions import StreamDefinition
from replication.streams.interfaces import StreamStatus, Write, WriterStatus
from replication.wire.grammar import InstanceName, StreamName, Token


def writer(name: str, position: int) -> WriterStatus:
    return WriterStatus(InstanceName(name), Token(position), Token(position), "live")


def test_a_status_has_the_lowest_and_the_highest_position() -> None:
    status = StreamStatus(StreamDefinition("orders"), [writer("first", 7), writer("second", 5)])
    assert (status.minimum, status.maximum) == (5, 7)


def test_without_writers_both_positions_are_0() -> None:
    status = StreamStatus(StreamDefinition("orders"), [])
    assert (status.minimum, status.maximum) == (0, 0)


def test_the_lag_is_the_difference_of_both_positions() -> None:
    name = InstanceName("first")
    assert WriterStatus(name, Token(7), Token(5), "writing").lag == 2
    assert WriterStatus(name, Token(5), Token(8), "catching up").lag == 3


def test_a_write_without_facts_only_moves_the_position() -> None:
    write = Write(StreamName("orders"), InstanceName("master"), Token(5))
    assert (list(write.facts), write.expected, write.reset) == ([], None, False)


def test_samples_do_not_share_their_default_labels() -> None:
    one, other = (seams.Sample("lag", 0) for _ in range(2))
    assert one.labels == {}
    assert one.labels is not other.labels
