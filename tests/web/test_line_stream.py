"""Appends by lines: answers while the body arrives, errors, memory, and another attempt after a cut."""

from __future__ import annotations

import json
from itertools import chain
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.python.failure import Failure

from replication.errors import RowRefusedError, StoreError, ValueRefusedError
from replication.web import line_stream
from tests.web.served import JSON, NDJSON, ApiTestCase, Client, FakeServed, header, served_site

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from replication.wire.grammar import Token

APPEND = "/v1/streams/orders/append"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def body_of(chunks: bytes) -> bytes:
    """Return what chunks hold; the last one may be missing."""
    found = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        found, chunks = found + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return found


class KeyedServed(FakeServed):
    """Keeps receipts, and refuses rows, as a store does; an append waits while there is a ``gate``."""

    def __init__(self) -> None:
        super().__init__()
        self.receipts: dict[str, Sequence[Token]] = {}
        self.refused: dict[object, StoreError] = {}  # by rows
        self.gate: Deferred[None] | None = None
        self.stored: list[Any] = []

    async def append_texts(self, stream: str, facts: Iterable[Sequence[object]], key: str | None) -> Sequence[Token]:
        if self.gate is not None:
            await self.gate
        first = len(self.stored)
        new = await super().append_texts(stream, facts, key)  # which refuses wrong lines
        known = self.receipts.get(key or "")
        if known is not None:
            self.appended.pop()
            return known
        rows_of_all = [each for rows in self.appended[-1][1] for each in rows]
        if error := next((each for each in self.refused if each in rows_of_all), None):
            self.appended.pop()
            raise self.refused[error]
        tokens = [type(token)(token + first) for token in new]
        self.stored += self.appended[-1][1]
        if key is not None:
            self.receipts[key] = tokens
        return tokens


