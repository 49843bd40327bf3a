"""A mapped stream in PostgreSQL.

Booleans, numbers (except ``numeric``), texts, NULL, ``json``, ``jsonb`` and arrays of them are in a row what they are
in JSON.  A value of any other type is a text, as ``to_json`` writes it: a date is ISO 8601, and a ``numeric`` keeps
its digits.  A time with a zone is written in UTC.  The place in the table orders the rows of one ID.
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which accepts plain names only

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from psycopg.postgres import types

from replication.errors import RemoteProtocolError, SchemaError, StoreError
from replication.storage.contract import MASTER, differs
from replication.storage.mapped import MappedRows
from replication.storage.names import quoted
from replication.storage.pages import Rows, cut_rows
from replication.storage.postgres.checks import has_default_id, has_pair, literal, warnings_about
from replication.storage.postgres.generic import COLUMNS, KIND, Table
from replication.storage.postgres.session import PostgresSession, TypedRows, is_refusal
from replication.wire import grammar
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from replication.storage.contract import WrittenFact
    from replication.streams.definitions import StreamDefinition

_IS_ARRAY: Final = "SELECT oid::bigint, typcategory = 'A' FROM pg_type WHERE oid = ANY(%s::oid[])"
# Types with a text that depends on the session's settings; the part that does so may lie deep inside.
# PostgreSQL 13 has no column rngmultitypid; read from JSON, it is NULL there.
_OF_SESSION: Final = (
    "WITH RECURSIVE inside (whole, part) AS (SELECT oid, oid FROM pg_type WHERE oid = ANY(%s::oid[]) "
    "UNION SELECT whole, next.part FROM inside JOIN ("
    "SELECT oid AS outer_type, typelem AS part FROM pg_type WHERE typcategory = 'A' "
    "UNION ALL SELECT oid, typbasetype FROM pg_type WHERE typtype = 'd' "
    "UNION ALL SELECT pg_type.oid, atttypid FROM pg_type JOIN pg_attribute ON attrelid = typrelid AND attnum > 0 "
    "UNION ALL SELECT rngtypid, rngsubtype FROM pg_range "
    "UNION ALL SELECT (to_jsonb(pg_range) ->> 'rngmultitypid')::oid, rngtypid FROM pg_range"
    ") AS next ON outer_type = inside.part) "
    "SELECT kind, setting, current_setting(setting) FROM ("
    "SELECT format_type(whole, NULL) AS kind, CASE part WHEN 'timestamptz'::regtype THEN 'TimeZone' "
    "WHEN 'money'::regtype THEN 'lc_monetary' ELSE 'search_path' END AS setting FROM inside "
    "WHERE part = 'timestamptz'::regtype AND whole <> part "
    "AND current_setting('TimeZone') NOT IN ('UTC', 'Etc/UTC', 'GMT', 'Etc/GMT') "
    "OR part = 'money'::regtype AND current_setting('lc_monetary') NOT IN ('C', 'POSIX') "
    "OR part = ANY('{regclass, regcollation, regconfig, regdictionary, regoper, regoperator, regproc, regprocedure, "
    "regtype}'::regtype[]::oid[])) AS found"
)
_CURES: Final = {
    "TimeZone": "has times in the session's time zone, {!r}: set UTC for every user that writes or reads the stream "
    "(ALTER ROLE … SET TimeZone = 'UTC')",
    "lc_monetary": "has amounts in the form of the session's lc_monetary, {!r}: let the column be numeric; or set C "
    "for every user that writes or reads the stream (ALTER ROLE … SET lc_monetary = 'C')",
    "search_path": "has names in a form that depends on the session's search_path: let the column be text or oid",
}
# An index on the ID; a partial index will do for a stream with ``where``.
_INDEXES: Final = (
    "SELECT true FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = indkey[0] "
    "WHERE indrelid = to_regclass(%s) AND attname = %s AND indisvalid AND (indpred IS NULL OR %s) LIMIT 1"
)
# The sequence of a column: of an identity, or of a DEFAULT.
_SEQUENCE: Final = (
    "SELECT used.oid FROM pg_attribute JOIN pg_depend ON "
    "refobjid = attrelid AND refobjsubid = attnum AND deptype = 'i' JOIN pg_class AS used ON used.oid = objid "
    "WHERE attrelid = to_regclass({0}) AND attname = {1} AND used.relkind = 'S' UNION ALL "
    "SELECT used.oid FROM pg_attribute JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum "
    "JOIN pg_depend ON classid = 'pg_attrdef'::regclass AND objid = pg_attrdef.oid "
    "JOIN pg_class AS used ON used.oid = refobjid AND used.relkind = 'S' "
    "WHERE attrelid = to_regclass({0}) AND attname = {1} LIMIT 1"
)
_SEQUENCE_OF: Final = f"SELECT ({_SEQUENCE.format('%s', '%s')})::regclass::text"
_PART_WITH_ANOTHER: Final = (  # a partition or child whose ID column has a sequence of its own
    "WITH RECURSIVE tree (part) AS (SELECT inhrelid FROM pg_inherits WHERE inhparent = to_regclass(%s) "
    "UNION ALL SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = part) SELECT name, found::regclass::text "
    f"FROM (SELECT name, ({_SEQUENCE.format('name', '%s')}) AS found "
    "FROM (SELECT part::regclass::text AS name FROM tree) AS named) AS parts "
    "WHERE found <> to_regclass(%s) ORDER BY 1 LIMIT 1"
)
# It also finds a new sequence of the same name, if the table is new, too.  A new sequence of the same table goes on
# where the former one ended, and so does a new table with the same sequence.
_OTHER_SEQUENCES: Final = (
    "SELECT place - 1, found::regclass::text FROM ("
    f"SELECT given.*, ({_SEQUENCE.format('given.name', 'given.of')}) AS found "
    "FROM unnest(%s::text[], %s::text[], %s::text[], %s::oid[], %s::oid[]) "
    "WITH ORDINALITY AS given (name, of, sequence, former_table, former, place)"
    ") AS found WHERE found IS NOT NULL AND (found IS DISTINCT FROM to_regclass(sequence) "
    "OR found <> former AND to_regclass(name) <> former_table)"
)
_OBJECTS: Final = "SELECT to_regclass(%s)::oid::bigint, to_regclass(%s)::oid::bigint"

JSON_TYPES: Final = frozenset((types["json"].oid, types["jsonb"].oid))
_INTEGERS: Final = frozenset(types[name].oid for name in ("int2", "int4", "int8"))
_AS_IN_JSON: Final = frozenset(
    oid
    for name in ("bool", "int2", "int4", "int8", "float4", "float8", "text", "varchar", "bpchar", "name")
    for oid in (types[name].oid, types[name].array_oid)
)
_TEXTS: Final = frozenset(types[name].oid for name in ("text", "varchar", "bpchar", "name"))
_TIME: Final = types["timestamptz"].oid
RETYPED: Final = 5  # attempts to read rows whose columns have other types meanwhile


class MappedTable(MappedRows[PostgresSession]):
    """A table of the application, as its StreamDefinition describes it; ``declare`` comes first."""

    def __init__(self, definition: StreamDefinition) -> None:
        super().__init__(definition, mark="%s", order="source.tableoid, source.ctid")
        if definition.sequence is not None:  # ``declare`` prefers the sequence of the column
            self.sequence = quoted(definition.sequence)
        self.sources = [self._table]
        self._json: list[bool] = []  # for each column, whether it is JSON
        self._types = Types()
        self.objects: tuple[int | None, ...] = (None, None)  # the table and its sequence at the declaration, as OIDs

    def declare(self, session: PostgresSession, *, may_create: bool) -> Sequence[str]:  # noqa: ARG002 - it never does
        """Try the statements: SchemaError if one does not work, a warning if one would be slow."""
        definition, name, table = self.definition, self.definition.name, self.definition.table
        self._check_columns(session)
        try:
            self._read_types(session)
            session.run(self._query.page, self._query.parameters(MASTER, Token(0), Token(0), 0))
        except StoreError as error:
            raise self._refused(f": {error}") from error
        found = sequence_of(session, self._table, definition.id_column)
        self.sequence = found or self.sequence
        if has_default_id(session, self._table, definition.id_column):
            self.default_id = (table or "", definition.id_column)
        (self.objects,) = session.run(_OBJECTS, (self._table, self.sequence))
        warnings = []
        if self.default_id is not None and found is None and definition.sequence is None:
            warnings.append(
                f"stream {name!r}: table {table!r} fills {definition.id_column!r} by a DEFAULT whose sequence is "
                "unknown, so rows of external writers are not published: name that sequence, as sequence in [[streams]]"
            )
        column = definition.id_column
        for part, other in session.run(_PART_WITH_ANOTHER, (self._table, column, column, self.sequence)):
            warnings.append(
                f"stream {name!r}: table {table!r} has the part {part}, whose IDs come from {other} if rows are "
                f"inserted into it directly, and no follower receives a row below a published ID: ALTER TABLE {part} "
                f'ALTER "{column}" DROP IDENTITY IF EXISTS; ALTER TABLE {part} ALTER "{column}" '
                f"SET DEFAULT {self.direction.minus}nextval({literal(self.sequence)})"
            )
        if definition.instance_column is not None and has_pair(session, definition, self._table):
            self._query.newest = self.seek_newest("::text")
        if has_index(session, table or "", definition.id_column, partial=definition.where is not None):
            self._indexed = [self._query]
            return [*warnings, *warnings_about(session, definition, self._table, self.sequence)]
        return [*warnings, self.missing_index(self._query)]

    def insert(self, session: PostgresSession, written: Sequence[WrittenFact]) -> None:
        """Store the rows of facts, one value a column, unless the application has; StoreError if they differ.

        They are read again, because a follower that reads them later must receive what another follower receives now.
        A column may turn a number into a text, ``where`` may exclude the row, and the application may have written
        another row.
        """
        for writer, facts in written:
            kept = self._read(session, writer, [fact.token for fact in facts])
            missing = [fact for fact in facts if fact.token not in kept]
            rows = [self._parameters(writer, fact.token, text) for fact in missing for text in fact.texts]
            if rows:
                with self.refused_rows(is_refusal):
                    session.executemany(self._insert, rows)
                with self.reading_again():
                    kept.update(self._read(session, writer, [fact.token for fact in missing]))
            for token, texts in facts:
                if sorted(kept.get(token, [])) != sorted(texts):  # followers receive them in the order of the table
                    was_there = all(token != fact.token for fact in missing)
                    raise differs(self.definition, token, texts, kept.get(token, []), was_there=was_there)

    def rows(self, session: PostgresSession, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Rows:
        """Return a page; StoreError names a column with a value that JSON cannot express."""
        span = self._query.parameters(writer, after, upto, limit + 1)
        found = self._typed(session, lambda: session.typed(self._query.page, span, prepare=False, again=True))
        tokens: list[Token] = [row[0] for row in found]
        rows = cut_rows(tokens, self._encode(found), upto=upto, limit=limit)
        return rows or Rows.of_fact(tokens[0], self._read(session, writer, tokens[:1])[tokens[0]], upto)

    # ---- inside

    def _refused(self, why: str) -> SchemaError:
        return SchemaError(
            f"stream {self.definition.name!r} cannot be mapped onto table {self.definition.table!r}{why}"
        )

    def _check_columns(self, session: PostgresSession) -> None:
        definition = self.definition
        kinds = session.run(KIND, (self._table,))
        if not kinds:
            raise self._refused(": there is no table of that name")
        if kinds[0][0] not in ("r", "p"):
            raise self._refused(", a view or the like: map the table behind it")
        there = [column for (column,) in session.run(COLUMNS, (self._table,))]
        instance = [definition.instance_column] if definition.instance_column else []
        missing = [each for each in (definition.id_column, *instance, *self._columns) if each not in there]
        if missing:
            raise self._refused(f": it has no column {', '.join(missing)}, only {', '.join(there)}")
        if len(definition.writers) > 1 and not instance:
            raise self._refused(": no column has the writer of a row, and there are several: give instance_column")
        if definition.where is not None:
            try:
                session.run(f"SELECT FROM {self._table} AS source WHERE ({definition.where}) LIMIT 0")
            except StoreError as error:
                raise self._refused(f": where = {definition.where!r} does not work: {error}") from error
        if instance and session.typed(f'SELECT "{instance[0]}" FROM {self._table} LIMIT 0')[0][0] not in _TEXTS:
            raise self._refused(f": column {instance[0]!r} is not a text, so it has no instance names")

    def _read_types(self, session: PostgresSession) -> None:
        query = self._query
        sql = f"SELECT {query.id}, {', '.join(query.values)} FROM {query.table}"
        kinds = types_of(session, sql, self.definition.id_column)
        values, self._types = typed(query.values, kinds)
        self._json = [code in JSON_TYPES for code, _ in kinds]
        query.shape(values)

    def _typed(self, session: PostgresSession, read: Callable[[], TypedRows]) -> list[tuple[Any, ...]]:
        """Return the rows of a query; if columns have other types meanwhile, read types and rows again."""
        for _ in range(RETYPED):
            codes, rows = read()
            if self._types.are(codes):
                return self._types.cut(rows)
            self._read_types(session)
        raise self._refused(": its columns change their types all the time")

    def _read(self, session: PostgresSession, writer: InstanceName, tokens: Sequence[Token]) -> dict[Token, list[str]]:
        """Return the rows of facts, by token."""
        span = [[self.direction.sign * token for token in tokens], *self.own(writer)]
        rows = self._typed(session, lambda: session.typed(self._query.kept, span, prepare=False))
        kept: dict[Token, list[str]] = {}
        for row, text in zip(rows, self._encode(rows), strict=True):
            kept.setdefault(Token(row[0]), []).append(text)
        return kept

    def _encode(self, rows: Sequence[tuple[Any, ...]]) -> list[str]:
        if any(self._json):
            rows = [(row[0], *self._read_columns(row)) for row in rows]
        return self.encode_rows(rows)

    def _read_columns(self, row: tuple[Any, ...]) -> Iterator[Any]:
        for column, is_json, value in zip(self._columns, self._json, row[1:], strict=True):
            try:
                yield grammar.read_json(value) if is_json and value is not None else value
            except RemoteProtocolError as error:
                raise self.not_json(row[0], column, error) from error

    def _parameters(self, writer: InstanceName, token: Token, text: str) -> list[Any]:
        values = [
            grammar.encode_row(value) if is_json and value is not None else value
            for is_json, value in zip(self._json, self.parse(text), strict=True)
        ]
        return [self.direction.sign * token, *self.own(writer), *values]


def types_of(session: PostgresSession, sql: str, id_column: str) -> list[tuple[int, bool]]:
    """Return type, and whether it is an array, of each column after the first.

    SchemaError if the first is no ID, or if a column's text depends on the session's settings.
    """
    (place, *codes), _ = session.typed(f"{sql} LIMIT 0", prepare=False)
    if place not in _INTEGERS:
        raise SchemaError(f"column {id_column!r} is not an integer")
    for kind, setting, value in session.run(_OF_SESSION, (codes,)):
        raise SchemaError(f"a column of the type {kind!r} {_CURES[setting].format(value)}")
    arrays = dict(session.run(_IS_ARRAY, (codes,)))
    return [(code, arrays[code]) for code in codes]


def sequence_of(session: PostgresSession, table: str, column: str) -> str | None:
    """Return the sequence of a column of a table, quoted; None if it is unknown."""
    ((found,),) = session.run(_SEQUENCE_OF, (table, column) * 2)
    return None if found is None else str(found)


def other_sequences(session: PostgresSession, tables: Sequence[Table]) -> dict[Table, str]:
    """Return the tables whose ID column has another sequence than at their declaration, and that sequence, quoted."""
    asked = [
        (table, quoted(name), column, table.sequence, *table.objects)
        for table in tables
        if isinstance(table, MappedTable) and table.default_id is not None
        for name, column in [table.default_id]
    ]
    columns = [[each[place] for each in asked] for place in range(1, 6)]
    return {asked[place][0]: found for place, found in session.ask(_OTHER_SEQUENCES, columns)} if asked else {}


def has_index(session: PostgresSession, table: str, column: str, *, partial: bool) -> bool:
    """Whether there is an index on the ID; with ``partial``, a partial index will do."""
    return bool(session.run(_INDEXES, (quoted(table), column, partial)))


class Types(NamedTuple):
    """The types that expressions had when their SQL was made: ALTER TABLE may change them while a process runs.

    ``places`` are the columns of the query that have these types.  Columns after ``width`` exist only for their type.
    """

    codes: Sequence[int] = ()
    places: Sequence[int] = ()
    width: int = 0

    def are(self, codes: Sequence[int]) -> bool:
        """Whether the columns of a result have these types."""
        return [codes[place] for place in self.places] == self.codes

    def cut(self, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return rows without the columns that only have a type."""
        return [row[: self.width] for row in rows] if rows and len(rows[0]) > self.width else rows


def typed(values: Sequence[str], kinds: Sequence[tuple[int, bool]]) -> tuple[list[str], Types]:
    """Return the SQL of ``values`` as JSON has them, and their types.

    An expression that JSON has in another form is followed, at the end, by a NULL of its type.
    """
    changed = [as_json(value, *kind) for value, kind in zip(values, kinds, strict=True)]
    width, places, nulls = len(values) + 1, list[int](), list[str]()
    for place, (value, as_other) in enumerate(zip(values, changed, strict=True), 1):
        places.append(place if value == as_other else width + len(nulls))
        if value != as_other:
            nulls.append(f"CASE WHEN true THEN NULL ELSE {value} END")
    return [*changed, *nulls], Types([code for code, _ in kinds], places, width)


def as_json(column: str, code: int, is_array: bool) -> str:  # noqa: FBT001
    """Return the SQL for a column of this type as JSON has it."""
    if code in _AS_IN_JSON:
        return column
    if code in JSON_TYPES:
        return f"{column}::text"
    if is_array:
        return f"{column}::text[]"
    if code == _TIME:
        return f"to_json({column} AT TIME ZONE 'UTC') #>> '{{}}' || '+00:00'"
    return f"to_json({column}) #>> '{{}}'"
