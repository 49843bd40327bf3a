"""A worker that follows over Redis, in memory: many writers on one connection, lost rows and lost positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from twisted.logger import LogLevel
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.follower.audit import LOOK_AGAIN
from replication.follower.catch_up import CatchUpSources
from replication.follower.worker import Worker
from replication.net.redis import COLLECT, REQUEST_INTERVAL
from replication.streams.positions import MultiWriterToken
from replication.synapse.since_1_159 import STREAMS
from replication.urls import Url
from replication.wire.commands import RemoteServerUp
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import FragileStore, Net, begin, logged, now, shown_metrics
from tests.follower.test_audit import FakeDatabase
from tests.follower.test_served import NumberedTokens
from tests.redis import FakeRedis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.follower.application import ApplyTransaction
    from replication.net.links import IPeer
    from replication.streams.facts import Fact

PORT = 6379


class RedisCase(SynchronousTestCase):
    linear = False

    def setUp(self) -> None:
        self.net, self.store = Net(), FragileStore()
        self.redis = self.net.serving[PORT] = FakeRedis("POSITION orders one 1 1", "POSITION orders two 1 1")
        self.seen: list[tuple[int, str]] = []
        self.worker = self.make_worker()

        @self.worker.on("orders", linear=self.linear)
        def note(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            self.seen += [(each.token, txn.writer_of(each)) for each in facts]

    def make_worker(self, **options: Any) -> Worker:
        given: dict[str, Any] = {"streams": ["orders", "typing"], **options}
        return Worker(
            connect=[f"redis://127.0.0.1:{PORT}"],
            server_name="example.com",
            database=self.store,
            reactor=self.net,
            **given,
        )

    def tearDown(self) -> None:
        stopped = begin(self.worker.stop())
        self.net.run()
        self.assertEqual((stopped, self.net.getDelayedCalls()), ([None], []))

    def start(self) -> list[Any]:
        started = begin(self.worker.start())
        self.net.run(COLLECT)
        return started

    def publish(self, *messages: str) -> None:
        for each in messages:
            self.redis.publish(each)
        self.net.run()

    def position(self, writer: str, stream: str = "orders") -> int:
        (status,) = [each for each in self.worker.served.stream_statuses() if each.definition.name == stream]
        return next(each.position for each in status.writers if each.instance == writer)


class FollowTests(RedisCase):
    def test_start_waits_until_the_processes_had_time_to_send_positions(self) -> None:
        started = begin(self.worker.start())
        self.net.run(COLLECT / 2)
        self.assertEqual(started, [])
        self.net.run(COLLECT / 2)
        self.assertEqual(started, [None])
        self.assertEqual(self.worker.connections, {f"redis://127.0.0.1:{PORT}": "following"})

    def test_the_password_is_sent_to_a_redis_that_requires_it(self) -> None:
        self.redis.password = b"s3cret"
        self.worker = self.make_worker(redis_password="s3cret")
        self.assertEqual(self.start(), [None])

    def test_the_clock_of_the_wall_is_that_of_the_connection(self) -> None:
        self.worker = self.make_worker(wall=lambda: 7.0)
        self.start()
        (peer,) = self.worker.served.peer_statuses()
        self.assertEqual((peer.since, peer.name), (7.0, "example.com"))

    def test_incomplete_facts_of_several_writers_are_kept_apart(self) -> None:
        self.start()
        self.publish("RDATA orders one batch [1]", "RDATA orders two batch [2]", "RDATA orders one 2 [1]")
        self.publish("RDATA orders two 3 [2]")
        self.assertEqual(self.seen, [(2, "one"), (3, "two")])

    def test_earlier_facts_of_a_writer_that_comes_later_are_fetched_first(self) -> None:
        self.start()
        self.publish("RDATA orders three 5 [1]", "POSITION orders three 5 5", "RDATA orders three 6 [1]")
        self.assertEqual(self.position("three"), 0)  # (0, 5] is to be fetched, and there is no source here
        self.assertEqual(self.seen, [])

    def test_a_known_position_is_kept_when_a_writer_announces_a_lower_one(self) -> None:
        """Writers of `caches` send rows beyond the position that they announce."""
        self.start()
        self.publish("RDATA orders one 2 [1]", "RDATA orders one 4 [1]")
        with logged(LogLevel.info) as lines:
            self.net.cut()
            self.net.run(2.0)
        self.assertEqual((self.position("one"), self.seen), (4, [(2, "one"), (4, "one")]))
        self.assertIn("orders: one sends position 1, but is known to be at 4, which is kept", lines)
        self.publish("RDATA orders one 4 [1]", "RDATA orders one 5 [1]")
        self.assertEqual(self.seen[2:], [(5, "one")])

    def test_a_stream_in_memory_begins_at_0_again(self) -> None:
        self.start()
        self.publish("POSITION typing one 7 7", "RDATA typing one 8 []")
        self.net.cut()
        self.net.run(2.0)
        with logged() as messages:  # warnings and errors: a restart of that process is none
            self.publish("POSITION typing one 0 0", "RDATA typing one 1 []")
        self.assertEqual(messages, [])
        self.assertEqual(self.position("one", "typing"), 1)

    def test_a_stream_in_memory_begins_at_0_again_while_the_connection_to_redis_stays(self) -> None:
        """As when only its writer is started again; a second answer to REPLICATE changes nothing."""
        again = ["POSITION typing one 0 0", *(f"RDATA typing one {token} []" for token in range(1, 6))]
        self.worker.on("typing")(lambda facts, _: self.seen.extend((each.token, "typing") for each in facts))
        self.start()
        self.publish("POSITION typing one 0 0", *(f"RDATA typing one {token} []" for token in range(1, 9)))
        self.seen.clear()
        self.publish(*again, "POSITION typing one 5 5", "RDATA typing one 6 []")
        self.assertEqual(self.seen, [(token, "typing") for token in range(1, 7)])

    def test_what_a_stream_in_memory_had_before_its_lower_position_is_fetched(self) -> None:
        self.start()
        for end in (3, 1):  # also the first fact
            self.publish("POSITION typing one 0 0", "RDATA typing one 8 []", f"POSITION typing one {end} {end}")
            (status,) = [each for each in self.worker.served.stream_statuses() if each.definition.name == "typing"]
            # There is no source here for these facts.
            self.assertEqual([(each.position, each.published) for each in status.writers], [(0, end)])

    def test_a_row_that_cannot_be_read_is_fetched_with_the_next_fact(self) -> None:
        self.start()
        self.publish("RDATA orders one 2 [", "RDATA orders one 3 [1]")
        (status,) = [each for each in self.worker.served.stream_statuses() if each.definition.name == "orders"]
        self.assertEqual([each.published for each in status.writers], [3, 1])
        self.assertEqual((self.position("one"), self.seen), (1, []))  # there is no source here

    def test_rows_of_a_writer_without_a_position_have_it_requested_within_a_minute(self) -> None:
        """The writer's connection to Redis may have been lost with its answer to REPLICATE."""
        self.redis.positions = ("POSITION orders one 1 1",)
        self.start()
        self.redis.positions = ("POSITION orders one 1 1", "POSITION orders two 1 1")
        for token in range(2, 50):
            self.publish(f"RDATA orders two {token} []")
        self.net.run(REQUEST_INTERVAL)
        self.assertEqual(self.redis.published, [b"REPLICATE "] * 2)
        self.net.run(10 * REQUEST_INTERVAL)
        self.assertEqual(len(self.redis.published), 2)
        self.publish("RDATA orders two 50 []")
        self.assertEqual(self.seen, [(50, "two")])

    def test_a_command_of_another_process_reaches_the_function_that_is_registered_for_it(self) -> None:
        received: list[tuple[str, str]] = []

        @self.worker.on_command(RemoteServerUp)
        def note(command: RemoteServerUp, peer: IPeer) -> None:
            received.append((command.server, peer.name))

        self.start()
        self.publish("REMOTE_SERVER_UP matrix.org", "FEDERATION_ACK one 7")
        self.assertEqual(received, [("matrix.org", "example.com")])
        self.assertEqual(self.worker.send(RemoteServerUp("matrix.org")), 0)
        self.assertEqual(self.redis.published, [b"REPLICATE "])

    def test_messages_that_are_skipped_are_a_metric(self) -> None:
        self.start()
        self.publish("FEDERATION_ACK one 7", "FEDERATION_ACK one 8", "SURPRISE 1", "POSITION stock one 1 1")
        shown = shown_metrics(self.worker.served.samples())
        self.assertEqual(
            {name: value for name, value in shown.items() if name.startswith("skipped")},
            {
                "skipped_messages_total reason=not needed": 3,  # with the REPLICATE of this process
                "skipped_messages_total reason=unknown command": 1,
                "skipped_messages_total reason=not followed": 1,
            },
        )

    def test_a_slow_application_never_pauses_reading(self) -> None:
        self.start()
        self.store.close_gate("commit")
        row = '"' + "x" * 100_000 + '"'
        for token in range(2, 200):
            self.redis.publish(f"RDATA orders one {token} {row}")
        self.net.run(1.0)
        assert self.worker._clients[0].peer is not None
        self.assertEqual(self.worker._followed.get("orders").cursors["one"].published, 199)  # type: ignore[union-attr, index]
        self.store.open_gate("commit")
        self.net.run(1.0)


