"""Writers that no process knows any more, although this process has their facts.

No process sends the position of a writer that its database does not have.  So a follower keeps the facts of a renamed
or removed writer after the database was emptied or exchanged.  Only the lists of writers at other processes show that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
from twisted.logger import Logger

from replication.deferreds import start_alone
from replication.errors import ReplicationError
from replication.follower.confirmed_notes import LONGEST_PAUSE, ConfirmedNotes
from replication.session.encoder import FIRST_GAP
from replication.streams.definitions import CACHES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from replication.deferreds import Lifetime
    from replication.follower.links import FollowedLinks
    from replication.follower.stream import StreamFollower
    from replication.web.client import HttpCatchUp
    from replication.wire.grammar import InstanceName, StreamName

CONFIRMED_AFTER: Final = 20.0  # seconds between the two looks; a takeover takes 6 s, and 12 s if it fails once
OF_DATABASE: Final = {"writing", "elsewhere", "former"}  # states of a writer at a process that has the database


@attrs.define(eq=False, repr=False, kw_only=True)
class LostWriters:
    """Finds the writers of which this process has facts, and which no followed process knows.

    Args:
        instance_name: of this process.
        links: to the processes that are followed.
        followers: of all streams.
        over_http: returns the HTTP sources for an endpoint.
        lifetime: of this process.
        patience: seconds in which a process that has sent SERVER sends all positions.

    """

    log = Logger()

    _instance_name: InstanceName
    _links: FollowedLinks
    _followers: Iterable[StreamFollower]
    _over_http: Callable[[str], Sequence[HttpCatchUp]]
    _lifetime: Lifetime
    _patience: float
    _looks: int = attrs.field(init=False, default=0)
    _notes: ConfirmedNotes = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Log each note once."""
        self._notes = ConfirmedNotes(lambda note: self.log.warn("{note}", note=note), CONFIRMED_AFTER)

    def following(self) -> None:
        """Look for such writers, after a connection has sent its first positions; an earlier look ends."""
        self._looks += 1
        start_alone(self._look(self._looks))

    def notes(self, stream: StreamName) -> Sequence[str]:
        """Return a sentence for each such writer of a stream, as the last look has found them."""
        return self._notes.of(stream)

    # ---- inside

    async def _look(self, number: int) -> None:
        """Note what two looks in a row have found: a process may be about to take over the name of a writer.

        As long as there is a note, look again: it ends once a process knows that writer.
        """
        self._notes.begin()
        pause: float | None = self._patience
        while pause is not None:
            await self._lifetime.sleep(pause)
            if not self._is_complete(number):
                return
            try:
                found = await self._find_all()
            except ReplicationError:  # a process or the store does not answer
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if not self._is_complete(number):
                return
            pause = self._notes.look(found)

    def _is_complete(self, number: int) -> bool:
        """Whether all processes are connected, and this is the last look; over Redis, any process may be silent."""
        following = all(link.state == "following" for link in self._links)
        return number == self._looks and following and not self._links.over_redis() and not self._lifetime.ended

    async def _known(self) -> Mapping[StreamName, set[InstanceName]]:
        """Return the writers of each stream in the databases; CatchUpError if a process does not answer.

        A stream that a relay has is left out: a relay knows only the writers that it has followed.
        """
        known: dict[StreamName, set[InstanceName]] = {}
        relayed = set()
        for http in dict.fromkeys(http for link in self._links for http in self._over_http(link.endpoint)):
            for stream, writers in (await http.audited() or {}).items():
                known.setdefault(stream, set()).update(writers)
                if not any(each.state in OF_DATABASE for each in writers.values()):
                    relayed.add(stream)
        return {stream: writers for stream, writers in known.items() if stream not in relayed}

    async def _find_all(self) -> dict[StreamName, list[str]]:
        known = await self._known()
        return {each.name: await self._find(each, known[each.name]) for each in self._followers if each.name in known}

    async def _find(self, follower: StreamFollower, known: set[InstanceName]) -> list[str]:
        if follower.histories is None or follower.name == CACHES:
            return []
        known = {*known, self._instance_name}
        return [
            f"no followed process knows writer {writer!r} of stream {follower.name!r} any more, and its facts up to "
            f"{position} stay here: was the database emptied or exchanged? The cure is in docs/operations.md, Backups"
            for writer, position in sorted(follower.all_positions().items())
            if position >= FIRST_GAP
            and writer not in known
            and not follower.is_linked(writer)
            and await follower.histories.followed(writer)
        ]
