"""Writers of which no process sends a position any more are found in the database, and followed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import LogLevel

from replication.errors import StoreError
from replication.follower.audit import Audit
from replication.follower.former_writers import LOOK_AGAIN, FormerWriters
from replication.follower.stream import FollowMode
from replication.net.redis import COLLECT
from replication.session.connection import Rows
from replication.streams.positions import MultiWriterToken
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import logged
from tests.follower.test_audit import INTERVAL, AuditCase, FakeDatabase, Followed
from tests.follower.test_over_redis import DatabaseCase

if TYPE_CHECKING:
    from collections.abc import Callable

    from replication.follower.worker import Worker

ONE, OLD, OTHER = InstanceName("one"), InstanceName("old"), InstanceName("other")
EVENTS = StreamName("events")


@attrs.define(eq=False)
class Link:
    """A connection to Redis that is followed, or one to a relay."""

    endpoint: str = "redis://redis"
    state: str = "following"
    connections: int = 1


class FormerFollowed(Followed):
    """A follower whose database has former writers."""

    def start(self, *, audited: bool = True) -> None:
        super().start(audited=audited)
        self.link = Link()
        self.former = FormerWriters(
            source=self.database,
            links=[Link("tcp:relay:9092"), self.link],  # type: ignore[list-item]
            lifetime=self.follower._lifetime,
            received=self.received,  # type: ignore[arg-type]
        )
        self.audit = Audit(
            source=self.database,
            followers=[self.follower],
            links=[],
            lifetime=self.follower._lifetime,
            interval=INTERVAL,
            former=self.former,
        )

    def received(self, link: Link, positions: list[Position]) -> None:
        for each in positions:
            self.follower.position_received(link, each)

    def at(self, writer: InstanceName, prev: int, new: int | None = None) -> None:
        self.received(self.link, [Position(self.database.stream, writer, Token(prev), Token(new or prev))])
        self.settle()

    def check(self, between: Callable[[], None] = lambda: None) -> None:
        """Let the audit check once; ``between`` two looks something may happen."""
        checking = Deferred.fromCoroutine(self.audit.check())
        while not checking.called:
            if self.clock.getDelayedCalls():
                between()
                self.clock.advance(LOOK_AGAIN)
            else:
                self.pump.run_call()
        self.pump.wait(checking)
        self.settle()

    def lose(self) -> None:
        self.follower.connection_lost(self.link)
        self.link.state = "not connected"

    def send(self, writer: InstanceName, *tokens: int) -> None:
        places = [Token(each) for each in tokens]
        self.follower.rows_received(self.link, Rows(self.database.stream, writer, places, ["[]"] * len(tokens)))
        self.settle()

    def reconnect(self, **positions: int) -> None:
        self.lose()
        self.link.state = "following"
        self.link.connections += 1
        for writer, position in positions.items():
            self.at(InstanceName(writer), position)

    def place(self, writer: InstanceName) -> int:
        return self.follower.position(writer)

    def known(self) -> bool:
        return self.audit.all_writers_known(self.follower) and self.audit.every_writer_known()


class FormerCase(AuditCase):
    mode = FollowMode.COPIED

    def setUp(self) -> None:
        self.database = FakeDatabase("orders")
        self.database.write(ONE, 2, 4, 9)
        self.database.written.update({Token(3): OLD, Token(7): OLD})
        self.followed = FormerFollowed(f"sqlite:///{self.mktemp()}", self.database, mode=self.mode)
        self.addCleanup(self.followed.stop)


class SearchTests(FormerCase):
    def test_its_facts_are_copied_and_at_the_next_start_nothing_is_fetched(self) -> None:
        followed = self.followed
        with logged(LogLevel.info) as lines:
            followed.at(ONE, 9)
            self.assertEqual(followed.applied(), [2, 4, 9])
            followed.check()
        self.assertEqual((sorted(followed.applied()), followed.place(OLD)), ([2, 3, 4, 7, 9], 9))
        self.assertEqual(lines, ["orders: old write no more; their facts are those of the database"])
        self.assertEqual((self.database.former, followed.follower.lost_and_found), ({OLD}, {}))
        followed.restart()
        asked = self.database.asked["facts"]
        followed.at(ONE, 9)
        with logged() as lines:
            followed.check()
        self.assertEqual((sorted(followed.applied()), followed.place(OLD), lines), ([2, 3, 4, 7, 9], 9, []))
        self.assertEqual((self.database.asked["facts"], followed.follower.cursors[OLD].live), (asked, True))

    def test_its_last_facts_are_fetched_that_it_wrote_while_this_process_was_stopped(self) -> None:
        followed = self.followed
        self.database.positions[OLD] = Token(7)
        followed.at(ONE, 9)
        followed.at(OLD, 7)
        self.database.write(OLD, 11)
        del self.database.positions[OLD]
        followed.restart()
        followed.at(ONE, 9)
        followed.check()
        self.assertEqual((sorted(followed.applied()), followed.place(OLD)), ([2, 3, 4, 7, 9, 11], 11))

    def test_its_last_row_may_be_above_all_stored_positions(self) -> None:
        self.database.written[Token(12)] = OLD
        self.followed.at(ONE, 9)
        self.followed.check()
        self.assertEqual((sorted(self.followed.applied()), self.followed.place(OLD)), ([2, 3, 4, 7, 9, 12], 12))

    def test_no_position_is_stored_of_a_stream_that_has_moved_to_a_worker_which_wrote_nothing(self) -> None:
        self.database.positions.clear()
        self.database.written.update(dict.fromkeys(map(Token, (2, 4, 9)), OLD))
        self.followed.at(ONE, 1)
        self.followed.check()
        self.assertEqual((self.followed.applied(), self.followed.place(OLD)), ([2, 3, 4, 7, 9], 9))

    def test_a_writer_that_stores_its_position_between_two_looks_is_a_new_one(self) -> None:
        self.followed.at(ONE, 9)
        self.followed.check(lambda: self.database.positions.update({OLD: Token(7)}))
        self.assertEqual((self.followed.applied(), self.database.former), ([2, 4, 9], set()))
        self.followed.at(OLD, 7)
        self.assertEqual(sorted(self.followed.applied()), [2, 3, 4, 7, 9])

    def test_a_writer_that_sends_its_position_between_two_looks_is_a_new_one(self) -> None:
        self.followed.at(ONE, 9)
        self.followed.check(lambda: self.followed.at(OLD, 7))
        self.assertEqual((sorted(self.followed.applied()), self.database.former), ([2, 3, 4, 7, 9], set()))

    def test_a_writer_with_a_stored_position_that_does_not_run_is_not_a_former_one(self) -> None:
        self.database.positions[OLD] = Token(7)
        self.followed.at(ONE, 9)
        self.followed.check()
        self.assertEqual((self.followed.applied(), self.database.former), ([2, 4, 9], set()))

    def test_the_tables_are_read_once_and_after_a_reconnection_only_what_is_new(self) -> None:
        followed, asked = self.followed, list[tuple[int, int]]()
        followed.at(ONE, 9)
        for _ in range(3):
            followed.check()
        self.assertEqual((self.database.asked["writers"], self.database.asked["last row"]), (1, 1))
        self.database.written[Token(14)] = OTHER
        self.database.write(ONE, 15)
        writers = self.database.writers

        async def note(stream: StreamName, *, after: Token, upto: Token) -> dict[InstanceName, Token]:
            asked.append((after, upto))
            return await writers(stream, after=after, upto=upto)

        self.patch(self.database, "writers", note)
        followed.reconnect(one=15)
        self.assertFalse(followed.known())
        followed.check()
        followed.check()
        self.assertEqual((asked, followed.place(OLD), followed.place(OTHER)), ([(9, 15)], 15, 15))
        self.assertEqual((sorted(followed.applied()), followed.known()), ([2, 3, 4, 7, 9, 14, 15], True))

    def test_a_writer_whose_rows_were_seen_before_it_was_removed_is_found(self) -> None:
        self.database.positions[OLD] = Token(7)
        self.followed.at(ONE, 9)
        self.followed.check()
        del self.database.positions[OLD]
        self.followed.reconnect(one=9)
        self.followed.check()
        self.assertEqual(sorted(self.followed.applied()), [2, 3, 4, 7, 9])

    def test_after_a_restart_only_what_is_new_is_read_once_all_that_was_found_is_applied(self) -> None:
        followed, asked = self.followed, list[tuple[int, int]]()
        writers = self.database.writers

        async def note(stream: StreamName, *, after: Token, upto: Token) -> dict[InstanceName, Token]:
            asked.append((after, upto))
            return await writers(stream, after=after, upto=upto)

        self.patch(self.database, "writers", note)
        self.database.positions[OLD] = Token(7)
        followed.at(ONE, 9)
        followed.check()
        followed.check()
        followed.restart()  # a writer that has sent no position is not stored here
        del self.database.positions[OLD]
        followed.at(ONE, 9)
        followed.check()
        followed.check()
        followed.restart()
        self.database.write(ONE, 15)
        followed.at(ONE, 15)
        followed.check()
        self.assertEqual((asked, sorted(followed.applied())), ([(0, 9), (0, 9), (9, 15)], [2, 3, 4, 7, 9, 15]))

    def test_a_search_that_could_not_be_done_before_a_kill_is_done_after_it(self) -> None:
        self.followed.at(ONE, 9)
        for _ in range(2):
            self.followed.restart()
            self.followed.at(ONE, 9)
        self.followed.check()
        self.assertEqual(sorted(self.followed.applied()), [2, 3, 4, 7, 9])

    def test_its_position_follows_the_others_until_it_comes_back(self) -> None:
        followed = self.followed
        followed.at(ONE, 9)
        followed.check()
        self.database.write(ONE, 20)
        followed.at(ONE, 20)
        followed.check()
        self.assertEqual(followed.place(OLD), 20)
        self.database.write(OLD, 22)
        followed.at(OLD, 22)
        self.database.write(ONE, 30)
        followed.at(ONE, 30)
        followed.check()
        self.assertEqual((sorted(followed.applied()), followed.place(OLD)), ([2, 3, 4, 7, 9, 20, 22, 30], 22))

    def test_there_is_no_search_without_a_followed_connection_or_a_known_writer(self) -> None:
        self.followed.check()
        self.assertFalse(self.followed.audit.all_writers_known(self.followed.follower))
        self.followed.at(ONE, 9)
        self.followed.lose()
        self.followed.check()
        self.assertEqual((self.database.asked["writers"], self.followed.known()), (0, False))

    def test_after_a_connection_that_is_lost_during_a_search_all_is_done_again(self) -> None:
        async def lose(_: object) -> Token:
            self.followed.lose()
            return Token(9)

        self.followed.at(ONE, 9)
        reading = self.patch(self.database, "last_row", lose)
        self.followed.check()
        reading.restore()
        self.followed.reconnect(one=9)
        self.followed.check(self.followed.lose)  # between two looks
        self.assertEqual((self.followed.applied(), self.followed.known()), ([2, 4, 9], False))
        self.followed.reconnect(one=9)
        self.followed.check()
        self.assertEqual((sorted(self.followed.applied()), self.followed.known()), ([2, 3, 4, 7, 9], True))

    def test_nothing_is_received_on_a_connection_that_is_lost_while_an_earlier_stream_is_searched(self) -> None:
        """The former writer would look like one that runs."""
        followed, stored = self.followed, {self.database.stream: {ONE: Token(12)}}
        followed.at(ONE, 9)
        followed.check()

        def lose(*_: object) -> None:
            if followed.link.state == "following":
                followed.lose()
            stored[self.database.stream] = {ONE: Token(15)}

        self.patch(FormerWriters, "_store", AsyncMock(side_effect=lose))
        looking = Deferred.fromCoroutine(followed.former.look([followed.follower, followed.follower], stored))
        followed.pump.wait(looking)
        self.assertFalse(followed.follower.cursors[OLD].linked)

    def remove(self) -> FormerFollowed:
        """Follow both writers, and a third one that has stored nothing; then one is removed, while Redis stays."""
        self.database.positions[OLD] = Token(7)
        self.followed.at(ONE, 9)
        self.followed.at(OLD, 7)
        self.followed.at(OTHER, 9)
        self.followed.check()
        del self.database.positions[OLD]
        return self.followed

    def test_what_redis_lost_of_a_writer_that_was_removed_then_is_fetched(self) -> None:
        followed = self.remove()
        self.database.written[Token(8)] = OLD
        with logged(LogLevel.info) as lines:
            followed.check()
            followed.check()
        self.assertEqual(lines, ["orders: old write no more; their facts are those of the database"])
        self.assertEqual((sorted(followed.applied()), followed.known()), ([2, 3, 4, 7, 8, 9], True))
        self.database.write(ONE, 12)
        self.database.write(OTHER, 13)
        followed.check()
        self.assertEqual((followed.place(OLD), self.followed.place(ONE), self.followed.place(OTHER)), (13, 12, 13))
        del self.database.positions[OTHER]
        followed.check()
        self.assertEqual({*self.followed.former.found[self.database.stream]}, {OLD, OTHER})
        self.database.write(OLD, 14)  # it comes back
        followed.send(OLD, 14)
        followed.check()
        self.assertEqual({*self.followed.former.found[self.database.stream]}, {OTHER})
        self.assertEqual(followed.applied()[-1], 14)

    def test_a_writer_that_a_restored_database_never_had_goes_back_with_the_others(self) -> None:
        followed = self.remove()
        self.database.restore(5)
        del self.database.positions[OLD]
        with logged() as lines:
            followed.check()
            followed.check()
        self.assertIn("old went back from 7 to 4 on orders: was its database restored? Following from there", lines)
        self.assertEqual(followed.applied(), [2, 3, 4])

    def test_a_former_writer_that_a_restored_synapse_removes_again_is_followed_again(self) -> None:
        followed = self.remove()
        followed.check()
        self.database.write(ONE, 12)
        followed.at(ONE, 12)
        followed.check()
        with logged(LogLevel.info) as lines:
            self.database.restore(5)  # the backup has its position
            followed.check()
            del self.database.positions[OLD]
            followed.check()
        self.assertIn("orders: old write no more; their facts are those of the database", lines)
        self.database.write(ONE, 6)
        followed.check()
        self.assertEqual(followed.place(OLD), 6)

    def test_tables_that_do_not_name_their_writers_are_left_alone(self) -> None:
        self.patch(self.database, "names_writers", lambda _: False)
        self.followed.at(ONE, 9)
        self.followed.check()
        found = self.followed.applied(), self.database.asked["writers"], self.followed.known()
        self.assertEqual(found, ([2, 4, 9], 0, True))


class FunctionTests(FormerCase):
    mode = FollowMode.APPLIED

    def test_a_function_receives_each_of_its_facts_once(self) -> None:
        for _ in range(2):
            self.followed.at(ONE, 9)
            self.followed.check()
            self.followed.check()
            self.assertEqual(sorted(self.followed.applied()), [2, 3, 4, 7, 9])
            self.followed.restart()

    def test_linear_order_waits_for_it_until_the_next_check(self) -> None:
        followed = FormerFollowed(f"sqlite:///{self.mktemp()}", self.database, linear=True)
        self.addCleanup(followed.stop)
        followed.at(ONE, 9)
        followed.check()
        self.assertEqual(sorted(followed.applied()), [2, 3, 4, 7, 9])
        self.database.write(ONE, 12)
        followed.send(ONE, 12)
        followed.check()
        self.assertEqual(followed.applied()[-1], 12)

    def test_linear_order_does_not_wait_for_a_writer_that_was_removed_on_this_connection(self) -> None:
        self.database.positions[OLD] = Token(7)
        followed = FormerFollowed(f"sqlite:///{self.mktemp()}", self.database, linear=True)
        self.addCleanup(followed.stop)
        followed.at(ONE, 9)
        followed.at(OLD, 9)
        followed.check()
        del self.database.positions[OLD]
        self.database.write(ONE, 12)
        followed.send(ONE, 12)
        followed.check()
        self.assertEqual(followed.applied()[-1], 12)


class KnownTests(FormerCase):
    def test_not_all_writers_are_known_before_a_former_one_is_followed(self) -> None:
        known: list[bool] = []
        self.followed.at(ONE, 9)
        known.append(self.followed.known())
        self.followed.check(lambda: known.append(self.followed.known()))
        self.assertEqual([*known, self.followed.known()], [False, False, True])

    def test_a_search_that_fails_is_logged_once_and_done_again(self) -> None:
        self.followed.at(ONE, 9)

        async def fail(*_: object, **__: object) -> dict[InstanceName, Token]:
            raise StoreError("gone")

        failing = self.patch(self.database, "writers", fail)
        with logged() as lines:
            for _ in range(3):
                self.followed.check()
        self.assertEqual(lines, ["cannot search former writers of orders in the database: gone"])
        self.assertEqual((self.followed.applied(), self.followed.known()), ([2, 4, 9], False))
        failing.restore()
        self.followed.check()
        self.assertEqual((sorted(self.followed.applied()), self.followed.known()), ([2, 3, 4, 7, 9], True))

    def test_a_second_look_that_fails_is_done_again(self) -> None:
        self.followed.at(ONE, 9)
        with logged() as lines:
            self.followed.check(lambda: self.database.errors.append(StoreError("gone")))
        self.assertEqual(lines, ["cannot search former writers of streams in the database: gone"])
        self.assertEqual((self.followed.applied(), self.followed.known()), ([2, 4, 9], False))
        self.followed.check()
        self.assertEqual((sorted(self.followed.applied()), self.followed.known()), ([2, 3, 4, 7, 9], True))


class RelayTests(DatabaseCase):
    """A relay that stores nothing follows each writer from its present position on, so it reads all of the tables."""

    stream = "events"

    def setUp(self) -> None:
        super().setUp()
        self.redis.positions = ("POSITION events one 9 9",)
        self.database.write(ONE, 2, 4, 9)
        self.database.write(OLD, 3, 7)
        del self.database.positions[OLD]

    def make_worker(self, **options: Any) -> Worker:
        return super().make_worker(relay=True, **options)

    def check(self) -> None:
        self.net.run(self.audit_interval)
        self.net.run(LOOK_AGAIN)

    def test_it_announces_former_writers_and_no_token_passes_them_before(self) -> None:
        self.start()
        self.net.run(self.audit_interval - COLLECT)
        relay = self.worker._followed.relay
        assert relay is not None
        self.assertEqual((relay._published.get((EVENTS, OLD)), relay.is_complete), (None, False))
        self.assertEqual(self.worker.token("events"), MultiWriterToken(Token(0), {ONE: Token(9)}))
        self.net.run(LOOK_AGAIN)
        self.assertEqual((relay._published.get((EVENTS, OLD)), relay.is_complete), (9, True))
        self.assertEqual(self.worker.token("events"), MultiWriterToken(Token(9)))
        self.assertEqual(self.position("old", "events"), 9)
        self.database.write(ONE, 20)
        self.publish("POSITION events one 20 20")
        self.check()
        self.check()
        self.assertEqual(relay._published.get((EVENTS, OLD)), 20)

    def test_a_former_writer_with_the_name_of_this_process_is_named_and_never_known(self) -> None:
        self.database.written[Token(8)] = self.worker.instance_name
        with logged() as lines:
            self.start()
            for _ in range(3):
                self.check()
        self.assertEqual(len([each for each in lines if "has the name of this process" in each]), 1)
        self.assertEqual(self.worker.token("events"), MultiWriterToken(Token(0), {ONE: Token(9), OLD: Token(9)}))


class RestoreTests(FormerCase):
    """A position that is no longer stored, or of a former writer, is no sign of a restored database."""

    def test_a_stream_has_moved_and_its_rows_are_deleted_once_they_are_delivered(self) -> None:
        self.database.positions[OLD] = Token(7)
        self.followed.at(ONE, 9)
        self.followed.at(OLD, 7)
        self.database.positions.clear()
        del self.database.written[Token(9)]
        with logged() as lines:
            self.followed.check()
            self.followed.check()
        self.assertEqual((lines, sorted(self.followed.applied())), ([], [2, 3, 4, 7, 9]))

    def test_the_last_rows_of_a_former_writer_are_deleted(self) -> None:
        self.database.written[Token(12)] = OLD
        self.followed.at(ONE, 9)
        self.followed.check()
        del self.database.written[Token(12)]
        with logged() as lines:
            self.followed.check()
            self.followed.check()
        self.assertEqual((lines, self.followed.place(OLD)), ([], 12))

    def test_after_a_restore_former_writers_go_back_and_are_searched_from_there(self) -> None:
        self.followed.at(ONE, 9)
        self.followed.check()
        self.followed.check()
        self.database.restore(5)
        del self.database.positions[OLD]
        with logged():
            self.followed.check()
        self.assertEqual((sorted(self.followed.applied()), self.followed.place(OLD)), ([2, 3, 4], 4))
        self.followed.reconnect(one=4)
        self.followed.check()
        self.database.write(ONE, 8)
        self.database.written[Token(6)] = OTHER
        self.followed.reconnect(one=8)
        self.followed.check()
        self.assertEqual(sorted(self.followed.applied()), [2, 3, 4, 6, 8])
