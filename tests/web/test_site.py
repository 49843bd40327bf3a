"""The HTTP API as a whole: methods, access, errors, metrics."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import msgspec
import pytest
from twisted.internet.address import UNIXAddress
from twisted.internet.error import ConnectionLost
from twisted.internet.interfaces import IProtocolNegotiationFactory
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.server import version

from replication.errors import (
    CatchUpError,
    ConfigError,
    ReplicationError,
    RowRefusedError,
    SequenceRegressedError,
    StoppingError,
    StoreError,
    UnknownStreamError,
    ValueRefusedError,
)
from replication.follower.worker import Worker
from replication.net.access import Access, Grant, Rights
from replication.net.admission import Bounds
from replication.storage.contract import facts_gone
from replication.web.live.feed import INTERVAL
from replication.web.request import ApiRequest
from replication.web.routes import find_route
from replication.web.site import IServed, make_site
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.master import Master
from tests.web.served import (
    ELSEWHERE,
    FACTS,
    JSON,
    NDJSON,
    UPDATES,
    ApiTestCase,
    Client,
    FakeServed,
    Received,
    header,
    served_site,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


SYNAPSE = "/_synapse/replication/get_repl_stream_updates/orders/aBcDeFgHiJ"
CALLS = [
    ("GET", "/v1/streams"),
    ("GET", "/v1/streams/orders"),
    ("GET", f"{UPDATES}?instance=master&from=1&upto=9"),
    ("POST", FACTS),
    ("GET", "/v1/connections"),
    ("GET", "/v1/users"),
    ("GET", "/v1/users/@u:h"),
    ("GET", "/metrics"),
    ("GET", f"{SYNAPSE}?from_token=1&upto_token=9"),
    ("POST", "/_synapse/replication/presence_set_state/u"),
    ("GET", "/nothing"),
]


class MethodTests(ApiTestCase):
    def test_head_is_get_without_a_body(self) -> None:
        for method, path in CALLS:
            if method == "GET" and path != "/metrics":
                got, head = self.get(path), self.get(path, "HEAD")
                self.assertEqual(head.body, b"")
                self.assertEqual((head.code, head.headers["content-length"]), (got.code, str(len(got.body))), path)

    def test_a_wrong_method_is_a_405_that_names_the_right_one(self) -> None:
        for method, path, right in (
            ("POST", "/v1/streams", "GET"),
            ("DELETE", "/v1/streams/orders", "GET"),
            ("PUT", FACTS, "POST"),
            ("GET", FACTS, "POST"),
            ("HEAD", FACTS, "POST"),
            ("OPTIONS", FACTS, "POST"),
            ("FROB", "/health", "GET"),
        ):
            answer = self.get(path, method)
            self.assertEqual((answer.code, answer.headers["allow"]), (405, right))
            if method != "HEAD":
                self.assertIn(f"use {right}", answer.detail)

    def test_options_of_the_server_are_an_empty_answer(self) -> None:
        server = version.decode()
        for method, status, allow in (("OPTIONS", 200, None), ("GET", 405, "OPTIONS")):
            answer = self.get("*", method)
            self.assertEqual((answer.code, answer.body, answer.headers["server"]), (status, b"", server))
            self.assertEqual((answer.headers["content-length"], answer.headers.get("allow")), ("0", allow))

    def test_an_unknown_path_is_a_404(self) -> None:
        for path in (
            "/v1",
            "/v1/",
            "/v1/streams/",
            "/v1/streams/orders/",
            "/v2/streams",
            "//health",
            "/%ff",
            "/a%00b",
        ):
            self.assert_refused(self.get(path), 404)
        self.assert_refused(self.get("/v1/sterams"), 404, "'v1/sterams'", "try /v1/streams")

    def test_a_request_that_is_no_http_ends_its_connection_only(self) -> None:
        self.client.send(b"REPLICATE \n\r\n\r\n")
        self.assertTrue(self.client.transport.value().startswith(b"HTTP/1.1 400 "))
        self.assertTrue(self.client.transport.disconnecting)
        self.assertEqual(Client(self.site).ask("GET", "/health").code, 200)


class NoRoomsTests(ApiTestCase):
    def test_a_process_without_rooms_answers_how_to_keep_them(self) -> None:
        for method, path in (("GET", "/v1/rooms/!r:h"), ("POST", "/v1/rooms/!r:h/events"), ("GET", "/v1/rooms")):
            self.assert_refused(self.get(path, method), 404, "keeps no rooms: start a master with --rooms")


class SecretTests(SynchronousTestCase):
    def ask_all(self, client: Client, headers: Sequence[tuple[str, str]] = ()) -> dict[str, int]:
        return {
            path: client.ask(method, path, b"" if method == "POST" else None, headers).code for method, path in CALLS
        }

    def test_every_call_but_those_of_health_needs_the_secret(self) -> None:
        _, site, _ = served_site(secret="hidden")
        for headers in ([], [("Authorization", "Bearer wrong")], [("Authorization", "Basic hidden")]):
            for method, path in CALLS:
                received = Client(site).ask(method, path, b"" if method == "POST" else None, headers)
                self.assertEqual(received.code, 401)
                self.assertTrue(received.headers["www-authenticate"].startswith(("Bearer", "Basic ")))
            client = Client(site)
            self.assertEqual(client.ask("GET", "/health", headers=headers).code, 200)
            self.assertEqual(client.ask("GET", "/health/ready", headers=headers).code, 503)

    def test_with_the_secret_any_address_has_access(self) -> None:
        _, site, _ = served_site(secret="hidden")
        codes = self.ask_all(Client(site, ELSEWHERE), [("Authorization", "Bearer hidden")])
        self.assertEqual({code for code in codes.values() if code in {401, 403}}, set())
        self.assertEqual(codes["/v1/streams"], 200)

    def test_without_a_secret_other_hosts_have_no_access(self) -> None:
        _, site, _ = served_site()
        client = Client(site, ELSEWHERE)
        self.assertEqual(set(self.ask_all(client).values()), {403})
        self.assertIn("--secret-file", client.received().detail)
        self.assertEqual(client.ask("GET", "/health").code, 403)

    def test_a_page_of_another_site_has_no_access_without_a_secret(self) -> None:
        """Neither by a name that resolves to this machine (DNS rebinding) nor by its address; nothing is stored."""
        for headers in ([("Host", "evil.example:9093")], [("Origin", "http://evil.example")]):
            served, site, _ = served_site()
            client = Client(site)
            self.assertEqual(set(self.ask_all(client, headers).values()), {403})
            for kind in ("application/json", "text/plain"):
                answer = client.ask("POST", FACTS, b'{"rows":[1]}', [*headers, ("Content-Type", kind)])
                self.assertEqual((answer.code, served.appended), (403, []))
            self.assertEqual(client.ask("OPTIONS", FACTS, headers=headers).code, 403)
            self.assertNotIn("access-control-allow-origin", client.received().headers)

    def test_a_unix_socket_is_this_machine(self) -> None:
        _, site, _ = served_site()
        self.assertEqual(Client(site, UNIXAddress(None)).ask("GET", "/v1/streams").code, 200)

    def test_an_empty_secret_is_refused(self) -> None:
        self.assertRaises(ConfigError, make_site, FakeServed(), secret="", reactor=Clock())


class ErrorTests(ApiTestCase):
    def test_an_error_of_the_process_becomes_a_status(self) -> None:
        unknown = self.get("/v1/streams/odrers/updates?instance=master&from=0&upto=9")
        self.assert_refused(unknown, 404, "'odrers'", "known streams: orders, caches")
        self.assert_refused(self.get(f"{UPDATES}?instance=w9&from=0&upto=9"), 400, "w9 writes nothing to orders")
        for error, code in (
            (StoreError("disk I/O error"), 503),
            (SequenceRegressedError("ID 5 was used before"), 503),
            (StoppingError("'master' is stopping"), 503),
            (ValueRefusedError("""fact 3 is [7], but table 'events' has ["7"] for it"""), 400),
            (RowRefusedError("UNIQUE constraint failed"), 409),
            (CatchUpError("no source"), 503),
            (ReplicationError("something"), 500),
        ):
            self.served.error = error
            self.assert_refused(self.get(f"{UPDATES}?instance=master&from=0&upto=9"), code, str(error))

    def test_a_stream_that_the_process_will_not_have_is_a_lasting_404(self) -> None:
        self.served.error = UnknownStreamError("no stream 'stock' here", stream="stock", lasting=True)
        received = self.get(f"{UPDATES}?instance=master&from=0&upto=9")
        self.assertEqual((received.code, received.json["lasting"]), (404, True))

    def test_facts_that_are_gone_are_a_410_with_where_to_begin(self) -> None:
        for query, since in (("instance=master&from=0&upto=9", None), ("since=0", "m0~1.7")):
            self.served.error = error = facts_gone(StreamName("orders"), InstanceName("master"), Token(7))
            error.since = since
            received = self.get(f"{UPDATES}?{query}")
            self.assertEqual((received.json["instance"], received.json.get("since")), ("master", since))
            self.assertEqual((received.code, received.json["error"], received.json["gone_upto"]), (410, "Gone", 7))
            self.assertEqual(received.json["detail"], str(error))

    def test_a_bug_is_logged_and_answered_and_the_next_request_is_fine(self) -> None:
        self.served.error = RuntimeError("hidden from clients")
        self.assert_refused(self.get(f"{UPDATES}?instance=master&from=0&upto=9"), 500, "the log has the traceback")
        self.assertNotIn(b"hidden", self.client.transport.value())
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.served.error = None
        self.assertEqual(self.get(f"{UPDATES}?instance=master&from=0&upto=9").code, 200)

    def test_a_request_that_a_bug_leaves_without_an_answer_is_cut_off(self) -> None:
        """Before, the client waited for ever."""
        with patch.object(self.site.resource, "_find_route", side_effect=ZeroDivisionError):
            self.client.send(header("GET", "/v1/streams"))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertTrue(self.client.transport.disconnected)


class MetricsTests(ApiTestCase):
    def test_metrics_are_text_with_our_own_counts(self) -> None:
        self.get("/nothing")
        self.get("/nothing/else")
        self.post(b"{")
        answer = self.get("/metrics")
        self.assertEqual((answer.code, answer.headers["content-type"][:10]), (200, "text/plain"))
        text = answer.body.decode()
        self.assertIn('replication_position{stream="orders",writer="worker2"} 7.0', text)
        self.assertIn('replication_http_answers_total{call="none",status="404"} 2.0', text)
        self.assertIn('replication_http_answers_total{call="facts",status="400"} 1.0', text)

    def test_metrics_without_prometheus_client_name_the_extra(self) -> None:
        with patch.dict("sys.modules", {"prometheus_client": None}):
            self.assert_refused(self.get("/metrics"), 501, "pip install 'twisted-replication[metrics]'")


class SiteTests(SynchronousTestCase):
    def test_tls_offers_the_protocol_that_is_served(self) -> None:
        """Not HTTP 2, which Twisted's Site offers too if h2 is installed."""
        site = make_site(FakeServed(), secret=None, reactor=Clock())
        self.assertTrue(IProtocolNegotiationFactory.providedBy(site))
        self.assertEqual(site.acceptableProtocols(), [b"http/1.1"])

    def test_serving_leaves_no_timer_behind(self) -> None:
        """A quiet daemon is quiet: Twisted's own access log would wake it every second."""
        _, site, clock = served_site()
        site.doStart()
        client = Client(site)
        self.assertEqual(client.ask("GET", "/health").code, 200)
        client.protocol.connectionLost(Failure(ConnectionLost()))
        self.assertEqual(clock.getDelayedCalls(), [])
        site.doStop()

    def test_every_answer_is_ascii_json(self) -> None:
        """Even one that quotes a name with half a character in it."""
        served, site, _ = served_site()
        served.error = StoreError("no table \ud800 \u00e9")
        answer = Client(site).ask("GET", "/health")
        self.assertTrue(answer.body.isascii())
        decoded: Any = json.loads(answer.body)
        self.assertEqual(decoded["detail"], "no table \ud800 \u00e9")


