"""Mistakes in the sources of a worker, planted with a real Redis and a real PostgreSQL, and found."""

from __future__ import annotations

import socket
import sqlite3
import time
from contextlib import closing, suppress
from threading import Thread
from typing import TYPE_CHECKING

import psycopg
import pytest

from replication import config
from replication.cli import source_checks
from replication.cli.main import main
from replication.cli.source_checks import check_followed, check_redis, check_sources
from tests.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer
    from tests.redis import RedisServer

STREAM = '[[streams]]\nname = "orders"\ntable = "orders"\nid_column = "id"\nrow = ["name"]\n'


def load(folder: Path, *lines: str) -> config.Config:
    (folder / "worker.toml").write_text("\n".join(lines))
    return config.load("worker", str(folder / "worker.toml"))


def redis_findings(folder: Path, connect: str, *lines: str) -> list[str]:
    found = load(folder, f'connect = ["{connect}"]', 'server_name = "example.com"', *lines)
    return [str(each) for each in check_redis(found)]


def test_a_channel_without_subscribers_is_found(tmp_path: Path, redis: RedisServer) -> None:
    url = f"redis://127.0.0.1:{redis.port}"
    (found,) = redis_findings(tmp_path, url)
    assert "no process subscribes to the channel 'example.com'" in found
    with closing(socket.create_connection(("127.0.0.1", redis.port))) as synapse:
        synapse.sendall(b"SUBSCRIBE example.com\r\n")
        assert synapse.recv(100)
        assert redis_findings(tmp_path, url) == []
        assert redis_findings(tmp_path, "tcp:127.0.0.1:1") == []  # another kind of writer


def test_a_wrong_password_and_a_missing_right_are_found(tmp_path: Path, redis: RedisServer) -> None:
    redis.call("ACL", "SETUSER", "reader", "on", ">right", "resetchannels", "-@all", "+ping")
    try:
        (found,) = redis_findings(tmp_path, f"redis://reader:wrong@127.0.0.1:{redis.port}")
        assert "WRONGPASS" in found
        assert "wrong@" not in found
        (tmp_path / "password").write_text("right")
        lines = f"redis://reader@127.0.0.1:{redis.port}", f'redis_password_file = "{tmp_path}/password"'
        (found,) = redis_findings(tmp_path, *lines)
        assert "NOPERM" in found
        assert "ACL SETUSER NAME on '>PASSWORD' resetchannels '&example.com' -@all +subscribe" in found
        redis.call("ACL", "SETUSER", "reader", "+subscribe", "+publish", "&example.com")
        (found,) = redis_findings(tmp_path, *lines)
        assert "it could not be checked whether a process subscribes to the channel 'example.com': Redis ans" in found
        assert found.endswith("; cure: ACL SETUSER reader '+pubsub|numsub', which only this command needs")
        redis.call("ACL", "SETUSER", "reader", "+pubsub|numsub")
        redis.call("ACL", "LOG", "RESET")
        (found,) = redis_findings(tmp_path, *lines)
        assert "no process subscribes to the channel 'example.com'" in found
        assert redis.call("ACL", "LOG") == []
    finally:
        redis.call("ACL", "DELUSER", "reader")


def test_an_answer_that_quotes_the_password_is_shown_without_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with closing(server.accept()[0]) as client:
                client.recv(1000)
                client.sendall(b"-ERR unknown command `AUTH`, with args beginning with: `of the file`\r\n")

        Thread(target=answer, daemon=True).start()
        (tmp_path / "password").write_text("of the file")
        url, line = f"redis://127.0.0.1:{server.getsockname()[1]}", f'redis_password_file = "{tmp_path}/password"'
        (found,) = redis_findings(tmp_path, url, line)
    assert "with args beginning with: `…`" in found


