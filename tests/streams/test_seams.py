"""What a status and a write say."""

from __future__ import annotations

from replication.streams import seams
from replication.streams.registry import StreamDefinition
from replication.streams.seams import StreamStatus, Write, WriterStatus
from replication.wire.grammar import InstanceName, StreamName, Token


def writer(name: str, position: int) -> WriterStatus:
    return WriterStatus(InstanceName(name), Token(position), Token(position), "live")


def test_a_status_spans_from_the_slowest_writer_to_the_fastest() -> None:
    status = StreamStatus(StreamDefinition("orders"), [writer("first", 7), writer("second", 5)])
    assert (status.minimum, status.maximum) == (5, 7)


def test_a_stream_without_writers_stands_at_nothing() -> None:
    status = StreamStatus(StreamDefinition("orders"), [])
    assert (status.minimum, status.maximum) == (0, 0)


def test_the_lag_is_what_is_settled_and_not_announced_or_announced_and_not_applied() -> None:
    name = InstanceName("first")
    assert WriterStatus(name, Token(7), Token(5), "writing").lag == 2
    assert WriterStatus(name, Token(5), Token(8), "catching up").lag == 3


def test_a_write_without_facts_only_moves_the_position() -> None:
    write = Write(StreamName("orders"), InstanceName("master"), Token(5))
    assert (list(write.facts), write.expected, write.reset) == ([], None, False)


def test_a_sample_without_labels_shares_them_with_no_other() -> None:
    one, other = (seams.Sample("lag", "gauge", "IDs behind", 0) for _ in range(2))
    assert one.labels == {}
    assert one.labels is not other.labels
