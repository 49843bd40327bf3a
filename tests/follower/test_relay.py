"""A relay: what its followers receive, when, and what it sends to the writers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Self

import attrs
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import CatchUpError, NotAWriterError, SchemaError, StoreError
from replication.follower.audit import Audit
from replication.follower.relay import DOWN, UP
from replication.follower.streams import QUIET_PERIOD
from replication.follower.worker import Worker
from replication.net.protocol import Limits
from replication.presence.syncing import SILENCE_LIMIT
from replication.streams.cursor import Apply
from replication.streams.history import Epoch
from replication.streams.interfaces import Page
from replication.web.site import make_site
from replication.wire.commands import COMMANDS, ApplicationCommand
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.master import Master
from tests.doubles import FragileStore, Net, Wire, begin, connect, error_of, lines_of, logged, now, shown_metrics
from tests.follower.cases import HELLO, HTTP, MASTER, ORDERS, WIRE, WorkerCase, contents, fact, position, rdata
from tests.net.test_client import FakeWriter
from tests.redis import FakeRedis

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from replication.follower.application import ApplyTransaction
    from replication.session.encoder import EncodedLines
    from replication.streams.cursor import CatchUp
    from replication.streams.facts import Fact
    from replication.streams.history import History
    from replication.web.client import HttpCatchUp

RELAY_WIRE, RELAY_HTTP = 9192, 9193
COMPLETE, PARTIAL = b"PING complete\n", b"PING partial\n"
WITHDRAWN = b"PING withdrawn orders other\n"
BOTH = HELLO + position(1, 3) + position(1, 4, writer="other")
CIRCLE = "ERROR relays follow each other in a circle; check connect of each"


def test_every_command_is_passed_on_or_concerns_one_connection() -> None:
    kept = [word for word, command in COMMANDS.items() if not issubclass(command, (*UP, *DOWN))]
    assert sorted(kept) == ["ERROR", "NAME", "PING", "POSITION", "RDATA", "REPLICATE", "SERVER"]


@attrs.frozen
class Hint(ApplicationCommand):
    """A command of an application, for both directions."""

    WORD: ClassVar[str] = "HINT"
    SENT_BY: ClassVar[Collection[str]] = ("master", "worker")
    text: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Return the command."""
        return cls(rest)

    def encode(self) -> str:
        """Return the text."""
        return self.text


class RelayCase(WorkerCase):
    def make_worker(self, **options: Any) -> Worker:
        return super().make_worker(relay=True, **options)

    def setUp(self) -> None:
        super().setUp()
        self.wires: list[Wire] = []

    def tearDown(self) -> None:
        for wire in self.wires:
            wire.lose()
        super().tearDown()

    def follow(self, *streams: str, name: str = "worker2") -> Wire:
        """Connect as a follower, and skip SERVER and PING."""
        wire = connect(self.worker.factory())
        self.wires.append(wire)
        self.net.run()
        assert [line.split()[0] for line in lines_of(wire.read())[:2]] == ["SERVER", "PING"]
        self.command(wire, f"NAME {name}", f"REPLICATE {' '.join(streams)}")
        return wire

    def command(self, wire: Wire, *lines: str) -> None:
        """Send lines as a follower."""
        wire.protocol.dataReceived("".join(f"{each}\n" for each in lines).encode())
        self.net.run()

    def sent_up(self, writer: FakeWriter) -> list[str]:
        """Return what the writer has received on its latest connection, without the first lines of every worker."""
        lines = lines_of(writer.connections[-1].received)
        return [line for line in lines if line.split()[0] not in ("NAME", "PING", "REPLICATE")]


