"""What a Redis sends: replies and, in them, the commands of a Synapse.  Nothing ends the link but another's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.testing import StringTransport

from replication.net.redis_connection import RedisConnection, RedisError
from replication.session.channel import ChannelReader, LostRow
from replication.session.connection import Fault, Rows
from replication.wire import grammar
from replication.wire.grammar import InstanceName
from tests.fuzz.session_target import singly

if TYPE_CHECKING:
    from collections.abc import Sequence


def check(data: bytes) -> None:
    """Parse replies, and read the messages in them."""
    whole = receive([data])
    assert receive([data[at : at + 5] for at in range(0, len(data), 5)]) == whole
    check_messages(data.split(b"\n"))  # messages without the frame of Redis, which a fuzzer seldom finds


def receive(parts: Sequence[bytes]) -> list[bytes] | None:
    """Return the messages in the replies, None if these are none."""
    connection = RedisConnection()
    connection.makeConnection(StringTransport())
    try:
        replies: list[Any] = [reply for part in parts for reply in connection.parse(part)]
    except RedisError:
        return None
    messages = [reply[-1] for reply in replies if type(reply) is list and reply[:1] == [b"message"]]
    messages = [each for each in messages if type(each) is bytes]
    check_messages(messages)
    return messages


def check_messages(messages: Sequence[bytes]) -> None:
    """Read messages together and one by one."""
    together, singles = reader(), reader()
    received = together.receive(messages)
    for each in received:
        if isinstance(each, Rows):
            grammar.read_rows(each.texts)
    again = [each for message in messages for each in singles.receive([message])]
    # Rows of other writers may come between: compare each writer's
    assert by_writer(received) == by_writer(again)
    assert together.closed == singles.closed
    if not together.closed:
        assert together.positions == singles.positions
        assert together.skipped == singles.skipped
        assert together.messages == singles.messages


def reader() -> ChannelReader:
    """Return the reader of a new link."""
    return ChannelReader(instance_name=InstanceName("us"), wants=lambda stream: stream != "typing")


def by_writer(received: Sequence[Any]) -> dict[object, list[object]]:
    """Return what was received, by writer."""
    found: dict[object, list[object]] = {}
    if received and isinstance(received[-1], Fault):
        found["fault"] = [received[-1]]
        return found  # what was read before it depends on the reads
    for each in singly(received):
        key = (each.stream, each.instance) if isinstance(each, LostRow) else getattr(each, "instance", None)
        found.setdefault((getattr(each, "stream", None), getattr(each, "instance", key)), []).append(each)
    return found
