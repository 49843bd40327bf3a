"""One fact a request over HTTP, 1 and 32 clients on connections that are kept, beside an empty resource of twisted.web.

``POST …/facts`` answers once its fact is durable, in SQLite.  The empty resource stores nothing, and answers the same
requests at once: it is what any site of twisted.web costs.  The clients are in this process, and the two servers in
processes of their own.  Both are measured in turns in every round, and the ratios are of one round.
"""

from __future__ import annotations

import selectors
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
from twisted.web.resource import Resource
from twisted.web.server import Site

from replication.bench.cluster import database_kinds
from replication.bench.daemons import STREAM, MasterAddress, address_of, cpu_time, listen, serve_master, short_row
from replication.bench.processes import PATIENCE, BenchError, ChildProcess
from replication.bench.series import Sample, Series, Stopwatch
from replication.wire.grammar import encode_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from replication.bench.series import BenchOptions

CLIENTS: Final = 1, 32
REQUESTS: Final = 4_000  # of a round

_OK: Final = b"HTTP/1.1 200 "


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure each number of clients."""
    requests = options.size(REQUESTS, 64)
    with ExitStack() as stack:
        sqlite, *_ = stack.enter_context(database_kinds())
        empty = stack.enter_context(ChildProcess(_serve_empty))
        master = stack.enter_context(ChildProcess(serve_master, sqlite.make()))
        address: MasterAddress = master.call(address_of)
        ports = {"empty": (empty, empty.call(_port_of)), "fact": (master, int(address.url.rpartition(":")[2]))}
        for clients in CLIENTS:
            rounds = [
                {name: _post(server, port, clients, requests) for name, (server, port) in ports.items()}
                for _ in range(options.rounds)
            ]
            yield from _series(f"{clients} clients" if clients > 1 else "1 client", rounds)


def _series(what: str, rounds: Sequence[Mapping[str, Sample]]) -> Iterator[Series]:
    for name in rounds[0]:
        variant, samples = f"{what}, {name}", [found[name] for found in rounds]
        yield Series(variant, "requests", "requests/s", [one.count / one.wall for one in samples])
        yield Series(variant, "per CPU second", "requests/s", [one.count / one.cpu for one in samples])
    ratios = [found["empty"].cpu / found["fact"].cpu for found in rounds]
    yield Series(f"{what}, fact", "ratio to empty, CPU", "x", ratios)


# ---- the clients


def _post(server: ChildProcess, port: int, clients: int, requests: int) -> Sample:
    """Send ``requests`` requests, each client one after the other, and return what the server took."""
    with ExitStack() as stack:
        connections = [stack.enter_context(_Client(port)) for _ in range(clients)]
        cpu: float = server.call(cpu_time)
        watch = Stopwatch()
        _exchange(connections, requests // clients)
        wall = watch.sample(requests).wall
        return Sample(requests // clients * clients, wall, server.call(cpu_time) - cpu)


def _exchange(clients: list[_Client], each: int) -> None:
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
            client.send()
        left = len(clients)
        while left:
            ready = selector.select(PATIENCE)
            if not ready:
                raise BenchError(f"no answer in {PATIENCE:.0f} s")
            for key, _ in ready:
                answered: _Client = key.data
                if not answered.has_answer():
                    continue
                if answered.answers < each:
                    answered.send()
                else:
                    selector.unregister(answered.socket)
                    left -= 1


class _Client:
    """A connection that sends one request at a time, and costs little: it shares the machine with the server."""

    def __init__(self, port: int) -> None:
        body = f'{{"rows":[{encode_row(short_row(port))}]}}'
        self._request = (
            f"POST /v1/streams/{STREAM}/facts HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()
        self.answers = 0
        self._received = b""
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self) -> None:
        """Send a request."""
        self.socket.sendall(self._request)

    def has_answer(self) -> bool:
        """Receive, and return whether an answer is complete; BenchError: it is none, or has another status."""
        data = self.socket.recv(2**16)
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not data or (found and not head.startswith(_OK)):
            raise BenchError(f"the server answered {self._received[:200]!r}")
        if not found or len(body) < int(head.lower().partition(b"content-length:")[2].split()[0]):
            return False
        self.answers += 1
        self._received = b""
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


# ---- the process of the empty resource


class _Empty(Resource):
    """Answers each request with nothing."""

    isLeaf = True  # noqa: N815 (Twisted's name)

    def render_POST(self, _: object) -> bytes:
        return b""


class _EmptySite(Site):
    def startFactory(self) -> None:
        """Open no access log: the API has none."""


class _EmptyServer(msgspec.Struct, frozen=True):
    reactor: Any
    port: int


async def _serve_empty(reactor: Any) -> _EmptyServer:
    return _EmptyServer(reactor, await listen(reactor, _EmptySite(_Empty(), reactor=reactor)))  # type: ignore[no-untyped-call]


def _port_of(server: _EmptyServer) -> int:
    return server.port
