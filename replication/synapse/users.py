"""What users have: presence, push rules and pushers, account data and tags."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from replication.streams.registry import SourceTable, StreamDefinition
from replication.streams.typed import Flag, History, Row, TypedStream

if TYPE_CHECKING:
    from replication.streams.registry import Dialect


class PresenceRow(Row, frozen=True):
    """How present a user is; times are milliseconds."""

    FLAGS: ClassVar[tuple[str, ...]] = ("currently_active",)

    user_id: str
    state: str
    last_active_ts: int
    last_federation_update_ts: int
    last_user_sync_ts: int
    status_msg: str | None
    currently_active: Flag


class PushRulesRow(Row, frozen=True):
    """A user's push rules have changed."""

    user_id: str


class PusherRow(Row, frozen=True):
    """A pusher was set or deleted."""

    FLAGS: ClassVar[tuple[str, ...]] = ("deleted",)

    user_id: str
    app_id: str
    pushkey: str
    deleted: Flag


class AccountDataRow(Row, frozen=True):
    """A user's data of one type have changed, in a room or, where that is None, everywhere."""

    user_id: str
    room_id: str | None
    data_type: str


class TagAccountDataRow(Row, frozen=True):
    """A user's tags of a room; ``data`` is JSON in a text."""

    user_id: str
    room_id: str
    data: str


PRESENCE: Final[TypedStream[PresenceRow]] = TypedStream(
    StreamDefinition(
        "presence",
        row=PresenceRow.names(),
        table="presence_stream",
        instance_column="instance_name",
        key=("user_id",),
        sequence="presence_stream_sequence",
    ),
    PresenceRow,
    History.NEWEST,
)

PUSH_RULES: Final[TypedStream[PushRulesRow]] = TypedStream(
    StreamDefinition(
        "push_rules", row=PushRulesRow.names(), tables=[SourceTable(table="push_rules_stream", row=["user_id"])]
    ),
    PushRulesRow,
)

PUSHERS: Final[TypedStream[PusherRow]] = TypedStream(
    StreamDefinition(
        "pushers",
        row=PusherRow.names(),
        tables=[
            SourceTable(table="pushers", id_column="id", row=["user_name", "app_id", "pushkey", "1 = 0"]),
            SourceTable(table="deleted_pushers", row=["user_id", "app_id", "pushkey", "1 = 1"]),
        ],
        boolean_fields=["deleted"],
        key=("user_id", "app_id", "pushkey"),
    ),
    PusherRow,
    History.NEWEST,  # of those that were set: deletions stay
)


def _tags(dialect: Dialect, spelt: str) -> SourceTable:
    """Return a user's tags of today, in the order of their bytes, which is that of their index."""
    mine = "FROM room_tags WHERE room_tags.user_id = source.user_id AND room_tags.room_id = source.room_id"
    return SourceTable(
        table="room_tags_revisions",
        row=["user_id", "room_id", f"'{{' || coalesce((SELECT {spelt.format(mine=mine)}), '') || '}}'"],
        instance_column="instance_name",
        dialect=dialect,
    )


TAG_ACCOUNT_DATA: Final[TypedStream[TagAccountDataRow]] = TypedStream(
    StreamDefinition(
        "tag_account_data",
        row=TagAccountDataRow.names(),
        tables=[
            _tags(
                "sqlite",
                "group_concat(json_quote(tag) || ':' || content, ',') FROM (SELECT tag, content {mine} ORDER BY tag)",
            ),
            _tags(
                "postgresql",
                "string_agg(to_json(tag)::text || ':' || content, ',' ORDER BY tag COLLATE \"C\") {mine}",
            ),
        ],
        ascii_fields=["data"],
        key=("user_id", "room_id"),
        sequence="account_data_sequence",
    ),
    TagAccountDataRow,
    History.NEWEST,  # and with the tags of today
)

ACCOUNT_DATA: Final[TypedStream[AccountDataRow]] = TypedStream(
    StreamDefinition(
        "account_data",
        row=AccountDataRow.names(),
        tables=[
            SourceTable(
                table="account_data",
                row=["user_id", "CAST(NULL AS text)", "account_data_type"],
                instance_column="instance_name",
            ),
            SourceTable(
                table="room_account_data",
                row=["user_id", "room_id", "account_data_type"],
                instance_column="instance_name",
            ),
        ],
        key=AccountDataRow.names(),
        shares=TAG_ACCOUNT_DATA.name,
    ),
    AccountDataRow,
    History.NEWEST,
)
