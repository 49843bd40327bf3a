"""Replay from PostgreSQL: the same lines as from SQLite and from the live master."""

from __future__ import annotations

import random
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_postgresql", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("psycopg", reason="pip install '.[postgres]' in the checkout")

from replication.errors import ConfigError, StoreError, UnknownStreamError
from replication.segments import databases
from replication.segments.databases import open_database
from replication.segments.files import verify
from replication.segments.folders import LocalFolder
from replication.segments.manifest import read_manifest
from replication.segments.run import ReplayRequest, SegmentOptions, run_in_process
from replication.storage.postgres.store import PostgresStore
from replication.streams.definitions import StreamDefinition
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.segments.histories import MASTER, OTHER, fact, lines_of, live_lines, write_database
from tests.storage.pump import Pump
from tests.system.daemons import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from replication.streams.facts import Fact
    from tests.postgres import PostgresServer

FACTS = [
    fact(token, *[["é\u2028", token, {"k": index}, "x" * (token % 50)] for index in range(token % 3 + 1)])
    for token in range(2, 400, 2)
]


class Database:
    """One database of the server of this run."""

    def __init__(self, server: PostgresServer, name: str) -> None:
        self.server = server
        self.name = name
        self.url = server.url(name)

    def sql(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        return self.server.sql(sql, *parameters, database=self.name)

    def write(self, definition: StreamDefinition | str, histories: Mapping[str, Sequence[Fact]], upto: int = 0) -> None:
        """Store facts with the store's own code."""
        stream = StreamDefinition(definition) if isinstance(definition, str) else definition

        async def work() -> None:
            store = PostgresStore(self.url, pump)
            await store.open()
            await store.declare(stream)
            for writer, facts in histories.items():
                end = Token(upto or facts[-1].token)
                await store.transaction().commit([Write(stream.name, InstanceName(writer), end, facts)])
            await store.close()

        pump = Pump()
        pump.wait(work())


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[Database]:
    with postgres.database() as name:
        yield Database(postgres, name)


def replay(url: str, folder: Path, rows: int = 40, **changes: Any) -> None:
    run_in_process(ReplayRequest(url, str(folder), options=SegmentOptions(rows, "gzip"), **changes))
    assert [fault for _, fault in verify(LocalFolder(folder)) if fault] == []


def lines(folder: Path, writer: str = MASTER, stream: str = "orders") -> bytes:
    manifest = read_manifest(LocalFolder(folder))
    assert manifest is not None
    chain = manifest.chains().get((StreamName(stream), InstanceName(writer)), [])
    return b"".join(lines_of(LocalFolder(folder), each) for each in chain)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in LocalFolder(folder).names()}


