"""All bodies together have a bound, and it is the largest one that is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.python.failure import Failure

from replication.web import bodies
from tests.doubles import logged, shown_metrics
from tests.web.served import FACTS, JSON, NDJSON, Client, served_site
from tests.web.served import header as head
from tests.web.test_line_stream import APPEND, KeyedServed

MOST = 1_000_000
ADDED = b'{"rows": [["%b", "new"]]}'


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> KeyedServed:
    monkeypatch.setattr(bodies, "MOST_BODIES", MOST)
    return KeyedServed()


class Sender:
    """A client that begins with a body of ``size`` bytes."""

    def __init__(self, site: Any, size: int, path: str = FACTS) -> None:
        kind = JSON if path == FACTS else NDJSON
        self.body = ADDED % (b"x" * (size - len(ADDED) + 2)) + b"\n"
        self.client = Client(site)
        self.client.send(head("POST", path, [kind], len(self.body)))

    def send(self, count: int | None = None) -> None:
        part, self.body = (self.body, b"") if count is None else (self.body[:count], self.body[count:])
        self.client.send(part)

    @property
    def status(self) -> int | None:
        return self.client.received().code if self.client.transport.value() else None


@pytest.mark.parametrize("path", [FACTS, APPEND])
def test_the_largest_body_is_refused_and_small_ones_are_not(served: KeyedServed, path: str) -> None:
    _, site, _ = served_site(served)
    large, others = Sender(site, 500_000, path), [Sender(site, 200_000, path) for _ in range(4)]
    large.send(400_000)
    for each in others[:3]:
        each.send(190_000)
    assert large.status is None
    with logged() as lines:
        others[3].send(190_000)
    assert large.status == 503
    text = f"requests of all clients have bodies of more than {MOST} bytes, and this one is the largest"
    assert json.loads(large.client.received().body)["detail"] == f"{text}; send it later, or in parts"
    assert lines == [f"HTTP: refusing a body of a peer (127.0.0.1:40000): {text}"]
    metrics = shown_metrics(site.resource.samples())
    assert metrics["http_bodies_refused_total"] == 1
    assert metrics["http_body_bytes"] == 4 * 190_000
    for each in others:
        each.send()
    assert [each.status for each in others] == [200] * 4
    assert site.resource.bodies.total == 0


@pytest.mark.parametrize("path", [FACTS, APPEND])
def test_a_body_counts_until_it_is_stored_and_is_not_refused_then(served: KeyedServed, path: str) -> None:
    _, site, _ = served_site(served)
    served.gate = Deferred()
    stored, gone, small = Sender(site, 900_000, path), Sender(site, 50_000, path), Sender(site, 10_000)
    stored.send()
    gone.send()
    gone.client.protocol.connectionLost(Failure(ConnectionLost()))
    late = Sender(site, 100_000, path)
    late.send(90_000)
    small.send()
    assert late.status == 503
    assert site.resource.bodies.total >= 950_000
    served.gate.callback(None)
    assert (stored.status, small.status) == (200, 200)
    assert site.resource.bodies.total == 0


@pytest.mark.parametrize("path", [FACTS, APPEND])
def test_a_body_whose_connection_is_lost_counts_no_more(served: KeyedServed, path: str) -> None:
    _, site, _ = served_site(served)
    sender = Sender(site, 500_000, path)
    sender.send(400_000)
    assert site.resource.bodies.total == 400_000
    sender.client.protocol.connectionLost(Failure(ConnectionLost()))
    assert site.resource.bodies.total == 0


def test_a_body_of_a_request_for_the_server_as_a_whole_counts_no_more_once_it_is_answered(served: KeyedServed) -> None:
    _, site, _ = served_site(served)
    client = Client(site)
    client.send(head("OPTIONS", "*", [JSON], 500_000) + b" " * 400_000)
    assert site.resource.bodies.total == 400_000
    client.send(b" " * 100_000)
    assert client.received().code == 200
    assert site.resource.bodies.total == 0


def test_a_batch_of_a_refused_request_is_stored_and_what_follows_is_not(served: KeyedServed) -> None:
    _, site, _ = served_site(served)
    served.gate = Deferred()
    sender, other = Sender(site, 500_000, APPEND), Sender(site, 990_000)
    sender.send()
    sender = Sender(site, 500_000, APPEND)
    sender.body = ADDED % b"a" + b"\n" + sender.body
    sender.send(400_000)
    other.send(500_000)
    assert other.status == 503
    Sender(site, 200_000).send(150_000)
    assert sender.status == 503
    answer = sender.client.transport.value()
    served.gate.callback(None)
    assert sender.client.transport.value() == answer
    assert [rows[0][0][0][:1] for _, rows, _ in served.appended] == ["x", "a"]
    sender.send()
    assert len(served.appended) == 2
