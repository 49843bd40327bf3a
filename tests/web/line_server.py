"""A server of ``POST /v1/streams/NAME/append`` on a thread, which cuts connections as the test wants."""

from __future__ import annotations

import json
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from collections.abc import Sequence


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class LineServer(ThreadingTCPServer):
    """Answers as the API does.

    Each of ``cuts`` is for one batch: ``before`` and ``after`` close the connection before or after it is stored, and
    without an answer; bytes are an answer in place of its IDs, and the last one; None does nothing special.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *cuts: str | bytes | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cuts = [*cuts]
        self.offered = True
        self.silent = False
        self.status_line = b"200 OK"
        self.stored: list[str] = []  # the lines
        self.receipts: dict[tuple[str, int], Sequence[int]] = {}
        self.requests: list[str] = []  # method and path
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Pass over clients that close the connection."""

    def append(self, key: str, count: int, lines: Sequence[str]) -> Sequence[int]:
        """Return the IDs of the batch that begins there; it is stored if it is new."""
        if (key, count) not in self.receipts:
            first = len(self.stored) + 2
            self.stored += lines
            self.receipts[key, count] = range(first, first + len(lines))
        return self.receipts[key, count]


class Handler(StreamRequestHandler):
    server: LineServer

    def handle(self) -> None:
        first = self.rfile.readline().decode()
        headers = dict(line.decode().lower().split(": ", 1) for line in iter(self.rfile.readline, b"\r\n"))
        method, target, _ = first.split()
        self.server.requests.append(f"{method} {target}")
        if method == "GET" or self.server.status_line != b"200 OK":
            status = b"405 Method Not Allowed" if self.server.offered else b"404 Not Found"
            body = b'{"error": "No", "detail": "a sentence"}'
            status = status if method == "GET" else self.server.status_line
            self.wfile.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
            return
        self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        count = int(parse_qs(target.partition("?")[2])["after"][0])
        key = headers["idempotency-key"].strip()
        while size := int(self.rfile.readline() or b"0", 16):
            lines = self.rfile.read(size).decode().splitlines()
            self.rfile.readline()
            while lines:
                cut = self.server.cuts.pop(0) if self.server.cuts else None
                if cut == "before":
                    return
                if isinstance(cut, bytes):
                    self.wfile.write(chunk(cut))
                    return
                ids = self.server.append(key, count, lines)
                if cut == "after":
                    return
                if not self.server.silent:
                    self.wfile.write(chunk(json.dumps([*ids]).encode() + b"\n"))
                count, lines = count + len(ids), lines[len(ids) :]
        if self.server.silent:
            self.rfile.read()  # until the client closes
        self.wfile.write(b"0\r\n\r\n")
