"""The streams of Synapse 1.159 to 1.163, which are followed over Redis: typed rows, and their tables in PostgreSQL.

A worker with ``definitions = ["replication.synapse.since_1_159"]`` reads missed facts from Synapse's own database, and
``replication replay`` writes segments from it (docs/how-to/follow-a-synapse.md).  Releases from 1.67 on have the same
rows where they have the stream and these tables.

    from replication.synapse.since_1_159 import RECEIPTS
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs

from replication import synapse
from replication.streams.definitions import SourceTable
from replication.streams.typed_rows import History, Row, TypedStream, typed_stream
from replication.synapse.rooms import BACKFILL_SINCE_1_159, EVENTS_SINCE_1_159
from replication.synapse.users import AccountDataRow, PusherRow, PushRulesRow

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ACCOUNT_DATA",
    "BACKFILL",
    "CACHES",
    "DEVICE_LISTS",
    "EVENTS",
    "FEDERATION",
    "PRESENCE",
    "PRESENCE_FEDERATION",
    "PROFILE_UPDATES",
    "PUSHERS",
    "PUSH_RULES",
    "QUARANTINED_MEDIA",
    "RECEIPTS",
    "STICKY_EVENTS",
    "STREAMS",
    "THREAD_SUBSCRIPTIONS",
    "TO_DEVICE",
    "TYPING",
    "UN_PARTIAL_STATED_EVENT",
    "UN_PARTIAL_STATED_ROOM",
]

_INSTANCE: Final = "instance_name"  # this column has the writer, except in the tables of account data


class ReceiptRow(Row, frozen=True):
    """The event up to which a user has read, in a thread or, if ``thread_id`` is None, in the whole room."""

    room_id: str
    receipt_type: str
    user_id: str
    event_id: str
    thread_id: str | None
    data: dict[str, Any]


class DeviceListsRow(Row, frozen=True):
    """The devices of a user have changed; or, if ``entity`` is a server, it must be notified of changes.

    ``is_signature``: the user has signed keys of other users.  ``hosts_calculated``: the row is for one server.
    """

    entity: str
    is_signature: bool
    hosts_calculated: bool


class StickyEventRow(Row, frozen=True):
    """A sticky event was sent; its row is deleted when it expires."""

    room_id: str
    event_id: str


class ThreadSubscriptionRow(Row, frozen=True):
    """A user has subscribed to a thread, or unsubscribed; ``event_id`` is the root of the thread."""

    user_id: str
    room_id: str
    event_id: str


class ProfileUpdateRow(Row, frozen=True):
    """The profile of a user has changed, or who can see it; ``fields``, which have any order, are those that changed.

    ``action`` is ``update``, ``joined_room`` or ``left_room``.
    """

    user_id: str
    action: str
    fields: list[str] | None


class QuarantinedMediaRow(Row, frozen=True):
    """A file was quarantined, or no longer is; ``origin`` is None for a file of this server."""

    origin: str | None
    media_id: str
    quarantined: bool


class UnPartialStatedRoomRow(Row, frozen=True):
    """The state of a room is complete, after a join that began without it."""

    room_id: str


class UnPartialStatedEventRow(Row, frozen=True):
    """The state at an event is complete; ``rejection_status_changed``: the event is now rejected, or no longer is."""

    event_id: str
    rejection_status_changed: bool


_R = TypeVar("_R")


def _stored_as(name: str, stream: TypedStream[_R]) -> TypedStream[_R]:
    """Return a stream of an older release, with its name in Synapse's ``stream_positions``."""
    return TypedStream(attrs.evolve(stream.definition, position_name=name), stream.row, stream.history)


TYPING: Final = synapse.TYPING
PRESENCE_FEDERATION: Final = synapse.PRESENCE_FEDERATION
FEDERATION: Final = synapse.FEDERATION
EVENTS: Final = _stored_as("events", EVENTS_SINCE_1_159)
BACKFILL: Final = _stored_as("backfill", BACKFILL_SINCE_1_159)
TO_DEVICE: Final = _stored_as("to_device", synapse.TO_DEVICE)
PRESENCE: Final = _stored_as("presence_stream", synapse.PRESENCE)
CACHES: Final = _stored_as("", synapse.CACHES)

RECEIPTS: Final = typed_stream(
    "receipts",
    ReceiptRow,
    History.NEWEST,
    tables=[SourceTable(table="receipts_linearized", row=ReceiptRow.names(), instance_column=_INSTANCE)],
    json_fields=["data"],
    key=("room_id", "receipt_type", "user_id", "thread_id"),
    sequence="receipts_sequence",
    position_name="receipts",
)

