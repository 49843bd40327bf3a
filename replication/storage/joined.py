"""A joined stream, for every database: its rows come from several tables of the application, or from SQL expressions.

Each table is asked by itself, for a range of IDs and at most one page of rows, so its own index serves the question.
The answers are then merged by ID; among rows of one ID, the order of the tables in the definition counts, then
``order``.
"""

# ruff: noqa: S608 - names in SQL are quoted plain names; expressions come from the stream's definition

from __future__ import annotations

import re
from functools import partial
from itertools import chain
from json.encoder import encode_basestring_ascii
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from replication.errors import RemoteProtocolError, RowError, SchemaError, StoreError
from replication.storage.contract import MASTER, Direction, ISession, WrittenFact, shown
from replication.storage.names import quoted
from replication.storage.pages import Rows, cut_rows
from replication.storage.table import StreamTable
from replication.wire import grammar
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from replication.streams.definitions import SourceTable, StreamDefinition
    from replication.streams.facts import Fact

    Ask = Callable[[str, Sequence[object]], list[tuple[Any, ...]]]

_Session = TypeVar("_Session", bound=ISession)

ALL_ROWS: Final = 2**62  # as good as no limit

_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_NOT_ASCII: Final = re.compile(r"[^ -~]+")


class SourceQuery:
    """The SQL for the rows of one table.

    ``mark`` stands for a parameter.  ``order`` are the columns that order the rows of one ID.
    """

    def __init__(self, definition: StreamDefinition, source: SourceTable, *, mark: str, order: str) -> None:
        self.source = source
        self.values = [f'source."{each}"' if _PLAIN.fullmatch(each) else each for each in source.row]
        self.table = f'"{source.table}" AS source'
        self.id = f'source."{source.id_column}"'
        self._direction = way = Direction.of(definition)
        self._escape = (lambda sql: sql.replace("%", "%%")) if mark == "%s" else str
        self._mark, self._order = mark, f"ORDER BY {self.id} {way.order}, {order}"
        self.last = f"SELECT {self._direction.minus}{self._direction.furthest}({self.id}) FROM {self.table}"
        row = definition.row or ()
        conversions: Mapping[str, Callable[[Any], object]] = {
            **dict.fromkeys(definition.json_fields, grammar.read_json),
            **dict.fromkeys(definition.boolean_fields, bool),
            **dict.fromkeys(definition.ascii_fields, _encode_ascii),
        }
        self._declared = {row.index(field): convert for field, convert in conversions.items()}  # by position
        self._instance, self._group = "NULL", ""  # without GROUP BY an index has the answer at its end
        self.where = f" AND ({source.where})" if source.where else ""
        self.own = self._escape(self.where)  # of one writer, beside parameters
        if source.instance_column is not None:
            text = "::text" if mark == "%s" else ""  # PostgreSQL pads a char(12) with spaces, which a text has not
            self._instance = f"coalesce(source.\"{source.instance_column}\"{text}, '{MASTER}')"
            self._group = " GROUP BY 1"
            self.own = f" AND {self._instance} = {mark}{self.own}"
        self.shape(self.values)

    def shape(self, values: Sequence[str], json_places: Sequence[int] = ()) -> None:
        """Make the statements, with ``values`` as the fields of a row; those at ``json_places`` are texts of JSON."""
        self.conversions = {**dict.fromkeys(json_places, grammar.read_json), **self._declared}
        way, mark = self._direction, self._mark
        tables = " ".join([self.table, *filter(None, [self.source.joins])])
        token, escape = f"{way.minus}{self.id}", self._escape
        rows = f"SELECT {token}, {escape(', '.join(values))} FROM {escape(tables)} WHERE {self.id}"
        self.page = f"{rows} {way.above} {mark} AND {self.id} {way.upto} {mark}{self.own} {self._order} LIMIT {mark}"
        ids = f"SELECT DISTINCT {token} FROM {escape(tables)} WHERE {self.id}"
        self.present = f"{ids} {way.above} {mark} AND {self.id} {way.upto} {mark}{self.own} LIMIT {mark}"
        self.kept = f"{rows} = ANY({mark}){self.own} {self._order}"
        above = f"FROM {tables} WHERE {self.id} {way.above}"
        furthest = f"{way.minus}{way.furthest}({self.id}) {above}"
        self.newest = f"SELECT {self._instance}, {furthest} 0{self.where}{self._group}"
        self._no_token = f"SELECT {self.id} FROM {tables} WHERE {self.id} ", f" 0{self.where} LIMIT 1"
        self._newest_above = f"SELECT {furthest} ", self.where
        self._writers_above = f"SELECT {self._instance}, {furthest} ", f"{self.where}{self._group}"
        self._counts = f"SELECT {self._instance}, count(*) {above} ", f"{self.where} GROUP BY 1"
        self._tokens = f"SELECT {token} {above} ", f"{self.where} ORDER BY {self.id} {way.order} LIMIT "

    def tokens(self, after: Token, count: int) -> str:
        """Return SQL for the tokens of the next ``count`` rows, of all writers."""
        begin, end = self._tokens
        return f"{begin}{self._direction.sign * after}{end}{count}"

    def newest_above(self, token: Token) -> str:
        """Return SQL for the largest token above one, of all writers."""
        begin, end = self._newest_above
        return f"{begin}{self._direction.sign * token}{end}"

    def writers_above(self, token: Token) -> str:
        """Return SQL for each writer with rows above a token, and its largest token."""
        begin, end = self._writers_above
        return f"{begin}{self._direction.sign * token}{end}"

    def writers_in(self, after: Token, upto: Token) -> str:
        """Return SQL for each writer with rows in a range, and its largest token there."""
        (begin, end), way = self._writers_above, self._direction
        return f"{begin}{way.sign * after} AND {self.id} {way.upto} {way.sign * upto}{end}"

    def counts(self, after: Token, upto: Token) -> str:
        """Return SQL for each writer with rows in a range, and their number."""
        (begin, end), way = self._counts, self._direction
        return f"{begin}{way.sign * after} AND {self.id} {way.upto} {way.sign * upto}{end}"

    def no_token(self, *, of_two_streams: bool) -> str:
        """Return SQL for an ID that is no token: 0 or, unless two streams have the table, a negative one."""
        begin, end = self._no_token
        return f"{begin}{'=' if of_two_streams else '<='}{end}"

    def has_rows(self, token: str) -> str:
        """Return the SQL condition that the table has a row of a token, without regard to ``where``."""
        return f"EXISTS (SELECT FROM {self.table} WHERE {self.id} = {self._direction.minus}{token})"

    def parameters(self, writer: InstanceName, after: Token, upto: Token, limit: int) -> list[object]:
        """Return the parameters of ``page``."""
        sign = self._direction.sign
        mine = [] if self.source.instance_column is None else [writer]
        return [sign * after, sign * upto, *mine, limit]


