"""Histories of writers, by which a streaming query or a batch ends if a writer was restored (docs/spark.md).

An offset is the map from writer to position.  Under HISTORIES it has the newest epochs of each writer, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from replication.errors import StreamError
from replication.streams.history import Epoch, read_position
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.spark.options import Offsets
    from replication.streams.history import History

HISTORIES: Final = "histories of writers"  # no instance name has a space
KEPT: Final = 100  # epochs, about 4 kB.  A copy that lags by more starts of its writer looks like another database

_CURE: Final = "begin a new checkpoint, and write to an empty sink"


def positions_of(offset: Mapping[str, Any]) -> Offsets:
    """Return the position of each writer in an offset."""
    return {name: position for name, position in offset.items() if name != HISTORIES}


def make_offset(positions: Offsets, start: Mapping[str, Any], histories: Mapping[str, History]) -> dict[str, Any]:
    """Return an offset with these positions; the history in ``start`` stays if the new one is unknown or older."""
    former = start.get(HISTORIES, {})
    known = {
        name: [[*epoch] for epoch in history[-KEPT:]]
        for name, history in histories.items()
        if history and not _is_behind(history, former.get(name, ()))
    }
    kept = {**former, **known}
    offset = {**positions, HISTORIES: dict(sorted(kept.items()))} if kept else positions
    return dict(sorted(offset.items()))  # Spark compares offsets as text


def check_histories(stream: str, start: Mapping[str, Any], histories: Mapping[str, History]) -> None:
    """Raise StreamError if rows up to the offset ``start`` are not those of the writers' histories.

    It is raised, too, if a new writer has the facts of one in ``start``: it was renamed.
    """
    known = {epoch[0]: name for name, epochs in start.get(HISTORIES, {}).items() for epoch in epochs}
    for name in sorted(histories.keys() - start.keys() - start.get(HISTORIES, {}).keys()):
        if former := [known[epoch.name] for epoch in histories[name] if epoch.name in known]:
            raise StreamError(
                f"{former[0]} of {stream} was renamed to {name}: this query would read its rows again under that "
                f"name; {_CURE}"
            )
    for name, epochs in start.get(HISTORIES, {}).items():
        theirs, position = histories.get(name, ()), start.get(name, 0)
        if not theirs or _is_behind(theirs, epochs):
            continue
        common = read_position([Epoch(*each) for each in epochs], theirs, Token(position))
        if common is None and position > 1:
            raise StreamError(
                f"the history of {stream} at {name} is not the one that this query has read up to {position}: was the "
                f"database emptied or exchanged? Start it with the right database, or {_CURE}. A copy that lags by "
                f"{KEPT} starts of {name} gives the same error: let it catch up, then start this query again"
            )
        if common is not None and common < position:
            raise StreamError(
                f"{name} of {stream} was restored from a backup: its rows above {common} are lost, and this query has "
                f"read up to {position}; {_CURE}"
            )


def _is_behind(history: History, read: Sequence[Sequence[Any]]) -> bool:
    """Whether a history lacks the newest epoch that a query has read: a copy has not followed it yet.

    After a restore, a writer begins another epoch before it publishes.
    """
    return history[-1].name in [name for name, *_ in read[:-1]]


def check_unchanged(stream: str, writer: str, upto: int, planned: History, now: History) -> None:
    """Raise StreamError if facts up to ``upto`` are not of the history that was there when a batch began."""
    if not planned or not now:
        return
    common = read_position(planned, now, Token(upto))
    if common is None or common < upto:
        what = "was restored from a backup" if common is not None else "was emptied or exchanged"
        raise StreamError(
            f"the database of {writer} {what} while {stream} was read up to {upto}: the batch has rows that "
            "are lost now: start the batch again"
        )
