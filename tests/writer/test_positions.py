"""Positions are stored within a second, and those of idle writers follow the other writers."""

from __future__ import annotations

from unittest.mock import call, patch

from replication.errors import StoreError
from replication.streams.definitions import CACHES, StreamDefinition
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import logged, now
from tests.serving import ORDERS, MasterCase, SharedCase


class PositionTests(MasterCase):
    def leave_one_behind(self) -> None:
        """Commit a fact while a smaller ID is open, then roll that ID back: no commit stores the settled position."""
        reservation, _ = self.hold()
        self.append("placed")
        now(reservation.__aexit__(ValueError, ValueError(), None))
        self.store.asked.clear()

    def test_a_position_that_no_commit_stored_is_stored_within_a_second(self) -> None:
        self.leave_one_behind()
        self.net.pump([0.5] * 2)
        self.assertEqual(self.store.asked.count("commit"), 1)
        self.net.pump([1.0] * 5)
        self.assertEqual(self.store.asked.count("commit"), 1)

    def test_the_first_position_of_an_idle_stream_is_not_stored_where_only_this_process_writes(self) -> None:
        now(self.master.start())
        self.net.pump([1.0] * 3)
        self.assertNotIn("commit", self.store.asked)

    def test_a_failing_store_is_polled_again(self) -> None:
        self.leave_one_behind()
        self.store.errors["commit"] = StoreError("busy")
        self.net.pump([1.0] * 2)
        del self.store.errors["commit"]
        self.net.advance(1.0)
        self.assertEqual(self.store.asked.count("commit"), 3)

    def test_an_unexpected_error_is_shown_until_the_restart(self) -> None:
        self.leave_one_behind()
        self.store.errors["commit"] = OSError("a bug")
        with logged() as messages:
            self.net.advance(1.0)
        self.assertEqual(messages, ["storing positions has ended: restart this process"])
        self.assertEqual(self.master.served.failed_tasks(), ["storing positions"])
        self.assertEqual(len(self.flushLoggedErrors(OSError)), 1)

    def test_a_larger_position_that_a_commit_stores_meanwhile_is_not_stored_again(self) -> None:
        self.leave_one_behind()
        self.store.close_gate("commit")
        self.net.advance(1.0)
        gate = self.store.gates.pop("commit")
        self.append("paid")
        gate.callback(None)
        self.net.pump([1.0] * 3)
        self.assertEqual(self.store.asked.count("commit"), 2)

    def test_the_position_is_stored_at_stop(self) -> None:
        self.leave_one_behind()
        now(self.master.stop())
        self.assertEqual(self.store.asked.count("commit"), 1)


