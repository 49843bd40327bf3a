"""What is followed is compared with the writers' database: what was lost is found at two looks, and applied once."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache, partial
from itertools import product
from random import Random
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock, deferLater
from twisted.trial.unittest import SynchronousTestCase

from replication.deferreds import Lifetime, share
from replication.errors import StoreError
from replication.follower.audit import LOOK_AGAIN, Audit
from replication.follower.known_tokens import AppliedTokens, CopiedTokens, ReceivedTokens
from replication.follower.merge import MergingFollower
from replication.follower.sources import MAX_TOKEN
from replication.follower.stream import FollowMode, StreamFollower
from replication.session.connection import Rows
from replication.storage import open_store
from replication.streams.access_tokens import hide_in_row
from replication.streams.definitions import CACHES, StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import Page
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import logged
from tests.storage.pump import Pump
from tests.synapse.published import UNSENT_BY, messages, timed_messages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.cursor import CatchUp

US, ONE, TWO = InstanceName("us"), InstanceName("one"), InstanceName("two")
LINK = "redis"
MESSAGES = 250  # consecutive ones of a recording, in one example
INTERVAL = 10.0  # seconds
LOSSES = (200.0, 280.0)  # seconds of that recording: connections to Redis were closed, Redis and a writer were stopped


class FakeDatabase:
    """The database of the writers of one stream: all facts, and the stored positions."""

    def __init__(self, stream: str, *, stores_positions: bool = True) -> None:
        self.stream = StreamName(stream)
        definition = StreamDefinition(stream, position_name=stream if stores_positions else "")
        self.name = "the database"
        self._stored_name = definition.stored_name
        self.written: dict[Token, InstanceName] = {}
        self.rows: dict[Token, tuple[str, ...]] = {}  # of facts with other rows than one empty one
        self.positions: dict[InstanceName, Token] = {}
        self.asked = Counter[str]()
        self.errors: list[StoreError] = []
        self.behind = False  # as a standby may be
        self.standby, self.keeps = False, True
        self.ended = MAX_TOKEN  # no transaction has an open ID up to here
        self.former: set[InstanceName] = set()

    def restore(self, upto: int) -> None:
        """Lose all facts above a token, and the positions that were stored since."""
        self.written = {token: of for token, of in self.written.items() if token <= upto}
        self.positions = {
            of: max(token for token, each in self.written.items() if each == of) for of in {*self.written.values()}
        }

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
        return self.ended

    async def newest(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        self.asked["newest"] += 1
        return dict(self.positions)

    async def last_row(self, stream: StreamName) -> Token:
        self.asked["last row"] += 1
        return max(self.written, default=Token(0))

    def keeps_rows(self, stream: StreamName) -> bool:
        return self.keeps

    async def is_primary(self) -> bool:
        return not self.standby

    async def present(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token) -> set[Token]:
        self.asked["present"] += 1
        return {token for token, of in self.written.items() if of == writer and after < token <= upto}

    def names_writers(self, stream: StreamName) -> bool:
        return self._stored_name is not None

    def names_no_writer(self, stream: StreamName) -> bool:
        return False

    async def writers(self, stream: StreamName, *, after: Token, upto: Token) -> dict[InstanceName, Token]:
        self.asked["writers"] += 1
        if self.errors:
            raise self.errors.pop()
        return {writer: token for token, writer in sorted(self.written.items()) if after < token <= upto}

    def note_former(self, stream: StreamName, writers: Collection[InstanceName]) -> None:
        self.former = {*writers}

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        self.asked["facts"] += 1
        if self.behind:
            return Page([], after, limited=True)
        return Page(
            [
                Fact(each, self.rows.get(each, ("[]",)))
                for each in sorted(await self.present(stream, writer, after=after, upto=upto))
            ],
            upto,
            limited=False,
        )

    def facts_written(self) -> list[tuple[int, list[str]]]:
        """Return all facts, in the order of their tokens."""
        return [(token, [*self.rows.get(token, ("[]",))]) for token in sorted(self.written)]

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
        linear: bool = False,
        **flags: bool,
    ) -> None:
        self.pump = Pump()
        self.database = database
        self.requests = 0
        self.applied_at: dict[Token, float] = {}  # when the function has received each fact
        self._place, self._mode, self._linear = place, mode, linear
        self._flags = flags  # of the StreamFollower
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
            audited=audited,
            **self._flags,
            **({"all_positions_received": lambda: True} if self._linear else {}),
        )
        self.pump.wait(self.follower.open())
        self.audit = Audit(
            source=self.database,
            followers=[self.follower],
            links=[self],  # type: ignore[list-item]
            lifetime=Lifetime(self.clock),
            interval=INTERVAL,
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
        self.applied_at.update(dict.fromkeys([each.token for each in facts], self.clock.seconds()))
        await txn.execute("CREATE TABLE IF NOT EXISTS effects (token INTEGER, rows TEXT)")
        await txn.executemany(
            "INSERT INTO effects VALUES (?, ?)", [(each.token, json.dumps(each.texts)) for each in facts]
        )

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

    def receive(self, writer: InstanceName, rows: Sequence[tuple[int | None, str]], *, settle: bool = True) -> None:
        """Let rows arrive, each with the token of its fact or, if another row of the fact follows, None."""
        places = [None if token is None else Token(token) for token, _ in rows]
        self.follower.rows_received(LINK, Rows(self.database.stream, writer, places, [text for _, text in rows]))
        if settle:
            self.settle()

    def check(self, between: Callable[[], None] = lambda: None) -> None:
        """Let the audit check once; ``between`` its looks something may happen."""
        checking = Deferred.fromCoroutine(self.audit.check())
        while not checking.called and not self.clock.getDelayedCalls():
            self.pump.run_call()
        between()
        self.clock.advance(LOOK_AGAIN)
        while not checking.called:  # another timer may have been set before that of the second look
            if self.clock.getDelayedCalls():
                self.clock.advance(LOOK_AGAIN)
            else:
                self.pump.run_call()
        self.pump.wait(checking)
        self.settle()

    def wait_until(self, seconds: float) -> None:
        """Let the time pass; a started audit checks at its times."""
        while (at := min(each.getTime() for each in self.clock.getDelayedCalls())) <= seconds:
            self.clock.advance(at - self.clock.seconds())
            while not self.clock.getDelayedCalls():
                self.pump.run_call()
            self.settle()
        self.clock.advance(seconds - self.clock.seconds())

    def applied(self) -> list[int]:
        """Return the tokens that were applied, in order of application."""
        transaction = self.store.transaction()
        copied = self._mode is FollowMode.COPIED
        sql = "SELECT stream_id FROM stream_orders" if copied else "SELECT token FROM effects ORDER BY rowid"
        rows = self.pump.wait(transaction.execute(sql))
        self.pump.wait(transaction.rollback())
        return [token for (token,) in rows]

    def effects(self) -> list[tuple[int, list[str]]]:
        """Return the facts that the function has received, in the order of their tokens."""
        transaction = self.store.transaction()
        rows = self.pump.wait(transaction.execute("SELECT token, rows FROM effects ORDER BY token"))
        self.pump.wait(transaction.rollback())
        return [(token, json.loads(texts)) for token, texts in rows]

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

    def test_an_id_that_is_open_for_long_below_facts_that_arrived_is_applied_once_it_is_committed(self) -> None:
        """As in ``caches``: a Synapse sends rows above an open ID, and then all of them again."""
        for mode in (FollowMode.APPLIED, FollowMode.COPIED):
            followed = self.follow(FakeDatabase("orders", stores_positions=False), mode=mode)
            followed.database.ended = Token(2)
            followed.at(ONE, 1)
            followed.database.write(ONE, 2, 4, 5)
            followed.send(ONE, 2, 4, 5)
            for _ in range(3):
                followed.check()
            followed.database.write(ONE, 3)
            followed.send(ONE, 3, 4, 5)
            followed.database.ended = Token(5)
            with logged():
                followed.check()
            self.assertEqual(sorted(followed.applied()), [2, 3, 4, 5])

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

    def test_after_a_restore_ids_are_given_again_that_were_rolled_back_before(self) -> None:
        """Neither rows nor stored positions go back, so nothing shows the restore: the facts look repeated."""
        for stores_positions, idle in product((True, False), repeat=2):
            followed = self.follow(FakeDatabase("orders", stores_positions=stores_positions))
            followed.at(TWO, 1)
            followed.at(ONE, 1)
            followed.database.write(TWO, 2)
            followed.send(TWO, 2)
            writer = ONE if idle else TWO
            followed.at(writer, 2, 9)
            for _ in range(3):
                followed.check()
            with logged():
                for token in (3, 4):
                    followed.database.write(writer, token)
                    followed.send(writer, token)
                    followed.check()
            self.assertEqual(followed.applied(), [2, 3, 4], (stores_positions, writer))

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

    def test_what_was_lost_is_counted_since_the_start(self) -> None:
        followed = self.follow()
        followed.at(ONE, 1)
        for lost, last in ((2, 3), (4, 5)):
            followed.database.write(ONE, lost, last)
            followed.send(ONE, last)
            followed.check()
        self.assertEqual(followed.applied(), [3, 2, 5, 4])
        self.assertEqual((followed.follower.lost_and_found, followed.follower.late), ({ONE: 2}, {ONE: 2}))

    def test_the_status_shows_up_to_where_facts_were_compared(self) -> None:
        followed = self.follow()
        followed.restart(audited=False)
        followed.at(ONE, 1)
        followed.restart()
        followed.at(ONE, 1)
        followed.at(TWO, 1)
        self.assertEqual([followed.follower.status(each).audited for each in (ONE, TWO)], [1, 0])
        followed.restart(audited=False)
        followed.at(ONE, 1)
        self.assertIsNone(followed.follower.status(ONE).audited)

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
        followed.database.write(ONE, *range(2, 3002, 3), 3001)
        followed.send(ONE, 3001)
        with logged() as messages:
            followed.check()
        self.assertEqual(len(followed.applied()), len(followed.database.written))
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

    def test_a_fact_that_was_above_the_position_and_is_below_it_a_second_later_was_lost(self) -> None:
        followed = self.follow()
        followed.at(ONE, 1)
        followed.database.write(ONE, 2, 3)

        def more() -> None:
            followed.database.write(ONE, 4, 5)
            followed.send(ONE, 5)

        followed.check(more)
        self.assertEqual((followed.applied(), followed.follower.lost_and_found), ([5, 2, 3], {ONE: 2}))

    def test_positions_are_requested_where_facts_were_lost_because_that_shows_whether_anything_arrives(self) -> None:
        followed = self.follow()
        followed.at(ONE, 1)
        followed.database.write(ONE, 2, 3)
        followed.send(ONE, 2)
        followed.check()
        self.assertEqual((followed.applied(), followed.requests), ([2, 3], 1))
        followed.database.positions[ONE] = Token(5)  # IDs that were used, without facts
        followed.check()
        self.assertEqual((followed.follower.position(ONE), followed.requests), (5, 1))

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

    def test_what_is_lost_while_positions_are_awaited_is_counted_once(self) -> None:
        """More is lost, and a later fact arrives, before the positions do: all earlier ones were counted again."""
        followed = self.follow(FakeDatabase("orders", stores_positions=False))
        followed.at(ONE, 1)
        followed.database.write(ONE, 2, 3)
        with logged() as messages:
            followed.check()
            followed.database.write(ONE, 4)
            followed.check()
            followed.database.write(ONE, 5)
            followed.send(ONE, 5)
            for _ in range(3):
                followed.check()
        self.assertEqual((followed.applied(), followed.follower.lost_and_found), ([5, 2, 3, 4], {ONE: 3}))
        self.assertEqual([each.split(":")[1] for each in messages], [" 2, 3", " 4"])


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

    def test_a_slow_check_does_not_delay_the_next_one_unless_it_takes_longer_than_the_interval(self) -> None:
        followed, began, takes = self.follow(), list[float](), iter([3.0, 3.0, 12.0, 3.0])

        async def stored_positions() -> dict[StreamName, dict[InstanceName, Token]]:
            began.append(followed.clock.seconds())
            await deferLater(followed.clock, next(takes))
            return {}

        followed.database.stored_positions = stored_positions  # type: ignore[method-assign]
        followed.audit.start()
        followed.clock.pump([1.0] * 45)
        self.assertEqual(began, [10.0, 20.0, 30.0, 43.0])

    def test_an_error_of_this_package_ends_it_with_a_traceback(self) -> None:
        followed = self.follow()
        followed.database.errors.append(ZeroDivisionError())  # type: ignore[arg-type]
        followed.audit.start()
        with logged() as messages:
            followed.clock.advance(10.0)
        self.assertEqual(messages, ["comparing with Synapse's database has ended: restart this process"])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)


class WholeFactTests(AuditCase):
    """Redis has lost some rows of facts: facts are fetched, so none lacks a row or has a row of another."""

    def follow_whole(self) -> Followed:
        followed = self.follow(FakeDatabase("events"), fetches_whole=True)
        followed.at(ONE, 1)
        return followed

    def write(self, followed: Followed, after: int = 1) -> list[tuple[int | None, str]]:
        """Write three facts, and return their rows as Redis should carry them."""
        for token, rows in (after + 1, ("a", "b", "c")), (after + 2, ("d",)), (after + 3, ("e", "f")):
            followed.database.rows[Token(token)] = rows
            followed.database.write(ONE, token)
        return [(None, "a"), (None, "b"), (after + 1, "c"), (after + 2, "d"), (None, "e"), (after + 3, "f")]

    def test_any_rows_of_three_facts_are_lost(self) -> None:
        followed = self.follow_whole()
        for kept in product((True, False), repeat=6):
            rows = self.write(followed, followed.database.positions.get(ONE, Token(1)))
            if any(kept):
                followed.receive(ONE, [row for row, arrives in zip(rows, kept, strict=True) if arrives])
            if kept[-1]:
                self.assertEqual(len(followed.applied()), len(followed.database.written))
        followed.check()
        self.assertEqual(followed.effects(), followed.database.facts_written())

    def test_rows_of_one_read_are_one_question_to_the_database(self) -> None:
        followed = self.follow_whole()
        self.write(followed)
        followed.receive(ONE, [(2, "c"), (3, "d"), (4, "f")])
        self.assertEqual((followed.database.asked["facts"], followed.applied()), (1, [2, 3, 4]))

    def test_rows_of_known_facts_and_of_other_connections_are_no_question(self) -> None:
        followed = self.follow_whole()
        self.write(followed)
        followed.receive(ONE, [(4, "f")])
        followed.receive(ONE, [(2, "c"), (None, "e"), (4, "f")])
        other = Rows(followed.database.stream, ONE, [Token(9)], ["x"])
        self.assertFalse(followed.follower.rows_received("another connection", other))
        followed.settle()
        self.assertEqual((followed.database.asked["facts"], followed.applied()), (1, [2, 3, 4]))

    def test_what_is_lost_of_a_stream_whose_facts_are_applied_as_they_arrive(self) -> None:
        """``to_device`` and ``device_lists``: a lost first row stays lost; a lost last row moves the others."""
        for lost, applied in ((0, [(2, ["b", "c"]), (3, ["d"]), (4, ["e", "f"])]), (2, [(3, ["a", "b", "d"])])):
            followed = self.follow(FakeDatabase("to_device"))
            followed.at(ONE, 1)
            rows = self.write(followed)
            del rows[lost]
            followed.receive(ONE, rows)
            self.assertEqual(followed.effects()[: len(applied)], applied)
            followed.check()
            found = {} if lost == 0 else {2: ["a", "b", "c"]}
            self.assertEqual(dict(followed.effects()), {**found, **dict(applied), 4: ["e", "f"]})

    def test_in_a_linear_stream(self) -> None:
        followed = self.follow(FakeDatabase("events"), fetches_whole=True, linear=True)
        followed.at(ONE, 1)
        followed.database.rows[Token(2)] = ("a", "b")
        followed.database.write(ONE, 2)
        followed.receive(ONE, [(2, "b")])
        self.assertEqual(followed.effects(), [(2, ["a", "b"])])


@cache
def recorded(stream: str) -> Sequence[tuple[InstanceName, tuple[int, int] | Fact]]:
    """Return what a Synapse has published of a stream: each writer's POSITIONs, ``prev`` and ``new``, and facts."""

    def read() -> Iterator[tuple[InstanceName, tuple[int, int] | Fact]]:
        begun: dict[str, list[str]] = {}
        for message in messages():
            match message.split(" ", 4):
                case ["RDATA", name, writer, token, row] if name == stream:
                    begun.setdefault(writer, []).append(row)
                    if token != "batch":
                        yield InstanceName(writer), Fact(Token(int(token)), tuple(begun.pop(writer)))
                case ["POSITION", name, writer, prev, new] if name == stream:
                    yield InstanceName(writer), (int(prev), int(new))

    return list(read())