class ApplicationTables(StreamTable[_Session]):
    """The tables of the application that have the rows of a mapped or joined stream."""

    def __init__(self, definition: StreamDefinition, sources: Sequence[SourceTable], *, mark: str, order: str) -> None:
        super().__init__(definition)
        self.queries = [SourceQuery(definition, each, mark=mark, order=order) for each in sources]
        self._indexed: list[SourceQuery] = []  # of tables with an index on the ID, as far as it is known

    def newest(self, session: _Session, stored: Mapping[InstanceName, Token]) -> Mapping[InstanceName, Token]:
        """Return each writer's largest token.

        That of a table without an instance column counts for all writers: those with a stored position, else those of
        the definition, else ``master``.
        """
        found: dict[InstanceName, Token] = {}
        everyone = [each for each in stored if each] or self.definition.writers or [MASTER]
        for query in self.queries:
            rows = [row for row in session.ask(query.newest, prepare=False) if row[1] is not None]
            for (writer, _), token in zip(rows, self.tokens(query, [row[1] for row in rows]), strict=True):
                for each in everyone if writer is None else [InstanceName(str(writer))]:  # SQLite stores any value
                    found[each] = max(found.get(each, Token(0)), token)
        return found

    def check_ids(self, session: _Session, beside: Iterable[StreamDefinition]) -> None:
        """Raise SchemaError if a table has a row that no follower would receive: its ID is 0, or has the wrong sign.

        A stream of ``beside`` that counts down may have the negative IDs of the same table.
        """
        streams = [each for each in (self.definition, *beside) if each.negative]
        down = {table for each in streams for table in (each.table, *(source.table for source in each.tables))}
        for query in self.queries:
            table, column = query.source.table, query.source.id_column
            for (found,) in session.run(query.no_token(of_two_streams=table in down)):
                raise SchemaError(
                    f"stream {self.definition.name!r}: table {table!r} has a row with the ID {found}, which no "
                    f"follower would receive: give it a positive ID, or leave it out by where = '{column} > 0'"
                )

    def present(self, session: _Session, writer: InstanceName, after: Token, upto: Token) -> set[Token]:
        """Return the tokens of ``writer`` with ``after < token <= upto`` of which there are rows."""
        found: set[Token] = set()
        for query in self.queries:
            rows = session.ask(query.present, query.parameters(writer, after, upto, ALL_ROWS), prepare=False)
            found.update(self.tokens(query, [token for (token,) in rows]))
        return found

    def writers(self, session: _Session, after: Token, upto: Token) -> Mapping[InstanceName, Token]:
        """Return each writer in a column of writers with rows in a range, and its largest token there."""
        found: dict[InstanceName, Token] = {}
        for query in [each for each in self.queries if each.source.instance_column is not None]:
            rows = session.ask(query.writers_in(after, upto), prepare=False)
            for (writer, _), token in zip(rows, self.tokens(query, [row[1] for row in rows]), strict=True):
                name = InstanceName(str(writer))  # SQLite stores any value
                found[name] = max(found.get(name, Token(0)), token)
        return found

    def last_id(self, session: _Session) -> Token:
        """Return the largest token of all writers, without regard to ``where``: an index has it at its end."""
        lasts = [self.tokens(query, [last]) for query in self.queries for (last,) in session.run(query.last) if last]
        return max([Token(0), *chain.from_iterable(lasts)])

    def newest_above(self, token: Token) -> Sequence[str]:
        """Return SQL for the largest token above one, for each table with an index on the ID."""
        return [query.newest_above(token) for query in self._indexed]

    def oldest(self) -> Sequence[str]:
        """Return SQL for the smallest token, for each table with an index on the ID."""
        return [query.tokens(Token(0), 1) for query in self._indexed]

    def has_rows(self, token: str) -> Sequence[str]:
        """Return the SQL conditions that a table with an index on the ID has a row of a token."""
        return [query.has_rows(token) for query in self._indexed]

    def missing_index(self, query: SourceQuery) -> str:
        """Return the warning that pages read a whole table."""
        table, column = query.source.table, query.source.id_column
        return (
            f"stream {self.definition.name!r}: table {table!r} has no index on {column!r}, so a page reads all of it: "
            f"CREATE INDEX {table}_{column} ON {quoted(table)} ({quoted(column)})"
        )

    def tokens(self, query: SourceQuery, ids: Sequence[object]) -> list[Token]:
        """Return ``ids`` as tokens; StoreError if one is no integer: SQLite stores any value in any column."""
        if {*map(type, ids)} - {int}:
            wrong = next(each for each in ids if type(each) is not int)
            raise StoreError(
                f"stream {self.definition.name!r}: column {query.source.id_column!r} of table {query.source.table!r} "
                f"holds {wrong!r}, not an integer"
            )
        return cast("list[Token]", ids)


