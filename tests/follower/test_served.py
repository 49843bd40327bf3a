"""What the HTTP API shows of a worker: pages of copies, statuses and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast
from unittest.mock import patch

from replication.errors import (
    NotAWriterError,
    StoreError,
    UnknownStreamError,
)
from replication.follower.catch_up import CatchUpSources
from replication.follower.missed_facts import MissedFacts
from replication.net.access import Access
from replication.storage.tables.instances import TokenCodec
from replication.streams.cursor import CatchUp
from replication.streams.definitions import StreamDefinition
from replication.streams.history import Epoch
from replication.streams.interfaces import Page
from replication.streams.positions import MultiWriterToken
from replication.streams.retention import SegmentChain
from replication.wire.commands import Ping
from replication.wire.grammar import InstanceName, Token
from replication.writer.served import WrittenStreams
from tests.doubles import FragileStore, begin, error_of, logged, now, shown_metrics
from tests.follower.cases import HELLO, MASTER, ORDERS, WIRE, WorkerCase, fact, position, rdata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.facts import Fact
    from replication.wire.grammar import StreamName


class NumberedTokens(TokenCodec):
    """Texts of tokens, as a database with these writers has them."""

    NUMBERS: ClassVar = {InstanceName("one"): 1, InstanceName("two"): 2, InstanceName("new"): 3}

    async def read(self, text: str) -> MultiWriterToken:
        return MultiWriterToken.parse(text, {number: name for name, number in self.NUMBERS.items()})

    async def encode(self, token: MultiWriterToken) -> str:
        return token.encode(self.NUMBERS)


class SeveralWritersTests(WorkerCase):
    def test_protocol_f6_the_copy_of_several_writers_is_read_by_token(self) -> None:
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9102"])
        one = self.serve(HELLO + position(1, 1, writer="one"))
        two = self.serve(HELLO + position(1, 1, writer="two"), port=9102)
        self.assertEqual(self.worker.token("orders"), MultiWriterToken(Token(0)))
        self.start()
        self.send(one, rdata(2, writer="one"), rdata(4, writer="one"))
        self.send(two, rdata(3, writer="two"), position(3, 4, writer="two"))
        self.assertEqual(self.worker.token("orders"), MultiWriterToken(Token(4)))
        since, text = now(self.worker.served.since("orders", "2", 10))
        self.assertEqual([(each.token, each.writer) for each in since.written], [(3, "two"), (4, "one")])
        self.assertEqual(text, "4")
        since, text = now(self.worker.served.since("orders", "2", 1))
        self.assertEqual(([each.token for each in since.written], text), ([3], "3"))
        self.assertIsInstance(error_of(begin(self.worker.served.since("stock", "2", 10))), UnknownStreamError)

    def test_behind_a_relay_no_page_passes_a_writer_that_the_relay_has_not_found(self) -> None:
        """The relay does not wait for it long.  Programs that poll here never received its facts."""
        relay = self.serve(HELLO + position(1, 1, writer="one"))
        self.start()
        (link,) = self.worker._followed.links
        self.worker._followed.received(link, [Ping("1 partial echo")])
        self.send(relay, rdata(2, writer="one"), rdata(5, writer="one"))
        self.worker.served._tokens = NumberedTokens(FragileStore())
        since, text = now(self.worker.served.since("orders", "0", 1000))
        self.assertEqual(([each.token for each in since.written], text), ([2, 5], "m0~1.5"))
        self.assertRegex(self.note_of_orders()[0], "^the process at tcp:.* has not sent a position of each writer")
        self.send(relay, position(1, 1, writer="new"))
        self.assertEqual(self.worker.token("orders").of("new"), 1)
        self.send(relay, rdata(3, writer="new"), position(3, 6, writer="new"), position(5, 6, writer="one"))
        since, text = now(self.worker.served.since("orders", text, 1000))
        self.assertEqual(([each.token for each in since.written], text[:3]), ([3], "m0~"))
        self.worker._followed.received(link, [Ping("complete")])
        self.assertEqual(now(self.worker.served.since("orders", text, 1000))[1], "6")
        self.assertEqual(self.note_of_orders(), [])

    def note_of_orders(self) -> Sequence[str]:
        """Return the notes of the stream ``orders``."""
        (status,) = self.worker.served.stream_statuses("orders")
        return status.notes

    def test_after_a_restart_no_page_passes_a_writer_that_has_sent_no_position(self) -> None:
        """Otherwise programs that poll would never receive its facts below the other writer's position."""
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9102"])
        one = self.serve(HELLO + position(1, 1, writer="one"))
        two = self.serve(HELLO + position(1, 1, writer="two"), port=9102)
        self.start()
        self.send(one, rdata(2, writer="one"))
        self.send(two, rdata(3, writer="two"))
        self.tearDown()
        del self.net.serving[9102]
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9102"])
        one = self.serve(HELLO + position(2, 4, writer="one"))
        begin(self.worker.start())
        self.net.run()
        self.send(one, rdata(5, writer="one"), rdata(6, writer="one"))
        self.worker.served._tokens = NumberedTokens(FragileStore())
        found, tokens = list[int](), ["0"]
        for _ in range(3):
            since, text = now(self.worker.served.since("orders", tokens[-1], 1000))
            found += [each.token for each in since.written]
            tokens.append(text)
        self.assertEqual((found, tokens[-1]), ([2, 3, 5, 6], "m0~1.6~2.3"))
        places = {InstanceName("one"): Token(6), InstanceName("two"): Token(3)}
        self.assertEqual(self.worker.token("orders"), MultiWriterToken(Token(0), places), "a third may have facts")
        new = self.serve(HELLO + position(3, 3, writer="two") + position(1, 1, writer="new"), port=9102)
        self.net.run(10.0)
        self.send(new, rdata(4, writer="new"), position(4, 6, writer="new"), position(3, 6, writer="two"))
        since, text = now(self.worker.served.since("orders", tokens[-1], 1000))
        self.assertEqual(([each.token for each in since.written], text), ([4], "6"))
        self.assertEqual(self.worker.token("orders"), MultiWriterToken(Token(6)))