class RecordedLossTests(AuditCase):
    """A recorded conversation at its own times; what Redis has lost there is in the database."""

    @settings(max_examples=min(10, settings().max_examples // 15), deadline=None)
    @given(phase=st.floats(0, INTERVAL), committed=st.floats(0, 1))
    def test_each_lost_fact_is_applied_within_two_intervals(self, phase: float, committed: float) -> None:
        """Each was committed after its writer's last smaller ID was published and before the next larger one was.

        A lost fact of `caches` counts from the larger one on, because no table has positions of `caches`.
        """
        for stream, writers in UNSENT_BY.items():
            lost = {Token(token): InstanceName(writer) for writer, tokens in writers.items() for token in tokens}
            timeline = [*losses(stream)]
            commits, counts = {}, {}
            for token, writer in lost.items():
                last = max(at for at, of, _, fact in timeline if of == writer and fact < token)
                after = min(at for at, of, _, fact in timeline if of == writer and fact > token)
                commits[token] = last + (after - last) * committed
                counts[token] = after if stream == CACHES else commits[token]
            database = FakeDatabase(stream, stores_positions=stream != CACHES)
            followed = Followed(f"sqlite:///{self.mktemp()}", database, fetches_whole=stream == "events")
            try:
                self._play(followed, timeline, [(at, lost[token], token) for token, at in commits.items()], phase)
                late = {token: followed.applied_at[token] - at for token, at in counts.items()}
                self.assertEqual({token: at for token, at in late.items() if at > 2 * INTERVAL}, {}, stream)
            finally:
                followed.stop()

    def _play(
        self,
        followed: Followed,
        timeline: list[tuple[float, InstanceName, Position | None, Token]],
        commits: list[tuple[float, InstanceName, Token]],
        phase: float,
    ) -> None:
        """Let everything happen at its time; each question to the database takes three seconds."""
        database, ask = followed.database, followed.database.stored_positions

        async def stored_positions() -> Mapping[StreamName, Mapping[InstanceName, Token]]:
            await deferLater(followed.clock, 3.0)
            return await ask()

        database.stored_positions = stored_positions  # type: ignore[method-assign]
        followed.clock.advance(LOSSES[0] - phase)
        followed.audit.start()
        steps: list[tuple[float, InstanceName, Token, bool, Position | None]] = [
            (at, writer, token, True, None) for at, writer, token in commits
        ]
        steps += [(at, writer, token, False, position) for at, writer, position, token in timeline]
        for at, writer, token, is_lost, position in sorted(steps, key=lambda step: step[0]):
            followed.wait_until(max(at, followed.clock.seconds()))
            if position is not None:
                followed.at(writer, position.prev, position.new)
                continue
            if token not in database.written:
                database.write(writer, token)
            if not is_lost:
                followed.send(writer, token)
        followed.wait_until(LOSSES[1] + 2 * INTERVAL)


@cache
def losses(stream: str) -> Sequence[tuple[float, InstanceName, Position | None, Token]]:
    """Return the time, the writer, the POSITION if it is one, and the token of each message while Redis lost some."""
    found: list[tuple[float, InstanceName, Position | None, Token]] = []
    before: dict[InstanceName, Token] = {}
    for at, message in timed_messages():
        match message.split(" ", 4):
            case ["RDATA", name, writer, token, _] if name == stream and token != "batch":
                position = None
            case ["POSITION", name, writer, prev, token] if name == stream:
                position = Position(StreamName(stream), InstanceName(writer), Token(int(prev)), Token(int(token)))
            case _:
                continue
        if at < LOSSES[0]:
            before[InstanceName(writer)] = Token(int(token))
        elif at < LOSSES[1]:
            found.append((at, InstanceName(writer), position, Token(int(token))))
    first = [
        (LOSSES[0], writer, Position(StreamName(stream), writer, token, token), token)
        for writer, token in before.items()
    ]
    return first + found


class RecordedTests(AuditCase):
    """A recorded conversation is cut and delayed, and any rows of it are lost, with kills and audits at any time."""

    @settings(max_examples=15, deadline=None)
    @given(
        stream=st.sampled_from(["events", "events", "push_rules", "caches", "backfill", "profile_updates"]),
        seed=st.integers(0, 2**32),
        lost=st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0]),
        delayed=st.sampled_from([0.0, 0.02, 0.2]),
        cut=st.sampled_from([0.0, 0.01]),
    )
    def test_every_fact_is_applied_once_and_whole(
        self, stream: str, seed: int, lost: float, delayed: float, cut: float
    ) -> None:
        database = FakeDatabase(stream, stores_positions=stream != CACHES)
        whole, by_token = stream == "events", stream == "profile_updates"
        followed = Followed(f"sqlite:///{self.mktemp()}", database, known_by_token=by_token, fetches_whole=whole)
        chance = Random(seed).random
        conversation = Conversation(followed, chance, lost=lost, delayed=delayed)
        try:
            for writer, published in part_of(stream, seed):
                conversation.publish(writer, published)
                draw = chance()
                if draw < cut:
                    conversation.cut()
                elif draw < cut + 0.005:
                    conversation.kill()
                elif draw < cut + 0.02:
                    followed.check()
            conversation.end()
            self.assertEqual(followed.effects(), database.facts_written())
        finally:
            followed.stop()


