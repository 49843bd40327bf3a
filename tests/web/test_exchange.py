"""One exchange over HTTP: what of a body is kept, and when too much of it is refused."""

from __future__ import annotations

import re
from typing import Any

from twisted.internet.error import ConnectionLost
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tests.web.served import ELSEWHERE, Client, header, read_answer, served_site

FACTS = "/v1/streams/orders/facts"
JSON = ("Content-Type", "application/json")
CHUNKED = ("Transfer-Encoding", "chunked")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def kept(client: Client) -> int:
    """How many bytes of the body of the request under way are in memory."""
    request: Any = client.protocol._channel.requests[0]
    return len(request.content.getvalue())


class BodyTests(SynchronousTestCase):
    def test_a_body_of_just_the_limit_is_read(self) -> None:
        body = b'{"rows":[]}'
        _, site, _ = served_site(max_body=len(body))
        self.assertEqual(Client(site).ask("POST", FACTS, body, [JSON]).code, 200)

    def test_a_body_may_come_a_byte_at_a_time(self) -> None:
        served, site, _ = served_site()
        client = Client(site)
        body = b'{"rows":[["a","b"]]}'
        for byte in header("POST", FACTS, [JSON], len(body)) + body:
            client.say(bytes([byte]))
        self.assertEqual(client.heard().json, {"ids": [2]})
        self.assertEqual(served.appended, [("orders", [[["a", "b"]]], None)])

    def test_a_body_may_come_in_chunks_of_unknown_number(self) -> None:
        _, site, _ = served_site()
        client = Client(site)
        client.say(header("POST", FACTS, [JSON, CHUNKED]))
        client.say(chunk(b'{"rows":') + chunk(b"[]}") + chunk(b""))
        self.assertEqual(client.heard().json, {"ids": [2]})

    def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(self) -> None:
        _, site, _ = served_site(max_body=1000)
        client = Client(site)
        client.say(header("POST", FACTS, [JSON, ("Expect", "100-continue")], 1001))
        refused = client.heard()
        self.assertEqual((refused.code, refused.headers["connection"]), (413, "close"))
        self.assertEqual(refused.detail, "a body of more than 1000 bytes; send it in parts")
        self.assertNotIn(b"100 Continue", client.transport.value())

    def test_a_body_that_is_asked_for_by_expect_is_let_come(self) -> None:
        _, site, _ = served_site()
        client = Client(site)
        client.say(header("POST", FACTS, [JSON, ("Expect", "100-continue")], 11))
        self.assertEqual(client.transport.value(), b"HTTP/1.1 100 Continue\r\n\r\n")

    def test_a_body_of_unknown_length_is_refused_once_it_is_too_large(self) -> None:
        """Nothing of it stays in memory, and the answer does not wait for its end."""
        _, site, _ = served_site(max_body=1000)
        client = Client(site)
        client.say(header("POST", FACTS, [JSON, CHUNKED]) + chunk(b" " * 1000))
        self.assertEqual(kept(client), 1000)
        self.assertEqual(client.transport.value(), b"")
        client.say(chunk(b" "))
        self.assertEqual(client.heard().code, 413)
        self.assertEqual(kept(client), 0)

    def test_who_sends_on_after_a_refusal_is_hung_up_on(self) -> None:
        """Not at once, for a client that is cut off while it sends may never read why."""
        _, site, _ = served_site(max_body=1000)
        client = Client(site)
        client.say(header("POST", FACTS, [JSON, CHUNKED]) + chunk(b" " * 2000))
        self.assertFalse(client.transport.disconnecting)
        self.assertEqual(kept(client), 0)
        client.say(chunk(b" "))
        self.assertTrue(client.transport.disconnecting)

    def test_a_refused_body_that_ends_ends_the_connection(self) -> None:
        served, site, _ = served_site(max_body=1000)
        client = Client(site)
        client.say(header("POST", FACTS, [JSON], 1500) + b" " * 1500)
        self.assertEqual(client.transport.value().count(b"HTTP/1.1 "), 1)
        self.assertEqual(read_answer(client.transport.value()).code, 413)
        self.assertTrue(client.transport.disconnecting)
        self.assertEqual(served.appended, [])

    def test_the_body_of_a_stranger_is_not_kept(self) -> None:
        for secret, peer, code in (("hidden", None, 401), (None, ELSEWHERE, 403)):
            _, site, _ = served_site(secret=secret)
            client = Client(site, peer) if peer else Client(site)
            client.say(header("POST", FACTS, [JSON], 2000) + b" " * 1999)
            self.assertEqual(kept(client), 0)
            client.say(b" ")
            self.assertEqual(client.heard().code, code)

    def test_a_form_is_not_read_into_memory(self) -> None:
        """Twisted reads forms by itself, before anybody is asked."""
        for content_type in ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain"):
            _, site, _ = served_site()
            client = Client(site)
            client.say(header("POST", FACTS, [("Content-Type", content_type)], 2000) + b"a=b&" * 499)
            self.assertEqual(kept(client), 0)
            client.say(b"a=b&")
            self.assertEqual(client.heard().code, 415)

    def test_content_types_may_have_parameters_and_any_case(self) -> None:
        for content_type in (
            "application/json; charset=utf-8",
            "Application/JSON ;x",
            "application/x-ndjson;charset=x",
        ):
            _, site, _ = served_site()
            answer = Client(site).ask("POST", FACTS, b'{"rows":[]}', [("Content-Type", content_type)])
            self.assertEqual(answer.code, 200, content_type)

    def test_any_other_content_type_is_named(self) -> None:
        for headers in ([], [("Content-Type", "text/json")], [("Content-Type", b"\xff")], [("Content-Type", "")]):
            _, site, _ = served_site()
            refused = Client(site).ask("POST", FACTS, b'{"rows":[]}', headers)
            self.assertEqual(refused.code, 415)
            self.assertIn("send application/json or application/x-ndjson", refused.detail)

    def test_a_client_that_leaves_while_it_sends_is_forgotten(self) -> None:
        served, site, _ = served_site()
        client = Client(site)
        client.say(header("POST", FACTS, [JSON], 2000) + b" " * 10)
        client.protocol.connectionLost(Failure(ConnectionLost()))
        self.assertEqual(served.appended, [])


