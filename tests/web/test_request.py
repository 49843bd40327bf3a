"""One exchange over HTTP: its parameters; what of a body is kept, and when too much of it is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from twisted.internet.error import ConnectionLost
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from tests.web.served import ELSEWHERE, Client, fact, header, read_answer, served_site

FACTS = "/v1/streams/orders/facts"
UPDATES = "/v1/streams/orders/updates"
JSON = ("Content-Type", "application/json")
CHUNKED = ("Transfer-Encoding", "chunked")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def kept(client: Client) -> int:
    """Return how many bytes of the body of the unfinished request are in memory."""
    request: Any = client.protocol.requests[0]
    return len(request.content.getvalue()) + len(request._body.getvalue())


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
            client.send(bytes([byte]))
        self.assertEqual(client.received().json, {"ids": [2]})
        self.assertEqual(served.appended, [("orders", [[["a", "b"]]], None)])

    def test_a_body_may_come_in_chunks_of_unknown_number(self) -> None:
        _, site, _ = served_site()
        client = Client(site)
        client.send(header("POST", FACTS, [JSON, CHUNKED]))
        client.send(chunk(b'{"rows":') + chunk(b"[]}") + chunk(b""))
        self.assertEqual(client.received().json, {"ids": [2]})

    def test_a_too_large_content_length_is_refused_before_the_body(self) -> None:
        _, site, _ = served_site(max_body=1000)
        client = Client(site)
        client.send(header("POST", FACTS, [JSON, ("Expect", "100-continue")], 1001))
        refused = client.received()
        self.assertEqual((refused.code, refused.headers["connection"]), (413, "close"))
        self.assertEqual(refused.detail, "a body of more than 1000 bytes; send it in parts")
        self.assertNotIn(b"100 Continue", client.transport.value())

    def test_an_expect_header_is_answered_100_continue(self) -> None:
        _, site, _ = served_site()
        client = Client(site)
        client.send(header("POST", FACTS, [JSON, ("Expect", "100-continue")], 11))
        self.assertEqual(client.transport.value(), b"HTTP/1.1 100 Continue\r\n\r\n")

    def test_a_body_of_unknown_length_is_refused_once_it_is_too_large(self) -> None:
        """Nothing of it stays in memory, and the answer does not wait for its end."""
        _, site, _ = served_site(max_body=1000)
        client = Client(site)
        client.send(header("POST", FACTS, [JSON, CHUNKED]) + chunk(b" " * 1000))
        self.assertEqual(kept(client), 1000)
        self.assertEqual(client.transport.value(), b"")
        client.send(chunk(b" "))
        self.assertEqual(client.received().code, 413)
        self.assertEqual(kept(client), 0)

    def test_a_client_that_goes_on_sending_after_a_refusal_is_disconnected(self) -> None:
        """Not at once, for a client that is cut off while it sends may never read why."""
        _, site, _ = served_site(max_body=1000)
        client = Client(site)
        client.send(header("POST", FACTS, [JSON, CHUNKED]) + chunk(b" " * 2000))
        self.assertFalse(client.transport.disconnecting)
        self.assertEqual(kept(client), 0)
        client.send(chunk(b" "))
        self.assertTrue(client.transport.disconnecting)

    def test_a_refused_body_that_ends_ends_the_connection(self) -> None:
        served, site, _ = served_site(max_body=1000)
        client = Client(site)
        client.send(header("POST", FACTS, [JSON], 1500) + b" " * 1500)
        self.assertEqual(client.transport.value().count(b"HTTP/1.1 "), 1)
        self.assertEqual(read_answer(client.transport.value()).code, 413)
        self.assertTrue(client.transport.disconnecting)
        self.assertEqual(served.appended, [])

    def test_a_body_without_access_is_not_stored(self) -> None:
        for secret, peer, code in (("hidden", None, 401), (None, ELSEWHERE, 403)):
            _, site, _ = served_site(secret=secret)
            client = Client(site, peer) if peer else Client(site)
            client.send(header("POST", FACTS, [JSON], 2000) + b" " * 1999)
            self.assertEqual(kept(client), 0)
            client.send(b" ")
            self.assertEqual(client.received().code, code)

    def test_a_form_is_not_read_into_memory(self) -> None:
        """Twisted parses forms before the request is answered."""
        for content_type in ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain"):
            _, site, _ = served_site()
            client = Client(site)
            client.send(header("POST", FACTS, [("Content-Type", content_type)], 2000) + b"a=b&" * 499)
            self.assertEqual(kept(client), 0)
            client.send(b"a=b&")
            self.assertEqual(client.received().code, 415)

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
        client.send(header("POST", FACTS, [JSON], 2000) + b" " * 10)
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
        _, site, clock = served_site()
        client = Client(site)
        client.send(header("GET", "/health") + header("GET", "/nothing") + header("HEAD", "/health"))
        clock.advance(0)
        self.assertEqual(re.findall(rb"HTTP/1.1 (\d+)", client.transport.value()), [b"200", b"404", b"200"])

    def test_an_idle_connection_is_closed_in_the_end(self) -> None:
        _, site, clock = served_site()
        client = Client(site)
        client.send(b"GET /health HT")
        clock.advance(29)
        self.assertFalse(client.transport.disconnecting)
        clock.advance(2)
        self.assertTrue(client.transport.disconnecting)
        client.protocol.connectionLost(Failure(ConnectionLost()))
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_a_target_may_be_a_whole_url(self) -> None:
        """The host in it is checked, not the header Host; its path may be empty."""
        _, site, _ = served_site()
        for target, host, code in (
            (b"http://localhost:9093/health", b"localhost:9093", 200),
            (b"HTTPS://127.0.0.1/v1/streams/orders/updates?since=1", b"elsewhere.example", 200),
            (b"http://localhost", b"localhost", 200),
            (b"http://localhost?stream=orders", b"localhost", 200),
            (b"http://elsewhere.example/v1/streams", b"localhost", 403),
            (b"http://localhost@elsewhere.example/v1/streams", b"localhost", 403),
            (b"http:///v1/streams", b"localhost", 403),
        ):
            for begin in (b"", b"\r\n"):  # with an empty line before it, Twisted parses the request
                client = Client(site)
                client.send(begin + b"GET %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (target, host))
                self.assertEqual(client.received().code, code, (target, begin))

    def test_a_target_that_is_no_path_is_named_whole(self) -> None:
        _, site, _ = served_site()
        client = Client(site)
        client.send(b"GET v1/streams HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = client.received()
        self.assertEqual(answer.code, 404)
        self.assertIn("there is no path 'v1/streams';", answer.detail)

    def test_answers_must_not_be_cached(self) -> None:
        _, site, _ = served_site()
        self.assertEqual(Client(site).ask("GET", "/health").headers["cache-control"], "no-store")


def test_parameters_are_read_as_they_were_sent() -> None:
    served, site, _ = served_site()
    served.keep("orders", "a b/\u00e9", [fact(5, ["x", "y"])])
    query = "instance=a%20b/%C3%A9&from=2&upto=9&limit=900"
    refused = Client(site).ask("GET", f"{UPDATES}?{query}")
    assert (refused.code, refused.detail) == (400, "not an instance name: 'a b/\u00e9'")
    served.keep("orders", "a/\u00e9+", [fact(5, ["x", "y"])])
    assert Client(site).ask("GET", f"{UPDATES}?instance=a/%C3%A9%2B&from=2&upto=9&limit=900").code == 200
    assert served.asked == [("orders", "a/\u00e9+", 2, 9, 900)]


def test_without_a_limit_a_page_has_about_a_thousand_rows() -> None:
    served, site, _ = served_site()
    Client(site).ask("GET", f"{UPDATES}?instance=master&from=0&upto=9")
    assert served.asked == [("orders", "master", 0, 9, 1_000)]


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("", "'instance' is missing"),
        ("instance=master&from=1", "'upto' is missing"),
        ("instance=master&upto=1", "'from' is missing"),
        ("from=1&upto=2", "'instance' is missing"),
        ("instance=master&from=1&upto=2&form=3", "unknown parameter 'form'; known here: instance, from, upto, limit"),
        ("instance=master&from=1&upto=2&form", "parameter 'form' has no value"),
        ("instance=master&from=1&upto=2&%ff=3", r"unknown parameter '\\xff'"),
        ("instance=master&from=1&upto=2&from=1", "'from' is given 2 times"),
        ("instance=master&from=x&upto=2", "'x'"),
        ("instance=master&from=&upto=2", "from: "),
        ("instance=master&from=1&upto=2.0", "'2.0'"),
        ("instance=master&from=1&upto=1_0", "upto: "),
        ("instance=master&from=1&upto=%2B5", "upto: "),
        ("instance=master&from=1&upto=05", "upto: "),
        ("instance=master&from=1&upto=%D9%A3", "upto: "),
        ("instance=master&from=1&upto=9223372036854775808", "upto: "),
        ("instance=master&from=-1&upto=2", "from: -1 is negative"),
        ("instance=master&from=3&upto=2", "upto (2) is less than from (3)"),
        ("instance=master&from=1&upto=2&limit=0", "limit: 0 is not between 1 and 10000"),
        ("instance=master&from=1&upto=2&limit=10001", "limit: 10001 is not"),
        ("instance=master&from=1&upto=2&limit=ten", "limit: "),
        ("instance=&from=1&upto=2", "not an instance name: ''"),
        ("instance=a%0Ab&from=1&upto=2", r"not an instance name: 'a\nb'"),
    ],
)
def test_a_wrong_parameter_is_named(query: str, complaint: str) -> None:
    served, site, _ = served_site()
    refused = Client(site).ask("GET", f"{UPDATES}?{query}")
    assert refused.code == 400
    assert complaint in refused.detail
    assert served.asked == []


def test_an_empty_range_is_an_empty_page() -> None:
    served, site, _ = served_site()
    served.keep("orders", "master", [fact(5, ["x", "y"])])
    answer = Client(site).ask("GET", f"{UPDATES}?instance=master&from=5&upto=5")
    assert (answer.code, answer.json) == (200, {"updates": [], "upto_token": 5, "limited": False})


def test_a_key_may_be_any_printable_text_of_200_characters() -> None:
    served, site, _ = served_site()
    headers = [("Content-Type", "application/json"), ("Idempotency-Key", "k y" + "x" * 197)]
    assert Client(site).ask("POST", "/v1/streams/orders/facts", b'{"rows":[]}', headers).code == 200
    assert served.appended == [("orders", [[]], "k y" + "x" * 197)]


@pytest.mark.parametrize("keys", [[""], ["x" * 201], ["a", "a"], [b"\xc3\xa9"], [b"\xff"], [b"a\x01"]])
def test_any_other_key_is_refused(keys: list[str | bytes]) -> None:
    served, site, _ = served_site()
    headers: list[tuple[str, str | bytes]] = [("Content-Type", "application/json")]
    headers += [("Idempotency-Key", key) for key in keys]
    refused = Client(site).ask("POST", "/v1/streams/orders/facts", b'{"rows":[]}', headers)
    assert (refused.code, refused.detail[:16]) == (400, "Idempotency-Key:")
    assert served.appended == []
