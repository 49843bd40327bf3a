"""The epochs of this process: one begins at each start, before it publishes (docs/protocol/following.md E7)."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from replication.streams.history import Epoch, begin_epoch
from replication.writer.publisher import INITIAL_POSITION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.streams.interfaces import IStreamStore
    from replication.wire.grammar import InstanceName, StreamName, Token


async def begin_epochs(store: IStreamStore, writer: InstanceName, starts: Mapping[StreamName, Token]) -> None:
    """Store a new epoch of each stream: all facts that ``writer`` writes from now on are above its start."""
    stored, former, histories = await store.stored_positions(), await store.histories(writer), {}
    for stream, start in starts.items():
        settled = min(start, stored.get(stream, {}).get(writer, INITIAL_POSITION))
        epoch = Epoch(secrets.token_hex(4), settled, start)
        histories[stream] = begin_epoch(former.get(stream, ()), epoch)
    await store.store_histories(writer, histories)
