"""A worker behind a relay finds what the relay has found late, and applies it once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import attrs
from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.deferreds import Lifetime
from replication.errors import CatchUpError
from replication.follower.audit import Audit
from replication.follower.known_tokens import AppliedTokens, CopiedTokens, ReceivedTokens
from replication.follower.relayed_audit import PATIENCE, RelayedAudit
from replication.follower.stream import FollowMode, StreamFollower
from replication.storage import open_store
from replication.streams.cursor import Cursor
from replication.streams.facts import Fact
from replication.streams.interfaces import Page
from replication.web.client import AuditedWriter
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import begin, error_of, logged, now
from tests.follower.test_audit import ONE, TWO, US, FakeDatabase, Followed

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
        self.has_positions = True

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
        if not self.has_positions:
            return {StreamName("orders"): {}}
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

    def test_a_relay_that_has_no_positions_yet_ends_no_audit(self) -> None:
        """It has started again, and waits for its writers: the tokens of its followers were forgotten."""
        behind = self.follow()
        self.lose_one(behind)
        self.relay.has_positions = False
        behind.reconnect()
        behind.check()
        self.relay.has_positions = True
        for _ in range(3):
            behind.check()
        self.assertEqual(behind.applied(), [2, 4, 3])

    def test_a_relay_behind_a_relay_shows_an_audit_until_it_is_known_that_there_is_none(self) -> None:
        """Without copies it has noted nothing at its start; its followers ended their audits."""
        behind = self.follow(FollowMode.POSITION_ONLY)
        self.relay.audited_upto = None
        behind.at(ONE, 1)
        self.assertEqual(behind.follower.status(ONE).audited, 1)
        behind.connect()
        self.assertIsNone(behind.follower.status(ONE).audited)
        self.relay.audited_upto = 0
        behind.reconnect()
        self.assertEqual(behind.follower.status(ONE).audited, 1)

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


class Peer:
    """The HTTP of one peer: ``answer`` is what it has compared, ``pages`` are the last tokens of its pages."""

    def __init__(self, answer: object = None) -> None:
        self.answer, self.asked = answer, 0
        self.pages: list[int] = []
        self.requests: list[tuple[str, str, int, int, int]] = []

    async def audited(self) -> Any:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        self.requests.append((stream, writer, after, upto, limit))
        last = Token(self.pages.pop(0))
        return Page([Fact(last, ("[]",))], last, limited=True)


class Tokens:
    """The known tokens of a follower: whether they are noted."""

    begun = False

    async def begin_audit(self, positions: Mapping[InstanceName, Token]) -> dict[InstanceName, Token]:
        self.begun = True
        return {**positions}

    async def end_audit(self) -> None:
        self.begun = False


@attrs.define(eq=False)
class Follower:
    name: StreamName
    cursors: dict[InstanceName, Cursor]
    known: Tokens | None = attrs.field(factory=Tokens)
    audited: bool = False
    one_writer: bool = False
    audit_known: bool = False
    checked: dict[InstanceName, Token] = attrs.field(factory=dict)
    lock: DeferredLock = attrs.field(factory=DeferredLock)
    mode: FollowMode = FollowMode.COPIED

    def all_positions(self) -> dict[InstanceName, Token]:
        return dict.fromkeys(self.cursors, Token(7))


def compared(upto: int | None, *writers: InstanceName, stream: str = "orders", late: int = 0) -> object:
    """Return the answer of a peer at 9; ``upto`` is None if it compares nothing."""
    audited = None if upto is None else Token(upto)
    return {StreamName(stream): {each: AuditedWriter(each, Token(9), audited, late) for each in writers}}


class PeersTests(SynchronousTestCase):
    """Which peers are asked, when, and what begins or ends with their answers."""

    ORDERS, STOCK = StreamName("orders"), StreamName("stock")
    REDIS = "redis://cache:6379"

    def setUp(self) -> None:
        self.peers = {"tcp:a:1": [Peer(compared(5, ONE))], "tcp:b:1": [Peer(compared(None, TWO))], self.REDIS: [Peer()]}
        self.links = [FakeLink(each) for each in self.peers]
        self.clock = Clock()
        self.orders = Follower(self.ORDERS, {ONE: Cursor(Token(7)), TWO: Cursor(Token(7))})
        self.source = RelayedAudit(
            over_http=cast("Any", self.peers.__getitem__),
            links=cast("Any", self.links),
            endpoints={ONE: "tcp:a:1", TWO: "tcp:b:1", InstanceName("synapse"): self.REDIS},
            followers=cast("Any", [self.orders]),
            lifetime=Lifetime(self.clock),
            interval=10.0,
        )

    def asked(self) -> list[int]:
        return [peer.asked for peers in self.peers.values() for peer in peers]

    def confirm(self, writer: InstanceName = ONE) -> None:
        now(Deferred.fromCoroutine(self.source.confirm(cast("Any", self.orders), writer)))

    def following(self, number: int = 0) -> None:
        self.source.following(cast("Any", self.links[number]))

    def test_only_the_peer_that_sent_the_position_is_asked_once_on_a_connection(self) -> None:
        self.confirm()
        self.confirm()
        self.assertEqual((self.asked(), self.orders.audited), ([1, 0, 0], True))
        self.assertEqual(self.orders.checked, {ONE: 7, TWO: 7})
        self.links[0].connections += 1
        self.confirm()
        self.assertEqual(self.asked(), [2, 0, 0])
        self.confirm(InstanceName("synapse"))
        self.following(2)
        self.assertEqual(self.asked(), [2, 0, 0], "what is behind Redis has no such HTTP")

    def test_a_peer_is_asked_again_for_a_writer_that_its_answer_lacks(self) -> None:
        self.source._endpoints[TWO] = "tcp:a:1"  # type: ignore[index]
        self.confirm()
        self.confirm(TWO)
        self.assertEqual(self.asked(), [2, 0, 0])

    def test_a_peer_is_asked_again_for_a_stream_that_its_answer_lacks(self) -> None:
        self.confirm()
        self.orders.name = self.STOCK
        self.confirm()
        self.assertEqual(self.asked(), [2, 0, 0])

    def test_a_new_connection_is_asked_and_what_it_compares_is_noted(self) -> None:
        self.following()
        self.assertEqual((self.asked(), self.orders.audited), ([1, 0, 0], True))
        self.assertTrue(self.source.audits(self.ORDERS))
        self.assertFalse(self.source.audits(self.STOCK))

    def test_a_peer_that_compares_is_asked_at_each_first_position_and_another_only_for_something_new(self) -> None:
        for _ in range(2):
            self.following(0)
            self.following(1)
        self.assertEqual(self.asked(), [2, 1, 0])
        self.links[1].connections += 1
        self.following(1)
        self.assertEqual(self.asked(), [2, 2, 0])
        self.orders.cursors[InstanceName("three")] = Cursor(Token(7))
        self.following(1)
        self.assertEqual(self.asked(), [2, 2, 0], "it has not sent a position of this writer")
        self.source._endpoints[InstanceName("three")] = "tcp:b:1"  # type: ignore[index]
        self.following(1)
        self.assertEqual(self.asked(), [2, 3, 0])

    def test_a_synapse_which_has_no_such_answer_is_asked_once(self) -> None:
        self.peers["tcp:b:1"][0].answer = None
        self.following(1)
        self.following(1)
        self.confirm(TWO)
        self.assertEqual((self.asked(), self.orders.audited), ([0, 1, 0], False))

    def test_an_error_of_a_new_peer_changes_nothing_and_it_is_asked_again(self) -> None:
        self.peers["tcp:b:1"][0].answer = CatchUpError("away")
        self.orders.audited = True
        self.following(1)
        self.assertTrue(self.orders.audited)
        self.following(1)
        self.assertEqual(self.asked(), [0, 2, 0])

    def test_the_next_http_of_an_endpoint_is_asked_if_one_fails(self) -> None:
        broken, whole = Peer(CatchUpError("away")), Peer(compared(5, ONE))
        self.peers["tcp:a:1"] = [broken, whole]
        self.confirm()
        self.assertEqual((broken.asked, whole.asked, self.orders.audited), (1, 1, True))
        whole.pages = [9]
        now(self.source.facts(self.ORDERS, ONE, after=Token(1), upto=Token(9), limit=3))
        self.assertEqual((broken.requests, whole.requests), ([], [("orders", "one", 1, 9, 3)]))

    def test_a_peer_that_compared_before_must_answer(self) -> None:
        self.confirm()
        for peers, why in (([Peer(CatchUpError("away"))], "away"), ([], "no HTTP is known for tcp:a:1")):
            self.peers["tcp:a:1"] = peers
            error = error_of(begin(self.source.stored_positions()))
            self.assertEqual((type(error), str(error)), (CatchUpError, why))
        self.assertTrue(self.source.audits(self.ORDERS), "what it had answered is still known")
        self.links[0].connections += 1
        self.confirm()
        self.assertTrue(self.orders.audited, "facts do not wait for its answer, and are noted")

    def test_an_audit_ends_once_the_peer_of_all_writers_compares_nothing(self) -> None:
        self.orders.audited = True
        assert self.orders.known is not None
        self.orders.known.begun = True
        self.peers["tcp:b:1"][0].answer = compared(None, ONE, TWO)
        self.following(1)
        self.assertTrue(self.orders.audited, "another peer sends the facts of one writer")
        self.source._endpoints[ONE] = "tcp:b:1"  # type: ignore[index]
        self.orders.name = self.STOCK
        self.following(1)
        self.assertTrue(self.orders.audited, "the peer has not this stream")
        self.orders.name = self.ORDERS
        self.following(1)
        self.assertEqual((self.orders.audited, self.orders.known.begun), (False, False))

    def test_a_follower_that_needs_no_tokens_is_not_audited(self) -> None:
        self.orders.known = None
        self.following()
        self.assertFalse(self.orders.audited)

    def test_one_audit_begins_with_the_first_peer_that_compares(self) -> None:
        self.following(1)
        self.assertIsNone(self.source.audit)
        self.following(0)
        audit = self.source.audit
        self.following(0)
        self.assertIs(self.source.audit, audit)
        before = self.asked()
        self.clock.advance(9.9)
        self.assertEqual(self.asked(), before)
        self.clock.advance(0.1)
        self.assertEqual(self.asked(), [before[0] + 1, before[1], 0], "the other one compares nothing")

    def test_what_the_answer_has_of_a_writer(self) -> None:
        self.assertEqual(
            (self.source.state(self.ORDERS, ONE, Token(9)), self.source.settled(self.ORDERS, ONE)), (None, 0)
        )
        self.peers["tcp:a:1"][0].answer = compared(5, ONE, late=3)
        self.confirm()
        self.confirm(TWO)
        states = [self.source.state(self.ORDERS, ONE, Token(at)) for at in (8, 9, 10)]
        self.assertEqual(states, [None, (1, 3), (1, 3)])
        self.assertEqual([self.source.settled(self.ORDERS, each) for each in (ONE, TWO)], [5, 0])
        self.assertEqual(self.source.settled(self.STOCK, ONE), 0)
        self.assertIsNone(self.source.state(self.STOCK, ONE, Token(9)))
        self.assertEqual((self.source.stores_positions(self.ORDERS), now(self.source.newest(self.ORDERS))), (False, {}))

    def test_what_a_peer_has_is_read_page_by_page(self) -> None:
        self.confirm()
        peer = self.peers["tcp:a:1"][0]
        peer.pages = [4, 6, 9]
        found = now(self.source.present(self.ORDERS, ONE, after=Token(2), upto=Token(9)))
        self.assertEqual(found, {4, 6, 9})
        self.assertEqual(peer.requests, [("orders", "one", after, 9, 10_000) for after in (2, 4, 6)])
        peer.pages = [5, 5]
        self.assertEqual(now(self.source.present(self.ORDERS, ONE, after=Token(4), upto=Token(9))), {5})

    def test_there_are_no_facts_without_a_peer(self) -> None:
        error = error_of(begin(self.source.facts(self.ORDERS, ONE, after=Token(1), upto=Token(9), limit=3)))
        self.assertEqual((type(error), str(error)), (CatchUpError, "no relay compares facts of one"))
