"""Which databases a bench measures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from replication.bench import databases
from replication.bench.databases import kinds

if TYPE_CHECKING:
    from tests.postgres import PostgresServer


def test_there_is_sqlite_and_postgresql_each_with_empty_ones(postgres: PostgresServer) -> None:
    with kinds() as (sqlite, shared):
        assert (sqlite.name, shared.name) == ("SQLite", "PostgreSQL")
        urls = [kind.make() for kind in (sqlite, shared, sqlite, shared)]
        assert len(set(urls)) == 4
        folder = Path(urls[0].removeprefix("sqlite:///")).parent
        assert folder.exists()
        assert {url.partition(":")[0] for url in urls} == {"sqlite", "postgresql"}
    assert not folder.exists()


@pytest.mark.parametrize(
    ("missing", "cure"), [("find_binaries", "apt-get install postgresql"), ("find_spec", "'.[postgres]'")]
)
def test_what_is_not_measured_is_said(
    missing: str, cure: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(databases, "find_binaries", lambda: Path("/here"))
    monkeypatch.setattr(databases, missing, lambda *_: None)
    with kinds() as found:
        assert [each.name for each in found] == ["SQLite"]
    assert cure in capsys.readouterr().err