class LineStreamTests(ApiTestCase):
    def setUp(self) -> None:
        self.served: Any = KeyedServed()
        _, self.site, self.clock = served_site(self.served)
        self.begin()

    def begin(
        self, key: str | None = None, after: int | None = None, path: str = APPEND, length: int | None = None
    ) -> None:
        """Send the headers of a request on a new connection."""
        self.client = Client(self.site)
        path = path if after is None else f"{path}?after={after}"
        more = [("Idempotency-Key", key)] if key else []
        framing = [] if length is not None else [("Transfer-Encoding", "chunked")]
        self.client.send(header("POST", path, [NDJSON, *framing, *more], length))

    def send(self, *rows: object) -> None:
        self.client.send(chunk(b"".join(b'{"rows":[%b]}\n' % json.dumps(row).encode() for row in rows)))

    def end(self) -> None:
        self.client.send(chunk(b""))

    def answers(self) -> list[Any]:
        """Return the lines of the answer so far."""
        if not self.client.transport.value():
            return []
        received = self.client.received()
        self.assertEqual((received.code, received.headers["content-type"]), (200, "application/x-ndjson"))
        return [json.loads(line) for line in body_of(received.body).splitlines()]

    def test_each_line_is_answered_before_the_next_one_is_sent(self) -> None:
        self.send("a")
        self.assertEqual(self.answers(), [[2]])
        self.send("b", "c")
        self.assertEqual(self.answers(), [[2], [3, 4]])
        self.assertEqual(self.served.stored, [["a"], ["b"], ["c"]])
        self.assertFalse(self.client.transport.value().endswith(b"0\r\n\r\n"))
        self.end()
        self.assertTrue(self.client.transport.value().endswith(b"0\r\n\r\n"))
        self.assertTrue(self.client.transport.disconnecting)

    def test_a_proxy_is_asked_to_pass_on_each_answer_at_once(self) -> None:
        self.send("a")
        head, _, _ = self.client.transport.value().partition(b"\r\n\r\n")
        self.assertIn(b"\r\nx-accel-buffering: no", head.lower())

    def test_lines_may_be_cut_anywhere_and_the_last_one_needs_no_end(self) -> None:
        for byte in b'{"rows":["a"]}\n\n \r\n{"rows":["b"]}\r\n{"rows":["c"]}':
            self.client.send(chunk(bytes([byte])))
        self.assertEqual(self.answers(), [[2], [3]])
        self.end()
        self.assertEqual(self.answers(), [[2], [3], [4]])

    def test_a_body_with_a_length_is_taken_too(self) -> None:
        body = b'{"rows":["a"]}\n'
        self.begin(length=len(body))
        self.client.send(body)
        self.assertEqual(self.answers(), [[2]])
        self.assertTrue(self.client.transport.disconnecting)

    def test_no_lines_are_an_empty_answer(self) -> None:
        self.end()
        self.assertEqual((self.client.received().code, body_of(self.client.received().body)), (200, b""))

    def test_lines_that_arrive_during_a_commit_share_the_next_one(self) -> None:
        self.served.gate = gate = Deferred[None]()
        for row in "abc":
            self.send(row)
        self.end()
        self.assertEqual(self.answers(), [])
        self.served.gate = None
        gate.callback(None)
        self.assertEqual(self.answers(), [[2], [3, 4]])
        self.assertTrue(self.client.transport.value().endswith(b"0\r\n\r\n"))

    def test_a_batch_is_bounded_in_lines_and_bytes(self) -> None:
        self.patch(line_stream, "BATCH_LINES", 3)
        self.send(*range(7))
        self.assertEqual([len(each) for each in self.answers()], [3, 3, 1])
        self.patch(line_stream, "BATCH_BYTES", 40)
        self.send("x" * 50, "x" * 50, "y", "z")
        self.assertEqual([len(each) for each in self.answers()[3:]], [1, 1, 2])

    # ---- errors

    def test_what_is_before_a_wrong_line_is_stored_and_nothing_after_it(self) -> None:
        self.send("a")
        self.client.send(chunk(b'{"rows":["b"]}\n{"rows":["c"]}\n{"rowz":[]}\n{"rows":["d"]}\n'))
        detail = 'line 4: the list "rows" is missing'
        error = {"error": "Bad Request", "detail": detail, "status": 400}
        self.assertEqual(self.answers(), [[2], [3, 4], error])
        self.send("e")
        self.end()
        self.assertEqual((self.answers(), len(self.served.stored)), ([[2], [3, 4], error], 3))
        self.assertTrue(self.client.transport.disconnecting)

    def test_a_row_that_the_stream_refuses_names_its_line(self) -> None:
        self.send("a", ["bad"], "b")
        self.assertEqual(self.answers()[0], [2])
        self.assertIn("line 2: ", self.answers()[1]["detail"])

    def test_what_is_before_a_row_that_the_table_refuses_is_stored_and_its_line_is_named(self) -> None:
        for kind, status in ((RowRefusedError, 409), (ValueRefusedError, 400)):
            self.served.refused["x"] = kind("refused")
            for wrong in range(1, 9):
                self.served.stored.clear()
                self.begin()
                lines = [b'{"rows":["%c"]}\n' % ("x" if each == wrong else "a").encode() for each in range(9)]
                self.client.send(chunk(b"".join(lines)))
                *found, error = self.answers()
                self.assertEqual([*chain.from_iterable(found)], [*range(2, 2 + wrong)])
                self.assertEqual((error["detail"], error["status"]), (f"line {wrong + 1}: refused", status))
                self.assertEqual(len(self.served.stored), wrong)

    def test_an_error_before_any_answer_is_a_status(self) -> None:
        self.send(["bad"])
        self.assert_refused(self.client.received(), 400, "line 1: ")
        self.assertEqual(self.client.received().headers["connection"], "close")

    def test_an_error_of_the_store_leaves_the_tail_without_an_answer(self) -> None:
        self.send("a")
        self.served.error = StoreError("disk full")
        self.send("b")
        last = {"error": "Service Unavailable", "detail": "disk full", "status": 503}
        self.assertEqual(self.answers(), [[2], last])

    def test_an_exception_is_logged_and_answered_500(self) -> None:
        self.served.error = ZeroDivisionError()
        self.send("a")
        self.assertEqual(self.client.received().code, 500)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_a_call_that_may_not_be_made_is_refused_with_its_headers(self) -> None:
        for path, status in ((f"{APPEND}?before=3", 400), (f"{APPEND}?after=x", 400), (f"{APPEND}?after=3", 400)):
            self.begin(path=path)
            self.assertEqual(self.client.received().code, status, path)
        self.client = Client(self.site)
        self.client.send(header("POST", APPEND, [JSON, ("Transfer-Encoding", "chunked")]))
        self.assert_refused(self.client.received(), 415, "application/x-ndjson")
        self.begin(path="/v1/streams/nowhere/append")
        self.send("a")
        self.assertEqual(self.client.received().code, 404)

    def test_a_get_shows_that_the_call_is_offered(self) -> None:
        self.assertEqual(Client(self.site).ask("GET", APPEND).code, 405)

    def test_http_1_0_has_no_answer_before_the_end(self) -> None:
        client = Client(self.site)
        client.send(header("POST", APPEND, [NDJSON], 0).replace(b"HTTP/1.1", b"HTTP/1.0"))
        self.assert_refused(client.received(), 400, "HTTP 1.1")

    def test_a_line_above_the_limit_is_refused(self) -> None:
        _, self.site, _ = served_site(self.served, max_body=100)
        self.begin()
        self.send("a")
        self.client.send(chunk(b"x" * 101))
        self.assertEqual([each if isinstance(each, list) else each["status"] for each in self.answers()], [[2], 413])
        self.client.send(chunk(b"x" * 201))
        self.assertTrue(self.client.transport.disconnecting, "the rest is discarded up to a limit")

    # ---- memory and time

    def test_while_many_lines_wait_the_connection_is_not_read(self) -> None:
        self.patch(line_stream, "MAX_WAITING", 100)
        self.served.gate = gate = Deferred[None]()
        self.send("first")
        self.send("x" * 99)
        self.assertEqual(self.client.transport.producerState, "paused")
        self.served.gate = None
        gate.callback(None)
        self.assertEqual(self.client.transport.producerState, "producing")
        self.assertEqual(self.answers(), [[2], [3]])

    def test_a_client_that_does_not_read_its_answers_is_not_read(self) -> None:
        self.patch(line_stream, "MAX_WAITING", 100)
        self.served.gate = gate = Deferred[None]()
        self.send("first")
        self.send("x" * 99)
        self.client.protocol.pauseProducing()  # as a transport does whose buffer is full
        self.served.gate = None
        gate.callback(None)
        self.assertEqual(self.client.transport.producerState, "paused")
        self.client.protocol.resumeProducing()
        self.assertEqual(self.client.transport.producerState, "producing")

    def test_a_client_that_reads_its_answers_again_is_not_read_while_many_lines_wait(self) -> None:
        self.patch(line_stream, "MAX_WAITING", 100)
        self.served.gate = Deferred[None]()
        self.send("first")
        self.send("x" * 99)
        self.client.protocol.pauseProducing()
        self.client.protocol.resumeProducing()
        self.assertEqual(self.client.transport.producerState, "paused")

    def test_a_body_may_take_as_long_as_it_needs(self) -> None:
        self.send("a")
        self.clock.advance(100_000)
        self.send("b")
        self.assertEqual(self.answers(), [[2], [3]])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    # ---- cuts

    def cut(self) -> None:
        self.client.protocol.connectionLost(Failure(ConnectionLost()))

    def test_after_a_cut_no_further_line_is_appended(self) -> None:
        self.served.gate = gate = Deferred[None]()
        self.send("a")
        self.send("b")
        self.cut()
        gate.callback(None)
        self.assertEqual(self.served.stored, [["a"]])

    def test_a_cut_while_many_lines_wait_is_no_error(self) -> None:
        self.patch(line_stream, "MAX_WAITING", 100)
        self.served.gate = gate = Deferred[None]()
        self.send("a")
        self.send("x" * 99)
        self.cut()
        gate.callback(None)
        self.assertEqual(self.served.stored, [["a"]])
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_with_a_key_what_was_stored_before_a_cut_is_stored_once(self) -> None:
        """The answers to the second and third batch were lost; the client cuts its lines in another way then."""
        self.begin("k")
        self.send("a")
        self.send("b", "c", "d")
        self.send("e")
        self.cut()
        for cuts in ([["b"], ["c", "d", "e", "f"]], [["b", "c", "d", "e"], ["f"]], [["b", "c", "d", "e", "f"]]):
            self.begin("k", after=1)
            for rows in cuts:
                self.send(*rows)
            self.end()
            self.assertEqual(self.answers(), [[3, 4, 5], [6], [7]])
        self.assertEqual(self.served.stored, [[each] for each in "abcdef"])

    def test_a_stored_batch_of_which_lines_are_missing_is_answered_as_far_as_they_go(self) -> None:
        self.begin("k")
        self.send("a", "b", "c")
        self.begin("k")
        self.send("a", "b")
        self.assertEqual(self.answers(), [])
        self.end()
        self.assertEqual(self.answers(), [[2, 3]])

    def test_lines_of_a_stored_batch_are_answered_whatever_they_are(self) -> None:
        """The stream may refuse them now; they were read for ever."""
        self.begin("k")
        self.send("a", "b", "c")
        self.begin("k")
        self.send("a", ["bad"])
        self.assertEqual(self.answers(), [])
        self.client.send(chunk(b"no JSON\n"))
        self.assertEqual(self.answers(), [[2, 3, 4]])
        self.send("d")
        self.assertEqual(self.answers(), [[2, 3, 4], [5]])
        self.assertEqual(self.served.stored, [["a"], ["b"], ["c"], ["d"]])

    def test_a_stored_batch_is_answered_whole_if_the_end_arrives_while_it_is_read(self) -> None:
        self.begin("k")
        self.send("a", "b", "c")
        self.begin("k")
        self.served.gate = gate = Deferred[None]()
        self.send("a")
        self.send("b", "c", "d")
        self.end()
        self.served.gate = None
        gate.callback(None)
        self.assertEqual(self.answers(), [[2, 3, 4], [5]])
        self.assertEqual(self.served.stored, [["a"], ["b"], ["c"], ["d"]])

    def test_lines_of_a_stored_batch_need_no_memory(self) -> None:
        self.patch(line_stream, "MAX_WAITING", 100)
        self.begin("k")
        self.send("a", "b", "c")
        self.begin("k")
        self.send("a")
        self.send("x" * 200)
        kept = self.client.protocol.requests[-1].lines._lines
        self.assertEqual(sum(map(len, kept)), 0)
        self.send("x" * 200, "d")
        self.assertEqual(self.answers(), [[2, 3, 4], [5]])

    def test_a_key_of_lines_is_none_of_another_append(self) -> None:
        self.begin("k")
        self.send("a")
        self.assertEqual([*self.served.receipts], ["k\n0"])