MEMBERS = [each for each in {*vars(IServed), *IServed.__annotations__} if not each.startswith("_")]


@pytest.mark.parametrize("member", sorted(MEMBERS))
def test_a_master_a_worker_and_the_stand_in_have_every_member(member: str) -> None:
    reactor = MemoryReactorClock()
    master = Master(database="sqlite://", reactor=reactor)
    worker = Worker(connect=["tcp:127.0.0.1:1"], database="sqlite://", reactor=reactor)
    served: list[IServed] = [master.served, worker.served, FakeServed()]
    assert all(hasattr(each, member) for each in served)


GRANTS = [
    Grant(Rights(("reader",), {"orders"}), secret="r"),
    Grant(Rights(("writer",), (), {"orders"}), secret="w"),
    Grant(Rights(("sender",), commands=True), secret="c"),
    Grant(Rights(("boss",), admin=True), secret="a"),
    Grant(Rights(("monitor",)), secret="m"),
    Grant(Rights(("all",), {"*"}, {"*"}), secret="*"),
]
PAGE = f"{UPDATES}?instance=master&from=1&upto=9"
OTHERS = PAGE.replace("orders", "caches")
ROOM_EVENTS = "/v1/rooms/!r:h/events"
LINE = b'15\r\n{"rows":[["a","b"]]}\n\r\n'
# By call: the secrets with which it is not refused; s is the secret with every right.
MATRIX: dict[tuple[str, str], str] = {
    ("GET", "/v1/streams"): "srwcam*",
    ("GET", "/v1/streams/orders"): "srwa*",
    ("GET", "/v1/streams/caches"): "sa*",
    ("GET", PAGE): "sr*",
    ("GET", OTHERS): "s*",
    ("GET", f"{UPDATES}?since=s9"): "sr*",
    ("GET", "/v1/streams/orders/history?instance=master"): "sr*",
    ("POST", FACTS): "sw*",
    ("POST", FACTS.replace("orders", "caches")): "s*",
    ("POST", FACTS.replace("facts", "append")): "sw*",
    ("POST", FACTS.replace("orders/facts", "caches/append")): "s*",
    ("POST", "/v1/streams/orders/skip"): "sa",
    ("POST", "/v1/streams/orders/retry"): "sa",
    ("GET", "/v1/skipped"): "sa",
    ("GET", "/v1/followers"): "sa",
    ("PUT", "/v1/followers/worker1"): "sr*",
    ("DELETE", "/v1/followers/worker1"): "sa",
    ("GET", "/v1/connections"): "srwcam*",
    ("GET", "/v1/users"): "sa",
    ("GET", "/v1/users/@u:h"): "sa",
    ("GET", "/metrics"): "srwcam*",
    ("GET", "/health"): "srwcam*",
    ("GET", f"{SYNAPSE}?from_token=1&upto_token=9"): "sr*",
    ("GET", f"{SYNAPSE.replace('orders', 'caches')}?from_token=1&upto_token=9"): "s*",
    ("POST", "/_synapse/replication/presence_set_state/u"): "sc",
    ("GET", "/v1/rooms/!r:h"): "s*",
    ("POST", ROOM_EVENTS): "s*",
    ("GET", ROOM_EVENTS): "s*",
    ("GET", f"{ROOM_EVENTS}/$e"): "s*",
    ("GET", "/v1/rooms/!r:h/state_groups/1"): "s*",
    ("GET", "/"): "srwcam*",
    ("HEAD", "/live/events"): "srwcam*",
    ("GET", "/live/live.css"): "srwcam*",
    ("GET", "/nothing"): "srwcam*",
    ("DELETE", "/v1/streams/orders"): "srwcam*",
}


