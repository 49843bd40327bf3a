"""Streams that another program writes, such as a Synapse: their writers, and up to which ID their rows are complete.

That program stores its positions by rules of its own (``StreamDefinition.position_name``).
"""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from replication.errors import StoreError
from replication.segments.histories import TABLES
from replication.storage.joined import JoinedRows
from replication.storage.names import quoted
from replication.streams.history import Epoch
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.segments.databases import Database
    from replication.streams.definitions import StreamDefinition
    from replication.streams.history import History

PATIENCE: Final = 60.0  # seconds that a transaction with an ID may take
POLL_INTERVAL: Final = 0.1  # seconds
_OID: Final = "to_regclass('{}')::oid"
# A transaction holds this lock from its first nextval() on.
_HOLDERS: Final = (
    "SELECT virtualtransaction FROM pg_locks WHERE relation = to_regclass('{}') AND mode = 'RowExclusiveLock' "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


def foreign_positions(
    database: Database,
    definition: StreamDefinition,
    stored: Mapping[InstanceName, int],
    ends: Mapping[InstanceName, Token],
    upto: int | None,
) -> dict[InstanceName, Token]:
    """Return each writer's position.

    A writer that has rows and no stored position is a former one, so its newest row is its last.  Rows up to ``ends``
    are in segments: only those above are searched for writers.  The user knows that IDs up to ``upto`` are complete.
    StoreError: no position is known.
    """
    if definition.stored_name is None:
        return _without_positions(database, definition, ends, upto)
    positions = {writer: Token(abs(stream_id)) for writer, stream_id in stored.items()}
    after = min([ends.get(writer, Token(0)) for writer in positions], default=Token(0))
    for writer, newest in _newest(database, definition, after).items():
        positions.setdefault(writer, max(newest, ends.get(writer, newest)))
    return positions


def tables_history(database: Database, definition: StreamDefinition) -> History:
    """Return one epoch that names the tables of a stream: others are in their place after a dump was restored.

    It is empty on SQLite, whose tables have no such name.
    """
    if database.dialect != "postgresql":
        return ()
    tables = sorted({quoted(each.table) for each in definition.all_sources(database.dialect)})
    ((oids,),) = database.rows(f"SELECT concat_ws(' ', {', '.join(_OID.format(each) for each in tables)})")
    return (Epoch(TABLES + oids, Token(0), Token(0)),)


def _without_positions(
    database: Database, definition: StreamDefinition, ends: Mapping[InstanceName, Token], upto: int | None
) -> dict[InstanceName, Token]:
    """Return the last ID as the position of all writers, once no transaction has an ID up to it.

    A row is inserted in the transaction that allocates its ID.
    """
    last = max(_newest(database, definition, Token(0)).values(), default=None)
    if last is None:
        return {}
    if upto is None:
        _wait_for_transactions(database, definition)
    writers = _newest(database, definition, min(ends.values(), default=Token(0)))
    return dict.fromkeys([*writers, *ends], last)


def _wait_for_transactions(database: Database, definition: StreamDefinition) -> None:
    """Return once the transactions have ended that have IDs now; StoreError after PATIENCE seconds."""
    what = f"stream {definition.name!r}: it is not known which IDs are complete"
    if database.dialect != "postgresql" or definition.sequence is None:
        raise StoreError(f"{what}, because no position is stored: give --upto ID if every ID up to there is complete")
    if database.rows("SELECT 1 WHERE pg_is_in_recovery()"):
        raise StoreError(f"{what} on a standby: name the primary, or give --upto ID")
    sql = _HOLDERS.format(quoted(definition.sequence))
    began, holders = time.monotonic(), {*database.rows(sql)}
    while holders:
        if time.monotonic() - began > PATIENCE:
            raise StoreError(f"{what}: a transaction with an ID is in progress for {PATIENCE:g} s; try again later")
        time.sleep(POLL_INTERVAL)
        holders &= {*database.rows(sql)}


def _newest(database: Database, definition: StreamDefinition, after: Token) -> dict[InstanceName, Token]:
    """Return the newest token above one of each writer in a column of writers."""
    tables = JoinedRows[Any](definition, definition.all_sources(database.dialect), mark="", order="")
    queries = [each for each in tables.queries if each.source.instance_column is not None]
    found: dict[InstanceName, Token] = {}
    for writer, token in chain.from_iterable(database.rows(each.writers_above(after)) for each in queries):
        found[InstanceName(writer)] = max(Token(token), found.get(InstanceName(writer), Token(0)))
    return found