class Conversation:
    """What the writers of one stream commit and publish, and what of it arrives at a follower.

    ``lost`` and ``delayed`` are the shares of rows that are lost, and of messages before which the connection of a
    writer to Redis breaks: it publishes them later, in order.
    """

    def __init__(self, followed: Followed, chance: Callable[[], float], *, lost: float, delayed: float) -> None:
        self._followed, self._database, self._chance = followed, followed.database, chance
        self._lost, self._delayed = lost, delayed
        self._unsent = sorted(
            (Token(token), InstanceName(writer))
            for writer, tokens in UNSENT_BY.get(followed.database.stream, {}).items()
            for token in tokens
        )
        self._writers = set[InstanceName]()
        self._waiting: dict[InstanceName, list[Callable[[], object]]] = {}
        self._missed = 0  # so many more messages are published before the follower is subscribed again

    def publish(self, writer: InstanceName, published: tuple[int, int] | Fact) -> None:
        """Let a writer commit and publish a fact, or publish the ``prev`` and ``new`` of a POSITION."""
        if not self._writers:
            begin = published.token if isinstance(published, Fact) else published[1]
            self._unsent = [each for each in self._unsent if each[0] > begin]
        self._writers.add(writer)
        if isinstance(published, Fact):
            self._commit(writer, published)
            arrive = partial(self._receive, writer, published)
        else:
            arrive = partial(self._followed.at, writer, *published)
        if self._missed:
            self._missed -= 1
            if not self._missed:
                self._answer()
            return
        if writer in self._waiting or self._chance() < self._delayed:
            self._waiting.setdefault(writer, []).append(arrive)
            if self._chance() < 0.2:
                self._publish_waiting(writer)
        else:
            arrive()

    def cut(self) -> None:
        """Close the subscription of the follower, for some messages; what waits is published meanwhile."""
        self._followed.follower.connection_lost(LINK)
        self._waiting.clear()
        self._missed = 1 + int(20 * self._chance())

    def kill(self) -> None:
        """Kill the follower, and start it again."""
        self._followed.restart()
        self._missed = 0
        self._answer()

    def end(self) -> None:
        """Let everything arrive, and the audit check what is left."""
        for writer in [*self._waiting]:
            self._publish_waiting(writer)
        self._answer()
        for _ in range(2):
            self._followed.check()

    def _commit(self, writer: InstanceName, fact: Fact) -> None:
        while self._unsent and self._unsent[0][0] < fact.token:  # the recorded Redis did not carry these
            token, of = self._unsent.pop(0)
            self._database.write(of, token)
        if fact.token not in self._database.written:
            masked = self._database.stream == CACHES
            self._database.rows[fact.token] = tuple(map(hide_in_row, fact.texts)) if masked else fact.texts
            self._database.write(writer, fact.token)

    def _receive(self, writer: InstanceName, fact: Fact) -> None:
        places = [*[None] * (len(fact.texts) - 1), fact.token]
        rows = [each for each in zip(places, fact.texts, strict=True) if self._chance() >= self._lost]
        if rows:
            self._followed.receive(writer, rows, settle=self._chance() < 0.5)

    def _publish_waiting(self, writer: InstanceName) -> None:
        for arrive in self._waiting.pop(writer, ()):
            arrive()

    def _answer(self) -> None:
        """Answer the follower's REPLICATE."""
        for each in self._writers:
            self._followed.at(each, self._database.positions.get(each, Token(0)))


def part_of(stream: str, seed: int) -> Sequence[tuple[InstanceName, tuple[int, int] | Fact]]:
    """Return MESSAGES consecutive messages of a recording, after the last position of each writer before them."""
    every = recorded(stream)
    begin = seed % max(1, len(every) - MESSAGES)
    first = {writer: (each[1], each[1]) for writer, each in every[:begin] if not isinstance(each, Fact)}
    return [*first.items(), *every[begin : begin + MESSAGES]]
