"""What servers tell each other and themselves: caches, what federation has to send, groups."""

from __future__ import annotations

from typing import Any, Final

from replication.streams import registry
from replication.streams.registry import SourceTable, StreamDefinition
from replication.streams.typed import History, Row, TypedStream


class CachesRow(Row, frozen=True):
    """A cache is no longer right at ``keys``, as texts, or, where that is None, anywhere; the time in milliseconds."""

    cache_func: str
    keys: list[str] | None
    invalidation_ts: int | None


class PresenceFederationRow(Row, frozen=True):
    """A server is to be told of a user's presence."""

    destination: str
    user_id: str


class FederationRow(Row, frozen=True):
    """What a server is to be sent: ``pd`` presence and for whom, ``k`` an EDU that replaces others, ``e`` an EDU."""

    type: str
    data: dict[str, Any]


class GroupsRow(Row, frozen=True):
    """What became of a user in a group; until 1.60."""

    group_id: str
    user_id: str
    type: str
    content: dict[str, Any]


CACHES: Final[TypedStream[CachesRow]] = TypedStream(
    StreamDefinition(
        registry.CACHES,
        row=CachesRow.names(),
        table="cache_invalidation_stream_by_instance",
        instance_column="instance_name",
        dialect="postgresql",
        key=("cache_func", "keys"),
        sequence="cache_invalidation_stream_seq",
    ),
    CachesRow,
)

PRESENCE_FEDERATION: Final[TypedStream[PresenceFederationRow]] = TypedStream(
    StreamDefinition("presence_federation", row=PresenceFederationRow.names(), in_memory=True),
    PresenceFederationRow,
    History.NONE,
)

FEDERATION: Final[TypedStream[FederationRow]] = TypedStream(
    StreamDefinition("federation", row=FederationRow.names(), in_memory=True), FederationRow, History.NONE
)

GROUPS: Final[TypedStream[GroupsRow]] = TypedStream(
    StreamDefinition(
        "groups",
        row=GroupsRow.names(),
        tables=[SourceTable(table="local_group_updates", row=GroupsRow.names())],
        json_fields=["content"],
    ),
    GroupsRow,
)
