"""A restore of Synapse's database: what is followed goes back to where the database ends.

Over Redis, a lower position of a writer does not show a restore: a process that was started again may send one, too.
But on a primary server neither the stored positions nor the newest row go back, unless facts were lost
(docs/protocol/redis.md, Restores).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twisted.logger import Logger

from replication.follower.stream import FollowMode
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from replication.follower.audit import IAuditSource
    from replication.follower.stream import StreamFollower
    from replication.streams.cursor import Cursor
    from replication.wire.grammar import InstanceName, StreamName

    _Positions = Mapping[StreamName, Mapping[InstanceName, Token]]
    _Writers = Mapping[StreamName, Collection[InstanceName]]
    _Ends = Mapping[StreamFollower, Mapping[InstanceName, Token]]

log: Final = Logger()


async def find_restored(
    source: IAuditSource, followers: Iterable[StreamFollower], stored: _Positions, former: _Writers
) -> _Ends:
    """Return where writers end in the database, of the streams of which it has lost facts that were applied here.

    ``stored`` are the positions in the database.  A stream without stored positions is left out: it has moved to
    another process, if it had some.  Positions of ``former`` writers show nothing: their last rows may be above all
    stored positions, and be deleted.
    """
    found = {}
    for follower in followers:
        positions, current = stored.get(follower.name, {}), _current(follower)
        end, reached = max(positions.values(), default=Token(0)), _reached(follower, former.get(follower.name, ()))
        lower = {  # at a former check, the stored positions of these writers were above those of now
            writer: positions[writer]
            for writer in current.keys() & positions.keys()
            if positions[writer] < follower.checked.get(writer, Token(0))
        }
        if not positions or not (lower or end < reached):
            continue
        if end < reached:  # an ID was rolled back, or a process was killed before it stored its position, or a restore
            end = max(end, await source.last_row(follower.name))
        if end < reached and (lower or (follower.known and await follower.known.find(Token(end + 1), reached))):
            found[follower] = dict.fromkeys(current, end)
        elif lower:  # other writers have passed what is lost
            found[follower] = dict.fromkeys(current, min(lower.values())) if _can_repeat(follower) else lower
    return found


async def go_back(source: IAuditSource, followers: Iterable[StreamFollower], ends: _Ends) -> None:
    """Follow each writer from where it ends in the database.

    A stream without stored positions ends at its last row.
    """
    for follower in followers:
        current = _current(follower)
        of_writers = ends.get(follower, {})
        if follower not in ends and not source.stores_positions(follower.name):
            of_writers = dict.fromkeys(current, await source.last_row(follower.name))
        for writer, end in of_writers.items():
            cursor = current.get(writer)
            if cursor is None or cursor.published <= end:
                continue
            log.error(
                "{stream}: the facts of {writer} end at {end} in {source}, and {reached} was received: it was restored",
                stream=follower.name,
                writer=writer,
                end=end,
                source=source.name,
                reached=cursor.published,
            )
            link = cursor.link
            cursor.link_lost(link)  # as if the writer sent its lower position on a new connection
            cursor.position_received(link, end, end)
        follower.resume()


def _can_repeat(follower: StreamFollower) -> bool:
    """Whether facts that are fetched again are applied once: what was applied is deleted, or undone."""
    return follower.mode is FollowMode.COPIED or follower.application.undo is not None


def _current(follower: StreamFollower) -> dict[InstanceName, Cursor]:
    """Return the cursors that follow a link, and do not go back already."""
    return {writer: cursor for writer, cursor in follower.cursors.items() if cursor.linked and cursor.confirmed}


def _reached(follower: StreamFollower, without: Collection[InstanceName]) -> Token:
    return max((each.position for of, each in _current(follower).items() if of not in without), default=Token(0))
