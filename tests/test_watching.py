"""What others write into mapped tables is looked for, often while something happens, and announced like our own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.logger import LogLevel

from replication.errors import StoreError
from replication.net.protocol import Limits
from replication.session.connection import Keepalive
from replication.streams.facts import Fact
from replication.streams.registry import StreamDefinition
from replication.streams.seams import Reach, Write
from replication.watching import LONGEST, RETRY_AFTER
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import FragileStore, begin, logged, now
from tests.serving import MasterCase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.doubles import Wire

ORDERS = StreamName("orders")
ME = InstanceName("master")


class WatchedStore(FragileStore):
    """One that others write to: ``reach`` is what the next look sees."""

    streams: Sequence[StreamName] = (ORDERS,)

    def __init__(self) -> None:
        super().__init__()
        self.reach = Reach(Token(1), Token(1))
        self.strangers: dict[InstanceName, Token] = {}

    async def declare(self, definition: StreamDefinition) -> None:
        await super().declare(StreamDefinition(definition.name))

    async def positions(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        return self.strangers or await super().positions(stream)

    def watch(self) -> WatchedStore:
        return self

    async def look(self) -> Mapping[StreamName, Reach]:
        await self.operation("look")
        return {ORDERS: self.reach}

    def insert(self, *tokens: int) -> None:
        """Be a program that knows nothing of us."""
        facts = [Fact(Token(each), (f'["o","{each}"]',)) for each in tokens]
        now(super().transaction().commit([Write(ORDERS, ME, Token(0), facts)]))

    @property
    def looks(self) -> int:
        return self.asked.count("look")


class WatchingCase(MasterCase):
    store: WatchedStore

    def make_store(self) -> WatchedStore:
        return WatchedStore()

    def reach(self, complete: int | None, drawn: int | None = None, waits: float = 0.0, blockers: str = "") -> None:
        """Let the next look see it, and wait for that."""
        self.store.reach = Reach(
            None if complete is None else Token(complete),
            Token(drawn or complete or 0),
            waits,
            [blockers] if blockers else [],
        )
        self.net.advance(LONGEST)

    def told(self, wire: Wire) -> list[str]:
        return [line for line in self.news(wire) if " orders " in line]


class AnnouncingTests(WatchingCase):
    def test_rows_of_others_are_told_once_nothing_below_them_can_come(self) -> None:
        wire = self.greeted("REPLICATE")
        self.store.insert(3)
        self.reach(1, drawn=3)
        self.assertEqual(self.told(wire), [])
        self.store.insert(2)
        self.reach(3)
        self.assertEqual(self.told(wire), ['RDATA orders master 2 ["o","2"]', 'RDATA orders master 3 ["o","3"]'])

    def test_trap_18_ids_without_rows_are_told_as_a_position(self) -> None:
        wire = self.greeted("REPLICATE")
        self.store.insert(2)
        self.reach(5)
        self.assertEqual(self.told(wire), ['RDATA orders master 2 ["o","2"]', "POSITION orders master 2 5"])

    def test_our_own_facts_take_their_place_among_them(self) -> None:
        wire = self.greeted("REPLICATE")
        reservation, mine = self.hold()
        self.assertEqual(mine.token, 2)
        now(mine.write(["o", "mine"]))
        self.store.insert(3)
        self.reach(3)
        self.assertEqual(self.told(wire), [])  # 2 is open
        now(reservation.__aexit__(None, None, None))
        self.assertEqual(self.told(wire), ['RDATA orders master 2 ["o","mine"]', 'RDATA orders master 3 ["o","3"]'])

    def test_our_own_facts_wait_for_what_others_may_commit_below_them(self) -> None:
        wire = self.greeted("REPLICATE")
        self.append("mine")
        self.net.advance(LONGEST)
        self.assertEqual(self.told(wire), [])
        self.reach(2)
        self.assertEqual(self.told(wire), ['RDATA orders master 2 ["o","mine"]'])

    def test_no_position_is_stored_that_others_may_commit_below(self) -> None:
        self.greeted("REPLICATE")
        self.append("one")
        reservation, _ = self.hold()
        self.append("two")
        now(reservation.__aexit__(ValueError, ValueError(), None))
        self.net.pump([1.0] * 3)
        self.assertEqual(now(self.store.stored())[ORDERS][ME], 1)
        self.reach(4)
        self.net.pump([1.0] * 3)
        self.assertEqual(now(self.store.stored())[ORDERS][ME], 4)


class OpeningTests(WatchingCase):
    def setUp(self) -> None:
        super().setUp()
        self.store.reach = Reach(None, Token(9))

    def test_a_stream_is_not_told_of_before_it_is_known_how_far_it_is(self) -> None:
        """Else it would seem to have gone back to who follows it since before we were started."""
        wire = self.greeted()
        self.say(wire, "REPLICATE")
        self.assertEqual(self.news(wire), ["POSITION caches master 1 1"])
        self.assertEqual(self.master.stream_statuses()[0].writers[0].state, "opening")
        self.assertEqual(list(now(self.master.page("orders", None, after=5, upto=9, limit=10)).facts), [])
        self.store.insert(7, 9)
        self.reach(9)
        self.assertEqual(self.told(wire), ["POSITION orders master 9 9"])
        self.say(wire, "REPLICATE orders")
        self.assertEqual(self.told(wire), ["POSITION orders master 9 9"])
        page = now(self.master.page("orders", None, after=5, upto=9, limit=10))
        self.assertEqual([token for token, _ in page.facts], [7, 9])

    def test_it_opens_with_the_start_where_nothing_is_under_way(self) -> None:
        self.store.reach = Reach(Token(9), Token(9))
        wire = self.greeted()
        self.say(wire, "REPLICATE")
        self.assertEqual(self.news(wire)[0], "POSITION orders master 9 9")
        self.assertEqual(self.store.looks, 2)  # one to start with, and the first of those that go on

    def test_a_stream_that_others_announce_is_left_to_them(self) -> None:
        self.master = self.make_master(streams=[StreamDefinition("orders", writers=("w2",))])
        wire = self.greeted("REPLICATE")
        self.reach(9)
        self.assertEqual(self.told(wire), [])


class BulkTests(WatchingCase):
    limits = Limits(Keepalive(ping_after=1_000, give_up_after=3_000), max_queued_lines=6_000)

    def test_a_bulk_is_left_to_each_follower_to_fetch_and_never_read_whole(self) -> None:
        wire = self.greeted("REPLICATE")
        self.store.insert(*range(2, 20_002))
        self.reach(20_001)
        told = self.told(wire)
        self.assertEqual((len(told), told[-1]), (5_001, "POSITION orders master 20001 20001"))
        self.store.insert(20_002)
        self.reach(20_002)
        self.assertEqual(self.told(wire), ['RDATA orders master 20002 ["o","20002"]'])


class LookingTests(WatchingCase):
    def looks_in(self, seconds: float) -> int:
        before = self.store.looks
        self.net.pump([0.001] * int(seconds * 1000))
        return self.store.looks - before

    def test_the_longer_nothing_happens_the_longer_is_the_pause(self) -> None:
        now(self.master.start())
        self.assertGreater(self.looks_in(0.016), 4)
        self.net.pump([0.1] * 100)
        self.assertEqual(self.looks_in(60.0), 100)

    def test_news_make_us_look_often_again(self) -> None:
        now(self.master.start())
        self.net.pump([0.1] * 100)
        self.reach(2)
        self.assertGreater(self.looks_in(0.016), 4)

    def test_what_we_write_ourselves_is_looked_for_at_once(self) -> None:
        now(self.master.start())
        self.net.pump([0.1] * 100)
        before = self.store.looks
        now(self.master.stream("caches").append([[["get", None, 1]]]))
        self.assertEqual(self.store.looks, before)
        self.append("mine")
        self.assertEqual(self.store.looks, before + 1)

    def test_what_is_written_during_a_look_is_looked_for_after_it(self) -> None:
        now(self.master.start())
        self.net.pump([0.1] * 100)
        self.store.close_gate("look")
        self.net.advance(LONGEST)
        before = self.store.looks
        self.append("mine")
        self.assertEqual(self.store.looks, before)
        self.store.open_gate("look")
        self.assertEqual(self.store.looks, before + 1)

    def test_a_database_that_does_not_answer_is_asked_again_and_named_once(self) -> None:
        wire = self.greeted("REPLICATE")
        with logged(LogLevel.info) as said:
            self.store.errors["look"] = StoreError("the server is away")
            self.net.pump([RETRY_AFTER] * 5)
            self.store.insert(2)
            self.store.reach = Reach(Token(2), Token(2))
            del self.store.errors["look"]
            self.net.pump([RETRY_AFTER] * 2)
        self.assertEqual(said, ["mapped streams wait: the server is away", "mapped streams go on"])
        self.assertEqual(self.told(wire), ['RDATA orders master 2 ["o","2"]'])

    def test_a_start_without_an_answer_fails(self) -> None:
        self.store.errors["look"] = StoreError("the server is away")
        with logged():
            self.assertRaises(StoreError, now, self.master.start())
        del self.store.errors["look"]

    def test_the_end_waits_for_a_look_that_is_under_way(self) -> None:
        now(self.master.start())
        self.store.close_gate("look")
        self.net.advance(LONGEST)
        stopped = begin(self.master.stop())
        self.assertEqual(stopped, [])
        self.store.open_gate("look")
        self.assertEqual(stopped, [None])


class StatusTests(WatchingCase):
    def test_how_many_ids_wait_since_when_and_for_whom(self) -> None:
        now(self.master.start())
        self.reach(3, drawn=8, waits=12.5, blockers="session 4711 of anna")
        status = self.master.stream_statuses()[0]
        self.assertEqual((status.open_count, status.oldest_open), (5, (4, 12.5)))
        self.assertEqual(list(status.notes), ["stream 'orders': 5 IDs from 4 on wait for session 4711 of anna"])
        samples = {each.name: each.value for each in self.master.samples() if each.labels.get("stream") == "orders"}
        self.assertEqual((samples["open_ids"], samples["oldest_open_seconds"]), (5, 12.5))
        self.reach(8)
        status = self.master.stream_statuses()[0]
        self.assertEqual((status.open_count, status.oldest_open, list(status.notes)), (0, None, []))

    def standing(self, stream: str) -> tuple[str, str | None]:
        (status,) = [each for each in self.master.stream_statuses() if each.definition.name == stream]
        return status.writers[0].state, status.writers[0].error

    def test_how_things_stand_can_be_told_before_the_first_look_ends(self) -> None:
        self.store.close_gate("look")
        started = begin(self.master.start())
        self.assertEqual(self.standing("orders"), ("opening", None))
        self.store.open_gate("look")
        self.assertEqual(started, [None])

    def test_mapped_streams_that_cannot_be_looked_at_are_stopped_until_they_can(self) -> None:
        now(self.master.start())
        self.store.errors["look"] = StoreError("no such table: orders")
        with logged():
            self.net.advance(RETRY_AFTER)
        why = "no such table: orders; it goes on once that is mended"
        self.assertEqual(self.standing("orders"), ("stopped", why))
        self.assertEqual(self.standing("caches"), ("writing", None))
        del self.store.errors["look"]
        self.net.advance(RETRY_AFTER)
        self.assertEqual(self.standing("orders"), ("writing", None))

    def test_a_stream_whose_ids_cannot_be_looked_at_is_stopped_until_they_can(self) -> None:
        now(self.master.start())
        with logged(LogLevel.info) as said:
            self.store.reach = Reach(Token(1), Token(1), error="no sequence")
            self.net.pump([LONGEST] * 3)
            standing = self.standing("orders")
            self.reach(1)
        self.assertEqual(standing, ("stopped", "no sequence; it goes on once that is mended"))
        self.assertEqual(said, ["orders waits: no sequence", "orders goes on"])
        self.assertEqual(self.standing("orders"), ("writing", None))

    def test_a_stream_whose_rows_cannot_be_read_is_stopped_until_they_can(self) -> None:
        mapped = StreamDefinition("orders", table="orders", row=["order_id", "state"])
        self.master = self.make_master(streams=[mapped])
        wire = self.greeted("REPLICATE")
        self.store.errors["facts"] = StoreError("no such column: source.state")
        self.store.insert(2)
        with logged(LogLevel.info) as said:
            self.reach(2)
            self.net.pump([RETRY_AFTER] * 3)
            state, why = self.standing("orders")
            del self.store.errors["facts"]
            self.net.pump([RETRY_AFTER] * 3)
        cure = "it goes on once that is mended, or, if the mapping is, with the next start"
        self.assertEqual((state, why), ("stopped", f"no such column: source.state; {cure}"))
        self.assertEqual(said, ["orders waits: no such column: source.state", "orders goes on"])
        self.assertEqual(self.standing("orders"), ("writing", None))
        self.assertEqual(self.told(wire), ['RDATA orders master 2 ["o","2"]'])

    def test_what_is_wrong_with_its_table_is_among_the_notes(self) -> None:
        self.store.warnings += ["stream 'orders': no index", "stream 'other': no index"]
        with logged():
            now(self.master.start())
        self.assertEqual(list(self.master.stream_statuses()[0].notes), ["stream 'orders': no index"])

    def test_rows_of_writers_that_nobody_has_named_are_warned_of(self) -> None:
        mapped = StreamDefinition("orders", table="orders", row=["order_id", "state"], instance_column="writer")
        self.master = self.make_master(streams=[mapped])
        self.store.strangers = {InstanceName("batch"): Token(7), ME: Token(9), InstanceName(""): Token(8)}
        with logged() as said:
            now(self.master.start())
        self.assertEqual(len(said), 1)
        self.assertIn("stream 'orders': its table has rows of 'batch', which 'master' does not announce", said[0])

    def test_an_older_id_of_our_own_is_the_oldest(self) -> None:
        now(self.master.start())
        reservation, _ = self.hold()
        self.net.advance(100.0)
        self.reach(1, drawn=8, waits=5.0)
        self.assertEqual(self.master.stream_statuses()[0].oldest_open, (2, 100.0 + LONGEST))
        now(reservation.__aexit__(None, None, None))
