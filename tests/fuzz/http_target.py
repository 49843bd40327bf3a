"""Requests of HTTP, to a master in memory that keeps rooms: each answer is whole, and none is an error on our side."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from twisted.internet.address import IPv4Address
from twisted.internet.testing import StringTransport
from twisted.logger import LogLevel, capturedLogs

from replication.errors import StreamError
from replication.net.admission import Bounds
from replication.storage.tables.room_queries import RoomReads
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.skips import SkippedFact, SkipState
from replication.web.site import make_site
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.master import Master
from tests.doubles import FragileStore, Net, now
from tests.fuzz.events_target import new_keeper
from tests.web.test_rooms import KeptRooms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.web.rooms import IRooms
    from tests.rooms.recorded import Keeper

ANSWERED = re.compile(rb"HTTP/1\.[01] ([0-9]{3}) [^\r\n]*\r\n")
HERE = IPv4Address("TCP", "127.0.0.1", 40_000)
MAX_BODY = 4_096
SECRET = "hush"
SKIPPED = SkippedFact(
    StreamName("orders"), InstanceName("w"), Fact(Token(5), ("[1e999]", '["\\ud800"]')), SkipState.SKIPPED
)


class Rooms(KeptRooms):
    """Rooms whose tables are made when they are first used."""

    def __init__(self) -> None:
        self.error = None

    @cached_property
    def keeper(self) -> Keeper:  # type: ignore[override]
        return new_keeper()

    @cached_property
    def reads(self) -> RoomReads:  # type: ignore[override]
        return RoomReads(self.keeper.statements)


class Transport(StringTransport):
    """A transport that takes a producer away twice, as those of sockets do."""

    def unregisterProducer(self) -> None:
        self.producer = None


class Skips:
    """A worker's skips: what any token may be used for, and nothing that fails."""

    async def skip(self, stream: str, writer: str, token: Token) -> SkippedFact:
        if token != SKIPPED.fact.token:
            raise StreamError(f"fact {token} of stream {stream!r} by {writer!r} does not fail now")
        return SKIPPED

    retry = skip

    async def skipped(self, stream: str | None, limit: int) -> Sequence[SkippedFact]:
        return [SKIPPED][:limit]


def check(data: bytes) -> None:
    """Send requests: the first byte chooses whether there is a secret, the rest is sent whole and in parts."""
    secret, data = SECRET if data[:1] == b"s" else None, data[1:]
    whole = answers(secret, [data])
    parts = answers(secret, [data[at : at + 61] for at in range(0, len(data), 61)])
    assert parts == whole[: len(parts)]  # after a close, no further part arrives


def answers(secret: str | None, parts: Sequence[bytes]) -> list[int]:
    """Return the status of each answer."""
    net = Net()
    master = Master(
        server_name="example.com",
        streams=[StreamDefinition("orders", row=("order_id", "state"))],
        database=FragileStore(),
        reactor=net,
        wall=lambda: 1_700.5,
    )
    now(master.start())
    now(master.stream("orders").append([[["a", "new"], ["b", "new"]], [["a", "paid"]]]))
    master.served.skips = Skips()
    rooms = cast("IRooms", Rooms())
    site = make_site(
        master.served, secret=secret, max_body=MAX_BODY, reactor=net, rooms=rooms, bounds=Bounds(body_timeout=5.0)
    )
    transport = Transport(peerAddress=HERE)
    channel = cast("Any", site.buildProtocol(HERE))
    with capturedLogs() as events:
        channel.makeConnection(transport)
        for part in parts:
            if not transport.disconnecting:
                channel.dataReceived(part)
                net.advance(0)
        sent = transport.value()
        net.advance(100)  # an incomplete request ends
    logged = [
        each for each in events if each["log_level"] >= LogLevel.error and "failure" in str(each.get("log_format"))
    ]
    failed = [each["log_failure"] for each in events if each.get("log_failure") is not None]
    assert not failed, failed[0].getTraceback()
    assert not logged, logged
    codes = [int(code) for code in ANSWERED.findall(sent)]
    assert 500 not in codes, sent
    assert all(100 <= code < 600 for code in codes)
    return codes
