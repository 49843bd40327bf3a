"""The link over Redis: subscription before REPLICATE, pings, reconnects, errors with their cure, what is published."""

from __future__ import annotations

from typing import Any

from twisted.internet.protocol import Factory, Protocol
from twisted.internet.testing import StringTransport
from twisted.logger import LogLevel
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import LocalProtocolError
from replication.net.redis import (
    COLLECT,
    ECHO_TIMEOUT,
    GIVE_UP_AFTER,
    MAX_DELAY,
    MAX_JITTER,
    NO_POSITION,
    PING_AFTER,
    REQUEST_INTERVAL,
    RedisClient,
)
from replication.net.redis_connection import ANSWER_TIMEOUT, MAX_MESSAGE, RedisConnection, RedisError
from replication.session.connection import Fault, Rows
from replication.wire.commands import Ping, Position
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import Net, begin, logged
from tests.redis import FakeRedis

PORT = 6379
ORDERS = "POSITION orders w 1 1"


class LinkCase(SynchronousTestCase):
    url = f"redis://127.0.0.1:{PORT}"

    def setUp(self) -> None:
        self.net = Net()
        self.redis = FakeRedis(ORDERS)
        self.net.serving[PORT] = self.redis
        self.received: list[Any] = []
        self.lost = self.following = 0
        self.faults: list[Fault] = []
        self.link = self.make_link(self.url)

    def make_link(self, url: str, password: str | None = None) -> RedisClient:
        return RedisClient(
            reactor=self.net,
            url=url,
            password=password,
            channel="example.com",
            instance_name=InstanceName("us"),
            wants=lambda stream: stream != "typing",
            on_received=lambda _, commands: self.received.extend(commands),
            on_lost=lambda _: setattr(self, "lost", self.lost + 1),
            on_fault=self.faults.append,
            on_following=lambda _: setattr(self, "following", self.following + 1),
        )

    def start(self, seconds: float = COLLECT) -> None:
        self.link.start()
        self.net.run(seconds)

    def log_in(self, url: str, password: str | None = None) -> None:
        self.link = self.make_link(url, password)
        self.start(0.0)


class ConnectTests(LinkCase):
    def test_replicate_is_published_only_after_the_subscription_is_confirmed(self) -> None:
        self.redis.errors[b"SUBSCRIBE"] = b"ERR not yet"
        self.start(0.0)
        self.assertEqual(self.redis.sent, [[b"SUBSCRIBE", b"example.com"]])
        del self.redis.errors[b"SUBSCRIBE"]
        self.net.run(1.0)
        self.assertEqual(
            self.redis.sent[1:], [[b"SUBSCRIBE", b"example.com"], [b"PUBLISH", b"example.com", b"REPLICATE "]]
        )

    def test_it_is_following_once_the_processes_had_time_to_send_positions(self) -> None:
        self.start(0.0)
        self.assertEqual(self.link.state, "connected")
        self.assertTrue(self.link.greeted)
        self.net.run(COLLECT)
        self.assertEqual((self.link.state, self.link.error, self.following), ("following", None, 1))
        self.assertEqual(self.received, [Position(StreamName("orders"), InstanceName("w"), Token(1), Token(1))])

    def test_positions_of_streams_that_are_not_followed_count_as_an_answer(self) -> None:
        self.redis.positions = ("POSITION typing w 1 1",)
        with logged() as lines:
            self.start(NO_POSITION + 1)
        self.assertEqual((self.link.state, self.received, lines), ("following", [], []))

    def test_the_publishing_connection_is_closed_after_the_answer(self) -> None:
        self.start()
        self.assertEqual((self.redis.connections, len(self.redis.clients)), (2, 1))

    def test_rows_of_one_read_are_passed_on_together(self) -> None:
        self.start()
        self.received.clear()
        for token in range(2, 5):
            self.redis.publish(f"RDATA orders w {token} []")
        self.net.run()
        self.assertEqual(
            self.received, [Rows(StreamName("orders"), InstanceName("w"), [Token(2), Token(3), Token(4)], ["[]"] * 3)]
        )

    def test_stop_closes_everything_and_leaves_no_timer(self) -> None:
        self.start()
        stopped = begin(self.link.stop())
        self.net.run()
        self.assertTrue(stopped)
        self.assertEqual((self.link.state, self.redis.clients, self.lost), ("stopping", [], 1))
        self.assertEqual(self.net.getDelayedCalls(), [])

    def test_stop_while_nothing_answers_leaves_no_timer(self) -> None:
        self.redis.silent = True
        self.start(0.0)
        begin(self.link.stop())
        self.net.run()
        self.assertEqual(self.net.getDelayedCalls(), [])

    def test_no_answer_to_replicate_is_reported_with_what_to_check(self) -> None:
        self.redis.positions = ()
        with logged() as lines:
            self.start(NO_POSITION - 1)
            self.assertTrue(self.link.greeted)
            self.net.run(2)
        self.assertIn("no process answers REPLICATE on the channel example.com: check server_name", lines[0])
        self.assertEqual((self.link.error, self.link.greeted), (lines[0], False))
        self.redis.publish(ORDERS)
        self.net.run(COLLECT)
        self.assertEqual((self.link.state, self.link.error, self.link.greeted), ("following", None, True))


