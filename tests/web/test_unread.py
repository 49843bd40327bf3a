"""Answers that clients do not read have a bound, and a client that reads is not closed."""

from __future__ import annotations

from replication.web.unread import MOST_UNREAD
from tests.doubles import logged, shown_metrics
from tests.web.served import ORDERS, UPDATES, Client, FakeServed, fact, header, served_site

ROW = "x" * 1_000_000
PAGE = header("GET", f"{UPDATES}?instance=master&from=0&upto=32")
MOST = MOST_UNREAD // 32_000_000


def full(client: Client) -> Client:
    """Return a client that reads nothing: its transport pauses after each write."""
    write = client.transport.write

    def fill(data: bytes) -> None:
        write(data)
        client.protocol.pauseProducing()

    client.transport.write = fill  # type: ignore[method-assign]
    return client


def test_the_client_that_does_not_read_for_the_longest_time_is_closed() -> None:
    served = FakeServed()
    served.keep(ORDERS, "master", [fact(1, *[ROW] * 32)])
    _, site, _ = served_site(served)
    clients = [full(Client(site)) for _ in range(MOST + 2)]
    with logged() as lines:
        for client in clients:
            client.send(PAGE)
            if client is clients[1]:
                client.protocol.resumeProducing()  # it has read
    closed = [each.transport.disconnected or each.transport.disconnecting for each in clients]
    assert closed == [True, *[False] * (MOST + 1)]
    assert shown_metrics(site.resource.samples())["http_timeouts_total part=answer"] == 1
    assert f"clients have not read {MOST_UNREAD} bytes of answers" in lines[0]
