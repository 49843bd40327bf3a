"""Streams between servers and processes: caches, federation, groups."""

from __future__ import annotations

from typing import Any, Final

from replication.streams import definitions as registry
from replication.streams.definitions import SourceTable
from replication.streams.typed_rows import History, Row, typed_stream


class CachesRow(Row, frozen=True):
    """The entry ``keys`` of a cache is stale, or all entries if ``keys`` is None; the time is in milliseconds."""

    cache_func: str
    keys: list[str] | None
    invalidation_ts: int | None


class PresenceFederationRow(Row, frozen=True):
    """The presence of a user must be sent to a server."""

    destination: str
    user_id: str


class FederationRow(Row, frozen=True):
    """Data for a server: ``pd`` presence with its destinations, ``k`` an EDU with a key, ``e`` an EDU."""

    type: str
    data: dict[str, Any]


class GroupsRow(Row, frozen=True):
    """A change of a user's membership in a group; until Synapse 1.60."""

    group_id: str
    user_id: str
    type: str
    content: dict[str, Any]


CACHES: Final = typed_stream(
    registry.CACHES,
    CachesRow,
    table="cache_invalidation_stream_by_instance",
    instance_column="instance_name",
    dialect="postgresql",
    key=("cache_func", "keys"),
    sequence="cache_invalidation_stream_seq",
)

PRESENCE_FEDERATION: Final = typed_stream("presence_federation", PresenceFederationRow, History.NONE, in_memory=True)

FEDERATION: Final = typed_stream("federation", FederationRow, History.NONE, in_memory=True)

GROUPS: Final = typed_stream(
    "groups",
    GroupsRow,
    tables=[SourceTable(table="local_group_updates", row=GroupsRow.names())],
    json_fields=["content"],
)
