"""Facts that a writer has deleted: its followers are answered with where to begin, and skip nothing silently."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import FactsGoneError, StoreError
from replication.follower import sources
from replication.follower.worker import Worker
from replication.segments.folders import LocalFolder
from replication.segments.manifest import Manifest, write_manifest
from replication.streams.definitions import CACHES, StreamDefinition
from replication.web.site import make_site
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.master import Master
from tests.doubles import FragileStore, Net, begin, logged, now
from tests.segments.histories import fact, write_segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from replication.segments.manifest import Segment

ORDERS, MASTER = StreamName("orders"), InstanceName("master")
WIRE, HTTP = 9092, 9093


class GoneCase(SynchronousTestCase):
    """A master that has deleted its facts up to 4, of 2 to 6; its workers are in the same process."""

    def setUp(self) -> None:
        self.net, self.store = Net(), FragileStore()
        self.processes: list[Any] = []
        self.start_master()
        self.append(5)
        now(self.store.forget_facts(ORDERS, MASTER, Token(4)))

    def tearDown(self) -> None:
        for each in reversed(self.processes):
            begin(each.stop())
            self.net.run()

    def start_master(self, retention: str | None = None) -> None:
        streams = [StreamDefinition(ORDERS, retention=retention)]
        self.master = Master(database=self.store, streams=streams, reactor=self.net, wall=self.net.seconds)
        self.net.serving[WIRE] = self.master.factory()
        self.net.serving[HTTP] = make_site(self.master.served, secret=None, reactor=self.net)
        self.processes.append(self.master)

    def append(self, count: int) -> None:
        for number in range(count):
            appended = begin(self.master.stream(ORDERS).append([[[f"row {number}"]]]))
            self.net.run()
            self.assertEqual(len(appended), 1)

    def follow(self, store: FragileStore, port: int = WIRE, **options: Any) -> Worker:
        self.worker = Worker(
            connect=[f"tcp:127.0.0.1:{port}"], database=store, reactor=self.net, audit_interval=0, **options
        )
        self.processes.append(self.worker)
        begin(self.worker.start())
        self.net.run(2.0)
        return self.worker

    def state(self) -> tuple[int, str, str]:
        (status,) = self.worker.served.stream_statuses(ORDERS)
        (writer,) = status.writers
        return writer.position, writer.state, writer.error or ""


class StopTests(GoneCase):
    def test_a_new_copy_stops_with_the_cure(self) -> None:
        copy = FragileStore()
        with logged() as messages:
            self.follow(copy)
            self.net.run(60.0)
        position, state, error = self.state()
        self.assertEqual((position, state), (0, "stopped"))
        self.assertIn("facts of orders by master up to 4 are gone", error)
        self.assertIn("--skip-gone", error)
        self.assertEqual(len([each for each in messages if "next attempt" in each]), 1)
        self.assertEqual(copy._streams[ORDERS].facts, {})

    def test_one_that_has_what_is_gone_follows(self) -> None:
        copy = FragileStore()
        now(copy.open())
        self.follow(copy, skip_gone=True)
        position, state, _ = self.state()
        self.assertEqual((position, state), (6, "live"))
        begin(self.worker.stop())
        self.net.run()
        self.append(2)
        now(self.store.forget_facts(ORDERS, MASTER, Token(6)))
        self.follow(copy)
        self.assertEqual(self.state(), (8, "live", ""))


class SkipTests(GoneCase):
    def test_a_copy_may_begin_at_the_first_kept_fact_and_refuses_pages_below_it(self) -> None:
        copy = FragileStore()
        with logged() as messages:
            self.follow(copy, skip_gone=True)
        self.assertEqual(self.state(), (6, "live", ""))
        self.assertIn("orders: facts of master after 0 up to 4 are gone, and are left out here", messages)
        self.assertEqual(sorted(copy._streams[ORDERS].facts), [5, 6])
        with self.assertRaises(FactsGoneError):
            now(self.worker.served.page(ORDERS, MASTER, after=0, upto=6, limit=10))

    def test_a_copy_that_is_killed_before_it_has_left_facts_out_refuses_nothing(self) -> None:
        """Another source may have the facts at the next start."""
        copy = FragileStore()
        copy.close_gate("commit")
        with logged():
            self.follow(copy, skip_gone=True)
        self.assertIn("commit", copy.asked)
        self.assertEqual((dict(now(copy.gone(ORDERS))), copy._streams[ORDERS].positions), ({}, {}))
        copy.open_gate("commit")
        self.net.run(1.0)
        self.assertEqual(dict(now(copy.gone(ORDERS))), {MASTER: 4})

    def test_what_was_left_out_of_a_lost_history_is_not_refused(self) -> None:
        """The master was restored after a copy has found that facts are gone, and before its position passed them."""
        copy = FragileStore()
        now(copy.open())
        self.follow(copy, skip_gone=True)
        begin(self.worker.stop())
        self.net.run()
        self.append(3)
        now(self.store.forget_facts(ORDERS, MASTER, Token(8)))
        copy.errors["commit"] = StoreError("away", temporary=True)
        with logged():
            self.follow(copy, skip_gone=True)
        self.assertEqual((self.state()[0], dict(now(copy.gone(ORDERS)))), (6, {MASTER: 4}))
        self.net.serving.pop(WIRE)
        self.net.cut()
        history = now(self.store.history(ORDERS, MASTER))
        begin(self.master.stop())
        self.net.run()
        self.processes.remove(self.master)
        now(self.store.open())
        stream = self.store._streams[ORDERS]
        stream.gone = {MASTER: Token(4)}  # the backup
        stream.facts = {Token(each): (MASTER, ("[1]",)) for each in (5, 6)}
        stream.positions = {MASTER: Token(6)}
        now(self.store.store_histories(MASTER, {ORDERS: history[:1]}))
        self.start_master()
        self.append(4)
        copy.errors.clear()
        with logged():
            self.net.run(20.0)
        self.assertEqual(self.state(), (10, "live", ""))
        self.assertEqual(dict(now(copy.gone(ORDERS))), {MASTER: 4})
        self.assertEqual(sorted(copy._streams[ORDERS].facts), [*range(5, 11)])

    def test_a_function_receives_what_is_kept(self) -> None:
        seen: list[int] = []
        store = FragileStore()
        worker = Worker(database=store, reactor=self.net, audit_interval=0, skip_gone=True)
        self.processes.append(worker)

        @worker.on(ORDERS)
        def note(facts: Any, _txn: Any) -> None:
            seen.extend(fact.token for fact in facts)

        with logged():
            begin(worker.start())
            self.net.run(2.0)
            self.append(1)
        self.assertEqual(seen, [5, 6, 7])


class SegmentTests(GoneCase):
    """The master has deleted its facts up to 12; a folder of segments has most of them."""

    FACTS = tuple(fact(token, "x" * 200 if token in (4, 8, 9) else f"row {token - 2}") for token in range(2, 12))

    def setUp(self) -> None:
        super().setUp()
        self.append(7)
        now(self.store.forget_facts(ORDERS, MASTER, Token(12)))
        holder = TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = LocalFolder(Path(holder.name))

    def write(self) -> list[Segment]:
        """Write two segments without the rows of 4, 8 and 9, which are longer than a line."""
        parts = [(self.FACTS[:4], 0, 5), (self.FACTS[4:], 5, 11)]
        segments = [write_segment(self.folder, of, after=after, upto=upto, limit=100) for of, after, upto in parts]
        write_manifest(self.folder, Manifest(segments))
        return segments

    def follow_with_segments(self) -> FragileStore:
        copy = FragileStore()
        with patch.object(sources, "SerialThread", NoThread):
            self.follow(copy, skip_gone=True, catch_up=[self.folder.url, f"http://127.0.0.1:{HTTP}"])
            self.net.run(30.0)
        return copy

    def test_only_facts_that_the_segments_lack_are_left_out(self) -> None:
        self.write()
        with logged() as messages:
            copy = self.follow_with_segments()
        self.assertEqual(sorted(copy._streams[ORDERS].facts), [2, 3, 5, 6, 7, 10, 11, 13])
        self.assertEqual(self.state(), (13, "live", ""))
        text = "orders: facts of master after {} up to {} are gone, and are left out here"
        ranges = [(3, 4), (7, 8), (8, 9), (11, 12)]
        self.assertEqual([each for each in messages if "left out" in each], [text.format(*each) for each in ranges])

    def test_nothing_is_left_out_because_a_segment_is_damaged(self) -> None:
        """Neither its facts, which a copy of its file has, nor those of the segments after it."""
        first, _ = self.write()
        path = self.folder.path / first.name
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b"row", b"raw"))
        with logged() as messages:
            copy = self.follow_with_segments()
        position, _, error = self.state()
        self.assertEqual((position, copy._streams[ORDERS].facts), (0, {}))
        self.assertIn("damaged", error)
        self.assertIn("damaged", "".join(messages))
        self.assertNotIn("left out", "".join(messages))


class NoThread:
    """Calls functions on this thread: the reactor of these tests has no others."""

    def __init__(self, _reactor: object, _name: str) -> None:
        pass

    async def run(self, function: Callable[..., Any], *args: object, **options: object) -> Any:
        return function(*args, **options)

    async def stop(self) -> None:
        pass


class CachesTests(GoneCase):
    """A worker with a cached function was disconnected, and the master has deleted the invalidations meanwhile."""

    def test_no_cached_value_is_older_than_what_is_left_out(self) -> None:
        """Without ``skip_gone``, too: whatever was invalidated, an empty cache has no old value."""
        for skip_gone in (True, False):
            with self.subTest(skip_gone=skip_gone):
                self.check(skip_gone=skip_gone)
            self.tearDown()
            self.setUp()

    def check(self, *, skip_gone: bool) -> None:
        self.worker = Worker(database=FragileStore(), reactor=self.net, audit_interval=0, skip_gone=skip_gone)
        self.processes.append(self.worker)
        values = ["old"]

        @self.worker.cached()
        def get_value(_key: str) -> str:
            return values[-1]

        begin(self.worker.start())
        self.net.run(2.0)
        self.assertEqual(get_value("a"), "old")
        wire = self.net.serving.pop(WIRE)
        self.net.cut()
        values.append("new")
        begin(self.master.stream(CACHES).append([[["get_value", ["a"], 1]]]))
        self.net.run(1.0)
        token = self.master.token(CACHES).stream
        now(self.store.forget_facts(CACHES, MASTER, token))
        self.net.serving[WIRE] = wire
        waiting = begin(self.worker.wait_for(CACHES, MASTER, token, timeout=60))
        with logged():
            self.net.run(20.0)
        self.assertEqual(waiting, [None])
        self.assertEqual(get_value("a"), "new")
        (status,) = self.worker.served.stream_statuses(CACHES)
        self.assertEqual([each.state for each in status.writers], ["live"])


class UnusedTests(GoneCase):
    """A stream with neither a function nor a copy: nothing is applied, so nothing is left out."""

    def test_its_position_goes_on(self) -> None:
        self.worker = Worker(database=FragileStore(), reactor=self.net, audit_interval=0)
        self.processes.append(self.worker)
        self.worker.on("caches")(lambda _facts, _txn: None)
        begin(self.worker.start())
        self.net.run(2.0)
        wire = self.net.serving.pop(WIRE)
        self.net.cut()
        self.append(3)
        now(self.store.forget_facts(ORDERS, MASTER, Token(8)))
        self.net.serving[WIRE] = wire
        with logged() as messages:
            self.net.run(20.0)
        self.assertEqual(self.state(), (9, "live", ""))
        self.assertFalse([each for each in messages if "left out" in each])


class RelayTests(GoneCase):
    """A relay that was disconnected leaves out what the writer has deleted; its followers are connected meanwhile."""

    def relayed(self, *, copy: bool, skip_gone: bool) -> Worker:
        """Return a follower that has all facts up to 6, behind a relay that lacked facts and has left them out."""
        relay_store, store = FragileStore(), FragileStore()
        with logged():
            relay = self.follow(relay_store, skip_gone=True, relay=True, copy=copy)
            self.net.serving[9192] = relay.factory()
            self.net.serving[9193] = make_site(relay.served, secret=None, reactor=self.net)
            self.follow(store, 9192, skip_gone=True)
            self.assertEqual(self.state(), (6, "live", ""))
            begin(self.worker.stop())
            self.net.run()
            worker = self.follow(store, 9192, skip_gone=skip_gone)
            wire = self.net.serving.pop(WIRE)
            self.net.cut()
            self.net.run(1.0)
            self.append(3)
            now(self.store.forget_facts(ORDERS, MASTER, Token(8)))
            self.assertEqual(self.state(), (6, "live", ""))
            self.net.serving[WIRE] = wire
            self.net.run(10.0)
        return worker

    def test_a_follower_receives_the_error_and_skips_nothing(self) -> None:
        for copy in (True, False):
            self.relayed(copy=copy, skip_gone=False)
            position, state, error = self.state()
            self.assertEqual((position, state), (6, "stopped"), f"a relay with copy={copy}")
            self.assertIn("facts of orders by master up to 8 are gone", error)
            self.assertEqual(error.count("--skip-gone"), 1)
            self.tearDown()
            self.setUp()

    def test_a_follower_that_may_leave_them_out_has_the_mark(self) -> None:
        for copy in (True, False):
            worker = self.relayed(copy=copy, skip_gone=True)
            self.assertEqual(self.state(), (9, "live", ""))
            with self.assertRaises(FactsGoneError):
                now(worker.served.page(ORDERS, MASTER, after=6, upto=9, limit=10))
            self.tearDown()
            self.setUp()
