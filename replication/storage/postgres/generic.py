"""The generic table ``stream_NAME`` in PostgreSQL."""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which accepts plain names only

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.storage.generic import GenericRows, newest_of
from replication.storage.names import quoted, relation_name
from replication.storage.pages import SEPARATOR
from replication.storage.postgres.session import PostgresSession
from replication.storage.table import StreamTable
from replication.storage.tables.kept_facts import EXISTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.storage.contract import WrittenFact
    from replication.streams.definitions import StreamDefinition
    from replication.wire.grammar import InstanceName, Token

KIND: Final = "SELECT relkind::text FROM pg_class WHERE oid = to_regclass(%s)"  # "r" is a table
COLUMNS: Final = (  # in order
    "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped "
    "ORDER BY attnum"
)

Table = StreamTable[PostgresSession]


class GenericTable(GenericRows[PostgresSession]):
    """``stream_NAME``.

    The index on writer and ID is for streams of several writers: to find a writer's newest fact, or a page of its
    facts, reads no facts of the other writers.
    """

    def __init__(self, definition: StreamDefinition) -> None:
        super().__init__(definition, relation_name(definition.name), "%s")
        way, table = self.direction, quoted(self.name)
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
        some = (
            f'FROM (SELECT stream_id, "row" FROM {table} WHERE instance_name = %s AND stream_id {way.above} %s '
            f"AND stream_id {way.upto} %s ORDER BY stream_id {way.order}, ord LIMIT %s) AS page"
        )
        page = f"SELECT string_agg(({way.minus}stream_id)::text, ','), string_agg(\"row\", '{SEPARATOR}')"
        self._page = f"{page}, ({EXISTS['postgresql']}) {some}"
        gone = f"SELECT stream_id FROM gone_facts WHERE stream_name = '{definition.name}' AND instance_name = %s"
        self._page_after_gone = f"{page}, ({gone}) {some}"
        self._measure = f'SELECT {way.furthest}(stream_id), count(*), coalesce(sum(length("row")), 0) {some}'
        # By the index, from each writer's name to the next name, and to its last fact: the history is not scanned.
        self.select_newest = (
            f"WITH RECURSIVE writers (name) AS (SELECT min(instance_name) FROM {table} UNION ALL "
            f"SELECT (SELECT min(instance_name) FROM {table} WHERE instance_name > name) FROM writers "
            "WHERE name IS NOT NULL) "
            f"SELECT name, (SELECT {way.minus}{way.furthest}(stream_id) FROM {table} WHERE instance_name = name) "
            "FROM writers WHERE name IS NOT NULL"
        )

    def declare(self, session: PostgresSession, *, may_create: bool) -> Sequence[str]:
        """Create the table unless it exists; SchemaError if another program created one of that name."""
        if may_create and self.is_missing(session):
            self.create(session)
        self.check_columns([name for (name,) in session.run(COLUMNS, (quoted(self.name),))])
        return ()

    def is_missing(self, session: PostgresSession) -> bool:
        """Whether there is no table of that name."""
        return not session.run(KIND, (quoted(self.name),))

    def create(self, session: PostgresSession) -> None:
        """Create the table, before the next statement of the transaction."""
        for statement in self._create:
            session.add(statement, ())

    def insert(self, session: PostgresSession, written: Sequence[WrittenFact]) -> None:
        """Store the rows of facts in one statement."""
        if rows := self.rows_of(written):
            ids, places, writers, texts = zip(*rows, strict=True)
            arrays = [f"{{{','.join(map(str, ids))}}}", f"{{{','.join(map(str, places))}}}"]
            session.add(self._insert, [*arrays, SEPARATOR.join(writers), SEPARATOR.join(texts)])

    def newest(self, session: PostgresSession, stored: Mapping[InstanceName, Token]) -> Mapping[InstanceName, Token]:  # noqa: ARG002 - the index is fast
        """Return each writer's largest token."""
        return newest_of(session.ask(self.select_newest))
