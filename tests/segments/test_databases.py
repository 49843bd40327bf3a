"""Tests of the databases that the replay reads."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from replication.errors import ConfigError, StoreError
from replication.segments import databases
from replication.segments.databases import open_database, read_positions, resolve_url
from replication.storage.postgres import options
from replication.storage.postgres.options import KEY_CURE, POLICY_CURE
from replication.streams.definitions import StreamDefinition
from replication.urls import Url
from replication.wire.grammar import InstanceName, Token
from tests.certificates import Authority
from tests.postgres import PostgresServer
from tests.segments.histories import MASTER, OTHER, fact, write_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from replication.segments.databases import Database

PSYCOPG = """
from threading import Event
from replication.storage.postgres import address, holder, session
connected = session.PostgresSession(address.Address.parse(URL), Event(), holder.Holder())
connected.connect()
"""
ADBC = """
from replication.segments.databases import open_database
open_database(URL)
"""


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_url("sqlite:///a.db").reveal() == f"sqlite:///{tmp_path}/a.db"
    assert resolve_url(f"sqlite:///{tmp_path}/a.db").reveal() == f"sqlite:///{tmp_path}/a.db"
    assert resolve_url("postgresql://me@here:5/db").reveal() == "postgresql://me@here:5/db"


def test_a_path_or_a_password_may_have_the_mark_that_ends_the_scheme() -> None:
    assert resolve_url("sqlite:////a://m.db").reveal() == "sqlite:////a:/m.db"
    assert resolve_url("postgresql://me@here/db?password=p://w").reveal() == "postgresql://me@here/db?password=p://w"


def test_a_password_is_not_part_of_a_message() -> None:
    with pytest.raises(ConfigError, match="'mysql://me@here/db'"):
        resolve_url("mysql://me:s3cret@here/db")


@pytest.mark.parametrize("password", ["x@s3cret", "20/s3cret", "x@s3cret/y"])
def test_a_password_of_which_the_driver_would_take_a_part_for_the_host_is_refused(password: str) -> None:
    with pytest.raises(ConfigError, match="write each of / : @") as refused:
        resolve_url(f"postgresql://me:{password}@127.0.0.1:1/db")
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///", "sqlite://a.db", "mysql://a/b", "a.db", "postgresql://", ""]
)
def test_a_url_that_names_no_database_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="give sqlite:///"):
        resolve_url(url)


def test_a_server_that_accepts_connections_and_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose processes are stopped.  ADBC would wait without end, and Ctrl-C would not end it."""
    pytest.importorskip("adbc_driver_postgresql", reason="pip install '.[spark]' in the checkout")
    monkeypatch.setattr(options, "OPTIONS", {"connect_timeout": 2})
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StoreError, match="timeout expired"):
        open_database(f"postgresql://me@127.0.0.1:{silent.getsockname()[1]}/db")


def test_options_of_a_url_stay_beside_those_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "OPTIONS", {"connect_timeout": 10, "keepalives_idle": 30})
    urls = ["postgresql://me@here", "postgresql://here/db?connect_timeout=2", "postgresql://here/db?sslmode=require"]
    assert [databases._with_options(url) for url in urls] == [
        "postgresql://me@here?connect_timeout=10&keepalives_idle=30",
        "postgresql://here/db?connect_timeout=2&keepalives_idle=30",
        "postgresql://here/db?sslmode=require&connect_timeout=10&keepalives_idle=30",
    ]


def test_of_several_hosts_the_primary_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As documented.  Where the plan of a run is from the primary, a standby may lack facts of its segments."""
    monkeypatch.setattr(options, "OPTIONS", {})
    several = ["postgresql://a,b/db", "postgresql://me:p,w@a:1,b:2/db", "postgresql:///db?host=a,b"]
    one = ["postgresql://me:p,w@here/db", "postgresql://here/a,b", "postgresql://a,b/db?target_session_attrs=any"]
    found = [databases._with_options(url).count("target_session_attrs=primary") for url in [*several, *one]]
    assert found == [1, 1, 1, 0, 0, 0]


@pytest.fixture(scope="module")
def key_with_password(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a server with TLS, for a client whose private key has the password ``secret``."""
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder, "authority")
    server, client = authority.issue("server", "127.0.0.1"), authority.issue("client", "postgres")
    client.lock()
    client.key.chmod(0o600)
    with PostgresServer(fsync=False) as with_tls:
        data = with_tls.folder / "data"
        owner = data.stat()
        for file, name in ((server.certificate, "server.crt"), (server.key, "server.key")):
            shutil.copy(file, data / name)
            (data / name).chmod(0o600)
            os.chown(data / name, owner.st_uid, owner.st_gid)
        with_tls.sql("ALTER SYSTEM SET ssl = on")
        with_tls.restart()
        yield f"{with_tls.url()}?sslmode=require&sslcert={client.certificate}&sslkey={client.key}"


