"""Rows gathered from several tables, or by joins: what is asked of each table, and how the answers become facts.

Each table is asked by itself, by a range of its IDs and for no more rows than a page has, so that its own index serves,
however much of the stream the other tables hold.  The rest is the same for every database.
"""

# ruff: noqa: S608 - names in SQL are quoted plain ones; expressions come from whoever defines the stream

from __future__ import annotations

import re
from json.encoder import encode_basestring_ascii
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from replication.errors import RemoteProtocolError, RowError, StoreError
from replication.storage.pages import Rows, cut_rows
from replication.storage.tables import DOWN, UP
from replication.wire import grammar
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from replication.streams.facts import Fact
    from replication.streams.registry import SourceTable, StreamDefinition

    Ask = Callable[[str, Sequence[object]], list[tuple[Any, ...]]]

MASTER: Final = InstanceName("master")  # who wrote the rows that name no writer
ALL_ROWS: Final = 2**62  # a limit that is none

_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_NOT_ASCII: Final = re.compile(r"[^ -~]+")


class Part:
    """What one table gives to a stream, and the SQL that asks for it.

    ``mark`` stands for a parameter, ``order`` are the columns by which rows of one ID lie in the table.
    """

    def __init__(self, definition: StreamDefinition, source: SourceTable, *, mark: str, order: str) -> None:
        self.source = source
        self.values = [f'source."{each}"' if _PLAIN.fullmatch(each) else each for each in source.row]
        self.table = f'"{source.table}" AS source'
        self.place = f'source."{source.id_column}"'
        self._direction = DOWN if definition.negative else UP
        self._minus = "-" if definition.negative else ""
        self._escape = (lambda sql: sql.replace("%", "%%")) if mark == "%s" else str
        self._mark, self._order = mark, order
        self.last = f"SELECT {self._minus}{self._direction.furthest}({self.place}) FROM {self.table}"
        row = definition.row or ()
        conversions: Mapping[str, Callable[[Any], object]] = {
            **dict.fromkeys(definition.json_fields, grammar.read_json),
            **dict.fromkeys(definition.boolean_fields, bool),
            **dict.fromkeys(definition.ascii_fields, _spell_ascii),
        }
        self.conversions = {row.index(field): convert for field, convert in conversions.items()}  # by place
        self._instance = "NULL" if source.instance_column is None else self._coalesced(source.instance_column)
        self.shape(self.values)

    def shape(self, values: Sequence[str], json_places: Sequence[int] = ()) -> None:
        """Make the statements, with ``values`` for the fields of a row; at ``json_places`` they are texts of JSON."""
        self.conversions = {**dict.fromkeys(json_places, grammar.read_json), **self.conversions}
        way, source, mark = self._direction, self.source, self._mark
        where = f" AND ({source.where})" if source.where else ""
        mine, group = "", ""  # no group: then an index has the answer at its end
        if source.instance_column is not None:
            mine, group = f" AND {self._instance} = {mark}", " GROUP BY 1"
        tables = " ".join([self.table, *filter(None, [source.joins])])
        token, escape = f"{self._minus}{self.place}", self._escape
        span = f"WHERE {self.place} {way.above} {mark} AND {self.place} {way.upto} {mark}{mine}{escape(where)}"
        order = f"ORDER BY {self.place} {way.order}, {self._order} LIMIT {mark}"
        self.page = f"SELECT {token}, {escape(', '.join(values))} FROM {escape(tables)} {span} {order}"
        beyond = f"FROM {tables} WHERE {self.place} {way.above}"
        furthest = f"{self._minus}{way.furthest}({self.place}) {beyond}"
        self.newest = f"SELECT {self._instance}, {furthest} 0{where}{group}"
        self._furthest = f"SELECT {furthest} ", where
        self._tokens = f"SELECT {token} {beyond} ", f"{where} ORDER BY {self.place} {way.order} LIMIT "

    def tokens(self, after: Token, count: int) -> str:
        """Return SQL for the tokens of the next ``count`` rows after one, whoever wrote them."""
        begin, end = self._tokens
        return f"{begin}{self._direction.sign * after}{end}{count}"

    def beyond(self, token: Token) -> str:
        """Return SQL for the largest token above one, whoever wrote it."""
        begin, end = self._furthest
        return f"{begin}{self._direction.sign * token}{end}"

    def parameters(self, writer: InstanceName, after: Token, upto: Token, limit: int) -> list[object]:
        """Return what ``page`` takes."""
        sign = self._direction.sign
        mine = [] if self.source.instance_column is None else [writer]
        return [sign * after, sign * upto, *mine, limit]

    def _coalesced(self, column: str) -> str:
        return f"coalesce(source.\"{column}\", '{MASTER}')"