class ReconnectTests(LinkCase):
    def test_trap_44_after_a_loss_it_subscribes_and_asks_again_for_ever(self) -> None:
        with logged() as lines:
            self.start()
            del self.net.serving[PORT]
            self.net.cut()
            self.assertEqual((self.link.state, self.lost, self.link.peer), ("not connected", 1, None))
            self.net.run(3600.0)
            attempts = self.net.attempts
            self.net.run(60.0)
            self.assertGreaterEqual(self.net.attempts - attempts, int(60 / (MAX_DELAY + MAX_JITTER)))
            self.net.serving[PORT] = self.redis
            self.net.run(MAX_DELAY + MAX_JITTER + COLLECT)
        self.assertEqual((self.link.state, self.link.connections), ("following", 2))
        self.assertEqual(self.redis.published, [b"REPLICATE "] * 2)
        self.assertEqual(len([each for each in lines if "cannot connect" in each]), 1)

    def test_a_failed_login_does_not_end_the_attempts(self) -> None:
        self.redis.password = b"right"
        self.log_in(f"redis://:wrong@127.0.0.1:{PORT}")
        self.net.run(600.0)
        self.redis.password = b"wrong"
        self.net.run(MAX_DELAY + MAX_JITTER + COLLECT)
        self.assertEqual(self.link.state, "following")

    def test_pings_keep_an_idle_connection_open(self) -> None:
        self.start()
        self.net.run(10 * PING_AFTER)
        self.assertGreaterEqual(self.redis.sent.count([b"PING"]), 9)
        self.assertEqual(self.link.connections, 1)

    def test_trap_45_silence_ends_the_connection(self) -> None:
        self.start()
        self.redis.silent = True
        with logged() as lines:
            self.net.run(GIVE_UP_AFTER + 2 * PING_AFTER)
        self.assertIn("nothing received for", lines[0])
        self.assertEqual(self.faults[0].kind, "ping timeout")
        self.assertGreaterEqual(self.lost, 1)

    def test_a_port_that_does_not_answer_is_given_up_and_tried_again(self) -> None:
        self.redis.silent = True
        with logged() as lines:
            self.start(ANSWER_TIMEOUT + 1)
        self.assertIn("has not confirmed the subscription", lines[0])
        self.assertIn(f"; if that port has TLS, write rediss://127.0.0.1:{PORT}", lines[0])
        assert self.link.peer is not None
        self.link.endpoint = f"rediss://127.0.0.1:{PORT}"
        self.assertEqual(self.link.peer.other_tls(), f"; if that port has no TLS, write redis://127.0.0.1:{PORT}")
        self.redis.silent = False
        self.net.run(ANSWER_TIMEOUT + MAX_DELAY)
        self.assertEqual(self.link.state, "following")

    def test_a_replicate_that_cannot_be_published_is_tried_again_on_a_new_connection(self) -> None:
        self.redis.errors[b"PUBLISH"] = b"NOPERM this user has no permissions to run the 'publish' command"
        with logged() as lines:
            self.start(30.0)
        self.assertIn("cannot publish REPLICATE: Redis answers", lines[0])
        self.assertIn("'&example.com' -@all +subscribe +publish +ping", lines[0])
        self.redis.errors.clear()
        self.net.run(MAX_DELAY + 1 + COLLECT)
        self.assertEqual(self.link.state, "following")

    def test_many_losses_in_a_row_make_few_replicates(self) -> None:
        """Each REPLICATE makes every process of the homeserver publish all its positions."""
        self.start()
        for _ in range(300):
            self.net.cut()
            self.net.run(1.0)
        self.assertLess(len(self.redis.published), 45)

    def test_a_subscription_that_stays_at_another_redis_after_a_failover_is_made_again(self) -> None:
        """The name of Redis leads to the new one, and the old one lives, so it answers each PING."""
        self.start()
        old, new = self.redis, FakeRedis(ORDERS)
        self.net.serving[PORT] = new
        self.net.run(REQUEST_INTERVAL)
        with logged() as lines:
            self.link.request_positions()
            self.net.run(ECHO_TIMEOUT + 5)
        self.assertIn("it did not arrive at the subscription", lines[0])
        self.assertEqual((old.clients, len(new.clients), self.link.state), ([], 1, "following"))
        self.net.run(3600.0)
        self.assertEqual(self.link.connections, 2)

    def test_delays_are_short_again_after_a_stable_connection(self) -> None:
        self.start()
        for _ in range(6):
            self.net.cut()
            self.net.run(MAX_DELAY + 1)
        self.net.run(60.0)
        self.net.cut()
        self.net.run(0.25)
        self.assertTrue(self.link.greeted)


