"""Upgrades of the tables, step by step."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import SchemaError
from replication.storage.migrations import check_version, installed, upgrade

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FIRST = ["CREATE TABLE first (a)", "INSERT INTO first VALUES (1)"]
SECOND = ["ALTER TABLE first ADD COLUMN b", "UPDATE first SET b = a + 1", "CREATE TABLE second (c)"]
KILLED = [SECOND[0], SECOND[1], "SELECT die()", SECOND[2]]


def upgrade_file(path: str, steps: Sequence[Sequence[str]]) -> None:
    """Upgrade a file; ``die()`` in a step kills the process."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.create_function("die", 0, lambda: os.kill(os.getpid(), signal.SIGKILL))

        @contextmanager
        def transaction() -> Iterator[None]:
            database.execute("BEGIN IMMEDIATE")
            with database:
                yield

        upgrade(lambda sql: database.execute(sql).fetchall(), transaction, steps)


class MigrateTests(SynchronousTestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = f"{folder.name}/old.db"

    def sql(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path)) as database:
            return database.execute(sql).fetchall()

    def version(self) -> int:
        return installed(self.sql)

    def test_a_fresh_database_takes_all_steps(self) -> None:
        upgrade_file(self.path, [FIRST, SECOND])
        self.assertEqual((self.version(), self.sql("SELECT * FROM first")), (2, [(1, 2)]))

    def test_an_old_database_takes_the_steps_that_are_missing(self) -> None:
        upgrade_file(self.path, [FIRST])
        upgrade_file(self.path, [["not done again"], SECOND])
        self.assertEqual((self.version(), self.sql("SELECT * FROM first")), (2, [(1, 2)]))
        upgrade_file(self.path, [["not done again"], ["nor this"]])
        self.assertEqual(self.sql("SELECT version FROM replication_schema"), [(2,)])

    def test_a_step_that_fails_leaves_nothing_behind(self) -> None:
        self.assertRaises(sqlite3.Error, upgrade_file, self.path, [FIRST, [SECOND[0], "nonsense"]])
        self.assertEqual((self.version(), self.sql("SELECT * FROM first")), (1, [(1,)]))

    def test_a_database_from_the_future_is_refused_and_left_alone(self) -> None:
        upgrade_file(self.path, [FIRST, SECOND])
        message = str(self.assertRaises(SchemaError, upgrade_file, self.path, [FIRST]))
        self.assertIn("version 2, this program has 1", message)
        self.assertEqual(self.version(), 2)

    def test_a_database_that_may_only_be_read_must_be_up_to_date(self) -> None:
        check_version(1, 1)
        self.assertIn("version 1, not 2", str(self.assertRaises(SchemaError, check_version, 1, 2)))
        self.assertRaises(SchemaError, check_version, 2, 1)

    def test_an_upgrade_that_was_killed_is_done_again(self) -> None:
        script = "import sys; from tests.storage.test_migrations import *; upgrade_file(sys.argv[1], [FIRST, KILLED])"
        killed = subprocess.run([sys.executable, "-c", script, self.path], cwd=Path(__file__).parents[2], check=False)
        self.assertEqual(killed.returncode, -signal.SIGKILL)
        self.assertEqual((self.version(), self.sql("SELECT * FROM first")), (1, [(1,)]))
        upgrade_file(self.path, [FIRST, SECOND])
        self.assertEqual((self.version(), self.sql("SELECT * FROM first")), (2, [(1, 2)]))
