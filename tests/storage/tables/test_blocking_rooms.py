"""Rooms, read by a program without a reactor."""

from __future__ import annotations

import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import ConfigError, StoreError, UnknownRoomError
from replication.storage.sqlite.connection import SqliteConnection
from replication.storage.tables.blocking_rooms import read_rooms
from tests.contract.rooms import ROOM, event
from tests.rooms.recorded import Keeper


class RoomFileTests(SynchronousTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "rooms.db"

    def test_what_a_master_keeps_is_read(self) -> None:
        connection = SqliteConnection(str(self.path), read_only=False, busy_timeout=1)
        connection.open()
        Keeper(statements=connection.session).take(ROOM, [event("a")])
        connection.close()
        url = f"sqlite:///{self.path}"
        self.assertEqual(read_rooms(url, lambda rooms: rooms.view(ROOM).forward_extremities), ("a",))
        self.assertRaises(UnknownRoomError, read_rooms, url, lambda rooms: rooms.view("!none"))

    def test_a_database_that_is_not_there_is_not_made(self) -> None:
        self.assertRaises(StoreError, read_rooms, f"sqlite:///{self.path}", lambda rooms: rooms.rooms())
        self.assertFalse(self.path.exists())
        self.assertRaises(ConfigError, read_rooms, "nonsense", lambda rooms: rooms.rooms())