class PublishingTests(RelayCase):
    def test_a_follower_receives_the_bytes_of_the_writer(self) -> None:
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, writer="other") + position(1, 1, "stock"))
        self.start()
        wire = self.follow()
        self.assertEqual(wire.read(), position(1, 1) + position(1, 1, writer="other") + position(1, 1, "stock"))
        for sent in (
            rdata(2, '["caf\\u00e9",1.50]') + rdata(5, "{}"),
            b"RDATA orders master batch [1]\nRDATA orders master 6 [2]\n",
            rdata(7, writer="other"),
            rdata(8) + position(8, 12),
            position(12, 13),
        ):
            self.send(writer, sent)
            self.assertEqual(wire.read(), sent)

    def test_replicate_is_answered_with_the_applied_position_of_every_writer(self) -> None:
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, writer="other") + position(1, 1, "stock"))
        self.start()
        self.send(writer, rdata(2), rdata(3), rdata(4, writer="other"), position(4, 6, writer="other"))
        self.assertEqual(self.follow("orders").read(), position(3, 3) + position(6, 6, writer="other"))
        self.assertEqual(self.follow("stock", "unknown").read(), position(1, 1, "stock"))
        self.assertEqual(len(lines_of(self.follow().read())), 3)

    def test_only_named_streams_are_sent(self) -> None:
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, "stock"))
        self.start()
        wire = self.follow("stock")
        wire.read()
        self.send(writer, rdata(2), rdata(3, stream="stock"))
        self.assertEqual(wire.read(), rdata(3, stream="stock"))

    def test_a_fact_is_published_after_its_transaction(self) -> None:
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        wire = self.follow()
        wire.read()
        self.store.close_gate("commit")
        self.send(writer, rdata(2))
        self.assertEqual((wire.read(), self.follow().read()), (b"", position(1, 1)))
        self.store.open_gate("commit")
        self.net.run()
        self.assertEqual((wire.read(), self.stored()), (rdata(2), 2))

    def test_a_writer_is_announced_to_those_that_follow_the_stream(self) -> None:
        self.store.close_gate("commit")
        self.serve(HELLO + position(1, 7))
        begin(self.worker.start())
        self.net.run()
        orders, stock = self.follow("orders"), self.follow("stock")
        self.store.open_gate("commit")
        self.net.run()
        self.assertEqual((orders.read(), stock.read()), (position(7, 7) + COMPLETE, COMPLETE))

    def test_the_positions_of_own_streams_are_read_again_before_they_are_sent(self) -> None:
        relay = self.worker._relay
        assert relay is not None
        now(relay.refresh())
        asked: list[object] = []

        class Own:
            is_complete = True

            async def refresh(self) -> None:
                await read

            def lines(self, streams: object) -> list[EncodedLines]:
                asked.append(streams)
                return []

            async def history(self, stream: StreamName, writer: object) -> History:
                return [Epoch(f"{stream} {writer}", Token(0), Token(0))]

        read: Deferred[None] = Deferred()
        relay.own = Own()
        refreshed = begin(relay.refresh())
        self.assertEqual(refreshed, [])
        read.callback(None)
        self.assertEqual(refreshed, [None])
        self.assertEqual((relay.lines([ORDERS]), asked), ([], [[ORDERS]]))
        self.assertEqual([each.name for each in now(relay.history(ORDERS, MASTER))], ["orders master"])

    def test_a_writer_is_announced_once_it_is_caught_up_with(self) -> None:
        """A relay with a new database: a lower POSITION would take its followers back."""
        self.store.close_gate("commit")
        writer = self.serve(HELLO + position(1, 7))
        begin(self.worker.start())
        self.net.run()
        wire = self.follow()
        self.send(writer, rdata(8))
        self.assertEqual(wire.read(), b"")
        self.store.open_gate("commit")
        self.net.run()
        self.assertEqual(wire.read(), position(7, 7) + COMPLETE + rdata(8))
        self.send(writer, position(1, 1, writer="late"))
        self.assertEqual(wire.read(), PARTIAL + position(1, 1, writer="late") + COMPLETE)

    def test_a_later_fact_that_cannot_be_applied_does_not_delay_the_announcement(self) -> None:
        @self.worker.on("orders")
        def refuse(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            if facts[-1].token == 9:
                raise ValueError

        writer = self.serve(HELLO + position(1, 5))
        self.store.close_gate("commit")
        begin(self.worker.start())
        self.net.run()
        wire = self.follow()
        self.send(writer, rdata(9), position(9, 9))
        with logged():
            self.store.open_gate("commit")
            self.net.run(1)
        self.assertEqual(wire.read(), position(5, 5) + COMPLETE)
        self.flushLoggedErrors(ValueError)

    def test_writers_are_announced_together_after_a_start(self) -> None:
        """A follower that applies facts in linear order would begin with those of the first one."""
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9102"])
        self.serve(HELLO + position(1, 5, writer="one"))
        begin(self.worker.start())
        wire = self.follow()
        self.net.run(1)
        self.assertEqual(wire.read(), b"")
        self.store.close_gate("commit")
        self.serve(HELLO + position(1, 6, writer="two"), port=9102)
        self.net.run(2)
        self.assertEqual(wire.read(), b"")
        self.store.open_gate("commit")
        self.net.run()
        self.assertEqual(wire.read(), position(5, 5, writer="one") + position(6, 6, writer="two") + COMPLETE)

    def test_a_writer_whose_name_cannot_be_sent_does_not_keep_others_from_followers(self) -> None:
        """Synapse's tables may name it; no process can."""
        writer = self.serve(HELLO + position(1, 3) + position(1, 1, "stock"))
        self.start()
        relay = self.worker._relay
        assert relay is not None
        with logged() as messages:
            for name in ("a b", "", 300 * "n"):
                key = ORDERS, InstanceName(name)
                relay.linked("redis", key, Token(0), Token(7))
                relay.confirmed(key, Token(7))
        self.assertEqual(len(messages), 3)
        self.assertTrue(
            messages[0].startswith(
                "orders: followers receive no facts of 'a b', a name that no line can have: POSITION cannot"
            )
        )
        self.assertLess(len(messages[2]), 220)
        wire = self.follow()
        self.assertEqual(wire.read(), position(3, 3) + position(1, 1, "stock"))
        self.send(writer, position(1, 1, writer="late"))
        self.assertEqual(wire.read(), PARTIAL + position(1, 1, writer="late") + COMPLETE)

    def test_an_absent_writer_is_not_waited_for_long(self) -> None:
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9102"])
        self.serve(HELLO + position(1, 5, writer="one"))
        begin(self.worker.start())
        wire = self.follow()
        with logged():
            self.net.run(QUIET_PERIOD - 0.1)
            self.assertEqual(wire.read(), b"")
            self.net.run(0.2)
        received = wire.read()
        self.assertIn(position(5, 5, writer="one"), received)
        self.assertNotIn(COMPLETE, received)

    def test_a_follower_learns_when_an_absent_writer_is_found(self) -> None:
        """Until then a program that polls the follower with ``since`` could miss facts of that writer."""
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9102"])
        self.serve(HELLO + position(1, 5, writer="one"))
        begin(self.worker.start())
        with logged():
            self.net.run(QUIET_PERIOD + 0.1)
        early = connect(self.worker.factory())
        self.wires.append(early)
        self.net.run()
        self.assertRegex(lines_of(early.read())[1], r"^PING \d+ partial echo$")
        self.serve(HELLO + position(1, 6, writer="two"), port=9102)
        self.net.run(3)
        self.assertEqual(early.read(), position(6, 6, writer="two") + COMPLETE)
        wire = connect(self.worker.factory())
        self.wires.append(wire)
        self.net.run()
        self.assertRegex(lines_of(wire.read())[1], r"^PING \d+ echo$")

    def test_followers_learn_that_a_new_writer_is_not_caught_up_with(self) -> None:
        """Those who poll a follower with ``since`` would miss its first facts: other writers are ahead of them."""
        writer = self.serve(HELLO + position(1, 7))
        begin(self.worker.start())
        wire = self.follow()
        self.net.run()
        self.assertEqual(wire.read(), position(7, 7))
        self.store.close_gate("commit")
        self.send(writer, position(1, 8, writer="new"))
        self.assertEqual(wire.read(), PARTIAL)
        self.store.open_gate("commit")
        self.net.run()
        self.assertEqual(wire.read(), position(8, 8, writer="new") + COMPLETE)

    def test_followers_learn_that_another_relay_before_this_one_has_lost_sight_of_a_writer(self) -> None:
        before = self.serve(HELLO + position(1, 7))
        begin(self.worker.start())
        wire = self.follow()
        self.net.run()
        self.assertEqual(wire.read(), position(7, 7))
        self.send(before, b"PING partial\n")
        self.assertEqual(wire.read(), PARTIAL)
        self.send(before, position(1, 1, writer="new"))
        self.assertEqual(wire.read(), position(1, 1, writer="new"))
        self.send(before, COMPLETE)
        self.assertEqual(wire.read(), COMPLETE)
        self.send(before, b"PING 1 partial echo\n")
        self.assertEqual(wire.read(), PARTIAL)

    def test_a_writer_that_goes_back_before_it_is_announced_is_announced_where_it_is(self) -> None:
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9102"])
        self.serve(HELLO + position(1, 5, writer="one"), HELLO + position(3, 3, writer="one"))
        begin(self.worker.start())
        wire = self.follow()
        self.net.run(1)
        with logged():
            self.net.cut()
            self.net.run(1)
        self.serve(HELLO + position(1, 6, writer="two"), port=9102)
        self.net.run(2.5)
        self.assertEqual(wire.read(), position(3, 3, writer="one") + position(6, 6, writer="two") + COMPLETE)

    def test_an_announced_writer_stays_while_it_is_not_connected(self) -> None:
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.send(writer, rdata(2))
        del self.net.serving[WIRE]
        self.net.cut()
        self.assertEqual(self.follow().read(), position(2, 2))

    def test_after_a_temporary_error_of_the_database_followers_wait_for_the_next_start(self) -> None:
        self.serve(HELLO + position(1, 1))
        wire = self.follow()
        self.store.errors["open"] = StoreError("the database is locked", temporary=True)
        self.assertIsInstance(error_of(begin(self.worker.start())), StoreError)
        self.assertEqual(wire.read(), b"")
        self.store.errors.clear()
        self.start()
        self.assertEqual(wire.read(), position(1, 1) + COMPLETE)

    def test_after_another_error_of_the_database_followers_receive_it(self) -> None:
        wire = self.follow()
        self.store.errors["open"] = SchemaError("made by a newer version")
        self.assertIsInstance(error_of(begin(self.worker.start())), SchemaError)
        self.assertEqual(wire.read(), b"ERROR cannot start: made by a newer version\n")

    def test_more_than_a_follower_can_be_sent_is_published_as_a_gap(self) -> None:
        self.worker = self.make_worker(limits=Limits(max_queued_lines=3))
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        wire = self.follow()
        wire.read()
        self.send(writer, b"".join(map(rdata, range(2, 7))))
        self.assertEqual(wire.read(), position(6, 6))

    def test_a_fact_with_id_1_is_fetched_by_every_follower(self) -> None:
        """See docs/protocol/ids.md F5: a first token below 2 opens no gap."""
        writer = self.serve(HELLO + position(0, 0))
        self.start()
        early = self.follow()
        self.assertEqual(early.read(), position(0, 0))
        self.send(writer, rdata(1))
        self.assertEqual((early.read(), self.follow().read()), (rdata(1), position(2, 1)))

    def test_a_writer_that_goes_back_to_1_without_a_fact_there_opens_no_gap(self) -> None:
        writer = self.serve(HELLO + position(1, 1), HELLO + position(2, 2), HELLO + position(1, 1))
        self.start()
        self.send(writer, position(1, 2))
        with logged():
            for _ in range(2):
                self.net.cut()
                self.net.run(5)
        self.assertEqual(self.follow().read(), position(1, 1))

    def test_late_facts_of_a_synapse_are_sent_as_they_are(self) -> None:
        """See docs/protocol/traps.md 12: backfill comes in descending order."""
        self.serve(HELLO + position(1, 9))
        self.start()
        wire = self.follow()
        wire.read()
        relay = self.worker._relay
        assert relay is not None
        relay.applied((ORDERS, MASTER), Apply([fact(7), fact(8)], Token(9), Token(9)))
        self.net.run()
        self.assertEqual(wire.read(), rdata(7, "[7]") + rdata(8, "[8]"))
        self.assertEqual(self.follow().read(), position(9, 9))

    def test_access_tokens_are_hidden_from_followers(self) -> None:
        """See docs/protocol/streams.md C4."""
        row = '["get_user_by_access_token",["secret"],7]'
        for shown in (False, True):
            self.worker = self.make_worker(access_tokens=shown)
            writer = self.serve(HELLO + position(1, 1, "caches"))
            self.start()
            wire = self.follow()
            wire.read()
            self.send(writer, rdata(2, row, "caches"))
            self.assertEqual(wire.read(), rdata(2, row if shown else row.replace('["secret"]', "null"), "caches"))
            wire.lose()
            begin(self.worker.stop())
            self.net.run()

    def test_a_follower_that_does_not_read_is_closed_and_stops_nothing(self) -> None:
        self.worker = self.make_worker(limits=Limits(max_queued_bytes=1_000))
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        slow, quick = self.follow(), self.follow()
        for token in range(2, 200):
            self.send(writer, rdata(token, f'["{"x" * 900}"]'))
            quick.read()
        self.assertEqual((self.stored(), quick.lost), (199, False))
        self.assertTrue(slow.disconnecting)
        self.assertIn(b"ERROR Failed to keep up", slow.read())


class ChainTests(RelayCase):
    """A worker behind the relay, on the same network."""

    def setUp(self) -> None:
        super().setUp()
        self.net.serving[RELAY_WIRE] = self.worker.factory()
        self.net.serving[RELAY_HTTP] = make_site(self.worker.served, secret=None, reactor=self.net)
        self.behind_store = FragileStore()
        self.behind = Worker(
            reactor=self.net,
            server_name="example.com",
            instance_name="behind",
            database=self.behind_store,
            connect=[f"tcp:127.0.0.1:{RELAY_WIRE}"],
        )

    def tearDown(self) -> None:
        stopped = begin(self.behind.stop())
        self.net.run(1)
        self.assertEqual(stopped, [None])
        super().tearDown()

    def copies(self) -> list[dict[int, tuple[str, ...]]]:
        return [contents(each)["orders"] for each in (self.store, self.behind_store)]

    def test_facts_in_descending_order_reach_both_copies(self) -> None:
        """See docs/protocol/traps.md 12: a Synapse sends backfill so, and only pages have all of it."""
        writer = self.serve(HELLO + position(1, 1))
        missed = [fact(token) for token in range(2, 10)]
        self.worker._followed.missed.sources = FakeSources(missed)  # type: ignore[assignment]
        self.start()
        begin(self.behind.start())
        self.net.run(1)
        with logged():
            self.send(writer, rdata(9, "[9]"))
            self.send(writer, rdata(5, "[5]"), rdata(3, "[3]"))
            self.net.run(5)
        self.assertEqual(self.copies(), [dict(missed)] * 2)

    def test_a_worker_that_was_away_fetches_from_the_relay(self) -> None:
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.send(writer, *(rdata(token, f"[{token}]") for token in range(2, 3_000)))
        del self.net.attempted[:]
        begin(self.behind.start())
        self.net.run(1)
        here, there = self.copies()
        self.assertEqual((len(here), here), (2_998, there))
        self.assertEqual({*self.net.attempted}, {RELAY_WIRE, RELAY_HTTP})


class FakeSources:
    """Catch-up sources that have these facts, and no history."""

    def __init__(self, facts: list[Fact]) -> None:
        self._facts = facts

    def foreign_database(self) -> None:
        """Return None: no other program writes the database."""

    def connection_lost(self) -> None:
        """Do nothing: there is no history."""

    def over_http(self, _endpoint: str) -> list[HttpCatchUp]:
        """Return none: nothing is compared here."""
        return []

    over_http_of = over_http

    async def fetch(
        self, _: str | None, stream: str, writer: str, step: CatchUp, limit: int, *, followed: tuple[()]
    ) -> Page:
        return Page([each for each in self._facts if step.after < each.token <= step.upto], step.upto, limited=False)

    async def page(self, *which: Any) -> Page:
        return await self.fetch(*which, followed=())

    async def history(self, *_: object) -> tuple[()]:
        return ()

    def source_of(self, *_: object) -> None:
        """Return None: no catch-up is long."""

    async def close(self) -> None:
        pass


class RestartTests(RelayCase):
    """Followers compare histories at a new connection only, so the relay closes their connections."""

    def test_a_writer_that_went_back_takes_followers_back(self) -> None:
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, "stock"), HELLO + position(3, 3))
        self.start()
        self.send(writer, rdata(2), rdata(5))
        wire, other = self.follow("orders"), self.follow("stock")
        wire.read()
        with logged():
            self.net.cut()
            self.net.run(1)
        self.assertEqual(wire.read(), b"ERROR connect again to compare the history of orders of master\n")
        self.assertEqual((wire.lost, other.lost), (True, False))
        self.assertEqual(self.follow("orders").read(), position(3, 3))

    def test_a_connection_that_was_only_lost_closes_no_follower(self) -> None:
        writer = self.serve(HELLO + position(1, 1), HELLO + position(2, 2))
        self.start()
        self.send(writer, rdata(2))
        wire = self.follow()
        wire.read()
        self.net.cut()
        self.net.run(1)
        self.send(writer, rdata(3))
        self.assertEqual(wire.read(), rdata(3))

    def test_without_a_stored_history_each_new_connection_to_the_writer_closes_followers(self) -> None:
        """A stream that is not stored here has no history that could be compared."""
        self.worker = self.make_worker(copy=False)
        both = HELLO + position(4, 4) + position(4, 4, writer="other")
        writer = self.serve(both, both, both, HELLO + position(4, 4))
        self.start()
        reason = b"ERROR connect again to compare histories: a writer may have started again\n"
        for _ in range(2):
            wire = self.follow()
            self.assertEqual(wire.read(), position(4, 4) + position(4, 4, writer="other"))
            self.net.cut()
            self.net.run(1)
            self.assertEqual(wire.read()[-len(reason) :], reason)
        self.net.cut()
        self.net.run(1)
        wire = self.follow()
        self.send(writer, position(4, 4, writer="other"))
        self.assertEqual(wire.read(), position(4, 4) + position(4, 4, writer="other"))


