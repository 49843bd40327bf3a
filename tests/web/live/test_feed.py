"""The events of the live page, and the sampler that all viewers share."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, cast

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure

from replication.web.live.feed import INTERVAL, PATIENCE, SECTION_PATIENCE
from replication.wire.grammar import Token
from tests.web.served import ApiTestCase, Client, header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replication.streams.retention import SegmentChain


def producer(client: Client) -> Any:
    return client.transport.producer


class EventsTests(ApiTestCase):
    def open(self, query: str = "") -> Client:
        client = Client(self.site)
        client.send(header("GET", f"/live/events{query}"))
        return client

    def events(self, client: Client) -> Iterator[str]:
        """Yield the HTML of each event so far."""
        head, _, body = client.transport.value().partition(b"\r\n\r\n")
        assert b"200 OK" in head, head
        assert b"text/event-stream" in head
        text = b"".join(re.split(rb"(?:^|\r\n)[0-9a-f]+\r\n", body)).decode()
        for each in text.split("\n\n"):
            if each.startswith("data: "):
                yield json.loads(each.removeprefix("data: "))

    def sampling(self) -> list[str]:
        """Return the timers of the feed."""
        calls = [repr(cast("Any", each).func) for each in self.clock.getDelayedCalls()]
        return [each for each in calls if "Feed" in each]

    def change(self) -> None:
        """Let the lag of a writer be another one."""
        statuses, count = self.served.stream_statuses(), next(self.counts)
        writer = attrs.evolve(statuses[0].writers[0], published=Token(1_000 + count))
        changed = [attrs.evolve(statuses[0], writers=[writer]), *statuses[1:]]
        self.served.stream_statuses = lambda only=None: changed  # type: ignore[method-assign]

    def setUp(self) -> None:
        super().setUp()
        self.counts = iter(range(1_000))

    def test_an_event_has_the_tables(self) -> None:
        client = self.open()
        self.clock.advance(INTERVAL)
        self.change()
        self.clock.advance(INTERVAL)
        first, *_, last = self.events(client)
        self.assertIn(">orders<", first)
        self.assertIn(">991<", last)

    def test_a_viewer_receives_a_few_kilobytes_a_second_at_most(self) -> None:
        client = self.open()
        for _ in range(60):
            self.change()
            self.clock.advance(INTERVAL)
        self.assertLess(len(client.transport.value()) / (60 * INTERVAL), 5_000)
        self.assertGreater(len([*self.events(client)]), 10)

    def test_a_viewer_that_does_not_read_receives_the_newest_tables_later(self) -> None:
        client = self.open()
        self.clock.advance(INTERVAL)
        client.transport.clear()
        producer(client).pauseProducing()
        for _ in range(10):
            self.change()
            self.clock.advance(INTERVAL)
        self.assertEqual(client.transport.value(), b"")
        producer(client).resumeProducing()
        self.change()
        self.clock.advance(INTERVAL)
        self.assertIn(b">1,001<", client.transport.value())

    def test_a_page_that_is_closed_is_forgotten_and_sampling_ends(self) -> None:
        client = self.open()
        feed = self.site.resource.feed
        self.assertEqual(feed.viewers, 1)
        client.protocol.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(feed.viewers, 0)
        self.clock.pump([INTERVAL] * int(2 + PATIENCE / INTERVAL))
        self.assertEqual(self.sampling(), [])

    def test_viewers_with_equal_rights_share_one_rendering(self) -> None:
        clients = [self.open() for _ in range(20)]
        calls = []
        feed = self.site.resource.feed
        statuses = self.served.stream_statuses
        self.served.stream_statuses = lambda only=None: calls.append(1) or statuses(only)  # type: ignore[method-assign,func-returns-value]
        self.clock.advance(INTERVAL)
        self.assertEqual(len(calls), 2)  # a sample, and a rendering
        self.assertEqual(feed.viewers, len(clients))

    def test_the_end_of_the_site_ends_the_sampler(self) -> None:
        self.open()
        self.site.stopFactory()
        self.assertEqual(self.sampling(), [])


class SectionTests(ApiTestCase):
    def test_the_page_is_shown_while_a_folder_does_not_answer_and_the_folder_is_read_once(self) -> None:
        reading: list[Deferred[list[SegmentChain]]] = []

        async def segments() -> list[SegmentChain]:
            reading.append(Deferred())
            return await reading[-1]

        self.served.segments = segments  # type: ignore[method-assign]
        clients = [Client(self.site) for _ in range(2)]
        for client in clients:
            client.send(header("GET", "/"))
            self.assertEqual(client.transport.value(), b"")
        self.clock.advance(SECTION_PATIENCE)
        for client in clients:
            self.assertIn(b"has not answered for 2 s", client.transport.value())
            self.assertIn(b">orders<", client.transport.value())
        self.assertEqual(len(reading), 1)
        reading[0].callback([])
        later = Client(self.site)
        later.send(header("GET", "/"))
        self.assertEqual(len(reading), 2)
        reading[1].callback([])
        self.assertNotIn(b"has not answered", later.transport.value())
