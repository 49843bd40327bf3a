"""A stream that lives in a PostgreSQL table of the application: its columns are the fields of a row.

Booleans, numbers (but ``numeric``), texts, NULL, ``json``, ``jsonb`` and arrays of them are in a row what they are in
JSON.  Every other type is a text there: as ``to_json`` has it, so that dates are ISO 8601 and a ``numeric`` keeps its
digits; times with a zone are told in UTC.  Rows of one ID are a fact; among them, their place in the table says the
order.
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which lets plain ones through only

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from psycopg.postgres import types

from replication.errors import RemoteProtocolError, RowError, SchemaError, StoreError, ValueRefusedError
from replication.storage.mapped import MASTER, SEEK, differs
from replication.storage.pages import Rows, cut_rows
from replication.storage.postgres_checks import gives_ids, has_pair, what_is_amiss
from replication.storage.postgres_tables import COLUMNS, KIND, quoted, relation_name
from replication.storage.tables import DOWN, UP
from replication.wire import grammar
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from replication.storage.postgres_session import PostgresSession
    from replication.storage.postgres_tables import Written
    from replication.streams.registry import StreamDefinition

_IS_ARRAY: Final = "SELECT oid::bigint, typcategory = 'A' FROM pg_type WHERE oid = ANY(%s::oid[])"
# An index that leads to an ID; one on a part of the table will do for a stream that takes a part.
_INDEXES: Final = (
    "SELECT true FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = indkey[0] "
    "WHERE indrelid = to_regclass(%s) AND attname = %s AND indisvalid AND (indpred IS NULL OR %s) LIMIT 1"
)
# The sequence of a column: of an identity, or that its default draws from.
_SEQUENCE: Final = (
    "SELECT drawn.oid::regclass::text FROM pg_attribute JOIN pg_depend ON "
    "refobjid = attrelid AND refobjsubid = attnum AND deptype = 'i' JOIN pg_class AS drawn ON drawn.oid = objid "
    "WHERE attrelid = to_regclass(%s) AND attname = %s AND drawn.relkind = 'S' UNION ALL "
    "SELECT drawn.oid::regclass::text FROM pg_attribute JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum "
    "JOIN pg_depend ON classid = 'pg_attrdef'::regclass AND objid = pg_attrdef.oid "
    "JOIN pg_class AS drawn ON drawn.oid = refobjid AND drawn.relkind = 'S' "
    "WHERE attrelid = to_regclass(%s) AND attname = %s LIMIT 1"
)

JSON_TYPES: Final = frozenset((types["json"].oid, types["jsonb"].oid))
_INTEGERS: Final = frozenset(types[name].oid for name in ("int2", "int4", "int8"))
_AS_IN_JSON: Final = frozenset(
    oid
    for name in ("bool", "int2", "int4", "int8", "float4", "float8", "text", "varchar", "bpchar", "name")
    for oid in (types[name].oid, types[name].array_oid)
)
_TEXTS: Final = frozenset(types[name].oid for name in ("text", "varchar", "bpchar", "name"))
_TIME: Final = types["timestamptz"].oid


class MappedTable:
    """A table that the application made, as its StreamDefinition describes it; to be declared before it is used."""

    def __init__(self, definition: StreamDefinition) -> None:
        self.definition = definition
        self.direction = DOWN if definition.negative else UP
        # Unless the column has one.
        self.sequence = quoted(definition.sequence or relation_name(definition.generator, "_seq"))
        self._table = quoted(definition.table or "")
        self.sources: Sequence[str] = [self._table]
        self.gives_ids: tuple[str, str] | None = None
        self._indexed = False
        self._columns = definition.row or ()
        self._json: list[bool] = []  # which of them are JSON
        self._place = f"source.{quoted(definition.id_column)}"
        self._minus = "-" if definition.negative else ""
        self._instance = "NULL"
        written = [definition.id_column, *self._columns]
        if definition.instance_column is not None:
            self._instance = f"coalesce(source.{quoted(definition.instance_column)}, '{MASTER}')"
            written.insert(1, definition.instance_column)
        names, values = ", ".join(map(quoted, written)), ", ".join(["%s"] * len(written))
        self._insert = f"INSERT INTO {self._table} ({names}) VALUES ({values})"
        self._shape([f"source.{quoted(column)}" for column in self._columns])

    def _shape(self, values: Sequence[str]) -> None:
        """Make the statements, now that it is known how SQL spells the values of a row."""
        way, place, source = self.direction, self._place, f"{self._table} AS source"
        where = f" AND ({self.definition.where})" if self.definition.where else ""
        mine, group = "", ""  # no group: then an index has the answer at its end
        if self.definition.instance_column is not None:
            mine, group = f" AND {self._instance} = %s", " GROUP BY 1"
        row = ", ".join([f"{self._minus}{place}", *values])
        span = f"WHERE {place} {way.above} %s AND {place} {way.upto} %s{mine}{_doubled(where)}"
        order = f"ORDER BY {place} {way.order}, source.tableoid, source.ctid"
        self._page = f"SELECT {row} FROM {source} {span} {order} LIMIT %s"
        self._kept = f"SELECT {row} FROM {source} WHERE {place} = ANY(%s){mine}{_doubled(where)} {order}"
        self._delete = f"DELETE FROM {source} WHERE {place} {way.above} %s{mine}{_doubled(where)}"
        self._furthest = f"SELECT {self._minus}{way.furthest}({place}) FROM {source} WHERE {place} {way.above}"
        self._where = where
        self._newest = (
            f"SELECT {self._instance}, {self._minus}{way.furthest}({place}) FROM {source} "
            f"WHERE {place} {way.above} 0{where}{group}"
        )

    def declare(self, session: PostgresSession, *, may_create: bool) -> Sequence[str]:  # noqa: ARG002 - never
        """Look at the table and try what will be asked: SchemaError if it cannot be, a warning if it would be slow."""
        definition, name, table = self.definition, self.definition.name, self.definition.table
        refused = f"stream {name!r} cannot be mapped onto table {table!r}"
        kinds = session.run(KIND, (self._table,))
        if not kinds:
            raise SchemaError(f"{refused}: there is no table of that name")
        if kinds[0][0] not in ("r", "p"):
            raise SchemaError(f"{refused}, a view or the like: map the table behind it")
        there = [column for (column,) in session.run(COLUMNS, (self._table,))]
        instance = [definition.instance_column] if definition.instance_column else []
        missing = [each for each in (definition.id_column, *instance, *self._columns) if each not in there]
        if missing:
            raise SchemaError(f"{refused}: it has no column {', '.join(missing)}, only {', '.join(there)}")
        if len(definition.writers) > 1 and not instance:
            raise SchemaError(f"{refused}: its rows do not say which of the writers they are of: give instance_column")
        if definition.where is not None:
            try:
                session.run(f"SELECT FROM {self._table} AS source WHERE ({definition.where}) LIMIT 0")
            except StoreError as error:
                raise SchemaError(f"{refused}: where = {definition.where!r} cannot be asked: {error}") from error
        if instance and session.types_of(f'SELECT "{instance[0]}" FROM {self._table}')[0] not in _TEXTS:
            raise SchemaError(f"{refused}: column {instance[0]!r} is no text, and so no writer's name")
        try:
            self._learn_types(session)
            session.run(self._page, [0, 0, *([MASTER] if instance else []), 0])
        except StoreError as error:
            raise SchemaError(f"{refused}: {error}") from error
        found = sequence_of(session, self._table, definition.id_column)
        self.sequence = found or self.sequence
        if gives_ids(session, self._table, definition.id_column):
            self.gives_ids = (table or "", definition.id_column)
        said = []
        if self.gives_ids is not None and found is None and definition.sequence is None:
            said.append(
                f"stream {name!r}: table {table!r} fills {definition.id_column!r} by a DEFAULT that tells of no "
                "sequence, so rows that others insert are not seen: name the sequence that it draws from, as sequence "
                "in [[streams]]"
            )
        if instance and has_pair(session, definition, self._table):
            self._newest = self._seek_newest(quoted(instance[0]))
        self._indexed = has_index(session, table or "", definition.id_column, partial=definition.where is not None)
        if self._indexed:
            return [*said, *what_is_amiss(session, definition, self._table)]
        column = definition.id_column
        cure = f"CREATE INDEX {table}_{column} ON {self._table} ({quoted(column)})"
        return [
            *said,
            f"stream {name!r}: table {table!r} has no index on {column!r}, so a page reads all of it: {cure}",
        ]

    def insert(self, session: PostgresSession, written: Sequence[Written]) -> None:
        """Store the rows of facts, one value a column, unless the application has: StoreError if they do not match.

        They are read again, because a follower that reads them later must get what another one hears now: a column may
        turn a number into a text, ``where`` may not pick the row, and the application may have written another one.
        """
        for writer, facts in written:
            kept = self._read(session, writer, [fact.token for fact in facts])
            missing = [fact for fact in facts if fact.token not in kept]
            rows = [self._values(writer, fact.token, text) for fact in missing for text in fact.texts]
            if rows:
                session.run_many(self._insert, rows)
                kept.update(self._read(session, writer, [fact.token for fact in missing]))
            for token, texts in facts:
                if sorted(kept.get(token, [])) != sorted(texts):  # followers are told them in the order of the table
                    was_there = all(token != fact.token for fact in missing)
                    raise differs(self.definition, token, texts, kept.get(token, []), was_there=was_there)

    def delete(self, session: PostgresSession, writer: InstanceName, above: Token) -> None:
        """Delete what ``writer`` wrote above a token; of a table without instances, what anybody did."""
        session.add(self._delete, [self.direction.sign * above, *self._mine(writer)])

    def rows(self, session: PostgresSession, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Rows:
        """Return a page; StoreError names a column whose value has no place in JSON."""
        sign = self.direction.sign
        span = [sign * after, sign * upto, *self._mine(writer), limit + 1]
        found = session.ask(self._page, span, prepare=False)
        tokens: list[Token] = [row[0] for row in found]
        rows = cut_rows(tokens, self._spell(found), upto=upto, limit=limit)
        if rows is not None:
            return rows
        return Rows.of_fact(tokens[0], self._read(session, writer, tokens[:1])[tokens[0]], upto)

    def newest(self, session: PostgresSession, stored: Mapping[InstanceName, Token]) -> Mapping[InstanceName, Token]:
        """Return each writer's largest token; without instances it is everybody's.

        Everybody is whoever has stored a position, else the stream's ``writers``, else ``master``.
        """
        found: dict[InstanceName | None, Token] = {}
        for writer, token in session.ask(self._newest, prepare=False):
            if token is not None:
                found[writer] = max(token, found.get(writer, token))
        if self.definition.instance_column is None and found:
            found = dict.fromkeys(stored or self.definition.writers or [MASTER], found[None])
        return {InstanceName(writer): Token(token) for writer, token in found.items() if writer is not None}

    def beyond(self, token: Token) -> Sequence[str]:
        """Return SQL that asks by the index, if there is one, for the largest token above one."""
        return [f"{self._furthest} {self.direction.sign * token}{self._where}"] if self._indexed else []

    # ---- inside

    def _learn_types(self, session: PostgresSession) -> None:
        sql = f"SELECT {self._place}, {', '.join(self._raw())} FROM {self._table} AS source"
        kinds = types_of(session, sql, self.definition.id_column)
        self._json = [code in JSON_TYPES for code, _ in kinds]
        self._shape([as_json(column, *kind) for column, kind in zip(self._raw(), kinds, strict=True)])

    def _seek_newest(self, instance: str) -> str:
        """Return SQL that goes from each writer's name to the next one, and to its newest row, by the index on both."""
        way, table, where = self.direction, self._table, self.definition.where
        newest = (
            f"SELECT {self._minus}{way.furthest}({self._place}) FROM {table} AS source "
            f"WHERE {self._place} {way.above} 0{f' AND ({where})' if where else ''} AND source.{instance}"
        )
        return (
            f"WITH RECURSIVE {SEEK} (name) AS (SELECT min({instance})::text FROM {table} UNION ALL "
            f"SELECT (SELECT min(source.{instance}) FROM {table} AS source WHERE source.{instance} > {SEEK}.name) "
            f"FROM {SEEK} WHERE {SEEK}.name IS NOT NULL) "
            f"SELECT {SEEK}.name, ({newest} = {SEEK}.name) FROM {SEEK} WHERE {SEEK}.name IS NOT NULL "
            f"UNION ALL SELECT '{MASTER}', ({newest} IS NULL)"
        )

    def _raw(self) -> list[str]:
        # Qualified, because a name that is no column could be something else.
        return [f"source.{quoted(column)}" for column in self._columns]

    def _mine(self, writer: InstanceName) -> list[InstanceName]:
        return [] if self.definition.instance_column is None else [writer]

    def _read(self, session: PostgresSession, writer: InstanceName, tokens: Sequence[Token]) -> dict[Token, list[str]]:
        """Return the rows of facts, by token."""
        span = [[self.direction.sign * token for token in tokens], *self._mine(writer)]
        rows = session.run(self._kept, span, prepare=False)
        kept: dict[Token, list[str]] = {}
        for row, text in zip(rows, self._spell(rows), strict=True):
            kept.setdefault(Token(row[0]), []).append(text)
        return kept

    def _spell(self, rows: Sequence[tuple[Any, ...]]) -> list[str]:
        if any(self._json):
            rows = [(row[0], *self._read_columns(row)) for row in rows]
        try:
            return grammar.spell_rows([row[1:] for row in rows])
        except RowError as error:
            token, column = next(
                (row[0], column)
                for row in rows
                for column, value in zip(self._columns, row[1:], strict=True)
                if not _is_json(value)
            )
            raise self._is_no_json(token, column, error) from error

    def _read_columns(self, row: tuple[Any, ...]) -> Iterator[Any]:
        for column, is_json, value in zip(self._columns, self._json, row[1:], strict=True):
            try:
                yield grammar.read_json(value) if is_json and value is not None else value
            except RemoteProtocolError as error:
                raise self._is_no_json(row[0], column, error) from error

    def _is_no_json(self, token: Token, column: str, error: Exception) -> StoreError:
        return StoreError(
            f"stream {self.definition.name!r}: column {column!r} of table {self.definition.table!r} has, at ID "
            f"{token}, what is no JSON: {error}"
        )

    def _values(self, writer: InstanceName, token: Token, text: str) -> list[Any]:
        row = grammar.read_json(text)
        if not isinstance(row, list) or len(row) != len(self._columns):
            columns = ", ".join(self._columns)
            raise ValueRefusedError(f"stream {self.definition.name!r}: {text[:200]} is not an array of {columns}")
        values = [
            grammar.spell_row(value) if is_json and value is not None else value
            for is_json, value in zip(self._json, row, strict=True)
        ]
        return [self.direction.sign * token, *self._mine(writer), *values]


