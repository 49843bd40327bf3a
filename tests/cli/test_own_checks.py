"""Mistakes on this machine, planted and found."""

from __future__ import annotations

import re
import sqlite3
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from replication.cli import tls_checks
from replication.cli.main import main
from replication.segments.folders import open_folder
from replication.segments.manifest import Manifest, Segment, write_manifest
from replication.storage.blocking import use_store
from replication.streams.definitions import StreamDefinition
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.certificates import DAY, Authority

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from replication.streams.interfaces import IStreamStore
    from tests.postgres import PostgresServer


NOT_OURS = (
    "database 'x.db': table 'stream_orders' has the columns id, so it is not one of ours: rename it, or map stream "
    "'orders' onto it; cure: do as the message advises"
)


WRITERS = '[[streams]]\nname = "orders"\nwriters = ["north", "south"]'


@pytest.fixture(autouse=True)
def writer_at_unix_x(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the writer at ``unix:x`` answer: these tests plant mistakes of this process only."""
    wire = tls_checks.first_line

    def first_line(place: tuple[str, int] | str, **options: Any) -> tuple[str, float | None]:
        return ("SERVER localhost", None) if place == "x" else wire(place, **options)

    monkeypatch.setattr("replication.cli.peer_checks.first_line", first_line)


def worker(folder: Path) -> str:
    """Return the configuration of a worker whose writer is not checked, and whose missed facts are in segments."""
    (folder / "segments").mkdir(exist_ok=True)
    (folder / "segments/manifest.json").write_text('{"version": 1, "segments": []}')
    return f'connect = "unix:x"\ncatch_up = "{folder}/segments"'


def empty_secret(folder: Path) -> str:
    (folder / "secret").touch(0o600)
    return 'secret_file = "secret"'


def open_secret(folder: Path) -> str:
    (folder / "secret").write_text("xyz")
    (folder / "secret").chmod(0o644)
    return 'secret_file = "secret"'


def missing_secret(_: Path) -> str:
    return 'secret_file = "secret"'


def missing_folder(_: Path) -> str:
    return 'database = "sqlite:///no/such/x.db"'


def newer_version(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "x.db")) as connection:
        connection.execute("CREATE TABLE replication_schema (version INTEGER NOT NULL)")
        connection.execute("INSERT INTO replication_schema VALUES (99)")
        connection.commit()
    return 'database = "sqlite:///x.db"'


def other_tables(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "x.db")) as connection:
        connection.execute("CREATE TABLE replication_schema (name TEXT)")
    return 'database = "sqlite:///x.db"'


def no_database(folder: Path) -> str:
    (folder / "x.db").write_text("this is a text, and no database" * 100)
    return 'database = "sqlite:///x.db"'


def missing_table(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "x.db")) as connection:
        connection.execute("CREATE TABLE replication_schema (version INTEGER NOT NULL)")
        connection.execute("INSERT INTO replication_schema VALUES (1)")
        connection.commit()
    table = '[[streams]]\nname = "events"\ntable = "events"\nid_column = "id"\nrow = ["a"]'
    return f'database = "sqlite:///x.db"\n{table}'


def renamed(folder: Path) -> str:
    url = f"sqlite:///{folder}/x.db"

    async def commit(store: IStreamStore) -> None:
        await store.declare(StreamDefinition("events"))
        await store.transaction().commit([Write(StreamName("events"), InstanceName("north"), Token(3))])

    use_store(url, commit, read_only=False)
    with closing(sqlite3.connect(folder / "x.db")) as database:
        database.execute("CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, a)")
        database.commit()
        database.execute("PRAGMA journal_mode = DELETE")  # a reader of a WAL makes files
    table = '[[streams]]\nname = "events"\ntable = "events"\nid_column = "id"\nrow = ["a"]'
    return f'instance_name = "east"\ndatabase = "sqlite:///x.db"\n{table}'


def open_to_others(_: Path) -> str:
    return 'listen = "tcp:9092"'


def no_endpoint(_: Path) -> str:
    return 'http = "tpc:9093"'


def certificate(folder: Path, begins: int, ends: int) -> str:
    issued = Authority(folder).issue("server", "127.0.0.1", valid=(begins * DAY, ends * DAY))
    issued.key.chmod(0o600)
    return f'insecure = true\nlisten = "{issued.listen()}"'


def expired(folder: Path) -> str:
    return certificate(folder, -2, -1)


def too_early(folder: Path) -> str:
    return certificate(folder, 1, 2)


def expires_soon(folder: Path) -> str:
    return certificate(folder, -1, 3)


def expired_between(folder: Path) -> str:
    """Expire an authority between: its certificate stands after that of the endpoint."""
    text = certificate(folder, -1, 100)
    between = Authority(folder, "between", (-2 * DAY, -DAY)).certificate
    (file,) = [each for each in folder.glob("*.pem") if str(each) in text]
    file.write_bytes(file.read_bytes() + between.read_bytes())
    return text


def access(folder: Path, table: str, allow: str = "") -> str:
    """Return a configuration with a table of rights, and valid certificates."""
    authority = Authority(folder, valid=(-DAY, 100 * DAY))
    issued = authority.issue("server", "127.0.0.1", valid=(-DAY, 100 * DAY))
    issued.key.chmod(0o600)
    tls = f'[tls]\nclient_ca = "{authority.certificate}"\nallow = [{allow}]'
    return f'stream = ["orders"]\nlisten = "{issued.listen()}"\n{tls}\n[access.shop]\n{table}'


def no_such_stream(folder: Path) -> str:
    return access(folder, 'certificates = ["shop"]\nread = ["*"]\nappend = ["orders", "oders", "caches"]')


def no_such_stream_to_read(folder: Path) -> str:
    (folder / "secret").write_text("xyz")
    (folder / "secret").chmod(0o600)
    return 'stream = ["orders"]\n[access.shop]\nsecret_file = "secret"\nread = ["orders", "oders", "caches"]'


def no_such_certificate(folder: Path) -> str:
    return access(folder, 'certificates = ["a.shop.example", "boss"]\nread = ["orders"]', '"*.shop.example", "bos"')


def no_name(folder: Path) -> str:
    return access(folder, 'certificates = ["*.com"]')


def open_secret_of_a_table(folder: Path) -> str:
    (folder / "secret").write_text("xyz")
    (folder / "secret").chmod(0o640)
    return 'stream = ["orders"]\n[access.shop]\nsecret_file = "secret"\nread = ["orders"]'


def old_authority(folder: Path) -> str:
    text = access(folder, 'certificates = ["shop"]')
    old = Authority(folder, "old", valid=(-DAY, 3 * DAY))
    return text.replace("authority.pem", old.certificate.name)


def old_worker(folder: Path) -> str:
    issued = Authority(folder).issue("worker1", "worker1", valid=(-DAY, 3 * DAY))
    issued.key.chmod(0o600)
    certificate, key = issued.files
    return f'{worker(folder)}\n[tls]\ncertificate = "{certificate}"\nprivate_key = "{key}"'


def no_key(folder: Path) -> str:
    text = certificate(folder, -1, 100)
    (folder / "server.key").unlink(missing_ok=True)
    for each in folder.glob("*key*"):
        each.unlink()
    return text


def no_segments(folder: Path) -> str:
    (folder / "photos").mkdir()
    return 'catch_up = "photos"\nconnect = "unix:x"'


def no_segments_for_retention(folder: Path) -> str:
    (folder / "photos").mkdir()
    return 'stream = ["orders"]\nretention = "30d"\nretention_segments = "photos"'


def foreign_manifest(folder: Path) -> str:
    (folder / "app").mkdir()
    (folder / "app/manifest.json").write_text('{"name": "another program"}')
    return 'catch_up = "app"\nconnect = "unix:x"'


def one_port_twice(_: Path) -> str:
    return 'listen = "tcp:9092:interface=127.0.0.1"\nhttp = "tcp:9092:interface=127.0.0.1"'


def no_port(_: Path) -> str:
    return 'http = "tcp:99999:interface=127.0.0.1"'


def no_folder_of_a_socket(_: Path) -> str:
    return 'listen = "unix:none/wire"'


def table_of_another_program(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "x.db")) as connection:
        connection.execute("CREATE TABLE stream_orders (id INTEGER PRIMARY KEY)")
    return 'database = "sqlite:///x.db"\nstream = ["orders", "stock"]'


def table_of_another_program_for_a_copy(folder: Path) -> str:
    return f"{table_of_another_program(folder)}\ncopy = true\n{worker(folder)}"


def other_database(_: Path) -> str:
    return 'database = "mysql://localhost/x"'


def app_is_a_file(folder: Path) -> str:
    (folder / "shop.py").write_text("1 / 0")
    return f'{worker(folder)}\napp = "shop.py"'


def no_writer(_: Path) -> str:
    return f'instance_name = "nort"\n{WRITERS}'


def no_writer_among_workers(folder: Path) -> str:
    return f'{worker(folder)}\nlisten = "tcp:0:interface=127.0.0.1"\nwrites = "orders"\n{WRITERS}'


def no_app(folder: Path) -> str:
    (folder / "shop.py").write_text("1 / 0")
    return f'{worker(folder)}\napp = "shops.orders:register"'


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (one_port_twice, "http: listen has the port 9092, too; cure: give each endpoint its own"),
        (no_port, "http: there is no port 99999: 65535 is the highest"),
        (no_folder_of_a_socket, "listen: there is no folder none for this socket; cure: mkdir -p none"),
        (table_of_another_program, f"stream orders: {NOT_OURS}"),
        (table_of_another_program_for_a_copy, f"stream orders: {NOT_OURS}"),
        (other_database, "mysql://localhost/x: database 'mysql://localhost/x': write sqlite:///relative.db"),
        (
            no_writer,
            "instance_name: stream 'orders': this process, 'nort', is not one of its writers (north, south), and",
        ),
        (no_writer_among_workers, "; cure: give one of them as instance_name, or add 'worker1' to writers"),
        (no_app, "app: there is no module shops.orders, neither here nor installed"),
        (app_is_a_file, "start the worker in its folder; did you mean shop?"),
        (empty_secret, "the secret file secret is empty"),
        (open_secret, "other users may read this secret (mode 644); cure: chmod 600 secret"),
        (missing_secret, "cannot read the secret file secret"),
        (missing_folder, "there is no such folder, so the database cannot be made; cure: mkdir -p"),
        (
            newer_version,
            "use the newer program; cure: start the daemon of the version that it names",
        ),
        (other_tables, "its tables are not ours: no such column: version; cure: name another database or schema"),
        (no_database, "file is not a database"),
        (missing_table, "stream events: "),
        (renamed, "table 'events' has no instance_column, so it has one writer: that is 'north', not 'east'."),
        (open_to_others, "it is open to other hosts"),
        (no_endpoint, "cannot listen on"),
        (expired, "the certificate has expired on"),
        (expired_between, ": it is that of the authority 'CN=between'; cure: renew it"),
        (too_early, "the certificate is not valid before"),
        (expires_soon, "the certificate expires on"),
        (no_key, "cannot read"),
        (no_such_stream, "append: this process writes no stream 'oders'; cure: correct append; did you mean orders?"),
        (no_such_stream_to_read, "read: this process writes no stream 'oders'; cure: correct read; did you mean"),
        (no_such_certificate, "access.shop: tls.allow does not accept 'boss', so no peer has these rights"),
        (no_name, "access.shop: access.shop.certificates: write DNS names such as worker1"),
        (open_secret_of_a_table, "other users may read this secret (mode 640)"),
        (old_authority, "cure: add a new authority to the file"),
        (old_worker, "cure: renew it; the worker reads it for each connection"),
        (no_segments, "it has no manifest.json, so it is no folder of segments"),
        (no_segments_for_retention, "it has no manifest.json, so it is no folder of segments"),
        (foreign_manifest, "not a manifest of segments"),
    ],
)
def test_a_mistake_is_found(
    plant: Callable[[Path], str],
    found: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text(plant(tmp_path) + "\n")
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    assert main(["doctor", "--config", "x.toml", "--min-free", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(found in each for each in lines), lines
    assert len(lines) == 1, lines
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before, "it only reads"


def test_what_is_right_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a service of systemd has its sockets; an application is not imported; port 0 is any free port."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text("1 / 0")
    for text in (
        'listen = "systemd:domain=INET:index=0"\nhttp = "systemd:domain=INET:index=1"',
        'listen = ["tcp:9092:interface=127.0.0.1", "tcp:0:interface=127.0.0.1"]\nhttp = "tcp:9092:interface=127.0.0.2"',
        'listen = "tcp:0:interface=127.0.0.1"\nhttp = "tcp:0:interface=127.0.0.1"',
        f'{worker(tmp_path)}\napp = "shop:register"',
        f'instance_name = "north"\n{WRITERS}',
        f'stream = "notes"\n{WRITERS}',
        f"{worker(tmp_path)}\n{WRITERS}",
    ):
        (tmp_path / "x.toml").write_text(text + "\n")
        assert main(["doctor", "--config", "x.toml", "--min-free", "1"]) == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('stream = ["orders", "Orders"]', "stream 'Orders' is declared twice, as 'orders' before"),
        ('stream = ["Events"]\nrooms = {}', "stream 'events' is declared twice, as 'Events' before"),
        ('[[streams]]\nname = "a"\nshares = "b"', "stream 'a' shares the IDs of 'b', which is not declared"),
        ('[[streams]]\nname = "a"\nposition_name = "x"', "stream 'a' has a position_name"),
        ('server_name = "a\\nb"', "server_name 'a"),
        ('stream = ["1x"]', "stream name '1x': use letters"),
        ('connect = "unix:x"\nwrites = ["1x"]\nlisten = "unix:y"', "stream name '1x': use letters"),
        ('connect = "unix:x"\nwrites = ["n", "N"]\nlisten = "unix:y"', "stream 'N' is declared twice"),
        ("connect = []", "a worker needs at least one writer"),
        ('connect = "tcp:localhost"\ncatch_up = []', "cannot connect to 'tcp:localhost': write tcp:HOST:PORT"),
    ],
)
def test_what_the_daemon_refuses_at_its_start_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    """Nothing was found, and the daemon did not start; a wrong name hid all other findings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text(text)
    assert main(["doctor", "--config", "x.toml", "--min-free", "1"]) == 1
    (found,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("x.toml: ")]
    assert why in found
    assert found.endswith("; cure: correct this key or file; the daemon does not start before")
    assert [each.name for each in tmp_path.iterdir()] == ["x.toml"]


def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cure for psycopg was to start the database, and zstandard was not missed before the first catch-up."""
    monkeypatch.chdir(tmp_path)
    segment = Segment(
        StreamName("orders"), InstanceName("m"), Token(0), Token(5), 0, None, None, 0, "0" * 64, 0, "zstd"
    )
    (tmp_path / "segments/orders/m").mkdir(parents=True)
    (tmp_path / "segments" / segment.name).touch()
    write_manifest(open_folder("segments"), Manifest([segment]))
    for text, found in (
        ('database = "postgresql:///x"', "postgresql:///x: PostgreSQL needs psycopg 3"),
        ('connect = "unix:x"\ncatch_up = "postgresql:///x"', "postgresql:///x: PostgreSQL needs psycopg 3"),
        ('connect = "unix:x"\ncatch_up = "segments"', "its segments cannot be read: compression zstd needs zstandard"),
    ):
        (tmp_path / "x.toml").write_text(text + "\n")
        missing = dict.fromkeys(["psycopg", "replication.storage.postgres.store", "zstandard"])
        with mock.patch.dict(sys.modules, missing):
            assert main(["doctor", "--config", "x.toml", "--min-free", "1"]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1, lines
        line = lines[0]
        assert found in line
        assert re.search(r": pip install 'twisted-replication\[(postgres|zstd)\]' \(from .*\); cure: install it$", line)


def test_a_disk_without_space_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text('stream = ["orders"]\n')
    assert main(["doctor", "--config", "x.toml", "--min-free", str(10**9)]) == 1
    assert "MiB are free on this disk, less than 1000000000 MiB" in capsys.readouterr().out


def test_a_database_of_postgresql_is_checked_and_a_server_that_is_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], postgres: PostgresServer
) -> None:
    file = tmp_path / "x.toml"
    with postgres.database() as name:
        stream = '[[streams]]\nname = "events"\ntable = "events"\nid_column = "id"\nrow = ["a"]\n'
        file.write_text(f'database = "{postgres.url(name)}"\n{stream}')
        use_store(postgres.url(name), do_nothing, read_only=False)
        postgres.sql("CREATE TABLE events (id bigserial, a text)", database=name)
        main(["doctor", "--config", str(file)])
        assert "has no index on" in capsys.readouterr().out
        postgres.sql("ALTER TABLE events DROP COLUMN a", database=name)
        assert main(["doctor", "--config", str(file)]) == 1
        assert "it has no column" in capsys.readouterr().out
    file.write_text('database = "postgresql://missing@127.0.0.1:1/none"\n')
    assert main(["doctor", "--config", str(file)]) == 1
    assert "127.0.0.1" in capsys.readouterr().out


def test_a_standby_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], postgres: PostgresServer) -> None:
    """The start is refused: a standby takes no writes."""
    file = tmp_path / "x.toml"
    with postgres.standby() as other:
        file.write_text(f'database = "{other.url("postgres")}"\n')
        assert main(["doctor", "--config", str(file)]) == 1
    assert "it is a standby, so it takes no writes; cure: name the primary\n" in capsys.readouterr().out


def test_a_table_of_another_program_is_found_in_postgresql_and_one_of_ours_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], postgres: PostgresServer
) -> None:
    file = tmp_path / "x.toml"
    with postgres.database() as name:
        file.write_text(f'database = "{postgres.url(name)}"\nstream = ["orders", "stock"]\n')

        async def declare(store: IStreamStore) -> None:
            await store.declare(StreamDefinition(StreamName("orders")))

        use_store(postgres.url(name), declare, read_only=False)
        assert findings(file, capsys) == []
        postgres.sql("ALTER TABLE stream_orders ADD COLUMN a text", database=name)
        (found,) = findings(file, capsys)
        assert found.startswith("stream orders: ")
        assert "so it is not one of ours: rename it" in found


def findings(file: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what is found, except that the server of the tests has no fsync."""
    main(["doctor", "--config", str(file), "--min-free", "1"])
    return [each for each in capsys.readouterr().out.splitlines() if "fsync is off" not in each]


def test_a_database_without_our_tables_is_no_fault_and_hides_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], postgres: PostgresServer
) -> None:
    """The first start makes these tables; what the application has made there is checked before that."""
    file, table = tmp_path / "x.toml", "CREATE TABLE events (id {id}, a text)"
    with postgres.database() as name:
        postgres.sql(table.format(id="bigserial PRIMARY KEY"), database=name)
        make_table(tmp_path / "x.db", table)
        for url in (postgres.url(name), f"sqlite:///{tmp_path}/x.db"):
            for role in ('stream = ["orders"]', worker(tmp_path)):
                file.write_text(f'database = "{url}"\n{role}\n')
                assert findings(file, capsys) == []
            mapped = f'database = "{url}"\n[[streams]]\nname = "events"\ntable = "events"\nid_column = "id"\n'
            for row, found in (('row = ["a"]', False), ('row = ["b"]', True)):
                file.write_text(f"{mapped}{row}\n")
                lines = findings(file, capsys)
                assert any("column" in each for each in lines) is found, lines
                assert all(each.startswith("stream events: ") for each in lines), lines


