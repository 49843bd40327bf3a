"""The database of another homeserver is refused."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from replication.follower.local_users import OtherServerError, check_server_name
from replication.follower.sources import DatabaseCatchUp
from replication.storage import open_store
from replication.synapse.since_1_159 import PUSH_RULES
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.storage.pump import PumpedClock
from tests.synapse.published import NAME
from tests.synapse.reading import read_only_synapse
from tests.synapse.recorded import restore_postgres

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer

MASTER = InstanceName("master")


def check(path: Path, *statements: str, server_name: str = "alpha.test") -> None:
    """Check an SQLite database after some statements."""
    with closing(sqlite3.connect(path)) as database:
        database.executescript(";".join(statements))
    pump = PumpedClock()

    async def work() -> None:
        store = open_store(f"sqlite:///{path}", pump, read_only=True, foreign=True)
        await store.open()
        try:
            await check_server_name(store, server_name)
        finally:
            await store.close()

    pump.wait(work())


ACCOUNT_DATA = "CREATE TABLE account_data (user_id TEXT)"
BETA = "INSERT INTO account_data VALUES ('@anna:beta.test'), ('@bert:beta.test')"


def test_users_of_another_server_only_show_its_database(tmp_path: Path) -> None:
    with pytest.raises(OtherServerError) as caught:
        check(tmp_path / "beta.db", ACCOUNT_DATA, BETA)
    assert caught.value.what == (
        "it is the database of another homeserver: the users in its table 'account_data' are of 'beta.test', "
        "and not of 'alpha.test'"
    )
    assert str(caught.value).endswith(": name the database of 'alpha.test' in catch_up, or correct server_name")
    assert not caught.value.temporary


def test_a_name_of_which_the_other_is_a_part_is_another(tmp_path: Path) -> None:
    with pytest.raises(OtherServerError):
        check(tmp_path / "beta.db", ACCOUNT_DATA, BETA, server_name="test")
    with pytest.raises(OtherServerError):
        check(tmp_path / "port.db", ACCOUNT_DATA, BETA, server_name="beta.test:8448")
    check(
        tmp_path / "same.db", ACCOUNT_DATA, "INSERT INTO account_data VALUES ('@a:b.test:80')", server_name="b.test:80"
    )


def test_one_user_of_the_server_is_enough_also_behind_many_others(tmp_path: Path) -> None:
    many = (
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500) "
        "INSERT INTO account_data SELECT '@u' || i || ':old.test' FROM n"
    )
    check(tmp_path / "a.db", ACCOUNT_DATA, many, "INSERT INTO account_data VALUES ('@anna:alpha.test')")
    with pytest.raises(OtherServerError):
        check(tmp_path / "b.db", ACCOUNT_DATA, many)


def test_without_a_table_that_has_users_nothing_is_checked(tmp_path: Path) -> None:
    check(tmp_path / "none.db", "CREATE TABLE orders (item)")
    check(tmp_path / "empty.db", ACCOUNT_DATA)
    check(tmp_path / "other.db", "CREATE TABLE pushers (name)", "INSERT INTO pushers VALUES ('x')")
    check(tmp_path / "plain.db", ACCOUNT_DATA, "INSERT INTO account_data VALUES ('anna'), ('7'), (NULL)")
    with pytest.raises(OtherServerError):  # the next table has some
        check(
            tmp_path / "next.db",
            ACCOUNT_DATA,
            "CREATE TABLE pushers (user_name TEXT)",
            "INSERT INTO pushers VALUES ('@anna:beta.test')",
        )


def test_a_catch_up_from_it_waits_with_the_cure(postgres: PostgresServer) -> None:
    """Facts of another homeserver would be applied as those of the one that is followed."""
    pump = PumpedClock()
    stream = StreamName(PUSH_RULES.name)

    def read(url: str, server_name: str | None) -> int:
        source = DatabaseCatchUp(url, pump, [PUSH_RULES.definition], server_name)
        try:
            page = pump.wait(source.facts(stream, MASTER, after=Token(0), upto=Token(10_000), limit=100))
            pump.wait(source.stored_positions())
            return len(page.facts)
        finally:
            pump.wait(source.close())

    with read_only_synapse(postgres) as url:
        count = read(url, None)
        assert read(url, "alpha.test") == count
        with pytest.raises(OtherServerError, match=r"name the database of 'gamma\.test' in catch_up"):
            read(url, "gamma.test")


def test_tables_that_may_not_be_read_are_not(postgres: PostgresServer) -> None:
    pump = PumpedClock()
    with postgres.database() as name:
        restore_postgres(postgres, name, NAME)
        rights = "CREATE ROLE few LOGIN; GRANT SELECT ON stream_positions TO few; GRANT SELECT (id) ON pushers TO few"
        postgres.sql(rights, database=name)
        try:
            source = DatabaseCatchUp(postgres.url(name, "few"), pump, [PUSH_RULES.definition], "gamma.test")
            assert pump.wait(source.stored_positions())
            pump.wait(source.close())
            postgres.sql("GRANT SELECT (user_name) ON pushers TO few", database=name)
            source = DatabaseCatchUp(postgres.url(name, "few"), pump, [PUSH_RULES.definition], "gamma.test")
            with pytest.raises(OtherServerError, match="its table 'pushers'"):
                pump.wait(source.stored_positions())
            pump.wait(source.close())
        finally:
            postgres.sql("DROP OWNED BY few; DROP ROLE few", database=name)
