"""A restore of Synapse's database: what is followed goes back to where the database ends.

Over Redis, a lower position of a writer does not show a restore: a process that was started again may send one, too.
But on a primary server, neither the stored positions nor the rows of a stream that keeps them go back, unless facts
were lost (docs/protocol/redis.md, Restores).  A position that is far above all of them is wrong: its writer goes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
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

# A position so far above the end of its stream is wrong: no IDs are rolled back in such numbers.  A smaller error ends
# by itself once the writer has passed it.
FAR: Final = 1_000_000

RESTORED: Final = (
    "{stream}: {source} was restored: {writer} was received up to {reached}, and is followed again from {end}"
)
WRONG: Final = (
    "{stream}: {source} lacks what a position in Redis announced: {writer} was received up to {reached}, "
    "and is followed again from {end}"
)

log: Final = Logger()


class Reached(msgspec.Struct, frozen=True):
    """Up to where facts of a stream are applied, and up to where those of each writer were compared."""

    applied: Token
    compared: Mapping[InstanceName, Token]


def positions_reached(followers: Iterable[StreamFollower], former: _Writers) -> dict[StreamFollower, Reached]:
    """Return what each follower has reached.

    Positions of ``former`` writers show nothing: their last rows may be above all stored positions, and be deleted.
    """
    found = {}
    for follower in followers:
        without = former.get(follower.name, ())
        current = {writer: cursor for writer, cursor in _current(follower).items() if writer not in without}
        applied = max((cursor.position for cursor in current.values()), default=Token(0))
        # Where only the position is followed, nothing was compared up to where that began.
        compares = follower.mode is not FollowMode.POSITION_ONLY
        compared = {writer: follower.checked[writer] for writer in current.keys() & follower.checked.keys() if compares}
        found[follower] = Reached(applied, compared)
    return found


async def find_restored(
    source: IAuditSource, reached: Mapping[StreamFollower, Reached], stored: _Positions, seen: _Positions
) -> _Ends:
    """Return the streams of which the database has lost applied facts, with the token from which to follow each writer.

    ``stored`` are the positions in the database, read after ``reached``: a process publishes a fact before it stores
    its position.  ``seen`` are the largest that were stored at former checks.  A stream without stored positions is
    left out.  If it had some, it has moved to another process.  ``caches`` never has any: there, both have the newest
    row of each writer.
    """
    found: dict[StreamFollower, dict[InstanceName, Token]] = {}
    for follower, each in reached.items():
        positions, current = stored.get(follower.name, {}), _current(follower)
        end, before = max(positions.values(), default=Token(0)), seen.get(follower.name, {})
        lower = {
            writer: positions[writer]
            for writer in current.keys() & positions.keys()
            if positions[writer] < before.get(writer, Token(0))
        }
        if not source.stores_positions(follower.name):  # old rows are deleted: only a lower newest row counts
            if lower:
                found[follower] = dict.fromkeys(current, end)  # no writer has a row above end
                if not _can_repeat(follower):
                    found[follower].update(lower)
            continue
        # A writer without a stored position has written nothing: it was compared up to the position that it has sent.
        compared = max((each.compared.get(writer, Token(0)) for writer in positions), default=Token(0))
        beyond = end < max(each.applied, compared)
        if not positions or not (lower or beyond):
            continue
        if beyond:  # an ID was rolled back, or a process was killed before it stored its position, or a restore
            end = max(end, await source.last_row(follower.name))
        far = each.applied - end > FAR  # a wrong position, unless there is more that shows a restore
        gone = end < each.applied and (lower or (not far and await _are_applied(source, follower, end, each.applied)))
        if gone or end < compared:
            # An ID may have been open at the backup.  The stored position of its writer is below it.
            settled = min([end, *lower.values()]) if _can_repeat(follower) else end
            found[follower] = dict.fromkeys(current, settled)
        elif lower:  # other writers have passed what is lost
            found[follower] = dict.fromkeys(current, min(lower.values())) if _can_repeat(follower) else lower
    return found


async def go_back(source: IAuditSource, followers: Iterable[StreamFollower], ends: _Ends, stored: _Positions) -> None:
    """Follow each writer from where it ends in the restored database: in ``ends``, or at the end of its stream."""
    for follower in followers:
        current, of_writers, positions = _current(follower), ends.get(follower), stored.get(follower.name, {})
        if follower.mode is FollowMode.COPIED and not source.keeps_rows(follower.name):
            await follower.compare_all_again()  # rows that later ones had replaced are in the database again
        if of_writers is None and (positions or not source.stores_positions(follower.name)):
            end = max([await source.last_row(follower.name), *positions.values()])
            of_writers = dict.fromkeys(current, end)
        for writer, end in (of_writers or {}).items():
            cursor = current.get(writer)
            if cursor is None or cursor.published <= end:
                continue
            _follow_from(follower, writer, end, source, RESTORED)
        follower.resume()


async def follow_below_wrong(source: IAuditSource, followers: Iterable[StreamFollower], stored: _Positions) -> None:
    """Follow writers whose position is FAR above the end of their stream from that end.

    A position that was wrong once would be kept: later facts of its writer would be dropped as repeated ones.
    ``stored`` as for ``find_restored``.  Where nothing is stored, nothing shows a wrong position.
    """
    for follower in followers:
        positions = stored.get(follower.name, {})
        end = max(positions.values(), default=Token(0))
        far = {writer: each for writer, each in _current(follower).items() if each.position > end + FAR}
        if not positions or not far or not await source.is_primary():
            continue
        end = max(end, await source.last_row(follower.name))
        for writer, cursor in far.items():
            if cursor.position > end + FAR and cursor.linked and cursor.confirmed:
                _follow_from(follower, writer, end, source, WRONG)
        follower.resume()


def _follow_from(
    follower: StreamFollower, writer: InstanceName, end: Token, source: IAuditSource, message: str
) -> None:
    """Lower the position of a writer, as if it sent the lower one on a new connection, and log the message."""
    cursor = follower.cursors[writer]
    reached = cursor.published
    log.error(message, stream=follower.name, source=source.name, writer=writer, reached=reached, end=end)
    link = cursor.link
    cursor.link_lost(link)
    cursor.position_received(link, end, end)


async def _are_applied(source: IAuditSource, follower: StreamFollower, end: Token, applied: Token) -> bool:
    """Whether facts above the end of a stream were applied whose rows would still be there."""
    if follower.known is None or not source.keeps_rows(follower.name):
        return False
    return bool(await follower.known.find(Token(end + 1), applied))


def _can_repeat(follower: StreamFollower) -> bool:
    """Whether facts that are fetched again are applied once: what was applied is deleted, or undone."""
    return follower.mode is FollowMode.COPIED or follower.application.undo is not None


def _current(follower: StreamFollower) -> dict[InstanceName, Cursor]:
    """Return the cursors that follow a link, and neither compare histories nor go back now."""
    return {writer: cursor for writer, cursor in follower.cursors.items() if cursor.linked and cursor.confirmed}
