"""A stand-in for a master's HTTP API, on a real socket: histories by writer, which may be away for some answers."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from replication.streams.registry import StreamDefinition
from replication.streams.seams import Page, StreamStatus, WriterStatus
from replication.web.facts import spell_page
from replication.web.status import describe_stream
from replication.wire.grammar import InstanceName, Token
from tests.answering import answering

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.streams.facts import Fact


class FakeMaster:
    """Serves ``histories``; ``asked`` are the paths.

    It says 503 as often as ``away`` says, then 404 as often as ``ignorant`` does.
    """

    def __init__(self, row: tuple[str, ...] | None = None) -> None:
        self.row = row
        self.histories: dict[str, Sequence[Fact]] = {}
        self.reached: dict[str, int] = {}  # positions, where they are not the last facts
        self.away = self.ignorant = 0
        self.secret: str | None = None
        self.asked: list[str] = []
        self.url = ""

    def position(self, writer: str) -> Token:
        facts = self.histories[writer]
        return Token(self.reached.get(writer, facts[-1].token if facts else 1))

    def answer(self, path: str, authorization: str | None) -> tuple[int, bytes]:
        self.asked.append(path)
        if self.away:
            self.away -= 1
            return 503, b'{"error": "away", "detail": "the database is restarting"}'
        if self.secret is not None and authorization != f"Bearer {self.secret}".encode().decode("latin-1"):
            return 401, b'{"error": "Unauthorized", "detail": "the secret is wrong"}'
        if self.ignorant:
            self.ignorant -= 1
            path = ""
        parts = urlsplit(path)
        match parts.path.split("/")[1:]:
            case ["v1", "streams", "orders"]:
                return 200, json.dumps(self._status()).encode()
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
                return spell_page(Page(facts, facts[-1].token, limited=True))
            facts.append(fact)
        return spell_page(Page(facts, Token(max(after, end)), limited=False))


@contextmanager
def served(master: FakeMaster) -> Iterator[FakeMaster]:
    """Serve it at ``master.url`` until the block is left."""

    def answer(path: str, authorization: str | None) -> tuple[int, bytes]:
        return master.answer(path, authorization)  # which a test may replace

    with answering(answer) as master.url:
        yield master