@pytest.mark.parametrize(
    ("answer", "found"), [(b"HTTP/1.1 400 Bad Request\r\n", "it is no Redis: Protocol error"), (b"+a", "timed out")]
)
def test_another_program_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, found: str) -> None:
    """The first was a traceback, and byte after byte held up the doctor for ever."""
    monkeypatch.setattr(source_checks, "PATIENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with closing(server.accept()[0]) as client, suppress(OSError):
                client.sendall(answer)
                while True:
                    time.sleep(0.02)
                    client.sendall(b"1")

        Thread(target=serve, daemon=True).start()
        (finding,) = redis_findings(tmp_path, f"redis://127.0.0.1:{server.getsockname()[1]}")
    assert f"Redis does not answer: {found}" in finding


def test_a_private_key_with_a_password_is_found_and_no_terminal_is_asked(tmp_path: Path) -> None:
    mine = Authority(tmp_path).issue("mine", "worker1")
    mine.lock()
    lines = "[tls]", f'certificate = "{mine.certificate}"', f'private_key = "{mine.key}"'
    (found,) = redis_findings(tmp_path, "rediss://localhost:1", *lines)
    assert f"the private key in {mine.key} has a password: write it without one, with openssl pkey -in" in found
    assert found.endswith("cure: install what is missing, or correct [tls] or the file")


def test_what_is_no_redis_is_found(tmp_path: Path) -> None:
    (found,) = redis_findings(tmp_path, "redis://127.0.0.1:1")
    assert "Redis does not answer: Connection refused; cure: start it" in found
    (found,) = redis_findings(tmp_path, f"redis+unix://{tmp_path}/none.sock")
    assert "No such file" in found


def test_a_stream_that_no_definition_of_a_synapse_has_is_found(tmp_path: Path) -> None:
    """The start with a function for the right name was refused, and the doctor had found nothing."""
    place, definitions = "redis://127.0.0.1:1", 'definitions = ["replication.synapse.since_1_159"]'

    def undefined(*lines: str) -> list[str]:
        return [str(each) for each in check_followed(load(tmp_path, f'connect = "{place}"', *lines))]

    (found,) = undefined('stream = ["evnts", "typing"]', definitions)
    assert found == "stream evnts: no definition has this stream; cure: correct stream; did you mean events?"
    (found,) = undefined('stream = ["novelties"]', definitions)
    assert found.endswith("; cure: correct stream, or give http in [writers.NAME], which has its missed facts")
    http = '[writers.master]\nhttp = "http://127.0.0.1:1"'
    assert undefined('stream = ["novelties"]', definitions, http) == []
    assert undefined('stream = ["evnts"]') == []


def sources(folder: Path, url: str, *lines: str) -> list[str]:
    return [str(each) for each in check_sources(load(folder, f'catch_up = ["{url}"]', *lines, STREAM))]


@pytest.mark.parametrize(
    "keys",
    [
        'connect = "redis://u:GEHEIM/@h"',
        'connect = "redis://u:[GEHEIM]@h"',
        'connect = "tcp:127.0.0.1:1"\ncatch_up = "http://u:GEHEIM@127.0.0.1:1"',
        'connect = "tcp:127.0.0.1:1"\ncatch_up = "u:GEHEIM@h"',
        'connect = "tcp:127.0.0.1:1"\n[writers."redis://u:GEHEIM@h"]\nx = 1',
    ],
)
def test_a_url_that_is_wrong_is_found_and_its_password_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: str
) -> None:
    """The doctor showed it, although the daemon did not."""
    (tmp_path / "worker.toml").write_text(keys)
    assert main(["doctor", "--config", str(tmp_path / "worker.toml")]) == 1
    output = capsys.readouterr().out
    assert ("GEHEIM" in output, "…@" in output or "redis://u@h" in output) == (False, True), output


def test_a_database_that_cannot_be_read_is_found(tmp_path: Path) -> None:
    (found,) = sources(tmp_path, f"sqlite:///{tmp_path}/none.db")
    assert "correct the URL" in found
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.execute("CREATE TABLE other (id INTEGER PRIMARY KEY)")
    (found,) = sources(tmp_path, f"sqlite:///{tmp_path}/shop.db")
    assert found.startswith("stream orders: it cannot be read in sqlite:///")
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT)")
    assert sources(tmp_path, f"sqlite:///{tmp_path}/shop.db") == []


