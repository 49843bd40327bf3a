"""``run_interaction`` on PostgreSQL: the transaction of a function allocates the ID of its fact."""

from __future__ import annotations

from threading import Event
from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import SequenceRegressedError, StoreError
from replication.storage.postgres import store as postgres_store
from replication.storage.postgres.pipeline import Pipeline
from replication.storage.postgres.store import PostgresStore
from replication.wire.grammar import StreamName
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump
from tests.system.daemons import until
from tests.writer.cases import DEFINITIONS, ME, ORDERS, Process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.internet.defer import Deferred

    from replication.streams.interfaces import ISqlExecutor
    from replication.writer.interaction import NewFact


class InteractionTests(HasDatabase, SynchronousTestCase):
    def setUp(self) -> None:
        self.pump = Pump()
        self.store = PostgresStore(self.url, self.pump)
        self.addCleanup(lambda: self.pump.wait(self.store.close()))
        self.process = Process(self.store)
        self.pump.wait(self.process.declare(*DEFINITIONS))
        self.pump.wait(self.store.claim(ME))
        self.orders = self.process.writers[ORDERS]
        self.pending = self.orders.publisher.ids.pending
        self.sql("CREATE TABLE mine (id TEXT UNIQUE)")

    def tearDown(self) -> None:
        self.assertEqual((self.process.open, self.pending.open_count), ([], 0))

    @staticmethod
    def place(txn: ISqlExecutor, fact: NewFact, order: str) -> int:
        txn.execute("INSERT INTO mine VALUES (%s)", [order])
        fact.write([order, "placed"])
        return fact.token

    def start(self, order: str, then: Callable[[], object] = lambda: None) -> Deferred[int]:
        """Begin to place an order; ``then`` is called at the end of the function."""

        def work(txn: ISqlExecutor, fact: NewFact) -> int:
            token = self.place(txn, fact, order)
            then()
            return token

        return self.pump.start(self.orders.run_interaction(work))

    def run_in_turn(self, *orders: str) -> Sequence[int]:
        return [self.pump.wait(self.start(order)) for order in orders]

    def rows(self) -> list[tuple[Any, ...]]:
        return self.sql("SELECT stream_id, row FROM stream_orders ORDER BY stream_id")

    def published(self) -> list[str]:
        return [line.split(" ", 3)[3] for line in self.process.new_lines() if line.startswith("RDATA orders")]

    def test_the_row_and_the_fact_are_one_transaction_whose_end_is_one_trip(self) -> None:
        trips: list[str] = []
        run = Pipeline.run

        def note(pipeline: Pipeline, statements: Sequence[tuple[str, Any]]) -> Any:
            trips.append(" ".join(sql.split(maxsplit=1)[0] for sql, _ in statements))
            return run(pipeline, statements)

        self.patch(Pipeline, "run", note)
        self.assertEqual(self.run_in_turn("o1"), [2])
        self.assertEqual(trips, ["SELECT INSERT INSERT COMMIT RESET"])
        ((one, other),) = self.sql("SELECT a.xmin::text, b.xmin::text FROM mine a, stream_orders b")
        self.assertEqual((one, self.rows()), (other, [(2, '["o1","placed"]')]))
        self.assertEqual(self.published(), ['2 ["o1","placed"]'])

    def test_a_fact_waits_for_a_smaller_id_whose_transaction_goes_on(self) -> None:
        began, end = Event(), Event()

        def hold() -> None:
            began.set()
            end.wait(60.0)

        slow = self.start("slow", hold)
        began.wait(60.0)
        ((stream, token, _),) = self.process.transactions.oldest_first()
        self.assertEqual((stream.definition.name, token, self.pending.open_count), (ORDERS, 2, 1))
        self.assertEqual(self.run_in_turn("o1", "o2"), [3, 4])
        self.assertEqual((self.published(), self.orders.publisher.ids.settled), ([], 1))
        end.set()
        self.pump.wait(slow)
        self.assertEqual(
            self.published(), [f'{token} ["{order}","placed"]' for token, order in [(2, "slow"), (3, "o1"), (4, "o2")]]
        )

    def test_a_function_that_raises_lets_later_facts_be_published(self) -> None:
        began, end = Event(), Event()

        def fail() -> None:
            began.set()
            end.wait(60.0)
            raise ZeroDivisionError

        bad = self.start("bad", fail)
        began.wait(60.0)
        self.run_in_turn("o1")
        end.set()
        self.assertRaises(ZeroDivisionError, self.pump.wait, bad)
        self.assertEqual((self.published(), self.rows()), (['3 ["o1","placed"]'], [(3, '["o1","placed"]')]))
        self.assertEqual(self.sql("SELECT id FROM mine"), [("o1",)])

    def test_a_statement_that_is_refused_undoes_the_transaction(self) -> None:
        self.run_in_turn("o1")
        self.assertRaises(StoreError, self.run_in_turn, "o1")
        self.assertEqual(self.run_in_turn("o2"), [4])

    def test_of_many_at_once_each_has_an_id_of_its_own_and_all_are_published_in_order(self) -> None:
        running = [self.start(f"o{number}") for number in range(30)]
        tokens = [self.pump.wait(each) for each in running]
        self.assertEqual(sorted(tokens), [*range(2, 32)])
        self.assertEqual([int(line.split()[0]) for line in self.published()], [*range(2, 32)])

    def test_with_ids_that_are_reserved_before_all_are_published_in_order(self) -> None:
        async def reserve() -> int:
            async with self.orders.reserve() as fact:
                await fact.write(["o", "reserved"])
            return fact.token

        running = [each for number in range(10) for each in (self.start(f"o{number}"), self.pump.start(reserve()))]
        tokens = [self.pump.wait(each) for each in running]
        self.assertEqual(sorted(tokens), [*range(2, 22)])
        self.assertEqual([int(line.split()[0]) for line in self.published()], [*range(2, 22)])

    def test_a_negative_stream_has_negative_ids_in_its_table(self) -> None:
        debts = self.process.writers[StreamName("debts")]
        self.assertEqual(self.pump.wait(debts.run_interaction(lambda _, fact: fact.stream_id)), -2)

    def test_a_sequence_that_goes_back_is_moved_forward_with_a_warning(self) -> None:
        self.run_in_turn("o1", "o2")
        self.sql("SELECT setval('stream_orders_seq', 1)")
        self.assertEqual(self.run_in_turn("o3"), [4])
        self.assertIn("went back to 2 after 3", self.store.warnings[-1])

    def test_an_id_below_what_other_processes_have_published_is_refused_before_anything_is_stored(self) -> None:
        self.pending.note(9)
        self.assertRaises(SequenceRegressedError, self.run_in_turn, "o1")
        self.assertEqual((self.rows(), self.sql("SELECT id FROM mine")), ([], []))

    def test_a_session_that_was_lost_while_it_was_idle_is_opened_again(self) -> None:
        self.run_in_turn("o1")
        self.end_sessions()
        self.assertEqual(self.run_in_turn("o2")[0], 3)
        self.assertEqual(len(self.rows()), 2)

    def test_a_session_that_is_lost_in_the_function_fails_it_and_the_next_one_works(self) -> None:
        self.assertRaises(StoreError, self.pump.wait, self.start("o1", self.end_sessions))
        self.assertEqual((self.run_in_turn("o2"), self.sql("SELECT id FROM mine")), ([3], [("o2",)]))

    def test_names_that_were_lost_are_held_again(self) -> None:
        self.patch(postgres_store, "HELD_FOR", 0.0)
        locks = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'"
        ((pid,),) = self.sql(locks)
        self.server.end_sessions("FROM pg_stat_activity WHERE pid = %s", pid)
        self.run_in_turn("o1")
        until(lambda: bool(self.sql(locks)), "the name is held again")
        self.assertNotEqual(self.sql(locks), [(pid,)])

    def run_sql(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements in an interaction, and return the rows of the last one; all use one session."""

        def work(txn: ISqlExecutor, _: NewFact) -> list[tuple[Any, ...]]:
            return [txn.execute(each) for each in statements][-1]

        return self.pump.wait(self.orders.run_interaction(work))

    def test_a_setting_ends_with_the_transaction_whatever_the_function_or_the_server_does(self) -> None:
        self.sql(
            "CREATE FUNCTION change(name text, value text) RETURNS text LANGUAGE sql "
            "AS 'SELECT set_config(name, value, false)'"
        )
        for name, value in (
            ("default_transaction_read_only", "on"),
            ("statement_timeout", "54321"),  # not a short one: it counts until the transaction has ended
            ("search_path", "public, pg_catalog"),
            ("timezone", "Asia/Tokyo"),
            ("client_encoding", "LATIN1"),
            ("synchronous_commit", "off"),
            ("shop.user", "mallory"),
        ):
            shown = f"SELECT current_setting('{name}', true), pg_backend_pid()"
            ((before, pid),) = self.run_sql(shown)
            self.run_sql(f"SELECT change('{name}', '{value}')")
            self.assertIn(self.run_sql(shown), ([(before, pid)], [("", pid)]), name)
        self.run_in_turn("o1")

    def test_a_fact_is_in_its_table_also_if_a_schema_or_a_temporary_table_has_one_of_its_name(self) -> None:
        """As in a schema for each tenant."""
        self.sql(
            "CREATE SCHEMA tenant; CREATE TABLE tenant.stream_orders (LIKE stream_orders INCLUDING ALL); "
            "CREATE TABLE tenant.stream_positions (LIKE stream_positions INCLUDING ALL)"
        )
        for name, statement in (
            ("schema", "SET LOCAL search_path TO tenant, public"),
            ("temporary", "CREATE TEMP TABLE stream_orders (LIKE stream_orders INCLUDING ALL) ON COMMIT DROP"),
        ):

            def work(txn: ISqlExecutor, fact: NewFact, name: str = name, statement: str = statement) -> None:
                txn.execute(statement)
                fact.write([name, "placed"])

            self.pump.wait(self.orders.run_interaction(work))
            self.assertIn((f'["{name}","placed"]',), self.sql("SELECT row FROM stream_orders"))
        self.assertEqual(self.sql("SELECT row FROM tenant.stream_orders"), [])
        self.assertEqual(self.sql("SELECT stream_id FROM tenant.stream_positions"), [])

    def test_settings_of_the_package_outlive_a_reset(self) -> None:
        self.configure("synchronous_commit", "off")
        self.end_sessions()
        shown = "SELECT current_setting('synchronous_commit'), pg_backend_pid()"
        found = [self.run_sql(shown) for _ in range(3)]
        self.assertEqual(found, [[("on", found[0][0][1])]] * 3)

    def test_a_function_cannot_give_up_that_its_commit_is_durable(self) -> None:
        self.sql("CREATE TABLE used (value text)")
        self.at_each("mine", "INSERT INTO used SELECT current_setting('synchronous_commit');", deferred=True)
        self.run_sql("SET LOCAL synchronous_commit = off", "INSERT INTO mine VALUES ('o1')")
        self.assertEqual(self.sql("SELECT value FROM used"), [("on",)])

    def test_nothing_else_of_a_session_outlasts_the_transaction(self) -> None:
        for statement in (
            "CREATE TEMP TABLE cart (a int)",
            "CREATE TABLE pg_temp.cart (a int)",
            "SELECT 1 AS a INTO TEMPORARY cart",
            "DECLARE cart CURSOR WITH HOLD FOR SELECT 1",
            "SELECT pg_advisory_lock(7)",
            "SELECT pg_try_advisory_lock(7)",
        ):
            for _ in range(2):  # a second time: it must not exist
                self.run_sql(statement)
        held = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 7"
        until(lambda: not self.sql(held), "the lock is free")
        self.assertRaises(StoreError, self.run_sql, "SELECT pg_advisory_lock(7)", "SELECT nothing")
        until(lambda: not self.sql(held), "the lock is free")

    def test_a_session_holds_its_process_although_a_function_gives_up_all_locks(self) -> None:
        self.run_sql("SELECT pg_advisory_unlock_all()")
        ((pid,),) = self.run_sql("SELECT pg_backend_pid()")
        self.assertTrue(self.sql("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND pid = %s", pid))

    def test_a_session_is_used_again_after_what_ends_with_the_transaction(self) -> None:
        statements = (
            "SELECT pg_advisory_xact_lock(7)",
            "SELECT set_config('statement_timeout', '5s', true)",
            "SET LOCAL lock_timeout = '5s'",
            "CREATE TEMP TABLE cart (a int) ON COMMIT DROP",
            "CREATE TABLE temp (temp int)",
            "INSERT INTO temp (temp) VALUES (1)",
        )
        pids = [self.run_sql(each, "SELECT pg_backend_pid()") for each in statements]
        self.assertEqual(pids, pids[:1] * len(statements))

    def test_nothing_is_stored_by_a_process_whose_name_another_one_has_claimed(self) -> None:
        self.run_in_turn("o1")
        self.end_sessions()
        pump = Pump()
        other = PostgresStore(self.url, pump)
        pump.wait(other.open())
        pump.wait(other.claim(ME))
        for _ in range(2):
            self.assertRaises(StoreError, self.run_in_turn, "o2")
        pump.wait(other.close())
        self.assertEqual(self.sql("SELECT id FROM mine"), [("o1",)])
