"""The HTTP API, call by call, through Twisted's own HTTP and a transport in memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from twisted.internet.address import UNIXAddress
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import (
    CatchUpError,
    ConfigError,
    ReplicationError,
    SequenceRegressedError,
    StoppingError,
    StoreError,
    StreamError,
    ValueRefusedError,
)
from replication.streams.registry import StreamDefinition
from replication.web.site import SLICE, make_site
from tests.web.served import ELSEWHERE, Client, FakeServed, Heard, fact, header, served_site

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.wire.grammar import Token

FACTS = "/v1/streams/orders/facts"
UPDATES = "/v1/streams/orders/updates"
SYNAPSE = "/_synapse/replication/get_repl_stream_updates/orders/aBcDeFgHiJ"
JSON = ("Content-Type", "application/json")
NDJSON = ("Content-Type", "application/x-ndjson")
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


class ApiTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.served = FakeServed()
        self.served.keep("orders", "master", [fact(3, ["a", "new"], ["b", "new"]), fact(5, ["a", "paid"])], settled=9)
        _, self.site, self.clock = served_site(self.served)
        self.client = Client(self.site)

    def get(self, path: str, method: str = "GET") -> Heard:
        return self.client.ask(method, path)

    def post(self, body: bytes, kind: tuple[str, str] = NDJSON, key: str | None = None, path: str = FACTS) -> Heard:
        return self.client.ask("POST", path, body, [kind, *([("Idempotency-Key", key)] if key else [])])

    def assert_refused(self, heard: Heard, code: int, *words: str) -> None:
        self.assertEqual(heard.code, code, heard.body)
        for word in words:
            self.assertIn(word, heard.detail)


class SinceTests(ApiTestCase):
    """What several writers have written since a token (protocol F6)."""

    def setUp(self) -> None:
        super().setUp()
        self.served.keep("orders", "worker2", [fact(4, ["c", "new"]), fact(8, ["d", "new"])])

    def test_facts_of_all_writers_come_in_one_order_with_their_writers(self) -> None:
        answer = self.get(f"{UPDATES}?since=3").json
        self.assertEqual(
            answer["updates"],
            [[4, "worker2", ["c", "new"]], [5, "master", ["a", "paid"]], [8, "worker2", ["d", "new"]]],
        )
        self.assertEqual((answer["upto_token"], answer["limited"]), ("9", False))

    def test_a_page_goes_on_where_the_last_one_ended(self) -> None:
        seen, token, limited = [], "m1~2.5", True
        while limited:
            answer = self.get(f"{UPDATES}?since={token}&limit=1").json
            seen += [token for token, *_ in answer["updates"]]
            token, limited = answer["upto_token"], answer["limited"]
        self.assertEqual((seen, token), ([3, 3, 5, 8], "9"))

    def test_trap_42_what_is_no_token_is_refused(self) -> None:
        for token in ("m5~", "x", "m5~9.7", "-1"):
            code = 200 if token == "m5~" else 400
            self.assertEqual(self.get(f"{UPDATES}?since={token}").code, code, token)
        self.assert_refused(self.get(f"{UPDATES}?since=1&from=2"), 400, "'from'")
        self.assert_refused(self.get(f"{UPDATES}?since=1&limit=0"), 400, "limit")


class StatusTests(ApiTestCase):
    def test_streams_lists_every_stream(self) -> None:
        streams = self.get("/v1/streams").json["streams"]
        self.assertEqual([each["name"] for each in streams], ["orders", "caches"])
        self.assertEqual(streams[0]["row"], ["order_id", "state"])
        self.assertEqual(streams[0]["positions"], {"master": 9, "worker2": 7})

    def test_a_stream_by_its_name_is_the_same_object(self) -> None:
        self.assertEqual(self.get("/v1/streams/orders").json, self.get("/v1/streams").json["streams"][0])

    def test_a_stream_that_is_not_here_is_named(self) -> None:
        self.assert_refused(self.get("/v1/streams/odrers"), 404, "'odrers'", "GET /v1/streams")

    def test_a_stream_is_not_called_unknown_before_there_are_any(self) -> None:
        """HTTP is served while the database is still being opened."""
        streams, self.served.definitions = self.served.definitions, [StreamDefinition("none")]
        opened: Deferred[None] = Deferred()
        self.served.check = lambda: opened  # type: ignore[method-assign, assignment, return-value]
        self.client.say(b"GET /v1/streams/caches HTTP/1.1\r\nHost: h\r\n\r\n")
        self.assertEqual(self.client.transport.value(), b"")
        self.served.definitions = streams
        opened.callback(None)
        self.assertIn(b'"name":"caches"', self.client.transport.value())

    def test_a_stream_that_cannot_be_known_is_not_called_unknown_either(self) -> None:
        self.served.error = StoreError("the database is locked")
        self.assert_refused(self.get("/v1/streams/odrers"), 503, "the database is locked")
        self.assertEqual(self.get("/v1/streams/orders").code, 200)

    def test_connections_lists_every_peer(self) -> None:
        [peer] = self.get("/v1/connections").json["connections"]
        self.assertEqual((peer["name"], peer["queued_bytes"], peer["last_command"]), ("worker1", 6, "PING"))

    def test_health_says_who_answers(self) -> None:
        answer = self.get("/health")
        self.assertEqual(answer.code, 200)
        identity = {"role": "master", "server_name": "example.com", "instance_name": "master"}
        self.assertEqual(answer.json, {"status": "ok", **identity})

    def test_health_says_why_not(self) -> None:
        for error in (StoreError("database is locked: app.db"), StreamError("orders: the function raised")):
            self.served.error = error
            self.assert_refused(self.get("/health"), 503, str(error))

    def test_health_does_not_wait_for_a_store_that_says_nothing(self) -> None:
        self.served.checking = Deferred()
        self.client.say(header("GET", "/health"))
        self.clock.advance(4.9)
        self.assertEqual(self.client.transport.value(), b"")
        self.clock.advance(0.2)
        self.assert_refused(self.client.heard(), 503, "has not answered for 5 s")

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

    def test_metrics_without_prometheus_client_say_how_to_get_it(self) -> None:
        with patch.dict("sys.modules", {"prometheus_client": None}):
            self.assert_refused(self.get("/metrics"), 501, "pip install prometheus-client")


class UpdatesTests(ApiTestCase):
    def test_updates_are_rows_with_their_tokens(self) -> None:
        """after excludes, upto includes, and the page reaches as far as was asked."""
        answer = self.get(f"{UPDATES}?instance=master&from=3&upto=7")
        self.assertEqual(answer.json, {"updates": [[5, ["a", "paid"]]], "upto_token": 7, "limited": False})
        self.assertEqual(answer.headers["content-length"], str(len(answer.body)))

    def test_updates_never_split_one_tokens_rows(self) -> None:
        answer = self.get(f"{UPDATES}?instance=master&from=0&upto=9&limit=1")
        rows = [[3, ["a", "new"]], [3, ["b", "new"]]]
        self.assertEqual(answer.json, {"updates": rows, "upto_token": 3, "limited": True})

    def test_updates_never_reach_beyond_what_is_settled(self) -> None:
        self.assertEqual(self.get(f"{UPDATES}?instance=master&from=5&upto=99").json["upto_token"], 9)

    def test_what_served_says_becomes_a_status(self) -> None:
        unknown = self.get("/v1/streams/odrers/updates?instance=master&from=0&upto=9")
        self.assert_refused(unknown, 404, "'odrers'", "known streams: orders, caches")
        self.assert_refused(self.get(f"{UPDATES}?instance=w9&from=0&upto=9"), 400, "w9 writes nothing to orders")
        for error, code in (
            (StoreError("disk I/O error"), 503),
            (SequenceRegressedError("ID 5 was used before"), 503),
            (StoppingError("'master' is stopping"), 503),
            (ValueRefusedError("""fact 3 is [7], but table 'events' has ["7"] for it"""), 400),
            (CatchUpError("no source"), 500),
            (ReplicationError("something"), 500),
        ):
            self.served.error = error
            self.assert_refused(self.get(f"{UPDATES}?instance=master&from=0&upto=9"), code, str(error))

    def test_a_bug_is_logged_and_answered_and_the_next_request_is_fine(self) -> None:
        self.served.error = RuntimeError("hidden from clients")
        self.assert_refused(self.get(f"{UPDATES}?instance=master&from=0&upto=9"), 500, "the log says more")
        self.assertNotIn(b"hidden", self.client.transport.value())
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.served.error = None
        self.assertEqual(self.get(f"{UPDATES}?instance=master&from=0&upto=9").code, 200)


class SynapseFormTests(ApiTestCase):
    def ask(self, query: str, path: str = SYNAPSE) -> Heard:
        return self.get(f"{path}?{query}")

    def test_a_synapse_worker_gets_this_instances_rows(self) -> None:
        answer = self.ask("from_token=3&upto_token=7")
        self.assertEqual((answer.code, answer.headers["content-type"]), (200, "application/json"))
        self.assertEqual(answer.json, {"updates": [[5, ["a", "paid"]]], "upto_token": 7, "limited": False})
        self.assertEqual(self.served.asked, [("orders", "master", 3, 7, 1_000)])

    def test_the_same_transaction_id_gets_a_fresh_answer(self) -> None:
        """Synapse remembers answers by it for half an hour; we have no need."""
        self.ask("from_token=3&upto_token=7")
        self.served.keep("orders", "master", [])
        self.assertEqual(self.ask("from_token=3&upto_token=7").json["updates"], [])

    def test_a_range_that_ends_before_it_begins_is_empty(self) -> None:
        """So it is after a reset of the writer."""
        answer = self.ask("from_token=7&upto_token=4")
        self.assertEqual(answer.json, {"updates": [], "upto_token": 4, "limited": False})

    def test_trap_47_nothing_but_the_page_is_in_an_answer(self) -> None:
        """No positions of ours among it, which a client could see, or a cache could keep."""
        heard = self.ask("from_token=1&upto_token=9")
        self.assertEqual(set(heard.json), {"updates", "upto_token", "limited"})

    def test_errors_are_what_synapse_says(self) -> None:
        unknown = SYNAPSE.replace("orders", "odrers")
        for path, query, code, text in (
            (unknown, "from_token=1&upto_token=2", "M_UNKNOWN", "Unknown stream"),
            (SYNAPSE, "from_token=1", "M_MISSING_PARAM", "'upto_token'"),
            (SYNAPSE, "upto_token=1", "M_MISSING_PARAM", "'from_token'"),
            (SYNAPSE, "from_token=1&to_token=2", "M_MISSING_PARAM", "'upto_token'"),
            (SYNAPSE, "from_token=one&upto_token=2", "M_INVALID_PARAM", "'from_token'"),
            (SYNAPSE, "from_token=1&upto_token=%ff", "M_INVALID_PARAM", "'upto_token'"),
            (SYNAPSE, "from_token=-1&upto_token=2", "M_INVALID_PARAM", "'from_token'"),
        ):
            answer = self.ask(query, path)
            self.assertEqual((answer.code, set(answer.json)), (400, {"errcode", "error"}))
            self.assertEqual(answer.json["errcode"], code)
            self.assertIn(text, answer.json["error"])


class AppendTests(ApiTestCase):
    def test_a_json_body_is_one_fact(self) -> None:
        self.assertEqual(self.post(b'{"rows": [["a", "new"], ["b", "new"]]}', JSON).json, {"ids": [2]})
        self.assertEqual(self.served.appended, [("orders", [[["a", "new"], ["b", "new"]]], None)])

    def test_a_fact_may_have_no_rows(self) -> None:
        self.assertEqual(self.post(b'{"rows": []}', JSON).json, {"ids": [2]})
        self.assertEqual(self.served.appended, [("orders", [[]], None)])

    def test_each_line_is_a_fact(self) -> None:
        self.assertEqual(self.post(b'{"rows":[1]}\n\n{"rows":[]}\r\n{"rows":[2,3]}').json, {"ids": [2, 3, 4]})
        self.assertEqual(self.served.appended, [("orders", [[1], [], [2, 3]], None)])

    def test_no_lines_are_no_facts(self) -> None:
        self.assertEqual(self.post(b"\n").json, {"ids": []})

    def test_a_key_is_handed_on(self) -> None:
        self.post(b'{"rows":[1]}', key="order 7")
        self.assertEqual(self.served.appended, [("orders", [[1]], "order 7")])

    def test_a_bad_line_refuses_the_whole_call_and_is_named(self) -> None:
        for line, complaint in (
            (b'{"rows":[1],"id":3}', "line 4: unknown key 'id'"),
            (b'{"rows":1}', 'line 4: "rows" must be a list'),
            (b'{"row":[1]}', 'line 4: the list "rows" is missing'),
            (b"[1]", "line 4: not an object"),
            (b'{"rows":[NaN]}', "line 4: not JSON"),
            (b'{"rows":["\xff"]}', "line 4: not UTF-8"),
            (b'{"rows":[1]}{"rows":[2]}', "line 4: not JSON"),
            (b'{"rows":', "line 4: not JSON"),
        ):
            answer = self.post(b'{"rows":[1]}\n\n{"rows":[2]}\n' + line + b'\n{"rows":[3]}\n')
            self.assert_refused(answer, 400, complaint)
        self.assertEqual(self.served.appended, [])

    def test_a_row_that_the_stream_refuses_is_named_by_its_line(self) -> None:
        answer = self.post(b'{"rows":[1]}\n\n{"rows":[["bad"]]}\n')
        self.assert_refused(answer, 400, "line 3: a row has the wrong fields")
        self.assert_refused(self.post(b'{"rows":[["bad"]]}', JSON), 400, "a row has the wrong fields")

    def test_a_bad_body_is_refused(self) -> None:
        for body, complaint in (
            (b"", "not JSON"),
            (b'{"rows":[1]}\n{"rows":[2]}', "not JSON"),
            (b'{"rows":[1],"key":"x"}', "unknown key 'key'"),
            (b"[]", "not an object"),
        ):
            self.assert_refused(self.post(body, JSON), 400, complaint)

    def test_a_stream_that_is_unknown_or_not_ours_to_write(self) -> None:
        self.assert_refused(self.post(b'{"rows":[]}', path="/v1/streams/odrers/facts"), 404, "'odrers'")
        self.served.unwritable = "orders"
        self.assert_refused(self.post(b'{"rows":[]}'), 403, "written by worker2")

    def test_a_store_that_fails_is_a_503(self) -> None:
        self.served.error = StoreError("disk full")
        self.assert_refused(self.post(b'{"rows":[]}'), 503, "disk full")

    def test_parameters_are_not_for_here(self) -> None:
        self.assert_refused(self.post(b'{"rows":[]}', path=FACTS + "?key=1"), 400, "unknown parameter 'key'")

    def send(self, body: bytes) -> None:
        self.client.transport.clear()
        self.client.say(header("POST", FACTS, [NDJSON], len(body)) + body)

    def test_a_large_body_leaves_turns_to_others(self) -> None:
        """Lines are numbered across its slices, and nothing is appended before all are read."""
        line = b'{"rows":[["a","new"]]}\n'
        count = 3 * SLICE // len(line)
        self.send(line * count + b"{}\n")
        self.assertEqual((self.served.appended, self.client.transport.value()), ([], b""))
        other = Client(self.site)
        self.assertEqual(other.ask("GET", "/health").code, 200)
        self.clock.pump([0] * 3)
        self.assert_refused(self.client.heard(), 400, f"line {count + 1}: ")
        self.send(line * count)
        self.clock.pump([0] * 3)
        self.assertEqual(len(self.client.heard().json["ids"]), count)
        self.assertEqual([len(facts) for _, facts, _ in self.served.appended], [count])


class SlowServed(FakeServed):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate: Deferred[None] = Deferred()

    async def append_texts(self, stream: str, facts: Sequence[Sequence[object]], key: str | None) -> Sequence[Token]:
        await self.gate
        return await super().append_texts(stream, facts, key)


class DisconnectionTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.served = SlowServed()
        _, site, _ = served_site(self.served)
        self.client = Client(site)
        self.client.say(header("POST", FACTS, [JSON], 11) + b'{"rows":[]}')

    def test_an_answer_waits_for_the_facts_to_be_durable(self) -> None:
        self.assertEqual(self.client.transport.value(), b"")
        self.served.gate.callback(None)
        self.assertEqual(self.client.heard().json, {"ids": [2]})

    def test_a_client_that_leaves_before_its_answer_harms_nobody(self) -> None:
        """Its facts are appended all the same: it has said all that it had to say."""
        self.client.protocol.connectionLost(Failure(ConnectionLost()))
        self.served.gate.callback(None)
        self.assertEqual(len(self.served.appended), 1)
        self.assertEqual(self.client.transport.value(), b"")
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_a_client_that_leaves_before_a_bug_shows_harms_nobody(self) -> None:
        self.client.protocol.connectionLost(Failure(ConnectionLost()))
        self.served.gate.errback(RuntimeError())
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)


class CallTests(ApiTestCase):
    """What the worker of a Synapse has its main process do."""

    SYNC = "/_synapse/replication/presence_set_state/%40u%3Aexample.com"

    def call(self, path: str, body: bytes = b"{}") -> Heard:
        return self.client.ask("POST", path, body, [JSON])

    def test_a_user_that_syncs_is_taken_as_read(self) -> None:
        """Else nobody gets an answer to ``/sync`` at that worker."""
        for path in (self.SYNC, "/_synapse/replication/bump_presence_active_time/%40u%3Aexample.com"):
            self.assertEqual(self.call(path, b'{"state":{"presence":"online"}}').json, {})

    def test_an_application_answers_others(self) -> None:
        @self.served.calls.answer("send_event")
        async def send(words: Sequence[str], body: dict[str, Any]) -> dict[str, Any]:
            return {"words": words, "stream_id": body["n"] + 1}

        answer = self.call("/_synapse/replication/send_event/%24e/aBcDeFgHiJ", b'{"n":1}')
        self.assertEqual(answer.json, {"words": ["$e", "aBcDeFgHiJ"], "stream_id": 2})

    def test_what_it_refuses_is_said(self) -> None:
        @self.served.calls.answer("send_event")
        def send(*_: object) -> None:
            raise StreamError("not today")

        self.assert_refused(self.call("/_synapse/replication/send_event/x"), 400, "not today")

    def test_a_call_that_nobody_answers_is_named_as_synapse_would(self) -> None:
        answer = self.call("/_synapse/replication/send_event/x")
        self.assertEqual((answer.code, answer.json["errcode"]), (404, "M_UNRECOGNIZED"))
        self.assertIn("'send_event'", answer.json["error"])

    def test_a_body_that_is_no_object_is_refused(self) -> None:
        self.assertEqual(self.call(self.SYNC, b"[]").json["errcode"], "M_NOT_JSON")
        self.assertEqual(self.call(self.SYNC, b'"\xff').code, 400)


class MethodTests(ApiTestCase):
    def test_head_is_get_without_a_body(self) -> None:
        for method, path in CALLS:
            if method == "GET" and path != "/metrics":
                got, head = self.get(path), self.get(path, "HEAD")
                self.assertEqual(head.body, b"")
                self.assertEqual((head.code, head.headers["content-length"]), (got.code, str(len(got.body))), path)

    def test_another_method_is_a_405_that_names_the_right_one(self) -> None:
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

    def test_what_is_not_there_is_a_404(self) -> None:
        for path in (
            "/",
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
        self.client.say(b"REPLICATE \n\r\n\r\n")
        self.assertTrue(self.client.transport.value().startswith(b"HTTP/1.1 400 "))
        self.assertTrue(self.client.transport.disconnecting)
        self.assertEqual(Client(self.site).ask("GET", "/health").code, 200)


class SecretTests(SynchronousTestCase):
    def ask_all(self, client: Client, headers: Sequence[tuple[str, str]] = ()) -> dict[str, int]:
        return {
            path: client.ask(method, path, b"" if method == "POST" else None, headers).code for method, path in CALLS
        }

    def test_every_call_but_health_needs_the_secret(self) -> None:
        _, site, _ = served_site(secret="hidden")
        for headers in ([], [("Authorization", "Bearer wrong")], [("Authorization", "Basic hidden")]):
            client = Client(site)
            self.assertEqual(set(self.ask_all(client, headers).values()), {401})
            self.assertEqual(client.heard().headers["www-authenticate"], "Bearer")
            self.assertEqual(client.ask("GET", "/health", headers=headers).code, 200)

    def test_with_the_secret_anybody_is_served(self) -> None:
        _, site, _ = served_site(secret="hidden")
        codes = self.ask_all(Client(site, ELSEWHERE), [("Authorization", "Bearer hidden")])
        self.assertEqual({code for code in codes.values() if code in {401, 403}}, set())
        self.assertEqual(codes["/v1/streams"], 200)

    def test_without_a_secret_nobody_from_elsewhere_is_served(self) -> None:
        _, site, _ = served_site()
        client = Client(site, ELSEWHERE)
        self.assertEqual(set(self.ask_all(client).values()), {403})
        self.assertIn("--secret-file", client.heard().detail)
        self.assertEqual(client.ask("GET", "/health").code, 403)

    def test_a_unix_socket_is_this_machine(self) -> None:
        _, site, _ = served_site()
        self.assertEqual(Client(site, UNIXAddress(None)).ask("GET", "/v1/streams").code, 200)

    def test_a_secret_that_is_none_is_refused_at_once(self) -> None:
        self.assertRaises(ConfigError, make_site, FakeServed(), secret="", reactor=Clock())


class SiteTests(SynchronousTestCase):
    def test_serving_leaves_no_timer_behind(self) -> None:
        """A quiet daemon is quiet: Twisted's own access log would wake it every second."""
        _, site, clock = served_site()
        site.doStart()
        client = Client(site)
        self.assertEqual(client.ask("GET", "/health").code, 200)
        client.protocol.connectionLost(Failure(ConnectionLost()))
        self.assertEqual(clock.getDelayedCalls(), [])
        site.doStop()

    def test_every_answer_is_json_that_anybody_can_read(self) -> None:
        """Even one that quotes a name with half a character in it."""
        served, site, _ = served_site()
        served.error = StoreError("no table \ud800 \u00e9")
        answer = Client(site).ask("GET", "/health")
        self.assertTrue(answer.body.isascii())
        decoded: Any = json.loads(answer.body)
        self.assertEqual(decoded["detail"], "no table \ud800 \u00e9")
