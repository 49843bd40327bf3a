"""A master that moves all facts out of a restored Synapse database, and writes them again.

``loading.py URL SERVER_NAME`` prints its endpoint, waits for a line, writes each fact with SQL, under the ID that
it had, and prints, as JSON, the last token of each stream.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
from twisted.internet import defer, endpoints, task, threads

from replication import Master
from replication.storage import open_store
from replication.streams.definitions import SourceTable
from replication.synapse import STREAMS
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.streams.definitions import Dialect, StreamDefinition

IDS = {"id", "stream_id", "stream_ordering", "event_stream_ordering", "event_id"}
CHUNK = 50  # facts in a transaction
Columns = dict[str, list[str]]  # by table


def tables_of(definition: StreamDefinition, dialect: Dialect) -> Sequence[SourceTable]:
    """Return the tables that a stream's rows come from, each once."""
    if definition.maps(dialect):
        return [SourceTable(table=definition.table or "", id_column=definition.id_column, row=[])]
    return definition.sources(dialect)


def take_out(url: str, dialect: Dialect, tables: Sequence[str]) -> Columns:
    """Move all rows to ``recorded_TABLE``, with their order in ``place``, and leave the tables empty."""
    if dialect == "sqlite":
        connect: Any = closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None))
        place, empty = "rowid", "DELETE FROM {}"
    else:
        connect = psycopg.connect(url, autocommit=True)
        place, empty = "row_number() OVER (ORDER BY ctid)", "TRUNCATE {} CASCADE"
    columns = {}
    with connect as database:
        for table in tables:
            found = database.execute(f"SELECT * FROM {table} LIMIT 0").description
            columns[table] = [each[0] for each in found]
            database.execute(f"CREATE TABLE recorded_{table} AS SELECT {place} AS place, * FROM {table}")
            database.execute(empty.format(table))
            for column in {*columns[table]} & IDS:
                database.execute(f"CREATE INDEX recorded_{table}_{column} ON recorded_{table} ({column})")
        database.execute("DELETE FROM stream_positions")
        if dialect == "postgresql":
            for (name,) in database.execute("SELECT oid::regclass FROM pg_class WHERE relkind = 'S'").fetchall():
                database.execute("SELECT setval(%s, 1)", (name,))
    return columns


async def read_all(reactor: Any, url: str) -> dict[str, dict[int, list[Any]]]:
    """Return all rows, by stream and token."""
    store = open_store(url, reactor)
    await store.open()
    facts: dict[str, dict[int, list[Any]]] = {}
    for each in STREAMS:
        if not each.definition.in_memory:
            await store.declare(each.definition)
            ask = {"after": Token(0), "upto": Token(10**9), "limit": 10**6}
            page = await store.facts(each.name, InstanceName("master"), **ask)  # type: ignore[arg-type]
            facts[each.name] = {fact.token: fact.rows for fact in page.facts}
    await store.close()
    return facts


class Loader:
    """Writes all rows again, as facts of a master."""

    def __init__(self, master: Master, dialect: Dialect, facts: Mapping[str, Mapping[int, Sequence[Any]]]) -> None:
        self.master = master
        self.dialect: Dialect = dialect
        self.mark = "?" if dialect == "sqlite" else "%s"
        self.facts = facts
        self.columns: Columns = {}

    async def load(self, generator: Sequence[StreamDefinition]) -> None:
        """Write the facts of streams that share their IDs."""
        owners = {token: each for each in generator for token in self.facts[each.name]}
        at, last = 1, max(owners, default=1)
        while at < last:
            first = next(owners[token] for token in range(at + 1, last + 1) if token in owners)
            end = at + 1
            while end < last and end - at < CHUNK and owners.get(end + 1, first) is first:
                end += 1
            async with self.master.stream(first.name).reserve(end - at) as opened:
                assert [fact.token for fact in opened] == [*range(at + 1, end + 1)]
                for fact in opened:
                    for row in self.facts[first.name].get(fact.token, ()):
                        await fact.write(row)
                if owned := [fact.stream_id for fact in opened if fact.token in owners]:
                    await self.put_in(opened[0], first, owned)
            at = end

    async def put_in(self, fact: Any, definition: StreamDefinition, ids: Sequence[int]) -> None:
        """Insert the rows of facts by SQL, as Synapse did."""
        marks = ", ".join([self.mark] * len(ids))
        for source in tables_of(definition, self.dialect):
            if source.table == "ex_outlier_stream":  # its event may have come under another ID, sooner or later
                outlier = f"SELECT event_id FROM recorded_ex_outlier_stream WHERE event_stream_ordering IN ({marks})"
                await self.copy(fact, "events", f"event_id IN ({outlier})", ids)
            where = f"{source.id_column} IN ({marks})"
            await self.copy(fact, source.table, where, ids)
            if self.dialect == "postgresql" and source.table == "current_state_delta_stream":
                while not await self.is_in_order(fact, source, where, ids):
                    await fact.execute(f"DELETE FROM {source.table} WHERE {where}", ids)
                    await self.copy(fact, source.table, where, ids)

    async def copy(self, fact: Any, table: str, where: str, ids: Sequence[int]) -> None:
        """Copy rows."""
        columns = ", ".join(self.columns[table])
        insert = f"INSERT INTO {table} ({columns}) SELECT {columns} FROM recorded_{table} WHERE {where}"
        await fact.execute(f"{insert} ORDER BY place ON CONFLICT DO NOTHING", ids)

    async def is_in_order(self, fact: Any, source: SourceTable, where: str, ids: Sequence[int]) -> bool:
        """Whether the rows of each fact have their old physical order, which PostgreSQL may not keep by itself."""
        columns = ", ".join(self.columns[source.table])
        ask = f"SELECT {columns} FROM {{}}{source.table} WHERE {where} ORDER BY {source.id_column}, {{}}"
        there: bool = await fact.execute(ask.format("", "ctid"), ids) == await fact.execute(
            ask.format("recorded_", "place"), ids
        )
        return there


async def main(reactor: Any, url: str, server_name: str) -> None:
    """Serve until stdin ends."""
    dialect: Dialect = "sqlite" if url.startswith("sqlite") else "postgresql"
    definitions = [each.definition for each in STREAMS]
    facts = await read_all(reactor, url)
    master = Master(server_name=server_name, database=url, streams=definitions, reactor=reactor)
    loader = Loader(master, dialect, facts)
    tables = {source.table for each in definitions for source in tables_of(each, dialect)}
    loader.columns = take_out(url, dialect, sorted(tables))
    await master.start()
    endpoint = endpoints.serverFromString(reactor, "tcp:0:interface=127.0.0.1")
    address = (await endpoint.listen(master.factory())).getHost()
    sys.stdout.write(f"{address.host}:{address.port}\n")
    sys.stdout.flush()
    await threads.deferToThread(sys.stdin.readline)
    generators: dict[StreamName, list[StreamDefinition]] = {}
    for each in definitions:
        if facts.get(each.name):
            generators.setdefault(each.shares or each.name, []).append(each)
    await defer.gatherResults([defer.Deferred.fromCoroutine(loader.load(each)) for each in generators.values()])
    sys.stdout.write(json.dumps({stream: max(each) for stream, each in facts.items() if each}) + "\n")
    sys.stdout.flush()
    await defer.Deferred()


if __name__ == "__main__":
    task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor, *sys.argv[1:])))
