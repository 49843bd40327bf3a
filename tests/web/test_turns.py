"""About MOST_READ bytes of pages are read at a time, and none for a client that has disconnected."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure

from replication.streams.interfaces import Page
from replication.streams.merged_page import MergedPage
from replication.streams.positions import MultiWriterToken
from replication.web.pages import PAGE_ROWS
from replication.web.turns import FIRST_ROWS, MOST_READ, PAGE_AIM
from replication.wire.grammar import Token
from tests.doubles import logged
from tests.web.served import UPDATES, Client, FakeServed, fact, header, served_site

PAGE = f"{UPDATES}?instance=master&from=0&upto=90000"
PAGES = {
    "page": PAGE,
    "since": f"{UPDATES}?since=0",
    "synapse": "/_synapse/replication/get_repl_stream_updates/orders/aBcDeFgHiJ?from_token=0&upto_token=90000",
}


class Slow(FakeServed):
    """A process each of whose pages waits for one of ``reads``."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Deferred[None]] = []

    async def _wait(self) -> None:
        reading: Deferred[None] = Deferred()
        self.reads.append(reading)
        await reading

    async def page(self, *_: Any, **__: Any) -> Page:
        await self._wait()
        return Page([], Token(0), limited=False)

    async def since(self, *_: Any, **__: Any) -> tuple[MergedPage, str]:
        await self._wait()
        return MergedPage([], MultiWriterToken(Token(0)), limited=False), "0"


class Scene:
    def __init__(self, served: FakeServed) -> None:
        _, self.site, _ = served_site(served)

    def request(self, path: str = PAGE) -> Client:
        client = Client(self.site)
        client.send(header("GET", path))
        return client


@pytest.fixture
def served() -> Slow:
    return Slow()


@pytest.fixture
def scene(served: Slow) -> Scene:
    return Scene(served)


@pytest.mark.parametrize("path", PAGES.values(), ids=[*PAGES])
def test_two_long_pages_are_read_at_a_time_in_the_order_of_the_requests(served: Slow, scene: Scene, path: str) -> None:
    clients = [scene.request(path) for _ in range(4)]
    for reading, client in zip((2, 2, 2, 1), clients, strict=True):
        assert len(served.reads) == reading
        served.reads.pop(0).callback(None)
        assert client.received().code == 200
    assert served.reads == []


def test_short_pages_are_read_together(served: Slow, scene: Scene) -> None:
    scene.site.resource.turns.note("orders", [fact(2, "")] * FIRST_ROWS, MOST_READ // 8)
    clients = [scene.request() for _ in range(11)]
    assert len(served.reads) == 8
    for running in (8, 7):
        for reading in [served.reads.pop(0), served.reads.pop(0)]:
            reading.callback(None)
        assert len(served.reads) == running
    for reading in served.reads:
        reading.callback(None)
    assert [client.received().code for client in clients] == [200] * 11


def test_what_another_process_has_does_not_wait(served: Slow, scene: Scene) -> None:
    """Or all clients would wait while one source does not answer."""
    served.elsewhere = "orders"
    clients = [scene.request() for _ in range(3)]
    assert len(served.reads) == len(clients)


def test_no_page_is_read_for_clients_that_have_disconnected(served: Slow, scene: Scene) -> None:
    """Or a client that connects again and again would have any number of pages read."""
    first = [scene.request(), scene.request()]
    waiting = [scene.request() for _ in range(2_000)]
    last = scene.request()
    with logged() as lines:
        for client in waiting:
            client.protocol.connectionLost(Failure(ConnectionDone()))
        for _ in (*first, last):
            served.reads.pop(0).callback(None)
    assert last.received().code == 200
    assert (served.reads, lines) == ([], [])


def test_a_page_that_fails_ends_its_turn(served: Slow, scene: Scene) -> None:
    clients = [scene.request() for _ in range(3)]
    with logged():
        for _ in clients:
            served.reads.pop(0).errback(ValueError())
    assert [client.received().code for client in clients] == [500] * len(clients)


@pytest.mark.parametrize("path", PAGES.values(), ids=[*PAGES])
def test_pages_of_long_rows_have_fewer_rows_and_grow_again(path: str) -> None:
    served, rows = FakeServed(), 5_000
    served.keep("orders", "master", [fact(token, "x" * (PAGE_AIM // 500)) for token in range(1, rows + 1)])
    scene = Scene(served)
    sizes = [len(scene.request(f"{path}&limit=10000").received().json["updates"]) for _ in range(2)]
    assert sizes[0] == FIRST_ROWS
    assert 450 < sizes[1] <= 500
    served.keep("orders", "master", [fact(token, "x") for token in range(1, rows + 1)])
    sizes = [len(scene.request(f"{path}&limit=10000").received().json["updates"]) for _ in range(2)]
    assert 450 < sizes[0] <= 500
    assert sizes[1] == (PAGE_ROWS if path == PAGES["synapse"] else rows)


def test_few_rows_do_not_make_pages_longer_but_long_ones_make_them_shorter() -> None:
    served = FakeServed()
    scene = Scene(served)
    for token, (size, limit) in enumerate(((0, FIRST_ROWS), (10, FIRST_ROWS), (PAGE_AIM // 100, 99), (PAGE_AIM, 1)), 1):
        served.keep("orders", "master", [fact(token, "x" * size)] if size else [], settled=9)
        assert scene.request().received().code == 200
        scene.request(f"{PAGE}&limit=10000")
        assert served.asked[-1][-1] == limit


def test_after_a_long_row_pages_grow_again_with_facts_of_several_rows() -> None:
    served, facts = FakeServed(), [fact(token, *range(7)) for token in range(2, 1_000)]
    served.keep("orders", "master", [fact(1, "x" * (PAGE_AIM // 10)), *facts])
    scene = Scene(served)
    after, rows = 0, []
    while after < 999:
        page = scene.request(PAGE.replace("from=0", f"from={after}&limit=10000")).received().json
        after = page["upto_token"]
        rows.append(len(page["updates"]))
    assert len(rows) < 5, rows
    assert sum(rows) == 1 + 998 * 7
