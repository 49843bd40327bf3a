"""Missed facts over HTTP: the client against our own site, a Synapse, and servers that do not keep their word."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar, cast
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

from twisted.internet import error
from twisted.internet.address import IPv4Address
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorPluggableNameResolver
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.testing import MemoryReactorClock
from twisted.protocols.tls import TLSMemoryBIOFactory
from twisted.python.failure import Failure
from twisted.test.iosim import ConnectionCompleter, IOPump
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import Agent, HTTPConnectionPool
from zope.interface import alsoProvides

from replication.errors import CatchUpError, ConfigError, FactsGoneError, StoreError, UnknownStreamError
from replication.storage.contract import facts_gone
from replication.streams.history import Epoch
from replication.web import client as module
from replication.web.client import (
    ATTEMPT_DELAY,
    CONNECT_PATIENCE,
    HEAD_LIMIT,
    PATIENCE,
    STRIDE,
    HttpCatchUp,
    StreamLackingError,
)
from replication.web.pages import MAX_PAGE_ROWS
from replication.web.site import make_site
from replication.wire.grammar import InstanceName, Token
from tests.certificates import DAY, Authority, Connections, Identity
from tests.contract.catch_up import CatchUpContract
from tests.web.served import MASTER, ORDERS, FakeServed, fact

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from replication.streams.facts import Fact
    from replication.streams.history import History
    from replication.streams.interfaces import ICatchUp, Page

T = TypeVar("T")
URL = "http://127.0.0.1:9093"


class Names:
    """Resolves every name to 127.0.0.1: before Twisted 26 a reactor for tests cannot resolve any."""

    def resolveHostName(self, receiver: Any, _: str, **how: Any) -> object:
        resolution = object()
        receiver.resolutionBegan(resolution)
        receiver.addressResolved(IPv4Address("TCP", "127.0.0.1", how["portNumber"]))
        receiver.resolutionComplete()
        return resolution


class Network:
    """A reactor without sockets; ``settle`` connects clients with the sites that listen."""

    def __init__(self) -> None:
        self.reactor: Any = MemoryReactorClock()
        alsoProvides(self.reactor, IReactorPluggableNameResolver)
        self.reactor.nameResolver = cast("Any", Names())
        self._completer = ConnectionCompleter(self.reactor)
        self.pumps: list[IOPump] = []

    def listen(self, factory: Any, port: int = 9093) -> None:
        self.reactor.tcpServers.clear()
        self.reactor.listenTCP(port, factory)

    def settle(self) -> None:
        """Connect, and carry bytes, until nothing moves."""
        moved = True
        while moved:
            moved = False
            while pump := self._completer.succeedOnce():
                self.pumps.append(pump)
                moved = True
            for pump in self.pumps:
                moved = pump.flush() or moved

    def start(self, work: Coroutine[Any, Any, T]) -> Deferred[T]:
        started = Deferred.fromCoroutine(work)
        self.settle()
        return started

    def refuse(self, why: Exception) -> None:
        self._completer.failOnce(Failure(why))


class OwnSiteTests(CatchUpContract):
    """The contract of ICatchUp, between our client and our site."""

    __test__ = True

    def make_source(self, histories: Mapping[InstanceName, Sequence[Fact]], settled: Token) -> ICatchUp:
        self.network, self.served = Network(), FakeServed()
        for writer, history in histories.items():
            self.served.keep(ORDERS, writer, history, settled)
        self.site = make_site(self.served, secret="hidden", reactor=self.network.reactor)
        self.network.listen(self.site)
        return HttpCatchUp(self.network.reactor, URL + "/", "hidden")

    def start(self, work: Coroutine[Any, Any, T]) -> Deferred[T]:
        return self.network.start(work)

    def test_pages_share_a_connection_that_is_closed_at_last(self) -> None:
        self.page(0, 5)
        self.page(5, 10)
        self.assertEqual(len(self.network.pumps), 1)
        assert isinstance(self.source, HttpCatchUp)
        closed = Deferred.fromCoroutine(self.source.close())
        self.network.settle()
        self.successResultOf(closed)
        self.assertEqual(self.network.reactor.getDelayedCalls(), [])

    def test_a_pool_may_be_shared(self) -> None:
        pool = HTTPConnectionPool(self.network.reactor)
        for _ in range(2):
            self.source = HttpCatchUp(self.network.reactor, URL, "hidden", pool)
            self.page(0, 5)
        self.assertEqual(len(self.network.pumps), 1)

    def test_a_connection_that_the_server_closed_is_opened_again(self) -> None:
        self.page(0, 5)
        self.network.pumps[0].serverIO.loseConnection()
        self.assertEqual(len(self.page(5, 10).facts), 3)
        self.assertEqual(len(self.network.pumps), 2)

    def test_the_limit_is_brought_within_what_the_site_allows(self) -> None:
        self.site.resource.turns.note("orders", [fact(2)] * MAX_PAGE_ROWS, MAX_PAGE_ROWS)  # its rows are short
        for limit in (-1, 0, 10_001, 10**9):
            self.page(0, 5, limit)
        self.assertEqual([asked[-1] for asked in self.served.asked], [1, 1, 10_000, 10_000])

    def test_a_stream_that_is_unknown_there_is_no_reason_to_ask_as_a_synapse_would(self) -> None:
        self.served.definitions.clear()
        with self.assertRaisesRegex(CatchUpError, "HTTP 404: no stream 'orders' here"):
            self.page(0, 5)
        with self.assertRaisesRegex(CatchUpError, f"^{URL}/v1/streams/orders: "):
            self.page(0, 5)

    def test_a_wrong_secret_is_named_with_its_cure(self) -> None:
        for secret in (None, "wrong"):
            self.source = HttpCatchUp(self.network.reactor, URL, secret)
            with self.assertRaisesRegex(CatchUpError, f"^{re.escape(URL)}/.*HTTP 401: .*--secret-file"):
                self.page(0, 5)

    def test_a_wrong_instance_is_an_error(self) -> None:
        del self.served.histories[ORDERS, MASTER]
        with self.assertRaisesRegex(CatchUpError, "HTTP 400: master writes nothing to orders"):
            self.page(0, 5)

    def test_the_names_of_fields_are_those_that_streams_declare(self) -> None:
        assert isinstance(self.source, HttpCatchUp)
        self.assertEqual(self.result(self.source.row_names()), {"orders": ["order_id", "state"]})
        self.network.listen(make_site(self.served, secret="other", reactor=self.network.reactor))
        source = HttpCatchUp(self.network.reactor, URL, "hidden")
        self.failureResultOf(self.start(source.row_names()), CatchUpError)

    def test_a_history_arrives_as_it_was_stored(self) -> None:
        self.assertEqual([*self.history()], [])
        epochs = [Epoch("a", Token(1), Token(1)), Epoch("b", Token(4), Token(6))]
        self.served.epochs[ORDERS, MASTER] = epochs
        self.assertEqual([*self.history()], epochs)

    def test_a_stream_that_is_unknown_there_has_no_history(self) -> None:
        self.served.definitions.clear()
        self.assertEqual([*self.history()], [])

    def test_a_history_that_cannot_be_read_there_is_an_error(self) -> None:
        self.served.error = StoreError("disk full")
        with self.assertRaisesRegex(CatchUpError, "HTTP 503: disk full"):
            self.history()

    def history(self) -> History:
        return self.result(cast("HttpCatchUp", self.source).history(ORDERS, MASTER))

    def test_a_store_that_fails_there_is_an_error_here(self) -> None:
        self.served.error = StoreError("disk full")
        with self.assertRaisesRegex(CatchUpError, "HTTP 503: disk full"):
            self.page(0, 5)

    def test_facts_that_are_gone_there_are_gone_here(self) -> None:
        self.served.error = facts_gone(ORDERS, MASTER, Token(3))
        with self.assertRaisesRegex(FactsGoneError, "HTTP 410: facts of orders by master up to 3 are gone") as caught:
            self.page(0, 5)
        self.assertEqual(caught.exception.upto, 3)

    def test_a_process_that_will_not_have_the_stream_is_not_waited_for(self) -> None:
        for lasting in (True, False):
            self.served.error = UnknownStreamError("no stream 'orders' here", lasting=lasting)
            with self.assertRaisesRegex(CatchUpError, "HTTP 404: no stream 'orders' here") as caught:
                self.page(0, 5)
            self.assertEqual(isinstance(caught.exception, StreamLackingError), lasting)

    def test_an_answer_410_of_another_program_is_an_error_only(self) -> None:
        self.served.error = facts_gone(ORDERS, MASTER, Token(0))
        with self.assertRaisesRegex(CatchUpError, "HTTP 410") as caught:
            self.page(0, 5)
        self.assertNotIsInstance(caught.exception, FactsGoneError)

    def test_a_writer_that_was_reset_is_an_error(self) -> None:
        self.served.settled = 3
        with self.assertRaisesRegex(CatchUpError, "ends at 3: .* was its database reset"):
            self.page(5, 9)


def reply(body: bytes | str | dict[str, Any], status: str = "200 OK", headers: str = "") -> bytes:
    """Return a whole HTTP answer."""
    data = json.dumps(body) if isinstance(body, dict) else body
    data = data.encode() if isinstance(data, str) else data
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n{headers}\r\n".encode() + data


class Scripted(Protocol):
    """Answers each request with ``factory.answer(path, query, header)``, and hangs up unless ``keep_open``."""

    def connectionMade(self) -> None:
        self._data = b""

    def dataReceived(self, data: bytes) -> None:
        self._data += data
        while b"\r\n\r\n" in self._data:
            head, _, self._data = self._data.partition(b"\r\n\r\n")
            url = urlsplit(head.split()[1].decode())
            numbers = {key: int(text) for key, [text] in parse_qs(url.query).items() if text.isdigit()}
            script: Any = self.factory
            assert self.transport is not None
            self.transport.write(script.answer(url.path, numbers, head))
            if not script.keep_open:
                self.transport.loseConnection()


class ScriptedTestCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.network = Network()
        self.script: Any = Factory.forProtocol(Scripted)
        self.network.listen(self.script)
        self.asked: list[str] = []
        self.source = HttpCatchUp(self.network.reactor, URL, "hidden")

    def serve(self, answer: Callable[[str, dict[str, int]], bytes] | bytes, *, keep_open: bool = True) -> None:
        def answer_and_note(path: str, query: dict[str, int], head: bytes) -> bytes:
            self.asked.append(path)
            self.assertIn(b"\r\nAuthorization: Bearer hidden\r\n", head)
            return answer if isinstance(answer, bytes) else answer(path, query)

        self.script.answer, self.script.keep_open = answer_and_note, keep_open

    def start(self, after: int = 2, upto: int = 9) -> Deferred[Page]:
        work = self.source.facts(ORDERS, MASTER, after=Token(after), upto=Token(upto), limit=100)
        return self.network.start(work)

    def page(self, after: int = 2, upto: int = 9) -> Page:
        return self.successResultOf(self.start(after, upto))

    def assert_fails(self, *words: str, after: int = 2, upto: int = 9) -> None:
        """It is a CatchUpError that begins with the URL that was asked."""
        text = str(self.failureResultOf(self.start(after, upto), CatchUpError).value)
        self.assertTrue(text.startswith(URL + "/"), text)
        for word in words:
            self.assertIn(word, text)


class CertificateTests(ScriptedTestCase):
    """An https:// source whose certificate is refused; the handshakes are OpenSSL's own."""

    def setUp(self) -> None:
        super().setUp()
        files = TemporaryDirectory()
        self.addCleanup(files.cleanup)
        self.folder = Path(files.name)
        self.authority = Authority(self.folder)
        environment = patch.dict(os.environ, {"SSL_CERT_FILE": str(self.authority.certificate)})
        environment.start()
        self.addCleanup(environment.stop)
        self.source = HttpCatchUp(self.network.reactor, URL.replace("http", "https"), "hidden")

    def assert_refused(self, identity: Identity, *words: str) -> None:
        """Each attempt has the same text, so that it is logged once."""
        self.network.listen(TLSMemoryBIOFactory(Connections(identity), False, self.script, clock=self.network.reactor))
        first, second = (str(self.failureResultOf(self.start(upto=upto), CatchUpError).value) for upto in (9, 10))
        self.assertEqual(first, second)
        self.assertTrue(first.startswith("https://127.0.0.1:9093/v1/streams/orders: TLS failed: "), first)
        for word in words:
            self.assertIn(word, first)

    def test_another_host(self) -> None:
        self.assert_refused(self.authority.issue("other", "other.example"), "for another host")

    def test_an_expired_certificate(self) -> None:
        self.assert_refused(self.authority.issue("old", "127.0.0.1", valid=(-2 * DAY, -DAY)), "has expired on 2")

    def test_an_unknown_authority(self) -> None:
        foreign = Authority(self.folder, "foreign")
        self.assert_refused(foreign.issue("unknown", "127.0.0.1"), "an authority that is not trusted", "SSL_CERT_FILE")

    def test_a_port_without_tls(self) -> None:
        self.script.answer, self.script.keep_open = lambda *_: b"", True
        self.network.listen(Factory.forProtocol(Greeting))
        text = str(self.failureResultOf(self.start(), CatchUpError).value)
        self.assertIn("the port does not answer with TLS", text)


