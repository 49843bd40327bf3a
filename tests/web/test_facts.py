"""Pages of facts, and appends, through the HTTP API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import (
    StoreError,
)
from replication.streams.definitions import StreamDefinition
from replication.web.facts import MAX_LINES
from tests.web.served import (
    FACTS,
    JSON,
    NDJSON,
    UPDATES,
    ApiTestCase,
    Client,
    FakeServed,
    fact,
    header,
    served_site,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from replication.wire.grammar import Token


class SinceTests(ApiTestCase):
    """What several writers have written since a token (docs/protocol/ids.md F6)."""

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

    def test_trap_42_an_invalid_token_is_refused(self) -> None:
        for token in ("m5~", "x", "m5~9.7", "-1"):
            code = 200 if token == "m5~" else 400
            self.assertEqual(self.get(f"{UPDATES}?since={token}").code, code, token)
        self.assert_refused(self.get(f"{UPDATES}?since=1&from=2"), 400, "'from'")
        self.assert_refused(self.get(f"{UPDATES}?since=1&limit=0"), 400, "limit")


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

    def test_a_writer_that_the_stream_does_not_have_is_a_404_with_those_that_it_has(self) -> None:
        self.served.keep("orders", "nope", [])
        answer = self.get(f"{UPDATES}?instance=nope&from=0&upto=10")
        self.assert_refused(answer, 404, "stream 'orders' has no writer 'nope' here; its writers: master, worker2")

    def test_a_declared_writer_that_has_not_written_has_an_empty_page(self) -> None:
        self.served.definitions[1] = StreamDefinition("caches", writers=("late",))
        self.served.keep("caches", "late", [])
        answer = self.get("/v1/streams/caches/updates?instance=late&from=0&upto=10")
        self.assertEqual(answer.json["updates"], [])

    def test_updates_never_reach_beyond_the_settled_position(self) -> None:
        self.assertEqual(self.get(f"{UPDATES}?instance=master&from=5&upto=99").json["upto_token"], 9)


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

    def test_an_unknown_stream_and_one_that_another_process_writes_are_refused(self) -> None:
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
        self.client.send(header("POST", FACTS, [NDJSON], len(body)) + body)

    def test_nothing_is_appended_before_all_lines_are_read(self) -> None:
        line = b'{"rows":[["a","new"]]}\n'
        self.assert_refused(self.post(line * 9 + b"{}\n"), 400, "line 10: ")
        self.assertEqual(self.served.appended, [])

    def test_more_lines_than_the_limit_are_refused_before_they_are_decoded(self) -> None:
        """Five million facts without a row are 55 MB, and took 973 MB of memory."""
        self.assert_refused(self.post(b"{}\n" * (MAX_LINES + 1)), 413, "more than 1000000 lines; send them in parts")
        self.assert_refused(self.post(b"{}\n" * MAX_LINES), 400, "line 1: ")


class SlowServed(FakeServed):
    """Answers when the test fires ``gate``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate: Deferred[None] = Deferred()

    async def append_texts(self, stream: str, facts: Iterable[Sequence[object]], key: str | None) -> Sequence[Token]:
        await self.gate
        return await super().append_texts(stream, facts, key)


class DisconnectionTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.served = SlowServed()
        _, site, _ = served_site(self.served)
        self.client = Client(site)
        self.client.send(header("POST", FACTS, [JSON], 11) + b'{"rows":[]}')

    def test_an_answer_waits_for_the_facts_to_be_durable(self) -> None:
        self.assertEqual(self.client.transport.value(), b"")
        self.served.gate.callback(None)
        self.assertEqual(self.client.received().json, {"ids": [2]})

    def test_a_client_that_disconnects_before_its_answer_has_appended(self) -> None:
        """Its facts are appended all the same: its request was complete."""
        self.client.protocol.connectionLost(Failure(ConnectionLost()))
        self.served.gate.callback(None)
        self.assertEqual(len(self.served.appended), 1)
        self.assertEqual(self.client.transport.value(), b"")
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_a_bug_after_the_client_has_disconnected_is_logged(self) -> None:
        self.client.protocol.connectionLost(Failure(ConnectionLost()))
        self.served.gate.errback(RuntimeError())
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