class DatabaseCase(RedisCase):
    stream: str
    audit_interval = 7.0

    def setUp(self) -> None:
        self.database = FakeDatabase(self.stream)
        finds = patch.object(CatchUpSources, "foreign_database", lambda _: self.database)
        finds.start()
        self.addCleanup(finds.stop)
        super().setUp()

    def make_worker(self, **options: Any) -> Worker:
        url = Url("sqlite:///synapse.db")
        definitions = [each.definition for each in STREAMS if each.name == self.stream]
        streams = ["orders", self.stream]
        more = {"definitions": definitions, "audit_interval": self.audit_interval, **options}
        worker = super().make_worker(catch_up=[url], streams=streams, **more)
        worker._sources._sources = {url: self.database}  # type: ignore[dict-item]
        return worker


class AuditTests(DatabaseCase):
    stream = "caches"

    def test_a_fact_that_redis_has_lost_is_found_in_the_database(self) -> None:
        self.redis.positions = ("POSITION orders one 1 1", "POSITION caches one 1 1")
        self.start()
        self.net.run(7.0)  # what was applied before the first audit is not compared
        self.database.write(InstanceName("one"), 2, 3)
        self.publish('RDATA caches one 3 ["get",null,1]')
        with logged():
            self.net.run(2 * 7.0 + LOOK_AGAIN)
        self.assertEqual(
            shown_metrics(self.worker.served.samples())["lost_and_found_total stream=caches writer=one"], 1
        )