class ErrorTests(LinkCase):
    def report_of(self, url: str, password: str | None = None) -> str:
        with logged() as lines:
            self.log_in(url, password)
        self.assertEqual(self.link.error, lines[0])
        return lines[0]

    def test_a_wrong_password_is_reported_with_its_cure_and_without_the_password(self) -> None:
        self.redis.password = b"right"
        text = self.report_of(f"redis://user:wr%2Fong@127.0.0.1:{PORT}/3")
        self.assertIn("WRONGPASS", text)
        self.assertIn("redis_password_file; a worker reads them at its start only", text)
        self.assertNotIn("wr", text.replace("wrong", ""))
        self.assertIn([b"AUTH", b"user", b"wr/ong"], self.redis.sent)

    def test_an_answer_that_quotes_the_password_is_reported_without_it(self) -> None:
        """As Redis answers a command that it does not know."""
        quoted = b"ERR unknown command `AUTH`, with args beginning with: "
        for url, password, secret in (
            (f"redis://user:a%2Fb:c%40d@127.0.0.1:{PORT}", None, "a/b:c@d"),
            (f"redis://user@127.0.0.1:{PORT}", "of the file", "of the file"),
            (f"redis://user@127.0.0.1:{PORT}", "long" * 50, "longlong"),
        ):
            self.redis.errors[b"AUTH"] = quoted + (password or secret).encode()[:128]  # Redis quotes no more
            text = self.report_of(url, password)
            self.assertIn("beginning with: …", text)
            self.assertNotIn(secret, text)

    def test_nothing_is_subscribed_after_a_failed_login(self) -> None:
        self.redis.errors[b"AUTH"] = b"WRONGPASS invalid username-password pair"  # the default user needs no password
        self.report_of(f"redis://user:wrong@127.0.0.1:{PORT}")
        self.assertEqual({each[0] for each in self.redis.sent}, {b"AUTH"})

    def test_a_missing_password_is_reported_with_its_cure(self) -> None:
        self.redis.password = b"right"
        self.assertIn("Redis requires a password", self.report_of(self.url))

    def test_the_password_of_the_file_is_for_urls_without_one(self) -> None:
        self.redis.password = b"right"
        self.log_in(f"redis://user@127.0.0.1:{PORT}", "right")
        self.assertTrue(self.link.greeted)
        self.assertIn([b"AUTH", b"user", b"right"], self.redis.sent)

    def test_a_password_for_a_redis_without_one_is_reported(self) -> None:
        self.redis.errors[b"AUTH"] = b"ERR AUTH <password> called without any password configured for the default user."
        self.assertIn("this Redis has no password", self.report_of(f"redis://:secret@127.0.0.1:{PORT}"))

    def test_the_error_for_a_user_without_permissions_has_the_command_that_grants_them(self) -> None:
        self.redis.errors[b"SUBSCRIBE"] = b"NOPERM No permissions to access a channel"
        self.assertIn("ACL SETUSER NAME on '>PASSWORD' resetchannels '&example.com'", self.report_of(self.url))

    def test_another_service_on_the_port_is_named(self) -> None:
        class Web(Protocol):
            def dataReceived(self, data: bytes) -> None:
                assert self.transport is not None
                self.transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        self.net.serving[PORT] = Factory.forProtocol(Web)
        self.assertIn("is not the protocol of Redis", self.report_of(self.url))

    def test_replies_of_other_kinds_are_ignored(self) -> None:
        self.start()
        for reply in (b"*0\r\n", b"$-1\r\n", b"*1\r\n:7\r\n", b"*2\r\n$7\r\nmessage\r\n*1\r\n:1\r\n", b"+OK\r\n"):
            self.redis.clients[0].transport.write(reply)
        self.net.run()
        self.assertEqual((self.link.state, self.link.connections), ("following", 1))

    def test_a_list_of_many_elements_is_refused_before_there_is_memory_for_them(self) -> None:
        """A read may end in the middle of the number."""
        for parts in ([b"*1000000000\r\n"], [b"%1000000000\r\n"], [b":1\r\n*100", b"0000", b"000\r\n"]):
            connection = RedisConnection()
            connection.makeConnection(StringTransport())
            with self.assertRaises(RedisError):
                for part in parts:
                    connection.parse(part)

    def test_a_message_may_have_the_form_of_a_long_list(self) -> None:
        connection = RedisConnection()
        connection.makeConnection(StringTransport())
        self.assertEqual(connection.parse(b"$12\r\n*1000000000,\r\n*1\r\n:5\r\n"), [b"*1000000000,", [5]])

    def test_a_reply_without_end_is_refused(self) -> None:
        self.start()
        client = self.redis.clients[0]
        client.transport.write(b"*3\r\n$7\r\nmessage\r\n$1\r\nx\r\n$400000000\r\n")
        for _ in range(MAX_MESSAGE // 2**20 + 1):
            client.transport.write(bytes(2**20))
        with logged() as lines:
            self.net.run(0.0)
        self.assertIn(f"a message has more than {MAX_MESSAGE} bytes", lines[0])


class ConductTests(LinkCase):
    def test_requests_within_a_minute_are_published_once_and_later(self) -> None:
        self.start()
        for _ in range(5):
            self.link.request_positions()
        self.net.run(REQUEST_INTERVAL - 2)
        self.assertEqual(len(self.redis.published), 1)
        self.net.run(2)
        self.assertEqual(len(self.redis.published), 2)
        self.net.run(3600)
        self.assertEqual(len(self.redis.published), 2)

    def test_a_request_without_a_connection_is_dropped(self) -> None:
        self.link.request_positions()
        self.assertEqual(self.net.getDelayedCalls(), [])

    def test_a_request_that_fails_is_reported_and_the_subscription_stays(self) -> None:
        self.start()
        self.redis.errors[b"PUBLISH"] = b"ERR no"
        with logged() as lines:
            self.link.request_positions()
            self.net.run(REQUEST_INTERVAL + 1)
        self.assertIn("cannot publish REPLICATE", lines[0])
        self.assertEqual((self.link.state, self.link.connections), ("following", 1))

    def test_trap_34_a_process_with_our_name_ends_the_link_for_good(self) -> None:
        self.start()
        with logged() as lines:
            self.redis.publish("POSITION typing us 1 1")
            self.net.run(3600.0)
        self.assertEqual((self.link.state, self.link.connections, self.redis.clients), ("stopped", 1, []))
        self.assertIn("another process has the instance name us", lines[-1])
        self.assertIn("another process publishes under the name of this process", str(self.link.error))
        self.assertEqual(self.faults[0].kind, "same instance name")
        self.assertEqual(self.net.getDelayedCalls(), [])
        stopped = begin(self.link.stop())
        self.net.run()
        self.assertEqual(stopped, [None])

    def test_nothing_can_be_sent_to_other_processes(self) -> None:
        self.start()
        assert self.link.peer is not None
        with self.assertRaises(LocalProtocolError):
            self.link.peer.send(Ping("1"))

    def test_trap_48_nothing_but_replicate_is_published_in_a_whole_life(self) -> None:
        """A POSITION of an unknown stream, or digits, would cut off every process of the homeserver."""
        self.start()
        junk = ["1", "", "NEW_COMMAND", "POSITION orders w 0 x", "RDATA orders w x []", "RDATA orders w 9 ["]
        for message in [*junk, "REPLICATE ", "USER_SYNC a b None start 1", "POSITION new w 5 9"]:
            self.redis.publish(message)
        self.net.run(10.0)
        self.net.cut()
        self.net.run(120.0)
        begin(self.link.stop())
        self.net.run()
        self.assertEqual(self.redis.published, [b"REPLICATE "] * 2)
        self.assertEqual({each[0] for each in self.redis.sent}, {b"SUBSCRIBE", b"PUBLISH", b"PING"})
        self.assertEqual({each[1] for each in self.redis.sent if each[0] == b"SUBSCRIBE"}, {b"example.com"})


class StatusTests(LinkCase):
    def test_what_is_skipped_is_counted_and_named_once(self) -> None:
        with logged(LogLevel.info) as lines:
            self.start()
            for _ in range(3):
                self.redis.publish("NEW_COMMAND 1")
                self.redis.publish("RDATA typing w 1 []")
                self.net.run()
        self.assertEqual(len([each for each in lines if "unknown commands are skipped: NEW_COMMAND" in each]), 1)
        self.assertEqual(len([each for each in lines if "streams not followed: typing" in each]), 1)
        assert self.link.peer is not None
        status = self.link.peer.status()
        self.assertEqual(dict(status.skipped), {"not needed": 1, "unknown command": 3, "not followed": 3})
        self.assertEqual((status.unknown_commands, status.not_followed), (("NEW_COMMAND",), ("typing",)))
        self.assertEqual((status.name, status.address, status.lines_out), ("example.com", f"127.0.0.1:{PORT}", 1))

    def test_the_shown_endpoint_has_no_password(self) -> None:
        link = self.make_link("redis://user:secret@127.0.0.1:1/0")
        self.assertEqual(link.endpoint, "redis://user@127.0.0.1:1/0")
        self.assertNotIn("secret", repr(link.place))
