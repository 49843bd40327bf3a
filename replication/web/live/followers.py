"""The followers that report their positions here, as HTML: a retention keeps what they lack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.errors import ReplicationError
from replication.web.live.tables import MAX_ROWS, show_time, table, text

if TYPE_CHECKING:
    from replication.net.access import Rights
    from replication.streams.interfaces import KnownFollower
    from replication.web.site import IServed
    from replication.wire.grammar import InstanceName, StreamName, Token

    Positions = dict[tuple[StreamName, InstanceName], Token]


async def followers_section(served: IServed, rights: Rights) -> str:
    """Return the table of followers, those that are furthest behind first, for an admin.

    It is empty if this process takes no reports.
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
    behind = sorted([(_lag(each, published), each) for each in known], key=lambda pair: (-pair[0][0], pair[1].name))
    rows = [
        [text(each.name), show_time(each.reported_at), f"{lag:,}", text(where)]
        for (lag, where), each in behind[:MAX_ROWS]
    ]
    heads = ("name", "reported", "#IDs behind", "on")
    return table("Followers that report", heads, rows, "No follower has reported its positions.")


def _lag(follower: KnownFollower, published: Positions) -> tuple[int, str]:
    """Return how far a follower was behind at most, and on which stream of which writer."""
    found = [
        (published[stream, writer] - position, f"{stream} of {writer}")
        for stream, writers in follower.positions.items()
        for writer, position in writers.items()
        if (stream, writer) in published
    ]
    lag, where = max(found, default=(0, ""))
    return (lag, where) if lag > 0 else (0, "-")
