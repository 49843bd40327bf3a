"""Rooms over a master: what is published, what is refused, which calls share a transaction, and the queries."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from twisted.internet.defer import Deferred, gatherResults
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import RoomError, StoreError, UnknownRoomError
from replication.net.protocol import Limits
from replication.rooms.ordering import Place
from replication.session.connection import Keepalive
from replication.storage.postgres.store import PostgresStore
from replication.storage.sqlite.store import SqliteStore
from replication.storage.tables.room_queries import RoomReads
from replication.streams.positions import MultiWriterToken
from replication.wire.grammar import Token
from replication.writer.master import Master
from replication.writer.rooms import Rooms
from tests.doubles import Net, Wire, connect, lines_of
from tests.rooms.recorded import Keeper, read_all
from tests.rooms.test_graph import STEPS
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOM = "!r:far.test"


def source(name: str, *prev: str, **more: Any) -> dict[str, Any]:
    return {"event_id": name, "type": "note", "sender": "@far:away", "prev_event_ids": list(prev), **more}


class RoomsCase(SynchronousTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = str(Path(folder.name) / "rooms.db")
        self.begin()

    def begin(self) -> None:
        """Start a master on the database."""
        self.net, self.pump = Net(), Pump()
        self.store = SqliteStore(self.path, self.pump)
        limits = Limits(keepalive=Keepalive(ping_after=1_000, give_up_after=3_000))
        self.master = Master(database=self.store, reactor=self.net, server_name="local.test", limits=limits)
        self.rooms = Rooms(self.master)
        self.pump.wait(self.rooms.started())
        self.wire: Wire = connect(self.master.factory())
        self.published_lines()

    def tearDown(self) -> None:
        self.wire.lose()
        self.pump.wait(self.master.stop())

    def persist(self, *sources: dict[str, Any], room: str = ROOM, backfilled: bool = False) -> Sequence[Token]:
        return self.pump.wait(self.rooms.persist(room, sources, backfilled=backfilled))

    def published_lines(self) -> list[str]:
        """Return the lines of the rooms' streams that the follower received since the last call."""
        self.net.advance(0)
        lines = lines_of(self.wire.read())
        return [line for line in lines if line.split(" ")[1:2] in (["events"], ["backfill"])]


