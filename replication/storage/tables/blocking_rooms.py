"""Rooms, read from a database by a program without a reactor."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from replication.storage.blocking import use_store
from replication.storage.tables.room_queries import RoomReads

if TYPE_CHECKING:
    from collections.abc import Callable

    from replication.streams.interfaces import IStreamStore

T = TypeVar("T")


def read_rooms(url: str, read: Callable[[RoomReads], T]) -> T:
    """Open the database at ``url``, call ``read`` on one snapshot, and close it; StoreError if that fails."""

    async def work(store: IStreamStore) -> T:
        return await store.read(lambda database: read(RoomReads(database)))

    return use_store(url, work, read_only=True)