class Gathering:
    """A stream over its tables; whatever asks the database is passed in."""

    def __init__(self, definition: StreamDefinition, sources: Sequence[SourceTable], *, mark: str, order: str) -> None:
        self.definition = definition
        self.parts = [Part(definition, each, mark=mark, order=order) for each in sources]

    def rows(self, ask: Ask, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Rows:
        """Return a page as ``IStreamStore.facts`` does; StoreError names a value that has no place in JSON."""
        found = self._rows(ask, writer, after, upto, limit + 1)
        rows = cut_rows([token for token, _ in found], [text for _, text in found], upto=upto, limit=limit)
        if rows is None:
            first = found[0][0]
            return Rows.of_fact(first, self._whole(ask, writer, first), upto)
        if self.definition.distinct:
            facts = [(token, _distinct(texts)) for token, texts in rows.page().facts]
            tokens = [token for token, texts in facts for _ in texts]
            return rows._replace(tokens=tokens, texts=[text for _, texts in facts for text in texts])
        return rows

    def check(self, ask: Ask, writer: InstanceName, facts: Sequence[Fact]) -> None:
        """Return if the application has written the rows of ``facts``; else StoreError.

        A follower that reads them later must get what another one hears now.
        """
        for token, texts in facts:
            kept = self._whole(ask, writer, token)
            if kept != texts:
                raise StoreError(
                    f"stream {self.definition.name!r}: fact {token} is {_shown(texts)}, but its tables have "
                    f"{_shown(kept)} for it: write them in the fact's transaction"
                )

    def newest(self, ask: Ask, stored: Mapping[InstanceName, Token]) -> Mapping[InstanceName, Token]:
        """Return each writer's largest token; where a table does not tell, it is everybody's.

        Everybody is whoever has stored a position, else the stream's ``writers``, else ``master``.
        """
        found: dict[InstanceName, Token] = {}
        everybody = [each for each in stored if each] or self.definition.writers or [MASTER]
        for part in self.parts:
            for writer, token in ask(part.newest, ()):
                if token is not None:
                    for each in everybody if writer is None else [InstanceName(writer)]:
                        found[each] = max(found.get(each, Token(0)), Token(token))
        return found

    def _whole(self, ask: Ask, writer: InstanceName, token: Token) -> tuple[str, ...]:
        texts = [text for _, text in self._rows(ask, writer, Token(token - 1), token, ALL_ROWS)]
        return _distinct(texts) if self.definition.distinct else tuple(texts)

    def _rows(self, ask: Ask, writer: InstanceName, after: Token, upto: Token, limit: int) -> list[tuple[Token, str]]:
        """Return the first ``limit`` rows of all tables, by token, then table, then place in it."""
        rows = [
            (Token(row[0]), self._spell(part, row[0], row[1:]))
            for part in self.parts
            for row in ask(part.page, part.parameters(writer, after, upto, limit))
        ]
        rows.sort(key=itemgetter(0))
        return rows[:limit]

    def _spell(self, part: Part, token: int, values: Sequence[Any]) -> str:
        try:
            if part.conversions:
                values = list(values)
                for place, convert in part.conversions.items():
                    if values[place] is not None:
                        values[place] = convert(values[place])
            return grammar.spell_row(values if part.source.kind is None else [part.source.kind, values])
        except (RowError, RemoteProtocolError, TypeError) as error:
            raise StoreError(
                f"stream {self.definition.name!r}: table {part.source.table!r} has, at ID {token}, what is no JSON: "
                f"{error}"
            ) from error


def _distinct(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(set(texts), key=lambda text: [str(each) for each in grammar.read_json(text)]))


def _spell_ascii(text: str) -> str:
    return _NOT_ASCII.sub(lambda found: encode_basestring_ascii(found[0])[1:-1], text)


def _shown(texts: Sequence[str]) -> str:
    return " ".join(texts)[:200] or "no row"
