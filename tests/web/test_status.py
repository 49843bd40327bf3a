"""The status of streams, connections, users and the process, through the HTTP API."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.streams.definitions import StreamDefinition
from replication.streams.interfaces import InMemoryLogStatus, StreamStatus
from replication.web.status import describe_stream
from replication.wire.grammar import InstanceName, Token
from tests.web.served import (
    ApiTestCase,
    Client,
    FakeServed,
    served_site,
)


def test_a_stream_as_a_json_object() -> None:
    assert describe_stream(FakeServed().stream_statuses()[0]) == {
        "name": "orders",
        "row": ("order_id", "state"),
        "table": None,
        "negative": False,
        "writers": [
            {
                "instance": "master",
                "position": 9,
                "announced": 11,
                "lag": 2,
                "state": "writing",
                "error": None,
                "lost_and_found": 0,
                "failed": None,
                "skipped": 0,
                "audited": None,
                "late": 0,
                "gone": 0,
                "source": None,
            },
            {
                "instance": "worker2",
                "position": 7,
                "announced": 7,
                "lag": 0,
                "state": "stopped",
                "error": "the function raised",
                "lost_and_found": 0,
                "failed": None,
                "skipped": 0,
                "audited": None,
                "late": 0,
                "gone": 0,
                "source": None,
            },
        ],
        "positions": {"master": 9, "worker2": 7},
        "minimum": 7,
        "maximum": 9,
        "open": 2,
        "oldest_open": {"id": 10, "age": 1.5},
        "notes": ["stream 'orders': mend it"],
        "shares": None,
        "in_memory": None,
    }


def test_a_stream_without_a_table_lists_what_it_has_in_memory() -> None:
    status = StreamStatus(
        StreamDefinition("f", in_memory=True), [], kept=InMemoryLogStatus(2, 400, {InstanceName("s"): Token(3)})
    )
    assert describe_stream(status)["in_memory"] == {"facts": 2, "bytes": 400, "acknowledged": {"s": 3}}


def test_a_stream_without_writers_stands_at_nought() -> None:
    described = describe_stream(FakeServed().stream_statuses()[1])
    assert (described["row"], described["writers"], described["positions"]) == (None, [], {})
    assert (described["minimum"], described["maximum"], described["oldest_open"]) == (0, 0, None)


class StatusTests(ApiTestCase):
    def test_streams_lists_every_stream(self) -> None:
        streams = self.get("/v1/streams").json["streams"]
        self.assertEqual([each["name"] for each in streams], ["orders", "caches"])
        self.assertEqual(streams[0]["row"], ["order_id", "state"])
        self.assertEqual(streams[0]["positions"], {"master": 9, "worker2": 7})

    def test_a_stream_by_its_name_is_the_same_object(self) -> None:
        self.assertEqual(self.get("/v1/streams/orders").json, self.get("/v1/streams").json["streams"][0])

    def test_a_stream_by_its_name_is_read_without_the_others(self) -> None:
        read: list[str | None] = []
        statuses = self.served.stream_statuses

        def noted(only: str | None = None) -> list[StreamStatus]:
            read.append(only)
            return statuses(only)

        self.served.stream_statuses = noted  # type: ignore[method-assign]
        self.get("/v1/streams/orders")
        self.assertEqual({*read}, {"orders"})

    def test_a_stream_that_is_not_here_is_named(self) -> None:
        self.assert_refused(self.get("/v1/streams/odrers"), 404, "no stream 'odrers' here; did you mean orders?")
        self.assert_refused(self.get("/v1/streams/zz"), 404, "no stream 'zz' here; GET /v1/streams lists all")

    def test_unknown_parameters_are_refused(self) -> None:
        for path in ("streams", "streams/orders", "connections", "users", "users/@a:b"):
            self.assert_refused(self.get(f"/v1/{path}?stream=orders"), 400, "unknown parameter 'stream'")

    def test_a_stream_is_not_called_unknown_before_there_are_any(self) -> None:
        """HTTP is served while the database is still being opened."""
        streams, self.served.definitions = self.served.definitions, [StreamDefinition("none")]
        opened: Deferred[None] = Deferred()
        self.served.check = lambda: opened  # type: ignore[method-assign, assignment, return-value]
        self.client.send(b"GET /v1/streams/caches HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.assertEqual(self.client.transport.value(), b"")
        self.served.definitions = streams
        opened.callback(None)
        self.assertIn(b'"name":"caches"', self.client.transport.value())

    def test_a_stream_that_cannot_be_known_is_not_called_unknown_either(self) -> None:
        self.served.error = StoreError("the database is locked")
        self.assert_refused(self.get("/v1/streams/odrers"), 503, "the database is locked")
        self.assertEqual(self.get("/v1/streams/orders").code, 200)

    def test_connections_lists_every_peer(self) -> None:
        peer = {
            "name": "worker1",
            "address": "127.0.0.1:5",
            "since": 1_700_000_000.0,
            "lines_out": 12,
            "bytes_out": 345,
            "queued_bytes": 6,
            "last_command": "PING",
            "shares_name": False,
            "skipped": {},
            "unknown_commands": [],
            "not_followed": [],
        }
        self.assertEqual(self.get("/v1/connections").json, {"connections": [peer]})


class UserTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.served = FakeServed()
        _, site, _ = served_site(self.served)
        self.client = Client(site)

    def test_users_that_sync_with_their_instance_ids(self) -> None:
        self.assertEqual(
            self.client.ask("GET", "/v1/users").json,
            {
                "users": [
                    {"user_id": "@u:h", "syncing": {"abcde": 5, "fghij": 6}},
                    {"user_id": "@v:h", "syncing": {"abcde": 7}},
                ]
            },
        )

    def test_one_user_without_the_access_token(self) -> None:
        received = self.client.ask("GET", "/v1/users/@v:h")
        self.assertEqual(
            received.json,
            {
                "user_id": "@v:h",
                "syncing": {"abcde": 7},
                "seen": [{"ip": "1.2.3.4", "user_agent": "UA", "device_id": "DEV", "last_seen": 9}],
            },
        )
        self.assertEqual(self.client.ask("GET", "/v1/users/%40unknown:h").json["syncing"], {})

    def test_a_database_that_fails_is_a_503(self) -> None:
        self.served.error = StoreError("full")
        self.assertEqual(self.client.ask("GET", "/v1/users/@v:h").code, 503)
