"""The history in segments, as HTML: what the folders have that this process reads, or waits for before it deletes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.errors import ReplicationError
from replication.web.live.tables import MAX_ROWS, table, text

if TYPE_CHECKING:
    from replication.net.access import Rights
    from replication.web.site import IServed


async def segments_section(served: IServed, rights: Rights) -> str:
    """Return the table of segments; empty if this process knows no folder, or none with a stream of the viewer."""
    try:
        chains = [each for each in await served.segments() if rights.may_see(each.stream)]
    except ReplicationError as error:
        return f"<h2>History in segments</h2><p>{text(error)}</p>"
    if not chains:
        return ""
    rows = [
        [
            text(each.stream),
            text(each.writer),
            f"{each.after:,}",
            f"{each.upto:,}",
            f"{each.rows:,}",
            f"{each.stored_size:,}",
            text(each.folder),
        ]
        for each in chains[:MAX_ROWS]
    ]
    more = f"<p>{len(chains) - MAX_ROWS:,} more rows.</p>" if len(chains) > MAX_ROWS else ""
    heads = ("stream", "writer", "#after", "#up to", "#rows", "#bytes", "folder")
    return table("History in segments", heads, rows, "") + more
