"""The events of the live page, and the sampler that all viewers share."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure

from replication.errors import StoreError
from replication.streams.interfaces import Page
from replication.web.live import tables
from replication.web.live.feed import (
    CHECK_INTERVAL,
    INTERVAL,
    PATIENCE,
    PAUSE,
    READ_PATIENCE,
    RETRY,
    SECTION_PATIENCE,
    WRITES,
)
from replication.wire.grammar import InstanceName, Token
from tests.web.live.test_followers import Reports
from tests.web.served import ApiTestCase, Client, fact, header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replication.streams.retention import SegmentChain

LAG = 4  # the number of its cell


def producer(client: Client) -> Any:
    return client.transport.producer


class EventsTests(ApiTestCase):
    def open(self, query: str = "") -> Client:
        client = Client(self.site)
        client.send(header("GET", f"/live/events{query}"))
        return client

    def events(self, client: Client, name: str = "streams") -> Iterator[Any]:
        """Yield the data of each event with this name so far: HTML, or changed cells."""
        head, _, body = client.transport.value().partition(b"\r\n\r\n")
        assert b"200 OK" in head, head
        assert b"text/event-stream" in head
        assert b"x-accel-buffering: no" in head.lower()  # nginx passes each event on at once
        text = b"".join(re.split(rb"(?:^|\r\n)[0-9a-f]+\r\n", body)).decode()
        for each in text.split("\n\n"):
            if each.startswith(start := f"event: {name}\ndata: "):
                yield json.loads(each.removeprefix(start))

    def sampling(self) -> list[str]:
        """Return the timers of the feed."""
        calls = [repr(cast("Any", each).func) for each in self.clock.getDelayedCalls()]
        return [each for each in calls if "Feed" in each]

    def move(self, position: int) -> None:
        """Let the position of a writer be another one."""
        statuses = self.served.stream_statuses()
        writer = replace(statuses[0].writers[0], position=Token(position))
        changed = [replace(statuses[0], writers=[writer, *statuses[0].writers[1:]]), *statuses[1:]]
        self.served.stream_statuses = lambda only=None: [  # type: ignore[method-assign]
            each for each in changed if only in (None, each.definition.name)
        ]

    def change(self) -> None:
        """Let the lag of a writer be another one."""
        statuses, count = self.served.stream_statuses(), next(self.counts)
        writer = replace(statuses[0].writers[0], published=Token(1_000 + count))
        changed = [replace(statuses[0], writers=[writer, *statuses[0].writers[1:]]), *statuses[1:]]
        self.served.stream_statuses = lambda only=None: changed  # type: ignore[method-assign]

    def shuffle(self) -> None:
        """Let all writers of a table be others."""
        (orders, *_), count = self.served.stream_statuses(), next(self.counts)
        writers = [replace(orders.writers[0], instance=InstanceName(f"w{count}-{each}")) for each in range(50)]
        self.served.stream_statuses = lambda only=None: [replace(orders, writers=writers)]  # type: ignore[method-assign]

    def setUp(self) -> None:
        super().setUp()
        self.counts = iter(range(1_000))

    def test_an_event_has_the_tables(self) -> None:
        client = self.open()
        self.clock.advance(INTERVAL)
        self.change()
        self.clock.advance(INTERVAL)
        (streams,) = self.events(client)
        self.assertIn(">orders<", streams)
        (*_, cells) = self.events(client, "cells")
        self.assertIn([1, LAG, "991"], cells["streams"])

    def test_all_that_has_changed_is_written_in_one_piece(self) -> None:
        client = self.open("?stream=orders")
        self.clock.advance(INTERVAL)
        client.transport.clear()
        writes: list[bytes] = []
        self.patch(producer(client).requests[0], "write", writes.append)
        self.move(10)
        self.served.keep("orders", "master", [fact(10, ["z", "sent"])])
        self.clock.advance(INTERVAL)
        self.assertEqual(len(writes), 1)
        self.assertEqual(writes[0].count(b"event: "), 2)

    def test_a_page_that_is_opened_later_receives_all_parts(self) -> None:
        self.open()
        self.clock.pump([INTERVAL] * 3)
        later = self.open()
        self.clock.advance(INTERVAL)
        for name in ("state", "trouble", "streams", "connections"):
            self.assertEqual(len([*self.events(later, name)]), 1, name)

    def test_a_viewer_receives_a_few_kilobytes_a_second_at_most(self) -> None:
        client = self.open()
        for _ in range(60):
            self.shuffle()
            self.clock.advance(INTERVAL)
        self.assertLess(len(client.transport.value()) / (60 * INTERVAL), 5_000)
        self.assertGreater(len([*self.events(client)]), 10)

    def test_cells_that_have_not_changed_are_not_sent(self) -> None:
        client = self.open()
        self.clock.pump([INTERVAL] * 20)
        client.transport.clear()
        for _ in range(60):
            self.change()
            self.clock.advance(INTERVAL)
        self.assertLess(len(client.transport.value()) / (60 * INTERVAL), 500)

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
        self.assertNotIn(b"event: cells", client.transport.value())

    def test_whether_the_process_is_ready_is_kept_up_to_date(self) -> None:
        client = self.open()
        self.clock.advance(INTERVAL)
        self.served.stream_statuses = lambda only=None: []  # type: ignore[method-assign]
        self.clock.advance(INTERVAL)
        self.served.error = StoreError("the disk is full")
        self.clock.pump([INTERVAL] * int(1 + CHECK_INTERVAL / INTERVAL))
        stopped, ready, full = self.events(client, "state")
        self.assertIn("not ready: stream orders of worker2 is stopped", stopped)
        self.assertEqual(ready, '<span class="live">ready</span>')
        self.assertIn("not ready: the disk is full", full)

    def test_followers_are_kept_up_to_date(self) -> None:
        self.served.followers = Reports(counter=3)  # type: ignore[assignment]
        client = self.open()
        self.clock.advance(INTERVAL)
        self.served.followers = Reports(counter=9)  # type: ignore[assignment]
        self.clock.pump([INTERVAL] * int(1 + CHECK_INTERVAL / INTERVAL))
        first, second = self.events(client, "followers")
        self.assertIn(">≤ 8<", first)
        self.assertIn(">≤ 2<", second)

    def test_the_latest_facts_are_read_once_for_all_viewers_and_only_after_a_change(self) -> None:
        clients = [self.open("?stream=orders") for _ in range(20)]
        others = [self.open("?stream=orders&has=paid"), self.open()]
        self.clock.pump([INTERVAL] * 5)
        self.assertEqual(len(self.served.asked), 2 * 2)  # two searches, two writers
        self.move(10)
        self.served.keep("orders", "master", [fact(10, ["z", "sent"])])
        self.clock.pump([INTERVAL] * 5)
        self.assertEqual(len(self.served.asked), 4 * 2)
        for client in clients:
            first, second = self.events(client, "facts")
            self.assertIn(">paid<", first)
            self.assertIn(">sent<", second)
        for client in others:
            self.assertNotIn(">sent<", "".join(self.events(client, "facts")))

    def test_facts_that_a_database_answers_late_are_read_once_and_shown(self) -> None:
        answers: list[Deferred[Page]] = []

        async def page(*_: object, **_options: object) -> Page:
            answers.append(Deferred())
            return await answers[-1]

        self.served.shown_page = page  # type: ignore[method-assign]
        client = self.open("?stream=orders")
        self.clock.pump([INTERVAL] * 5)
        self.assertEqual(len(answers), 1)
        for _writer in range(2):
            answers[-1].callback(Page([fact(9, ["late", "paid"])], Token(9), limited=False))
        self.clock.pump([INTERVAL] * 5)
        self.assertEqual(len(answers), 2)
        self.assertIn("has not answered for 2 s", next(self.events(client, "facts")))
        self.assertIn(">late<", [*self.events(client, "facts")][-1])

    def test_a_page_that_is_closed_is_forgotten_and_sampling_ends(self) -> None:
        client = self.open()
        feed = self.site.resource.feed
        assert feed is not None
        self.assertEqual(feed.viewers, 1)
        client.protocol.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(feed.viewers, 0)
        self.clock.pump([INTERVAL] * int(2 + PATIENCE / INTERVAL))
        self.assertEqual(self.sampling(), [])

    def test_viewers_with_equal_rights_share_one_rendering(self) -> None:
        clients = [self.open() for _ in range(20)]
        calls = []
        feed = self.site.resource.feed
        assert feed is not None
        statuses = self.served.stream_statuses
        self.served.stream_statuses = lambda only=None: calls.append(1) or statuses(only)  # type: ignore[method-assign,func-returns-value]
        self.clock.advance(INTERVAL)
        self.assertEqual(len(calls), 1)  # for a sample
        self.assertEqual(feed.viewers, len(clients))

    def test_many_viewers_are_served_in_several_turns_of_the_reactor(self) -> None:
        """What a follower waits for is served in between."""
        clients = [self.open() for _ in range(2 * WRITES + 1)]
        turns, call_later = [0], self.clock.callLater

        def note(delay: float, *call: Any) -> Any:
            turns.append(sum(bool([*self.events(each)]) for each in clients))
            return call_later(delay, *call)

        self.patch(self.clock, "callLater", note)
        self.clock.pump([INTERVAL, PAUSE, PAUSE])
        turns.append(sum(bool([*self.events(each)]) for each in clients))
        self.assertEqual(turns[-1], len(clients))
        self.assertLessEqual(max(after - before for before, after in pairwise(turns)), WRITES)

    def test_a_page_that_is_closed_while_others_are_written_to_receives_nothing(self) -> None:
        clients = [self.open() for _ in range(WRITES + 1)]
        self.clock.advance(INTERVAL)
        clients[-1].transport.clear()
        clients[-1].protocol.connectionLost(Failure(ConnectionDone()))
        self.clock.advance(PAUSE)
        self.assertEqual(clients[-1].transport.value(), b"")
        self.assertEqual(len([*self.events(clients[-2])]), 1)

    def test_a_large_table_is_rendered_in_several_turns_of_the_reactor(self) -> None:
        self.shuffle()
        turns = [0]
        row = tables._stream_row

        def note(*of: Any) -> list[str]:
            turns[-1] += 1
            return row(*of)

        call_later = self.clock.callLater
        self.patch(self.clock, "callLater", lambda *call: turns.append(0) or call_later(*call))  # type: ignore[func-returns-value]
        self.patch(tables, "_stream_row", note)
        self.open()
        self.clock.advance(0.0)
        self.assertEqual(sum(turns), 50)
        self.assertLessEqual(max(turns), tables.ROWS_A_TURN)

    def test_news_do_not_wait_for_a_database_that_does_not_answer(self) -> None:
        self.served.checking = Deferred()
        client = self.open()
        self.clock.pump([INTERVAL, READ_PATIENCE])
        self.assertEqual(len([*self.events(client)]), 1)

    def test_an_end_of_the_site_while_a_database_is_read_ends_all(self) -> None:
        self.served.checking = Deferred()
        self.open()
        self.site.stopFactory()
        self.assertEqual(self.sampling(), [])
        self.clock.advance(INTERVAL)
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_browsers_connect_again_at_different_times(self) -> None:
        retries = {re.search(rb"retry: (\d+)", self.open().transport.value()) for _ in range(50)}
        times = {int(each[1]) for each in retries if each}
        self.assertEqual(len(times), 50)
        self.assertLess(max(times), 2 * RETRY)

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
