"""The contract of the tables of rooms: recordings, and each query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.errors import SchemaError, UnknownRoomError
from replication.rooms.event import Event
from replication.storage.tables.room_queries import RoomReads
from replication.storage.tables.rooms import declare_rooms
from replication.streams.positions import MultiWriterToken
from replication.wire.grammar import InstanceName, Token
from tests.rooms.recorded import Keeper
from tests.rooms.test_graph import SCENARIOS, replay_scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twisted.trial.unittest import SynchronousTestCase as _Case

    from replication.rooms.ordering import Place
    from replication.rooms.views import StoredEvent
    from replication.streams.interfaces import ISqlExecutor
else:
    _Case = object

ROOM = "!r:far.test"


def event(name: str, *prev: str, **more: object) -> Event:
    return Event.read(ROOM, {"event_id": name, "type": "note", "prev_event_ids": list(prev), **more})


def after(number: int, **ahead: int) -> MultiWriterToken:
    return MultiWriterToken(Token(number), {InstanceName(name): Token(place) for name, place in ahead.items()})


class RoomTablesContract(_Case):
    """One test for each use; ``scenarios`` are the recordings that are replayed."""

    scenarios: Sequence[str] = SCENARIOS

    def make_statements(self) -> ISqlExecutor:
        """Return an empty database, to be used on this thread."""
        raise NotImplementedError

    def setUp(self) -> None:
        self.statements = self.make_statements()
        self.keeper = Keeper(statements=self.statements)
        self.reads = RoomReads(self.statements)

    def story(self) -> None:
        """A fork, a merge, an outlier, a soft-failed and a rejected event, a gap, and a backfilled event."""
        self.keeper.take(ROOM, [event("a", state_key=""), event("b", "a"), event("c", "a", state_key="x")])
        self.keeper.take(ROOM, [event("d", "b", "c"), event("soft", "d", soft_failed=True)])
        self.keeper.take(ROOM, [event("bad", "d", rejected="no"), event("out", "d", outlier=True)])
        self.keeper.take(ROOM, [event("far", "gone", depth=9, state_before=["a"]), event("end", "far", "d")])
        self.keeper.take(ROOM, [event("gone", "lost", depth=8, state_before=["a"])], backfilled=True)

    def names(self, nodes: Sequence[StoredEvent]) -> list[str]:
        return [node.event.event_id for node in nodes]

    def test_every_recorded_step_leaves_what_synapse_left(self) -> None:
        for scenario in self.scenarios:
            self.keeper = Keeper(statements=self.make_statements())
            replay_scenario(self.keeper, scenario)

    def test_declaring_again_changes_nothing_and_newer_tables_are_refused(self) -> None:
        self.story()
        declare_rooms(self.statements)
        self.assertEqual(self.reads.view(ROOM).forward_extremities, ("end",))
        self.statements.execute("UPDATE rooms_schema SET version = 99")
        self.assertRaises(SchemaError, declare_rooms, self.statements)

    def test_a_view_has_both_kinds_of_extremities_and_the_state(self) -> None:
        self.story()
        view = self.reads.view(ROOM)
        self.assertEqual((view.forward_extremities, view.backward_extremities), (("end",), ("lost",)))
        self.assertEqual(
            (view.min_depth, view.room_version), (2, None)
        )  # the highest of its batch (docs/protocol/rooms.md H1)
        self.assertEqual(view.current_state, {("note", ""): "a", ("note", "x"): "c"})
        self.assertEqual(self.reads.rooms(), [ROOM])
        self.assertRaises(UnknownRoomError, self.reads.view, "!none")

    def test_an_event_has_its_flags_orderings_edges_and_group(self) -> None:
        self.story()
        view = self.reads.event_view(ROOM, "d")
        self.assertEqual((view.stored.depth, view.stored.stream_ordering, view.stored.instance_name), (3, 5, "master"))
        self.assertEqual((view.stored.event.prev_event_ids, view.next_event_ids), (("b", "c"), ("end", "out", "soft")))
        self.assertTrue(self.reads.event_view(ROOM, "soft").stored.soft_failed)
        self.assertEqual(self.reads.event_view(ROOM, "bad").stored.rejected, "no")
        self.assertTrue(self.reads.event_view(ROOM, "out").stored.outlier)
        self.assertEqual(self.reads.event_view(ROOM, "gone").stored.stream_ordering, -2)
        self.keeper.take(ROOM, [event("out", "d")])
        self.assertEqual(self.reads.event_view(ROOM, "out").ex_outlier_stream_orderings, (11,))
        self.assertRaises(UnknownRoomError, self.reads.event_view, ROOM, "none")
        self.assertRaises(UnknownRoomError, self.reads.event_view, "!other", "d")

    def test_groups_and_the_state_at_an_event(self) -> None:
        self.story()
        number = self.reads.stored_event(ROOM, "c").state_group
        assert number is not None
        group = self.reads.group(number)
        self.assertEqual((group.room_id, group.delta), (ROOM, {("note", "x"): "c"}))
        self.assertEqual(group.state, {("note", ""): "a", ("note", "x"): "c"})
        self.assertEqual(self.reads.state_at(ROOM, "b"), {("note", ""): "a"})
        self.assertRaises(UnknownRoomError, self.reads.state_at, ROOM, "out")
        self.assertRaises(UnknownRoomError, self.reads.group, 999)

    def test_history_is_paged_both_ways_without_what_clients_do_not_see(self) -> None:
        self.story()
        shown = ["a", "b", "c", "d", "gone", "far", "end"]
        found: list[str] = []
        start: Place | None = None
        while True:  # backwards: a page, and one more, which is where the next page starts
            page = self.reads.history(ROOM, start, 3, backwards=True, whole=False)
            found += self.names(page[:2])
            if len(page) < 3:
                break
            start = page[2].place
        self.assertEqual(found, shown[::-1])
        first = self.reads.history(ROOM, None, 3, backwards=False, whole=False)
        rest = self.reads.history(ROOM, first[-1].place, 9, backwards=False, whole=False)
        self.assertEqual(self.names([*first, *rest]), shown)
        whole = self.reads.history(ROOM, None, 99, backwards=False, whole=True)
        self.assertEqual(set(self.names(whole)), {*shown, "soft", "bad", "out"})

    def test_a_place_stays_right_whatever_comes(self) -> None:
        self.story()
        start = self.reads.stored_event(ROOM, "d").place
        before = self.names(self.reads.history(ROOM, start, 9, backwards=True, whole=False))
        self.keeper.take(ROOM, [event("new", "end")])
        self.keeper.take(ROOM, [event("lost", "older", depth=7, state_before=["a"])], backfilled=True)
        self.assertEqual(self.names(self.reads.history(ROOM, start, 9, backwards=True, whole=False)), before)

    def test_what_is_new_comes_by_arrival_with_invitations_and_without_backfill(self) -> None:
        self.story()
        self.keeper.take(ROOM, [event("inv", "end", outlier=True, out_of_band_membership=True)])
        self.assertEqual(
            self.names(self.reads.since(after(1), after(99), 99)), ["a", "b", "c", "d", "far", "end", "inv"]
        )
        self.assertEqual(self.names(self.reads.since(after(3), after(5), 99, ROOM)), ["c", "d"])
        self.assertEqual(self.names(self.reads.since(after(1), after(99), 2)), ["a", "b"])
        self.assertEqual(self.reads.since(after(1), after(99), 99, "!other"), [])
        self.assertEqual(self.reads.since(after(99), after(1), 99), [])

    def test_a_token_of_several_writers_takes_from_each_what_it_covers(self) -> None:
        self.keeper.take(ROOM, [event("a"), event("b", "a")])
        self.statements.execute("UPDATE room_events SET instance_name = 'other' WHERE event_id = 'a'")
        self.assertEqual(self.names(self.reads.since(after(1), after(1, master=3), 9)), ["b"])
        self.assertEqual(self.names(self.reads.since(after(1), after(1, other=3), 9)), ["a"])
        self.assertEqual(self.names(self.reads.since(after(1, other=2), after(3), 9)), ["b"])

    def test_gaps_come_latest_first(self) -> None:
        self.story()
        self.keeper.take(ROOM, [event("later", "hole", depth=20, state_before=[])])
        self.assertEqual(self.reads.gaps(ROOM, 9), [("hole", 20), ("lost", 8)])
        self.assertEqual(self.reads.gaps(ROOM, 1), [("hole", 20)])

    def test_ancestors_and_descendants_come_nearest_first(self) -> None:
        self.story()
        self.assertEqual(self.reads.ancestors("d", 9), ["c", "b", "a"])
        self.assertEqual(self.reads.ancestors("d", 1), ["c"])
        self.assertEqual(self.reads.descendants("b", 9), ["d", "soft", "end"])

    def test_the_events_that_another_server_lacks(self) -> None:
        self.story()
        missing = self.reads.between(ROOM, ["b"], ["d"], 9)
        self.assertEqual((missing.events, missing.heads, missing.ground), (("c", "d"), ("d",), ("a", "b")))
        self.assertFalse(missing.limited)
        self.assertEqual(self.reads.between(ROOM, ["end"], ["d"], 9).events, ())
        cut = self.reads.between(ROOM, [], ["d"], 2)
        self.assertEqual((cut.events, cut.limited), (("c", "d"), True))
        self.assertEqual(self.reads.between(ROOM, ["unknown"], ["b"], 9).events, ("a", "b"))

    def test_a_new_event_follows_the_deepest_extremities(self) -> None:
        self.keeper.take(ROOM, [event("a"), *[event(f"b{each:02}", "a", depth=each) for each in range(2, 16)]])
        prevs, depth = self.reads.next_place(ROOM, 10)
        self.assertEqual((prevs, depth), ([f"b{each:02}" for each in range(15, 5, -1)], 16))
        self.assertEqual(self.reads.next_place("!new", 10), ([], 1))

    def test_odd_texts_are_kept_as_they_are(self) -> None:
        odd = "é\"'\\%s?☃\U0001f600"
        self.keeper.take(ROOM, [event(odd, state_key=odd, content={odd: [odd, "\0\ud800"]}, sender=odd)])
        node = self.reads.stored_event(ROOM, odd)
        self.assertEqual((node.event.state_key, node.event.content), (odd, {odd: [odd, "\0\ud800"]}))
        self.assertEqual(self.reads.view(ROOM).current_state, {("note", odd): odd})
