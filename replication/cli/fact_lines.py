"""The lines that ``replication tail`` prints for facts: RDATA, JSON, fields by name, and colours for a terminal."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, Final

from twisted.internet.defer import Deferred

from replication.errors import ReplicationError, RowError, escape
from replication.session.encoder import encode_facts
from replication.synapse import STREAMS, since_1_159
from replication.wire import grammar
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from replication.streams.facts import Fact
    from replication.streams.typed_rows import Row, TypedStream
    from replication.web.client import HttpCatchUp
    from replication.wire.grammar import InstanceName, StreamName

_TYPED: Final[Sequence[TypedStream[Any]]] = (*since_1_159.STREAMS, *STREAMS)  # rows of newer releases have more fields
_ODD: Final = re.compile(rb"[^\n\t -~]")
RETRY_AFTER: Final = 5.0  # seconds until the names are requested again
_NAME, _TOKEN, _QUIET, _END = "\x1b[36m", "\x1b[1m", "\x1b[2m", "\x1b[0m"


def encode_rdata(stream: StreamName, instance: InstanceName, facts: Sequence[Fact]) -> bytes:
    """Return the RDATA lines of ``facts``, as a master sends them (docs/protocol/wire.md A4)."""
    zero = Token(0)  # no POSITION line
    lines = encode_facts(stream, instance, facts, after=zero, upto=zero, line_limit=sys.maxsize)
    return escape_rows(b"".join([each.data for each in lines]))


def encode_json(stream: StreamName, instance: InstanceName, facts: Sequence[Fact]) -> bytes:
    """Return a line per row: ``{"stream", "instance", "token", "row"}``, with the row's own JSON text.

    Rows of Synapse's streams have ``fields`` as well: the same values by name.
    """
    head = f'{{"stream":{grammar.encode_row(stream)},"instance":{grammar.encode_row(instance)},"token":'
    lines = []
    for token, texts in facts:
        for text in texts:
            row = _read_row(stream, text)
            fields = "" if row is None else f',"fields":{grammar.encode_again(row.named())}'
            lines.append(f'{head}{token},"row":{text}{fields}}}\n')
    return escape_rows("".join(lines).encode())


def encode_typed(stream: StreamName, instance: InstanceName, facts: Sequence[Fact]) -> bytes:
    """Return a line per row: stream, writer, token, and the fields by name; the JSON text for other streams."""
    lines = [
        f"{stream} {instance} {token} {_read_row(stream, text) or text}\n" for token, texts in facts for text in texts
    ]
    return escape_rows("".join(lines).encode(errors="backslashreplace"))


class ColouredLines:
    """Makes lines for a terminal: stream, token, writer, and the fields by name.

    The names of the fields are those of a Synapse's stream, or those that the process at ``source`` declares.  Without
    ``source``, or before it has answered, the row is JSON.  With NO_COLOR in the environment there are no colours.
    """

    def __init__(self, source: HttpCatchUp | None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._monotonic = monotonic
        self._due = -inf
        self._names: Mapping[str, Sequence[str]] | None = None
        self._colours = not os.environ.get("NO_COLOR")

    def read_names(self) -> None:
        """Request the names of the fields, unless they are known, or were requested a moment ago."""
        if self._names is None and self._source is not None and self._monotonic() >= self._due:
            self._due = self._monotonic() + RETRY_AFTER
            Deferred.fromCoroutine(self._read_names(self._source))

    def __call__(self, stream: StreamName, instance: InstanceName, facts: Sequence[Fact]) -> bytes:
        """Return a line per row."""
        self.read_names()
        lines = [
            f"{self._in(_NAME, escape(stream))} {self._in(_TOKEN, str(token))} {self._in(_QUIET, escape(instance))} "
            f"{self._fields(stream, text)}\n"
            for token, texts in facts
            for text in texts
        ]
        return "".join(lines).encode(errors="backslashreplace")

    def _fields(self, stream: StreamName, text: str) -> str:
        typed, row = _read_row(stream, text), grammar.read_json(text)
        names = (self._names or {}).get(stream, ())
        if typed is not None:
            named = typed.named()
        elif isinstance(row, list) and len(row) == len(names):
            named = dict(zip(names, row, strict=True))
        else:
            return _shown(row)
        return "  ".join(f"{self._in(_QUIET, escape(name))}={_shown(value)}" for name, value in named.items())

    def _in(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_END}" if self._colours else text

    async def _read_names(self, source: HttpCatchUp) -> None:
        with suppress(ReplicationError):  # the facts are printed without names
            self._names = await source.row_names()


def escape_rows(lines: bytes) -> bytes:
    """Return lines of facts without characters that a terminal obeys: as JSON escapes them, so that rows stay equal."""
    if _ODD.search(lines) is None:
        return lines
    text = lines.decode().replace("\r", " ")  # it can only be white space between values
    return "".join([each if each.isprintable() or each in "\n\t" else json.dumps(each)[1:-1] for each in text]).encode()


def _shown(value: object) -> str:
    return escape(json.dumps(value, ensure_ascii=False))


def _read_row(stream: StreamName, text: str) -> Row | None:
    """Return a typed row; None if no stream of a Synapse has this name and this form of row."""
    for typed in [each for each in _TYPED if each.name == stream]:
        with suppress(RowError):
            row: Row = typed.read_row(text)
            return row
    return None
