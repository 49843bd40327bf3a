"""What a status says."""

from __future__ import annotations

from replication.streams.registry import StreamDefinition
from replication.streams.seams import StreamStatus, WriterStatus
from replication.wire.grammar import InstanceName, StreamName, Token


def test_minimum_and_maximum_are_over_the_writers() -> None:
    writers = [WriterStatus(InstanceName(str(place)), Token(place), Token(place), "live") for place in (7, 3, 5)]
    status = StreamStatus(StreamDefinition(StreamName("orders")), writers)
    assert (status.minimum, status.maximum) == (3, 7)


def test_a_stream_without_writers_is_at_0() -> None:
    status = StreamStatus(StreamDefinition(StreamName("orders")), [])
    assert (status.minimum, status.maximum) == (0, 0)
