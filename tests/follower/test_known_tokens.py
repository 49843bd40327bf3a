"""Two writers send the same facts, as some writers of Synapse do: each fact is applied once, also after a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.deferreds import Lifetime, share
from replication.errors import ConfigError
from replication.follower.known_tokens import AppliedTokens, CopiedTokens, ReceivedTokens
from replication.follower.stream import FollowMode, StreamFollower
from replication.follower.worker import Worker
from replication.session.connection import Rows
from replication.storage import open_store
from replication.streams.facts import Fact
from replication.streams.interfaces import Page
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import Net
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.cursor import CatchUp

LISTS, US = StreamName("device_lists"), InstanceName("us")
ONE, TWO = InstanceName("one"), InstanceName("two")
LINK = "redis"


class TokenCase(SynchronousTestCase):
    mode = FollowMode.COPIED
    us = US

    def setUp(self) -> None:
        self.pump = Pump()
        self.place = f"sqlite:///{self.mktemp()}"
        self.seen: list[int] = []
        self.missed: list[int] = []
        self.errors_to_raise: list[Exception] = []
        self.start()

    def start(self) -> None:
        """Start a process on the same database, which knows only what is stored."""
        self.store = open_store(self.place, self.pump)
        self.pump.wait(self.store.open())
        known = AppliedTokens(LISTS, self.store, self.us) if self.mode is FollowMode.APPLIED else None
        self.clock = Clock()
        self.follower = StreamFollower(
            name=LISTS,
            mode=self.mode,
            instance_name=self.us,
            store=self.store,
            lifetime=Lifetime(self.clock),
            fetch=self.fetch,
            moved=lambda *_: None,
            function=self.note if self.mode is FollowMode.APPLIED else None,
            known=known or (CopiedTokens if self.mode is FollowMode.COPIED else ReceivedTokens)(LISTS, self.store),
            known_by_token=True,
        )
        self.pump.wait(self.follower.open())

    def stop(self) -> None:
        self.pump.wait(self.store.close())

    def tearDown(self) -> None:
        self.stop()

    def note(self, facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        if self.errors_to_raise:
            raise self.errors_to_raise.pop()
        self.seen += [each.token for each in facts]

    async def fetch(self, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int) -> Page:
        return Page([Fact(Token(each), ("[]",)) for each in self.missed], step.upto, limited=False)

    def settle(self) -> None:
        while running := self.follower.in_progress():
            self.pump.wait(share(running[0]))

    def at(self, writer: InstanceName, prev: int, new: int) -> None:
        self.follower.position_received(LINK, Position(LISTS, writer, Token(prev), Token(new)))
        self.settle()

    def send(self, writer: InstanceName, *tokens: int) -> None:
        self.follower.rows_received(LINK, Rows(LISTS, writer, [Token(each) for each in tokens], ["[]"] * len(tokens)))
        self.settle()

    def applied(self) -> list[int]:
        return self.seen

    def positions(self) -> tuple[int, int]:
        return self.follower.position(ONE), self.follower.position(TWO)


class FunctionTests(TokenCase):
    mode = FollowMode.APPLIED

    def test_on_sqlite_they_are_found_under_a_new_name(self) -> None:
        """One process uses a file, under any name.  After a rename it applied the fact of the second writer again."""
        self.at(ONE, 0, 0)
        self.at(TWO, 0, 0)
        self.send(ONE, 2, 3)
        self.stop()
        self.us = InstanceName("renamed")
        self.start()
        self.at(TWO, 0, 0)
        self.send(TWO, 3, 4)
        self.assertEqual((self.applied(), self.positions()), ([2, 3, 4], (3, 4)))

    def test_the_second_writer_of_a_fact_only_moves_its_position(self) -> None:
        self.at(ONE, 0, 0)
        self.at(TWO, 0, 0)
        self.send(ONE, 2, 3, 5)
        self.send(TWO, 3, 4, 5, 6)
        self.send(ONE, 6)
        self.assertEqual(self.applied(), [2, 3, 5, 4, 6])
        self.assertEqual(self.positions(), (6, 6))

    def test_it_is_so_after_a_restart(self) -> None:
        self.at(ONE, 0, 0)
        self.at(TWO, 0, 0)
        self.send(ONE, 2, 3, 5)
        self.stop()
        self.start()
        self.at(TWO, 0, 0)
        self.send(TWO, 3, 4, 5)
        self.assertEqual(self.applied(), [2, 3, 5, 4])

    def test_a_fact_whose_function_raised_is_applied_by_the_next_attempt(self) -> None:
        self.at(ONE, 0, 0)
        self.errors_to_raise.append(ValueError("not now"))
        self.follower.rows_received(LINK, Rows(LISTS, ONE, [Token(2)], ["[]"]))
        (running,) = self.follower.in_progress()
        while not self.follower.errors.texts:
            self.pump.run_call()
        self.clock.advance(10)
        self.pump.wait(share(running))
        self.assertEqual(self.applied(), [2])
        self.flushLoggedErrors(ValueError)

    def test_what_no_writer_sends_again_is_forgotten(self) -> None:
        self.at(ONE, 0, 0)
        self.at(TWO, 0, 0)
        self.send(ONE, 2, 3, 5)
        self.send(TWO, 4, 6)
        transaction = self.store.transaction()
        rows = self.pump.wait(transaction.execute("SELECT stream_id FROM applied_tokens"))
        self.pump.wait(transaction.rollback())
        self.assertEqual(rows, [(6,)])

    def test_after_a_reset_the_facts_of_that_writer_are_applied_again(self) -> None:
        self.at(ONE, 0, 0)
        self.at(TWO, 0, 0)
        self.send(ONE, 2, 3)
        self.follower.connection_lost(LINK)
        self.at(ONE, 2, 2)
        self.send(ONE, 3)
        self.assertEqual(self.applied(), [2, 3, 3])


class CopyTests(TokenCase):
    def applied(self) -> list[int]:
        transaction = self.store.transaction()
        rows = self.pump.wait(transaction.execute("SELECT stream_id FROM stream_device_lists "))
        self.pump.wait(transaction.rollback())
        return [token for (token,) in rows]

    def test_the_second_writer_of_a_fact_only_moves_its_position(self) -> None:
        self.at(ONE, 0, 0)
        self.at(TWO, 0, 0)
        self.send(ONE, 2, 3, 5)
        self.send(TWO, 3, 4, 5, 6)
        self.send(ONE, 6)
        self.assertEqual(sorted(self.applied()), [2, 3, 4, 5, 6])
        self.assertEqual(self.positions(), (6, 6))

    def test_it_is_so_after_a_restart(self) -> None:
        self.at(ONE, 0, 0)
        self.at(TWO, 0, 0)
        self.send(ONE, 2, 3, 5)
        self.stop()
        self.start()
        self.missed = [3]
        self.at(TWO, 3, 3)
        self.send(TWO, 4, 5)
        self.assertEqual(sorted(self.applied()), [2, 3, 4, 5])


class PositionOnlyTests(TokenCase):
    """What a relay without a copy publishes."""

    mode = FollowMode.POSITION_ONLY

    def test_the_second_writer_of_a_fact_only_moves_its_position(self) -> None:
        self.at(ONE, 0, 0)
        self.at(TWO, 0, 0)
        self.send(ONE, 2, 3, 5)
        self.send(TWO, 3, 4, 5)
        self.assertEqual((self.follower.applied_rows, self.positions()), (4, (5, 5)))

    def test_tokens_that_no_writer_sends_again_are_forgotten(self) -> None:
        self.at(ONE, 0, 0)
        self.at(TWO, 0, 0)
        self.send(ONE, *range(2, 50))
        self.send(TWO, 3, 4, 60)
        self.send(ONE, 61)
        assert isinstance(self.follower.known, ReceivedTokens)
        self.assertEqual((self.follower.applied_rows, self.follower.known._tokens), (50, {61: ONE}))

    def test_a_reset_is_taken(self) -> None:
        self.at(ONE, 0, 0)
        self.send(ONE, 2, 3)
        self.follower.connection_lost(LINK)
        self.at(ONE, 2, 2)
        self.assertEqual(self.follower.position(ONE), 2)


class WorkerTests(SynchronousTestCase):
    def test_behind_redis_the_streams_of_a_synapse_are_known(self) -> None:
        worker = Worker(reactor=Net(), connect=["redis://127.0.0.1"], database="sqlite://")
        worker.on("events", linear=True)(lambda facts, txn: None)
        with self.assertRaisesRegex(ConfigError, "its writers send each other's facts"):
            worker.on("device_lists", linear=True)(lambda facts, txn: None)

    def test_over_tcp_they_are_not(self) -> None:
        worker = Worker(reactor=Net(), connect=["tcp:127.0.0.1:1"], database="sqlite://")
        worker.on("device_lists", linear=True)(lambda facts, txn: None)


class ReceivedTests(SynchronousTestCase):
    """Nothing is stored: the tokens are in memory."""

    def test_an_audit_forgets_what_is_not_compared_again(self) -> None:
        pump = Pump()
        known = ReceivedTokens(LISTS, open_store("sqlite://", pump))

        def left(*, floor: int, of_writers: dict[InstanceName, Token]) -> set[int]:
            pump.wait(known.advance_audit({}, of_writers=of_writers, floor=Token(floor)))
            return {*pump.wait(known.find(Token(1), Token(9)))}

        for writer, tokens in ((ONE, (2, 4, 6)), (TWO, (3, 5, 7))):
            pump.wait(known.note(None, writer, [Fact(Token(each), ("[]",)) for each in tokens], Token(0)))
        self.assertEqual(left(floor=2, of_writers={}), {3, 4, 5, 6, 7})
        self.assertEqual(left(floor=0, of_writers={ONE: Token(4)}), {3, 5, 6, 7})
        self.assertEqual(left(floor=5, of_writers={TWO: Token(3)}), {6, 7})
        pump.wait(known.end_audit())
        self.assertEqual(left(floor=0, of_writers={}), set())
