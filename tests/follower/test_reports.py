"""Workers report up to where they have applied facts, and a retention waits for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from msgspec.structs import replace
from twisted.internet.task import Clock
from twisted.logger import LogLevel
from twisted.trial.unittest import SynchronousTestCase

from replication import __version__
from replication.deferreds import Lifetime
from replication.errors import CatchUpError, StoreError, StreamError
from replication.follower import reports as module
from replication.follower.catch_up import CatchUpSources
from replication.follower.reports import (
    CHECK_INTERVAL,
    RETRY_AFTER,
    UNCHANGED_AFTER,
    UNKNOWN_AFTER,
    PositionReports,
    RelayedReports,
)
from replication.follower.stream import FollowMode
from replication.follower.worker import Worker
from replication.streams.cursor import Check, Cursor
from replication.streams.interfaces import KnownFollower, Write, WriterStatus
from replication.web.site import make_site
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer import retention
from replication.writer.known_followers import LATER, SOON
from tests.docs.pages import page, section
from tests.doubles import FragileStore, begin, logged, now
from tests.follower.cases import HELLO, HTTP, WorkerCase, position
from tests.follower.test_gone import MASTER, ORDERS, GoneCase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.facts import Fact


def test_the_page_has_the_intervals() -> None:
    assert (SOON, LATER, UNCHANGED_AFTER) == (30, 60, 600)
    text = " ".join(section(page("operations.md"), "### Known followers").split())
    assert "it sends a report every minute; if the writer has a retention, every 30 s." in text
    assert "If nothing changes, it repeats the report after ten minutes." in text


class ReportTests(GoneCase):
    """The master has the facts 5 and 6; those up to 4 are deleted."""

    def reported(self) -> dict[str, Any]:
        return {each.name: each.positions for each in now(self.store.known_followers())}

    def test_a_copy_reports_its_positions_again_and_again(self) -> None:
        self.follow(FragileStore(), skip_gone=True)
        self.net.run(CHECK_INTERVAL)
        self.assertEqual(self.reported(), {"worker1": {ORDERS: {MASTER: 6}, "caches": {MASTER: 1}}})
        self.append(1)
        self.net.run(3_700.0)
        self.assertEqual(self.reported()["worker1"][ORDERS], {MASTER: 7})

    def test_a_process_that_stores_no_position_reports_nothing(self) -> None:
        self.follow(FragileStore(), copy=False)
        self.net.run(CHECK_INTERVAL * 2)
        self.assertEqual(self.reported(), {})


class Process:
    """The HTTP of a writer; it answers, or fails, in this order."""

    def __init__(self, *answers: float | Exception | None) -> None:
        self.answers = [*answers]
        self.reports: list[Any] = []

    async def report(self, name: str, positions: Any, version: str = "", streams: Any = None) -> float | None:
        self.reports.append((name, positions) if streams is None else (name, positions, streams))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Follower:
    """A stream at 5."""

    name, mode = ORDERS, FollowMode.APPLIED

    def __init__(self) -> None:
        self.position = 5
        self.state = "catching up"

    @property
    def cursors(self) -> dict[InstanceName, Cursor]:
        cursor = Cursor(Token(self.position))
        cursor.position_received("link", Token(self.position), Token(self.position))
        return {MASTER: cursor}

    def all_positions(self) -> dict[InstanceName, Token]:
        return {each: cursor.position for each, cursor in self.cursors.items()}

    def status(self, writer: InstanceName) -> WriterStatus:
        return WriterStatus(writer, Token(self.position), Token(self.position), self.state)


FOLLOWER: Any = Follower()


class TwoWritersTests(WorkerCase):
    """A worker is started again, and one of its two writers is not reached over the wire, but over HTTP."""

    def reported(self, *functions: str, **options: Any) -> Any:
        process = Process(*[30.0] * 9)
        with patch.object(CatchUpSources, "over_http_of", lambda _sources, _wires: [process]):
            self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9102"], **options)
            for each in functions:
                self.apply(each)
            begin(self.worker.start())
            self.net.run(CHECK_INTERVAL + 0.1)  # more, because the steps to random retries are rounded
        return process.reports[-1][1]

    def test_all_facts_of_a_stream_without_a_position_since_the_start_are_kept(self) -> None:
        self.serve(HELLO + position(1, 3, writer="one"))
        self.serve(HELLO + position(1, 5, "stock", writer="two"), port=9102)
        with logged():
            self.assertEqual(self.reported(), {ORDERS: {"one": 3}, "stock": {"two": 5}})
            self.tearDown()
            del self.net.serving[9102]
            self.assertEqual(self.reported(), {ORDERS: {"one": 3}, "stock": {}})
            self.tearDown()
            self.assertEqual(self.reported(streams=["orders"]), {ORDERS: {"one": 3}})

    def test_the_same_for_a_function(self) -> None:
        self.serve(HELLO + position(1, 3, writer="one"))
        with logged():
            self.assertEqual(self.reported("stock"), {"stock": {}})


class TimeTests(SynchronousTestCase):
    def after(self, process: Process, seconds: float) -> int:
        """Return how many reports a process has received after some seconds more."""
        self.clock.pump([CHECK_INTERVAL] * int(seconds / CHECK_INTERVAL))
        return len(process.reports)

    async def copied(self) -> list[StreamName]:
        return [ORDERS]

    async def sync(self) -> None:
        self.syncs += 1
        if self.disk_fails:
            raise StoreError("the disk fails")

    def start(self, *processes: Process) -> None:
        self.clock = Clock()
        self.follower = Follower()
        self.syncs, self.disk_fails = 0, False
        lifetime = Lifetime(self.clock)
        self.addCleanup(lifetime.end)
        PositionReports(
            instance_name=InstanceName("worker1"),
            processes=lambda: processes,  # type: ignore[arg-type, return-value]
            followers=[self.follower],  # type: ignore[list-item]
            copied=self.copied,
            sync=self.sync,
            lifetime=lifetime,
        ).start()

    def test_the_writer_decides_when_the_next_report_is_due(self) -> None:
        process = Process(30.0, 100.0, 100.0)
        self.start(process)
        self.assertEqual([self.after(process, each) for each in (5, 25, 5, 95, 5)], [1, 1, 2, 2, 3])
        self.assertEqual(process.reports[0], ("worker1", {ORDERS: {MASTER: 5}}))

    def test_each_writer_receives_its_reports_at_its_own_times(self) -> None:
        slow, quick = Process(100.0, 100.0), Process(*[30.0] * 5)
        self.start(slow, quick)
        self.assertEqual((self.after(slow, 95), len(quick.reports)), (1, 4))

    def test_what_a_writer_knows_is_repeated_after_ten_minutes_only(self) -> None:
        process = Process(*[60.0] * 6)
        self.start(process)
        self.follower.state = "live"
        self.assertEqual(self.after(process, CHECK_INTERVAL), 1)
        self.assertEqual(self.after(process, UNCHANGED_AFTER - 60.0), 1)
        self.assertEqual(self.after(process, 60.0), 2)
        self.follower.position = 6
        self.assertEqual(self.after(process, 60.0), 3)
        self.follower.state = "catching up"  # the lag changes, though the position does not
        self.assertEqual(self.after(process, 120.0), 5)

    def test_after_a_writer_did_not_answer_the_report_is_repeated(self) -> None:
        process = Process(60.0, CatchUpError("down"), 60.0, 60.0)
        self.start(process)
        self.follower.state = "live"
        self.after(process, CHECK_INTERVAL)
        self.follower.position = 6
        self.assertEqual(self.after(process, 60.0), 2)
        self.follower.position = 5
        self.assertEqual(self.after(process, RETRY_AFTER), 3)

    def test_no_position_is_reported_that_a_power_loss_may_undo(self) -> None:
        process = Process(60.0, 60.0)
        self.start(process)
        self.disk_fails = True
        self.assertEqual((self.after(process, 20), self.syncs), (0, 4))
        self.disk_fails = False
        self.assertEqual((self.after(process, CHECK_INTERVAL), self.syncs), (1, 5))

    def test_an_unexpected_error_ends_the_reports_and_is_logged(self) -> None:
        process = Process(ZeroDivisionError())
        self.start(process)
        with logged() as messages:
            self.assertEqual(self.after(process, 2 * UNKNOWN_AFTER), 1)
        self.assertEqual(messages, ["reporting positions has ended: restart this process"])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_a_writer_without_the_call_is_left_alone(self) -> None:
        process = Process(None, None)
        self.start(process)
        with logged() as messages:
            self.assertEqual(self.after(process, UNKNOWN_AFTER), 1)
        self.assertEqual(messages, [])

    def test_a_writer_that_does_not_answer_receives_the_report_later(self) -> None:
        process = Process(CatchUpError("down"), CatchUpError("down"), 30.0)
        self.start(process)
        with logged() as warnings, logged(LogLevel.info) as messages:
            self.assertEqual(self.after(process, 2 * RETRY_AFTER + CHECK_INTERVAL), 3)
        self.assertEqual(warnings, [])
        self.assertEqual(
            messages,
            [
                "positions cannot be reported, so a retention may not wait for them: down",
                "positions are reported again",
            ],
        )


class RetentionTests(GoneCase):
    def test_what_a_stopped_follower_lacks_is_kept_until_it_is_forgotten(self) -> None:
        self.patch(retention, "SLICE_ROWS", 1)
        begin(self.processes.pop().stop())
        self.net.run()
        self.start_master("2 rows")
        copy = FragileStore()
        self.follow(copy, skip_gone=True)
        self.net.run(CHECK_INTERVAL)
        begin(self.processes.pop().stop())  # the worker, at 6
        self.append(6)
        self.net.run(retention.INTERVAL * 2)
        self.assertEqual(sorted(self.store._streams[ORDERS].facts), [*range(7, 13)])
        (status,) = self.master.served.stream_statuses(ORDERS)
        self.assertIn("are kept for follower worker1", status.notes[0])
        self.follow(copy)
        self.net.run(SOON + CHECK_INTERVAL + retention.INTERVAL)
        self.assertEqual(self.state(), (12, "live", ""))
        self.assertEqual(sorted(self.store._streams[ORDERS].facts), [11, 12])
        begin(self.processes.pop().stop())
        self.append(2)
        self.net.run(retention.INTERVAL * 2)
        self.assertEqual(sorted(self.store._streams[ORDERS].facts), [13, 14])


class RestoreTests(GoneCase):
    """The writer's database has lost fact 6, and then has another fact with this ID, and more."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(retention, "SLICE_ROWS", 1)

    def start(self, store: FragileStore, **options: Any) -> Worker:
        worker = Worker(connect=["tcp:127.0.0.1:9092"], database=store, reactor=self.net, audit_interval=0, **options)

        @worker.on("orders")
        def apply(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            self.seen += [fact.token for fact in facts]

        self.processes.append(worker)
        begin(worker.start())
        self.net.run(SOON)
        return worker

    def restore(self) -> None:
        begin(self.processes.pop(0).stop())
        self.net.run()
        now(self.store.open())
        now(self.store.transaction().commit([Write(ORDERS, MASTER, Token(5), reset=True)]))
        for each in now(self.store.known_followers()):
            now(self.store.store_follower(replace(each, positions={ORDERS: {MASTER: Token(5)}})))
        self.net.cut()
        self.start_master("2 rows")
        begin(self.master.start())
        self.append(5)

    def kept(self) -> list[int]:
        self.net.run(2 * SOON + retention.INTERVAL)
        return sorted(self.store._streams[ORDERS].facts)

    def test_what_a_function_lacks_that_cannot_go_back_is_kept(self) -> None:
        """Its position counts facts that the writer has lost."""
        self.seen: list[int] = []
        store = FragileStore()
        worker = self.start(store, skip_gone=True, copy=False)
        with logged():
            self.restore()
            self.assertEqual(self.kept(), [6, 7, 8, 9, 10])
            begin(worker.stop())
            self.processes.remove(worker)
            self.net.run()
            self.start(store, accept_new_history=True, copy=False)
        self.assertEqual(self.seen, [5, 6, 6, 7, 8, 9, 10])
        self.assertEqual(self.kept(), [9, 10])


class RelayTests(GoneCase):
    """A follower behind a relay; both have a copy."""

    def setUp(self) -> None:
        super().setUp()
        self.relay = self.follow(FragileStore(), skip_gone=True, relay=True, instance_name="relay1")
        self.net.serving[7092] = self.relay.factory()
        self.net.serving[7093] = make_site(self.relay.served, secret=None, reactor=self.net)

    def reported(self) -> dict[str, Any]:
        return {each.name: each.positions.get(ORDERS) for each in now(self.store.known_followers())}

    def test_what_a_follower_behind_a_relay_reports_reaches_the_writer(self) -> None:
        self.follow(FragileStore(), port=7092, skip_gone=True)
        self.net.run(CHECK_INTERVAL)
        self.assertEqual(self.reported(), {"relay1": {MASTER: 6}, "worker1": {MASTER: 6}})
        sites: list[Any] = [self.net.serving[port] for port in (7093, HTTP)]
        versions = [each.resource.report_notes["worker1"].version for each in sites]
        self.assertEqual(versions, [__version__, ""])  # the relay does not know which version it passes on
        followers = self.relay.served.followers
        assert followers is not None
        self.assertEqual([each.name for each in now(followers.followers())], ["worker1"])
        with self.assertRaisesRegex(StreamError, "forget it at the writers"):
            now(followers.forget("worker1"))
        self.assertEqual(now(followers.followers()), [])

    def test_the_soonest_of_all_writers_decides_and_one_that_fails_is_an_error(self) -> None:
        writers = [Process(30.0, None, None), Process(100.0, None, CatchUpError("down"))]
        reports = RelayedReports(
            processes=lambda: writers,  # type: ignore[arg-type, return-value]
            missing=tuple,
            wall=lambda: 7.5,
            follower_of=lambda _: FOLLOWER,
        )
        positions = {ORDERS: {MASTER: Token(5)}}
        self.assertEqual([now(reports.report("worker1", positions)) for _ in range(2)], [30.0, LATER])
        self.assertEqual([each.reports for each in writers], [[("worker1", positions)] * 2] * 2)
        self.assertEqual(now(reports.followers()), [KnownFollower(InstanceName("worker1"), positions, 7.5)])
        with self.assertRaisesRegex(StoreError, "the report of 'worker1' cannot be passed on: down") as caught:
            now(reports.report("worker1", positions))
        self.assertTrue(caught.exception.temporary)

    def test_a_report_that_does_not_reach_each_writer_is_refused(self) -> None:
        process, silent = Process(30.0, 30.0), ["tcp:127.0.0.1:9092"]
        reports = RelayedReports(
            processes=lambda: [process],  # type: ignore[list-item]
            missing=lambda: silent,
            wall=lambda: 7.5,
            follower_of=lambda _: FOLLOWER,
        )
        positions = {ORDERS: {MASTER: Token(5)}}
        with self.assertRaisesRegex(StoreError, "no position was received from tcp:127.0.0.1:9092 yet") as caught:
            now(reports.report("worker1", positions))
        self.assertTrue(caught.exception.temporary)
        self.assertEqual(process.reports, [("worker1", positions)])
        silent.clear()
        self.assertEqual(now(reports.report("worker1", positions)), 30.0)

    def test_only_positions_of_known_streams_and_writers_are_kept_and_all_are_passed_on(self) -> None:
        process = Process(30.0)
        known = {ORDERS: FOLLOWER}
        reports = RelayedReports(processes=lambda: [process], missing=tuple, wall=lambda: 7.5, follower_of=known.get)  # type: ignore[list-item]
        positions = {ORDERS: {MASTER: Token(5), InstanceName("x"): Token(6)}, StreamName("y"): {MASTER: Token(7)}}
        now(reports.report("worker1", positions))
        self.assertEqual(process.reports, [("worker1", positions)])
        self.assertEqual([each.positions for each in now(reports.followers())], [{ORDERS: {MASTER: 5}}])

    def test_a_position_that_may_count_lost_facts_is_not_passed_on(self) -> None:
        """A retention would not wait for a follower that has not noticed yet that its relay went back."""
        process, ahead = Process(*[30.0] * 3), InstanceName("x")
        cursor = Cursor(Token(5), checks_history=True)
        follower: Any = SimpleNamespace(cursors={MASTER: cursor}, all_positions=lambda: {MASTER: Token(5)})
        reports = RelayedReports(
            processes=lambda: [process],  # type: ignore[list-item]
            missing=tuple,
            wall=lambda: 7.5,
            follower_of={ORDERS: follower}.get,
        )

        def passed_on(token: int) -> dict[InstanceName, Token]:
            now(reports.report("worker1", {ORDERS: {MASTER: Token(token), ahead: Token(9)}}))
            of_orders: dict[InstanceName, Token] = process.reports[-1][1][ORDERS]
            return of_orders

        cursor.position_received("link", Token(5), Token(5))
        self.assertEqual(passed_on(5), {ahead: 9}, "the relay has not compared its history")
        step = cursor.step()
        assert isinstance(step, Check)
        self.assertTrue(cursor.compared(step, Token(5), both_known=True))
        cursor.checked(step)
        self.assertEqual(passed_on(5), {MASTER: 5, ahead: 9})
        self.assertEqual(passed_on(6), {ahead: 9}, "the relay went back")

    def test_a_report_about_some_streams_is_passed_on_as_one(self) -> None:
        process = Process(30.0, 30.0)
        reports = RelayedReports(
            processes=lambda: [process],  # type: ignore[list-item]
            missing=tuple,
            wall=lambda: 7.5,
            follower_of=lambda _: FOLLOWER,
        )
        first = {ORDERS: {MASTER: Token(5)}, StreamName("other"): {MASTER: Token(5)}}
        second = {ORDERS: {MASTER: Token(4)}}
        now(reports.report("worker1", first))
        now(reports.report("worker1", second, {ORDERS}))
        self.assertEqual(process.reports, [("worker1", first), ("worker1", second, {ORDERS})])
        self.assertEqual([each.positions for each in now(reports.followers())], [{**first, **second}])

    def test_a_process_that_writes_keeps_the_reports_of_its_own_streams(self) -> None:
        noted: list[object] = []
        positions = {ORDERS: {MASTER: Token(5)}}
        older = [KnownFollower(InstanceName(name), {}, 1.0) for name in ("worker1", "worker0")]

        class Own:
            async def report(self, name: str, positions: object, streams: object = None) -> float:
                noted.append((name, positions))
                return 5.0

            async def followers(self) -> list[KnownFollower]:
                return older

            async def forget(self, name: str) -> None:
                noted.append(name)

        writers = [Process(30.0)]
        reports = RelayedReports(
            processes=lambda: writers,  # type: ignore[arg-type, return-value]
            missing=tuple,
            wall=lambda: 7.5,
            follower_of=lambda _: FOLLOWER,
            own=Own(),
        )
        self.assertEqual(now(reports.report("worker1", positions)), 5.0)
        newer = KnownFollower(InstanceName("worker1"), positions, 7.5)
        self.assertEqual(now(reports.followers()), [older[1], newer])
        now(reports.forget("worker0"))
        self.assertEqual(noted, [("worker1", positions), "worker0"])

    def test_a_limited_number_is_listed(self) -> None:
        self.patch(module, "MAX_FOLLOWERS", 2)
        reports = RelayedReports(processes=list, missing=tuple, wall=lambda: 7.5, follower_of=lambda _: FOLLOWER)
        for name in ("b", "c", "b", "a"):
            now(reports.report(name, {}))
        self.assertEqual([each.name for each in now(reports.followers())], ["a", "b"])
        now(reports.forget("a"))  # there is no writer that knows it