class TokenTests(DatabaseCase):
    """A program that goes on from a token also receives the facts of a writer that was not known before."""

    stream = "caches"

    def setUp(self) -> None:
        super().setUp()
        self.redis.positions = ("POSITION caches one 4 4", "POSITION caches two 4 4")
        for writer in ("one", "two"):
            self.database.positions[InstanceName(writer)] = Token(4)
        self.behind = MultiWriterToken(Token(0), {InstanceName("one"): Token(4), InstanceName("two"): Token(4)})

    def test_a_token_passes_no_writer_that_the_database_has_and_that_has_sent_no_position(self) -> None:
        self.start()
        self.assertEqual(self.worker.token("caches"), self.behind)
        self.database.positions[InstanceName("new")] = Token(3)
        self.net.run(self.audit_interval)
        self.assertEqual(self.worker.token("caches"), self.behind)
        self.publish("POSITION caches new 4 4")
        self.assertEqual(self.worker.token("caches"), MultiWriterToken(Token(4)))

    def test_after_a_comparison_that_fails_a_token_passes_no_unknown_writer(self) -> None:
        self.start()
        self.net.run(self.audit_interval)
        self.assertEqual(self.worker.token("caches"), MultiWriterToken(Token(4)))
        self.database.errors.append(StoreError("gone"))
        with logged():
            self.net.run(self.audit_interval)
        self.assertEqual(self.worker.token("caches"), self.behind)

    def test_without_a_database_no_token_and_no_page_passes_a_writer_that_is_not_known(self) -> None:
        self.worker = RedisCase.make_worker(self, copy=True, streams=["orders"])
        self.worker.served._tokens = NumberedTokens(self.store)
        self.redis.positions = ("POSITION orders one 0 0", "POSITION orders two 0 0")
        self.start()
        self.publish("RDATA orders one 2 []", "RDATA orders two 3 []")
        self.net.run(60.0)
        places = {InstanceName("one"): Token(2), InstanceName("two"): Token(3)}
        self.assertEqual(self.worker.token("orders"), MultiWriterToken(Token(0), places))
        self.assertEqual(now(self.worker.served.since("orders", "0", 100))[1], "m0~1.2~2.3")


class WholeFactTests(DatabaseCase):
    stream = "events"
    audit_interval = 0.0

    def setUp(self) -> None:
        super().setUp()
        self.redis.positions = ("POSITION events one 1 1",)
        self.database.rows[Token(2)] = ('["ev",[1]]', '["state",[2]]')
        self.database.write(InstanceName("one"), 2)

    def make_worker(self, **options: Any) -> Worker:
        return super().make_worker(copy=True, **options)

    def copied(self) -> list[Fact]:
        page = self.store.facts(StreamName("events"), InstanceName("one"), after=Token(0), upto=Token(9), limit=9)
        return [*now(page).facts]

    def test_a_fact_of_which_redis_has_lost_a_row_is_read_from_the_database(self) -> None:
        self.start()
        self.publish('RDATA events one 2 ["state",[2]]')
        self.assertEqual(self.copied(), [(2, self.database.rows[Token(2)])])

    def test_a_standby_that_is_a_moment_behind_is_no_trouble(self) -> None:
        self.database.behind = True
        self.start()
        with logged() as lines:
            self.publish('RDATA events one 2 ["state",[2]]')
            self.net.run(3.0)
            status = self.worker.served.stream_statuses()
            self.database.behind = False
            self.net.run(3.0)
        self.assertEqual((lines, len(self.copied())), ([], 1))
        self.assertIn("catching up", [one.state for each in status for one in each.writers])

    def test_a_standby_that_stays_behind_is_trouble(self) -> None:
        self.database.behind = True
        self.start()
        with logged() as lines:
            self.publish('RDATA events one 2 ["state",[2]]')
            self.net.run(60.0)
        self.assertEqual(len([each for each in lines if "has nothing of one after 1" in each]), 1)


class LinearTests(RedisCase):
    linear = True

    def test_facts_of_all_writers_of_one_connection_are_applied_in_one_order(self) -> None:
        self.start()
        self.publish("RDATA orders two 3 [1]")
        self.assertEqual(self.seen, [])
        self.publish("RDATA orders one 2 [1]", "POSITION orders one 2 3")
        self.assertEqual(self.seen, [(2, "one"), (3, "two")])
