"""The two edges of what we have of a room: where it grows, and where its past is missing (``protocol``, H4 and H5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from replication.rooms.event import Event
    from replication.rooms.seams import IRoomTables


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


def missing(tables: IRoomTables, events: Iterable[Event]) -> set[str]:
    """Return the ``prev_events`` that are not stored, or as outliers only: candidates for backward extremities."""
    named = {each for event in events for each in event.prev_event_ids}
    known = tables.stored(named)
    return {each for each in named if each not in known or known[each].outlier}