def test_only_the_streams_that_the_worker_follows_must_be_readable(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.execute("CREATE TABLE other (id INTEGER PRIMARY KEY)")
    url = f"sqlite:///{tmp_path}/shop.db"
    (found,) = sources(tmp_path, url, 'stream = ["orders", "typing"]')
    assert found.startswith("stream orders: it cannot be read in sqlite:///")
    assert sources(tmp_path, url, 'stream = ["typing"]') == []  # still a database of another program


def test_a_missing_right_in_postgresql_is_found(tmp_path: Path, postgres: PostgresServer) -> None:
    with postgres.database() as name:
        postgres.sql("CREATE TABLE orders (id bigserial PRIMARY KEY, name text)", database=name)
        postgres.sql("CREATE ROLE reader LOGIN; GRANT CONNECT ON DATABASE " + name + " TO reader", database=name)
        try:
            url = postgres.url(name, "reader")
            (found,) = sources(tmp_path, url)
            assert "permission denied for table orders" in found
            assert "GRANT SELECT" in found
            postgres.sql("GRANT SELECT ON orders TO reader", database=name)
            assert sources(tmp_path, url) == []
        finally:
            with psycopg.connect(postgres.url(name), autocommit=True) as admin:
                admin.execute("DROP OWNED BY reader; DROP ROLE reader")


POSITIONS = "CREATE TABLE stream_positions (stream_name text, instance_name text, stream_id bigint)"


def test_the_instance_name_of_a_process_of_the_synapse_is_found(tmp_path: Path, postgres: PostgresServer) -> None:
    """The link would stop: another process publishes under the name of this process."""
    lines = 'connect = "redis://127.0.0.1:1"', 'definitions = ["replication.synapse.since_1_159"]'
    with postgres.database() as name:
        postgres.sql(f"{POSITIONS}; INSERT INTO stream_positions VALUES ('events', 'persister1', 7)", database=name)

        def names(instance: str) -> list[str]:
            found = load(tmp_path, f'catch_up = "{postgres.url(name)}"', f'instance_name = "{instance}"', *lines)
            return [str(each) for each in check_sources(found) if each.where == "instance_name"]

        (found,) = names("persister1")
        assert found.startswith("instance_name: 'persister1' is a process of the Synapse of postgresql://")
        assert found.endswith("; cure: give this process a name of its own")
        assert names("replication1") == []


def test_the_database_of_another_homeserver_is_found(tmp_path: Path, postgres: PostgresServer) -> None:
    lines = 'connect = "redis://127.0.0.1:1"', 'definitions = ["replication.synapse.since_1_159"]'
    users = "CREATE TABLE account_data (user_id text); INSERT INTO account_data VALUES ('@anna:beta.test')"
    with postgres.database() as name:
        postgres.sql(f"{POSITIONS}; {users}", database=name)

        def found(server_name: str) -> list[str]:
            config = load(tmp_path, f'catch_up = "{postgres.url(name)}"', f'server_name = "{server_name}"', *lines)
            return [str(each) for each in check_sources(config) if "homeserver" in each.what]

        (only,) = found("alpha.test")
        what, _, cure = only.partition("; cure: ")
        other = "the database of another homeserver: the users in its table 'account_data' are of 'beta.test'"
        assert what.endswith(f"{other}, and not of 'alpha.test'")
        assert cure == "name the database of 'alpha.test' in catch_up, or correct server_name"
        assert found("beta.test") == []


def test_a_synapse_without_definitions_is_found_with_its_cure(tmp_path: Path, postgres: PostgresServer) -> None:
    with postgres.database() as name:

        def found() -> str:
            (only,) = check_sources(load(tmp_path, f'catch_up = "{postgres.url(name)}"'))
            return str(only)

        assert found().endswith("; cure: correct the URL, start the database, or let this user read it")
        postgres.sql(POSITIONS, database=name)
        why, _, cure = found().partition("; cure: ")
        relation = 'relation "replication_schema" does not exist'
        assert why.endswith(f"{relation}; it looks like a Synapse's, which is only read, with definitions")
        assert cure == 'give definitions = ["replication.synapse.since_1_159"], or correct the URL'
