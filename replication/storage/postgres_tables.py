"""Where PostgreSQL keeps the facts of one stream: what a table of facts must do, and the generic one, which is ours."""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which lets plain ones through only

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final, Protocol

from replication.errors import SchemaError, StoreError
from replication.storage.pages import SEPARATOR, Rows, cut_rows, split_rows
from replication.storage.tables import DOWN, UP
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.storage.postgres_session import PostgresSession
    from replication.storage.tables import Direction
    from replication.streams.facts import Fact
    from replication.streams.registry import StreamDefinition

NAME_LENGTH: Final = 63  # PostgreSQL cuts longer names off without a word
_TOO_LARGE: Final = "54000"  # program_limit_exceeded: no value has more than a gigabyte

# What kind of relation has a name, if any ("r" is a table), and its columns in order.
KIND: Final = "SELECT relkind::text FROM pg_class WHERE oid = to_regclass(%s)"
COLUMNS: Final = (
    "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped "
    "ORDER BY attnum"
)

Written = tuple[InstanceName, "Sequence[Fact]"]


class Table(Protocol):
    """Where the facts of one stream are, and which sequence their IDs come from."""

    definition: StreamDefinition
    direction: Direction
    sequence: str  # as SQL spells it
    sources: Sequence[str]  # likewise, the tables of the application that others may insert into
    gives_ids: tuple[str, str] | None  # one of those that gives IDs to anybody, and its column, once it was declared

    def declare(self, session: PostgresSession, *, may_create: bool) -> Sequence[str]:
        """Make sure that the table is there and fits, else SchemaError; returns warnings."""
        ...

    def insert(self, session: PostgresSession, written: Sequence[Written]) -> None:
        """Store the rows of facts, of one writer or several."""
        ...

    def delete(self, session: PostgresSession, writer: InstanceName, above: Token) -> None:
        """Delete what ``writer`` wrote above a token."""
        ...

    def rows(self, session: PostgresSession, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Rows:
        """Return a page as ``IStreamStore.facts`` does, as columns."""
        ...

    def newest(self, session: PostgresSession, stored: Mapping[InstanceName, Token]) -> Mapping[InstanceName, Token]:
        """Return each writer's largest token; ``stored`` are the positions that were stored."""
        ...

    def beyond(self, token: Token) -> Sequence[str]:
        """Return SQL that asks by an index, in tables of the application, for the largest token above one."""
        ...


class GenericTable:
    """``stream_NAME``: a row of the table is a row of the stream, as the text that travels.

    The second index is for a writer of many: what is its newest fact, and its part of the stream, cost nothing more for
    what others wrote.
    """

    COLUMNS: Final = ("stream_id", "ord", "instance_name", "row")
    sources: Sequence[str] = ()
    gives_ids: tuple[str, str] | None = None

    def __init__(self, definition: StreamDefinition) -> None:
        self.definition = definition
        self.direction = DOWN if definition.negative else UP
        self.name = relation_name(definition.name)
        self.sequence = quoted(relation_name(definition.generator, "_seq"))
        way, table = self.direction, quoted(self.name)
        minus = "-" if definition.negative else ""
        columns = 'stream_id bigint NOT NULL, ord integer NOT NULL, instance_name text NOT NULL, "row" text NOT NULL'
        self._create = (
            f"CREATE TABLE {table} ({columns}, PRIMARY KEY (stream_id, ord))",
            f"CREATE INDEX ON {table} (instance_name, stream_id {way.order}, ord)",
        )
        self._insert = (
            f'INSERT INTO {table} (stream_id, ord, instance_name, "row") '
            "SELECT * FROM unnest(%s::bigint[], %s::integer[], "
            f"string_to_array(%s, '{SEPARATOR}'), string_to_array(%s, '{SEPARATOR}'))"
        )
        self._delete = f"DELETE FROM {table} WHERE stream_id {way.above} %s AND instance_name = %s"
        # One value for a whole page, because the driver lets go of the interpreter's lock for each part of an answer:
        # row by row, a page beside a busy reactor took 20 times as long.
        self._page = (
            f"SELECT string_agg(({minus}stream_id)::text, ','), string_agg(\"row\", '{SEPARATOR}') FROM ("
            f'SELECT stream_id, "row" FROM {table} WHERE instance_name = %s AND stream_id {way.above} %s '
            f"AND stream_id {way.upto} %s ORDER BY stream_id {way.order}, ord LIMIT %s) AS page"
        )
        self._fact = f'SELECT "row" FROM {table} WHERE stream_id = %s ORDER BY ord'
        # From each writer's name to the next one, and to its last fact: by the index, however long the history is.
        self._newest = (
            f"WITH RECURSIVE writers (name) AS (SELECT min(instance_name) FROM {table} UNION ALL "
            f"SELECT (SELECT min(instance_name) FROM {table} WHERE instance_name > name) FROM writers "
            "WHERE name IS NOT NULL) "
            f"SELECT name, (SELECT {minus}{way.furthest}(stream_id) FROM {table} WHERE instance_name = name) "
            "FROM writers WHERE name IS NOT NULL"
        )

    def declare(self, session: PostgresSession, *, may_create: bool) -> Sequence[str]:
        """Create the table unless it is there; SchemaError if one of that name is not ours."""
        if may_create and not session.run(KIND, (quoted(self.name),)):
            for statement in self._create:
                session.run(statement)
        columns = [name for (name,) in session.run(COLUMNS, (quoted(self.name),))]
        if not columns:
            raise SchemaError(
                f"there is no table {self.name!r}: nothing of stream {self.definition.name!r} is kept here"
            )
        if columns != [*self.COLUMNS]:
            raise SchemaError(
                f"table {self.name!r} has the columns {', '.join(columns)}, so it is not one of ours: "
                f"rename it, or map stream {self.definition.name!r} onto it"
            )
        return ()

    def insert(self, session: PostgresSession, written: Sequence[Written]) -> None:
        """Store the rows of facts in one statement."""
        sign = self.direction.sign
        rows = [
            (str(sign * token), str(place), writer, text)
            for writer, facts in written
            for token, texts in facts
            for place, text in enumerate(texts)
        ]
        if rows:
            tokens, places, writers, texts = zip(*rows, strict=True)
            arrays = [f"{{{','.join(tokens)}}}", f"{{{','.join(places)}}}"]
            session.add(self._insert, [*arrays, SEPARATOR.join(writers), SEPARATOR.join(texts)])

    def delete(self, session: PostgresSession, writer: InstanceName, above: Token) -> None:
        """Delete what ``writer`` wrote above a token."""
        session.add(self._delete, (self.direction.sign * above, writer))

    def rows(self, session: PostgresSession, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Rows:
        """Return a page; a shorter one if what ``limit`` allows would not fit into one value of the database."""
        sign = self.direction.sign
        try:
            ((ids, texts),) = session.ask(self._page, (writer, sign * after, sign * upto, limit + 1))
        except StoreError as error:
            if limit == 1 or getattr(error.__cause__, "sqlstate", None) != _TOO_LARGE:
                raise
            return self.rows(session, writer, after=after, upto=upto, limit=limit // 2)
        if ids is None:
            return Rows([], [], upto, limited=False)
        tokens, texts = split_rows(self.name, ids, texts)
        rows = cut_rows(tokens, texts, upto=upto, limit=limit)
        if rows is not None:
            return rows
        whole = session.ask(self._fact, (sign * tokens[0],))
        return Rows.of_fact(tokens[0], [text for (text,) in whole], upto)

    def newest(
        self,
        session: PostgresSession,
        stored: Mapping[InstanceName, Token],  # noqa: ARG002 - the index is quick enough
    ) -> Mapping[InstanceName, Token]:
        """Return each writer's largest token."""
        return {InstanceName(writer): Token(token) for writer, token in session.ask(self._newest)}

    def beyond(self, token: Token) -> Sequence[str]:  # noqa: ARG002
        """Return nothing: nobody else inserts here."""
        return ()


def relation_name(stream: str, end: str = "") -> str:
    """Return the name of a stream's table, or of what goes with it; of a long one the end becomes a sum of all."""
    name = f"stream_{stream}{end}"
    if len(name) <= NAME_LENGTH:
        return name
    mark = f"~{sha256(stream.encode()).hexdigest()[:12]}{end}"  # no stream has a ~ in its name
    return name[: NAME_LENGTH - len(mark)] + mark


def quoted(name: str) -> str:
    """Return a plain name as SQL takes it whatever it is."""
    return f'"{name}"'