class FieldsTests(WorkerCase):
    def test_the_fields_of_a_stream_that_is_described_are_shown(self) -> None:
        self.worker = self.make_worker(definitions=[StreamDefinition("orders", row=["item", "state"])])
        self.serve(HELLO + position(1, 1) + position(1, 1, "stock"))
        self.start()
        rows = {each.definition.name: each.definition.row for each in self.worker.served.stream_statuses()}
        self.assertEqual(rows, {"orders": ("item", "state"), "stock": None})


class FactoryTests(WorkerCase):
    def test_followers_have_the_rights_that_they_were_given(self) -> None:
        access = Access()
        for options in ({"writes": ["stock"]}, {"relay": True}):
            worker = self.make_worker(**options)
            self.assertIs(cast("Any", worker.factory(access))._access, access)
            begin(worker.stop())
            self.net.run()


class SegmentsTests(WorkerCase):
    def test_what_folders_have_is_shown_also_of_those_that_the_part_that_writes_waits_for(self) -> None:
        def chain(folder: str) -> SegmentChain:
            return SegmentChain(folder, ORDERS, MASTER, Token(0), Token(9), 5, 90)

        async def read(_: object) -> list[SegmentChain]:
            return [chain("read")]

        async def needed(_: object) -> list[SegmentChain]:
            return [chain("needed")]

        self.patch(CatchUpSources, "segments", read)
        self.patch(WrittenStreams, "segments", needed)
        self.assertEqual(now(self.worker.served.segments()), [chain("read")])
        writing = self.make_worker(writes=["stock"])
        self.assertEqual(now(writing.served.segments()), [chain("read"), chain("needed")])


