"""What the HTTP API shows of a master: pages, tokens, statuses and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import attrs

from replication.errors import (
    FactsGoneError,
    NotAWriterError,
    RowError,
    StoreError,
    UnknownStreamError,
)
from replication.presence.last_seen import LastSeen
from replication.storage.tables import instances
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import Write
from replication.wire.commands import UserIp
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import begin, error_of, now, shown_metrics
from tests.serving import ORDERS, MasterCase, SharedCase

if TYPE_CHECKING:
    from collections.abc import Collection
    from contextlib import AbstractContextManager


class SharedTests(SharedCase):
    def test_protocol_f6_a_token_begins_at_the_smallest_position(self) -> None:
        self.append("placed", "paid")
        self.shared.others_write("orders", "other", 2)
        self.net.advance(1.0)
        self.assertEqual(str(self.master.token("orders").ahead), "{'master': 3}")
        since, text = now(self.master.served.since("orders", "3", 10))
        self.assertEqual(([*since.written], text), ([], "3"))

    def test_facts_of_another_writer_are_served_up_to_its_stored_position(self) -> None:
        """A later fact in the database may be above an ID that is open at the other writer."""
        fact = Fact(Token(6), ('["o","placed"]',))
        write = Write(ORDERS.name, InstanceName("other"), Token(4), [Fact(Token(4), fact.texts), fact])
        now(self.store.transaction().commit([write]))
        page = now(self.master.served.page("orders", "other", after=0, upto=None, limit=10))
        self.assertEqual(([each.token for each in page.facts], page.upto), ([4], 4))

    def test_a_viewer_is_shown_the_page_that_others_receive(self) -> None:
        self.append("placed", "paid", "sent")
        page = now(self.master.served.shown_page("orders", "master", after=2, upto=3, limit=9))
        self.assertEqual(([each.token for each in page.facts], page.upto, page.limited), ([3], 3, False))
        page = now(self.master.served.shown_page("orders", "master", after=1, upto=4, limit=2))
        self.assertEqual(([each.token for each in page.facts], page.upto, page.limited), ([2, 3], 3, True))
        page = now(self.master.served.shown_page("orders", "other", after=1, upto=4, limit=2))
        self.assertEqual(([*page.facts], page.upto), ([], 0))

    def test_a_page_of_an_unknown_writer_is_empty(self) -> None:
        page = now(self.master.served.page("orders", "unknown", after=0, upto=None, limit=10))
        self.assertEqual(([*page.facts], page.upto, page.limited), ([], 0, False))

    def test_what_is_written_here_is_stored_here(self) -> None:
        self.assertTrue(self.master.served.stores("orders"))

    def test_a_page_of_a_stream_without_any_position_is_empty(self) -> None:
        master = self.make_master(instance_name="second", streams=[StreamDefinition("stock", writers=("other",))])
        now(master.start())
        page = now(master.served.page("stock", "other", after=0, upto=None, limit=10))
        self.assertEqual(([*page.facts], page.upto), ([], 0))
        now(master.stop())

    def test_an_in_memory_stream_counts_its_own_ids(self) -> None:
        """Its facts are only here; a sequence of the database would not know which are complete."""
        master = self.make_master(instance_name="second", streams=[StreamDefinition("typing", in_memory=True)])
        now(master.start())
        self.shared.last_value[StreamName("typing")] = 70
        appended = begin(master.stream("typing").append([[1]]))
        self.net.advance(1.0)
        self.assertEqual((appended, master.stream("typing").shared), ([[2]], False))
        now(master.stop())

    def test_facts_since_a_token_reach_the_positions_that_are_stored_now(self) -> None:
        """A client may have written at the other writer since the last poll."""
        self.shared.others_write("orders", "other", 1)
        self.net.advance(1.0)
        self.append("placed")
        self.shared.others_write("orders", "other", 2)
        self.assertEqual(now(self.master.served.since("orders", "1", 10))[1], "2")

    def test_facts_since_a_token_reach_the_last_fact_of_a_killed_writer_that_does_not_return(self) -> None:
        """A killed writer may have stored a smaller position; no process will store a larger one."""
        write = Write(ORDERS.name, InstanceName("killed"), Token(4), [Fact(Token(7), ('["o","placed"]',))])
        now(self.store.transaction().commit([write]))
        master = self.make_master(instance_name="second")
        now(master.start())
        self.net.advance(1.0)
        page, text = now(master.served.since("orders", "4", 10))
        self.assertEqual(([(each.token, each.writer) for each in page.written], text), ([(7, "killed")], "7"))
        now(master.stop())

    def numbered(self) -> AbstractContextManager[object]:
        """Give the one writer that is ahead the number 5; the store of these tests has no table for it."""

        async def number(store: object, names: Collection[InstanceName] = ()) -> dict[InstanceName, int]:
            self.assertIs(store, self.store)
            return dict(zip(names, [5], strict=True))

        return patch.object(instances, "number_instances", number)

    def test_where_facts_of_one_writer_are_gone_the_error_has_the_token_that_leaves_them_out(self) -> None:
        other = InstanceName("other")
        facts = [Fact(Token(each), ('["o","placed"]',)) for each in (3, 7)]
        now(self.store.transaction().commit([Write(ORDERS.name, other, Token(7), facts)]))
        now(self.store.forget_facts(ORDERS.name, other, Token(3)))
        self.shared.last_value[ORDERS.name] = 7
        self.append("placed")
        self.net.advance(1.0)
        with self.numbered():
            with self.assertRaises(FactsGoneError) as raised:
                now(self.master.served.since("orders", "1", 10))
            error = raised.exception
            self.assertEqual((error.writer, error.upto, error.since), ("other", 3, "m1~5.3"))
            page, text = now(self.master.served.since("orders", "m1~5.3", 10))
        self.assertEqual([(each.token, each.writer) for each in page.written], [(7, "other"), (8, "master")])
        self.assertNotIn("5.3", text)

    def test_the_token_after_the_facts_has_the_writer_that_is_ahead_of_a_running_one(self) -> None:
        self.shared.others_write("orders", "other", 1)
        self.append("placed")
        with self.numbered():
            page, text = now(self.master.served.since("orders", "1", 10))
        self.assertEqual(([(each.token, each.writer) for each in page.written], text), ([(2, "master")], "m1~5.2"))

    def test_the_token_after_the_facts_has_the_writer_that_is_ahead_of_a_killed_one(self) -> None:
        write = Write(ORDERS.name, InstanceName("killed"), Token(4), [Fact(Token(7), ('["o","placed"]',))])
        now(self.store.transaction().commit([write]))
        self.shared.last_value[ORDERS.name] = 7
        master = self.make_master(instance_name="second")
        now(master.start())
        self.net.advance(1.0)
        now(master.stream("orders").append([[["o", "paid"]]]))
        with self.numbered():
            page, text = now(master.served.since("orders", "7", 10))
        self.assertEqual(([(each.token, each.writer) for each in page.written], text), ([(8, "second")], "m7~5.8"))
        states = {each.instance: each.state for each in master.served.stream_statuses("orders")[0].writers}
        self.assertEqual(states, {"second": "writing", "master": "elsewhere", "killed": "former"})
        now(master.stop())

    def test_statuses_show_other_writers_as_of_the_last_poll(self) -> None:
        self.shared.others_write("orders", "other", 7)
        self.net.advance(1.0)
        status = self.master.served.stream_statuses()[0]
        shown = [(each.instance, each.position, each.published, each.state) for each in status.writers]
        self.assertEqual(shown, [("master", 7, 7, "writing"), ("other", 7, 7, "elsewhere")])

    def test_the_status_of_one_stream_is_that_among_all(self) -> None:
        for status in self.master.served.stream_statuses():
            self.assertEqual(self.master.served.stream_statuses(status.definition.name), [status])
        self.assertEqual(self.master.served.stream_statuses("unknown"), [])
        self.assertEqual(self.master.served.stream_statuses(""), [], "GET /v1/streams/ showed another stream")

    def test_statuses_show_a_removed_writer_once_it_has_ended(self) -> None:
        """Spark reads the writers that it finds there.  Until the end, others do not raise its position."""
        definition = StreamDefinition("notes", writers=("second", "third"))
        master = self.make_master(instance_name="second", streams=[definition])
        now(master.start())
        self.shared.others_write("notes", "third", 4)
        self.shared.others_write("notes", "former", 7)
        self.shared.there = {InstanceName("former")}
        self.net.advance(1.0)
        (status,) = master.served.stream_statuses("notes")
        self.assertEqual([each.instance for each in status.writers], ["second", "third"])
        self.shared.there = set()
        self.net.pump([1.0] * 10)
        now(master.stream("notes").append([["a"]]))
        self.net.pump([1.0] * 3)
        (status,) = master.served.stream_statuses("notes")
        self.assertEqual(
            [(each.instance, each.position, each.state) for each in status.writers],
            [("second", 8, "writing"), ("third", 4, "elsewhere"), ("former", 8, "former")],
        )
        now(master.stop())


class ServedTests(MasterCase):
    def test_a_page_ends_at_the_published_position(self) -> None:
        self.append("a")
        reservation, _ = self.hold()
        self.append("b")
        page = now(self.master.served.page("orders", None, after=0, upto=None, limit=10))
        self.assertEqual(([fact.token for fact in page.facts], page.upto, page.limited), ([2], 2, False))
        self.assertEqual(now(self.master.served.page("orders", "master", after=0, upto=4, limit=10)).upto, 2)
        now(reservation.__aexit__(None, None, None))
        page = now(self.master.served.page("orders", "master", after=2, upto=10**6, limit=10))
        self.assertEqual(([fact.token for fact in page.facts], page.upto), ([4], 4))
        self.assertEqual(self.master.served._catch_up_rows, 3)

    def test_a_page_ends_below_ids_that_are_settled_and_not_published(self) -> None:
        reservation, _ = self.hold()
        self.store.close_gate("commit")
        begin(reservation.__aexit__(ValueError, ValueError("no"), None))
        self.assertEqual(now(self.master.served.page("orders", None, after=0, upto=None, limit=10)).upto, 1)
        self.store.open_gate("commit")
        self.assertEqual(now(self.master.served.page("orders", None, after=0, upto=None, limit=10)).upto, 2)

    def test_a_page_beyond_the_end_is_empty(self) -> None:
        page = now(self.master.served.page("orders", None, after=50, upto=60, limit=10))
        self.assertEqual(([*page.facts], page.upto, page.limited), ([], 1, False))

    def test_facts_of_a_former_instance_are_served(self) -> None:
        now(self.store.open())
        now(self.store.declare(ORDERS))
        now(self.store.transaction().commit([Write(ORDERS.name, InstanceName("old"), Token(4))]))
        self.assertEqual(now(self.master.served.page("orders", "old", after=0, upto=None, limit=10)).upto, 4)
        self.assertEqual(now(self.master.served.page("orders", "unknown", after=0, upto=None, limit=10)).upto, 0)

    def test_a_status_shows_a_former_instance_although_no_follower_has_connected(self) -> None:
        """Spark and other readers over HTTP find the writers there.  The position is never above a stored epoch's."""
        now(self.store.open())
        now(self.store.declare(ORDERS))
        write = Write(ORDERS.name, InstanceName("old"), Token(3), [Fact(Token(4), ('["o","old"]',))])
        now(self.store.transaction().commit([write]))
        for writers in ((), ("master",)):
            self.master = self.make_master(streams=[attrs.evolve(ORDERS, writers=writers)])
            (token,) = self.append("placed")
            (before,) = self.master.served.stream_statuses("orders")
            self.net.pump([1.0] * 2)
            (status,) = self.master.served.stream_statuses("orders")
            shown = [(each.instance, each.position, each.state) for each in status.writers]
            self.assertEqual(shown, [("master", token, "writing"), ("old", token, "former")])
            self.assertEqual((before.minimum, status.minimum), (token - 1, token))
            now(self.master.stop())

    def test_facts_since_a_token_are_also_those_of_a_former_instance(self) -> None:
        """After a change of the instance name, a program that polls would otherwise never receive the rest of them."""
        now(self.store.open())
        now(self.store.declare(ORDERS))
        fact = Fact(Token(4), ('["o","old"]',))
        now(self.store.transaction().commit([Write(ORDERS.name, InstanceName("old"), Token(3), [fact])]))
        for writers in ((), ("master",)):
            self.master = self.make_master(streams=[attrs.evolve(ORDERS, writers=writers)])
            (token,) = self.append("placed")
            page, text = now(self.master.served.since("orders", "3", 10))
            written = [(each.token, each.writer) for each in page.written]
            self.assertEqual(written[0], (4, "old"))
            self.assertEqual((written[-1], text), ((token, "master"), str(token)))
            now(self.master.stop())
            self.store.closed = False

    def test_an_unknown_stream_or_a_bad_row_raises_its_error(self) -> None:
        self.assertIsInstance(
            error_of(begin(self.master.served.page("unknown", None, after=0, upto=None, limit=1))), UnknownStreamError
        )
        self.assertIsInstance(
            error_of(begin(self.master.served.append_texts("unknown", [[]], None))), UnknownStreamError
        )
        error = error_of(begin(self.master.served.append_texts("orders", [[["o", "p"]], [[1]]], None)))
        assert isinstance(error, RowError)
        self.assertEqual(error.fact, 1)
        other = self.make_master(streams=[StreamDefinition("stock", writers=("other",))])
        self.assertIsInstance(error_of(begin(other.served.append_texts("stock", [[]], None))), NotAWriterError)

    def test_an_append_over_http_with_the_same_key_returns_the_same_ids(self) -> None:
        self.assertEqual(now(self.master.served.append_texts("orders", [[["o", "p"]], []], "k")), [2, 3])
        self.assertEqual(now(self.master.served.append_texts("orders", [[["o", "p"]], []], "k")), [2, 3])

    def test_statuses_show_the_settled_and_the_published_position(self) -> None:
        reservation, _ = self.hold()
        self.store.close_gate("commit")
        begin(reservation.__aexit__(ValueError, ValueError("no"), None))
        (writer,) = self.master.served.stream_statuses()[0].writers
        self.assertEqual((writer.position, writer.published, writer.state, writer.gone), (2, 1, "writing", 0))
        self.store.open_gate("commit")
        (writer,) = self.master.served.stream_statuses()[0].writers
        self.assertEqual((writer.position, writer.published), (2, 2))

    def test_every_metric_has_its_value(self) -> None:
        wire = self.greeted("NAME one", "REPLICATE")
        self.append("placed", "paid")
        self.new_lines(wire)
        gone = self.greeted("PING 1")
        self.send(gone, "FOO")
        now(self.master.served.page("orders", None, after=0, upto=None, limit=10))
        begin(self.master.served.append_texts("orders", [[1]], None))
        reservation, _ = self.hold()
        self.net.advance(2.5)
        shown = shown_metrics(self.master.served.samples())
        now(reservation.__aexit__(None, None, None))
        self.assertEqual(
            shown,
            {
                "connections": 1,
                "connections_total": 2,
                "silent_connections": 0,
                "queued_bytes": 0,
                "lines_total direction=in": 3,
                "lines_total direction=out": 2 + 2 + 2 + 2 + 1,
                "bytes_total direction=in": len("NAME one\nREPLICATE\nPING 1\nFOO\n"),
                "bytes_total direction=out": shown["bytes_total direction=out"],
                "commands_total command=NAME": 1,
                "commands_total command=REPLICATE": 1,
                "commands_total command=PING": 1,
                "faults_total kind=unknown command": 1,
                "users_syncing": 0,
                "users_refused_total": 0,
                "user_ips_waiting": 0,
                "user_ips_written_total": 0,
                "user_ips_dropped_total": 0,
                "catch_up_rows_total": 2,
                "open_ids stream=orders": 1,
                "oldest_open_seconds stream=orders": 2.5,
                "facts_refused_total stream=orders": 1,
                "position stream=orders writer=master": 3,
                "lag stream=orders writer=master": 0,
                "open_ids stream=caches": 0,
                "oldest_open_seconds stream=caches": 0,
                "facts_refused_total stream=caches": 0,
                "position stream=caches writer=master": 1,
                "lag stream=caches writer=master": 0,
            },
        )

    def test_the_memory_of_an_in_memory_stream_is_a_metric(self) -> None:
        self.master = self.make_master(streams=[StreamDefinition("typing", in_memory=True)])
        now(self.master.stream("typing").append([[1]]))
        self.net.advance(0)
        shown = shown_metrics(self.master.served.samples())
        self.assertGreater(shown["kept_bytes stream=typing"], 0)
        self.assertNotIn("kept_bytes stream=caches", shown)

    def test_the_metrics_of_open_ids_are_those_of_the_oldest_id_of_each_stream(self) -> None:
        held = []
        for seconds in (2.0, 1.0):
            held += [self.hold()[0], self.hold("caches")[0]]
            self.net.advance(seconds)
        shown = shown_metrics(self.master.served.samples())
        self.assertEqual((shown["open_ids stream=orders"], shown["oldest_open_seconds stream=orders"]), (2, 3.0))
        self.assertEqual((shown["open_ids stream=caches"], shown["oldest_open_seconds stream=caches"]), (2, 3.0))
        for each in held:
            now(each.__aexit__(None, None, None))

    def test_users_that_followers_report_are_shown(self) -> None:
        wire = self.greeted()
        self.send(wire, "USER_SYNC abcde @u:h start 1700")
        self.assertEqual(self.master.served.users_syncing(), {"abcde": {"@u:h": 1700}})

    def test_the_places_of_a_user_are_those_that_are_stored(self) -> None:
        place = UserIp("@u:h", "token", "1.2.3.4", "UA", None, 1700)

        async def stored(_: LastSeen, user_id: str) -> list[UserIp]:
            return [place] if user_id == place.user_id else []

        with patch.object(LastSeen, "of", stored):
            self.assertEqual(now(self.master.served.places_of("@u:h")), [place])

    def test_counters_do_not_decrease_when_connections_end(self) -> None:
        def total(way: str) -> float:
            return sum(
                each.value
                for each in self.master.served.samples()
                if each.name == "bytes_total" and way in each.labels.values()
            )

        wires = [self.greeted("NAME one"), self.greeted("NAME two")]
        before = total("in"), total("out")
        for wire in wires:
            wire.lose()
        self.assertEqual((total("in"), total("out")), before)

    def test_facts_since_a_token_need_no_positions_of_the_database_where_only_this_process_writes(self) -> None:
        self.append("placed")
        self.store.asked.clear()
        self.assertEqual(now(self.master.served.since("orders", "1", 10))[1], "2")
        self.assertNotIn("stored", self.store.asked)

    def test_check_fails_if_the_store_fails(self) -> None:
        now(self.master.served.check())
        now(self.store.close())
        self.assertIsInstance(error_of(begin(self.master.served.check())), StoreError)