def test_postgresql_and_sqlite_give_the_same_files(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are so small that they end inside facts."""
    monkeypatch.setattr(databases, "BATCH_BYTES", 300)
    monkeypatch.setattr(databases, "BATCH_ROWS", 3)
    dealt: dict[str, list[Fact]] = {MASTER: FACTS[::2], OTHER: FACTS[1::2]}
    for stream in ("orders", "x" * 80):
        lite = write_database(tmp_path / "m.db", dealt, stream=stream)
        database.write(stream, dealt)
    replay(lite, tmp_path / "lite")
    replay(database.url, tmp_path / "postgres")
    assert contents(tmp_path / "lite") == contents(tmp_path / "postgres")
    assert lines(tmp_path / "postgres", OTHER) == live_lines(FACTS[1::2], OTHER)


def test_a_table_that_counts_downwards_is_read_up_to_its_position(database: Database, tmp_path: Path) -> None:
    database.write(StreamDefinition("orders", negative=True), {MASTER: FACTS})
    database.sql("UPDATE stream_positions SET stream_id = -101")
    replay(database.url, tmp_path / "out")
    assert lines(tmp_path / "out") == live_lines([each for each in FACTS if each.token <= 101])


MAPPED = StreamDefinition(
    "shop",
    table="shop",
    id_column="n",
    instance_column="writer",
    row=("a", "flag", "amount", "total", "at", "doc", "tags", "raw"),
    where="a <> 'hidden'",
)


def make_shop(database: Database, count: int) -> None:
    database.sql(
        "CREATE TABLE shop (n bigint, writer text, a text, flag boolean, amount double precision, total numeric, "
        "at timestamptz, doc jsonb, tags text[], raw json)"
    )
    database.sql("CREATE INDEX ON shop (n)")
    chance = random.Random(4)
    for number in range(2, count):
        for _ in range(chance.choice([1, 1, 3])):
            database.sql(
                "INSERT INTO shop VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
                number,
                chance.choice([None, "master", "worker2"]) if number % 5 else "master",
                chance.choice(["é", '"\\', "hidden", "", "\x7f"]),
                chance.choice([True, False, None]),
                chance.choice([1.0, 1e-7, 1e16, 0.1, None]),
                chance.choice(["1.50", "0.0000001", None]),
                "2026-11-20 12:34:56.789+02",
                '{"b": 1.0, "a": [null, "é"]}',
                ["x", None, "y"],
                '{"z" : 1, "y":  "\\u00e9"}',
            )


def test_a_mapped_table_gives_the_same_bytes_as_the_store(database: Database, tmp_path: Path) -> None:
    make_shop(database, 40)
    database.write(MAPPED, {MASTER: [], OTHER: []}, upto=39)
    replay(database.url, tmp_path / "out", rows=10, definitions=[MAPPED])

    async def pages() -> dict[str, list[Fact]]:
        store = PostgresStore(database.url, pump, read_only=True)
        await store.open()
        await store.declare(MAPPED)
        found: dict[str, list[Fact]] = {}
        for writer in (MASTER, OTHER):
            page = await store.facts(MAPPED.name, writer, after=Token(0), upto=Token(39), limit=10_000)
            found[writer] = list(page.facts)
        await store.close()
        return found

    pump = Pump()
    for writer, facts in pump.wait(pages()).items():
        assert facts
        assert lines(tmp_path / "out", writer, "shop") == live_lines(facts, writer, "shop")


def test_errors_do_not_contain_the_password(database: Database, tmp_path: Path) -> None:
    url = database.url.replace("postgres@", "postgres:s3cret@")
    with pytest.raises(StoreError, match="stream_positions") as raised:
        replay(url, tmp_path / "out")
    assert "s3cret" not in str(raised.value)
    database.write("orders", {MASTER: FACTS})
    with pytest.raises(UnknownStreamError, match=r"no stream 'odrers' in .*; it has orders"):
        replay(url, tmp_path / "out", streams=["odrers"])
    with pytest.raises(StoreError, match=r"database 'postgresql://me@127.0.0.1:1/x': ") as raised:
        replay("postgresql://me:s3cret@127.0.0.1:1/x", tmp_path / "out")
    assert "s3cret" not in str(raised.value)


def test_the_database_is_opened_read_only(database: Database) -> None:
    database.write("orders", {MASTER: FACTS})
    with closing(open_database(database.url)) as opened:
        with pytest.raises(StoreError, match="read-only"):
            list(opened.batches("DELETE FROM stream_orders RETURNING stream_id"))
        assert len(opened.rows("SELECT 1 FROM stream_orders")) == sum(len(each.texts) for each in FACTS)


def test_the_handle_of_a_server_survives_a_restart(database: Database) -> None:
    database.write("orders", {MASTER: FACTS})
    here = (
        f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{database.name}' AND pid <> pg_backend_pid() "
        "AND backend_type = 'client backend'"
    )

    def read() -> int:
        with closing(open_database(database.url)) as opened:
            until(lambda: database.sql(here) == [(1,)], "there is one session")
            return sum(batch.num_rows for batch in opened.batches("SELECT stream_id FROM stream_orders"))

    before = read()
    assert before == sum(len(each.texts) for each in FACTS)
    until(lambda: database.sql(here) == [(0,)], "the session has ended")
    database.server.stop("immediate")
    try:
        with pytest.raises(StoreError, match=database.name):
            open_database(database.url)
    finally:
        database.server.start()
    assert read() == before


def test_a_mapped_table_without_psycopg_names_the_extra(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "replication.storage.postgres.session")
    monkeypatch.delattr("replication.storage.postgres.session")
    definition = StreamDefinition("items", table="items", row=["item"], id_column="id")
    with closing(open_database(database.url)) as opened, pytest.raises(ConfigError) as error:
        opened.pages(definition)
    assert str(error.value).startswith("mapped tables in PostgreSQL need psycopg: ")
    assert ".[postgres]" in str(error.value)
