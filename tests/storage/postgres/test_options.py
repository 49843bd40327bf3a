"""Options of libpq are added to a URL, unless it has them."""

from __future__ import annotations

import pytest

from replication.storage.postgres.address import Address
from replication.storage.postgres.options import OPTIONS, missing_options, splits_password


def test_options_of_a_url_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGSERVICE", raising=False)
    assert missing_options({"sslpassword": ""}) == OPTIONS
    assert "connect_timeout" not in missing_options({"connect_timeout": "2"})
    conninfo = Address.parse("postgresql://here/shop?client_encoding=LATIN1&connect_timeout=2").conninfo
    assert "client_encoding=UTF8" in conninfo  # no other encoding has all texts
    assert "LATIN1" not in conninfo
    assert "connect_timeout=2 " in conninfo


def test_the_password_of_a_key_that_a_service_may_have_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGSERVICE", raising=False)
    assert "sslpassword" not in missing_options({"service": "shop"})
    monkeypatch.setenv("PGSERVICE", "shop")
    assert "sslpassword" not in missing_options({})


@pytest.mark.parametrize(
    ("url", "splits"),
    [
        ("postgresql://me:secret@here:5432/db", False),
        ("postgresql://me:s?cr@t@here/db", True),
        ("postgresql://me:s@cret/x@here/db", True),
        ("postgresql://me:20/secret@here/db", True),
        ("postgresql://me:secret@@abstract/db", False),  # a UNIX socket without a file
        ("postgresql://here/db?password=s@cret", False),
        ("postgresql:///db?host=/run/postgresql", False),
        ("postgresql://", False),
    ],
)
def test_a_password_that_is_not_escaped_is_noticed(url: str, splits: bool) -> None:
    assert splits_password(url) is splits
