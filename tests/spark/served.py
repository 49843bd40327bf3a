"""A fake of a master's HTTP API on a real socket, which can be unavailable for some requests."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from replication.streams.definitions import StreamDefinition
from replication.streams.interfaces import Page, StreamStatus, WriterStatus
from replication.web.pages import encode_page
from replication.web.status import describe_stream
from replication.wire.grammar import InstanceName, Token
from tests.answering import answering

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.streams.facts import Fact
    from replication.streams.history import Epoch


class FakeMaster:
    """Serves ``histories``, facts by writer, and records the requested paths in ``asked``.

    It answers ``unavailable`` requests with 503, then ``unknown`` requests with 404.
    """

    def __init__(self, row: tuple[str, ...] | None = None) -> None:
        self.row = row
        self.histories: dict[str, Sequence[Fact]] = {}
        self.epochs: dict[str, list[Epoch]] = {}  # the history of each writer; 404 without one
        self.reached: dict[str, int] = {}  # positions that differ from the last fact's token
        self.unavailable = self.unknown = 0
        self.secret: str | None = None
        self.asked: list[str] = []
        self.url = ""

    def position(self, writer: str) -> Token:
        facts = self.histories[writer]
        return Token(self.reached.get(writer, facts[-1].token if facts else 1))

    def answer(self, path: str, authorization: str | None) -> tuple[int, bytes]:
        self.asked.append(path)
        if self.unavailable:
            self.unavailable -= 1
            return 503, b'{"error": "away", "detail": "the database is restarting"}'
        if self.secret is not None and authorization != f"Bearer {self.secret}".encode().decode("latin-1"):
            return 401, b'{"error": "Unauthorized", "detail": "the secret is wrong"}'
        if self.unknown:
            self.unknown -= 1
            path = ""
        parts = urlsplit(path)
        match parts.path.split("/")[1:]:
            case ["v1", "streams", "orders"]:
                return 200, json.dumps(self._status()).encode()
            case ["v1", "streams", "orders", "history"]:
                epochs = self.epochs.get(dict(parse_qsl(parts.query))["instance"])
                if epochs is not None:
                    return 200, json.dumps({"epochs": epochs}).encode()
            case ["v1", "streams", "orders", "updates"]:
                return 200, self._page(dict(parse_qsl(parts.query)))
        return 404, b'{"error": "Not Found", "detail": "no such stream here"}'

    def _status(self) -> dict[str, Any]:
        writers = [
            WriterStatus(InstanceName(name), self.position(name), self.position(name), "writing")
            for name in self.histories
        ]
        return describe_stream(StreamStatus(StreamDefinition("orders", row=self.row), writers))

    def _page(self, query: dict[str, str]) -> bytes:
        after, upto, limit = (int(query[key]) for key in ("from", "upto", "limit"))
        end = min(upto, self.position(query["instance"]))
        facts: list[Fact] = []
        rows = 0
        for fact in self.histories[query["instance"]]:
            if not after < fact.token <= end:
                continue
            rows += len(fact.texts)
            if facts and rows > limit:
                return encode_page(Page(facts, facts[-1].token, limited=True))
            facts.append(fact)
        return encode_page(Page(facts, Token(max(after, end)), limited=False))


@contextmanager
def served(master: FakeMaster) -> Iterator[FakeMaster]:
    """Serve it at ``master.url`` until the block is left."""

    def answer(path: str, authorization: str | None) -> tuple[int, bytes]:
        return master.answer(path, authorization)  # a test may replace the method

    with answering(answer) as master.url:
        yield master