class WritingTests(RoomsCase):
    def test_every_recorded_step_publishes_the_lines_of_synapse(self) -> None:
        """The lines are in token order; an ID without rows is a POSITION."""
        for scenario in ("linear", "batch", "duplicates", "gap", "last_leave", "relations"):
            self.tearDown()
            self.setUp()
            steps = [step for step in STEPS if step["scenario"] == scenario][1:]
            for step in steps:
                for chunk in [[each] for each in step["events"]] if step["one_transaction_each"] else [step["events"]]:
                    events = read_all("!s:remote.test", chunk)
                    work = self.rooms.persist("!s:remote.test", events, backfilled=step["backfilled"])
                    self.pump.wait(work)
                wanted, sent = step["expected"]["wire"], self.published_lines()
                lines = [line for line in sent if line.startswith("RDATA")]
                self.assertEqual(sorted(lines), sorted(line for line in wanted if line in lines), step["what"])
                self.assertEqual({line for line in wanted if line.startswith("RDATA")}, set(lines), step["what"])
                # A Synapse 1.47 sends backfill in descending order (docs/protocol/traps.md 12).
                # It sends POSITION only where it has no row.
                self.assertEqual(numbers_of(lines), sorted(numbers_of(lines)), step["what"])
                self.assertLessEqual({line for line in wanted if line.startswith("POSITION")}, set(sent), step["what"])

    def test_catch_up_returns_the_rows_that_were_published(self) -> None:
        self.persist(source("a", state_key=""), source("b", "a"))
        self.persist(source("o", "old", depth=1, state_before=[]), backfilled=True)
        live = [line.split(" ", 4) for line in self.published_lines() if line.startswith("RDATA")]
        for stream in ("events", "backfill"):
            page = self.pump.wait(self.master.served.page(stream, None, after=1, upto=None, limit=100))
            self.assertEqual(
                [text for fact in page.facts for text in fact.texts], [line[4] for line in live if line[1] == stream]
            )

    def test_refused_events_leave_only_a_gap_in_the_ids(self) -> None:
        self.persist(source("a"))
        self.published_lines()
        self.assertRaises(RoomError, self.persist, source("b", "a"), source("c", "nowhere", depth=3))
        self.assertRaises(UnknownRoomError, self.pump.wait, self.rooms.event(ROOM, "b"))
        self.pump.wait(self.master.served.check())  # the position is stored before it is published
        self.assertEqual(self.published_lines(), ["POSITION events master 2 4"])
        self.assertEqual(list(self.persist(source("b", "a"))), [5])

    def test_an_invalid_event_is_refused_before_an_id_is_reserved(self) -> None:
        self.assertRaises(RoomError, self.persist, {"event_id": "a"})
        self.assertRaises(RoomError, self.persist, source("a", room_id="!other"))
        other = read_all("!other", [source("a")])
        self.assertRaises(RoomError, self.pump.wait, self.rooms.persist(ROOM, other))
        self.assertEqual(self.published_lines(), [])
        self.assertEqual(list(self.persist()), [])

    def test_a_call_of_many_events_is_one_transaction(self) -> None:
        many = [source("0"), *[source(str(each), str(each - 1)) for each in range(1, 250)]]
        before = self.store.transactions
        self.assertEqual(len(self.persist(*many)), 250)
        self.assertEqual(self.store.transactions, before + 1)
        others = [source(f"x{each}") for each in range(150)]
        self.assertRaises(RoomError, self.persist, *others, source("bad", "nowhere", depth=1), room="!other")
        self.assertRaises(UnknownRoomError, self.pump.wait, self.rooms.view("!other"))

    def test_calls_that_wait_share_a_transaction_and_only_the_bad_call_fails(self) -> None:
        self.persist(source("a"))
        before = self.store.transactions
        calls = [self.rooms.persist(ROOM, [source(name, "a")]) for name in "bcd"]
        done = [Deferred.fromCoroutine(each) for each in calls]
        tokens: list[Sequence[Token]] = [self.pump.wait(each) for each in done]
        self.assertEqual([*map(list, tokens)], [[3], [4], [5]])
        self.assertEqual(self.store.transactions, before + 2)  # the first call alone, then those that arrived meanwhile
        calls = [self.rooms.persist(ROOM, [source(name, prev, depth=2)]) for name, prev in ("ea", "fx", "ga")]
        done = [Deferred.fromCoroutine(each) for each in calls]
        self.pump.wait(done[0])
        self.assertRaises(RoomError, self.pump.wait, done[1])
        self.pump.wait(done[2])
        self.assertEqual(self.pump.wait(self.rooms.view(ROOM)).forward_extremities, tuple("bcdeg"))

    def test_rooms_share_transactions_and_each_keeps_its_order(self) -> None:
        calls = [("!x", "1", False), ("!b", "2", False), ("!a", "3", False), ("!b", "4", True), ("!b", "5", False)]
        before = self.store.transactions
        work = [self.rooms.persist(room, [source(name)], backfilled=back) for room, name, back in calls]
        tokens: list[Sequence[Token]] = [self.pump.wait(each) for each in [*map(Deferred.fromCoroutine, work)]]
        # !x alone; !a and !b together, in the order of their names; the backfill; the last call
        self.assertEqual([*map(list, tokens)], [[2], [4], [3], [2], [5]])
        self.assertEqual(self.store.transactions, before + 4)

    def test_a_state_change_invalidates_a_cache(self) -> None:
        self.persist(
            source("a", type="m.room.create", state_key="", content={"creator": "@far:away", "room_version": "9"})
        )
        page = self.pump.wait(self.master.served.page("caches", None, after=1, upto=None, limit=9))
        ((func, keys, _),) = page.facts[0].rows
        self.assertEqual((func, keys), ("cs_cache_fake", [ROOM]))
        join = {"type": "m.room.member", "state_key": "@far:away", "content": {"membership": "join"}}
        self.persist(source("b", "a", **join), source("c", "b"))
        self.persist(source("d", "c"))
        page = self.pump.wait(self.master.served.page("caches", None, after=2, upto=None, limit=9))
        self.assertEqual([fact.rows[0][1] for fact in page.facts], [[ROOM, "@far:away"]])

    def test_many_users_whose_membership_changed_are_in_several_rows(self) -> None:
        joins = [
            source(name, type="m.room.member", state_key=f"@{name}:far", content={"membership": "join"})
            for name in "abcde"
        ]
        with patch("replication.writer.rooms.MAX_USERS", 2):
            self.persist(*joins)
        page = self.pump.wait(self.master.served.page("caches", None, after=1, upto=None, limit=9))
        keys = [keys for fact in page.facts for _, keys, _ in fact.rows]
        self.assertEqual([len(each) for each in keys], [3, 3, 2])
        users = [user for room, *users in keys for user in users]
        self.assertEqual(({room for room, *_ in keys}, users), ({ROOM}, [f"@{name}:far" for name in "abcde"]))
        with patch("replication.writer.rooms.MAX_USERS", 1):
            self.persist(source("topic", state_key=""))
        page = self.pump.wait(self.master.served.page("caches", None, after=2, upto=None, limit=9))
        self.assertEqual([keys for fact in page.facts for _, keys, _ in fact.rows], [[ROOM]], "no user, one row")

    def test_a_transaction_has_a_bounded_number_of_events_unless_one_call_has_more(self) -> None:
        counts: list[list[int]] = []
        write = self.rooms._write

        async def note(tasks: Any) -> Sequence[Token]:
            counts.append([len(each.events) for each in tasks])
            return await write(tasks)

        with patch("replication.writer.rooms.MAX_EVENTS", 3), patch.object(self.rooms, "_write", note):
            calls = [
                self.rooms.persist(f"!{number}", [source(f"{number}-{each}") for each in range(count)])
                for number, count in enumerate((1, 2, 1, 1, 4))
            ]
            for each in [Deferred.fromCoroutine(call) for call in calls]:
                self.pump.wait(each)
        # the first call, which came alone; 2 + 1 events; 1 event, as 1 + 4 are too many; 4 events
        self.assertEqual(counts, [[1], [2, 1], [1], [4]])

    def test_a_flag_is_encoded_as_a_synapse_on_that_database_does(self) -> None:
        rules = [self.rooms._rules(cast("Any", SimpleNamespace(dialect=each))) for each in ("sqlite", "postgresql")]
        self.assertEqual([repr(each.flag(True)) for each in rules], ["1", "True"])

    def test_an_event_has_the_name_of_the_writer_and_the_time_in_milliseconds(self) -> None:
        self.master.wall = lambda: 1_700.5
        rules = self.rooms._rules(cast("Any", SimpleNamespace(dialect="sqlite")))
        self.assertEqual((rules.instance_name, rules.now()), ("master", 1_700_500))

    def test_users_of_the_server_are_local_unless_a_function_decides(self) -> None:
        master = Master(database=SqliteStore(self.path, self.pump), reactor=self.net, server_name="local.test")
        database = cast("Any", SimpleNamespace(dialect="sqlite"))
        users = ["@a:local.test", "@a:far.test", "@a.local.test"]
        for given, local in ((None, users[:1]), (lambda user: user == users[1], users[1:2])):
            is_local = Rooms(master, is_local=given)._rules(database).is_local
            self.assertEqual([user for user in users if is_local(user)], local)
        self.pump.wait(master.stop())

    def test_the_state_of_a_room_can_be_resolved_again(self) -> None:
        self.persist(source("a", "gone", depth=5, state_before=["late"]))
        self.persist(source("late", "gone", depth=4, outlier=True, state_key="k"))
        self.published_lines()
        self.pump.wait(self.rooms.recalculate(ROOM))
        self.assertEqual(self.published_lines(), ['RDATA events master 4 ["state",["!r:far.test","note","k","late"]]'])
        self.pump.wait(self.rooms.recalculate(ROOM))
        self.assertRaises(UnknownRoomError, self.pump.wait, self.rooms.recalculate("!unknown"))
        self.pump.wait(self.master.served.check())
        self.assertEqual(self.published_lines()[-1], "POSITION events master 5 6")

    def test_trap_51_joining_a_huge_room_is_one_fact_that_is_published_and_fetched_whole(self) -> None:
        """The state arrived as outliers before, so thousands of rows have one token; no page splits or drops them."""
        members = [source(f"m{each}", depth=1, state_key=f"@u{each}", outlier=True) for each in range(2_000)]
        self.persist(*members)
        self.published_lines()
        (token,) = self.persist(source("me", "gone", depth=9, state_before=[each["event_id"] for each in members]))
        lines = self.published_lines()
        self.assertEqual((len(lines), {line.split(" ")[3] for line in lines}), (2_001, {"batch", str(token)}))
        page = self.pump.wait(self.master.served.page("events", None, after=token - 1, upto=None, limit=100))
        self.assertEqual([(fact.token, len(fact.texts)) for fact in page.facts], [(token, 2_001)])

    def test_a_restarted_master_continues_both_streams(self) -> None:
        self.persist(source("a"))
        self.persist(source("z", "older", depth=1, state_before=[]), backfilled=True)
        self.tearDown()
        self.begin()
        self.assertEqual(list(self.persist(source("b", "a"))), [3])
        self.assertEqual(list(self.persist(source("older", "oldest", depth=1, state_before=[]), backfilled=True)), [3])
        self.assertEqual(self.pump.wait(self.rooms.event(ROOM, "older")).stored.stream_ordering, -3)

    def test_a_store_without_sql_refuses_rooms(self) -> None:
        from replication.storage.memory import MemoryStore

        master = Master(database=MemoryStore(), reactor=self.net)
        self.assertRaises(StoreError, self.pump.wait, Rooms(master).started())
        self.pump.wait(master.stop())