class EpochTests(RelayCase):
    """Another process has begun an epoch of a writer, and raises its position next."""

    def test_without_a_stored_history_followers_receive_that_an_epoch_has_begun(self) -> None:
        """They passed the epochs without comparing, and a function without ``on_reset`` stopped falsely later."""
        self.worker = self.make_worker(copy=False)
        writer = self.serve(HELLO + position(4, 4) + position(4, 4, "stock"))
        self.start()
        wire, other = self.follow("orders"), self.follow("stock")
        for each in (wire, other):
            each.read()
        self.send(writer, b"PING history orders unknown\n", b"PING history orders master\n", position(4, 9))
        self.assertEqual(wire.read(), b"PING history orders master\n" + position(4, 9))
        self.assertEqual((other.read(), wire.lost), (b"", False))


class WithdrawalTests(RelayCase):
    """What a relay sends on must not outlive its source: a follower of that writer would go back to it."""

    def news(self, wire: Wire) -> bytes:
        """Return what a follower receives, without the signs of life."""
        return re.sub(rb"PING \d+\n", b"", wire.read())

    def follow_both(self) -> tuple[FakeWriter, Wire]:
        """Follow a master that also sends the position of ``other``; its next connections bring only its own."""
        writer = self.serve(BOTH, HELLO + position(3, 3))
        self.start()
        wire = self.follow()
        self.assertEqual(self.news(wire), position(3, 3) + position(4, 4, writer="other"))
        return writer, wire

    def test_a_withdrawn_position_is_sent_no_more_until_a_writer_sends_one_again(self) -> None:
        writer, wire = self.follow_both()
        stock = self.follow("stock")
        self.send(writer, WITHDRAWN, b"PING withdrawn stock other\n", b"PING withdrawn orders\n")
        self.assertEqual((self.news(wire), self.news(stock)), (WITHDRAWN, b""))
        self.assertEqual(self.news(self.follow()), position(3, 3))
        self.send(writer, rdata(5, writer="other"), position(1, 9, writer="other"))
        self.assertEqual(self.news(wire), PARTIAL + position(9, 9, writer="other") + COMPLETE)
        self.assertEqual(self.at(writer="other"), 9)

    def test_a_position_that_a_new_connection_does_not_bring_is_withdrawn(self) -> None:
        _, wire = self.follow_both()
        self.net.cut()
        self.net.run(QUIET_PERIOD - 1)
        self.assertEqual(self.news(wire), b"", "the rest of the positions may come later")
        self.net.run(2)
        self.assertEqual((self.news(wire), self.news(self.follow())), (WITHDRAWN, position(3, 3)))

    def test_a_position_stays_while_its_source_is_away_or_has_just_come_back(self) -> None:
        _, wire = self.follow_both()
        self.net.cut()
        self.net.run(QUIET_PERIOD - 1)
        self.net.cut()
        serving = self.net.serving.pop(WIRE)
        self.net.run(3 * QUIET_PERIOD)
        self.assertEqual((self.news(wire), len(lines_of(self.news(self.follow())))), (b"", 2))
        self.net.serving[WIRE] = serving
        self.net.run(QUIET_PERIOD + 3)
        self.assertEqual(self.news(wire), WITHDRAWN)

    def test_a_position_stays_until_a_relay_before_this_one_has_found_its_writers(self) -> None:
        before = self.serve(BOTH, HELLO + b"PING 1 partial echo\n" + position(3, 3))
        self.start()
        wire = self.follow()
        self.news(wire)
        self.net.cut()
        self.net.run(3 * QUIET_PERIOD)
        self.assertEqual(self.news(wire), PARTIAL)
        self.send(before, COMPLETE)
        self.assertEqual(self.news(wire), COMPLETE)
        self.net.run(QUIET_PERIOD + 1)
        self.assertEqual(self.news(wire), WITHDRAWN)

    def test_a_position_stays_if_it_came_from_another_connection(self) -> None:
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9102"])
        master = self.serve(BOTH, HELLO + position(3, 3))
        begin(self.worker.start())
        self.net.run(1)
        other = self.serve(HELLO + position(1, 4, writer="other"), port=9102)
        self.net.run(3)
        wire = self.follow()
        self.assertEqual(self.news(wire), position(3, 3) + position(4, 4, writer="other"))
        self.send(master, WITHDRAWN)
        master.connections[-1].transport.loseConnection()
        self.net.run(QUIET_PERIOD + 3)
        self.assertEqual(len(master.connections), 2)
        self.send(other, rdata(5, writer="other"))
        self.assertEqual(self.news(wire), rdata(5, writer="other"))
        del self.net.serving[9102]
        other.connections[-1].transport.loseConnection()
        self.net.run(1)
        self.send(master, WITHDRAWN)
        self.assertEqual(self.news(wire), b"", "the writer itself is away")
        self.assertEqual(len(lines_of(self.news(self.follow()))), 2)

    def test_a_writer_that_was_not_announced_yet_is_waited_for_no_more(self) -> None:
        begun = HELLO + position(1, 3) + position(4, 4, writer="other")  # nothing has the facts up to 4
        writer = self.serve(begun)
        begin(self.worker.start())
        self.net.run(QUIET_PERIOD + 1)
        wire = self.follow()
        self.assertEqual(self.news(wire), position(3, 3))
        self.send(writer, WITHDRAWN)
        self.assertEqual(self.news(wire), COMPLETE)
        self.assertEqual(self.news(self.follow()), position(3, 3))