class JoinedRows(ApplicationTables[_Session]):
    """What the joined streams of all databases share."""

    def insert(self, session: _Session, written: Sequence[WrittenFact]) -> None:
        """Return if the application has written the rows of the facts; else raise StoreError.

        A follower that reads them later must receive what another follower receives now.
        """
        for writer, facts in written:
            self._check(self._ask(session, in_transaction=True), writer, facts)

    def delete(self, _session: _Session, _writer: InstanceName, _above: Token) -> None:
        """Raise StoreError: the tables belong to the application."""
        raise StoreError(f"stream {self.definition.name!r} is joined from tables, from which nothing is deleted here")

    def rows(self, session: _Session, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Rows:
        """Return a page; StoreError names a table with a value that JSON cannot express."""
        ask = self._ask(session, in_transaction=False)
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

    def _ask(self, session: _Session, *, in_transaction: bool) -> Ask:
        # Prepared outside a transaction: to plan a query of several tables takes longer than to read a few rows.
        return partial(session.run, prepare=False) if in_transaction else session.ask

    def _check(self, ask: Ask, writer: InstanceName, facts: Sequence[Fact]) -> None:
        for token, texts in facts:
            kept = self._whole(ask, writer, token)
            if kept != texts:
                raise StoreError(
                    f"stream {self.definition.name!r}: fact {token} is {shown(texts)}, but its tables have "
                    f"{shown(kept)} for it: write them in the fact's transaction"
                )

    def _whole(self, ask: Ask, writer: InstanceName, token: Token) -> tuple[str, ...]:
        texts = [text for _, text in self._rows(ask, writer, Token(token - 1), token, ALL_ROWS)]
        return _distinct(texts) if self.definition.distinct else tuple(texts)

    def _rows(self, ask: Ask, writer: InstanceName, after: Token, upto: Token, limit: int) -> list[tuple[Token, str]]:
        """Return the first ``limit`` rows of all tables, by token, then table, then place in the table."""
        rows = []
        for query in self.queries:
            found = ask(query.page, query.parameters(writer, after, upto, limit))
            tokens = self.tokens(query, [row[0] for row in found])
            rows += [(token, self._encode(query, token, row[1:])) for token, row in zip(tokens, found, strict=True)]
        rows.sort(key=itemgetter(0))
        return rows[:limit]

    def _encode(self, query: SourceQuery, token: int, values: Sequence[Any]) -> str:
        source = query.source
        try:
            if query.conversions:
                values = list(values)
                for place, convert in query.conversions.items():
                    if values[place] is not None:
                        values[place] = convert(values[place])
            return grammar.encode_row(values if source.kind is None else [source.kind, values])
        except (RowError, RemoteProtocolError, TypeError) as error:
            raise StoreError(
                f"stream {self.definition.name!r}: table {source.table!r} has, at ID {token}, what is no JSON: {error}"
            ) from error


def _distinct(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(set(texts), key=lambda text: [str(each) for each in grammar.read_json(text)]))


def _encode_ascii(text: str) -> str:
    return _NOT_ASCII.sub(lambda found: encode_basestring_ascii(found[0])[1:-1], text)