class ReadingTests(RoomsCase):
    def setUp(self) -> None:
        super().setUp()
        self.persist(source("a", state_key=""), source("b", "a"), source("c", "a"), source("d", "b", "c"))
        self.persist(source("far", "gone", depth=9, state_before=["a"]))

    def test_each_query_returns_its_answer(self) -> None:
        wait, rooms = self.pump.wait, self.rooms
        view = wait(rooms.view(ROOM))
        self.assertEqual((view.forward_extremities, view.backward_extremities), (("d", "far"), ("gone",)))
        self.assertEqual(wait(rooms.event(ROOM, "a")).next_event_ids, ("b", "c"))
        group = wait(rooms.event(ROOM, "d")).stored.state_group
        assert group is not None
        self.assertEqual(wait(rooms.state_group(group)).state, {("note", ""): "a"})
        self.assertEqual(wait(rooms.state_at(ROOM, "d")), {("note", ""): "a"})
        self.persist(source("elsewhere"), room="!other")
        for room, found in ((ROOM, ["d", "far"]), ("!other", ["elsewhere"]), (None, ["d", "far", "elsewhere"])):
            since = wait(rooms.since(MultiWriterToken(Token(4)), MultiWriterToken(Token(99)), 9, room))
            self.assertEqual([node.event.event_id for node in since], found)
        history = wait(rooms.history(ROOM, None, 2))
        self.assertEqual([node.event.event_id for node in history], ["far", "d"])
        history = wait(rooms.history(ROOM, Place(3, 99), 2))
        self.assertEqual([node.event.event_id for node in history], ["d", "c"])
        self.assertEqual(wait(rooms.gaps(ROOM)), [("gone", 9)])
        self.assertEqual(wait(rooms.between(ROOM, ["b"])).heads, ("d", "far"))
        self.assertEqual(wait(rooms.between(ROOM, ["b"], ["d"])).events, ("c", "d"))
        self.assertEqual(len(wait(rooms.between(ROOM, [], limit=3)).events), 3)
        self.assertEqual(wait(rooms.next_place(ROOM)), (["far", "d"], 10))
        self.assertEqual(wait(rooms.read(lambda reads: reads.ancestors("d", 9))), ["c", "b", "a"])

    def test_a_history_has_events_that_messages_does_not_show_only_if_it_is_whole(self) -> None:
        self.persist(source("out", "gone", depth=4, outlier=True))
        for asked, shown in ((self.rooms.history(ROOM), False), (self.rooms.history(ROOM, whole=True), True)):
            self.assertEqual("out" in [each.event.event_id for each in self.pump.wait(asked)], shown)

    def test_an_answer_has_100_events_and_what_a_server_lacks_1000_unless_a_limit_is_given(self) -> None:
        ids = [str(each) for each in range(1_001)]
        self.persist(*[source(each, state_key=each) for each in ids], room="!large")
        gaps = [source(f"g{each}", *[f"{each}-{n}" for n in range(10)], depth=5, state_before=[]) for each in range(11)]
        self.persist(*gaps, room="!gaps")
        rooms = self.rooms
        for asked, count in (
            (rooms.history("!large"), 100),
            (rooms.gaps("!gaps"), 100),
            (rooms.gaps("!gaps", 101), 101),
        ):
            self.assertEqual(len(self.pump.wait(asked)), count)
        self.assertEqual(len(self.pump.wait(rooms.between("!large", [])).events), 1_000)

    def test_what_a_server_lacks_is_found_in_a_room_with_wrong_depths(self) -> None:
        for name, depth, *prev in (("A", 50), ("B", 2, "A"), ("C", 1, "B"), ("D", 60, "B")):
            self.persist(source(name, *prev, depth=depth), room="!tangled")
        self.assertEqual(self.pump.wait(self.rooms.between("!tangled", ["C"], ["D"])).events, ("D",))