class CommandTests(RelayCase):
    UP = ("USER_SYNC abcde @u:h start 7", "CLEAR_USER_SYNC abcde", "FEDERATION_ACK sender 5", "HINT a b")
    SEEN = 'USER_IP @u:h ["secret","1.2.3.4","agent","device",7]'

    def make_worker(self, **options: Any) -> Worker:
        worker = super().make_worker(**options)
        self.hints: list[str] = []
        worker.on_command(Hint)(lambda command, _peer: self.hints.append(command.text))
        return worker

    def test_commands_of_followers_go_to_every_writer(self) -> None:
        self.worker = self.make_worker(connect=["tcp:127.0.0.1:9092", "tcp:127.0.0.1:9102"])
        writers = [self.serve(HELLO + position(1, 1)), self.serve(HELLO + position(1, 1, writer="b"), port=9102)]
        self.start()
        wire = self.follow()
        self.command(wire, *self.UP, self.SEEN, "PING 5")
        for writer in writers:
            probe, *sent = self.sent_up(writer)
            self.assertEqual(probe, f"CLEAR_USER_SYNC {self.worker._reporter.instance_id}")
            self.assertEqual(sent, [*self.UP, self.SEEN])
        self.assertEqual((self.hints, wire.disconnecting), (["a b"], False))

    def test_remote_server_up_goes_to_everyone_but_its_sender(self) -> None:
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        sender, other = self.follow(), self.follow(name="worker3")
        for wire in (sender, other):
            wire.read()
        self.command(sender, "REMOTE_SERVER_UP h")
        self.assertEqual((sender.read(), other.read()), (b"", b"REMOTE_SERVER_UP h\n"))
        self.assertEqual(self.sent_up(writer)[1:], ["REMOTE_SERVER_UP h"])
        self.send(writer, b"REMOTE_SERVER_UP i\n", b"HINT down\n")
        for wire in (sender, other):
            self.assertEqual(wire.read(), b"REMOTE_SERVER_UP i\nHINT down\n")
        self.assertEqual(len(self.sent_up(writer)), 2)

    def test_a_command_that_is_not_registered_here_is_refused(self) -> None:
        self.serve(HELLO + position(1, 1))
        self.start()
        wire = self.follow()
        with logged():
            self.command(wire, "OTHER x")
        self.assertIn(b"ERROR line 3: unknown command: 'OTHER'", wire.read())

    def test_users_behind_the_relay_are_named_at_each_connection_to_a_writer(self) -> None:
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        wire = self.follow()
        self.command(wire, "USER_SYNC abcde @u:h start 7", "USER_SYNC abcde @v:h start 8", "USER_SYNC abcde @v:h end 9")
        self.net.cut()
        self.net.run(1)
        self.assertEqual(self.sent_up(writer)[1:], ["USER_SYNC abcde @u:h start 7"])
        words = [line.split()[0] for line in lines_of(writer.connections[-1].received)]
        self.assertEqual(words, ["NAME", "PING", "CLEAR_USER_SYNC", "REPLICATE", "USER_SYNC"])
        self.assertEqual(self.worker.served.users_syncing(), {"abcde": {"@u:h": 7}})
        wire.lose()
        with logged():
            self.net.run(SILENCE_LIMIT + 10)
        self.assertEqual(self.sent_up(writer)[-1], "CLEAR_USER_SYNC abcde")
        self.assertEqual(self.worker.served.users_syncing(), {})

    def test_a_line_that_was_read_and_cannot_be_sent_is_refused(self) -> None:
        self.serve(HELLO + position(1, 1))
        self.start()
        wire = self.follow()
        with logged():
            self.command(wire, "CLEAR_USER_SYNC abcde\r\r")
        self.assertIn(b"ERROR", wire.read())
        shown = shown_metrics(self.worker.served.samples())
        self.assertEqual(shown["faults_total kind=bad line"], 1)


class CircleTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.net = Net()
        self.workers: list[Worker] = []

    def tearDown(self) -> None:
        stopped = [begin(each.stop()) for each in self.workers]
        self.net.run(1)
        self.assertEqual(stopped, [[None]] * len(self.workers))
        self.assertEqual(self.net.getDelayedCalls(), [])

    def relay(self, name: str, port: int, *connect: int) -> Worker:
        worker = Worker(
            reactor=self.net,
            instance_name=name,
            database=FragileStore(),
            connect=[f"tcp:127.0.0.1:{each}" for each in connect],
            relay=True,
            audit_interval=0,
        )
        self.net.serving[port] = worker.factory()
        self.workers.append(worker)
        begin(worker.start())
        return worker

    def test_a_relay_that_follows_itself_is_refused(self) -> None:
        with logged() as lines:
            relay = self.relay("one", 9192, 9192)
            self.net.run(1)
        self.assertIn("one' (127.0.0.1:40000): relays follow each other in a circle", "".join(lines))
        server = relay.served.relay_server
        assert server is not None
        self.assertGreater(server.subscribers.faults["circle"], 0)

    def test_relays_in_a_circle_are_refused_however_long_it_is(self) -> None:
        for count in (2, 3, 5):
            with logged() as lines:
                relays = [self.relay(f"{count}-{n}", 9200 + n, 9200 + (n + 1) % count) for n in range(count)]
                self.net.run(5)
            self.assertIn("relays follow each other in a circle", "".join(lines), count)
            self.assertLess(sum(each.connections for relay in relays for each in relay._clients), 40 * count)

    def test_two_relays_that_follow_each_other_and_a_master_are_refused(self) -> None:
        with logged() as lines:
            self.net.serving[WIRE] = FakeWriter(HELLO.replace(b"example.com", b"localhost") + position(1, 1))
            relays = [self.relay("one", 9201, WIRE, 9202), self.relay("two", 9202, 9201)]
            self.net.run(60)
        self.assertIn("relays follow each other in a circle", "".join(lines))
        self.assertLess(len(lines), 12)
        self.assertLess(sum(each.connections for relay in relays for each in relay._clients), 150)

    def test_a_chain_is_no_circle(self) -> None:
        with logged() as lines:
            self.net.serving[WIRE] = FakeWriter(HELLO.replace(b"example.com", b"localhost") + position(1, 1))
            for port, upstream in ((9201, WIRE), (9211, 9201), (9221, 9211)):
                relay = self.relay(f"relay{port}", port, upstream)
            self.net.run(2)
        self.assertEqual((lines, relay.token("orders").stream), ([], 1))


