"""Answers that last, or grow, without an end."""

from __future__ import annotations

import socket
from contextlib import closing, contextmanager, suppress
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING

import pytest

from replication.web import bounded_answer
from replication.web.blocking_client import HttpClient, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

OK = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def sending(head: bytes, part: bytes, pause: float) -> Iterator[str]:
    """Yield the URL of a port that sends ``head``, and then ``part`` again and again until the block is left."""
    left = Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.recv(65536)
                connection.sendall(head)
                while not left.wait(pause):
                    connection.sendall(part)

        thread = Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        left.set()
        thread.join()


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (OK + b"Content-Length: 100000\r\n\r\n", b" "),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (OK + b"X: ", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
)
def test_an_answer_that_drips_is_given_up(head: bytes, part: bytes) -> None:
    with sending(head, part, 0.05) as url, closing(HttpClient(url, timeout=0.5)) as client:
        begun = monotonic()
        with pytest.raises(UnavailableError, match="did not answer in time"):
            client.call("GET", "/health")
        assert 0.4 < monotonic() - begun < 5.0


def test_a_large_answer_has_more_time() -> None:
    body = b"1" + b" " * (4 * bounded_answer.SLOWEST)
    head = OK + b"Content-Length: %d\r\n\r\n" % (len(body) + 4) + body
    with sending(head, b" ", 0.2) as url, closing(HttpClient(url, timeout=0.4)) as client:
        assert client.call("GET", "/health") == 1


def test_answers_100_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_answer, "MAX_HEADERS", 10_000)
    with (
        sending(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100, 0.001) as url,
        closing(HttpClient(url)) as client,
        pytest.raises(UnavailableError, match="its answer has more than 10000 bytes"),
    ):
        client.call("GET", "/health")


def test_a_chunk_with_a_negative_size_is_no_http() -> None:
    head = OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n0\r\n\r\n"
    with (
        sending(head, b"", 0.05) as url,
        closing(HttpClient(url)) as client,
        pytest.raises(UnavailableError, match="its answer is no HTTP"),
    ):
        client.call("GET", "/health")
