"""The followers that report their positions here, as HTML: a retention keeps what they lack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.errors import ReplicationError
from replication.web.live.tables import MAX_ROWS, show_time, table, text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.net.access import Rights
    from replication.streams.interfaces import KnownFollower
    from replication.web.followers import ReportNote
    from replication.web.live.curves import Curves
    from replication.web.site import IServed
    from replication.wire.grammar import InstanceName, StreamName, Token

    Positions = dict[tuple[StreamName, InstanceName], Token]

FRESH: Final = 150.0  # seconds: an older report is compared with what is published now


async def followers_section(
    served: IServed, rights: Rights, notes: Mapping[str, ReportNote], curves: Curves, now: float
) -> str:
    """Return the table of followers, those that are furthest behind first, for an admin.

    A recent report is compared with what was published at its time, as far as ``curves`` has it.  ``now`` and the times
    of ``notes`` are of one clock.  It is empty if this process takes no reports.
    """
    if served.followers is None or not rights.admin:
        return ""
    try:
        known = await served.followers.followers()
    except ReplicationError as error:
        return f"<h2>Followers that report</h2><p>{text(error)}</p>"
    published: Positions = {
        (each.definition.name, writer.instance): writer.published
        for each in served.stream_statuses()
        for writer in each.writers
    }
    behind = []
    for each in known:
        note = notes.get(each.name)
        at = note.at if note is not None and now - note.at <= FRESH else None
        behind.append((_lag(each, published, curves, at), each, "-" if note is None else note.version or "-"))
    behind.sort(key=lambda row: (-row[0][0], row[1].name))
    rows = [
        [text(each.name), text(version), show_time(each.reported_at), f"{'' if known else '≤ '}{lag:,}", text(where)]
        for (lag, known, where), each, version in behind[:MAX_ROWS]
    ]
    heads = ("name", "version", "reported", "#IDs behind", "on")
    return table("Followers that report", heads, rows, "No follower has reported its positions.")


def _lag(follower: KnownFollower, published: Positions, curves: Curves, at: float | None) -> tuple[int, bool, str]:
    """Return the largest lag of a follower at a time, whether it is known, and the stream and its writer."""

    def reference(pair: tuple[StreamName, InstanceName]) -> tuple[int, bool]:
        then = None if at is None else curves.published(pair, at)
        return (published[pair], False) if then is None else (then, True)

    found = []
    for stream, writers in follower.positions.items():
        for writer, position in writers.items():
            if (stream, writer) in published:
                reached, known = reference((stream, writer))
                found.append((reached - position, known, f"{stream} of {writer}"))
    lag, known, where = max(found, default=(0, True, ""))
    return (lag, known, where) if lag > 0 else (0, True, "-")