class ConnectionTests(SynchronousTestCase):
    def test_several_requests_share_a_connection(self) -> None:
        _, site, _ = served_site()
        client = Client(site)
        self.assertEqual(client.ask("POST", FACTS, b'{"rows":[]}', [JSON]).code, 200)
        self.assertEqual(client.ask("GET", "/nothing").code, 404)
        self.assertEqual(client.ask("POST", FACTS, b"{}", [JSON]).code, 400)
        self.assertEqual(client.ask("GET", "/health").code, 200)
        self.assertFalse(client.transport.disconnecting)

    def test_requests_that_come_together_are_answered_in_order(self) -> None:
        _, site, _ = served_site()
        client = Client(site)
        client.say(header("GET", "/health") + header("GET", "/nothing") + header("HEAD", "/health"))
        self.assertEqual(re.findall(rb"HTTP/1.1 (\d+)", client.transport.value()), [b"200", b"404", b"200"])

    def test_an_idle_connection_is_closed_in_the_end(self) -> None:
        _, site, clock = served_site()
        client = Client(site)
        client.say(b"GET /health HT")
        clock.advance(59)
        self.assertFalse(client.transport.disconnecting)
        clock.advance(2)
        self.assertTrue(client.transport.disconnecting)
        client.protocol.connectionLost(Failure(ConnectionLost()))
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_answers_are_not_to_be_kept_by_anybody_between(self) -> None:
        _, site, _ = served_site()
        self.assertEqual(Client(site).ask("GET", "/health").headers["cache-control"], "no-store")
