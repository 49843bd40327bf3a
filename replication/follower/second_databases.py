"""Two connections that send facts of one writer from two databases: the facts of one of them are not followed.

No two processes may share a name.  But each database has claims of its own, and ``master`` is the default name.  So a
worker may be connected to two such processes, or to both halves of a cluster that has split.  Only the histories show
that these are not two ways to one writer.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final, NamedTuple

import attrs
from twisted.logger import Logger

from replication.deferreds import start_alone
from replication.errors import ReplicationError
from replication.follower.confirmed_notes import LONGEST_PAUSE, ConfirmedNotes
from replication.net.endpoints import is_redis
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from replication.deferreds import Lifetime
    from replication.follower.links import FollowedLinks
    from replication.follower.stream import StreamFollower
    from replication.net.links import IWriterLink
    from replication.streams.history import History
    from replication.wire.commands import Position
    from replication.wire.grammar import InstanceName, StreamName

CONFIRMED_AFTER: Final = 10.0  # seconds between two looks: a relay follows a start of its writer a little later


@attrs.define(eq=False, repr=False, kw_only=True)
class SecondDatabases:
    """Finds writers that two connections send from two databases.

    Args:
        links: to the processes that are followed.
        followers: of all streams.
        lifetime: of this process.
        patience: seconds in which a process sends all positions.

    """

    log = Logger()

    _links: FollowedLinks
    _followers: Iterable[StreamFollower]
    _lifetime: Lifetime
    _patience: float
    _positions: dict[tuple[str, StreamName, InstanceName], Token] = attrs.field(init=False, factory=dict)
    _looks: int = attrs.field(init=False, default=0)
    _unread: bool = attrs.field(init=False, default=False)  # whether a process could not read a history in this look
    _notes: ConfirmedNotes = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Log each note once."""
        self._notes = ConfirmedNotes(lambda note: self.log.error("{note}", note=note), CONFIRMED_AFTER)

    def position_received(self, link: IWriterLink, command: Position) -> None:
        """Note a POSITION of a followed stream."""
        self._positions[link.endpoint, command.stream, command.instance] = command.new

    def following(self) -> None:
        """Look for such writers, after a connection has sent its first positions; an earlier look ends."""
        self._looks += 1
        start_alone(self._look(self._looks))

    def notes(self, stream: StreamName) -> Sequence[str]:
        """Return a sentence for each such writer of a stream, as the last look has found them."""
        return self._notes.of(stream)

    # ---- inside

    async def _look(self, number: int) -> None:
        """Note what two looks in a row have found; look again while there is a note, or a history was not read."""
        self._notes.begin()
        pause: float | None = self._patience
        while pause is not None:
            await self._lifetime.sleep(pause)
            if number != self._looks or self._lifetime.ended:
                return
            self._unread = False
            found = {each.name: await self._find(each) for each in self._followers}
            if number != self._looks or self._lifetime.ended:
                return
            if self._unread:  # what was found before may still be so
                found = {name: list(dict.fromkeys([*self.notes(name), *each])) for name, each in found.items()}
            pause = self._notes.look(found)
            if pause is None and self._unread:
                pause = LONGEST_PAUSE

    async def _find(self, follower: StreamFollower) -> list[str]:
        notes = []
        for writer in list(follower.cursors):
            links = [link for link in self._links.links_of(writer) if not is_redis(link.endpoint)]
            ends = await self._ends(links, follower.name, writer) if len(links) > 1 else []
            notes += [
                f"{one.endpoint} and {other.endpoint} send facts of writer {writer!r} of stream {follower.name!r} from "
                "two databases, and only one of them is followed: do two processes have this name? Give each an "
                "instance name of its own, or remove one of them from connect"
                for one, other in combinations(ends, 2)
                if _has_more(one, other) and _has_more(other, one)
            ]
        return notes

    async def _ends(self, links: Iterable[IWriterLink], stream: StreamName, writer: InstanceName) -> list[_End]:
        """Return what each of these links sends, without those that send no history now."""
        found = []
        for link in links:
            try:
                history = await self._links.history_of(link, stream, writer)
            except ReplicationError:
                self._unread = True
                continue
            if history:
                position = self._positions.get((link.endpoint, stream, writer), Token(0))
                found.append(_End(link.endpoint, position, history))
        return found


class _End(NamedTuple):
    """What a connection sends of a writer: its last POSITION, and the history."""

    endpoint: str
    position: Token
    history: History


def _has_more(one: _End, other: _End) -> bool:
    """Whether one end has what the other one lacks: an epoch, or facts from after the other's next epoch began."""
    newest = one.history[-1].name
    names = [epoch.name for epoch in other.history]
    if newest not in names:
        return True
    following = other.history[names.index(newest) + 1 :]
    return bool(following) and following[0].start < one.position