class PageTests(RelayCase):
    def test_a_relay_without_copies_serves_pages_and_histories_of_its_sources(self) -> None:
        store = FragileStore()
        master = Master(server_name="example.com", database=store, streams=["orders"], reactor=self.net)
        self.net.serving[WIRE] = master.factory()
        self.net.serving[HTTP] = make_site(master.served, secret=None, reactor=self.net)
        self.worker = self.make_worker(copy=False)
        self.start()
        self.net.run()
        appended = begin(master.stream("orders").append([[[token]] for token in range(5)]))
        self.net.run()
        self.assertEqual(appended, [[2, 3, 4, 5, 6]])
        served = self.worker.served

        def page(after: int, upto: int | None, writer: str = "master") -> Any:
            found = begin(served.page("orders", writer, after=after, upto=upto, limit=100))
            self.net.run()
            return found[0]

        self.assertEqual([each.token for each in page(3, 99).facts], [4, 5, 6])
        self.assertEqual((page(3, 4).upto, page(6, 99).upto, page(0, 9, "unknown").upto), (4, 6, 0))
        history = begin(served.history("orders", "master"))
        self.net.run()
        self.assertEqual(history, [[*now(store.history(ORDERS, MASTER))]])
        self.assertIsInstance(history[0][0], Epoch)
        del self.net.serving[HTTP]
        with logged():
            self.net.cut()
            failed = begin(served.page("orders", "master", after=0, upto=6, limit=100))
            self.net.run(5)
        self.assertIsInstance(error_of(failed), CatchUpError)
        stopped = begin(master.stop())
        self.net.run(1)
        self.assertEqual(stopped, [None])

    def test_a_page_of_the_sources_has_no_access_tokens(self) -> None:
        row, hidden = '["get_user_by_access_token",["secret"],7]', '["get_user_by_access_token",null,7]'
        for shown in (False, True):
            self.worker = self.make_worker(copy=False, access_tokens=shown)
            self.worker._followed.missed.sources = FakeSources([fact(2, row)])  # type: ignore[assignment]
            writer = self.serve(HELLO + position(1, 1, "caches"))
            self.start()
            self.send(writer, rdata(2, row, "caches"))
            page = now(self.worker.served.page("caches", "master", after=0, upto=9, limit=5))
            self.assertEqual([each.texts for each in page.facts], [(row if shown else hidden,)])
            begin(self.worker.stop())
            self.net.run()

    def test_statuses_and_metrics_show_the_followers(self) -> None:
        self.serve(HELLO + position(1, 1))
        self.start()
        self.follow(name="downstream")
        self.assertEqual([each.name for each in self.worker.served.peer_statuses()], ["example.com", "downstream"])
        samples = {each.name: each.value for each in self.worker.served.samples()}
        self.assertEqual((samples["links"], samples["connections"], samples["queued_bytes"]), (1, 1, 0))

    def test_a_worker_that_relays_nothing_has_no_factory(self) -> None:
        plain = Worker(database=FragileStore(), reactor=self.net)
        with self.assertRaisesRegex(
            NotAWriterError, "worker 'worker1' publishes nothing: give writes=.* or relay=True"
        ):
            plain.factory()
        self.assertEqual(now(plain.stop()), None)


