"""Former writers: the remaining processes publish and raise their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.logger import LogLevel

from replication.errors import NotAWriterError, StoreError
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.history import Epoch
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.former_writers import ENDED_AFTER, find_left, find_unwritten
from replication.writer.publisher import NO_WRITER
from tests.doubles import Wire, begin, connect, lines_of, logged, now
from tests.serving import ORDERS, MasterCase, SharedCase

REMOVED = InstanceName("removed")
PARTIAL, COMPLETE = "PING partial", "PING complete"

if TYPE_CHECKING:
    from replication.writer.master import Master


class FormerWritersTests(SharedCase):
    def test_f17_the_remaining_writers_publish_the_position_of_a_renamed_writer(self) -> None:
        """Otherwise a new follower would never fetch the facts of the renamed writer."""
        definition = StreamDefinition("notes", writers=("second", "third"))
        fact = Fact(Token(7), ("1",))
        now(self.store.declare(definition))
        now(self.store.transaction().commit([Write(definition.name, InstanceName("former"), Token(4), [fact])]))
        master = self.make_master(instance_name="second", streams=[definition])
        now(master.start())
        wire = connect(master.factory())
        self.wires.append(wire)
        self.send(wire, "REPLICATE notes")
        self.assertEqual(lines_of(wire.read())[-2:], ["POSITION notes former 7 7", "POSITION notes second 7 7"])
        page = now(master.served.page("notes", "former", after=0, upto=None, limit=10))
        self.assertEqual(([*page.facts], page.upto), ([fact], 7))
        stopped = begin(master.stop())
        wire.read()
        self.assertEqual(stopped, [None])

    def test_f17_a_removed_writer_publishes_its_own_position_until_it_ends(self) -> None:
        """Its position at the start of another process is too low: a follower would go back, and lack facts."""
        definition = StreamDefinition("notes", writers=("second", "third"))
        removed, later = InstanceName("removed"), InstanceName("later")
        now(self.store.declare(definition))
        self.shared.others_write("notes", removed, 4)
        self.shared.there = {removed}
        master = self.make_master(instance_name="second", streams=[definition])
        now(master.start())
        wire = connect(master.factory())
        self.wires.append(wire)
        self.send(wire, "REPLICATE notes")
        self.assertEqual(lines_of(wire.read())[2:], ["POSITION notes second 4 4"])
        self.shared.others_write("notes", removed, 7)
        self.net.advance(1.0)
        self.assertEqual(self.new_lines(wire), ["POSITION notes second 4 7"])
        page = now(master.served.page("notes", removed, after=0, upto=None, limit=10))
        self.assertEqual(page.upto, 7)

        self.shared.others_write("notes", removed, 9)  # and it ends, or the server was restarted
        self.shared.there = set()
        self.net.pump([1.0] * 5)
        self.assertEqual(self.new_lines(wire), ["POSITION notes second 7 9", PARTIAL])
        self.send(wire, "REPLICATE notes")
        self.assertEqual(self.new_lines(wire), ["POSITION notes second 9 9"])
        self.net.advance(1.0)
        lines = ["POSITION notes removed 9 9", COMPLETE]
        self.assertEqual(self.new_lines(wire), lines)
        self.send(wire, "REPLICATE notes")
        self.assertEqual(self.new_lines(wire), ["POSITION notes removed 9 9", "POSITION notes second 9 9"])
        self.store.asked.clear()
        self.net.pump([1.0] * 5)
        self.assertEqual(set(self.store.asked), {"stored", "present"})

        self.shared.there = {later}  # a new writer, which the configuration of this process does not list
        self.shared.others_write("notes", later, 12)
        self.net.advance(1.0)
        self.assertEqual(self.new_lines(wire), ["POSITION notes second 9 12"])
        self.shared.there = set()
        self.net.pump([1.0] * 6)
        self.assertEqual(
            self.new_lines(wire),
            [
                *("PING history notes removed", "POSITION notes removed 9 12"),
                *(PARTIAL, "POSITION notes later 12 12", COMPLETE),
            ],
        )

        self.store.close_gate("positions")
        self.send(wire, "REPLICATE notes")
        self.shared.there = {removed}  # it comes back while its position is read
        self.store.open_gate("positions")
        lines = ["PING withdrawn notes removed", "POSITION notes later 12 12", "POSITION notes second 12 12"]
        self.assertEqual(self.new_lines(wire), lines)
        stopped = begin(master.stop())
        wire.read()
        self.assertEqual(stopped, [None])

    def test_f17_the_position_of_a_former_writer_follows_the_process_that_publishes_it(self) -> None:
        """Otherwise linear order, and the number of a ``since`` token, would wait for its position for ever."""
        definition = StreamDefinition("notes", writers=("second", "third"))
        now(self.store.declare(definition))
        self.shared.others_write("notes", "former", 4)
        master = self.make_master(instance_name="second", streams=[definition])
        now(master.start())
        wire = connect(master.factory())
        self.wires.append(wire)
        self.send(wire, "REPLICATE notes")
        wire.read()

        def append() -> list[str]:
            now(master.stream("notes").append([["a"]]))
            self.net.advance(1.0)
            return [line for line in self.new_lines(wire) if "former" in line]

        self.assertEqual(append(), [])  # another process may move it
        self.store.close_gate("raise position")
        self.net.advance(1.0)
        self.assertEqual(self.new_lines(wire), [], "it is stored before it is sent")
        self.store.open_gate("raise position")
        self.assertEqual(self.new_lines(wire), ["PING history notes former", "POSITION notes former 4 5"])
        self.assertEqual(append(), ["POSITION notes former 5 6"])
        self.assertEqual(now(master.served.since("notes", "0", 10))[1], "6")
        self.shared.others_write("notes", "former", 7)  # another process moves it
        self.assertEqual([append(), append()], [[], ["POSITION notes former 7 9"]])
        self.shared.there = {InstanceName("former")}
        self.assertEqual(append(), ["PING withdrawn notes former"])
        self.store.asked.clear()
        self.net.pump([1.0] * 5)
        self.assertNotIn("raise position", self.store.asked)
        stopped = begin(master.stop())
        wire.read()
        self.assertEqual(stopped, [None])

    def start_second(self) -> tuple[StreamDefinition, InstanceName, Epoch, Master]:
        """Start a writer of a stream whose former writer is at 4, with one epoch."""
        definition, former = StreamDefinition("notes", writers=("second", "third")), InstanceName("former")
        first = Epoch("first.a", Token(1), Token(1))
        now(self.store.declare(definition))
        now(self.store.store_histories(former, {definition.name: [first]}))
        self.shared.others_write("notes", former, 4)
        master = self.make_master(instance_name="second", streams=[definition])
        now(master.start())
        return definition, former, first, master

    def test_f17_an_epoch_of_a_former_writer_is_stored_before_its_position_is_raised(self) -> None:
        """Otherwise the position would hide that a restore has lost facts of that writer."""
        definition, former, first, master = self.start_second()

        def epochs() -> list[tuple[str, int, int]]:
            now(master.stream("notes").append([["a"]]))
            self.net.pump([1.0] * 2)
            history = now(self.store.history(definition.name, former))
            return [(each.name, each.settled, each.start) for each in history]

        begun = epochs()
        name = begun[-1][0]
        self.assertEqual(begun, [first, (name, 4, 5)])
        self.assertRegex(name, r"raised-4-[0-9a-f]{8}\.[0-9a-f]{8}")
        self.assertEqual(epochs(), [first, (name, 4, 6)])
        other = Epoch("raised-other.b", Token(4), Token(6))
        now(self.store.store_histories(former, {definition.name: [first, other]}))
        *before, (later, settled, start) = epochs()
        self.assertEqual((before, settled, start), ([first, other], 6, 7))
        self.assertNotEqual(later, name)
        stopped = begin(master.stop())
        self.assertEqual(stopped, [None])

    def test_f17_of_two_processes_that_raise_a_position_at_once_one_stores_its_epoch(self) -> None:
        """Otherwise the epoch of one would be lost, and followers that have it would compare with another history."""
        definition, former, first, master = self.start_second()
        now(master.stream("notes").append([["a"]]))
        self.net.advance(1.0)
        self.store.close_gate("raise position")
        self.net.advance(1.0)
        self.assertIn("raise position", self.store.asked)
        other = Epoch("raised-other.b", Token(4), Token(7))  # another process stores its epoch and position just now
        now(self.store.store_histories(former, {definition.name: [first, other]}))
        self.shared.others_write("notes", former, 7)
        self.store.open_gate("raise position")
        self.assertEqual([*now(self.store.history(definition.name, former))], [first, other])
        self.assertEqual(now(self.store.stored_positions())[definition.name][former], 7)
        stopped = begin(master.stop())
        self.assertEqual(stopped, [None])

    def test_f17_no_epoch_is_stored_at_a_position_that_another_process_has_raised_meanwhile(self) -> None:
        """That epoch would begin below the raised position, and followers that have received it would go back."""
        definition, former, first, master = self.start_second()
        other = Epoch("raised-other.b", Token(4), Token(5))
        now(master.stream("notes").append([["a"], ["b"]]))
        self.net.advance(1.0)
        read, raised = self.store.positions, False

        async def raised_after(stream: StreamName) -> object:
            nonlocal raised
            found = await read(stream)
            if not raised:
                raised = True
                await self.store.store_histories(former, {definition.name: [first, other]})
                self.shared.others_write("notes", former, 5)
            return found

        self.store.positions = raised_after  # type: ignore[method-assign, assignment]
        self.net.advance(1.0)
        self.assertTrue(raised)
        self.assertEqual([*now(self.store.history(definition.name, former))], [first, other])
        self.net.pump([1.0] * 2)
        *before, (name, settled, start) = now(self.store.history(definition.name, former))
        self.assertEqual((before, settled, start), ([first, other], 5, 6))
        self.assertTrue(name.startswith("raised-5-"), name)
        stopped = begin(master.stop())
        self.assertEqual(stopped, [None])

    def test_f17_no_epoch_is_stored_for_a_writer_that_is_back(self) -> None:
        """Its own epoch has begun: another one after that would send its followers back."""
        definition, former = StreamDefinition("notes", writers=("second", "third")), InstanceName("former")
        own = [Epoch("first.a", Token(1), Token(1)), Epoch("second.b", Token(4), Token(5))]
        now(self.store.declare(definition))
        now(self.store.store_histories(former, {definition.name: own[:1]}))
        self.shared.others_write("notes", former, 4)
        master = self.make_master(instance_name="second", streams=[definition])
        now(master.start())
        now(master.stream("notes").append([["a"]]))
        self.net.advance(1.0)
        history, back = self.store.history, False

        async def begun(stream: StreamName, writer: InstanceName, follower: str = "") -> object:
            nonlocal back
            if not back:
                back = True
                self.shared.there = {former}
                await self.store.store_histories(former, {definition.name: own})
            return await history(stream, writer, follower)

        self.store.history = begun  # type: ignore[method-assign, assignment]
        now(master.stream("notes").append([["b"]]))
        self.net.pump([1.0] * 3)
        self.assertTrue(back)
        self.assertEqual([*now(history(definition.name, former))], own)
        stopped = begin(master.stop())
        self.assertEqual(stopped, [None])

    def test_f17_the_position_of_a_writer_that_is_back_is_withdrawn(self) -> None:
        """A relay would keep sending it, and take followers of the writer back to it."""
        definition = StreamDefinition("notes", writers=("second",))  # not shared: the positions of others are not read
        now(self.store.declare(definition))
        self.shared.others_write("notes", "former", 4)
        master = self.make_master(instance_name="second", streams=[definition])
        now(master.start())
        notes, other = connect(master.factory()), connect(master.factory())
        self.wires += [notes, other]
        self.send(notes, "REPLICATE notes")
        self.send(other, "REPLICATE caches")
        for wire in (notes, other):
            wire.read()
        self.net.pump([1.0] * 3)
        self.assertEqual((self.new_lines(notes), self.new_lines(other)), ([], []))
        self.shared.there = {InstanceName("former")}
        self.net.advance(1.0)
        self.assertEqual((self.new_lines(notes), self.new_lines(other)), (["PING withdrawn notes former"], []))
        self.net.pump([1.0] * 3)
        self.send(notes, "REPLICATE notes")
        self.assertEqual([line for line in self.new_lines(notes) if "former" in line], [], "once")
        stopped = begin(master.stop())
        for wire in (notes, other):
            wire.read()
        self.assertEqual(stopped, [None])

    def test_f17_a_position_that_is_raised_while_its_writer_comes_back_is_not_sent(self) -> None:
        """It was withdrawn already, and would never be withdrawn again."""
        _definition, former, _first, master = self.start_second()
        wire = connect(master.factory())
        self.wires.append(wire)
        self.send(wire, "REPLICATE notes")
        wire.read()
        now(master.stream("notes").append([["a"]]))
        self.net.advance(1.0)
        self.store.close_gate("raise position")
        self.net.advance(1.0)
        self.assertIn("raise position", self.store.asked)
        self.shared.there = {former}
        self.send(wire, "REPLICATE notes")
        lines = ["POSITION notes second 5 5"]
        self.assertEqual(self.new_lines(wire)[-2:], ["PING withdrawn notes former", *lines])
        self.store.open_gate("raise position")
        self.net.pump([1.0] * 3)
        self.assertEqual(self.new_lines(wire), [])
        stopped = begin(master.stop())
        wire.read()
        self.assertEqual(stopped, [None])

    def test_f17_a_writer_publishes_positions_of_absent_writers_until_they_return(self) -> None:
        """A follower of two processes would receive the positions of one writer out of order."""
        fact = Fact(Token(7), ('["o","placed"]',))
        names = [InstanceName(each) for each in ("gone", "away", "there")]
        now(
            self.store.transaction().commit(
                [
                    Write(ORDERS.name, name, Token(4), [fact._replace(token=Token(7 + n))])
                    for n, name in enumerate(names)
                ]
            )
        )
        self.shared.there = {names[2]}
        master = self.make_master(instance_name="second")
        now(master.start())
        wire = connect(master.factory())
        self.wires.append(wire)
        self.send(wire, "REPLICATE orders")
        lines = ["POSITION orders gone 7 7", "POSITION orders away 8 8", "POSITION orders second 9 9"]
        self.assertEqual(sorted(lines_of(wire.read())[2:-1]), sorted(lines[:-1]))
        page = now(master.served.page("orders", "gone", after=0, upto=None, limit=10))
        self.assertEqual(([*page.facts], page.upto), ([fact], 7))

        self.shared.there.add(names[1])  # the writer runs again
        self.send(wire, "REPLICATE orders")
        self.assertEqual(lines_of(wire.read()), ["PING withdrawn orders away", lines[0], lines[2]])
        self.shared.others_write("orders", "away", 12)
        self.assertEqual(now(master.served.page("orders", "away", after=0, upto=None, limit=10)).upto, 12)
        self.shared.there.clear()  # it stops; its followers have its position
        self.send(wire, "REPLICATE orders")
        self.assertEqual(lines_of(wire.read()), [lines[0], lines[2]])

        self.store.close_gate("present")
        self.send(wire, "REPLICATE orders")
        wire.lose()  # it closes before the database answers
        with logged() as messages:
            self.store.open_gate("present")
        self.assertEqual((messages, self.flushLoggedErrors()), ([], []))
        wire = connect(master.factory())
        self.wires.append(wire)
        wire.read()

        self.store.errors["present"] = StoreError("away")
        self.send(wire, "REPLICATE orders")
        self.assertEqual(lines_of(wire.read()), ["ERROR away"])
        wire.lose()
        self.store.errors.clear()
        now(master.stop())

    def test_f17_an_absent_writer_that_has_stored_a_position_and_no_fact_is_a_former_one(self) -> None:
        """A follower that has received its position would wait in linear order, or for ``since``, for ever."""
        fact = Fact(Token(7), ('["o","placed"]',))
        now(self.store.transaction().commit([Write(ORDERS.name, InstanceName("gone"), Token(7), [fact])]))
        self.shared.others_write("orders", "idle", 3)
        self.shared.others_write("orders", "new", 1)  # no process has more than that before its first fact
        master = self.make_master(instance_name="second")
        now(master.start())
        wire = connect(master.factory())
        self.wires.append(wire)
        self.send(wire, "REPLICATE orders")
        lines = lines_of(wire.read())[2:]
        self.assertEqual(sorted(lines), [f"POSITION orders {each}" for each in ("gone 7 7", "idle 3 3", "second 7 7")])
        self.net.pump([1.0] * 3)
        self.assertIn("POSITION orders idle 3 7", self.new_lines(wire))
        wire.lose()
        now(master.stop())

    def test_f17_positions_of_absent_writers_are_raised_before_a_follower_has_connected(self) -> None:
        """``since`` needs no follower: its token would stay at their positions until the next fact."""
        now(self.store.transaction().commit([Write(ORDERS.name, InstanceName("gone"), Token(4), [])]))
        now(self.store.claim(InstanceName("gone")))
        self.shared.others_write("orders", "there", 9)
        self.shared.there = {InstanceName("there")}
        master = self.make_master(instance_name="second")
        now(master.start())
        self.net.pump([1.0] * (ENDED_AFTER + 3))
        self.assertEqual(now(self.store.stored_positions())[ORDERS.name][InstanceName("gone")], 9)
        now(master.stop())

    def test_f17_a_process_that_is_no_writer_any_more_stores_its_position_before_it_sends_it(self) -> None:
        """So it is an idle writer that may not write; after its end, other processes send what it has stored."""
        definition = StreamDefinition("notes", writers=("second", "third"))
        now(self.store.declare(definition))
        fact = Fact(Token(4), ("1",))
        self.shared.land([Write(definition.name, REMOVED, Token(3), [fact])], None)  # its newest row is above
        self.shared.others_write("notes", "second", 5)
        master = self.make_master(instance_name="removed", streams=[definition])
        now(master.start())
        stored = now(self.store.stored_positions())[definition.name]
        self.assertEqual(stored[REMOVED], 5)
        wire = connect(master.factory())
        self.wires.append(wire)
        self.send(wire, "REPLICATE notes")
        self.assertEqual(lines_of(wire.read())[2:], ["POSITION notes removed 5 5"])
        page = now(master.served.page("notes", "removed", after=0, upto=None, limit=10))
        self.assertEqual(([*page.facts], page.upto), ([fact], 5))
        with self.assertRaises(NotAWriterError):
            now(master.stream("notes").append([["a"]]))

        self.shared.others_write("notes", "third", 8)
        self.store.close_gate("commit")
        self.net.advance(1.0)
        self.assertEqual(self.new_lines(wire), [])
        self.store.open_gate("commit")
        self.assertEqual(self.new_lines(wire), ["POSITION notes removed 5 8"])
        self.assertEqual(now(self.store.stored_positions())[definition.name][REMOVED], 8)
        self.assertEqual(master.token("notes").of(REMOVED), 8)
        stopped = begin(master.stop())
        wire.read()
        self.assertEqual(stopped, [None])

    def test_f17_streams_that_a_process_has_written_and_does_not_have_any_more_are_found(self) -> None:
        """A stream without another writer was perhaps given up: that of ``past``."""
        notes, orders, past = StreamName("notes"), StreamName("orders"), StreamName("past")
        both = {REMOVED: Token(3), InstanceName("second"): Token(2)}
        stored = {notes: both, orders: both, past: {REMOVED: Token(2), NO_WRITER: Token(5)}}
        ((what, cure),) = find_left(stored, REMOVED, {orders})
        self.assertIn("stream 'notes': 'removed' has written it, and is configured without it now", what)
        self.assertIn("with the writers that write it now, or give this process a new name", cure)
        self.assertEqual([*find_left(stored, InstanceName("other"), {orders})], [])

    def test_a_process_that_writes_none_of_its_streams_is_warned_of_once(self) -> None:
        """It seemed to write: state `writing`, no line in the log, and no fact for its followers."""
        notes, orders = StreamDefinition("notes", writers=("second", "third")), StreamDefinition("orders")
        for name, streams, found in (("other", [notes], 1), ("second", [notes], 0), ("other", [notes, orders], 0)):
            with logged(LogLevel.warn) as lines:
                master = self.make_master(instance_name=name, streams=streams)
                now(master.start())
            warned = [each for each in lines if "is not one of its writers" in each]
            self.assertEqual(len(warned), found, lines)
            (status,) = master.served.stream_statuses("notes")
            self.assertEqual((status.writers[0].instance, len(status.notes)), (name, found))
            self.assertEqual(status.writers[0].state, "writing" if name == "second" else "elsewhere")
            self.store.warnings.clear()  # the next process has a store of its own
            now(master.stop())
        ((what, cure),) = find_unwritten(InstanceName("other"), [notes])
        self.assertIn("'other', is not one of its writers (second, third), and publishes nothing", what)
        self.assertEqual(cure, "give one of them as instance_name, or add 'other' to writers")

    def unsettled(self, *, ran: bool, writers: tuple[str, ...] = ("second", "third")) -> Wire:
        """Return a connection to a master beside a writer that has a fact above its stored position, and then ends."""
        definition = StreamDefinition("notes", writers=writers)
        now(self.store.declare(definition))
        self.shared.land([Write(definition.name, REMOVED, Token(4), [Fact(Token(7), ("1",))])], None)
        self.shared.there, self.shared.claimed = {REMOVED} if ran else set(), {REMOVED}
        self.second = self.make_master(instance_name="second", streams=[definition])
        now(self.second.start())
        self.addCleanup(lambda: now(self.second.stop()))
        wire = connect(self.second.factory())
        self.addCleanup(wire.lose)
        self.send(wire, "REPLICATE notes")
        self.assertEqual([line for line in lines_of(wire.read())[2:] if line != PARTIAL], ["POSITION notes second 7 7"])
        self.shared.there = set()
        self.store.asked.clear()
        return wire

    def test_f17_a_position_above_the_stored_one_is_sent_once_the_name_is_taken_over(self) -> None:
        """The writer may have an ID open below its newest row, and commit it when it is connected again."""
        for ran in (True, False):
            with self.subTest(ran=ran):
                wire = self.unsettled(ran=ran)
                self.net.pump([1.0] * ENDED_AFTER)
                lines = [PARTIAL] if ran else []
                self.assertEqual((self.new_lines(wire), self.store.asked.count("take over removed")), (lines, 0))
                self.net.advance(1.0)
                self.assertEqual(self.new_lines(wire), ["POSITION notes removed 7 7", COMPLETE])
                self.net.pump([1.0] * 2 * ENDED_AFTER)
                self.assertEqual((self.new_lines(wire), self.store.asked.count("take over removed")), ([], 1))
                wire.lose()
                now(self.second.stop())
                self.store = self.make_store()
                now(self.store.open())

    def test_f17_followers_learn_that_the_position_of_a_former_writer_is_missing(self) -> None:
        """Without that, the first number of a token passed its facts at a relay that was started again meanwhile."""
        early = self.unsettled(ran=True)
        late = connect(self.second.factory())
        self.addCleanup(late.lose)
        self.assertRegex(lines_of(late.read())[1], r"^PING \d+ echo$")
        self.send(late, "REPLICATE notes")
        self.assertEqual(lines_of(late.read()), [PARTIAL, "POSITION notes second 7 7"])
        self.assertEqual(self.new_lines(early), [PARTIAL])
        latest = connect(self.second.factory())
        self.addCleanup(latest.lose)
        self.assertRegex(lines_of(latest.read())[1], r"^PING \d+ partial echo$")
        self.net.pump([1.0] * ENDED_AFTER)
        self.assertEqual(self.new_lines(early), [])
        self.net.advance(1.0)
        for wire in (early, late):
            self.assertEqual(self.new_lines(wire), ["POSITION notes removed 7 7", COMPLETE])

    def test_f17_a_position_that_only_an_answer_has_is_missing_until_all_followers_have_it(self) -> None:
        early = self.unsettled(ran=True)
        self.shared.claimed = set()  # another process has taken over the name
        late = connect(self.second.factory())
        self.addCleanup(late.lose)
        late.read()
        self.send(late, "REPLICATE notes")
        self.assertEqual(lines_of(late.read())[::2], [PARTIAL, "POSITION notes second 7 7"])
        self.assertEqual(self.new_lines(early), [PARTIAL])
        self.net.advance(1.0)
        self.assertEqual(self.new_lines(early), ["POSITION notes removed 7 7", COMPLETE])

    def test_f17_a_name_is_taken_over_also_if_no_writers_are_configured(self) -> None:
        wire = self.unsettled(ran=False, writers=())
        self.net.pump([1.0] * (1 + ENDED_AFTER))
        self.assertEqual(self.new_lines(wire), ["POSITION notes removed 7 7", COMPLETE])

    def test_f17_the_position_of_a_writer_that_was_never_connected_is_raised_once_its_name_is_taken_over(self) -> None:
        """Its stored position is sent at once; the one beyond it is not."""
        definition = StreamDefinition("notes", writers=("second", "third"))
        now(self.store.declare(definition))
        self.shared.others_write("notes", "removed", 4)
        self.shared.claimed = {REMOVED}
        master = self.make_master(instance_name="second", streams=[definition])
        now(master.start())
        wire = connect(master.factory())
        self.wires.append(wire)
        self.send(wire, "REPLICATE notes")
        lines = ["POSITION notes removed 4 4", "POSITION notes second 4 4"]
        self.assertEqual(lines_of(wire.read())[2:], lines)
        self.net.pump([1.0] * 2 * ENDED_AFTER)
        self.assertNotIn("take over removed", self.store.asked, "nothing is beyond it")
        now(master.stream("notes").append([["a"]]))
        self.net.pump([1.0] * ENDED_AFTER)
        self.assertEqual([line for line in self.new_lines(wire) if "removed" in line], [])
        self.net.pump([1.0] * 2)
        lines = ["PING history notes removed", "POSITION notes removed 4 5"]
        self.assertEqual([line for line in self.new_lines(wire) if "removed" in line], lines)
        stopped = begin(master.stop())
        wire.read()
        self.assertEqual(stopped, [None])

    def test_f17_a_process_that_publishes_no_position_takes_over_no_name_and_sends_no_other_position(self) -> None:
        """It has the stream, but others write it: its followers would receive this position once, and nothing later."""
        definition = StreamDefinition("notes", writers=("second",))
        now(self.store.declare(definition))
        self.shared.land([Write(definition.name, REMOVED, Token(4), [Fact(Token(7), ("1",))])], None)
        self.shared.claimed = {REMOVED}
        master = self.make_master(instance_name="fourth", streams=[ORDERS, definition])
        now(master.start())
        self.addCleanup(lambda: now(master.stop()))
        wire = connect(master.factory())
        self.addCleanup(wire.lose)
        self.send(wire, "REPLICATE notes")
        self.new_lines(wire)
        self.net.pump([1.0] * 3 * ENDED_AFTER)
        self.assertEqual(self.new_lines(wire), [])
        self.assertNotIn("take over removed", self.store.asked)
        self.assertEqual(now(self.store.stored_positions())[definition.name], {REMOVED: 4})
        page = now(master.served.page("notes", "removed", after=0, upto=None, limit=10))
        self.assertEqual(page.upto, 4, "facts above may be below an open ID")

    def test_f17_a_takeover_of_a_writer_that_is_connected_again_is_refused(self) -> None:
        wire = self.unsettled(ran=True)
        self.net.pump([1.0] * ENDED_AFTER)
        self.store.close_gate("take over removed")
        self.net.advance(1.0)
        self.shared.there = {REMOVED}
        with logged(LogLevel.info) as messages:
            self.store.open_gate("take over removed")
            self.net.pump([1.0] * 2 * ENDED_AFTER)
        self.assertEqual((self.new_lines(wire), messages), ([PARTIAL, COMPLETE], []))
        self.assertEqual(self.store.asked.count("take over removed"), 1)
        self.assertEqual(self.shared.claimed, {REMOVED})

    def test_f17_a_takeover_that_fails_is_logged_once_and_tried_again(self) -> None:
        """Everything else that a poll does goes on."""
        wire = self.unsettled(ran=True)
        self.store.errors["take over removed"] = StoreError("permission denied")
        with logged() as messages:
            self.net.pump([1.0] * 4 * ENDED_AFTER)
        (message,) = messages
        self.assertIn("names cannot be taken over: removed: permission denied", message)
        self.shared.others_write("notes", "third", 9)
        self.net.advance(1.0)
        self.assertEqual(self.new_lines(wire), [PARTIAL, "POSITION notes second 7 9"])
        del self.store.errors["take over removed"]
        with logged(LogLevel.info) as messages:
            self.net.pump([1.0] * 2 * ENDED_AFTER)
        lines = ["POSITION notes removed 7 7", COMPLETE, "PING history notes removed", "POSITION notes removed 7 9"]
        self.assertEqual(self.new_lines(wire), lines)
        self.assertEqual(len(messages), 1)

    def test_f17_a_takeover_that_fails_delays_no_other(self) -> None:
        wire = self.unsettled(ran=True)
        other = InstanceName("another")
        self.shared.land([Write(StreamName("notes"), other, Token(4), [Fact(Token(6), ("1",))])], None)
        self.shared.claimed.add(other)
        self.store.errors["take over another"] = StoreError("permission denied")
        with logged() as messages:
            self.net.pump([1.0] * 3 * ENDED_AFTER)
        self.assertEqual((self.new_lines(wire), len(messages)), ([PARTIAL, "POSITION notes removed 7 7"], 1))

    def test_f17_polls_that_failed_do_not_count_for_a_takeover(self) -> None:
        """While the server restarts, no process is connected."""
        wire = self.unsettled(ran=True)
        self.net.advance(1.0)
        self.store.errors["present"] = StoreError("away")
        self.net.pump([1.0] * 3 * ENDED_AFTER)
        self.store.errors.clear()
        self.net.pump([1.0] * (ENDED_AFTER - 1))
        self.assertNotIn("take over removed", self.store.asked)
        self.net.pump([1.0] * 2)
        self.assertEqual(self.new_lines(wire), [PARTIAL, "POSITION notes removed 7 7", COMPLETE])


class AloneTests(MasterCase):
    """A database that one process has, such as an SQLite file."""

    def test_f17_a_process_that_is_no_writer_any_more_publishes_its_own_position(self) -> None:
        definition = StreamDefinition("notes", writers=("second",))
        now(self.store.open())
        now(self.store.declare(definition))
        fact = Fact(Token(4), ("1",))
        now(self.store.transaction().commit([Write(definition.name, REMOVED, Token(3), [fact])]))
        self.master = self.make_master(instance_name="removed", streams=[definition])
        now(self.master.start())
        wire = self.connect("REPLICATE notes")
        self.assertEqual(self.new_lines(wire)[2:], ["POSITION notes removed 4 4"])
        page = now(self.master.served.page("notes", "removed", after=0, upto=None, limit=10))
        self.assertEqual(([*page.facts], page.upto), ([fact], 4))
        self.assertEqual(now(self.master.served.since("notes", "0", 10))[1], "4")

    def test_a_writer_that_only_functions_follow_is_no_former_writer(self) -> None:
        """A worker that writes has its position in the same file.  It published it, and has no facts of it."""
        followed = InstanceName("followed")
        for writers in ((), ("second",)):
            definition = StreamDefinition("notes", writers=writers)
            now(self.store.open())
            now(self.store.declare(definition))
            now(self.store.transaction().commit([Write(definition.name, followed, Token(4))]))
            now(self.store.store_histories(followed, {definition.name: [Epoch("e", Token(1), Token(1))]}, "second"))
            self.master = self.make_master(instance_name="second", streams=[definition])
            now(self.master.start())
            wire = self.connect("REPLICATE notes")
            self.assertEqual(self.new_lines(wire)[2:], ["POSITION notes second 4 4"])
            self.assertFalse(self.master.served.has_former("notes", "followed"))
            wire.lose()
            now(self.master.stop())
