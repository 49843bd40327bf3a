"""Whether the database still has the commits of this process: a backup may be restored into the open file.

``sqlite3 FILE ".restore COPY"`` writes as any other process does, into the same file and the same WAL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from replication.errors import CommitsLostError
from replication.storage.connection import STORED
from replication.storage.tables.histories import get_histories_of_all, get_history
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from replication.storage.contract import Batch
    from replication.storage.sqlite.session import SqliteSession
    from replication.storage.table import StreamTable
    from replication.streams.history import History
    from replication.wire.grammar import InstanceName, StreamName

VERSION: Final = "PRAGMA data_version"  # changes with each commit of another connection
SCHEMA: Final = "PRAGMA schema_version"  # each restore changes it, and each change of a table


class KnownCommits:
    """What this process has committed into one file: positions, histories, and the last fact above a position.

    The first check notes what earlier processes have left: a worker may store nothing for long.  ``on_lost`` is called
    once, on the thread that commits.
    """

    def __init__(self, on_lost: Callable[[CommitsLostError], object] = lambda _: None) -> None:
        self.lost: CommitsLostError | None = None
        self._on_lost = on_lost
        self._positions: dict[tuple[StreamName, InstanceName], Token] = {}
        self._found: dict[tuple[StreamName, InstanceName], Token] | None = None  # positions at the first check
        self._lowered: set[tuple[StreamName, InstanceName]] = set()  # whose positions this process has lowered
        self._above: tuple[StreamTable[Any], StreamName, InstanceName, Token] | None = None  # a fact with rows
        self._histories: dict[tuple[StreamName, InstanceName, str], History] = {}
        self._version = self._schema = 0

    def note(self, batches: Sequence[Batch]) -> None:
        """Note a transaction that was committed."""
        for batch in batches:
            for table, write in batch.writes:
                key = write.stream, write.writer
                former = self._positions.get(key, (self._found or {}).get(key, write.upto))
                known = write.upto if write.reset else max(write.upto, former)
                self._positions[key] = known
                if write.reset:
                    self._lowered.add(key)
                last = next((fact.token for fact in reversed(write.facts) if fact.texts), known)
                if last > known:
                    self._above = table, write.stream, write.writer, last

    def forget_histories(self, writer: InstanceName, streams: Collection[StreamName], follower: str) -> None:
        """Forget histories that are changed now: a check before they are noted would take them for a restore."""
        changed = {
            (stream, writer, bool(follower)) for stream in streams
        }  # under another name, a follower has one, too
        kept = {key: each for key, each in self._histories.items() if (*key[:2], bool(key[2])) not in changed}
        self._histories = kept

    def note_histories(self, writer: InstanceName, histories: Mapping[StreamName, History], follower: str) -> None:
        """Note histories that were stored: a backup from before this start has the positions, but another epoch."""
        self._histories.update({(stream, writer, follower): each for stream, each in histories.items()})

    def check(self, session: SqliteSession) -> None:
        """Raise CommitsLostError, in a transaction, if the database has lost one of them."""
        if self.lost is not None:
            raise self.lost
        ((version,),) = session.run(VERSION)
        if version == self._version:
            return
        if not self._has_all(session):
            self.lost = CommitsLostError(f"database {session.name!r} has lost commits of this process: restart it")
            self._on_lost(self.lost)
            raise self.lost
        self._version = version

    def _has_all(self, session: SqliteSession) -> bool:
        stored = {(stream, writer): token for stream, writer, token in session.run(STORED)}
        ((schema,),) = session.run(SCHEMA)
        restored, self._schema = schema != self._schema, schema  # perhaps: an application may have made a table
        if self._found is None:
            self._found, self._histories = stored, {**get_histories_of_all(session), **self._histories}
        if any(stored.get(key, -1) < known for key, known in {**self._found, **self._positions}.items()):
            return False
        if not restored:
            return True
        # From before a writer went back.  A position that was not lowered may be above the last write: a fact without
        # rows raises it, and so may an interaction that failed.
        if any(stored[key] > self._positions[key] for key in self._lowered):
            return False
        return (self._above is None or self._has_last(session, *self._above)) and all(
            [*get_history(session, *key)] == [*each] for key, each in self._histories.items()
        )

    def _has_last(
        self, session: SqliteSession, table: StreamTable[Any], stream: StreamName, writer: InstanceName, token: Token
    ) -> bool:
        """Whether a fact is there that was above the position; without a restore, an application may delete it."""
        if token <= self._positions[stream, writer]:
            return True
        return bool(table.rows(session, writer, after=Token(token - 1), upto=token, limit=1).page().facts)