class Greeting(Protocol):
    def connectionMade(self) -> None:
        cast("Any", self.transport).write(b"SERVER example.com\n")


class HostileTests(ScriptedTestCase):
    """Whatever happens is a CatchUpError that names the URL, and the next page is asked for afresh."""

    def tearDown(self) -> None:
        self.network.listen(self.script)
        self.serve(reply({"updates": [[5, "row"]], "upto_token": 9, "limited": False}))
        self.assertEqual(self.page().facts, [fact(5, "row")])

    def test_a_closed_port_is_an_error_with_advice(self) -> None:
        self.network.reactor.tcpServers.clear()
        started = self.start()
        self.network.refuse(error.ConnectionRefusedError())
        text = str(self.failureResultOf(started, CatchUpError).value)
        self.assertIn("refused", text)
        self.assertIn("--http on that port", text)

    def test_a_name_whose_only_address_refuses_is_an_error_after_one_attempt(self) -> None:
        self.network.reactor.tcpServers.clear()
        started = self.network.start(
            HttpCatchUp(self.network.reactor, "http://name.example:9093", "hidden").history(ORDERS, MASTER)
        )
        self.network.refuse(error.ConnectionRefusedError())
        self.network.reactor.advance(ATTEMPT_DELAY)  # the endpoint looks for a next address
        self.assertIn("refused", str(self.failureResultOf(started, CatchUpError).value))

    def test_an_ipv6_address_is_connected_without_a_name_resolver(self) -> None:
        del self.network.reactor.nameResolver
        self.network.reactor.tcpServers.clear()
        started = self.network.start(
            HttpCatchUp(self.network.reactor, "http://[::1]:9093", "hidden").history(ORDERS, MASTER)
        )
        self.assertEqual([client[:2] for client in self.network.reactor.tcpClients], [("::1", 9093)])
        self.network.refuse(error.ConnectionRefusedError())
        self.failureResultOf(started, CatchUpError)

    def test_the_connection_is_not_taken_up(self) -> None:
        self.network.reactor.tcpServers.clear()
        started = self.start()
        self.network.reactor.advance(CONNECT_PATIENCE - 1)
        self.assertNoResult(started)
        self.network.refuse(error.TimeoutError())
        self.assertIn("timeout", str(self.failureResultOf(started, CatchUpError).value).lower())

    def test_https_without_its_library_names_the_extra(self) -> None:
        with patch.object(Agent, "request", side_effect=NotImplementedError("SSL support unavailable")):
            self.assert_fails("SSL support unavailable: TLS needs pyopenssl and service-identity")

    def test_f27_a_proxy_answers_502(self) -> None:
        self.serve(reply("<html>Bad Gateway</html>", "502 Bad Gateway"))
        self.assert_fails("HTTP 502: not an answer of this API: b'<html>Bad Gateway</html>'")

    def test_f27_a_redirect_is_not_followed_and_the_secret_stays_here(self) -> None:
        for status in ("301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"):
            self.serve(reply("", status, "Location: http://elsewhere.example/\r\n"))
            self.assert_fails(f"HTTP {status[:3]}", "'http://elsewhere.example/'")
        self.assertEqual(self.network.reactor.tcpClients, [])

    def test_f27_a_page_is_cut_off(self) -> None:
        whole = reply({"updates": [[5, "row"]], "upto_token": 9, "limited": False})
        for length in (0, 5, 30, whole.index(b"\r\n\r\n") + 4, len(whole) - 1):
            self.serve(whole[:length], keep_open=False)
            self.assert_fails("cut off, or not HTTP: the connection was closed")

    def test_f27_json_is_cut_off(self) -> None:
        self.serve(reply('{"updates": [[5, "ro'))
        self.assert_fails("not a page of updates")

    def test_a_page_without_a_length_is_cut_off(self) -> None:
        """Only the JSON shows it."""
        self.serve(b'HTTP/1.1 200 OK\r\n\r\n{"updates": [[5, "row"]], "upto_token": 9', keep_open=False)
        self.assert_fails("not a page of updates")

    def test_what_answers_is_no_http(self) -> None:
        self.serve(b"SERVER example.com\nPING 1\n", keep_open=False)
        self.assert_fails("cut off")

    def test_f27_the_answer_does_not_begin(self) -> None:
        self.serve(b"")
        started = self.start()
        self.network.reactor.advance(PATIENCE - 1)
        self.assertNoResult(started)
        self.network.reactor.advance(1)
        self.assertIn("no answer within 30 s", str(self.failureResultOf(started, CatchUpError).value))
        self.assertTrue(self.network.pumps[0].clientIO.disconnecting)

    def test_f27_a_body_that_only_trickles_is_given_up(self) -> None:
        """It is not enough that something comes."""
        self.serve(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        started = self.start()
        server = self.network.pumps[0].server
        for _ in range(int(PATIENCE)):
            self.assertNoResult(started)
            server.transport.write(b" ")
            self.network.settle()
            self.network.reactor.advance(1)
        self.network.settle()
        self.assertIn("stopped", str(self.failureResultOf(started, CatchUpError).value))
        self.assertTrue(self.network.pumps[0].clientIO.disconnecting)
        self.assertEqual(self.network.reactor.getDelayedCalls(), [])

    def test_a_slow_body_that_keeps_coming_is_waited_for(self) -> None:
        rows = [[token, "x" * STRIDE] for token in range(3, 9)]
        whole = reply({"updates": rows, "upto_token": 9, "limited": False})
        self.serve(whole[:100])
        started = self.start()
        for begin in range(100, len(whole), STRIDE + 1):
            self.network.reactor.advance(PATIENCE - 1)
            self.network.pumps[0].server.transport.write(whole[begin : begin + STRIDE + 1])
            self.network.settle()
        self.assertEqual(len(self.successResultOf(started).facts), 6)

    def test_headers_without_an_end_are_given_up(self) -> None:
        """Twisted would keep them all, and log each answer 100."""
        for endless in (
            b"X-Pad: " + b"x" * 1_000 + b"\r\n",
            b" " + b"x" * 1_000 + b"\r\n",
            b"\r\nHTTP/1.1 100 Continue\r\n",
        ):
            self.serve(b"HTTP/1.1 100 Continue\r\nX-Pad: y\r\n")
            started = self.start()
            server = self.network.pumps[-1].server
            for _ in range(HEAD_LIMIT // len(endless) + 2):
                server.transport.write(endless)
                self.network.settle()
            text = str(self.failureResultOf(started, CatchUpError).value)
            self.assertIn(f"the answer has more than {HEAD_LIMIT} bytes of headers", text)

    def test_a_long_body_does_not_count_as_headers(self) -> None:
        for _ in range(2):  # the second over the same connection
            rows = [[token, "x" * STRIDE] for token in range(3, 9)]
            whole = reply({"updates": rows, "upto_token": 9, "limited": False})
            self.serve(whole[:10])
            started = self.start()
            self.network.pumps[-1].server.transport.write(whole[10:])
            self.network.settle()
            self.assertEqual(len(self.successResultOf(started).facts), 6)

    def test_a_body_that_is_too_large_is_given_up(self) -> None:
        self.patch(module, "BODY_LIMIT", 1_000)
        self.serve(reply(b" " * 1_000 + b"{}"))
        self.assert_fails("more than 1000 bytes", "fewer rows")
        self.network.settle()
        self.assertTrue(self.network.pumps[0].clientIO.disconnecting)

    def test_pages_shrink_while_answers_are_lost_and_grow_again(self) -> None:
        """A proxy that cuts off long answers must not stop a follower (docs/protocol/following.md E5)."""
        limits: list[int] = []

        def answer(_: str, query: dict[str, int]) -> bytes:
            limits.append(query["limit"])
            whole = reply({"updates": [[5, "row"]], "upto_token": 9, "limited": False})
            return whole if query["limit"] <= 30 else whole[:-1]

        self.serve(answer, keep_open=False)
        self.assert_fails("cut off")
        for _ in range(4):
            self.page()
        self.assert_fails("cut off")
        for _ in range(3):
            self.page()
        self.assertEqual(limits, [100, 12, 16, 21, 27, 34, 4, 6, 8])

    def test_pages_shrink_while_answers_without_a_length_are_cut_off(self) -> None:
        limits: list[int] = []

        def answer(_: str, query: dict[str, int]) -> bytes:
            limits.append(query["limit"])
            page = b'{"updates":[[5,"row"]],"upto_token":9,"limited":false}'
            return b"HTTP/1.1 200 OK\r\n\r\n" + (page if query["limit"] < 10 else page[:-1])

        self.serve(answer, keep_open=False)
        self.assert_fails("not a page of updates")
        self.assert_fails("not a page of updates")
        self.page()
        self.page()
        self.assertEqual(limits, [100, 12, 1, 2])

    def test_an_error_status_does_not_shrink_pages(self) -> None:
        self.serve(reply('{"error": "x", "detail": "y"}', "503 Busy"))
        self.assert_fails("503")
        self.assertEqual(self.source._rows, {})

    def test_a_refused_connection_does_not_shrink_pages(self) -> None:
        self.network.reactor.tcpServers.clear()
        started = self.start()
        self.network.refuse(error.ConnectionRefusedError())
        self.failureResultOf(started, CatchUpError)
        self.assertEqual(self.source._rows, {})

    def test_a_page_that_lies_is_refused(self) -> None:
        for tokens, upto, complaint in (
            ([5, 4], 9, "out of order"),
            ([2], 9, "token 2 comes after 2"),
            ([10], 9, "token 10 is beyond 9"),
            ([5], 10, "ends at 10"),
            ([5, 7], 6, "ends at 6"),
            ([5, 7, 5], 9, "one fact in two parts"),
        ):
            rows = [[token, "row"] for token in tokens]
            self.serve(reply({"updates": rows, "upto_token": upto, "limited": False}))
            self.assert_fails(complaint)

    def test_an_error_in_our_form_is_quoted_in_part(self) -> None:
        self.serve(reply({"error": "x", "detail": "100% %s {wrong} " + "x" * 10_000}, "500 Error"))
        self.assert_fails("HTTP 500: 100% %s {wrong} xxx")
        self.assertLess(len(str(self.failureResultOf(self.start()).value)), 1_000)

    def test_an_answer_that_repeats_the_secret_is_reported_without_it(self) -> None:
        """A proxy may print the headers that it received."""
        secret = "hidden"
        for answer in (
            reply({"detail": f"Bearer {secret}"}, "400 Bad"),
            reply({"detail": "x" * 497 + secret}, "500 Error"),
            reply(f"Authorization: Bearer {secret}", "502 Bad Gateway"),
            reply("x" * 95 + secret, "502 Bad Gateway"),
            reply("", "302 Found", f"Location: http://x/?{secret}\r\n"),
            reply({"updates": [], "upto_token": secret, "limited": False}),
            f"HTTP/1.1 {secret} Bad\r\n\r\n".encode(),
        ):
            self.serve(answer, keep_open=False)
            text = str(self.failureResultOf(self.start(), CatchUpError).value)
            self.assertNotIn("hid", text)

    def test_an_error_that_is_deeply_nested_or_no_text_is_quoted_as_bytes(self) -> None:
        for body in (b"[" * 100_000, b'{"detail": 5}', b"\xff"):
            self.serve(reply(body, "500 Error"))
            self.assert_fails("HTTP 500: not an answer of this API: b'")

    def test_a_history_a_list_and_a_pause_that_lie_are_refused(self) -> None:
        """Other texts, wrong UTF-8, and seconds that no float has."""
        for body in (b"{}", b'{"epochs": "\xff"}', b'{"next": ' + b"9" * 400 + b"}", b'{"x": ' + b"[" * 100_000):
            self.serve(reply(body))
            for work in (
                self.source.history(ORDERS, MASTER),
                self.source.audited(),
                self.source.report(MASTER, {ORDERS: {MASTER: Token(5)}}),
            ):
                error = self.failureResultOf(self.network.start(work), CatchUpError).value
                self.assertTrue(str(error).startswith(f"{URL}/v1"), error)


class CancelTests(ScriptedTestCase):
    def test_a_request_can_be_cancelled(self) -> None:
        """While the answer has not begun, and in its middle."""
        for begun in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"):
            self.serve(begun)
            started = self.start()
            started.cancel()
            self.failureResultOf(started, CancelledError)
            self.network.settle()
            self.assertTrue(self.network.pumps[-1].clientIO.disconnecting)
            self.assertEqual(self.network.reactor.getDelayedCalls(), [])

    def test_a_request_can_be_cancelled_while_it_connects(self) -> None:
        """Then Twisted raises an error of its own, whose text is an address."""
        started = Deferred.fromCoroutine(self.source.facts(ORDERS, MASTER, after=Token(0), upto=Token(9), limit=9))
        started.cancel()
        self.failureResultOf(started, CancelledError)


class SynapseTests(ScriptedTestCase):
    """Against a Synapse, which does not have our paths (docs/protocol/following.md E5)."""

    HTML = reply("<html><body>No Such Resource</body></html>", "404 Not Found")

    def serve_synapse(self, rows: list[tuple[int, Any]], *, backwards: bool = False, lost: bytes = HTML) -> None:
        def answer(path: str, query: dict[str, int]) -> bytes:
            if not path.startswith("/_synapse/replication/get_repl_stream_updates/orders/"):
                return lost
            after, upto = query["from_token"], query["upto_token"]
            found = sorted(row for row in rows if after < row[0] <= upto)
            if backwards:
                found.reverse()
            limited = len(found) > 3
            found = found[:3]
            reached = found[-1][0] if limited else upto
            body = {"updates": found, "upto_token": reached, "limited": limited}
            return reply(json.dumps(body, separators=(",", ":"), ensure_ascii=False))

        self.serve(answer)

    def everything(self, upto: int) -> list[Fact]:
        found: list[Fact] = []
        after = 0
        while after < upto:
            page = self.page(after, upto)
            self.assertGreater(page.upto, after)
            self.assertEqual(page.limited, page.upto < upto)
            found += page.facts
            after = page.upto
        return found

    def test_it_is_asked_in_its_own_form_from_then_on(self) -> None:
        self.serve_synapse([(5, "row")])
        self.assertEqual(self.page().facts, [fact(5, "row")])
        self.page()
        self.assertEqual([path.startswith("/_synapse/") for path in self.asked], [False, True, True])

    def test_every_request_has_a_transaction_id_of_its_own(self) -> None:
        """Answers are remembered by it for half an hour."""
        self.serve_synapse([(5, "row")])
        self.page()
        self.page()
        words = [path.rpartition("/")[2] for path in self.asked[1:]]
        self.assertEqual([len(word) for word in words], [10, 10])
        self.assertNotEqual(*words)

    def test_old_and_new_answers_of_a_synapse_to_an_unknown_path(self) -> None:
        unrecognized = {"errcode": "M_UNRECOGNIZED", "error": "Unrecognized request"}
        for lost in (
            self.HTML,
            reply(unrecognized, "404 Not Found"),
            reply(unrecognized, "400 Bad Request"),
            reply("", "405 Method Not Allowed"),
        ):
            self.source = HttpCatchUp(self.network.reactor, URL, "hidden")
            self.serve_synapse([(5, "row")], lost=lost)
            self.assertEqual(self.page().facts, [fact(5, "row")])

    def test_limited_pages_are_asked_on_from(self) -> None:
        rows = [(token, ["row", token]) for token in range(3, 40, 2)]
        self.serve_synapse(rows)
        self.assertEqual(self.everything(50), [fact(*row) for row in rows])

    def test_trap_12_a_stream_in_descending_order_is_read_whole(self) -> None:
        """Synapse's own workers keep the first row of such a page, and never see what lies below a limited one."""
        rows = [(token, ["row", token]) for token in range(3, 40, 2)]
        self.serve_synapse(rows, backwards=True)
        self.assertEqual(self.everything(50), [fact(*row) for row in rows])

    def test_rows_are_spelt_as_on_the_wire(self) -> None:
        row = ["ev", {"k": "\u00e9 \U0001f600 \x7f/"}, 1.5, None]
        self.serve_synapse([(5, row)])
        self.assertEqual(self.page().facts, [fact(5, row)])

    def test_its_errors_are_quoted(self) -> None:
        self.serve_synapse([])
        self.page()
        self.serve(reply({"errcode": "M_UNKNOWN", "error": "Unknown stream"}, "400 Bad Request"))
        self.assert_fails("/_synapse/", "HTTP 400: Unknown stream")

    def test_its_500_may_be_a_wrong_secret(self) -> None:
        self.serve_synapse([])
        self.page()
        self.serve(reply({"errcode": "M_UNKNOWN", "error": "Internal server error"}, "500 Error"))
        self.assert_fails("HTTP 500: an error in that Synapse, or a missing or wrong secret")

    def test_a_server_without_either_api_is_sent_both_requests_again(self) -> None:
        """A proxy may not have been ready; next time our API may be behind it."""
        self.serve(self.HTML)
        self.assert_fails("HTTP 404")
        self.serve(reply({"updates": [[5, "row"]], "upto_token": 9, "limited": False}))
        self.page()
        self.assertEqual([path.startswith("/_synapse/") for path in self.asked], [False, True, False])


class AddressTests(SynchronousTestCase):
    def test_an_address_that_cannot_be_is_a_config_error(self) -> None:
        for url in (
            "",
            "127.0.0.1:9093",
            "ftp://127.0.0.1",
            "http://",
            "http:///v1",
            "http://user:word@host",
            "http://host?x=1",
            "http://host#x",
            "http://host:port",
            "http://host:99999",
            "http://h\u00f6st",
            "http://ho st",
        ):
            self.assertRaises(ConfigError, HttpCatchUp, MemoryReactorClock(), url)

    def test_a_secret_that_cannot_be_is_a_config_error(self) -> None:
        self.assertRaises(ConfigError, HttpCatchUp, MemoryReactorClock(), URL, "")

    def test_the_api_may_lie_below_a_path(self) -> None:
        network = Network()
        script: Any = Factory.forProtocol(Scripted)
        script.keep_open = True
        asked = []

        def answer(path: str, *_: object) -> bytes:
            asked.append(path)
            return reply({"updates": [], "upto_token": 9, "limited": False})

        script.answer = answer
        network.listen(script)
        source = HttpCatchUp(network.reactor, URL + "/replication/")
        work = source.facts(ORDERS, MASTER, after=Token(2), upto=Token(9), limit=100)
        self.successResultOf(network.start(work))
        self.assertEqual(asked, ["/replication/v1/streams/orders/updates"])
