"""Where users were last seen: what USER_IP says, kept for a moment, and written to the database in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from replication.errors import StoreError
from replication.storage.lastseen import declare_last_seen, forget_last_seen, put_last_seen, read_last_seen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.seams import IStatements, IStreamStore
    from replication.wire.commands import UserIp

MAX_WAITING: Final = 10_000  # places that wait to be written; while the database fails, the oldest are let go
LIFE_MS: Final = 28 * 86_400_000  # what is older is deleted, as a Synapse does by default
FORGET_EVERY: Final = 1_000  # batches: about once an hour and a half, if there is always something to write


class LastSeen:
    """The table ``users_last_seen``, one row per user, access token and address, and what is on its way there."""

    log = Logger()

    def __init__(self, store: IStreamStore) -> None:
        self.written = self.dropped = 0  # rows
        self._store = store
        self._waiting: dict[tuple[str, str, str], UserIp] = {}
        self._turn = DeferredLock()
        self._declared = False
        self._batches = 0
        self._said = ""

    def __len__(self) -> int:
        """How many rows wait to be written."""
        return len(self._waiting)

    def hear(self, seen: UserIp) -> None:
        """Take what was said; of one place only the last time counts."""
        seen = attrs.evolve(
            seen,
            user_id=_storable(seen.user_id),
            access_token=_storable(seen.access_token),
            ip=_storable(seen.ip),
            user_agent=_storable(seen.user_agent),
            device_id=None if seen.device_id is None else _storable(seen.device_id),
        )
        key = seen.user_id, seen.access_token, seen.ip
        known = self._waiting.get(key)
        if known is None or known.last_seen <= seen.last_seen:
            self._waiting[key] = seen
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
            self.dropped += 1

    async def flush(self) -> None:
        """Write what waits; if the database fails, it waits on, and that is logged once."""
        if not self._waiting:
            return
        batch = list(self._waiting.values())
        try:
            await self._write(batch)
        except StoreError as error:
            if self._said != str(error):
                self._said = str(error)
                self.log.error("cannot write where users were last seen: {why}", why=self._said)
            return
        self._said = ""
        self.written += len(batch)
        for seen in batch:
            key = seen.user_id, seen.access_token, seen.ip
            if self._waiting.get(key) is seen:
                del self._waiting[key]

    async def of(self, user_id: str) -> Sequence[UserIp]:
        """Return where a user was seen, the latest first; StoreError if the database fails."""
        await self.flush()
        if not self._declared:
            await self._write([])
        return await self._store.read(lambda database: read_last_seen(database, user_id))

    async def _write(self, batch: Sequence[UserIp]) -> None:
        def write(database: IStatements) -> None:
            if not self._declared:
                declare_last_seen(database)
            if batch:
                put_last_seen(database, batch)
                if self._batches % FORGET_EVERY == 0:
                    forget_last_seen(database, max(each.last_seen for each in batch) - LIFE_MS)

        async with self._turn:
            self._batches += 1
            transaction = self._store.transaction()
            try:
                await transaction.run(write)
                await transaction.commit([])
            except BaseException:
                await transaction.rollback()
                raise
            self._declared = True


def _storable(text: str) -> str:
    """Return ``text`` as every database takes it: JSON may have lone surrogates, and NUL is nothing for PostgreSQL."""
    return text.encode(errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
