"""How the command line calls HTTP, and what it says when that fails."""

from __future__ import annotations

import argparse
import json
import socket
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from replication.cli.http import HttpApi, HttpError, add_http_options, open_api
from replication.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Server(HTTPServer):
    """Answers as it is told, and remembers what it was asked."""

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
    """Yield the URL of a port that says ``line`` to the first caller and hangs up."""
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
    with closing(HttpApi(url, secret)) as api:
        return api.call(method, path, *rest)


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


def test_a_refusal_says_what_the_daemon_said(server: Server) -> None:
    server.answer = (404, json.dumps({"error": "Not Found", "detail": "no stream 'x' here"}).encode())
    error = failure(server.url)
    assert str(error) == f"{server.url} says 404: no stream 'x' here"
    assert not error.passing


def test_a_missing_secret_is_told_from_a_wrong_one(server: Server) -> None:
    server.answer = (401, json.dumps({"error": "Unauthorized", "detail": "a wrong secret"}).encode())
    assert str(failure(server.url)) == f"{server.url} says 401: it wants a secret: give --secret-file FILE"
    with pytest.raises(HttpError, match="says 401: a wrong secret"):
        call(server.url, secret="hush")


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_some_refusals_may_pass(server: Server, status: int) -> None:
    server.answer = (status, b"{}")
    assert failure(server.url).passing


def test_what_is_no_daemon_is_doubted(server: Server) -> None:
    server.answer = (200, b"<html>welcome</html>")
    error = failure(server.url)
    assert "is that a replication daemon?" in str(error)
    assert not error.passing


def test_a_connection_that_was_closed_meanwhile_is_opened_again(server: Server) -> None:
    with closing(HttpApi(server.url)) as api:
        api.call("GET", "/a")
        api.close()
        assert api.call("GET", "/b") == {}


def test_nobody_there_is_a_passing_failure_that_names_the_url() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    error = failure(url)
    assert str(error) == f"cannot reach {url}: Connection refused; is the daemon running there?"
    assert error.passing


def test_the_wire_dialled_by_mistake_is_told() -> None:
    with one_line_server(b"SERVER localhost\nPING 1\n") as url:
        error = failure(url)
    assert "speaks the replication wire, not HTTP" in str(error)
    assert not error.passing


def test_a_server_that_hangs_up_is_a_passing_failure() -> None:
    with one_line_server(b"") as url:
        assert failure(url).passing


@pytest.mark.parametrize("url", ["127.0.0.1:9093", "ftp://a", "http://", "http://a:b", "http://a:99999", ""])
def test_what_is_no_url_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="not the URL of an HTTP API"):
        HttpApi(url)


def options(*arguments: str) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser()
    add_http_options(parser)
    return parser, parser.parse_args(arguments)


def test_options_name_the_url_and_the_file_of_the_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hush\n")
    api = open_api(*options("--http", "https://h:1", "--secret-file", str(tmp_path / "secret")))
    assert api.url == "https://h:1"
    assert api._headers == {"Authorization": "Bearer hush"}
    assert open_api(*options()).url == "http://127.0.0.1:9093"


def test_a_wrong_url_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        open_api(*options("--http", "h:1"))
    assert stopped.value.code == 2
    assert "it looks like http://127.0.0.1:9093" in capsys.readouterr().err


def test_a_secret_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the secret file"):
        open_api(*options("--secret-file", str(tmp_path / "absent")))