def types_of(session: PostgresSession, sql: str, id_column: str) -> list[tuple[int, bool]]:
    """Return type, and whether it is an array, of the columns after the first, the ID; SchemaError if that is none."""
    place, *codes = session.types_of(sql)
    if place not in _INTEGERS:
        raise SchemaError(f"column {id_column!r} is not an integer")
    arrays = dict(session.run(_IS_ARRAY, (codes,)))
    return [(code, arrays[code]) for code in codes]


def sequence_of(session: PostgresSession, table: str, column: str) -> str | None:
    """Return the sequence that a column of a table, quoted, is known to draw from."""
    return next((found for (found,) in session.run(_SEQUENCE, (table, column) * 2)), None)


def has_index(session: PostgresSession, table: str, column: str, *, partial: bool) -> bool:
    """Whether an index leads to an ID; one on a part of the table will do if the stream takes a part."""
    return bool(session.run(_INDEXES, (quoted(table), column, partial)))


def as_json(column: str, code: int, is_array: bool) -> str:  # noqa: FBT001
    """Return SQL for what a column of this type is in JSON."""
    if code in _AS_IN_JSON:
        return column
    if code in JSON_TYPES:
        return f"{column}::text"
    if is_array:
        return f"{column}::text[]"
    if code == _TIME:
        return f"to_json({column} AT TIME ZONE 'UTC') #>> '{{}}' || '+00:00'"
    return f"to_json({column}) #>> '{{}}'"


def _is_json(value: object) -> bool:
    try:
        grammar.spell_row(value)
    except RowError:
        return False
    return True


def _doubled(sql: str) -> str:
    """Return SQL of a user as the driver takes it beside parameters."""
    return sql.replace("%", "%%")