def test_metrics_have_the_date_of_each_certificate() -> None:
    expires = {"/etc/server.pem": datetime(2030, 1, 2, tzinfo=UTC)}
    site = make_site(FakeServed(), secret=None, reactor=Clock(), expires=lambda: expires)
    metrics = Client(site).ask("GET", "/metrics").body.decode()
    assert 'replication_certificate_expires_seconds{file="/etc/server.pem"} 1.8935424e+09' in metrics


class WrongSecretTests(ApiTestCase):
    def test_an_address_can_try_a_limited_number_of_secrets(self) -> None:
        bounds = Bounds(max_faults_per_minute=2)
        site = make_site(self.served, secret="s", reactor=self.clock, bounds=bounds)
        wrong = [("Authorization", "Bearer x")]
        for _ in range(2):
            client = Client(site, ELSEWHERE)
            self.assertEqual(client.ask("GET", "/v1/streams", None, wrong).code, 401)
            self.assertTrue(client.transport.disconnecting)
        self.assertIsNone(site.buildProtocol(ELSEWHERE))
        self.clock.advance(60)
        self.assertIsNotNone(site.buildProtocol(ELSEWHERE))

    def test_a_request_without_a_secret_is_no_guess(self) -> None:
        site = make_site(self.served, secret="s", reactor=self.clock, bounds=Bounds(max_faults_per_minute=1))
        client = Client(site, ELSEWHERE)
        for _ in range(3):
            self.assertEqual(client.ask("GET", "/v1/streams").code, 401)
        self.assertIsNotNone(site.buildProtocol(ELSEWHERE))


