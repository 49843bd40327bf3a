"""What devices have: lists of them, messages to them, and who has signed whose keys."""

from __future__ import annotations

from typing import Final

from replication.streams.registry import SourceTable, StreamDefinition
from replication.streams.typed import History, Row, TypedStream


class DeviceListsRow(Row, frozen=True):
    """The devices of a user have changed, or a server is to be told of some."""

    entity: str


class ToDeviceRow(Row, frozen=True):
    """There are messages for a user's devices, or, if it does not begin with ``@``, for a server's."""

    entity: str


class UserSignatureRow(Row, frozen=True):
    """A user has signed the keys of others."""

    user_id: str


DEVICE_LISTS: Final[TypedStream[DeviceListsRow]] = TypedStream(
    StreamDefinition(
        "device_lists",
        row=DeviceListsRow.names(),
        tables=[
            SourceTable(table="device_lists_stream", row=["user_id"]),
            SourceTable(table="device_lists_outbound_pokes", row=["destination"]),
        ],
        key=("entity",),
    ),
    DeviceListsRow,
    History.NEWEST,
)

TO_DEVICE: Final[TypedStream[ToDeviceRow]] = TypedStream(
    StreamDefinition(
        "to_device",
        row=ToDeviceRow.names(),
        tables=[
            SourceTable(table="device_inbox", row=["user_id"], instance_column="instance_name"),
            SourceTable(table="device_federation_outbox", row=["destination"], instance_column="instance_name"),
        ],
        distinct=True,
        key=("entity",),
        sequence="device_inbox_sequence",
    ),
    ToDeviceRow,
    History.NEWEST,  # rows go once they are delivered
)

USER_SIGNATURE: Final[TypedStream[UserSignatureRow]] = TypedStream(
    StreamDefinition(
        "user_signature",
        row=UserSignatureRow.names(),
        tables=[SourceTable(table="user_signature_stream", row=["from_user_id"])],
        shares=DEVICE_LISTS.name,
    ),
    UserSignatureRow,
)