class PositionsOnly:
    """A database of which nothing but the stored positions is compared; each check finds the next ones."""

    name = "the database"

    def __init__(self, *positions: Any) -> None:
        self._positions = iter(positions)

    async def stored_positions(self) -> Any:
        return next(self._positions)

    def audits(self, stream: object) -> bool:
        return False


class RedisTests(RelayCase):
    """Over Redis one connection brings any number of writers, and nothing but REPLICATE is published."""

    def test_the_writers_of_a_redis_are_relayed_and_nothing_is_published_there(self) -> None:
        self.worker = self.make_worker(connect=["redis://127.0.0.1:6379"])
        redis = self.net.serving[6379] = FakeRedis("POSITION orders w1 1 1", "POSITION orders w2 1 1")
        begin(self.worker.start())
        self.net.run(5)
        wire = self.follow()
        self.assertEqual(wire.read(), position(1, 1, writer="w1") + position(1, 1, writer="w2"))
        lines = ("RDATA orders w1 2 [2]", "RDATA orders w2 3 [3]", "RDATA orders w1 4 [4]")
        for line in lines:
            redis.publish(line)
            self.net.run()
        self.assertEqual(lines_of(wire.read()), [*lines])
        self.command(wire, "USER_SYNC abcde @u:h start 7", "FEDERATION_ACK sender 5", "REMOTE_SERVER_UP h")
        published = {words[-1] for words in redis.sent if words[0] == b"PUBLISH"}
        self.assertEqual(published, {b"REPLICATE "})
        for client in [*redis.clients]:
            client.transport.loseConnection()
        self.net.run(5)
        redis.publish("RDATA orders w2 5 [5]")
        self.net.run()
        self.assertEqual((wire.disconnecting, lines_of(wire.read())[-1]), (False, "RDATA orders w2 5 [5]"))

    def test_followers_learn_that_a_redis_may_not_have_brought_all_writers(self) -> None:
        """Only the database shows a writer that sends no position there; without one ``since`` passed its facts."""
        self.worker = self.make_worker(connect=["redis://127.0.0.1:6379"])
        self.net.serving[6379] = FakeRedis("POSITION orders w1 1 1")
        begin(self.worker.start())
        self.net.run(5)
        wire = connect(self.worker.factory())
        self.wires.append(wire)
        self.net.run()
        self.assertRegex(lines_of(wire.read())[1], r"^PING \d+ partial echo$")
        relay, followed = self.worker._relay, self.worker._followed
        assert relay is not None
        source: Any = PositionsOnly({ORDERS: {"w1": 1}}, {ORDERS: {"w1": 1, "late": 1}}, {})
        followed._audit = Audit(
            source=source,
            followers=followed,
            links=followed.links,
            lifetime=self.worker._lifetime,
            interval=10.0,
            checked=relay.look_for_others,
        )
        for expected in (COMPLETE, PARTIAL, b""):
            now(followed._audit.check())
            self.net.run()
            self.assertEqual(wire.read(), expected)

    def test_a_fact_that_two_writers_send_is_relayed_once(self) -> None:
        self.worker = self.make_worker(connect=["redis://127.0.0.1:6379"], copy=False)
        redis = self.net.serving[6379] = FakeRedis("POSITION device_lists w1 1 1", "POSITION device_lists w2 1 1")
        begin(self.worker.start())
        self.net.run(5)
        wire = self.follow()
        wire.read()
        for writer in ("w1", "w2"):
            redis.publish(f"RDATA device_lists {writer} 5 [5]")
            self.net.run()
        self.assertEqual(lines_of(wire.read()), ["RDATA device_lists w1 5 [5]", "POSITION device_lists w2 1 5"])


