"""The address of a database: what its name shows, and URLs that are refused."""

from __future__ import annotations

import traceback
from threading import Event

import pytest

from replication.errors import ConfigError, StoreError
from replication.storage.postgres.address import Address
from replication.storage.postgres.holder import Holder
from replication.storage.postgres.session import PostgresSession


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("postgresql://me@here:5433/shop", "postgresql://me@here:5433/shop"),
        ("postgresql://me:hunter2@here/shop", "postgresql://me@here/shop"),
        ("postgresql://me@here/shop?password=hunter2&sslmode=require", "postgresql://me@here/shop"),
        ("postgresql://me:x?hunter2=1@here/shop", "postgresql://me@here/shop"),
        ("postgresql:///shop?host=/run/postgresql", "postgresql:///run/postgresql/shop"),
        ("postgresql://one:1,two:2/shop", "postgresql://one,two:1,2/shop"),
        ("postgresql://", "postgresql:///"),
    ],
)
def test_an_address_is_shown_without_its_password(url: str, name: str) -> None:
    address = Address.parse(url)
    assert address.name == name
    assert "hunter2" not in repr(address)


def test_the_values_of_settings_in_options_are_secrets() -> None:
    """The server quotes a wrong one."""
    assert '"hunter2"' in Address.parse("postgresql://here/shop?options=-c%20statement_timeout%3Dhunter2").secrets


@pytest.mark.parametrize("option", ["service", "target_session_attrs", "sslmode", "connect_timeout"])
def test_an_error_of_the_driver_does_not_quote_an_option(option: str) -> None:
    address = Address.parse(f"postgresql://127.0.0.1:1/shop?{option}=hunter2")
    session = PostgresSession(address, Event(), Holder())
    with pytest.raises(StoreError) as refused:
        session.connect()
    assert "hunter2" not in str(refused.value)
    assert "…" in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:hunter2%zz@here/shop", "postgresql://me@here/shop"),
        ("postgresql://me:50%badhunter2@here/shop", "postgresql://me@here/shop"),  # %ba is no character of UTF-8
        ("postgresql://me:hunter2@@here@there/shop", "postgresql://…@there/shop"),
        ("postgresql://me:hunter2/shop", "postgresql://…"),
        ("postgresql://me:x/hunter2@here/shop", "postgresql://…@here/shop"),
        ("postgresql://me:20/hunter2@here/shop", "postgresql://…@here/shop"),  # 20 would be a port
        ("postgresql://me:x@hunter2/y@here/shop", "postgresql://…@here/shop"),
        ("postgresql://me@here/shop?hunter2=1", "postgresql://me@here/shop?…"),
        ("postgresql://me:hunter2@a..b/shop", "postgresql://me@a..b/shop"),
        ("postgresql://here,.there/shop", "postgresql://here,.there/shop"),
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_what_may_be_its_password(url: str, shown: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Address.parse(url)
    assert repr(shown) in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert "hunter2" not in "".join(traceback.format_exception(refused.value)).replace(url, "")


def test_a_writer_connects_to_the_primary_of_several_hosts() -> None:
    """A standby may not have replayed a commit yet, and would report it as rolled back."""
    several, one = "postgresql://a:1,b:2/shop", "postgresql://a/shop"
    assert "target_session_attrs=primary" in Address.parse(several).conninfo
    assert "target_session_attrs" not in Address.parse(several, read_only=True).conninfo
    assert "target_session_attrs" not in Address.parse(one).conninfo
    assert "=any" in Address.parse(f"{several}?target_session_attrs=any").conninfo


def test_an_option_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        Address.parse("postgresql://here/shop?nonsense=1")