class SharedTests(SharedCase):
    def test_trap_37_a_writer_stores_its_position_at_start(self) -> None:
        """Trap 37: otherwise a reader of the database would pass the first ID that the writer reserves."""
        self.assertEqual(now(self.store.stored_positions()), {"orders": {"master": 1}, "caches": {"master": 1}})

    def test_a_writer_starts_at_the_largest_position_of_all_writers(self) -> None:
        self.shared.others_write("orders", "other", 9)
        now(self.master.stop())
        self.master = self.make_master()
        now(self.master.start())
        self.assertEqual(self.append("placed"), [10])
        self.assertEqual(now(self.store.stored_positions())[ORDERS.name], {"master": 10, "other": 9})

    def test_the_position_of_an_idle_writer_follows_the_others_within_a_second(self) -> None:
        wire = self.greeted("REPLICATE")
        self.shared.others_write("orders", "other", 7)
        self.net.advance(1.0)
        self.assertEqual(self.new_lines(wire), ["POSITION orders master 1 7"])
        self.assertEqual(now(self.store.stored_positions())[ORDERS.name][InstanceName("master")], 7)

    def test_an_idle_writer_polls_once_a_second_and_sends_nothing(self) -> None:
        """I11: without facts there is one query a second, no commit and no line."""
        wire = self.greeted("REPLICATE")
        self.net.advance(1.0)
        self.store.asked.clear()
        self.net.pump([1.0] * 10)
        self.assertEqual(self.store.asked, ["stored"] * 10)
        self.assertEqual(self.new_lines(wire), [])

    def test_the_first_poll_is_a_second_after_the_start(self) -> None:
        self.net.advance(0.9)
        self.assertEqual(self.shared.claims, ["master"], "the start has claimed the name")
        self.net.advance(0.1)
        self.assertEqual(self.shared.claims, ["master"] * 2)

    def test_two_idle_writers_store_no_positions(self) -> None:
        other = self.make_master(instance_name="other")
        now(other.start())
        self.append("placed")
        self.net.pump([1.0] * 3)
        self.store.asked.clear()
        self.net.pump([1.0] * 5)
        self.assertEqual(set(self.store.asked), {"stored"})
        self.assertEqual(now(self.store.stored_positions())[ORDERS.name], {"master": 2, "other": 2})
        now(other.stop())

    def test_trap_20_positions_of_the_caches_stream_are_not_repeated(self) -> None:
        wire = self.greeted("REPLICATE")
        self.shared.others_write("caches", "other", 7)
        self.net.advance(1.0)
        self.assertEqual(self.new_lines(wire), [])

    def test_a_writer_stores_no_position_of_a_stream_that_it_may_not_write(self) -> None:
        master = self.make_master(
            instance_name="second", streams=[StreamDefinition("stock", writers=("other",)), ORDERS]
        )
        now(master.start())
        self.shared.others_write("stock", "other", 7)
        self.net.advance(1.0)
        self.assertEqual(now(self.store.stored_positions())[StreamName("stock")], {"other": 7})
        now(master.stop())

    def test_a_failing_store_is_polled_again(self) -> None:
        wire = self.greeted("REPLICATE")
        self.shared.others_write("orders", "other", 7)
        self.store.errors["stored"] = StoreError("gone")
        self.net.advance(1.0)
        del self.store.errors["stored"]
        self.net.advance(1.0)
        self.assertEqual(self.new_lines(wire), ["POSITION orders master 1 7"])

    def test_a_position_that_the_database_has_lost_makes_it_verify_that_no_commit_is_lost(self) -> None:
        """After a failover, for example."""
        verified = []

        async def verify() -> None:
            verified.append(self.net.seconds())

        self.patch(self.store, "verify", verify)
        self.append("placed", "paid")
        self.net.pump([1.0] * 2)
        self.assertEqual(verified, [])
        for stream in (ORDERS.name, CACHES):  # in caches, too: no position is repeated there, but facts may be lost
            positions = self.store._streams[stream].positions
            kept = {**positions}
            positions.clear()
            self.net.advance(1.0)
            positions.update(kept)
            self.net.advance(1.0)
        self.assertEqual(verified, [3.0, 5.0])
        self.store._streams[ORDERS.name].positions[InstanceName("master")] = Token(2)
        self.net.advance(1.0)
        self.assertEqual(verified, [3.0, 5.0, 7.0])

    def test_f17_the_name_is_claimed_again_at_each_poll_also_after_an_outage(self) -> None:
        """A restart of the database releases the claim; an idle writer allocates no ID, which would renew it."""
        self.store.errors["stored"] = StoreError("gone")
        self.net.advance(1.0)
        del self.store.errors["stored"]
        self.shared.claims.clear()
        self.net.advance(1.0)
        self.assertEqual(self.shared.claims, ["master"])

    def test_a_later_warning_of_the_store_is_logged_once(self) -> None:
        with logged() as messages:
            self.store.warnings.append("sequence x went back")
            self.net.pump([1.0] * 3)
        self.assertEqual(messages, ["sequence x went back"])

    def test_a_table_that_was_truncated_is_logged_with_what_each_writer_has_lost(self) -> None:
        self.append("placed")
        lost = [{}, {ORDERS.name: {InstanceName("master"): Token(2), InstanceName("gone"): Token(9)}}]
        asked: list[object] = []

        async def mark_truncated(writer: InstanceName, published: object) -> object:
            asked.append((writer, published))
            return lost.pop() if lost else {}

        with patch.object(self.store, "mark_truncated", mark_truncated), logged() as messages:
            self.net.pump([1.0] * 3)
        self.assertEqual(asked[0], ("master", {"orders": 2, "caches": 1}))
        where = "stream orders: its table was truncated, so facts are gone: of gone up to 9, of master up to 2"
        cure = "a follower that lacks some of them stops, unless another source has them"
        self.assertEqual(messages, [f"{where}; {cure}"])

    def test_only_generic_tables_that_this_process_writes_may_be_truncated(self) -> None:
        streams = [ORDERS, StreamDefinition("typing", in_memory=True), StreamDefinition("stock", writers=("other",))]
        master = self.make_master(instance_name="second", streams=streams)
        now(master.start())
        with patch.object(self.store, "mark_truncated", wraps=self.store.mark_truncated) as mark:
            self.net.advance(1.0)
        self.assertIn(call("second", {"orders": 1, "caches": 1}), mark.call_args_list)
        now(master.stop())
