"""What a follower says beside asking for facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

import attrs
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication import voice
from replication.errors import LocalProtocolError
from replication.session.connection import Words
from replication.voice import Voice
from replication.wire.commands import ApplicationCommand, ClearUserSync, Server, UserSync
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Sequence


class Peer:
    """A writer that takes notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, lines: bytes, count: int) -> None:
        assert lines.count(b"\n") == count
        self.lines += lines.decode().splitlines()


@attrs.frozen
class Boast(ApplicationCommand):
    """A master's."""

    WORD = "BOAST"
    SAID_BY = ("master",)

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls()

    def spell(self) -> str:
        return ""


class VoiceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock, self.peers = Clock(), [Peer(), Peer()]
        self.voice = self.make_voice()
        self.me = self.voice.instance_id

    def tearDown(self) -> None:
        self.voice.end()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def make_voice(self) -> Voice:
        def peers() -> Any:
            return self.peers

        return Voice(
            self.clock, InstanceName("sender1"), words=Words(), peers=peers, wall=lambda: 1_700 + self.clock.seconds()
        )

    def said(self) -> Sequence[str]:
        """Return what the writers were told since the last time, all the same."""
        first, *others = [peer.lines for peer in self.peers]
        for each in others:
            self.assertEqual(each, first)
        for peer in self.peers:
            peer.lines = []
        return first

    def test_every_start_has_an_id_of_its_own(self) -> None:
        self.assertRegex(self.me, r"^[A-Za-z]{5}$")
        self.assertNotEqual(self.make_voice().instance_id, self.me)

    def test_all_writers_that_are_there_are_told(self) -> None:
        self.assertEqual(self.voice.remote_server_up("example.org"), 2)
        self.assertEqual(self.voice.federation_ack(Token(123)), 2)
        self.assertEqual(self.said(), ["REMOTE_SERVER_UP example.org", "FEDERATION_ACK sender1 123"])
        self.peers = []
        self.assertEqual(self.voice.remote_server_up("example.org"), 0)

    def test_what_cannot_be_said_is_an_error_here_and_closes_nothing(self) -> None:
        for command, why in (
            (Server("x"), "SERVER is not for a worker to say"),
            (Boast(), "BOAST is not for a worker to say"),
            (ClearUserSync("a\nb"), "CLEAR_USER_SYNC would be read as something else"),
        ):
            with self.assertRaisesRegex(LocalProtocolError, why):
                self.voice.say(command)
        with self.assertRaisesRegex(LocalProtocolError, "USER_SYNC"), self.voice.user_syncing("@a b:h"):
            self.fail("it was said")  # pragma: no cover
        self.assertEqual((self.voice.users(), self.voice.hello(), self.said()), ([], [], []))

    def test_a_user_is_seen_once_in_two_minutes(self) -> None:
        def seen(**more: Any) -> int:
            return self.voice.user_ip("@u:h", "tok", "1.2.3.4", "UA", **more)

        self.assertEqual((seen(), seen(), seen(device_id="D")), (2, 0, 2))
        self.clock.advance(119)
        self.assertEqual(seen(), 0)
        self.clock.advance(1)
        self.assertEqual(seen(), 2)
        self.assertEqual(
            self.said(),
            [
                'USER_IP @u:h ["tok","1.2.3.4","UA",null,1700000]',
                'USER_IP @u:h ["tok","1.2.3.4","UA","D",1700000]',
                'USER_IP @u:h ["tok","1.2.3.4","UA",null,1820000]',
            ],
        )

    def test_what_nobody_heard_is_said_again_and_not_all_is_remembered(self) -> None:
        peers, self.peers = self.peers, []
        self.assertEqual(self.voice.user_ip("@u:h", "tok", "1.2.3.4"), 0)
        self.peers = peers
        with patch.object(voice, "PLACES", 2):
            self.assertEqual([self.voice.user_ip("@u:h", "tok", ip) for ip in "1231"], [2, 2, 2, 2])

    def test_a_user_syncs_until_ten_seconds_after_the_last_device(self) -> None:
        with self.voice.user_syncing("@u:h"), self.voice.user_syncing("@u:h"):
            self.assertEqual(self.said(), [f"USER_SYNC {self.me} @u:h start 1700000"])
        self.clock.advance(9)
        with self.voice.user_syncing("@u:h"):
            self.clock.advance(60)
        self.assertEqual(self.voice.users(), ["@u:h"])
        self.assertEqual(self.said(), [])
        self.clock.advance(10)
        self.assertEqual(self.said(), [f"USER_SYNC {self.me} @u:h end 1769000"])
        self.assertEqual(self.voice.users(), [])

    def test_a_sync_that_fails_ends_too(self) -> None:
        with self.assertRaises(ZeroDivisionError), self.voice.user_syncing("@u:h"):
            raise ZeroDivisionError
        self.clock.advance(10)
        self.assertEqual(len(self.said()), 2)

    def test_a_new_connection_is_told_who_syncs_now(self) -> None:
        with self.voice.user_syncing("@gone:h"):
            pass
        with self.voice.user_syncing("@u:h"):
            self.clock.advance(5)
            self.assertEqual(
                self.voice.hello(),
                [UserSync(self.me, user, syncing=True, last_sync_ms=1_705_000) for user in ("@u:h", "@gone:h")],
            )

    def test_trap_11_who_stops_cleanly_says_so(self) -> None:
        with self.voice.user_syncing("@u:h"):
            self.voice.end()
        self.assertEqual(self.said()[1:], [f"CLEAR_USER_SYNC {self.me}"])
        self.assertEqual(self.voice.hello(), [])

    def test_who_never_had_users_has_nothing_to_clear(self) -> None:
        self.voice.end()
        self.assertEqual(self.said(), [])
