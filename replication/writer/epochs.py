"""The epochs of this process: one begins at each start, before it publishes (docs/protocol/following.md E7)."""

from __future__ import annotations

import secrets
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from replication.errors import StoreError, is_temporary
from replication.storage.tables.histories import get_timeline
from replication.streams.history import Epoch, begin_epoch
from replication.writer.publisher import INITIAL_POSITION

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from replication.streams.interfaces import IStreamStore
    from replication.wire.grammar import InstanceName, StreamName, Token

EMPTY: Final[Mapping[StreamName, Token]] = MappingProxyType({})


async def begin_epochs(
    store: IStreamStore,
    writer: InstanceName,
    starts: Mapping[StreamName, Token],
    own: Container[StreamName] = (),
    reached: Mapping[StreamName, Token] = EMPTY,
) -> None:
    """Store a new epoch of each stream: all facts that ``writer`` writes from now on are above its start.

    Only a loss, or the retention, takes facts out of the streams ``own``: so a follower that has more facts than the
    writer has lost ones.  An application may also delete rows of the others: there, only a failover is suspicious, and
    a start above what the writer itself has ``reached``: another one may have written there since a restore.
    """
    stored, former, histories = await store.stored_positions(), await store.histories(writer), {}
    timeline = await _timeline(store) if any(stream not in own for stream in starts) else ""
    for stream, start in starts.items():
        settled = min(start, stored.get(stream, {}).get(writer, INITIAL_POSITION))
        ahead = timeline and start > reached.get(stream, start)
        state = f".{secrets.token_hex(4)}" if stream in own or ahead else timeline
        epoch = Epoch(f"{secrets.token_hex(4)}{state}", settled, start)
        histories[stream] = begin_epoch(former.get(stream, ()), epoch)
    await store.store_histories(writer, histories)


async def _timeline(store: IStreamStore) -> str:
    """Return a dot and the timeline of a PostgreSQL server, else nothing."""
    try:
        timeline = await store.read(get_timeline)
    except StoreError as error:
        if is_temporary(error):
            raise
        return ""  # a server that is compatible with PostgreSQL may have no such function
    return timeline and f".{timeline}"
