"""``open_store``: which URL is which store."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
from twisted.internet.task import Clock

from replication import Master, Worker
from replication.errors import ConfigError
from replication.storage import open_store
from replication.storage.postgres.store import PostgresStore
from replication.storage.sqlite.store import SqliteStore
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///x.db", "x.db"),
        ("sqlite:///below/x.db", "below/x.db"),
        ("sqlite:////var/lib/x.db", "/var/lib/x.db"),
        ("sqlite://", ":memory:"),
        ("sqlite:///:memory:", ":memory:"),
    ],
)
def test_a_url_names_a_file_or_memory(url: str, path: str) -> None:
    store = open_store(url, Pump())
    assert isinstance(store, SqliteStore)
    assert store.name == path


def test_a_url_may_be_opened_for_reading_only(tmp_path: Path) -> None:
    pump = Pump()
    written, read = (open_store(f"sqlite:///{tmp_path}/x.db", pump, read_only=each) for each in (False, True))
    pump.wait(written.open())
    pump.wait(read.open())
    assert pump.wait(read.find_receipt("k")) is None
    pump.wait(read.close())
    pump.wait(written.close())


def test_options_of_sqlite_are_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"'sqlite:///x\.db\?…' names no file and nothing else"):
        open_store("sqlite:///x.db?key=hidden", Pump())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("x.db", "write sqlite:///relative.db"),
        ("mysql://here/x", "write sqlite:///relative.db"),
        ("sqlite:x.db", "write sqlite:///relative.db"),
        ("sqlite://x.db", "names no file"),
        ("sqlite:///", "names no file"),
        ("postgres://me@here/x", "or postgresql://user@host:port/database"),
    ],
)
def test_any_other_url_is_refused_by_name(url: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_store(url, Pump())
    assert repr(url) in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize("read_only", [False, True])
def test_postgresql_is_a_store_of_its_own(*, read_only: bool) -> None:
    store = open_store("postgresql://me:secret@here:5433/shop", Pump(), read_only=read_only)
    assert isinstance(store, PostgresStore)
    assert store.address.name == "postgresql://me@here:5433/shop"


def test_a_url_of_postgresql_that_cannot_be_read_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match="not a URL of PostgreSQL") as refused:
        open_store("postgresql://me:sec@ret@here/shop", Pump())
    assert "ret" not in str(refused.value).partition("is no URL")[0].replace("postgresql", "")


@pytest.mark.parametrize(
    "wrong",
    [
        "user=me&password=sec&ret",
        "password=sec&ret==",
        "password=%zzret",
        "password=sec ret",
        "sslpassword=sec&ret",
        "options=%zzret",
    ],
)
def test_a_wrong_option_of_a_url_of_postgresql_is_not_quoted(wrong: str) -> None:
    """The driver quotes what it cannot read: a part of a password, if one of its characters was not escaped."""
    with pytest.raises(ConfigError, match="not a URL of PostgreSQL") as refused:
        open_store(f"postgresql://here/shop?{wrong}", Pump())
    assert "ret" not in str(refused.value)


def test_the_name_of_an_option_that_does_not_exist_is_quoted() -> None:
    with pytest.raises(ConfigError, match='"sslmod"'):
        open_store("postgresql://here/shop?sslmod=require", Pump())


def test_without_its_driver_postgresql_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "replication.storage.postgres.store", None)
    with pytest.raises(ConfigError, match=r"pip install 'twisted-replication\[postgres\]'"):
        open_store("postgresql://me@here/shop", Pump())


def test_a_database_in_memory_cannot_be_opened_for_reading_only() -> None:
    for url in ("sqlite://", "sqlite:///:memory:"):
        with pytest.raises(ConfigError, match="in memory"):
            open_store(url, Pump(), read_only=True)


def test_a_store_is_not_open_until_it_is_opened(tmp_path: Path) -> None:
    open_store(f"sqlite:///{tmp_path}/x.db", Pump())
    assert not (tmp_path / "x.db").exists()


@pytest.mark.parametrize("database", [3, b"sqlite://", ["sqlite://"]])
def test_a_parameter_that_is_neither_a_url_nor_a_store_is_named(database: Any) -> None:
    for make in (Master, Worker):
        with pytest.raises(ConfigError, match=r"database must be a URL, such as .*, or a store, not "):
            make(database=database, server_name="example.com", reactor=Clock())
