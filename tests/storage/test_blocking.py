"""A store in a program without a reactor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from replication.errors import StoreError
from replication.storage.blocking import use_store

if TYPE_CHECKING:
    from pathlib import Path

    from replication.streams.interfaces import IStreamStore


async def read(store: IStreamStore) -> int:
    """Return the number of rows of a table that every database of this package has."""
    ((count,),) = await store.read(lambda database: database.execute("SELECT count(*) FROM stream_positions"))
    return int(count)


def test_a_store_is_opened_used_and_closed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    assert use_store(url, read, read_only=False) == 0
    assert use_store(url, read, read_only=False) == 0, "the claim of the first call has ended"
    assert use_store(url, read, read_only=True) == 0


def test_an_error_is_raised_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        use_store(f"sqlite:///{tmp_path}/y.db", read, read_only=True)
    assert not (tmp_path / "y.db").exists()
