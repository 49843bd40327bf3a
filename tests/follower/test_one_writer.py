"""Streams whose tables name no writer: another process may write them later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.follower.one_writer import own_part
from replication.follower.stream import FollowMode
from replication.streams.facts import Fact
from replication.streams.interfaces import Page
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.follower.test_audit import ONE as FIRST
from tests.follower.test_audit import TWO as SECOND
from tests.follower.test_audit import AuditCase, FakeDatabase

if TYPE_CHECKING:
    from tests.follower.test_audit import Followed


class UnnamedDatabase(FakeDatabase):
    """Its rows have no name: each writer seems to have written all of them."""

    async def present(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token) -> set[Token]:
        return {token for token in self.written if after < token <= upto}

    def move(self, writer: InstanceName) -> None:
        """Let another process write from now on, as a Synapse does at its start."""
        self.positions = {writer: max(self.written)}


class OneWriterTests(AuditCase):
    def moved(self, mode: FollowMode) -> Followed:
        """Return a follower that has applied 2 to 4 of FIRST; SECOND has written since."""
        followed = self.follow(UnnamedDatabase("orders"), mode=mode, one_writer=True)
        followed.at(FIRST, 1)
        for token in (2, 3, 4):
            followed.database.write(FIRST, token)
            followed.send(FIRST, token)
            followed.check()
            followed.check()  # forgets those that were compared before
        followed.database.move(SECOND)  # type: ignore[attr-defined]
        followed.database.write(SECOND, 6, 7)
        return followed

    def test_the_facts_of_a_former_writer_are_applied_once(self) -> None:
        for mode in (FollowMode.APPLIED, FollowMode.COPIED):
            followed = self.moved(mode)
            followed.at(SECOND, 7)
            self.assertEqual((followed.applied(), followed.follower.errors.texts), ([2, 3, 4, 6, 7], {}))
            followed.restart()
            followed.at(SECOND, 7)
            followed.check()
            followed.check()
            followed.restart()
            followed.at(SECOND, 7)
            followed.check()
            followed.check()
            self.assertEqual((followed.applied(), followed.follower.lost_and_found), ([2, 3, 4, 6, 7], {}))

    def test_facts_that_the_former_writer_wrote_while_this_process_was_stopped_are_applied(self) -> None:
        followed = self.moved(FollowMode.APPLIED)
        followed.stop()
        followed.database.written |= {Token(5): FIRST}
        followed.start()
        followed.at(SECOND, 7)
        self.assertEqual(followed.applied(), [2, 3, 4, 5, 6, 7])

    def test_a_process_that_writes_again_sends_nothing_a_second_time(self) -> None:
        followed = self.moved(FollowMode.APPLIED)
        followed.at(SECOND, 7)
        followed.database.move(FIRST)  # type: ignore[attr-defined]
        followed.database.write(FIRST, 9)
        followed.at(FIRST, 9)
        followed.database.write(FIRST, 10)
        followed.send(FIRST, 10)
        followed.check()
        followed.check()
        self.assertEqual(followed.applied(), [2, 3, 4, 6, 7, 9, 10])

    def test_a_lost_fact_of_the_new_writer_is_found_and_one_of_the_former_writer_too(self) -> None:
        followed = self.moved(FollowMode.APPLIED)
        followed.at(SECOND, 7)
        followed.database.write(SECOND, 8, 9)
        followed.send(SECOND, 9)
        followed.database.written |= {Token(3): FIRST}
        followed.check()
        followed.check()
        self.assertEqual(followed.applied(), [2, 3, 4, 6, 7, 9, 8])

    def test_what_a_relay_serves_of_a_writer_begins_after_the_other_one(self) -> None:
        """A follower without the database receives each fact under one name."""
        followed = self.moved(FollowMode.POSITION_ONLY)
        followed.at(SECOND, 7)
        page = Page([Fact(Token(each), ("[]",)) for each in (2, 3, 4, 6, 7)], Token(7), limited=False)
        positions = followed.follower.positions()
        own = own_part(page, SECOND, positions, Token(7))
        self.assertEqual(([each.token for each in own.facts], own.upto), ([6, 7], 7))
        first = own_part(page, FIRST, positions, Token(4))
        self.assertEqual([each.token for each in first.facts][:3], [2, 3, 4])