ACCOUNT_DATA: Final = typed_stream(
    "account_data",
    AccountDataRow,
    History.NEWEST,
    tables=[  # their instance_name is always NULL: the stream has one writer
        SourceTable(table="account_data", row=["user_id", "CAST(NULL AS text)", "account_data_type"]),
        SourceTable(table="room_account_data", row=["user_id", "room_id", "account_data_type"]),
        SourceTable(table="room_tags_revisions", row=["user_id", "room_id", "'m.tag'"]),
    ],
    key=AccountDataRow.names(),
    sequence="account_data_sequence",
    position_name="account_data",
)

PUSH_RULES: Final = typed_stream(
    "push_rules",
    PushRulesRow,
    tables=[SourceTable(table="push_rules_stream", row=["user_id"], instance_column=_INSTANCE)],
    sequence="push_rules_stream_sequence",
    position_name="push_rules_stream",
)

PUSHERS: Final = typed_stream(
    "pushers",
    PusherRow,
    History.NEWEST,  # of pushers that are set; all deletions remain
    tables=[
        SourceTable(
            table="pushers",
            id_column="id",
            row=["user_name", "app_id", "pushkey", "1 = 0"],
            instance_column=_INSTANCE,
        ),
        SourceTable(table="deleted_pushers", row=["user_id", "app_id", "pushkey", "1 = 1"], instance_column=_INSTANCE),
    ],
    key=("user_id", "app_id", "pushkey"),
    sequence="pushers_sequence",
    position_name="pushers",
)

DEVICE_LISTS: Final = typed_stream(
    "device_lists",
    DeviceListsRow,
    History.NEWEST,
    tables=[
        SourceTable(table="device_lists_stream", row=["user_id", "1 = 0", "1 = 0"], instance_column=_INSTANCE),
        SourceTable(
            table="device_lists_outbound_pokes", row=["destination", "1 = 0", "1 = 1"], instance_column=_INSTANCE
        ),
        SourceTable(table="user_signature_stream", row=["from_user_id", "1 = 1", "1 = 0"], instance_column=_INSTANCE),
    ],
    distinct=True,
    key=("entity", "is_signature"),
    sequence="device_lists_sequence",
    known_by_token=True,
    position_name="device_lists_stream",
)

STICKY_EVENTS: Final = typed_stream(
    "sticky_events",
    StickyEventRow,
    History.NEWEST,
    table="sticky_events",
    instance_column=_INSTANCE,
    key=("event_id",),
    sequence="sticky_events_sequence",
    position_name="sticky_events",
    known_by_token=True,
)

THREAD_SUBSCRIPTIONS: Final = typed_stream(
    "thread_subscriptions",
    ThreadSubscriptionRow,
    History.NEWEST,
    table="thread_subscriptions",
    instance_column=_INSTANCE,
    key=ThreadSubscriptionRow.names(),
    sequence="thread_subscriptions_sequence",
    position_name="thread_subscriptions",
    known_by_token=True,
)

PROFILE_UPDATES: Final = typed_stream(
    "profile_updates",
    ProfileUpdateRow,
    tables=[
        SourceTable(table="profile_updates", row=["user_id", "action", "affected_fields"], instance_column=_INSTANCE)
    ],
    sequence="profile_updates_sequence",
    position_name="profile_updates",
    known_by_token=True,
)

QUARANTINED_MEDIA: Final = typed_stream(
    "quarantined_media",
    QuarantinedMediaRow,
    table="quarantined_media_changes",
    instance_column=_INSTANCE,
    sequence="quarantined_media_id_seq",
    position_name="quarantined_media",
    known_by_token=True,
)

UN_PARTIAL_STATED_ROOM: Final = typed_stream(
    "un_partial_stated_room",
    UnPartialStatedRoomRow,
    table="un_partial_stated_room_stream",
    instance_column=_INSTANCE,
    sequence="un_partial_stated_room_stream_sequence",
    position_name="un_partial_stated_room_stream",
)

UN_PARTIAL_STATED_EVENT: Final = typed_stream(
    "un_partial_stated_event",
    UnPartialStatedEventRow,
    table="un_partial_stated_event_stream",
    instance_column=_INSTANCE,
    sequence="un_partial_stated_event_stream_sequence",
    position_name="un_partial_stated_event_stream",
)

STREAMS: Final[Sequence[TypedStream[Any]]] = (
    EVENTS,
    BACKFILL,
    PRESENCE,
    PRESENCE_FEDERATION,
    TYPING,
    RECEIPTS,
    PUSH_RULES,
    PUSHERS,
    CACHES,
    DEVICE_LISTS,
    TO_DEVICE,
    FEDERATION,
    ACCOUNT_DATA,
    UN_PARTIAL_STATED_ROOM,
    UN_PARTIAL_STATED_EVENT,
    THREAD_SUBSCRIPTIONS,
    STICKY_EVENTS,
    QUARANTINED_MEDIA,
    PROFILE_UPDATES,
)
