"""A running master warns of rows whose IDs do not come from the stream's sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from replication.storage.postgres.watch import CHECK_EVERY
from replication.streams.definitions import StreamDefinition
from tests.storage.postgres.test_watch import INSERT, UsesWatch

if TYPE_CHECKING:
    from replication.streams.interfaces import IWatch


class RowsAboveTests(UsesWatch, SynchronousTestCase):
    """Rows with IDs of another sequence than the watched one."""

    def setUp(self) -> None:
        super().setUp()
        self.watch_(self.watched)

    def watch_(self, watched: IWatch) -> None:
        """Poll ``watched`` with a clock of the test from now on."""
        self.watched, self.time = watched, 0.0
        watch = self.store._watches[-1].connection
        watch._now = lambda: self.time
        watch._check_at = CHECK_EVERY
        self.store.warnings.clear()

    def later(self, *, clear: bool = True) -> list[str]:
        """Return the warnings of the next check; with those before it if they are not to be cleared."""
        if clear:
            self.store.warnings.clear()
        self.time += CHECK_EVERY
        self.poll(2)
        return list(self.store.warnings)

    def test_rows_above_the_sequence_are_warned_of_once(self) -> None:
        self.sql(INSERT)
        self.assertEqual(self.later(), [])
        self.sql("INSERT INTO events VALUES (50, 'by hand')")
        self.poll(3)
        self.assertEqual(self.store.warnings, [], "it rows are not read at every poll")
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

    def test_rows_of_a_name_that_is_not_among_the_writers_are_warned_of_once(self) -> None:
        self.sql("ALTER TABLE events ADD writer text")
        options: Any = {"table": "events", "id_column": "id", "row": ["name"], "instance_column": "writer"}
        self.wait(self.store.declare(StreamDefinition("of_two", writers=["a", "b"], **options)))
        watched = self.store.watch()
        assert watched is not None
        self.watch_(watched)
        self.sql("INSERT INTO events (name, writer) VALUES ('x', 'a')")
        self.assertEqual(self.later(), [])
        self.sql("INSERT INTO events (name, writer) VALUES ('x', 'typo')")
        (warning,) = self.later()
        self.assertIn("stream 'of_two': table 'events' has rows of 'typo', not among the stream's writers", warning)
        self.sql("INSERT INTO events (name, writer) VALUES ('y', 'typo')")
        self.assertEqual(self.later(clear=False), [warning])
        self.sql("INSERT INTO events (name, writer) VALUES ('z', 'other')")
        _, more = self.later(clear=False)
        self.assertIn("has rows of 'other', 'typo', not among", more)
        self.sql("INSERT INTO events (id, name, writer) VALUES (90, 'by hand', 'a')")
        *_, above = self.later(clear=False)
        self.assertIn("has rows up to ID 90", above, "another warning does not hide it")

    def test_a_table_that_was_replaced_is_a_warning(self) -> None:
        self.sql("CREATE TABLE newer (id bigserial PRIMARY KEY, name text)")
        self.sql("SELECT setval('newer_id_seq', 10)")
        self.sql("ALTER TABLE events RENAME TO older")
        self.sql("ALTER TABLE newer RENAME TO events")
        self.sql(INSERT)
        self.assertEqual(len(self.later()), 1)
        self.assertEqual(self.poll(), (1, 1))

    def test_a_table_that_is_locked_or_gone_delays_no_other(self) -> None:
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

        def lose(how: str = "", *, bounded: bool = False) -> None:
            session.begin = begin  # type: ignore[method-assign]
            begin(how, bounded=bounded)
            self.end_sessions()

        session.begin = lose  # type: ignore[method-assign]
        self.assertEqual(self.later(), [])
        self.assertEqual(len(self.later()), 1)

    def test_many_streams_are_asked_in_one_transaction(self) -> None:
        names = [f"t{number}" for number in range(50)]
        for name in names:
            self.sql(f"CREATE TABLE {name} (id bigserial PRIMARY KEY, name text)")
        self.watch_(self.watch(*[StreamDefinition(each, table=each, id_column="id", row=["name"]) for each in names]))
        self.poll(3)
        session = self.store._watches[-1].connection.session
        typed, asked = session.typed, []

        def count(sql: str, *parameters: Any, **options: Any) -> Any:
            asked.append(sql)
            return typed(sql, *parameters, **options)

        session.typed = count  # type: ignore[method-assign]
        self.later()
        self.assertEqual(len(asked), 3, asked)
