"""What is followed is compared with the writers' database: what was lost is found at two looks, and applied once."""

from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.deferreds import Lifetime, share
from replication.errors import StoreError
from replication.follower.audit import LOOK_AGAIN, Audit
from replication.follower.catch_up import MAX_TOKEN
from replication.follower.known_tokens import AppliedTokens, CopiedTokens, ReceivedTokens
from replication.follower.merge import MergingFollower
from replication.follower.stream import FollowMode, StreamFollower
from replication.session.connection import Rows
from replication.storage import open_store
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import Page
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import logged
from tests.storage.pump import Pump
from tests.synapse.published import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.cursor import CatchUp

US, ONE, TWO = InstanceName("us"), InstanceName("one"), InstanceName("two")
LINK = "redis"
MESSAGES = 250  # of a recording, in one example


class FakeDatabase:
    """The database of the writers of one stream: all facts, and the stored positions."""

    def __init__(self, stream: str, *, stores_positions: bool = True) -> None:
        self.stream = StreamName(stream)
        definition = StreamDefinition(stream, position_name=stream if stores_positions else "")
        self.name = "the database"
        self._stored_name = definition.stored_name
        self.written: dict[Token, InstanceName] = {}
        self.positions: dict[InstanceName, Token] = {}
        self.asked = Counter[str]()
        self.errors: list[StoreError] = []

    def write(self, writer: InstanceName, *tokens: int) -> None:
        self.written.update(dict.fromkeys(map(Token, tokens), writer))
        self.positions[writer] = max(self.positions.get(writer, Token(0)), Token(max(tokens)))

    async def stored_positions(self) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        self.asked["positions"] += 1
        if self.errors:
            raise self.errors.pop()
        return {self.stream: dict(self.positions)} if self._stored_name else {}

    def audits(self, stream: StreamName) -> bool:
        return stream == self.stream

    def stores_positions(self, stream: StreamName) -> bool:
        return self._stored_name is not None

    def state(self, stream: StreamName, writer: InstanceName, position: Token) -> object:
        return None

    def settled(self, stream: StreamName, writer: InstanceName) -> Token:
        return MAX_TOKEN

    async def newest(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        self.asked["newest"] += 1
        return dict(self.positions)

    async def present(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token) -> set[Token]:
        self.asked["present"] += 1
        return {token for token, of in self.written.items() if of == writer and after < token <= upto}

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        self.asked["facts"] += 1
        return Page(
            [Fact(each, ("[]",)) for each in sorted(await self.present(stream, writer, after=after, upto=upto))],
            upto,
            limited=False,
        )

    async def close(self) -> None:
        """Do nothing."""


class Followed:
    """A follower of one stream, its database, and an audit; ``restart`` forgets what is not stored."""

    def __init__(
        self,
        place: str,
        database: FakeDatabase,
        *,
        mode: FollowMode = FollowMode.APPLIED,
        known_by_token: bool = False,
        linear: bool = False,
    ) -> None:
        self.pump = Pump()
        self.database = database
        self.requests = 0
        self._place, self._mode, self._known_by_token, self._linear = place, mode, known_by_token, linear
        self.start()

    def start(self, *, audited: bool = True) -> None:
        stream = self.database.stream
        self.store = open_store(self._place, self.pump)
        self.pump.wait(self.store.open())
        self.clock = Clock()
        known = {
            FollowMode.APPLIED: lambda: AppliedTokens(stream, self.store, US),
            FollowMode.COPIED: lambda: CopiedTokens(stream, self.store),
            FollowMode.POSITION_ONLY: lambda: ReceivedTokens(stream, self.store),
        }[self._mode]()
        make: Callable[..., StreamFollower] = MergingFollower if self._linear else StreamFollower
        self.follower = make(
            name=stream,
            mode=self._mode,
            instance_name=US,
            store=self.store,
            lifetime=Lifetime(self.clock),
            fetch=self.fetch,
            moved=lambda *_: None,
            function=self.effect if self._mode is FollowMode.APPLIED else None,
            known=known,
            known_by_token=self._known_by_token,
            audited=audited,
            **({"all_positions_received": lambda: True} if self._linear else {}),
        )
        self.pump.wait(self.follower.open())
        self.audit = Audit(
            source=self.database,
            followers=[self.follower],
            links=[self],  # type: ignore[list-item]
            lifetime=Lifetime(self.clock),
            interval=10.0,
        )

    def request_positions(self) -> None:
        self.requests += 1

    def stop(self) -> None:
        self.settle()
        self.pump.wait(self.store.close())

    def restart(self, *, audited: bool = True) -> None:
        self.stop()
        self.start(audited=audited)

    async def effect(self, facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        await txn.execute("CREATE TABLE IF NOT EXISTS effects (token INTEGER)")
        await txn.executemany("INSERT INTO effects VALUES (?)", [(each.token,) for each in facts])

    async def fetch(self, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int) -> Page:
        return await self.database.facts(stream, writer, after=step.after, upto=step.upto, limit=limit)

    def settle(self) -> None:
        while running := self.follower.in_progress():
            self.pump.wait(share(running[0]))

    def at(self, writer: InstanceName, prev: int, new: int | None = None) -> None:
        end = Token(prev if new is None else new)
        self.follower.position_received(LINK, Position(self.database.stream, writer, Token(prev), end))
        self.settle()

    def send(self, writer: InstanceName, *tokens: int) -> None:
        places = [Token(each) for each in tokens]
        self.follower.rows_received(LINK, Rows(self.database.stream, writer, places, ["[]"] * len(tokens)))
        self.settle()

    def check(self, between: Callable[[], None] = lambda: None) -> None:
        """Let the audit check once; ``between`` its looks something may happen."""
        checking = Deferred.fromCoroutine(self.audit.check())
        while not checking.called and not self.clock.getDelayedCalls():
            self.pump._calls.get(timeout=10)()
        between()
        self.clock.advance(LOOK_AGAIN)
        self.pump.wait(checking)
        self.settle()

    def applied(self) -> list[int]:
        """Return the tokens that were applied, in order of application."""
        transaction = self.store.transaction()
        copied = self._mode is FollowMode.COPIED
        sql = "SELECT stream_id FROM stream_orders" if copied else "SELECT token FROM effects ORDER BY rowid"
        rows = self.pump.wait(transaction.execute(sql))
        self.pump.wait(transaction.rollback())
        return [token for (token,) in rows]

    def noted(self) -> list[int]:
        transaction = self.store.transaction()
        rows = self.pump.wait(transaction.execute("SELECT stream_id FROM applied_tokens ORDER BY stream_id"))
        self.pump.wait(transaction.rollback())
        return [token for (token,) in rows]


class AuditCase(SynchronousTestCase):
    def follow(self, database: FakeDatabase | None = None, **options: object) -> Followed:
        place = f"sqlite:///{self.mktemp()}"
        followed = Followed(place, database or FakeDatabase("orders"), **options)  # type: ignore[arg-type]
        self.addCleanup(followed.stop)
        return followed


class HoleTests(AuditCase):
    def test_a_lost_fact_below_a_later_one_is_applied_once(self) -> None:
        for mode in (FollowMode.APPLIED, FollowMode.COPIED):
            followed = self.follow(mode=mode)
            followed.at(ONE, 1)
            followed.database.write(ONE, 2, 3, 4, 6)
            followed.send(ONE, 2, 6)
            with logged() as messages:
                followed.check()
                followed.check()
                followed.check()
            expected = [2, 6, 3, 4] if mode is FollowMode.APPLIED else [2, 3, 4, 6]
            self.assertEqual(followed.applied(), expected)
            self.assertEqual(followed.follower.lost_and_found, {ONE: 2})
            self.assertEqual(
                messages, ["2 facts of orders by one did not arrive, and are fetched from the database: 3, 4"]
            )

    def test_a_kill_neither_loses_it_nor_repeats_it(self) -> None:
        for mode in (FollowMode.APPLIED, FollowMode.COPIED):
            followed = self.follow(mode=mode)
            followed.at(ONE, 1)
            followed.database.write(ONE, 2, 3, 4)
            followed.send(ONE, 2, 4)
            followed.restart()
            followed.at(ONE, 4)
            followed.check()
            followed.restart()
            followed.at(ONE, 4)
            followed.check()
            self.assertEqual(sorted(followed.applied()), [2, 3, 4])

    def test_a_fact_that_arrives_between_two_looks_was_not_lost(self) -> None:
        followed = self.follow()
        followed.at(ONE, 1)
        followed.database.write(ONE, 2, 3, 4)
        followed.send(ONE, 2, 4)
        followed.check(lambda: followed.send(ONE, 3))
        self.assertEqual((followed.applied(), followed.follower.lost_and_found), ([2, 4, 3], {}))

    def test_a_late_fact_that_arrives_after_it_was_found_is_not_applied_again(self) -> None:
        followed = self.follow()
        followed.at(ONE, 1)
        followed.database.write(ONE, 2, 3, 4)
        followed.send(ONE, 2, 4)
        followed.check()
        followed.send(ONE, 3)
        self.assertEqual(followed.applied(), [2, 4, 3])

    def test_what_was_applied_before_the_first_audit_is_not_compared(self) -> None:
        followed = self.follow()
        followed.restart(audited=False)
        followed.at(ONE, 1)
        followed.database.write(ONE, 2, 3, 4)
        followed.send(ONE, 2, 4)
        followed.restart()
        followed.at(ONE, 4)
        followed.check()
        self.assertEqual(followed.applied(), [2, 4])

    def test_an_idle_database_is_asked_one_question_and_tokens_are_forgotten(self) -> None:
        followed = self.follow()
        followed.at(ONE, 1)
        followed.at(TWO, 1)
        followed.database.write(TWO, 2)
        followed.send(TWO, 2)
        followed.database.write(ONE, 3, 4)
        followed.send(ONE, 3, 4)
        for _ in range(2):
            followed.check()
        followed.database.write(ONE, 5)
        followed.send(ONE, 5)
        for _ in range(3):
            followed.check()
        self.assertEqual(followed.noted(), [2, 5])
        followed.database.asked.clear()
        followed.check()
        self.assertEqual(followed.database.asked, {"positions": 1})

    def test_in_a_linear_stream_it_is_applied_once(self) -> None:
        followed = self.follow(linear=True)
        followed.at(ONE, 1)
        followed.at(TWO, 1)
        followed.database.write(ONE, 2, 3, 4)
        followed.database.write(TWO, 5)
        followed.send(ONE, 2, 4)
        followed.send(TWO, 5)
        followed.at(ONE, 5)
        followed.check()
        followed.restart()
        followed.at(ONE, 5)
        followed.at(TWO, 5)
        followed.check()
        self.assertEqual(followed.applied(), [2, 4, 5, 3])

    def test_a_fact_that_another_writer_has_sent_was_not_lost(self) -> None:
        followed = self.follow(known_by_token=True)
        followed.at(ONE, 1)
        followed.at(TWO, 1)
        followed.database.write(ONE, 2, 4)
        followed.database.write(TWO, 3, 5)
        followed.send(ONE, 2, 3, 4)
        followed.send(TWO, 5)
        for _ in range(4):
            followed.check()
        followed.send(TWO, 4)
        self.assertEqual((followed.applied(), followed.follower.lost_and_found), ([2, 3, 4, 5], {}))

    def test_where_nothing_is_stored_it_is_passed_on_while_the_process_runs(self) -> None:
        followed = self.follow(mode=FollowMode.POSITION_ONLY)
        followed.at(ONE, 1)
        followed.database.write(ONE, 2, 3, 4)
        followed.send(ONE, 2, 4)
        for _ in range(4):
            followed.check()
        self.assertEqual((followed.follower.applied_rows, followed.follower.lost_and_found), (3, {ONE: 1}))

    def test_more_facts_than_one_message_shows(self) -> None:
        followed = self.follow()
        followed.at(ONE, 1)
        followed.database.write(ONE, *range(2, 3002, 3))
        followed.send(ONE, 3001)
        with logged() as messages:
            followed.check()
        self.assertEqual(len(followed.applied()), len(followed.database.written) + 1)
        self.assertIn("1000 facts of orders by one did not arrive", messages[0])
        self.assertTrue(messages[0].endswith("59 and 980 more"), messages[0])


class TailTests(AuditCase):
    def test_a_writer_whose_last_facts_were_lost_is_followed_to_its_stored_position(self) -> None:
        followed = self.follow()
        followed.at(ONE, 1)
        followed.database.write(ONE, 2, 3, 4)
        followed.send(ONE, 2)
        followed.check()
        self.assertEqual((followed.applied(), followed.follower.position(ONE)), ([2, 3, 4], 4))
        self.assertEqual(followed.follower.lost_and_found, {ONE: 2})

    def test_facts_that_arrive_between_two_looks_were_not_lost(self) -> None:
        followed = self.follow()
        followed.at(ONE, 1)
        followed.database.write(ONE, 2, 3)
        followed.check(lambda: followed.send(ONE, 2, 3))
        self.assertEqual((followed.applied(), followed.follower.lost_and_found), ([2, 3], {}))
        self.assertEqual(followed.database.asked["facts"], 0)

    def test_a_writer_that_is_not_connected_is_left_alone(self) -> None:
        followed = self.follow()
        followed.at(ONE, 1)
        followed.follower.connection_lost(LINK)
        followed.database.write(ONE, 2)
        followed.check()
        self.assertEqual(followed.follower.position(ONE), 1)

    def test_without_stored_positions_the_writers_are_asked_once(self) -> None:
        followed = self.follow(FakeDatabase("orders", stores_positions=False))
        followed.at(ONE, 1)
        followed.database.write(ONE, 2, 3)
        followed.check()
        followed.check()
        self.assertEqual((followed.requests, followed.follower.lost_and_found), (1, {ONE: 2}))
        followed.at(ONE, 3)
        followed.check()
        self.assertEqual((followed.applied(), followed.requests), ([2, 3], 1))


class TroubleTests(AuditCase):
    def test_a_database_that_does_not_answer_is_logged_once(self) -> None:
        followed = self.follow()
        followed.at(ONE, 1)
        followed.database.errors += [StoreError("away"), StoreError("away")]
        with logged() as messages:
            for _ in range(3):
                followed.check()
        self.assertEqual(messages, ["cannot compare streams with the database: away"])

    def test_it_runs_once_in_each_interval_until_the_end(self) -> None:
        followed = self.follow()
        followed.audit.start()
        for _ in range(3):
            followed.clock.advance(10.0)
        self.assertEqual(followed.database.asked["positions"], 3)

    def test_an_error_of_this_package_ends_it_with_a_traceback(self) -> None:
        followed = self.follow()
        followed.database.errors.append(ZeroDivisionError())  # type: ignore[arg-type]
        followed.audit.start()
        with logged() as messages:
            followed.clock.advance(10.0)
        self.assertEqual(messages, ["comparing with the database"])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)


@cache
def recorded(stream: str) -> Sequence[tuple[str, InstanceName, int, int]]:
    """Return the RDATA and POSITIONs of a stream that a Synapse has published: kind, writer, first and last token."""

    def read() -> Iterator[tuple[str, InstanceName, int, int]]:
        for message in messages():
            match message.split(" ", 4):
                case ["RDATA", name, writer, token, _] if name == stream and token != "batch":
                    yield "RDATA", InstanceName(writer), int(token), int(token)
                case ["POSITION", name, writer, prev, new] if name == stream:
                    yield "POSITION", InstanceName(writer), int(prev), int(new)

    return list(read())


class RecordedTests(AuditCase):
    """A recorded conversation, of which any part of the RDATA is lost, with kills and audits at any time."""

    @settings(max_examples=8, deadline=None)
    @given(
        stream=st.sampled_from(["events", "push_rules", "caches", "backfill", "profile_updates"]),
        seed=st.integers(0, 2**32),
        share_lost=st.sampled_from([0.01, 0.2, 0.9]),
    )
    def test_every_fact_is_applied_once(self, stream: str, seed: int, share_lost: float) -> None:
        database = FakeDatabase(stream, stores_positions=stream != "caches")
        followed = Followed(f"sqlite:///{self.mktemp()}", database, known_by_token=stream == "profile_updates")
        seen = set[InstanceName]()
        chance = Random(seed).random
        try:
            for kind, writer, first, last in recorded(stream)[:MESSAGES]:
                if kind == "POSITION":
                    seen.add(writer)
                    followed.at(writer, first, last)
                    continue
                if first not in database.written:
                    database.write(writer, first)
                if chance() > share_lost:
                    followed.send(writer, first)
                draw = chance()
                if draw < 0.005:
                    followed.restart()
                    for each in seen:
                        followed.at(each, database.positions.get(each, Token(0)))
                elif draw < 0.02:
                    followed.check()
            for each in seen:
                followed.at(each, database.positions.get(each, Token(0)))
            for _ in range(2):
                followed.check()
            self.assertEqual(sorted(followed.applied()), sorted(database.written))
        finally:
            followed.stop()
