"""What stored facts cost, measured; ``test_scale.py`` runs all of it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.cluster import DatabaseKind
from replication.bench.scale_stored import lower_position
from replication.storage.sqlite.connection import POSITION


class LowerPositionTests(SynchronousTestCase):
    def test_the_stored_position_is_that_of_an_empty_stream(self) -> None:
        """Otherwise a start would read no facts."""
        path = Path(self.mktemp())
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE stream_positions (stream_name, instance_name, stream_id)")
            connection.execute("INSERT INTO stream_positions VALUES ('events', 'master', 5)")
            connection.commit()
            lower_position(DatabaseKind("SQLite", str), f"sqlite:///{path}")
            self.assertEqual(connection.execute(POSITION, ("events", "master")).fetchall(), [(1,)])
