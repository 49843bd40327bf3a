"""Facts that a function cannot take, through the HTTP API."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

from msgspec.structs import replace

from replication.errors import StreamError
from replication.streams.facts import Fact
from replication.streams.skips import SkippedFact, SkipState
from replication.wire.grammar import Token
from tests.web.served import JSON, MASTER, ORDERS, ApiTestCase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.web.served import Received

SKIPPED = SkippedFact(
    ORDERS, MASTER, Fact(Token(7), ('["a"]', '["b"]')), SkipState.SKIPPED, "ValueError: no", changed_at=5.5
)
SHOWN = {
    "stream": "orders",
    "instance": "master",
    "token": 7,
    "state": "skipped",
    "since": 5.5,
    "decided_by": "command",
    "error": "ValueError: no",
    "rows": [["a"], ["b"]],
}


class FakeSkips:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    async def skip(self, stream: str, writer: str, token: Token) -> SkippedFact:
        self.asked.append(("skip", stream, writer, token))
        if token != SKIPPED.fact.token:
            raise StreamError(f"fact {token} does not fail")
        return SKIPPED

    async def retry(self, stream: str, writer: str, token: Token) -> SkippedFact:
        self.asked.append(("retry", stream, writer, token))
        return SKIPPED

    async def skipped(self, stream: str | None, limit: int) -> Sequence[SkippedFact]:
        self.asked.append(("skipped", stream, limit))
        return [SKIPPED]


class SkipsTests(ApiTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.skips = self.served.skips = FakeSkips()

    def decide(self, what: str, body: bytes = b'{"instance": "master", "token": 7}') -> Received:
        return self.post(body, JSON, path=f"/v1/streams/orders/{what}")

    def test_a_fact_is_skipped_or_retried_by_its_stream_writer_and_token(self) -> None:
        for what in ("skip", "retry"):
            self.assertEqual(self.decide(what).json, SHOWN)
            self.assertEqual(self.skips.asked[-1], (what, "orders", "master", 7))

    def test_a_row_with_a_number_too_large_for_a_float_is_listed(self) -> None:
        large = replace(SKIPPED, fact=Fact(Token(7), ("[1e999]",)))
        with patch(f"{__name__}.SKIPPED", large):
            for received in (self.get("/v1/skipped"), self.decide("skip"), self.decide("retry")):
                self.assertEqual(received.code, 200, received.body)
                self.assertIn(b'"rows":[[1e999]]', received.body)

    def test_a_refusal_has_its_reason(self) -> None:
        self.assert_refused(self.decide("skip", b'{"instance": "master", "token": 8}'), 400, "8 does not fail")

    def test_a_body_that_is_not_utf_8_is_refused(self) -> None:
        self.assert_refused(self.decide("skip", b'{"instance": "\xff", "token": 8}'), 400, "the body is not")

    def test_a_wrong_body_is_refused(self) -> None:
        for body in (
            b"",
            b"[]",
            b'{"instance": "master"}',
            b'{"instance": "m", "token": "7"}',
            b'{"token": 7, "x": 1}',
        ):
            self.assert_refused(self.decide("skip", body), 400, "token")

    def test_the_skipped_facts_are_listed(self) -> None:
        self.assertEqual(self.get("/v1/skipped").json, {"skipped": [SHOWN]})
        self.get("/v1/skipped?stream=orders&limit=5")
        self.assertEqual(self.skips.asked, [("skipped", None, 100), ("skipped", "orders", 5)])

    def test_a_master_refuses_and_names_the_place(self) -> None:
        self.served.skips = None
        self.assert_refused(self.decide("skip"), 404, "send this to the worker whose function fails")
