"""A stand-in for Master and Worker, and one real HTTP exchange with it over a transport in memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
from twisted.internet.address import IPv4Address
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import NotAWriterError, RowError, StreamError, UnknownStreamError
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import Page, PeerStatus, Sample, StreamStatus, WriterStatus
from replication.streams.merged_page import MergedPage, read_merged_page
from replication.streams.positions import MultiWriterToken
from replication.web.pages import BLANK
from replication.web.site import make_site
from replication.web.synapse_requests import SynapseRequests
from replication.wire import grammar
from replication.wire.commands import UserIp
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twisted.internet.defer import Deferred
    from twisted.internet.interfaces import IAddress

    from replication.streams.history import Epoch, History
    from replication.streams.retention import SegmentChain
    from replication.web.followers import IFollowers
    from replication.web.site import ApiSite
    from replication.web.skips import ISkips

HERE = IPv4Address("TCP", "127.0.0.1", 40_000)
ELSEWHERE = IPv4Address("TCP", "192.0.2.7", 40_000)


def fact(token: int, *rows: object) -> Fact:
    """Return a fact with these rows, encoded."""
    return Fact(Token(token), tuple(grammar.encode_row(row) for row in rows))


class FakeServed:
    """Serves what is in ``histories``; ``error`` is raised instead, if there is one."""

    role = "master"
    server_name = "example.com"
    instance_name = InstanceName("master")

    def __init__(self) -> None:
        self.definitions = [StreamDefinition("orders", row=("order_id", "state")), StreamDefinition("caches")]
        self.histories: dict[tuple[str, str], list[Fact]] = {}
        self.settled = 0  # no page reaches further
        self.epochs: dict[tuple[str, str], list[Epoch]] = {}
        self.asked: list[tuple[str, str | None, int, int | None, int]] = []
        self.appended: list[tuple[str, list[list[Any]], str | None]] = []
        self.error: Exception | None = None
        self.checking: Deferred[None] | None = None
        self.unwritable = ""
        self.elsewhere = ""
        self.synapse_requests = SynapseRequests()
        self.skips: ISkips | None = None
        self.followers: IFollowers | None = None
        self.unreachable: list[str] = []
        self.failed: list[str] = []
        self.chains: list[SegmentChain] = []

    def keep(self, stream: str, writer: str, facts: Sequence[Fact], settled: int | None = None) -> None:
        self.histories[stream, writer] = list(facts)
        self.settled = max(self.settled, settled or max((each.token for each in facts), default=0))

    def stores(self, stream: str) -> bool:
        return stream != self.elsewhere

    async def page(self, stream: str, writer: str | None, *, after: int, upto: int | None, limit: int) -> Page:
        self.asked.append((stream, writer, after, upto, limit))
        self._raise(stream)
        history = self.histories.get((stream, writer or self.instance_name))
        if history is None:
            raise StreamError(f"{writer} writes nothing to {stream}")
        end = self.settled if upto is None else min(upto, self.settled)
        found: list[Fact] = []
        rows = 0
        for each in history:
            if after < each.token <= end:
                if found and rows + len(each.texts) > limit:
                    return Page(found, found[-1].token, limited=True)
                found.append(each)
                rows += len(each.texts)
        return Page(found, Token(end), limited=False)

    async def shown_page(self, stream: str, writer: str, *, after: int, upto: int, limit: int) -> Page:
        return await self.page(stream, writer, after=after, upto=upto, limit=limit)

    async def history(self, stream: str, writer: str) -> History:
        self._raise(stream)
        return self.epochs.get((stream, writer), [])

    async def since(self, stream: str, token: str, limit: int) -> tuple[MergedPage, str]:
        self._raise(stream)
        numbers = {MASTER: 1, InstanceName("worker2"): 2}
        after = MultiWriterToken.parse(token, {number: name for name, number in numbers.items()})
        positions = {InstanceName(writer): Token(self.settled) for name, writer in self.histories if name == stream}
        since = await read_merged_page(self.page, StreamName(stream), after, positions, limit=limit)
        return since, since.upto.encode(numbers)

    async def append_texts(self, stream: str, facts: Iterable[Sequence[object]], key: str | None) -> Sequence[Token]:
        self._raise(stream)
        appended: list[list[object]] = []
        for rows in facts:
            if rows is BLANK:
                continue
            if ["bad"] in rows:
                raise RowError("a row has the wrong fields", fact=len(appended))
            appended.append([*rows])
        self.appended.append((stream, appended, key))
        return [Token(2 + index) for index in range(len(appended))]

    async def check(self) -> None:
        if self.error is not None:
            raise self.error
        if self.checking is not None:
            await self.checking

    def _raise(self, stream: str) -> None:
        if self.error is not None:
            raise self.error
        if stream not in [each.name for each in self.definitions]:
            raise UnknownStreamError(f"no stream {stream!r} here; known streams: orders, caches")
        if stream == self.unwritable:
            raise NotAWriterError(f"{stream} is written by worker2, not by master")

    def stream_statuses(self, only: str | None = None) -> list[StreamStatus]:
        here = WriterStatus(InstanceName("master"), Token(9), Token(11), "writing")
        there = WriterStatus(InstanceName("worker2"), Token(7), Token(7), "stopped", "the function raised")
        found = [
            StreamStatus(self.definitions[0], [here, there], 2, (Token(10), 1.5), notes=["stream 'orders': mend it"]),
            *[StreamStatus(each, []) for each in self.definitions[1:]],
        ]
        return [each for each in found if only in (None, each.definition.name)]

    def unreachable_writers(self) -> list[str]:
        return self.unreachable

    def absent_writers(self) -> list[str]:
        return []

    def failed_tasks(self) -> list[str]:
        return self.failed

    def users_syncing(self) -> dict[str, dict[str, int]]:
        return {"abcde": {"@v:h": 7, "@u:h": 5}, "fghij": {"@u:h": 6}}

    async def places_of(self, user_id: str) -> list[UserIp]:
        if self.error is not None:
            raise self.error
        return [UserIp(user_id, "secret token", "1.2.3.4", "UA", "DEV", 9)]

    async def segments(self) -> list[SegmentChain]:
        if self.error is not None:
            raise self.error
        return self.chains

    def peer_statuses(self) -> list[PeerStatus]:
        return [PeerStatus("worker1", "127.0.0.1:5", 1_700_000_000.0, 12, 345, 6, "PING")]

    def samples(self) -> Iterable[Sample]:
        yield Sample("position", 9, {"stream": "orders", "writer": "master"})
        yield Sample("lines_total", 12, {"direction": "out"})
        yield Sample("position", 7, {"stream": "orders", "writer": "worker2"})


class Client:
    """One connection to a site; ``send`` sends bytes, ``received`` is what came back."""

    def __init__(self, site: ApiSite, peer: IAddress = HERE) -> None:
        self.transport = StringTransport(peerAddress=peer)
        protocol = site.buildProtocol(peer)
        assert protocol is not None
        self.protocol: Any = protocol
        self.protocol.makeConnection(self.transport)

    def send(self, data: bytes) -> None:
        self.protocol.dataReceived(data)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: Sequence[tuple[str, str | bytes]] = ()
    ) -> Received:
        """Send one request whole, and read one answer whole."""
        self.transport.clear()
        self.send(header(method, path, headers, None if body is None else len(body)) + (body or b""))
        return self.received()

    def received(self) -> Received:
        return read_answer(self.transport.value())


@attrs.frozen
class Received:
    """One answer."""

    code: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json", self.headers
        return json.loads(self.body)

    @property
    def detail(self) -> str:
        assert set(self.json) - set(IDENTITY) == {"error", "detail"}, self.json
        return str(self.json["detail"])


def header(method: str, path: str, headers: Sequence[tuple[str, str | bytes]] = (), length: int | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode()]
    lines += [] if any(name == "Host" for name, _ in headers) else [b"Host: localhost"]
    lines += [name.encode() + b": " + (text if isinstance(text, bytes) else text.encode()) for name, text in headers]
    lines += [] if length is None else [b"Content-Length: %d" % length]
    return b"\r\n".join([*lines, b"", b""])


def read_answer(data: bytes) -> Received:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    pairs = (line.split(": ", 1) for line in rest)
    return Received(int(first.split()[1]), {name.lower(): text for name, text in pairs}, body)


def served_site(
    served: FakeServed | None = None, secret: str | None = None, max_body: int = 64 * 2**20
) -> tuple[FakeServed, ApiSite, Clock]:
    served, clock = served or FakeServed(), Clock()
    return served, make_site(served, secret=secret, max_body=max_body, reactor=clock), clock


IDENTITY = ("role", "server_name", "instance_name")  # of a process, in the 503 of /health
ORDERS = StreamName("orders")
MASTER = InstanceName("master")


FACTS = "/v1/streams/orders/facts"
UPDATES = "/v1/streams/orders/updates"
JSON = ("Content-Type", "application/json")
NDJSON = ("Content-Type", "application/x-ndjson")


class ApiTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.served = FakeServed()
        self.served.keep("orders", "master", [fact(3, ["a", "new"], ["b", "new"]), fact(5, ["a", "paid"])], settled=9)
        _, self.site, self.clock = served_site(self.served)
        self.client = Client(self.site)

    def get(self, path: str, method: str = "GET") -> Received:
        return self.client.ask(method, path)

    def post(self, body: bytes, kind: tuple[str, str] = NDJSON, key: str | None = None, path: str = FACTS) -> Received:
        return self.client.ask("POST", path, body, [kind, *([("Idempotency-Key", key)] if key else [])])

    def assert_refused(self, received: Received, code: int, *words: str) -> None:
        self.assertEqual(received.code, code, received.body)
        for word in words:
            self.assertIn(word, received.detail)