class ShownPageTests(WorkerCase):
    def show(self, upto: int, writer: str = "master") -> list[int]:
        page = now(self.worker.served.shown_page("orders", writer, after=1, upto=upto, limit=10))
        return [each.token for each in page.facts]

    def test_a_copy_is_shown(self) -> None:
        self.serve(HELLO + position(1, 1) + rdata(2) + rdata(3))
        self.start()
        self.assertEqual((self.show(9), self.show(2)), ([2, 3], [2]))
        page = now(self.worker.served.shown_page("orders", "master", after=2, upto=9, limit=1))
        self.assertEqual(([each.token for each in page.facts], page.upto), ([3], 3))
        page = now(self.worker.served.shown_page("orders", "master", after=1, upto=9, limit=1))
        self.assertEqual(([each.token for each in page.facts], page.upto), ([2], 2))

    def test_a_relay_shows_what_it_has_received_of_a_stream_that_it_writes_too(self) -> None:
        async def fetch(_: object, stream: object, writer: object, step: CatchUp, limit: int) -> Page:
            return Page([fact(2, "[]")], step.upto, limited=False)

        self.patch(MissedFacts, "page", fetch)
        self.worker = self.make_worker(relay=True, writes=["orders"])
        writer = self.serve(HELLO + position(1, 1, writer="other"))
        self.start()
        with logged():
            self.send(writer, position(3, 3, writer="other"))
        self.assertEqual((self.at(writer="other"), self.show(9, "other")), (1, [2]))

    def test_a_stream_that_is_written_here_and_into_another_database_has_a_note(self) -> None:
        """A worker with SQLite did not store the facts of the other writer, and its status was live without a word."""
        self.worker = self.make_worker(writes=["orders", "stock"])
        writer = self.serve(HELLO + position(1, 1, writer="other"))
        self.start()
        self.send(writer, position(3, 3, writer="other"))
        notes = {each.definition.name: each.notes for each in self.worker.served.stream_statuses()}
        (note,) = notes.pop(ORDERS)
        self.assertIn("stream 'orders': other writes it in another database", note)
        self.assertEqual([*notes.values()], [[]] * len(notes))

    def test_only_a_relay_without_copies_does_not_store_what_it_serves(self) -> None:
        self.serve(HELLO + position(1, 1))
        for relay, copy in ((False, True), (False, False), (True, True), (True, False)):
            self.worker = self.make_worker(relay=relay, copy=copy)
            self.start()
            self.assertEqual(self.worker.served.stores("orders"), copy or not relay)
            self.assertTrue(self.worker.served.stores("unknown"))
            begin(self.worker.stop())
            self.net.run()

    def test_facts_that_a_function_receives_are_fetched_also_those_that_it_cannot_take(self) -> None:
        asked: list[tuple[StreamName, InstanceName, CatchUp, int]] = []

        async def fetch(*what: Any) -> Page:
            asked.append(what[1:])
            return Page([fact(3, "[]")], Token(3), limited=False)

        @self.worker.on("orders")
        def refuse(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            raise ValueError("a bad order")

        self.patch(MissedFacts, "page", fetch)
        with logged():
            writer = self.serve(HELLO + position(1, 1))
            self.start()
            self.send(writer, rdata(2), rdata(3))
            self.assertEqual(self.at(), 1)
        self.flushLoggedErrors(ValueError)
        self.assertEqual(self.show(9), [3])
        self.assertEqual(asked, [(ORDERS, MASTER, CatchUp(Token(1), Token(3)), 10)])
        self.show(2)
        self.assertEqual(asked[1:], [(ORDERS, MASTER, CatchUp(Token(1), Token(2)), 10)])
        nothing = now(self.worker.served.shown_page("orders", "master", after=1, upto=1, limit=10))
        self.assertEqual(nothing, Page([], Token(1), limited=False))
        self.assertIsInstance(
            error_of(begin(self.worker.served.shown_page("orders", "other", after=0, upto=9, limit=1))),
            UnknownStreamError,
        )


class ServedTests(WorkerCase):
    def setUp(self) -> None:
        super().setUp()
        self.writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.send(self.writer, rdata(2), rdata(3), position(3, 5))

    def page(self, writer: str | None, after: int, upto: int | None, limit: int = 10) -> tuple[list[int], int, bool]:
        page = now(self.worker.served.page("orders", writer, after=after, upto=upto, limit=limit))
        return [fact.token for fact in page.facts], page.upto, page.limited

    def test_pages_are_read_from_the_copy_and_end_at_its_position(self) -> None:
        self.assertEqual(self.page("master", 0, None), ([2, 3], 5, False))
        self.assertEqual(self.page("master", 2, 99), ([3], 5, False))
        self.assertEqual(self.page("master", 0, 99, limit=1), ([2], 2, True))
        self.assertEqual(self.page("master", 7, 99), ([], 5, False))
        self.assertEqual(self.page("unknown", 0, 99), ([], 0, False))

    def test_a_page_of_several_writers_needs_the_name_of_one(self) -> None:
        self.assertEqual(self.page(None, 0, None)[0], [2, 3])
        self.send(self.writer, position(1, 1, writer="other"))
        error = error_of(begin(self.worker.served.page("orders", None, after=0, upto=None, limit=1)))
        self.assertEqual(str(error), "name the writer of 'orders': master, other")

    def test_a_page_of_a_stream_without_a_writer_needs_a_name(self) -> None:
        self.worker._followed._followers[ORDERS].cursors.clear()
        error = error_of(begin(self.worker.served.page("orders", None, after=0, upto=None, limit=1)))
        self.assertEqual(str(error), "name the writer of 'orders': none is known")

    def test_a_stream_that_is_not_copied_is_not_served(self) -> None:
        error = error_of(begin(self.worker.served.page("unknown", None, after=0, upto=None, limit=1)))
        assert isinstance(error, UnknownStreamError)
        self.assertEqual((str(error), error.stream), ("no copy of stream 'unknown' is kept here", "unknown"))
        error = error_of(begin(self.worker.served.history("x" * 200, "master")))
        assert isinstance(error, UnknownStreamError)
        self.assertEqual((str(error), error.stream), (f"no copy of stream '{'x' * 100}' is kept here", "x" * 200))

    def test_a_worker_without_writes_refuses_appends(self) -> None:
        error = error_of(begin(self.worker.served.append_texts("orders", [[1]], None)))
        assert isinstance(error, NotAWriterError)
        self.assertEqual(
            str(error),
            "worker 'worker1' writes no stream: append to 'orders' at its writer, or give writes=[…]",
        )
        self.assertEqual((error.stream, error.instance), ("orders", "worker1"))
        for ask, name, why in (
            (lambda: self.worker.stream("orders"), "orders", "writes no stream: append to 'orders' at its writer, or "),
            (lambda: self.worker.stream("x" * 200), "x" * 200, f"writes no stream: append to '{'x' * 100}' at its "),
            (self.worker.served.writer, None, "writes no stream: give writes="),
            (self.worker.factory, None, "publishes nothing: give writes=[…] or relay=True"),
        ):
            with self.assertRaises(NotAWriterError) as caught:
                ask()
            self.assertIn(f"worker 'worker1' {why}", str(caught.exception))
            self.assertEqual((caught.exception.stream, caught.exception.instance), (name, "worker1"))

    def test_the_history_of_a_copy_is_the_one_that_was_followed(self) -> None:
        history = (Epoch("first", Token(1), Token(1)),)
        now(self.store.store_histories(MASTER, {ORDERS: history}))
        self.assertEqual(now(self.worker.served.history("orders", "master")), history)
        self.assertEqual(now(self.worker.served.history("orders", "other")), ())

    def test_check_fails_if_the_store_fails(self) -> None:
        now(self.worker.served.check())
        now(self.store.close())
        self.assertIsInstance(error_of(begin(self.worker.served.check())), StoreError)

    def test_statuses_show_the_applied_position_and_the_connections(self) -> None:
        (status,) = self.worker.served.stream_statuses()
        self.assertEqual(self.worker.served.stream_statuses(status.definition.name), [status])
        self.assertEqual(self.worker.served.stream_statuses("no name"), [])
        self.assertEqual(self.worker.served.stream_statuses(""), [])
        (writer,) = status.writers
        self.assertEqual((writer.instance, writer.position, writer.published, writer.state), ("master", 5, 5, "live"))
        with patch.object(CatchUpSources, "source_of", lambda _, stream, of: f"{stream} of {of}"):
            self.assertEqual(self.worker.served.stream_statuses()[0].writers[0].source, "orders of master")
        (peer,) = self.worker.served.peer_statuses()
        self.assertEqual((peer.name, peer.address, peer.last_command), ("example.com", "127.0.0.1:9092", "POSITION"))
        self.net.cut()
        self.assertEqual(
            (self.worker.served.peer_statuses(), self.worker.served.stream_statuses()[0].writers[0].state),
            ([], "not connected"),
        )

    def test_a_writer_that_is_not_connected_is_named_with_the_reason(self) -> None:
        self.assertEqual(self.worker.served.unreachable_writers(), [])
        self.net.cut()
        del self.net.serving[WIRE]
        self.assertEqual(self.worker.served.unreachable_writers(), ["tcp:127.0.0.1:9092"])
        with logged():
            self.net.run(3.0)
        (unreachable,) = self.worker.served.unreachable_writers()
        self.assertRegex(unreachable, r"^tcp:127\.0\.0\.1:9092 \(.*refused.*\)$")

    def test_every_metric_has_its_value(self) -> None:
        self.worker.cached(name="get")(lambda: None)()
        with logged():
            self.send(self.writer, position(8, 8))
            self.net.run(1.0)
            del self.net.serving[WIRE]
            self.send(self.writer, b"FOO\n")
        self.assertEqual(
            shown_metrics(self.worker.served.samples()),
            {
                "links": 0,
                "connections_total": 1,
                "faults_total kind=unknown command": 1,
                "catch_ups_total stream=orders": 3,
                "applied_rows_total stream=orders": 2,
                "failures_total stream=orders": 3,
                "resets_total stream=orders": 0,
                "history_checks_total stream=orders": 0,
                "history_mismatches_total stream=orders": 0,
                "position stream=orders writer=master": 5,
                "lag stream=orders writer=master": 3,
                "stopped stream=orders writer=master": 1,
                "cache_misses_total cache=get": 1,
                "cache_hits_total cache=get": 0,
                "cache_size cache=get": 1,
                "cache_invalidations_total cache=get": 0,
            },
        )