def numbers_of(lines: Sequence[str]) -> list[int]:
    """Return the tokens of lines, without ``batch``."""
    return [int(token) for token in [line.split(" ")[3] for line in lines] if token != "batch"]


class SharedTests(HasDatabase, SynchronousTestCase):
    """Two masters on one PostgreSQL."""

    def setUp(self) -> None:
        self.net, self.pump = Net(), Pump()
        self.rooms = {name: self.make_rooms(name) for name in ("a", "b")}

    def make_rooms(self, name: str) -> Rooms:
        store = PostgresStore(self.url, self.pump)
        master = Master(instance_name=name, database=store, reactor=self.net, server_name="local.test")
        rooms = Rooms(master)
        self.pump.wait(rooms.started())
        self.addCleanup(lambda: self.pump.wait(master.stop()))
        return rooms

    def test_two_masters_that_write_different_rooms_at_once_store_each_room_correctly(self) -> None:
        """Each room is equal to the same room of a single process, and no ID is used twice."""
        stories = {f"!{name}{n}": story(f"{name}{n}", random.Random(name * n)) for name in "ab" for n in (1, 2)}

        async def persist(room: str) -> None:
            for some, backfilled in stories[room]:
                await self.rooms[room[1]].persist(room, some, backfilled=backfilled)

        self.pump.wait(gatherResults([Deferred.fromCoroutine(persist(room)) for room in stories]))
        for room, batches in stories.items():
            alone = Keeper()
            for some, backfilled in batches:
                alone.take(room, read_all(room, some), backfilled=backfilled)
            reads = RoomReads(alone.statements)
            for rooms in self.rooms.values():
                self.assertEqual(self.pump.wait(rooms.view(room)), reads.view(room))
            for event in (event for some, _ in batches for event in some):
                name = event["event_id"]
                state = self.pump.wait(self.rooms["a"].state_at(room, name))
                self.assertEqual((room, name, state), (room, name, reads.state_at(room, name)))
        ids = self.sql("SELECT stream_ordering FROM room_events")
        self.assertEqual(len(ids), len(set(ids)))
        self.assertEqual(len(ids), sum(len(some) for batches in stories.values() for some, _ in batches))


def story(room: str, chance: random.Random) -> list[tuple[list[dict[str, Any]], bool]]:
    """Return batches of events: forks, merges, state, soft failures; the last batch is backfilled."""
    batches: list[tuple[list[dict[str, Any]], bool]] = []
    known = [f"${room}-enter"]
    batches.append(([source(known[0], f"${room}-earlier", depth=5, state_before=[])], False))
    for number in range(25):
        some = []
        for n in range(chance.randint(1, 3)):
            prevs = chance.sample(known[-5:], k=min(len(known), chance.randint(1, 2)))
            more: dict[str, Any] = {"state_key": chance.choice("xyz")} if chance.random() < 0.4 else {}
            if chance.random() < 0.1:
                more["soft_failed"] = True
            some.append(source(f"${room}-{number}-{n}", *prevs, **more))
        known += [event["event_id"] for event in some]
        batches.append((some, False))
    batches.append(([source(f"${room}-earlier", depth=4)], True))
    return batches
