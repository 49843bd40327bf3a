"""The streams of Synapse 1.47 to 1.66, and since 1.159: typed rows, and their tables (docs/protocol/streams.md C).

    from replication.synapse import RECEIPTS

    @worker.on("receipts")
    async def apply(facts, txn):
        for fact in facts:
            for receipt in RECEIPTS.read(fact):
                print(receipt.user_id, "has read", receipt.event_id)

``STREAMS`` are those of 1.47 to 1.60, in the order of Synapse's answer to REPLICATE.  A master with
``definitions = ["replication.synapse"]`` serves them from the database of a Synapse 1.47 to 1.60.  For 1.64 to 1.66
there is ``replication.synapse.since_1_64``.  A worker reads the rows of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.synapse.devices import DEVICE_LISTS, TO_DEVICE, USER_SIGNATURE
from replication.synapse.rooms import BACKFILL, EVENTS, RECEIPTS, TYPING
from replication.synapse.servers import CACHES, FEDERATION, GROUPS, PRESENCE_FEDERATION
from replication.synapse.users import ACCOUNT_DATA, PRESENCE, PUSH_RULES, PUSHERS, TAG_ACCOUNT_DATA

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from replication.streams.typed_rows import TypedStream

__all__ = [
    "ACCOUNT_DATA",
    "BACKFILL",
    "CACHES",
    "DEVICE_LISTS",
    "EVENTS",
    "FEDERATION",
    "GROUPS",
    "PRESENCE",
    "PRESENCE_FEDERATION",
    "PUSHERS",
    "PUSH_RULES",
    "RECEIPTS",
    "STREAMS",
    "TAG_ACCOUNT_DATA",
    "TO_DEVICE",
    "TYPING",
    "USER_SIGNATURE",
]

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
    TAG_ACCOUNT_DATA,
    ACCOUNT_DATA,
    GROUPS,
    USER_SIGNATURE,
)