def make_table(file: Path, table: str) -> None:
    with closing(sqlite3.connect(file)) as database:
        database.execute(table.format(id="INTEGER PRIMARY KEY AUTOINCREMENT"))


def test_a_user_who_may_not_make_our_tables_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], postgres: PostgresServer
) -> None:
    file = tmp_path / "x.toml"
    text = (
        "may not make the tables of this package; cure: GRANT it USAGE and CREATE on the schema, or set its search_path"
    )
    with postgres.database() as name:
        postgres.sql("CREATE ROLE guest LOGIN", database=name)
        try:
            file.write_text(f'database = "{postgres.url(name, "guest")}"\nstream = ["orders"]\n')
            grants = (
                ("REVOKE USAGE ON SCHEMA public FROM PUBLIC", True),
                ("GRANT USAGE ON SCHEMA public TO guest", True),
                ("GRANT CREATE ON SCHEMA public TO guest", False),
            )
            for grant, found in grants:
                postgres.sql(grant, database=name)
                lines = findings(file, capsys)
                assert [text in each for each in lines] == [True] * found, lines
        finally:
            postgres.sql("DROP OWNED BY guest; DROP ROLE guest", database=name)


def test_a_stream_that_this_process_has_written_and_does_not_have_any_more_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], postgres: PostgresServer
) -> None:
    file = tmp_path / "x.toml"
    with postgres.database() as name:
        url = postgres.url(name)
        use_store(url, write_positions, read_only=False)
        for streams, found in (('"others"', True), ('"orders", "others"', False)):
            file.write_text(f'database = "{url}"\ninstance_name = "a"\nstream = [{streams}]\n')
            main(["doctor", "--config", str(file)])
            output = capsys.readouterr().out
            assert ("stream 'orders': 'a' has written it" in output) is found, output
            assert "stream 'past'" not in output, "no other process writes it"


async def write_positions(store: IStreamStore) -> None:
    """Store positions of two writers in one stream, and of one writer in another."""
    orders, past = StreamName("orders"), StreamName("past")
    a, b = InstanceName("a"), InstanceName("b")
    await store.declare(StreamDefinition(orders), StreamDefinition(past))
    await store.transaction().commit([Write(orders, a, Token(2)), Write(orders, b, Token(3)), Write(past, a, Token(2))])


async def do_nothing(_: IStreamStore) -> None:
    """Open the database, which makes its tables."""
