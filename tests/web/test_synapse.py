"""The calls of a Synapse worker, through the HTTP API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replication.errors import (
    StreamError,
)
from tests.web.served import (
    JSON,
    ApiTestCase,
    Received,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


SYNAPSE = "/_synapse/replication/get_repl_stream_updates/orders/aBcDeFgHiJ"


class SynapseFormTests(ApiTestCase):
    def ask(self, query: str, path: str = SYNAPSE) -> Received:
        return self.get(f"{path}?{query}")

    def test_a_synapse_worker_gets_this_instances_rows(self) -> None:
        answer = self.ask("from_token=3&upto_token=7")
        self.assertEqual((answer.code, answer.headers["content-type"]), (200, "application/json"))
        self.assertEqual(answer.json, {"updates": [[5, ["a", "paid"]]], "upto_token": 7, "limited": False})
        self.assertEqual(self.served.asked, [("orders", None, 3, 7, 1_000)])

    def test_the_same_transaction_id_gets_a_fresh_answer(self) -> None:
        """Synapse keeps answers by this key for half an hour; this package ignores the key."""
        self.ask("from_token=3&upto_token=7")
        self.served.keep("orders", "master", [])
        self.assertEqual(self.ask("from_token=3&upto_token=7").json["updates"], [])

    def test_a_range_that_ends_before_it_begins_is_empty(self) -> None:
        """So it is after a reset of the writer."""
        answer = self.ask("from_token=7&upto_token=4")
        self.assertEqual(answer.json, {"updates": [], "upto_token": 4, "limited": False})

    def test_trap_47_nothing_but_the_page_is_in_an_answer(self) -> None:
        """Positions in an answer could be cached, or read by a client."""
        received = self.ask("from_token=1&upto_token=9")
        self.assertEqual(set(received.json), {"updates", "upto_token", "limited"})

    def test_errors_have_the_form_of_a_synapse(self) -> None:
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


class CallTests(ApiTestCase):
    """What the worker of a Synapse has its main process do."""

    SYNC = "/_synapse/replication/presence_set_state/%40u%3Aexample.com"

    def call(self, path: str, body: bytes = b"{}") -> Received:
        return self.client.ask("POST", path, body, [JSON])

    def test_requests_about_presence_are_answered_without_a_function(self) -> None:
        """Without an answer that worker would answer no ``/sync``."""
        for path in (self.SYNC, "/_synapse/replication/bump_presence_active_time/%40u%3Aexample.com"):
            self.assertEqual(self.call(path, b'{"state":{"presence":"online"}}').json, {})

    def test_an_application_answers_others(self) -> None:
        @self.served.synapse_requests.on("send_event")
        async def send(words: Sequence[str], body: dict[str, Any]) -> dict[str, Any]:
            return {"words": words, "stream_id": body["n"] + 1}

        answer = self.call("/_synapse/replication/send_event/%24e/aBcDeFgHiJ", b'{"n":1}')
        self.assertEqual(answer.json, {"words": ["$e", "aBcDeFgHiJ"], "stream_id": 2})

    def test_a_refusal_of_the_application_is_answered(self) -> None:
        @self.served.synapse_requests.on("send_event")
        def send(*_: object) -> None:
            raise StreamError("not today")

        self.assert_refused(self.call("/_synapse/replication/send_event/x"), 400, "not today")

    def test_a_request_without_a_function_is_named_as_synapse_does(self) -> None:
        answer = self.call("/_synapse/replication/send_event/x")
        self.assertEqual((answer.code, answer.json["errcode"]), (404, "M_UNRECOGNIZED"))
        self.assertIn("'send_event'", answer.json["error"])

    def test_a_body_that_is_no_object_is_refused(self) -> None:
        self.assertEqual(self.call(self.SYNC, b"[]").json["errcode"], "M_NOT_JSON")
        self.assertEqual(self.call(self.SYNC, b'"\xff').code, 400)
