"""Connections to Redis: URLs, what a URL shows, and a message that is published on a connection of its own."""

from __future__ import annotations

from unittest.mock import patch

from twisted.internet.defer import TimeoutError  # noqa: A004 - Twisted's name
from twisted.internet.error import ConnectionRefusedError  # noqa: A004 - Twisted's name
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import ConfigError
from replication.net.redis_connection import ANSWER_TIMEOUT, RedisError, RedisPlace, ReplyError, make_parser, publish
from tests.doubles import Net, begin, error_of
from tests.redis import FakeRedis

PORT = 6379


class UrlTests(SynchronousTestCase):
    net = Net()

    def test_urls_that_cannot_work_are_refused_without_their_password(self) -> None:
        for url in (
            "redis://",
            "redis://:pass@/0",
            "redis://host:port",
            "redis://host/name",
            "redis://host:1/0?db=1",
            "redis://us:pa#ss@host",
            "redis://us:pa/ss@host",
            "redis+unix://host/path",
            "redis+unix://",
        ):
            with self.subTest(url), self.assertRaises(ConfigError) as caught:
                RedisPlace.parse(self.net, url)
            self.assertIn("write redis://[user:password@]host:port/db", str(caught.exception))
            self.assertNotIn("pa", str(caught.exception).replace("password", "").replace("path", ""))

    def test_a_unix_socket_and_tls_are_endpoints_of_twisted(self) -> None:
        self.assertEqual(RedisPlace.parse(self.net, "redis+unix://u:p@/run/redis.sock").user, "u")
        self.assertIn("Unix", type(RedisPlace.parse(self.net, "redis+unix:///run/r%20s").endpoint).__name__.title())
        self.assertIn("Tls", type(RedisPlace.parse(self.net, "rediss://host").endpoint).__name__)

    def test_a_certificate_that_cannot_be_used_is_refused(self) -> None:
        files = ("no.pem", "no.key")
        with self.assertRaisesRegex(
            ConfigError, "no.pem and no.key cannot be used as a certificate and its key: .*No such"
        ):
            RedisPlace.parse(self.net, "rediss://:secret@host", certificate=files)
        RedisPlace.parse(self.net, "redis://host", certificate=files)

    def test_a_missing_extra_is_named(self) -> None:
        with (
            patch.dict("sys.modules", {"hiredis": None}),
            self.assertRaisesRegex(ConfigError, "redis:// needs hiredis"),
        ):
            make_parser()
        tls = {"twisted.internet.ssl": None}
        with patch.dict("sys.modules", tls), self.assertRaisesRegex(ConfigError, "TLS needs pyopenssl"):
            RedisPlace.parse(self.net, "rediss://host")


class PublishTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.net, self.redis = Net(), FakeRedis()
        self.net.serving[PORT] = self.redis

    def publish(self, seconds: float = 0.0) -> list[object]:
        place = RedisPlace.parse(self.net, f"redis://127.0.0.1:{PORT}")
        outcome = begin(publish(self.net, place, "example.com", b"REPLICATE "))
        self.net.run(seconds)
        return outcome

    def test_it_returns_the_number_of_receivers_and_disconnects(self) -> None:
        self.assertEqual((self.publish(), self.redis.published), ([0], [b"REPLICATE "]))
        self.assertEqual((self.redis.clients, self.net.getDelayedCalls()), ([], []))

    def test_an_error_of_redis_is_raised(self) -> None:
        self.redis.errors[b"PUBLISH"] = b"NOPERM no"
        self.assertIsInstance(error_of(self.publish()), ReplyError)
        self.assertEqual(self.redis.clients, [])

    def test_a_redis_that_does_not_answer_is_given_up(self) -> None:
        self.redis.silent = True
        self.assertIsInstance(error_of(self.publish(ANSWER_TIMEOUT)), TimeoutError)
        self.assertEqual(self.redis.clients, [])

    def test_a_lost_connection_is_an_error(self) -> None:
        self.redis.silent = True
        outcome = self.publish()
        self.net.cut()
        self.assertIsInstance(error_of(outcome), RedisError)

    def test_a_refused_connection_is_an_error(self) -> None:
        del self.net.serving[PORT]
        self.assertIsInstance(error_of(self.publish(60.0)), ConnectionRefusedError)