class WritingRelayTests(RelayCase):
    def make_worker(self, **options: Any) -> Worker:
        return super().make_worker(writes=["orders"], **options)

    def test_followers_learn_that_a_position_of_this_process_is_missing(self) -> None:
        """A transaction that began before the start holds back a mapped table: it has no position yet."""
        self.serve(BOTH, HELLO)
        self.start()
        wire = self.follow()
        self.net.run()
        wire.read()
        master = self.worker._master
        assert master is not None
        ids = master.stream("orders").publisher.ids
        for known, expected in ((False, PARTIAL), (True, COMPLETE)):
            ids.horizon_known = known
            master._positions.look_for_missing()
            master._positions.look_for_missing()
            self.net.run()
            self.assertEqual(wire.read(), expected)

    def test_what_is_written_here_is_served_beside_what_is_followed(self) -> None:
        writer = self.serve(HELLO + position(3, 3) + position(1, 3, "stock"))
        self.start()
        wire = self.follow()
        self.assertEqual(
            wire.read(),
            position(1, 1, writer="worker1")
            + position(1, 1, "caches", "worker1")
            + position(3, 3)
            + position(3, 3, "stock"),
        )
        begin(self.worker.stream("orders").append([[["own"]]]))
        self.net.run()
        self.send(writer, rdata(4), rdata(5, stream="stock"))
        self.assertEqual(wire.read(), rdata(2, '["own"]', writer="worker1") + rdata(4) + rdata(5, stream="stock"))
        self.assertEqual(self.follow("stock").read(), position(5, 5, "stock"), "only what was asked for")
        self.command(wire, "FEDERATION_ACK sender 5")
        self.assertEqual(self.sent_up(writer)[1:], ["FEDERATION_ACK sender 5"])
