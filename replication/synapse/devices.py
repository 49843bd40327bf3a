"""Streams about devices: device lists, to-device messages, cross-signing."""

from __future__ import annotations

from typing import Final

from replication.streams.definitions import SourceTable
from replication.streams.typed_rows import History, Row, typed_stream


class DeviceListsRow(Row, frozen=True):
    """The devices of a user have changed; or, if ``entity`` is a server, it must be notified of changes."""

    entity: str


class ToDeviceRow(Row, frozen=True):
    """There are messages for the devices of a user; or of a server, if ``entity`` does not begin with ``@``."""

    entity: str


class UserSignatureRow(Row, frozen=True):
    """A user has signed keys of other users."""

    user_id: str


DEVICE_LISTS: Final = typed_stream(
    "device_lists",
    DeviceListsRow,
    History.NEWEST,
    tables=[
        SourceTable(table="device_lists_stream", row=["user_id"]),
        SourceTable(table="device_lists_outbound_pokes", row=["destination"]),
    ],
    key=("entity",),
)

TO_DEVICE: Final = typed_stream(
    "to_device",
    ToDeviceRow,
    History.NEWEST,  # rows are deleted once they are delivered
    tables=[
        SourceTable(table="device_inbox", row=["user_id"], instance_column="instance_name"),
        SourceTable(table="device_federation_outbox", row=["destination"], instance_column="instance_name"),
    ],
    distinct=True,
    key=("entity",),
    sequence="device_inbox_sequence",
)

USER_SIGNATURE: Final = typed_stream(
    "user_signature",
    UserSignatureRow,
    tables=[SourceTable(table="user_signature_stream", row=["from_user_id"])],
    shares=DEVICE_LISTS.name,
)
