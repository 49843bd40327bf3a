"""The blocking client: requests, errors, retries, and pages of facts."""

from __future__ import annotations

import json
import socket
from contextlib import closing, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from ssl import SSLEOFError
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from replication.errors import ConfigError
from replication.web import blocking_client
from replication.web.blocking_client import HttpClient, HttpError, StreamInfo, UnavailableError
from replication.web.pages import NoPageError
from replication.wire.grammar import Token
from tests.answering import answering
from tests.segments.histories import MASTER, OTHER, fact
from tests.spark.served import FakeMaster, served

if TYPE_CHECKING:
    from collections.abc import Iterator


class Server(HTTPServer):
    """Answers every request with ``answer``, and records the requests."""

    answer: tuple[int, bytes] = (200, b"{}")

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Responder)
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Responder(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.command, self.path, dict(self.headers), body))
        status, answer = self.server.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        thread = Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@contextmanager
def one_line_server(line: bytes) -> Iterator[str]:
    """Yield the URL of a port that sends ``line`` to the first client and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(line)

        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


def call(url: str, method: str = "GET", path: str = "/v1/streams", *rest: Any, secret: str | None = None) -> Any:
    with closing(HttpClient(url, secret)) as client:
        return client.call(method, path, *rest)


def failure(url: str) -> HttpError:
    with pytest.raises(HttpError) as caught:
        call(url)
    assert "\n" not in str(caught.value)
    return caught.value


def test_an_answer_is_decoded(server: Server) -> None:
    server.answer = (200, b'{"ids":[1,2]}')
    assert call(server.url + "/") == {"ids": [1, 2]}
    assert server.asked[0][:2] == ("GET", "/v1/streams")


def test_a_body_and_its_headers_are_sent_with_the_secret(server: Server) -> None:
    call(server.url, "POST", "/x", b"body", {"Idempotency-Key": "k"}, secret="hush")
    method, path, headers, body = server.asked[0]
    assert (method, path, body) == ("POST", "/x", b"body")
    assert headers["Authorization"] == "Bearer hush"
    assert headers["Idempotency-Key"] == "k"


def test_a_path_in_the_url_stays_in_front(server: Server) -> None:
    call(server.url + "/behind/proxy/")
    assert server.asked[0][1] == "/behind/proxy/v1/streams"


def test_an_error_has_the_detail_of_the_answer(server: Server) -> None:
    server.answer = (404, json.dumps({"error": "Not Found", "detail": "no stream 'x' here"}).encode())
    error = failure(server.url)
    assert str(error) == f"{server.url} answers 404: no stream 'x' here"
    assert not isinstance(error, UnavailableError)


@pytest.mark.parametrize("status", [400, 503])
def test_an_answer_that_repeats_the_secret_is_reported_without_it(server: Server, status: int) -> None:
    server.answer = (status, b'{"detail": "wrong header: Bearer hush2hush"}')
    with pytest.raises(HttpError) as caught:
        call(server.url, secret="hush2hush")
    assert str(caught.value) == f"{server.url} answers {status}: wrong header: Bearer …"
    assert caught.value.detail == "wrong header: Bearer …"


def test_a_status_line_that_repeats_the_secret_is_reported_without_it() -> None:
    for line in (b"HTTP/1.1 403 no hush2hush\r\n\r\n", b"HTTP/1.1 x hush2hush\r\n\r\n"):
        with one_line_server(line) as url, pytest.raises(HttpError) as caught:
            call(url, secret="hush2hush")
        assert "hush" not in str(caught.value)


def test_a_missing_secret_and_a_wrong_one_have_different_messages(server: Server) -> None:
    server.answer = (401, json.dumps({"error": "Unauthorized", "detail": "a wrong secret"}).encode())
    assert str(failure(server.url)) == f"{server.url} answers 401: it requires a secret: give --secret-file FILE"
    with pytest.raises(HttpError, match="answers 401: a wrong secret"):
        call(server.url, secret="hush")


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_after_a_temporary_status_the_api_is_unavailable(server: Server, status: int) -> None:
    server.answer = (status, b"{}")
    assert isinstance(failure(server.url), UnavailableError)


def test_an_answer_that_is_not_json_raises_the_question_of_what_serves_there(server: Server) -> None:
    server.answer = (200, b"<html>welcome</html>")
    error = failure(server.url)
    assert "is that a replication daemon?" in str(error)
    assert not isinstance(error, UnavailableError)


def test_a_deep_answer_is_not_json_of_this_api(server: Server) -> None:
    server.answer = (200, b"[" * 100_000)
    assert "is that a replication daemon?" in str(failure(server.url))
    server.answer = (404, b"[" * 100_000)
    assert "answers 404: Not Found" in str(failure(server.url))


def test_an_answer_is_read_up_to_the_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_client, "MAX_ANSWER", 10)
    server.answer = (200, b'"12345678"')
    with closing(HttpClient(server.url)) as client:
        assert client.call("GET", "/a") == "12345678"
        server.answer = (200, b'"123456789"')
        with pytest.raises(HttpError, match="answers with more than 10 bytes"):
            client.call("GET", "/b")
        server.answer = (200, b"1")
        assert client.call("GET", "/c") == 1


@pytest.mark.parametrize("head", [b"Content-Length: 9", b"Transfer-Encoding: chunked"])
def test_an_answer_that_is_cut_off_is_unavailable(head: bytes) -> None:
    with one_line_server(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n5\r\n1") as url:
        assert isinstance(failure(url), UnavailableError)


def test_an_answer_with_very_many_values_is_not_decoded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_client, "MOST_VALUES", 10)
    server.answer = (200, b"[" + b"[]," * 10 + b"[]]")
    assert "more than 10 values; is that a replication daemon?" in str(failure(server.url))


def test_a_huge_error_is_not_that_of_a_daemon(server: Server) -> None:
    server.answer = (400, json.dumps({"detail": "x" * 2**20}).encode())
    assert str(failure(server.url)).endswith("answers 400: Bad Request")


def test_a_closed_connection_is_opened_again(server: Server) -> None:
    with closing(HttpClient(server.url)) as client:
        client.call("GET", "/a")
        client.close()
        assert client.call("GET", "/b") == {}


def test_a_closed_port_is_unavailable_and_the_url_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    error = failure(url)
    assert str(error) == f"cannot reach {url}: Connection refused; is the daemon running there?"
    assert isinstance(error, UnavailableError)


def test_a_wire_port_is_recognized() -> None:
    with one_line_server(b"SERVER localhost\nPING 1\n") as url:
        error = failure(url)
    assert "is a wire port, not HTTP" in str(error)
    assert not isinstance(error, UnavailableError)


def test_a_server_that_closes_the_connection_is_unavailable() -> None:
    with one_line_server(b"") as url:
        error = failure(url)
    assert isinstance(error, UnavailableError)
    assert str(error).endswith(f"; if that port has TLS, write https{url.removeprefix('http')}")


@pytest.mark.parametrize("error", [BrokenPipeError(), ConnectionResetError(), SSLEOFError(8, "EOF occurred")])
def test_a_tls_connection_that_is_closed_may_lack_a_certificate_of_the_client(error: Exception) -> None:
    """With TLS 1.3 the server refuses it after the handshake, and its alert may be lost."""
    found = str(HttpClient("https://h").failure(error))
    assert found.startswith("https://h closed the connection: perhaps it refuses a client without a certificate: give")


def test_a_port_without_tls_fails_soon_with_the_url_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never answers a handshake: it waits for the end of an HTTP request."""
    monkeypatch.setattr(blocking_client, "CONNECT_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        where = f"127.0.0.1:{listening.getsockname()[1]}"
        error = failure(f"https://{where}")
    assert f"no TLS at https://{where}: " in str(error)
    assert f"write http://{where}" in str(error)


FACTS = [fact(token, *[["é", token, index] for index in range(token % 3 + 1)]) for token in range(2, 40, 2)]


@pytest.fixture
def master() -> Iterator[FakeMaster]:
    with served(FakeMaster(("a", "b", "c"))) as fake:
        fake.histories = {MASTER: FACTS, OTHER: []}
        yield fake


class Time:
    """A clock that moves while the client sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def patient(url: str, patience: float) -> tuple[HttpClient, Time]:
    time = Time()
    return HttpClient(url, patience=patience, clock=time, sleep=time.sleep), time


def test_a_streams_fields_and_positions(master: FakeMaster) -> None:
    with closing(HttpClient(master.url)) as client:
        assert client.stream("orders") == StreamInfo(("a", "b", "c"), {MASTER: Token(38), OTHER: Token(1)})
        master.row = None
        assert client.stream("orders").fields is None


@pytest.mark.parametrize("body", ["null", "[]", '{"row": 3}', '{"epochs": [["a"]]}', "<html>"])
def test_what_another_program_answers_is_refused(body: str) -> None:
    with answering(lambda _path, _authorization: (200, body.encode())) as url, closing(HttpClient(url)) as client:
        for ask in (partial(client.stream, "orders"), partial(client.history, "orders", "master")):
            with pytest.raises(
                HttpError, match=f"^{url} answers (other JSON than|without JSON; is that) a replication"
            ):
                ask()


def test_pages_put_together_are_the_history(master: FakeMaster) -> None:
    with closing(HttpClient(master.url)) as client:
        pages = list(client.pages("orders", MASTER, after=6, upto=30))
        assert [each for page in pages for each in page.facts] == FACTS[3:15]
        assert client.page("orders", MASTER, after=0, upto=38, limit=5).facts == FACTS[:2]
        assert list(client.pages("orders", MASTER, after=30, upto=30)) == []


@pytest.mark.parametrize("length", [b"", b"Content-Length: %d\r\n"], ids=["without a length", "with a length"])
def test_pages_shrink_while_answers_are_cut_off_and_grow_again(length: bytes) -> None:
    """A proxy that cuts off long answers must not stop a query of Spark (docs/protocol/following.md E5)."""
    limits: list[int] = []
    page = b'{"updates":[[5,"row"]],"upto_token":9,"limited":false}'
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for _ in range(6):
                connection, _ = listening.accept()
                with connection:
                    limits.append(int(connection.recv(65536).partition(b"limit=")[2].split()[0]))
                    head = (
                        b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + length.replace(b"%d", b"%d" % len(page)) + b"\r\n"
                    )
                    connection.sendall(head + (page if limits[-1] < 1_000 else page[:-1]))

        thread = Thread(target=serve, daemon=True)
        thread.start()
        client, _ = patient(f"http://127.0.0.1:{listening.getsockname()[1]}", 60.0)
        for limit in (10_000, 10_000, 10, 10_000):
            assert client.page("orders", MASTER, after=0, upto=9, limit=limit).upto == 9
        client.close()
        thread.join()
    assert limits == [10_000, 1_250, 156, 196, 10, 308]


@pytest.mark.parametrize(("rows", "kind"), [(8, UnavailableError), (1, NoPageError)])
def test_what_is_no_page_of_one_row_either_is_an_error(rows: int, kind: type[Exception]) -> None:
    with (
        one_line_server(b'HTTP/1.1 200 OK\r\n\r\n{"updates":[[5') as url,
        closing(HttpClient(url)) as client,
        pytest.raises(kind, match="not a page of updates"),
    ):
        client.page("orders", MASTER, after=0, upto=9, limit=rows)


def test_a_permanent_error_is_not_retried(master: FakeMaster) -> None:
    with closing(HttpClient(master.url, patience=60)) as client, pytest.raises(HttpError, match="404: no such stream"):
        client.stream("odrers")
    assert len(master.asked) == 1


def test_a_stream_that_exists_may_be_unknown_to_a_process_that_has_just_started(master: FakeMaster) -> None:
    master.unknown = 1
    with closing(HttpClient(master.url, patience=60, stream_exists=True, sleep=lambda _: None)) as client:
        assert client.stream("orders").positions


def test_an_unavailable_api_is_called_again_ever_more_slowly(master: FakeMaster) -> None:
    master.unavailable = 7
    retries: list[UnavailableError] = []
    time = Time()
    client = HttpClient(master.url, patience=60.0, on_retry=retries.append, clock=time, sleep=time.sleep)
    with closing(client):
        assert client.stream("orders").positions[MASTER] == 38
    assert len(master.asked) == 8
    assert time.now == pytest.approx(0.1 + 0.2 + 0.4 + 0.8 + 1.6 + 2.0 + 2.0)
    assert "answers 503: the database is restarting" in str(retries[0])


def test_patience_ends_with_one_last_attempt(master: FakeMaster) -> None:
    master.unavailable = 1_000
    client, time = patient(master.url, 5.0)
    with closing(client), pytest.raises(UnavailableError, match="answers 503: the database is restarting"):
        client.page("orders", MASTER, after=0, upto=9)
    assert time.now == pytest.approx(5.0)
    assert len(master.asked) == 7


def test_without_patience_there_is_one_attempt(master: FakeMaster) -> None:
    master.unavailable = 1
    with closing(HttpClient(master.url)) as client, pytest.raises(UnavailableError):
        client.stream("orders")
    assert len(master.asked) == 1


def test_facts_that_are_not_there_yet_are_awaited(master: FakeMaster) -> None:
    """A master that was killed may publish a little later what it had published before."""
    master.reached[MASTER] = 10
    client, time = patient(master.url, 60.0)

    def come_back(seconds: float) -> None:
        time.sleep(seconds)
        if time.now > 3:
            master.reached.clear()

    client.sleep = come_back
    with closing(client):
        found = [each for page in client.pages("orders", MASTER, after=0, upto=38) for each in page.facts]
    assert found == FACTS


def test_a_position_that_went_back_for_good_is_an_error(master: FakeMaster) -> None:
    master.reached[MASTER] = 10
    client, _ = patient(master.url, 60.0)
    with closing(client), pytest.raises(UnavailableError, match="has no facts of master after 10 yet"):
        list(client.pages("orders", MASTER, after=0, upto=38))


def test_an_url_that_is_not_one_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="not the URL of an HTTP API: 'h:1'"):
        HttpClient("h:1")


@pytest.mark.parametrize("date", ["Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "not a date"])
def test_a_date_that_is_none_is_left_out(date: str) -> None:
    assert blocking_client._read_date(date) is None
