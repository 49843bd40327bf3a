"""An application's functions for commands."""

from __future__ import annotations

from typing import Any, Self, cast

import attrs
from twisted.internet.defer import fail
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import ConfigError
from replication.listeners import Listeners
from replication.session.connection import Role
from replication.wire.commands import (
    ApplicationCommand,
    Command,
    Ping,
    Position,
    Rdata,
    RemoteServerUp,
    Server,
    UserSync,
)

PEER = cast("Any", "a peer")


@attrs.frozen
class Reindex(ApplicationCommand):
    """An application's own."""

    WORD = "REINDEX"
    SAID_BY = ("worker",)
    table: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(rest)

    def spell(self) -> str:
        return self.table


class ListenersTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.listeners = Listeners([Role.WORKER])
        self.heard: list[object] = []

    def listen(self, command: type[Command]) -> None:
        @self.listeners.on_command(command)
        def note(command: Command, peer: object) -> None:
            self.heard.append((command, peer))

    def test_each_function_hears_its_command_and_who_said_it(self) -> None:
        for command in (Ping, RemoteServerUp, RemoteServerUp):
            self.listen(command)
        self.listeners.hear(PEER, RemoteServerUp("a"))
        self.listeners.hear(PEER, UserSync("a", "@u", syncing=True, last_sync_ms=1))
        self.assertEqual(self.heard, [(RemoteServerUp("a"), PEER)] * 2)

    def test_an_applications_own_command_is_known_once_somebody_wants_it(self) -> None:
        self.assertNotIn("REINDEX", self.listeners.words.classes)
        self.listen(Reindex)
        self.assertIs(self.listeners.words.classes["REINDEX"], Reindex)
        self.listeners.hear(PEER, Reindex("t"))
        self.assertEqual(self.heard, [(Reindex("t"), PEER)])

    def test_what_is_never_heard_here_cannot_be_listened_for(self) -> None:
        for command in (Server, Position):
            with self.assertRaisesRegex(ConfigError, f"^{command.WORD} is not heard here$"):
                self.listen(command)
        with self.assertRaisesRegex(ConfigError, r"RDATA is not heard here; use on\(stream\)"):
            self.listen(Rdata)
        with self.assertRaisesRegex(ConfigError, "REINDEX is not heard here"):
            Listeners([Role.MASTER]).on_command(Reindex)
        with self.assertRaisesRegex(ConfigError, "is no command"):
            self.listeners.on_command(cast("Any", int))

    def test_a_function_that_raises_is_logged_and_stops_no_other(self) -> None:
        @self.listeners.on_command(Ping)
        def plain(command: Ping, peer: object) -> None:
            raise ZeroDivisionError

        @self.listeners.on_command(Ping)
        async def later(command: Ping, peer: object) -> None:
            raise ZeroDivisionError

        @self.listeners.on_command(Ping)
        def deferred(command: Ping, peer: object) -> object:
            return fail(ZeroDivisionError())

        self.listen(Ping)
        self.listeners.hear(PEER, Ping("1"))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 3)
        self.assertEqual(len(self.heard), 1)

    def test_who_begins_and_stops_to_sync_is_passed_on(self) -> None:
        @self.listeners.on_syncing
        def changed(user_id: str, syncing: bool) -> None:
            self.heard.append((user_id, syncing))

        self.listeners.syncing_changed("@u", syncing=True)
        self.listeners.syncing_changed("@u", syncing=False)
        self.assertEqual(self.heard, [("@u", True), ("@u", False)])
