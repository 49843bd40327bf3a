"""Forward and backward extremities (docs/protocol/rooms.md H4, docs/protocol/rooms.md H5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from replication.rooms.event import Event
    from replication.rooms.interfaces import IRoomTables
    from replication.rooms.resolution import Fetch

DUMMY: Final = "org.matrix.dummy_event"  # only joins forward extremities
STUCK: Final = 100  # depths by which an old extremity must be below the new events
STUCK_MS: Final = 24 * 60 * 60 * 1000
STUCK_BESIDE: Final = 20  # the same for an extremity of a server that has sent one of the new events


def new_forward(tables: IRoomTables, old: Collection[str], good: Sequence[Event]) -> set[str]:
    """Return the forward extremities after ``good`` events (no outliers, not rejected, not soft-failed) were stored.

    Events that a good event reaches only through soft-failed ones are removed, too: no good event would ever name
    them (docs/protocol/traps.md 49).  If nothing is left, the old extremities stay, because a room without forward
    extremities could not grow.
    """
    named = {each for event in good for each in event.prev_event_ids}
    found = ({*old} | {event.event_id for event in good}) - named
    found -= tables.followed_by_good(found)
    return (found - _behind_bad(tables, named)) or set(old)


def _behind_bad(tables: IRoomTables, event_ids: Collection[str]) -> set[str]:
    behind: set[str] = set()
    edge = set(event_ids)
    while edge:
        bad = {each for each, stored in tables.metadata(edge).items() if not stored.is_good}
        edge = {prev for _, prev in tables.edges_from(bad)} - behind if bad else set()  # none are from outliers
        behind |= edge
    return behind


def are_stuck(
    ends: Collection[str], new: Sequence[Event], fetch: Fetch, *, is_local: Callable[[str], bool], now: int
) -> bool:
    """Return whether the forward extremities ``ends``, which do not affect the state, may be removed.

    They may if all are remote, none is a ``new`` event, and all are far below the new events.

    Args:
        ends: event IDs.
        new: the events that are being persisted.
        fetch: returns events with their depths.
        is_local: whether a user ID belongs to this server.
        now: Unix time in milliseconds.

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
    """Return whether an event is local, or a local dummy that follows a local event."""
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
    """Return the ``prev_events`` that are missing or outliers: candidates for backward extremities."""
    named = {each for event in events for each in event.prev_event_ids}
    known = tables.metadata(named)
    return {each for each in named if each not in known or known[each].outlier}
