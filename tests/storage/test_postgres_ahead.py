"""Rows of mapped streams whose IDs come from elsewhere are said, by a master that runs, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from replication.storage.postgres_watch import AHEAD_EVERY
from replication.streams.registry import StreamDefinition
from tests.storage.test_postgres_watch import INSERT, UsesWatch

if TYPE_CHECKING:
    from replication.streams.seams import IWatch


class AheadTests(UsesWatch, SynchronousTestCase):
    """Rows whose IDs are of another sequence than the one that is watched."""

    def setUp(self) -> None:
        super().setUp()
        self.watch_(self.watched)

    def watch_(self, watched: IWatch) -> None:
        """Look through ``watched`` by a clock of our own from now on."""
        self.watched, self.time = watched, 0.0
        watch = self.store._watches[-1].connection
        watch._now = lambda: self.time
        watch._ahead_at = AHEAD_EVERY
        self.store.warnings.clear()

    def later(self) -> list[str]:
        """Return what is said after the next time at which rows are looked for."""
        self.store.warnings.clear()
        self.time += AHEAD_EVERY
        self.look(2)
        return list(self.store.warnings)

    def test_rows_that_come_from_elsewhere_are_said_once(self) -> None:
        self.sql(INSERT)
        self.assertEqual(self.later(), [])
        self.sql("INSERT INTO events VALUES (50, 'by hand')")
        self.look(3)
        self.assertEqual(self.store.warnings, [], "it is not asked at every look")
        self.assertIn(
            "stream 'events': has rows up to ID 50, but sequence events_id_seq has given 2: ", "".join(self.later())
        )
        self.sql("INSERT INTO events VALUES (51, 'by hand')")
        self.sql(INSERT)
        self.assertEqual(self.later(), [])
        self.sql("SELECT setval('events_id_seq', 51)")
        self.assertEqual(self.later(), [])
        self.sql("INSERT INTO events VALUES (90, 'by hand')")
        self.assertEqual(len(self.later()), 1)

    def test_a_table_that_was_replaced_is_said(self) -> None:
        self.sql("CREATE TABLE newer (id bigserial PRIMARY KEY, name text)")
        self.sql("SELECT setval('newer_id_seq', 10)")
        self.sql("ALTER TABLE events RENAME TO older")
        self.sql("ALTER TABLE newer RENAME TO events")
        self.sql(INSERT)
        self.assertEqual(len(self.later()), 1)
        self.assertEqual(self.look(), (1, 1))

    def test_a_table_that_is_locked_or_gone_keeps_nobody_waiting_and_nothing_back(self) -> None:
        names = ["gone", "locked", "narrow", "whole", "down"]
        for name in names:
            self.sql(f"CREATE TABLE {name} (id bigint PRIMARY KEY, name text)")
            self.sql(f"CREATE SEQUENCE {name}_ids")
        definitions = [
            StreamDefinition(
                each, table=each, id_column="id", row=["name"], sequence=f"{each}_ids", negative=each == "down"
            )
            for each in names
        ]
        self.watch_(self.watch(*definitions))
        for name in names:
            self.sql(f"INSERT INTO {name} VALUES (50, 'a'), (-40, 'a')")
        self.sql("DROP TABLE gone")
        self.sql("ALTER TABLE narrow DROP id")
        locker = self.connect("LOCK TABLE locked")
        self.assertEqual([each.partition(": ")[0] for each in self.later()], ["stream 'whole'", "stream 'down'"])
        locker.rollback()
        self.assertEqual([each.partition(": ")[0] for each in self.later()], ["stream 'locked'"])

    def test_a_session_that_is_lost_over_it_is_made_again(self) -> None:
        self.sql("INSERT INTO events VALUES (50, 'by hand')")
        session = self.store._watches[-1].connection.session
        begin = session.begin

        def lose(how: str = "") -> None:
            session.begin = begin  # type: ignore[method-assign]
            begin(how)
            self.end_sessions()

        session.begin = lose  # type: ignore[method-assign]
        self.assertEqual(self.later(), [])
        self.assertEqual(len(self.later()), 1)

    def test_many_streams_are_asked_in_one_transaction(self) -> None:
        names = [f"t{number}" for number in range(50)]
        for name in names:
            self.sql(f"CREATE TABLE {name} (id bigserial PRIMARY KEY, name text)")
        self.watch_(self.watch(*[StreamDefinition(each, table=each, id_column="id", row=["name"]) for each in names]))
        self.look(3)
        session = self.store._watches[-1].connection.session
        run, asked = session.run, []

        def count(sql: str, *parameters: Any, **options: Any) -> Any:
            asked.append(sql)
            return run(sql, *parameters, **options)

        session.run = count  # type: ignore[method-assign]
        self.later()
        self.assertEqual(len(asked), 2, asked)
