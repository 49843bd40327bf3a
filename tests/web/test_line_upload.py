"""The client of appends by lines: answers, cuts, refusals, and bounds."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, closing, contextmanager, suppress
from socket import SHUT_RD
from threading import Thread
from time import sleep
from typing import TYPE_CHECKING

import pytest

from replication.web import line_upload
from replication.web.blocking_client import HttpClient, HttpError, UnavailableError
from replication.web.line_upload import AnswerParser, LineUpload
from tests.web.line_server import LineServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ANSWER = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nServer: x\r\ntransfer-encoding:  chunked\r\n\r\n"
    b"4\r\n[2]\n\r\n8;x=y\r\n[3, 4]\n[\r\n3\r\n5]\n\r\n0\r\n\r\n"
)
REFUSED = b'{"error": "Bad Request", "detail": "line 2: no", "status": 400}\n'
LATER = b'{"error": "Service Unavailable", "detail": "disk full", "status": 503}\n'


class Upload:
    """A LineUpload to a server, and the IDs that it received."""

    def __init__(self, server: LineServer, patience: float = 60.0) -> None:
        self.now = 0.0
        self.client = HttpClient(server.url, patience=patience, clock=lambda: self.now, sleep=self.pass_time)
        self.ids: list[int] = []
        self.lines = LineUpload(self.client, "orders/x", self.ids.extend)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def make_upload() -> Iterator[Callable[..., Upload]]:
    """Make uploads that are closed after the test."""
    with ExitStack() as stack:

        def make(server: LineServer, patience: float = 60.0) -> Upload:
            upload = Upload(server, patience)
            stack.enter_context(closing(upload.client))
            return upload

        yield make


@pytest.fixture
def server() -> Iterator[LineServer]:
    with LineServer() as found:
        yield found


@contextmanager
def open_pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def test_an_answer_is_parsed_however_it_is_cut() -> None:
    for size in (1, 2, 3, 7, 50, len(ANSWER)):
        parser = AnswerParser()
        parts = [ANSWER[start : start + size] for start in range(0, len(ANSWER), size)]
        assert [line for part in parts for line in parser.feed(part)] == [b"[2]", b"[3, 4]", b"[5]"], size
        assert (parser.status, parser.reason, parser.ended, parser.rest) == (200, "OK", True, b"")


def test_an_answer_with_a_length_is_its_rest() -> None:
    parser = AnswerParser()
    assert [*parser.feed(b"HTTP/1.1 503 Go Away\r\nContent-Length: 3\r\n\r\nab")] == []
    assert not parser.ended
    assert [*parser.feed(b"c")] == []
    assert (parser.status, parser.reason, parser.rest, parser.ended) == (503, "Go Away", b"abc", True)


def test_an_answer_without_a_body_has_ended_and_another_protocol_is_refused() -> None:
    parser = AnswerParser()
    assert [*parser.feed(b"HTTP/1.1 204 No Content\r\n\r\n")] == []
    assert parser.ended
    with pytest.raises(ValueError, match="SERVER"):
        [*AnswerParser().feed(b"SERVER example.com\r\n\r\n")]


def test_lines_are_answered_in_their_order(make_upload: Callable[..., Upload], server: LineServer) -> None:
    upload = make_upload(server)
    upload.lines.add([b"a"])
    upload.lines.add([b"b", b"c"])
    upload.lines.finish()
    assert (server.stored, upload.ids) == (["a", "b", "c"], [2, 3, 4])
    assert server.requests == ["POST /v1/streams/orders%2Fx/append?after=0"]


def test_without_lines_there_is_no_request(make_upload: Callable[..., Upload], server: LineServer) -> None:
    upload = make_upload(server)
    upload.lines.finish()
    assert server.requests == []


def test_the_call_is_offered_or_not(make_upload: Callable[..., Upload], server: LineServer) -> None:
    assert make_upload(server).lines.is_offered()
    server.offered = False
    assert not make_upload(server).lines.is_offered()
    assert set(server.requests) == {"GET /v1/streams/orders%2Fx/append"}


@pytest.mark.parametrize("cuts", [["before"], ["after"], [None, "after"], ["after", "before", "after"], [LATER]])
def test_after_a_cut_what_has_no_answer_is_sent_again_and_stored_once(
    make_upload: Callable[..., Upload], cuts: list[str | bytes | None]
) -> None:
    with LineServer(*cuts) as server:
        upload = make_upload(server)
        for line in (b"a", b"b", b"c"):
            upload.lines.add([line])
        upload.lines.finish()
        assert (server.stored, upload.ids) == (["a", "b", "c"], [2, 3, 4])
        assert len(server.requests) > 1


def test_a_refusal_is_not_retried_and_counts_from_the_first_line_of_its_request(
    make_upload: Callable[..., Upload],
) -> None:
    with LineServer(None, "before", REFUSED) as server:
        upload = make_upload(server)
        upload.lines.add([b"a"])
        with pytest.raises(HttpError, match="answers 400: line 2: no") as caught:
            for line in (b"b", b"c", b"d"):
                upload.lines.add([line])
                upload.lines.finish()
        assert not isinstance(caught.value, UnavailableError)
        assert (upload.ids, upload.lines.first) == ([2], 1)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b'{"a": 1}', "Object missing required field `status`"),
        (b"5", "Expected `object | array`"),
        (b"[]", "0 IDs for 1 lines"),
        (b"[2, 3]", "2 IDs for 1 lines"),
        (b'["\\u001b[31m"]', "Expected `int`"),
        (b"<html>", "without JSON"),
        (b"[" * 100_000, "without JSON"),
    ],
)
def test_an_answer_of_another_program_is_an_error_and_acknowledges_nothing(
    answer: bytes, why: str, make_upload: Callable[..., Upload]
) -> None:
    with LineServer(*2 * [answer + b"\n"]) as server:  # a reset may cut a long answer: then the client tries again
        upload = make_upload(server)
        with pytest.raises(HttpError, match=why) as caught:
            upload.lines.add([b"a"])
            upload.lines.finish()
    assert not isinstance(caught.value, UnavailableError)
    assert upload.ids == []


def test_lines_of_an_answer_with_another_status_are_no_ids() -> None:
    parser = AnswerParser()
    assert [*parser.feed(b"HTTP/1.1 405 Not Allowed\r\nContent-Length: 8\r\n\r\n[2]\n[3]\n")] == []
    assert (parser.rest, parser.ended) == (b"[2]\n[3]\n", True)


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n"])
def test_an_answer_without_end_is_refused(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_upload, "MAX_KEPT", 1_000)
    parser = AnswerParser()
    assert [*parser.feed(head + b"x" * 900)] == []
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        [*parser.feed(b"x" * 900)]


def test_any_number_of_answers_100_is_passed_over() -> None:
    parser = AnswerParser()
    assert [*parser.feed(b"HTTP/1.1 100 Continue\r\n\r\n" * 2_000 + ANSWER)] == [b"[2]", b"[3, 4]", b"[5]"]


def test_answers_100_without_end_are_refused() -> None:
    parser = AnswerParser()
    with pytest.raises(ValueError, match="bytes of headers"):
        [*parser.feed(b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000)]


@pytest.mark.parametrize("rest", [b"Transfer-Encoding: chunked\r\n\r\n-5\r\n[2]\n", b"Content-Length: -5\r\n\r\n[2]\n"])
def test_a_part_of_an_answer_has_no_negative_size(rest: bytes) -> None:
    parser = AnswerParser()
    with pytest.raises(ValueError, match="the size -5"):
        [*parser.feed(b"HTTP/1.1 200 OK\r\n" + rest)]


def test_a_status_is_a_refusal_too_and_a_temporary_one_is_retried_for_the_patience(
    make_upload: Callable[..., Upload], server: LineServer
) -> None:
    server.status_line = b"403 Forbidden"
    upload = make_upload(server)
    with pytest.raises(HttpError, match="answers 403: a sentence"):
        upload.lines.add([b"a"])
        upload.lines.finish()
    server.status_line = b"503 Service Unavailable"
    upload = make_upload(server, patience=5.0)
    with pytest.raises(UnavailableError, match="answers 503"):
        upload.lines.add([b"a"])
        upload.lines.finish()
    assert 5.0 <= upload.now < 10.0  # the patience of one method, or of two: a server that does not read cuts both


def test_too_many_lines_without_an_answer_are_waited_for(
    make_upload: Callable[..., Upload], server: LineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_upload, "MAX_UNANSWERED", 10)
    upload = make_upload(server)
    for _ in range(20):
        upload.lines.add([b"12345"])
        assert len(server.stored) - len(upload.ids) <= 2
    assert len(upload.ids) >= 18


def test_a_server_that_never_answers_is_unavailable(
    make_upload: Callable[..., Upload], server: LineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_upload, "TIMEOUT", 0.05)
    server.silent = True
    upload = make_upload(server, patience=0.0)
    with pytest.raises(UnavailableError, match="did not answer in time"):
        upload.lines.add([b"a"])
        upload.lines.finish()


def test_a_server_that_reads_nothing_is_given_up_although_its_answer_drips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_upload, "TIMEOUT", 0.3)
    monkeypatch.setattr(line_upload, "MAX_UNANSWERED", 2**24)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                for _ in range(100):
                    connection.sendall(b"x")
                    sleep(0.05)

        dripping = Thread(target=drip)
        dripping.start()
        with closing(HttpClient(f"http://127.0.0.1:{listening.getsockname()[1]}")) as client:
            lines = LineUpload(client, "orders", lambda _: None)
            with pytest.raises(UnavailableError, match="did not answer in time"):
                lines.add([b"x" * 2**23, b"x" * 2**23])
        dripping.join()


def test_lines_that_come_slowly_do_not_hide_that_no_answer_comes(
    make_upload: Callable[..., Upload], server: LineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_upload, "TIMEOUT", 1.0)
    server.silent = True
    with open_pipe() as (reader, writer):
        upload = make_upload(server, patience=0.0)
        os.write(writer, b"x")  # the source can always be read
        with pytest.raises(UnavailableError, match="did not answer in time"):
            for _ in range(200):
                upload.lines.add([b"a"])
                upload.lines.wait_for(reader)
                sleep(0.05)


def test_lines_that_come_slowly_do_not_hide_that_each_connection_is_cut(make_upload: Callable[..., Upload]) -> None:
    with LineServer(*["before"] * 1000) as server, open_pipe() as (reader, writer):
        upload = make_upload(server, patience=10.0)
        os.write(writer, b"x")
        with pytest.raises(UnavailableError):
            for _ in range(200):
                upload.lines.add([b"a"])
                upload.now += 0.5
                upload.lines.wait_for(reader)
                sleep(0.01)
        assert 10.0 <= upload.now < 20.0


def test_the_patience_for_lines_begins_with_the_first_one_that_has_no_answer(
    make_upload: Callable[..., Upload],
) -> None:
    with LineServer(None, "before", None) as server:
        upload = make_upload(server, patience=10.0)
        for line in (b"a", b"b"):
            upload.now += 1000.0
            upload.lines.add([line])
            upload.lines._exchange(lambda: not upload.lines._unanswered)
        assert (server.stored, upload.ids) == (["a", "b"], [2, 3])


def test_an_unreachable_server_is_unavailable(make_upload: Callable[..., Upload]) -> None:
    with LineServer() as gone:
        pass
    upload = make_upload(gone, patience=1.0)
    with pytest.raises(UnavailableError, match="cannot reach"):
        upload.lines.add([b"a"])
    assert upload.now == pytest.approx(1.0)


def test_the_patience_begins_anew_with_progress() -> None:
    now = [0.0]
    calls: list[None] = []
    client = HttpClient("http://127.0.0.1:1", patience=60.0, clock=lambda: now[0], sleep=lambda _: None)

    def request() -> str:
        calls.append(None)
        now[0] += 100.0
        if len(calls) < 4:
            raise UnavailableError("cut")
        return "done"

    with pytest.raises(UnavailableError):
        client.retry(request)
    calls.clear()
    assert client.retry(request, lambda: now[0]) == "done"
    calls.clear()
    with pytest.raises(UnavailableError):
        client.retry(request, lambda: now[0] - 60.0)


def test_a_connection_that_ends_while_no_line_waits_is_no_error(
    make_upload: Callable[..., Upload], server: LineServer
) -> None:
    with open_pipe() as (reader, _):
        upload = make_upload(server, patience=0.0)
        upload.lines.add([b"a"])
        upload.lines._exchange(lambda: upload.ids == [2])
        connection = upload.lines._socket
        assert connection is not None
        connection.shutdown(SHUT_RD)  # as if the server had ended, hours later
        upload.lines.wait_for(reader)
        upload.lines.add([b"b"])
        upload.lines.finish()
        assert (server.stored, upload.ids) == (["a", "b"], [2, 3])


def test_the_end_of_the_lines_has_its_own_time_to_be_sent(
    make_upload: Callable[..., Upload], server: LineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the last line was sent a minute ago, the request was given up at once."""
    upload = make_upload(server)
    upload.lines.add([b"a"])
    upload.lines._unanswered.append(b"b")
    upload.lines._stuck_since = 0.0
    sent: list[float] = []
    monkeypatch.setattr(LineUpload, "_exchange", lambda lines, _done: sent.append(lines._stuck_since))
    upload.lines.finish()
    assert sent[0] > 0.0


def test_ids_are_received_while_a_source_is_waited_for(make_upload: Callable[..., Upload], server: LineServer) -> None:
    with open_pipe() as (reader, writer):
        upload = make_upload(server)
        upload.lines.wait_for(reader)  # nothing was sent, so nothing can be received

        def take(ids: list[int]) -> None:
            upload.ids.extend(ids)
            os.write(writer, b"x")

        upload.lines._on_ids = take  # type: ignore[assignment]
        upload.lines.add([b"a"])  # which may receive the answer, too
        upload.lines.wait_for(reader)
        assert upload.ids == [2]
