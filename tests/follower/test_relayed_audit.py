"""A worker behind a relay finds what the relay has found late, and applies it once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.deferreds import Lifetime
from replication.errors import CatchUpError
from replication.follower.audit import Audit
from replication.follower.known_tokens import AppliedTokens, CopiedTokens, ReceivedTokens
from replication.follower.relayed_audit import PATIENCE, RelayedAudit
from replication.follower.stream import FollowMode, StreamFollower
from replication.storage import open_store
from replication.streams.facts import Fact
from replication.streams.interfaces import Page
from replication.web.client import AuditedWriter
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import logged
from tests.follower.test_audit import ONE, US, FakeDatabase, Followed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.errors import ReplicationError

ENDPOINT = "tcp:relay:9192"


class FakeRelay:
    """The HTTP of a relay: its facts of one writer, and its own audit of them."""

    def __init__(self) -> None:
        self.facts_here: set[int] = set()
        self.position = 0
        self.audited_upto: int | None = 0
        self.late = 0
        self.asked = Counter[str]()
        self.errors: list[ReplicationError] = []
        self.waiting: Deferred[None] | None = None

    def apply(self, *tokens: int) -> None:
        self.facts_here.update(tokens)
        self.position = max(self.position, *tokens)

    def find(self, *tokens: int) -> None:
        """Apply facts below the position."""
        self.facts_here.update(tokens)
        self.late += len(tokens)

    async def audited(self) -> Mapping[StreamName, Mapping[InstanceName, AuditedWriter]]:
        self.asked["streams"] += 1
        if self.waiting is not None:
            await self.waiting
        if self.errors:
            raise self.errors.pop()
        upto = None if self.audited_upto is None else Token(self.audited_upto)
        return {StreamName("orders"): {ONE: AuditedWriter(ONE, Token(self.position), upto, self.late)}}

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        self.asked["facts"] += 1
        tokens = [Token(each) for each in sorted(self.facts_here) if after < each <= upto]
        return Page([Fact(each, ("[]",)) for each in tokens], upto, limited=False)


@attrs.define(eq=False)
class FakeLink:
    endpoint: str = ENDPOINT
    connections: int = 1
    peer: object = "a relay"


class Behind(Followed):
    """A follower behind a relay."""

    def __init__(self, place: str, relay: FakeRelay, mode: FollowMode) -> None:
        self.relay, self.link = relay, FakeLink()
        super().__init__(place, FakeDatabase("orders"), mode=mode)

    def start(self, *, audited: bool = True) -> None:
        stream = self.database.stream
        self.store = open_store(self._place, self.pump)
        self.pump.wait(self.store.open())
        self.clock, self.source_clock = Clock(), Clock()  # the second one is for an audit that begins by itself
        lifetime = Lifetime(self.clock)
        known = {
            FollowMode.APPLIED: lambda: AppliedTokens(stream, self.store, US),
            FollowMode.COPIED: lambda: CopiedTokens(stream, self.store),
            FollowMode.POSITION_ONLY: lambda: ReceivedTokens(stream, self.store),
        }[self._mode]()

        self.source = RelayedAudit(
            over_http=lambda _: [self.relay],  # type: ignore[list-item]
            links=[self.link],  # type: ignore[list-item]
            endpoints={ONE: ENDPOINT},
            followers=(followers := []),
            lifetime=Lifetime(self.source_clock),
            interval=10.0,
        )
        self.follower = StreamFollower(
            name=stream,
            mode=self._mode,
            instance_name=US,
            store=self.store,
            lifetime=lifetime,
            fetch=self.fetch,
            moved=lambda *_: None,
            function=self.effect if self._mode is FollowMode.APPLIED else None,
            known=known,
            confirm_audit=self.source.confirm,
        )
        followers.append(self.follower)
        self.pump.wait(self.follower.open())
        self.audit = Audit(source=self.source, followers=followers, links=[], lifetime=lifetime, interval=10.0)

    def connect(self) -> None:
        """Begin a connection, as the first step on it does."""
        self.pump.wait(Deferred.fromCoroutine(self.source.confirm(self.follower, ONE)))

    def reconnect(self) -> None:
        self.link.connections += 1
        self.connect()


class RelayedAuditTests(SynchronousTestCase):
    def follow(self, mode: FollowMode = FollowMode.APPLIED) -> Behind:
        self.relay = FakeRelay()
        behind = Behind(f"sqlite:///{self.mktemp()}", self.relay, mode)
        self.addCleanup(behind.stop)
        return behind

    def lose_one(self, behind: Behind) -> None:
        """Let the relay lose the fact 3, and find it after it has published 4."""
        behind.at(ONE, 1)
        behind.connect()
        self.relay.apply(2, 4)
        behind.send(ONE, 2, 4)
        behind.check()
        self.relay.find(3)

    def test_a_fact_that_the_relay_found_late_is_applied_once(self) -> None:
        for mode in (FollowMode.APPLIED, FollowMode.COPIED):
            behind = self.follow(mode)
            self.lose_one(behind)
            with logged() as messages:
                for _ in range(3):
                    behind.check()
            self.assertEqual(behind.applied(), [2, 4, 3] if mode is FollowMode.APPLIED else [2, 3, 4])
            self.assertEqual(messages, ["1 facts of orders by one did not arrive, and are fetched from the relay: 3"])
            self.assertEqual((behind.follower.lost_and_found[ONE], behind.follower.late[ONE]), (1, 1))

    def test_a_kill_of_either_neither_loses_it_nor_repeats_it(self) -> None:
        for mode in (FollowMode.APPLIED, FollowMode.COPIED):
            behind = self.follow(mode)
            self.lose_one(behind)
            for _ in range(2):
                behind.restart()
                self.relay.late = 0  # the relay, too, started again
                behind.at(ONE, 4)
                behind.reconnect()
                behind.check()
            self.assertEqual(sorted(behind.applied()), [2, 3, 4])

    def test_where_nothing_is_stored_it_is_passed_on_while_the_process_runs(self) -> None:
        behind = self.follow(FollowMode.POSITION_ONLY)
        self.lose_one(behind)
        behind.check()
        self.assertEqual((behind.follower.applied_rows, behind.follower.late[ONE]), (3, 1))

    def test_a_fact_that_a_page_had_before_is_not_applied_again(self) -> None:
        """A relay that stores nothing serves pages of the database: they have what it has not found yet."""
        behind = self.follow()
        self.relay.apply(2, 4)
        self.relay.facts_here.add(3)
        behind.at(ONE, 1)
        behind.connect()
        behind.send(ONE, 2, 3, 4)
        self.relay.late += 1
        behind.check()
        self.assertEqual((behind.applied(), behind.follower.lost_and_found), ([2, 3, 4], {}))

    def test_pages_are_requested_only_after_something_was_lost_and_tokens_are_forgotten(self) -> None:
        behind = self.follow()
        behind.at(ONE, 1)
        behind.connect()
        for token in range(2, 9):
            self.relay.apply(token)
            behind.send(ONE, token)
            behind.check()
            if token == 2:
                self.relay.asked.clear()
            self.relay.audited_upto = token - 2
        self.assertEqual(self.relay.asked, {"streams": 6})
        self.assertEqual(behind.noted(), [5, 6, 7, 8])

    def test_nothing_below_what_the_relay_still_compares_is_forgotten(self) -> None:
        behind = self.follow()
        behind.at(ONE, 1)
        behind.connect()
        self.relay.apply(2, 4)
        behind.send(ONE, 2, 4)
        for _ in range(4):
            behind.check()
        self.assertEqual(behind.noted(), [2, 4])

    def test_a_follower_below_the_relay_looks_again_when_it_has_passed(self) -> None:
        behind = self.follow()
        behind.at(ONE, 1)
        behind.connect()
        self.relay.apply(2, 4)
        self.relay.find(3)
        behind.check()
        behind.send(ONE, 2, 4)
        behind.check()
        self.assertEqual(behind.applied(), [2, 4, 3])

    def test_behind_a_master_nothing_is_noted(self) -> None:
        behind = self.follow()
        self.lose_one(behind)
        self.assertTrue(behind.follower.audited)
        self.relay.audited_upto = None
        behind.restart()
        self.assertTrue(behind.follower.audited)  # it goes on, until the peer has answered
        behind.at(ONE, 4)
        behind.reconnect()
        self.assertEqual((behind.follower.audited, behind.follower.status(ONE).audited), (False, None))
        self.assertIsNone(behind.source.audit)
        behind.send(ONE, 5)
        self.assertNotIn(5, behind.noted())

    def test_a_relay_that_does_not_answer_delays_facts_only_for_a_moment(self) -> None:
        behind = self.follow()
        behind.at(ONE, 1)
        self.relay.waiting = Deferred()
        confirmed = Deferred.fromCoroutine(behind.source.confirm(behind.follower, ONE))
        self.assertNoResult(confirmed)
        behind.source_clock.advance(PATIENCE)
        self.successResultOf(confirmed)
        self.assertFalse(behind.follower.audited)

    def test_a_relay_that_answers_no_more_is_logged_once(self) -> None:
        behind = self.follow()
        self.lose_one(behind)
        self.relay.errors += [CatchUpError("away"), CatchUpError("away")]
        with logged() as messages:
            behind.check()
            behind.check()
        self.assertEqual(len([each for each in messages if "cannot compare streams with the relay: away" in each]), 1)
        behind.check()
        self.assertEqual(behind.applied(), [2, 4, 3])

    def test_an_error_of_a_peer_that_compared_nothing_is_no_trouble(self) -> None:
        behind = self.follow()
        behind.at(ONE, 1)
        self.relay.errors += [CatchUpError("away"), CatchUpError("away")]
        behind.connect()
        with logged() as messages:
            behind.check()
        self.assertEqual((messages, behind.source.audit), ([], None))