class RightsTests(ApiTestCase):
    """Each call of the API with each right."""

    def setUp(self) -> None:
        super().setUp()
        rooms = cast("Any", SimpleNamespace(streams=("events", "backfill")))
        self.access = Access(GRANTS)
        self.site = make_site(self.served, secret="s", access=self.access, reactor=self.clock, rooms=rooms)
        self.client = Client(self.site)

    def ask(self, method: str, path: str, secret: str) -> Received:
        headers = [("Authorization", f"Bearer {secret}"), JSON]
        client = Client(self.site)  # a refusal before the body's end closes the connection
        return client.ask(method, path, b'{"rows": [["a", "new"]]}' if method == "POST" else None, headers)

    def test_every_call_needs_its_right_and_no_other(self) -> None:
        self.flushLoggedErrors()
        for (method, path), allowed in MATRIX.items():
            for secret in "srwcam*":
                answer = self.ask(method, path, secret)
                refused = answer.code == 403 and "is missing: " in answer.detail
                self.assertEqual(refused, secret not in allowed, (method, path, secret, answer.body))
        self.flushLoggedErrors()

    def test_every_call_is_in_the_matrix(self) -> None:
        api = cast("Any", self.site).resource
        seen = {
            find_route(api.routes, method, path.partition("?")[0].strip("/").split("/"))[0].label
            for method, path in MATRIX
        }
        self.assertEqual({each.label for each in api.routes} - seen, {"live", "ready"})

    def test_a_refusal_names_the_right_and_the_table(self) -> None:
        for method, path, secret, detail in (
            ("POST", FACTS, "r", "the right to append 'orders' is missing: add it to append in [access.reader]"),
            ("GET", OTHERS, "r", "the right to read 'caches' is missing: add it to read in [access.reader]"),
            ("GET", "/v1/users", "m", "the right 'admin' is missing: set admin = true in [access.monitor]"),
            ("POST", ROOM_EVENTS, "w", "the right to append 'events' is missing: add it to append in [access.writer]"),
        ):
            self.assertEqual(self.ask(method, path, secret).detail, detail)
        self.assertEqual(self.served.appended, [])

    def test_only_streams_that_may_be_seen_are_listed(self) -> None:
        for secret, names in (("r", ["orders"]), ("w", ["orders"]), ("a", ["orders", "caches"]), ("m", [])):
            listed = self.ask("GET", "/v1/streams", secret).json
            self.assertEqual([each["name"] for each in listed["streams"]], names)
            self.assertEqual(listed["hidden"], 2 - len(names))

    def test_a_wrong_secret_and_none_are_refused_as_before(self) -> None:
        self.assertEqual(self.get("/v1/streams").code, 401)
        self.assertEqual(self.ask("GET", "/v1/streams", "x").code, 401)

    def open_lines(self) -> Client:
        client = Client(self.site)
        headers = [("Authorization", "Bearer w"), NDJSON, ("Transfer-Encoding", "chunked")]
        client.send(header("POST", "/v1/streams/orders/append", headers) + LINE)
        return client

    def test_lines_are_taken_on_while_their_sender_keeps_the_right(self) -> None:
        client = self.open_lines()
        self.access.replace([Grant(Rights(("writer", "more"), {"caches"}, {"orders"}), secret="w")], "s")
        client.send(LINE)
        self.assertEqual(len(self.served.appended), 2)
        self.assertFalse(client.transport.disconnecting)

    def test_lines_are_refused_once_their_sender_has_lost_the_right(self) -> None:
        for grants, status in (
            ([Grant(Rights(("writer",), {"orders"}), secret="w")], b'"status":403'),
            ([], b'"status":401'),
        ):
            self.access.replace(GRANTS, "s")
            client = self.open_lines()
            self.served.appended.clear()
            self.access.replace(grants, "s")
            client.send(LINE)
            client.send(LINE)
            self.assertEqual(self.served.appended, [])
            self.assertEqual(client.transport.value().count(status), 1, client.transport.value())

    def test_a_viewer_is_closed_and_sent_nothing_once_its_rights_have_changed(self) -> None:
        client = Client(self.site)
        client.send(header("GET", "/live/events?stream=orders", [("Authorization", "Bearer r")]))
        self.clock.advance(INTERVAL)
        self.assertIn(b"event: facts", client.transport.value())
        client.transport.clear()
        self.access.replace([], "s")
        status = msgspec.structs.replace(self.served.stream_statuses("orders")[0], open_count=77)
        self.served.stream_statuses = lambda only=None: [status]  # type: ignore[method-assign]
        self.clock.advance(INTERVAL)
        self.clock.advance(INTERVAL)
        self.assertEqual(client.transport.value(), b"")
        self.assertTrue(client.transport.disconnecting)
        self.site.stopFactory()

    def test_of_a_reader_only_the_body_of_a_report_is_stored_and_without_a_right_none(self) -> None:
        stored: list[bool] = []
        with patch.object(ApiRequest, "send", lambda request, _: stored.append(request._stores_body)):
            for secret in "mrw":
                client = Client(self.site)
                client.send(header("POST", FACTS, [("Authorization", f"Bearer {secret}"), JSON], 2) + b"{}")
        self.assertEqual(stored, [False, True, True])
        client = Client(self.site)
        client.send(header("PUT", "/v1/followers/w", [("Authorization", "Bearer r"), JSON], 2**20 + 1))
        self.assertEqual(client.received().code, 413)
