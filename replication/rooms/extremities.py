"""The two edges of what we have of a room: where it grows, and where its past is missing (``protocol``, H4 and H5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from replication.rooms.event import Event
    from replication.rooms.resolution import Fetch
    from replication.rooms.seams import IRoomTables

DUMMY: Final = "org.matrix.dummy_event"  # joins extremities, and says nothing itself
STUCK: Final = 100  # depths behind that are many
STUCK_MS: Final = 24 * 60 * 60 * 1000
STUCK_BESIDE: Final = 20  # depths behind that are many for an event of a server that speaks now


def new_forward(tables: IRoomTables, old: Collection[str], good: Sequence[Event]) -> set[str]:
    """Return the forward extremities after ``good`` events (no outliers, not rejected, not soft-failed) were stored.

    An event behind a soft-failed one would never be a ``prev_event`` of a good one, and stay for ever (trap 49): so we
    walk back from the new events through those that are not good.  Backfill can put a good event behind the last
    extremity without becoming one itself; that extremity stays, for a room without any could never grow again.
    """
    named = {each for event in good for each in event.prev_event_ids}
    found = ({*old} | {event.event_id for event in good}) - named
    found -= tables.behind_good(found)
    return (found - _behind_bad(tables, named)) or set(old)


def _behind_bad(tables: IRoomTables, event_ids: Collection[str]) -> set[str]:
    behind: set[str] = set()
    edge = set(event_ids)
    while edge:
        known = tables.stored(edge)
        bad = {each for each, stored in known.items() if not stored.outlier and not stored.is_good}
        edge = {prev for _, prev in tables.edges_from(bad)} - behind if bad else set()
        behind |= edge
    return behind


def are_stuck(
    ends: Collection[str], new: Sequence[Event], fetch: Fetch, *, is_local: Callable[[str], bool], now: int
) -> bool:
    """Whether forward extremities that add nothing to the state may all go: nobody will ever follow them.

    So it is where each is remote and far behind the ``new`` events, none of which they are; ``fetch`` returns events
    with their depths.  ``now`` is in milliseconds of Unix time.
    """
    if not {event.event_id for event in new}.isdisjoint(ends):
        return False
    depth = max(_depth(event) for event in fetch([event.event_id for event in new]).values())
    servers = {_server(event) for event in new}
    for event in fetch(ends).values():
        behind = depth - _depth(event)
        old = event.origin_server_ts < now - STUCK_MS and behind > STUCK
        if not old and not (behind > STUCK_BESIDE and _server(event) in servers):
            return False
    return not _any_local(ends, fetch, is_local)


def _any_local(event_ids: Collection[str], fetch: Fetch, is_local: Callable[[str], bool]) -> bool:
    """Whether one of them is ours, or a dummy of ours that something of ours is before."""
    while event_ids:
        mine = [event for event in fetch(event_ids).values() if is_local(event.sender)]
        if any(event.type != DUMMY for event in mine):
            return True
        event_ids = {prev for event in mine for prev in event.prev_event_ids}
    return False


def _depth(event: Event) -> int:
    return event.depth or 0


def _server(event: Event) -> str:
    return event.sender.partition(":")[2]


def missing(tables: IRoomTables, events: Iterable[Event]) -> set[str]:
    """Return the ``prev_events`` that are not stored, or as outliers only: candidates for backward extremities."""
    named = {each for event in events for each in event.prev_event_ids}
    known = tables.stored(named)
    return {each for each in named if each not in known or known[each].outlier}
