"""What a retention has deleted from a database: no segment claims to have it (docs/operations.md, Retention)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.errors import StoreError
from replication.storage.tables.kept_facts import ALL, EXISTS
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.segments.databases import Database
    from replication.segments.run import StreamRange


def check_kept(database: Database, part: StreamRange) -> None:
    """Raise StoreError if a fact of a range may be deleted: it names where a replay can begin.

    What is gone stays gone, so a range that was read before this call was read whole.
    """
    gone = _read_gone(database)
    for each in part.writers:
        upto = gone.get((part.definition.name, each.instance), Token(0))
        if each.after < upto:
            raise StoreError(
                f"facts of {part.definition.name} by {each.instance} up to {upto} are gone from {database.url!r}, and "
                f"the segments would begin after {each.after}: write to a new folder, with "
                f"--stream {part.definition.name} --from {upto}"
            )


def _read_gone(database: Database) -> Mapping[tuple[StreamName, InstanceName], Token]:
    if not any(exists for (exists,) in database.rows(EXISTS[database.dialect])):
        return {}
    return {(StreamName(stream), InstanceName(writer)): Token(upto) for stream, writer, upto in database.rows(ALL)}
