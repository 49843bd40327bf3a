"""Two connections send facts of one writer from two databases: they are named in the log and in ``notes``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

from twisted.internet.defer import succeed

from replication.follower.confirmed_notes import LONGEST_PAUSE
from replication.follower.links import FollowedLinks
from replication.follower.second_databases import CONFIRMED_AFTER, SecondDatabases
from replication.streams.history import UNKNOWN_HISTORY, Epoch, encode_part
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, Token
from tests.doubles import logged
from tests.follower.cases import ORDERS, FollowerCase

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred

NOTE = (
    "tcp:a:1 and tcp:b:1 send facts of writer 'master' of stream 'orders' from two databases, and only one of them is "
    "followed: do two processes have this name? Give each an instance name of its own, or remove one of them from "
    "connect"
)


class SecondDatabasesTests(FollowerCase):
    def setUp(self) -> None:
        super().setUp()
        self.at(1, 1)
        self.links = FollowedLinks()
        self.sent: dict[str, str] = {}

    def link(self, endpoint: str, *names: str) -> None:
        """Add a link whose other end has a history of these epochs."""

        def echo(_: str) -> Deferred[str]:
            return succeed(self.sent[endpoint])

        link: Any = Mock(endpoint=endpoint, echo=echo)
        self.send(endpoint, *names)
        self.links.add(link)
        self.links.position_received(link, ORDERS, InstanceName("master"))

    def send(self, endpoint: str, *names: str) -> None:
        self.sent[endpoint] = encode_part([Epoch(name, Token(1), Token(1)) for name in names], 0, 9)

    def look(self, looks: int = 2, position: int = 1) -> tuple[list[str], list[str]]:
        """Return what is logged, and the notes."""
        self.found = SecondDatabases(
            links=self.links, followers=[self.follower], lifetime=self.process.lifetime, patience=5.0
        )
        for link in self.links:
            self.found.position_received(link, Position(ORDERS, InstanceName("master"), Token(1), Token(position)))
        with logged() as messages:
            self.found.following()
            self.process.clock.pump([5.0, CONFIRMED_AFTER][:looks])
        return messages, [*self.found.notes(ORDERS)]

    def test_two_databases_are_named_until_one_is_gone(self) -> None:
        for ours, theirs in ((["a"], ["b"]), (["a", "b"], ["a", "c"])):
            self.setUp()
            self.link("tcp:b:1", *theirs)
            self.link("tcp:a:1", *ours)
            self.assertEqual(self.look(), ([NOTE], [NOTE]))
            with logged() as messages:
                self.process.clock.advance(LONGEST_PAUSE)
            self.assertEqual((messages, self.found.notes(ORDERS)), ([], [NOTE]))
            self.send("tcp:a:1", *theirs)
            self.process.clock.advance(LONGEST_PAUSE)
            self.assertEqual(self.found.notes(ORDERS), [])

    def test_a_database_that_began_as_a_backup_of_the_other_one_is_named(self) -> None:
        """Its next epoch began below the position of the other one, which was not started again."""
        for position, found in ((4, []), (5, [NOTE])):
            self.setUp()
            self.link("tcp:a:1", "a")
            self.link("tcp:b:1", "a", "b")
            self.sent["tcp:b:1"] = encode_part([Epoch("a", Token(1), Token(1)), Epoch("b", Token(3), Token(4))], 0, 9)
            self.assertEqual(self.look(position=position), (found, found))

    def test_two_ways_to_one_database_are_not(self) -> None:
        """A relay may not have followed the last start of the writer yet."""
        for names in (["a", "b"], ["a"], ["a", "b", "c"]):
            self.setUp()
            self.link("tcp:a:1", "a", "b")
            self.link("tcp:b:1", *names)
            self.assertEqual(self.look(), ([], []))

    def test_a_relay_that_follows_a_restart_later_is_not(self) -> None:
        """Its newest epoch has no facts, so the writer has replaced it."""
        self.link("tcp:a:1", "a", "c")
        self.link("tcp:b:1", "a", "b")
        self.assertEqual(self.look(looks=1), ([], []))
        self.send("tcp:b:1", "a", "c")
        with logged() as messages:
            self.process.clock.advance(CONFIRMED_AFTER)
        self.assertEqual((messages, self.found.notes(ORDERS)), ([], []))

    def test_one_connection_and_an_end_without_a_history_are_not(self) -> None:
        self.link("tcp:a:1", "a")
        self.assertEqual(self.look(), ([], []))
        for text in ("", "[0,[]]", UNKNOWN_HISTORY):
            self.setUp()
            self.link("tcp:a:1", "a")
            self.link("tcp:b:1")
            self.sent["tcp:b:1"] = text
            self.assertEqual(self.look(), ([], []))

    def test_an_end_that_cannot_read_its_history_now_is_looked_at_again(self) -> None:
        self.link("tcp:a:1", "a")
        self.link("tcp:b:1", "b")
        self.sent["tcp:b:1"] = UNKNOWN_HISTORY
        self.assertEqual(self.look(), ([], []))
        self.send("tcp:b:1", "b")
        with logged() as messages:
            self.process.clock.pump([LONGEST_PAUSE] * 2)
        self.assertEqual(messages, [NOTE])
        self.sent["tcp:b:1"] = UNKNOWN_HISTORY
        with logged() as messages:
            self.process.clock.advance(LONGEST_PAUSE)
            self.assertEqual(self.found.notes(ORDERS), [NOTE])
            self.send("tcp:b:1", "a")
            self.process.clock.advance(LONGEST_PAUSE)
        self.assertEqual((messages, self.found.notes(ORDERS)), ([], []))

    def test_a_later_look_ends_an_earlier_one(self) -> None:
        self.link("tcp:a:1", "a")
        self.link("tcp:b:1", "b")
        self.assertEqual(self.look(looks=1), ([], []))
        self.found.following()
        with logged() as messages:
            self.process.clock.pump([5.0, CONFIRMED_AFTER])
        self.assertEqual(messages, [NOTE])

    def test_a_process_that_stops_looks_no_more(self) -> None:
        self.link("tcp:a:1", "a")
        self.link("tcp:b:1", "b")
        self.look(looks=1)
        self.process.lifetime.end()
        self.process.clock.advance(CONFIRMED_AFTER)
        self.assertEqual(self.found.notes(ORDERS), [])
