"""Where users were last seen: the contents of USER_IP, written to the database in batches."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import attrs
from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from replication.errors import StoreError, ValueRefusedError
from replication.logs import TroubleLog
from replication.storage.contract import TooLargeError
from replication.storage.tables.client_ips import declare_last_seen, forget_last_seen, put_last_seen, read_last_seen
from replication.storage.transactions import run_transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replication.streams.interfaces import ISqlExecutor, IStreamStore
    from replication.wire.commands import UserIp

MAX_WAITING: Final = 10_000  # rows that wait to be written; beyond that the oldest are dropped
MAX_WAITING_BYTES: Final = 16 * 2**20  # of their texts, about
MAX_AGE_MS: Final = 28 * 86_400_000  # older rows are deleted, as Synapse does by default
MAX_ATTEMPTS: Final = 100  # transactions of one flush, of which those with a refused row are rolled back
DELETE_EVERY: Final = 1_000  # batches: about every 90 minutes, if every batch has rows


class LastSeen:
    """The table ``users_last_seen``, one row per user, access token and address, and the rows that wait to be written.

    ``wall`` returns the time in seconds since 1970.  ``written`` and ``dropped`` count rows.
    """

    log = Logger()

    def __init__(self, store: IStreamStore, wall: Callable[[], float] = time.time) -> None:
        self.written = self.dropped = 0
        self._wall = wall
        self._store = store
        self._waiting: dict[tuple[str, str, str], UserIp] = {}
        self._bytes = 0  # of their texts
        self._lock = DeferredLock()
        self._declared = False
        self._batches = 0
        self._trouble = TroubleLog(self.log)

    def __len__(self) -> int:
        """Return the number of rows that wait to be written."""
        return len(self._waiting)

    def receive(self, seen: UserIp) -> None:
        """Keep a row to be written; of several rows with one key, the latest."""
        texts: dict[str, Any] = {
            name: _storable(value) for name, value in attrs.asdict(seen).items() if isinstance(value, str)
        }
        seen = attrs.evolve(seen, **texts)
        key = seen.user_id, seen.access_token, seen.ip
        known = self._waiting.get(key)
        if known is None or known.last_seen <= seen.last_seen:
            self._waiting[key] = seen
            self._bytes += _size(seen) - (0 if known is None else _size(known))
        while len(self._waiting) > MAX_WAITING or self._bytes > MAX_WAITING_BYTES:
            self._remove(next(iter(self._waiting)))
            self.dropped += 1

    async def flush(self) -> None:
        """Write the rows that wait; if the database fails, they stay, and the error is logged once.

        A row that the database refuses would keep out the others of its transaction, so it is left out.  Such are a
        text that its encoding lacks, and a key that is too long for an index of PostgreSQL.
        """
        refused, attempts, refusal = 0, MAX_ATTEMPTS, ""
        batches = [[*self._waiting.items()]] if self._waiting else []
        while batches and attempts:
            batch = batches.pop()
            attempts -= 1
            try:
                await self._write([seen for _, seen in batch])
            except (ValueRefusedError, TooLargeError) as error:
                half = len(batch) // 2
                if half:
                    batches += [batch[half:], batch[:half]]
                    continue
                refusal = str(error)
                refused += 1
                self.dropped += 1
            except StoreError as error:
                self._trouble.report("cannot write users_last_seen: {error}", error=error)
                break
            else:
                self._trouble.end("users_last_seen can be written again")
                self.written += len(batch)
            for key, seen in batch:
                if self._waiting.get(key) is seen:
                    self._remove(key)
        if refusal:
            message = "{count} rows of users_last_seen are left out, which the database refuses: {error}"
            self.log.warn(message, count=refused, error=refusal)

    async def of(self, user_id: str) -> Sequence[UserIp]:
        """Return a user's rows, the latest first; StoreError if the database fails."""
        await self.flush()
        if not self._declared:
            await self._write([])
        return await self._store.read(lambda database: read_last_seen(database, user_id))

    def _remove(self, key: tuple[str, str, str]) -> None:
        self._bytes -= _size(self._waiting.pop(key))

    async def _write(self, batch: Sequence[UserIp]) -> None:
        def write(database: ISqlExecutor) -> None:
            if not self._declared:
                declare_last_seen(database)
            if batch:
                put_last_seen(database, batch)
                if self._batches % DELETE_EVERY == 0:
                    newest = max(each.last_seen for each in batch)
                    # Rows are deleted early only if both clocks are ahead.
                    forget_last_seen(database, min(newest, int(self._wall() * 1000)) - MAX_AGE_MS)

        async with self._lock:
            self._batches += 1
            await run_transaction(self._store, write)
            self._declared = True


def _size(seen: UserIp) -> int:
    return sum(map(len, (seen.user_id, seen.access_token, seen.ip, seen.user_agent, seen.device_id or "")))


def _storable(text: str) -> str:
    """Return ``text`` without what a database refuses: lone surrogates, which JSON may hold, and NUL in PostgreSQL."""
    return text.encode(errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