def connect(how: str, url: str) -> str:
    """Connect in a process without a terminal, and return the last line of its output; fail if it waits."""
    program = how.replace("URL", repr(url))
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=60,
        check=False,
    )
    assert "pass phrase" not in done.stderr
    return done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize("how", [PSYCOPG, ADBC])
def test_a_private_key_with_a_password_is_an_error_that_names_file_and_cure(how: str, key_with_password: str) -> None:
    if how is ADBC:
        pytest.importorskip("adbc_driver_postgresql", reason="pip install '.[spark]' in the checkout")
    key = key_with_password.partition("sslkey=")[2]
    for wrong in ("", "&sslpassword=", "&sslpassword=wrong"):
        text = connect(how, key_with_password + wrong)
        assert f'could not load private key file "{key}": ' in text
        assert text.endswith(f"; {KEY_CURE}")
        assert "is missing or wrong: give the right one" in text
    assert connect(how, f"{key_with_password}&sslpassword=secret") == ""


def test_positions_include_every_writer_of_every_stream(tmp_path: Path) -> None:
    url = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a")], OTHER: [fact(9, "b")]})
    write_database(tmp_path / "m.db", {}, stream="caches", positions={MASTER: 70, "": 90})
    with closing(open_database(url)) as database:
        assert read_positions(database) == [("caches", MASTER, 70), ("orders", MASTER, 2), ("orders", OTHER, 9)]


def test_a_file_below_a_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with patch.object(Path, "is_file", side_effect=refused), pytest.raises(StoreError, match=r"m\.db.*Permission den"):
        open_database(f"sqlite:///{tmp_path}/m.db")


def test_a_missing_file_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no\.db.*no such file"):
        open_database(f"sqlite:///{tmp_path}/no.db")
    assert list(tmp_path.iterdir()) == []


def test_a_path_may_have_characters_that_urls_escape(tmp_path: Path) -> None:
    folder = tmp_path / "a b#c%20"
    folder.mkdir()
    url = write_database(folder / "m.db", {MASTER: [fact(2, "a")]})
    with closing(open_database(url)) as database:
        assert len(read_positions(database) or ()) == 1


def test_a_server_that_does_not_answer_is_named() -> None:
    pytest.importorskip("adbc_driver_postgresql", reason="pip install '.[spark]' in the checkout")
    with pytest.raises(StoreError, match=r"^database 'postgresql://me@127\.0\.0\.1:1/db': .*refused"):
        open_database("postgresql://me@127.0.0.1:1/db")


def test_a_part_of_a_password_that_the_driver_takes_for_an_option_is_not_quoted() -> None:
    pytest.importorskip("adbc_driver_postgresql", reason="pip install '.[spark]' in the checkout")
    for wrong in ("password=ab&hidden", "password=ab&hidden=", "sslpassword=ab&hidden"):
        with pytest.raises(StoreError, match=r"^database 'postgresql://me@127\.0\.0\.1:1/db\?…': .*%XX") as caught:
            open_database(f"postgresql://me@127.0.0.1:1/db?{wrong}")
        assert "hidden" not in str(caught.value)


def test_postgresql_without_its_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adbc_driver_manager", None)
    with pytest.raises(ConfigError, match=r"^history in PostgreSQL needs adbc_driver_manager: .*\.\[segments\]"):
        open_database("postgresql://me@127.0.0.1:1/db")


def test_a_file_that_is_not_a_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("no database at all" * 100)
    url = f"sqlite:///{tmp_path}/x.db"
    with closing(open_database(url)) as database, pytest.raises(StoreError, match=r"x\.db.*not a database"):
        database.rows("SELECT 1 FROM sqlite_master")


def test_batches_are_never_empty_and_driver_errors_become_store_errors(tmp_path: Path) -> None:
    pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")
    url = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a"), fact(3, "b")]})
    with closing(open_database(url)) as database:
        [batch] = database.batches('SELECT stream_id, "row" FROM stream_orders')
        assert batch.to_pydict() == {"stream_id": [2, 3], "row": ['"a"', '"b"']}
        assert list(database.batches("SELECT stream_id FROM stream_orders WHERE false")) == []
        with pytest.raises(StoreError, match=r"m\.db.*no such table: missing$"):
            list(database.batches("SELECT 1 FROM missing"))


