"""Retention: a writer deletes old facts in slices, and keeps those that a known follower or a segments folder needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.base import ReactorBase
from twisted.logger import LogLevel
from twisted.trial.unittest import SynchronousTestCase

from replication.deferreds import Lifetime
from replication.errors import ConfigError, FactsGoneError, StoreError
from replication.streams.definitions import StreamDefinition
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer import retention
from replication.writer.master import Master
from tests.doubles import FragileStore, Net, begin, logged, now, shown_metrics

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from replication.streams.interfaces import FactSlice

ORDERS, MASTER = StreamName("orders"), InstanceName("master")
AGE = 200.0  # seconds


class Needs:
    """A follower and a replay lack the facts above ``has``."""

    def __init__(self, has: int = 0) -> None:
        self.has = has
        self.error: Exception | None = None
        self.asked = 0

    async def needed(
        self, streams: Collection[StreamName], writer: InstanceName
    ) -> Mapping[StreamName, Mapping[str, Token]]:
        assert writer == MASTER
        self.asked += 1
        if self.error is not None:
            raise self.error
        return {name: {"replay": Token(self.has), "follower worker1": Token(self.has)} for name in streams}

    async def segments(self) -> tuple[()]:
        return ()


class RetentionCase(SynchronousTestCase):
    """A slice has two rows, and every fact one."""

    def setUp(self) -> None:
        self.patch(retention, "SLICE_ROWS", 2)
        self.net, self.store = Net(), FragileStore()
        self.masters: list[Master] = []

    def tearDown(self) -> None:
        for each in self.masters:
            self.stop(each)
        self.assertEqual(self.net.getDelayedCalls(), [])

    def start(self, limits: str | None = None, **options: Any) -> Master:
        streams = [StreamDefinition(ORDERS, retention=limits)]
        master = Master(database=self.store, streams=streams, reactor=self.net, **options)
        self.masters.append(master)
        return master

    def stop(self, master: Master) -> None:
        stopped = begin(master.stop())
        self.net.run()
        self.assertEqual(stopped, [None])

    def append(self, count: int, master: Master | None = None) -> None:
        for number in range(count):
            appended = begin((master or self.masters[-1]).stream(ORDERS).append([[[number]]]))
            self.net.run()
            self.assertEqual(len(appended), 1)

    def rounds(self, count: int = 1) -> None:
        self.net.run(retention.INTERVAL * count)

    def tokens(self) -> list[int]:
        return sorted(self.store._streams[ORDERS].facts)

    def gone(self) -> int:
        (status,) = self.masters[-1].served.stream_statuses(ORDERS)
        return status.writers[0].gone


class LimitTests(RetentionCase):
    def test_of_many_rows_the_newest_are_kept(self) -> None:
        self.start("4 rows")
        self.append(9)  # 2 to 10
        self.assertEqual(self.tokens(), [*range(2, 11)])
        self.rounds()
        self.assertEqual((self.tokens(), self.gone()), ([*range(6, 11)], 5))
        with self.assertRaises(FactsGoneError):
            now(self.masters[0].served.page(ORDERS, MASTER, after=4, upto=None, limit=10))
        page = now(self.masters[0].served.page(ORDERS, MASTER, after=5, upto=None, limit=10))
        self.assertEqual([each.token for each in page.facts], [6, 7, 8, 9, 10])
        self.append(1)
        self.rounds()
        self.assertEqual(self.tokens(), [8, 9, 10, 11])

    def test_what_is_deleted_and_what_is_kept_are_metrics(self) -> None:
        self.start("4 rows")
        self.append(9)  # 2 to 10; the last one is in no slice yet
        self.rounds()
        shown = shown_metrics(self.masters[0].served.samples())
        self.assertEqual(shown["gone stream=orders writer=master"], 5)
        self.assertEqual(shown["kept_rows stream=orders writer=master"], 4)
        self.assertNotIn("gone stream=caches writer=master", shown)

    def test_after_a_restart_the_status_shows_at_once_what_is_deleted(self) -> None:
        self.start("4 rows")
        self.append(9)
        self.rounds()
        self.stop(self.masters.pop())
        self.start("4 rows")
        begin(self.masters[0].start())
        self.net.run()
        self.assertEqual(shown_metrics(self.masters[0].served.samples())["gone stream=orders writer=master"], 5)

    def test_a_limit_below_a_slice_keeps_less_than_two_slices_more(self) -> None:
        self.start("1 rows")
        for count, kept in ((1, 1), (1, 2), (1, 3), (1, 2), (1, 3), (1, 2)):
            self.append(count)
            self.rounds()
            self.assertEqual(len(self.tokens()), kept)

    def test_each_start_warns_once_of_limits_of_rows_below_a_slice(self) -> None:
        self.patch(retention, "SLICE_ROWS", 100)
        for limits, small in (("99 rows", ["caches (3 rows)", "orders (99 rows)"]), ("100 rows", ["caches (3 rows)"])):
            master = self.start(limits)
            master.retention.default = "3 rows, 1d"
            with logged(LogLevel.warn) as messages:
                begin(master.start())
                self.append(1)
                self.rounds(3)
            text = "retention: facts are deleted in slices of about 100 rows, so up to 200 rows more than these limits"
            self.assertEqual(messages, [f"{text} are kept: {', '.join(small)}"])
            self.stop(self.masters.pop())
        for limits in ("100 rows", "1h", "1 kB", "all"):
            master = self.start(limits)
            with logged(LogLevel.warn) as messages:
                begin(master.start())
            self.assertEqual(messages, [], limits)
            self.stop(self.masters.pop())

    def test_the_bytes_of_the_newest_rows_are_kept(self) -> None:
        self.start("6 kB")
        for _ in range(10):
            begin(self.masters[0].stream(ORDERS).append([[["x" * 1000]]]))
        self.net.run()
        self.rounds()
        self.assertEqual(len(self.tokens()), 6)

    def test_facts_are_kept_for_an_age_and_little_longer(self) -> None:
        self.start("200s")
        self.append(3)
        self.net.run(AGE * 0.99)
        self.assertEqual(self.tokens(), [2, 3, 4])
        self.net.run(50.0)
        self.assertEqual((self.tokens(), self.gone()), ([], 4))
        self.append(1)
        self.assertEqual(self.tokens(), [5])

    def test_a_slice_ends_after_a_hundredth_of_the_age_and_the_time_is_stored_as_often(self) -> None:
        self.patch(retention, "SLICE_ROWS", 100)
        times: list[float] = []
        measured: list[float] = []
        store_slice, measure = self.store.store_slice, self.store.measure

        async def note_time(stream: StreamName, writer: InstanceName, new: FactSlice) -> None:
            if not new.upto:
                self.assertEqual((new.rows, new.size), (0, 0))
                times.append(new.seconds)
            await store_slice(stream, writer, new)

        async def note_measure(*arguments: Any, **options: Any) -> FactSlice:
            measured.append(self.net.seconds())
            return await measure(*arguments, **options)

        self.patch(self.store, "store_slice", note_time)
        self.patch(self.store, "measure", note_measure)
        self.start("1h")  # a hundredth is 36 s; the time begins at the first round
        for _ in range(6):  # 2 to 7
            self.append(1)
            self.rounds()
        self.rounds(8)
        kept = self.masters[0].retention.get(ORDERS)
        assert kept is not None
        self.assertEqual([(each.upto, each.rows, each.seconds) for each in kept.kept.slices], [(6, 5, 40), (7, 1, 80)])
        self.assertEqual(times, [40.0, 80.0, 120.0])
        self.assertEqual(measured, [10, 20, 30, 40, 50, 60, 90], "without new facts, only when a slice ends")

    def test_a_slice_that_is_a_hundredth_of_the_age_old_ends(self) -> None:
        self.patch(retention, "SLICE_ROWS", 100)
        self.start("1000s")
        for _ in range(3):  # 2 to 4; a hundredth is the time between two rounds
            self.append(1)
            self.rounds()
        kept = self.masters[0].retention.get(ORDERS)
        assert kept is not None
        self.assertEqual([(each.upto, each.seconds) for each in kept.kept.slices], [(3, 10), (4, 20)])

    def test_the_time_is_stored_every_ten_minutes_also_while_facts_arrive(self) -> None:
        """A hundredth of 30 days is 7.2 hours: a crash would lose as much of the age of all facts."""
        self.patch(retention, "SLICE_ROWS", 1_000)
        self.start("30d")
        for _ in range(62):  # the time begins at the first round
            self.append(1)
            self.rounds()
        self.assertEqual([each.seconds for each in now(self.store.slices(ORDERS, MASTER))], [600])

    def test_only_the_time_that_the_master_runs_counts_and_no_wall_clock(self) -> None:
        self.start("200s")
        self.append(3)
        self.net.run(AGE * 0.5)
        self.stop(self.masters.pop())
        self.net.advance(AGE * 100)
        self.start("200s")
        begin(self.masters[0].start())
        self.net.run(AGE * 0.48)
        self.assertEqual(self.tokens(), [2, 3, 4])
        self.net.run(50.0)
        self.assertEqual(self.tokens(), [])

    def test_a_default_deletes_nothing_of_tables_of_the_application_or_in_memory_or_of_others(self) -> None:
        streams = [
            StreamDefinition("mapped", table="t", id_column="id", row=("a",)),
            StreamDefinition("typing", in_memory=True),
            StreamDefinition("stock", writers=("other",)),
            StreamDefinition(ORDERS),
        ]
        declare = self.store.declare

        async def declare_without_tables(*definitions: StreamDefinition) -> None:
            await declare(*[StreamDefinition(each.name) for each in definitions])

        self.patch(self.store, "declare", declare_without_tables)
        master = Master(database=self.store, streams=streams, reactor=self.net)
        self.masters.append(master)
        master.retention.default = "2 rows"
        now(master.start())
        kept = [each.name for each in master.registry if master.retention.get(each.name) is not None]
        self.assertEqual(sorted(kept), ["caches", "orders"])

    def test_by_default_all_is_kept_and_nothing_is_done(self) -> None:
        self.start()
        self.append(3)
        self.rounds(10)
        self.assertEqual((self.tokens(), self.store._streams[ORDERS].slices), ([2, 3, 4], {}))

    def test_a_default_is_for_streams_without_limits_of_their_own(self) -> None:
        self.start("all").retention.default = "2 rows"
        self.append(5)
        self.rounds()
        self.assertEqual(len(self.tokens()), 5)
        self.stop(self.masters.pop())
        self.start().retention.default = "2 rows"
        begin(self.masters[0].start())
        self.rounds()
        self.assertEqual(len(self.tokens()), 3)

    def test_an_application_keeps_its_tables(self) -> None:
        for more in ({"table": "t", "row": ("a",)}, {"in_memory": True}):
            with self.assertRaisesRegex(ConfigError, "only facts of a generic table have a retention"):
                StreamDefinition("a", retention="1d", **more)


class NeedTests(RetentionCase):
    def test_facts_that_a_follower_lacks_are_kept_and_the_status_names_each_that_lacks_them(self) -> None:
        needs = Needs(4)
        self.start("2 rows").retention.needs.append(needs)
        self.append(8)  # 2 to 9
        self.rounds()
        self.assertEqual((self.tokens(), self.gone()), ([*range(4, 10)], 3))
        (status,) = self.masters[0].served.stream_statuses(ORDERS)
        why = "stream 'orders': facts up to 5 are kept for follower worker1, replay"
        self.assertEqual([*status.notes], [why])
        needs.has = 9
        self.rounds()
        self.assertEqual(self.tokens(), [8, 9])
        (status,) = self.masters[0].served.stream_statuses(ORDERS)
        self.assertEqual([*status.notes], [])

    def test_what_each_has_is_deleted_up_to_the_last_fact_that_all_have(self) -> None:
        needs = Needs(5)
        self.start("2 rows").retention.needs.append(needs)
        self.append(8)  # 2 to 9
        self.rounds()
        self.assertEqual((self.tokens(), self.gone()), ([*range(6, 10)], 5))

    def test_followers_report_often_only_where_facts_are_deleted(self) -> None:
        for limits, seconds in (("2 rows", 30.0), ("all", 60.0)):
            master = self.start(limits)
            begin(master.start())
            self.assertEqual(now(master.followers.report("worker1", {})), seconds)
            self.stop(self.masters.pop())

    def test_while_the_needs_are_unknown_nothing_is_deleted(self) -> None:
        needs = Needs(9)
        needs.error = StoreError("locked")
        self.start("2 rows").retention.needs.append(needs)
        self.append(8)
        with logged(LogLevel.info) as messages:
            self.rounds(3)
            self.assertEqual(len(self.tokens()), 8)
            needs.error = None
            self.rounds()
        self.assertEqual(messages, ["retention: nothing more is deleted: locked", "retention goes on"])
        self.assertEqual(self.tokens(), [8, 9])
        asked = needs.asked
        self.rounds(5)
        self.assertEqual(needs.asked, asked, "nothing is beyond the limit")

    def test_an_unexpected_error_ends_the_retention_and_is_logged(self) -> None:
        needs = Needs()
        needs.error = TypeError("a bug")
        self.start("2 rows").retention.needs.append(needs)
        self.append(8)
        with logged() as messages:
            self.rounds(3)
        self.assertEqual(messages, ["deleting old facts has ended: restart this process"])
        self.assertEqual((len(self.flushLoggedErrors(TypeError)), needs.asked, len(self.tokens())), (1, 1, 8))


class RestartTests(RetentionCase):
    def test_a_restart_goes_on_where_the_last_run_was(self) -> None:
        """Killed between two slices: each is one transaction, and what is counted is stored."""
        self.start("2 rows")
        self.append(8)
        deleted: list[object] = []
        forget = self.store.forget_facts

        async def fail_at_the_second(*arguments: Any, **options: Any) -> None:
            if deleted:
                raise StoreError("killed")
            deleted.append(arguments)
            await forget(*arguments, **options)

        self.patch(self.store, "forget_facts", fail_at_the_second)
        with logged():
            self.rounds()
        self.stop(self.masters.pop())
        self.assertEqual(self.tokens(), [*range(4, 10)])
        self.patch(self.store, "forget_facts", forget)
        self.start("2 rows")
        begin(self.masters[0].start())
        self.net.run()
        self.rounds()
        self.assertEqual((self.tokens(), self.gone()), ([8, 9], 7))

    def test_what_is_counted_is_counted_once_over_a_restart(self) -> None:
        for limits in ("90 rows", "1h"):
            self.store = FragileStore()
            self.start(limits)
            self.append(7)  # 2 to 8
            self.rounds()
            self.stop(self.masters.pop())
            self.start(limits)
            begin(self.masters[0].start())
            self.rounds()
            kept = self.masters[0].retention.get(ORDERS)
            assert kept is not None
            self.assertEqual([each.upto for each in kept.kept.slices], [3, 5, 7], limits)
            self.assertEqual((kept.kept.rows, kept.gone), (6, 0))
            self.stop(self.masters.pop())

    def test_a_wall_clock_set_forward_deletes_nothing_without_the_monotonic_clock(self) -> None:
        reactor = ReactorBase.__new__(ReactorBase)  # as a program has it that embeds a master
        wall = [1_800_000_000.0]
        self.patch(reactor, "seconds", lambda: wall[0])
        master = self.start("1h")
        self.append(5)
        self.patch(master.retention, "_lifetime", Lifetime(reactor))
        for jump in (0.0, 7_200.0, 30 * 86_400.0):
            wall[0] += jump
            now(master.retention._round())
        self.assertEqual((self.tokens(), self.gone()), ([2, 3, 4, 5, 6], 0))

    def test_no_id_is_used_again_after_all_facts_are_deleted(self) -> None:
        self.start("200s")
        self.append(3)
        self.net.run(AGE + 30.0)
        self.assertEqual(self.tokens(), [])
        self.stop(self.masters.pop())
        self.start("200s")
        self.append(1)
        self.assertEqual(self.tokens(), [5])
