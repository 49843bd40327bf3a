"""Streams about users: presence, push rules, pushers, account data, tags."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from replication.streams.definitions import SourceTable
from replication.streams.typed_rows import Flag, History, Row, typed_stream

if TYPE_CHECKING:
    from replication.streams.definitions import Dialect


class PresenceRow(Row, frozen=True):
    """The presence of a user; times are in milliseconds."""

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
    """A user's account data of one type have changed, in a room, or global if ``room_id`` is None."""

    user_id: str
    room_id: str | None
    data_type: str


class TagAccountDataRow(Row, frozen=True):
    """A user's tags of a room; ``data`` is JSON text."""

    user_id: str
    room_id: str
    data: str


PRESENCE: Final = typed_stream(
    "presence",
    PresenceRow,
    History.NEWEST,
    table="presence_stream",
    instance_column="instance_name",
    key=("user_id",),
    sequence="presence_stream_sequence",
)

PUSH_RULES: Final = typed_stream(
    "push_rules", PushRulesRow, tables=[SourceTable(table="push_rules_stream", row=["user_id"])]
)

PUSHERS: Final = typed_stream(
    "pushers",
    PusherRow,
    History.NEWEST,  # of pushers that are set; all deletions remain
    tables=[
        SourceTable(table="pushers", id_column="id", row=["user_name", "app_id", "pushkey", "1 = 0"]),
        SourceTable(table="deleted_pushers", row=["user_id", "app_id", "pushkey", "1 = 1"]),
    ],
    boolean_fields=["deleted"],
    key=("user_id", "app_id", "pushkey"),
)


def _tags(dialect: Dialect, encoded: str) -> SourceTable:
    """Return the table of a user's current tags, in byte order, which is the order of their index."""
    mine = "FROM room_tags WHERE room_tags.user_id = source.user_id AND room_tags.room_id = source.room_id"
    return SourceTable(
        table="room_tags_revisions",
        row=["user_id", "room_id", f"'{{' || coalesce((SELECT {encoded.format(mine=mine)}), '') || '}}'"],
        instance_column="instance_name",
        dialect=dialect,
    )


TAG_ACCOUNT_DATA: Final = typed_stream(
    "tag_account_data",
    TagAccountDataRow,
    History.NEWEST,  # with the current tags
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
)

ACCOUNT_DATA: Final = typed_stream(
    "account_data",
    AccountDataRow,
    History.NEWEST,
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
)