def test_a_batch_of_long_rows_has_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8,000 rows of 250 kB were one batch, and took 4 GiB of memory."""
    pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")
    url = write_database(tmp_path / "m.db", {MASTER: [fact(token, "é" * 500) for token in range(2, 102)]})
    sql, longest = "SELECT stream_id FROM stream_orders", 'SELECT max(length("row")) FROM stream_orders'

    def sizes() -> list[int]:
        with closing(open_database(url)) as database:
            batches = list(database.batches(sql, longest))
        assert [token for batch in batches for token in batch.column(0).to_pylist()] == [*range(2, 102)]
        return [batch.num_rows for batch in batches]

    assert sizes() == [100], "a small file"
    monkeypatch.setattr(databases, "MAX_BATCH_BYTES", 40 * 3_002)
    assert sizes() == [100], "joined again"
    monkeypatch.setattr(databases, "JOINED_BYTES", 1)
    assert sizes() == [40, 40, 20]
    monkeypatch.setattr(databases, "MAX_BATCH_BYTES", 1)
    assert sizes() == [1] * 100
    sql, longest = f"{sql} WHERE stream_id > 101", f"{longest} WHERE stream_id > 101"
    with closing(open_database(url)) as database:
        assert list(database.batches(sql, longest)) == [], "no rows"


def test_the_database_is_opened_read_only(tmp_path: Path) -> None:
    url = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a")]})
    with closing(open_database(url)) as database, pytest.raises(StoreError, match="readonly"):
        database.rows("DELETE FROM stream_orders")


def test_a_writer_is_not_blocked_by_a_reader(tmp_path: Path) -> None:
    pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")
    url = write_database(tmp_path / "m.db", {MASTER: [fact(token, "a") for token in range(2, 40_000)]})
    with closing(open_database(url)) as database:
        batches = database.batches("SELECT stream_id FROM stream_orders ORDER BY 1")
        assert next(batches).num_rows == 16_384
        subprocess.run([sys.executable, "-c", DELETER, str(tmp_path / "m.db")], check=True)
        assert sum(batch.num_rows for batch in batches) == 40_000 - 2 - 16_384


DELETER = """
import sqlite3, sys
sqlite3.connect(sys.argv[1], isolation_level=None).execute("DELETE FROM stream_orders")
"""
HOLDER = """
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA journal_mode = DELETE")
database.execute("BEGIN EXCLUSIVE")
print(flush=True)
time.sleep(0.3)
"""


def test_both_sqlite_drivers_wait_for_a_lock(tmp_path: Path) -> None:
    """The first process that opens a database in WAL mode locks it for a moment."""
    pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")
    url = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a")]})
    asks: list[Callable[[Database, str], list[Any]]] = [
        lambda database, sql: database.rows(sql),
        lambda database, sql: list(database.batches(sql)),
    ]
    for ask in asks:
        command = [sys.executable, "-c", HOLDER, str(tmp_path / "m.db")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            with closing(open_database(url)) as database:
                assert len(ask(database, "SELECT ord FROM stream_orders")) == 1


POSTGRES = "postgresql://me@here:5/db"


class Error(Exception):
    """Drivers call their errors so."""


class Adbc:
    """A connection of ADBC to PostgreSQL, and its cursors: it notes what they run, and fails with ``error``."""

    def __init__(self) -> None:
        self.opened: list[object] = []
        self.ran: list[object] = []
        self.error: Exception | None = None
        self.adbc_statement = self

    def open(self, server: Any, session: object, *, autocommit: bool) -> Adbc:
        self.opened.append((server.database, session, autocommit))
        return self

    def cursor(self) -> Adbc:
        return self

    def set_options(self, **options: str) -> None:
        self.ran.append(options)

    def execute(self, sql: str) -> None:
        self.ran.append(sql)
        if self.error is not None:
            raise self.error

    def fetchall(self) -> list[tuple[int]]:
        return [(1,)]

    def fetch_record_batch(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(num_rows=rows) for rows in (2, 0, 3)]

    def close(self) -> None:
        self.ran.append("close")


@pytest.fixture
def adbc(monkeypatch: pytest.MonkeyPatch) -> Adbc:
    manager = pytest.importorskip("adbc_driver_manager", reason="pip install '.[spark]' in the checkout")
    connection = Adbc()
    monkeypatch.setattr(databases, "_server_at", lambda url: SimpleNamespace(database=f"handle of {url}"))
    monkeypatch.setattr(manager, "AdbcConnection", lambda handle: f"session of {handle}")
    monkeypatch.setattr("adbc_driver_manager.dbapi.Connection", connection.open)
    return connection


def test_postgresql_is_read_on_one_connection_and_its_errors_are_named(adbc: Adbc) -> None:
    handle = f"handle of {POSTGRES}"
    with closing(open_database(POSTGRES)) as database:
        assert adbc.opened == [(handle, f"session of {handle}", True)]
        assert database.rows("SELECT 1") == [(1,)]
        assert adbc.ran == ["SET row_security = off", "close", "SELECT 1", "close"]
        adbc.ran.clear()
        assert [batch.num_rows for batch in database.batches("SELECT 2")] == [2, 3]
        settings = [each for setting in databases.SETTINGS for each in (f"SET {setting}", "close")]
        size = {"adbc.postgresql.batch_size_hint_bytes": str(databases.BATCH_BYTES)}
        assert adbc.ran == [*settings, size, "SELECT 2", "close"]
        adbc.error = Error("no such table\nLINE 1")
        for ask in (database.rows, database.batches):
            with pytest.raises(StoreError, match=r"^database 'postgresql://me@here:5/db': no such table$"):
                list(ask("SELECT 3"))
        adbc.ran.clear()
    assert adbc.ran == ["close"]


def test_tables_in_postgresql_are_read_on_one_session_that_may_not_write(
    adbc: Adbc, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg", reason="pip install '.[postgres]' in the checkout")
    from replication.storage.postgres.address import Address
    from replication.storage.postgres.holder import Holder

    sessions: list[tuple[object, ...]] = []
    closed: list[object] = []
    declared: list[object] = []

    class Session:
        def __init__(self, *arguments: object) -> None:
            sessions.append((self, *arguments))

        def close(self) -> None:
            closed.append(self)

    class Table:
        def __init__(self, definition: StreamDefinition) -> None:
            self.name = definition.name

        def declare(self, session: object, *, may_create: bool) -> None:
            declared.append((self.name, session, may_create))

        def rows(self, session: object, writer: str, *, after: int, upto: int, limit: int) -> object:
            return self.name, session, writer, after, upto, limit

    monkeypatch.setattr("replication.storage.postgres.session.PostgresSession", Session)
    monkeypatch.setattr("replication.storage.postgres.joined.table_of", Table)
    with closing(open_database(POSTGRES)) as database:
        read = [database.pages(StreamDefinition(name)) for name in ("orders", "stock")]
        found: list[object] = [each(InstanceName(MASTER), after=Token(1), upto=Token(9), limit=5) for each in read]
    [(session, address, ending, holder, settings)] = sessions
    assert address == Address.parse(POSTGRES)
    assert settings == {"default_transaction_read_only": "on", "row_security": "off"}
    assert (type(ending), type(holder)) == (Event, Holder)
    assert declared == [("orders", session, False), ("stock", session, False)]
    assert found == [(name, session, MASTER, 1, 9, 5) for name in ("orders", "stock")]
    assert (closed, adbc.ran[2:]) == ([session], ["close"])
    assert Url(POSTGRES) == database.url


def test_tables_in_postgresql_without_psycopg_name_the_extra(adbc: Adbc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "replication.storage.postgres", None)
    with closing(open_database(POSTGRES)) as database, pytest.raises(ConfigError) as caught:
        database.pages(StreamDefinition("orders"))
    assert str(caught.value).startswith("mapped tables in PostgreSQL need replication.storage.postgres: pip install ")
    assert ".[postgres]" in str(caught.value)
    assert adbc.ran[2:] == ["close"]


def test_rows_that_a_policy_hides_are_an_error_and_are_not_left_out(postgres: PostgresServer) -> None:
    pytest.importorskip("adbc_driver_postgresql", reason="pip install '.[spark]' in the checkout")
    mapped = StreamDefinition("events", table="events", id_column="id", row=("name",))
    with postgres.database() as name:
        for sql in (
            "CREATE TABLE events (id bigint PRIMARY KEY, name text)",
            "CREATE ROLE partial LOGIN",
            "GRANT ALL ON ALL TABLES IN SCHEMA public TO partial",
            "CREATE POLICY most ON events USING (id <> 3)",
            "ALTER TABLE events ENABLE ROW LEVEL SECURITY",
            "INSERT INTO events VALUES (2, 'a'), (3, 'b')",
        ):
            postgres.sql(sql, database=name)
        try:
            with closing(open_database(postgres.url(name, "partial"))) as database:
                for ask in (
                    lambda: database.rows("SELECT * FROM events"),
                    lambda: [*database.batches("SELECT * FROM events")],
                    lambda: database.pages(mapped),
                ):
                    with pytest.raises(StoreError, match=r'row-level security policy for table "events"') as caught:
                        ask()
                    assert str(caught.value).endswith(f"; {POLICY_CURE}")
        finally:
            postgres.sql("DROP OWNED BY partial; DROP ROLE partial", database=name)
