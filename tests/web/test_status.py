"""Where things stand, as JSON."""

from __future__ import annotations

from replication.streams.registry import StreamDefinition
from replication.streams.seams import KeptStatus, StreamStatus
from replication.web.status import describe_peer, describe_stream
from replication.wire.grammar import InstanceName, Token
from tests.web.served import FakeServed


def test_a_stream_is_described_as_the_contract_says() -> None:
    assert describe_stream(FakeServed().stream_statuses()[0]) == {
        "name": "orders",
        "row": ("order_id", "state"),
        "table": None,
        "negative": False,
        "writers": [
            {"instance": "master", "position": 9, "announced": 11, "lag": 2, "state": "writing", "error": None},
            {
                "instance": "worker2",
                "position": 7,
                "announced": 7,
                "lag": 0,
                "state": "stopped",
                "error": "the function raised",
            },
        ],
        "positions": {"master": 9, "worker2": 7},
        "minimum": 7,
        "maximum": 9,
        "open": 2,
        "oldest_open": {"id": 10, "age": 1.5},
        "notes": ["stream 'orders': mend it"],
        "shares": None,
        "in_memory": None,
    }


def test_a_stream_without_a_table_tells_what_it_has_in_memory() -> None:
    status = StreamStatus(
        StreamDefinition("f", in_memory=True), [], kept=KeptStatus(2, 400, {InstanceName("s"): Token(3)})
    )
    assert describe_stream(status)["in_memory"] == {"facts": 2, "bytes": 400, "acknowledged": {"s": 3}}


def test_a_stream_without_writers_stands_at_nought() -> None:
    described = describe_stream(FakeServed().stream_statuses()[1])
    assert (described["row"], described["writers"], described["positions"]) == (None, [], {})
    assert (described["minimum"], described["maximum"], described["oldest_open"]) == (0, 0, None)


def test_a_connection_is_described_by_what_it_is_known_by() -> None:
    assert describe_peer(FakeServed().peer_statuses()[0]) == {
        "name": "worker1",
        "address": "127.0.0.1:5",
        "since": 1_700_000_000.0,
        "lines_out": 12,
        "bytes_out": 345,
        "queued_bytes": 6,
        "last_command": "PING",
    }
