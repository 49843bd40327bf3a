"""Tests of the relays that a request has passed through."""

from __future__ import annotations

from contextvars import copy_context

from twisted.web.http_headers import Headers

from replication.web.followers import AGAIN_AFTER
from replication.web.passage import HEADER, has_passed, note_passage
from tests.web.served import JSON, ApiTestCase

REPORT = "/v1/followers/worker1"


def sent(*arrived: bytes, here: bytes = b"c") -> tuple[bool, Headers]:
    """Return whether a request has been here, and the headers of what is requested to answer it."""
    found = has_passed(Headers({HEADER: [*arrived]}), here)
    return found, note_passage(Headers({b"x": [b"y"]}))


def test_what_is_sent_to_answer_a_request_names_all_relays_on_its_way() -> None:
    cases = [((), b"c"), ((b"a",), b"a, c"), ((b"a, b",), b"a, b, c"), ((b"a", b"b"), b"a, b, c")]
    for arrived, names in cases:
        assert copy_context().run(sent, *arrived) == (False, Headers({b"x": [b"y"], HEADER: [names]}))


def test_a_request_that_comes_back_is_known() -> None:
    assert copy_context().run(sent, b"a, c, b")[0]
    assert not copy_context().run(sent, b"a, cc")[0]


def test_what_a_process_sends_for_itself_names_no_relay() -> None:
    headers = Headers({b"x": [b"y"]})
    assert copy_context().run(note_passage, headers) is headers


class SiteTests(ApiTestCase):
    def test_a_request_that_comes_back_is_refused_and_others_are_answered(self) -> None:
        path, name = "/v1/streams/orders/history?instance=master", self.site.resource._name
        again = self.client.ask("GET", path, None, [(HEADER.decode(), b"other, %b" % name)])
        self.assert_refused(again, 508, "check catch_up of each")
        self.assertEqual(self.client.ask("GET", path, None, [(HEADER.decode(), "other")]).code, 200)
        self.assertEqual(self.get(path).code, 200)

    def test_a_report_that_comes_back_is_answered_and_not_passed_on(self) -> None:
        name = self.site.resource._name
        for body, code in ((b'{"positions": {}}', 200), (b"{}", 400)):
            answer = self.client.ask("PUT", REPORT, body, [JSON, (HEADER.decode(), name)])
            self.assertEqual(answer.code, code)
        self.assertIsNone(self.served.followers)  # it would answer 404
        answer = self.client.ask("PUT", REPORT, b'{"positions": {}}', [JSON, (HEADER.decode(), name)])
        self.assertEqual(answer.json, {"next": AGAIN_AFTER})
