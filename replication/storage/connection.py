"""What the connections of all databases do: read positions, pages and receipts, and run the application's SQL.

Everything here blocks, and runs on the connection's thread.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Final, Generic, TypeVar

from replication.errors import SchemaError
from replication.storage.contract import Batch, ISession
from replication.storage.pages import check_limit, collect_positions
from replication.storage.receipts import former_key
from replication.storage.tables.applied_counts import find_counts, has_counts, prepare_counts, put_counts
from replication.storage.tables.histories import EXISTS, find_history
from replication.storage.tables.kept_facts import put_gone
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from replication.storage.table import StreamTable
    from replication.streams.definitions import StreamDefinition
    from replication.streams.history import History
    from replication.streams.interfaces import ISqlExecutor, Page, Write

_T = TypeVar("_T")
_Session = TypeVar("_Session", bound=ISession)

POSITIONS: Final = "SELECT instance_name, stream_id FROM stream_positions WHERE stream_name = ?"
POSITIONS_OF: Final = "SELECT stream_name, instance_name, stream_id FROM stream_positions WHERE stream_name IN "
STORED: Final = "SELECT stream_name, instance_name, abs(stream_id) FROM stream_positions"
# The key of the stream, else that of version 0.1.0 (``former_key``).  IN, with an order, takes ten times as long.
_RECEIPT: Final = "SELECT tokens FROM append_receipts WHERE key = ? AND written_at > ?"
RECEIPT: Final = f"{_RECEIPT} UNION ALL {_RECEIPT} LIMIT 1"


class SqlConnection(Generic[_Session]):
    """One session, the package's own tables in it, and the application's statements.

    ``commits`` counts durable batches, ``transactions`` the transactions of the database that stored them.
    """

    MARK: ClassVar[str]  # stands for a parameter
    SCHEMA: ClassVar[int]  # the version of the tables that added ``gone_facts``
    SNAPSHOT: ClassVar[str] = ""  # how a transaction begins that reads one snapshot
    ELEMENTS: ClassVar[str]  # a query of the texts in a JSON array, its parameter
    OWN: ClassVar[str] = ""  # how a transaction of this package alone begins, which waits for others
    EXCLUSIVE: ClassVar[str] = ""  # a statement that excludes other processes that create tables, where BEGIN does not

    def __init__(self, session: _Session, *, read_only: bool) -> None:
        self.session = session
        self.commits = 0
        self.transactions = 0
        self._read_only = read_only
        self._has_histories = False  # whether the table was found; it is never dropped
        self._has_counts: bool | None = None  # whether there is the table ``applied_counts``; None: not known

    def close(self) -> None:
        """End the session."""
        self.session.close()

    # ---- reading

    def history(self, stream: StreamName, writer: InstanceName, follower: str) -> History:
        """Return a stored history; empty if there is none, or no table, as in a database of version 0.1."""
        if not self._has_histories:
            self._has_histories = bool(self.session.ask(EXISTS[self.session.dialect]))
        return find_history(self.session, stream, writer, follower) if self._has_histories else ()

    def applied_counts(self, stream: StreamName, follower: str) -> dict[InstanceName, str]:
        """Return the stored texts of a follower, by writer; none without the table, which is then looked for again."""
        if not self._has_counts and not has_counts(self.session):
            return {}
        self._has_counts = True
        return find_counts(self.session, stream, follower)

    def positions(self, table: StreamTable[_Session]) -> dict[InstanceName, Token]:
        """Return, per writer, the largest token that was committed or stored as a position."""
        return self.positions_of([table])[table.definition.name]

    def positions_of(self, tables: Sequence[StreamTable[_Session]]) -> dict[StreamName, dict[InstanceName, Token]]:
        """Return the positions of several streams."""
        names = json.dumps([table.definition.stored_name for table in tables])
        found: dict[str, list[tuple[str, int]]] = {}
        for stream, writer, stream_id in self.session.ask(f"{POSITIONS_OF} ({self.ELEMENTS})", (names,)):
            found.setdefault(stream, []).append((writer, stream_id))
        positions = {}
        for table in tables:
            name, sign = table.definition.stored_name or "", table.direction.sign
            positions[table] = {InstanceName(writer): Token(sign * at) for writer, at in found.get(name, ())}
        if not self.is_standby():
            for table, newest in self.newest(positions).items():
                stored = positions[table]
                stored.update({writer: max(stored.get(writer, token), token) for writer, token in newest.items()})
        return {table.definition.name: each for table, each in positions.items()}

    def newest(
        self, tables: Mapping[StreamTable[_Session], Mapping[InstanceName, Token]]
    ) -> Mapping[StreamTable[_Session], Mapping[InstanceName, Token]]:
        """Return each table's ``newest``, given the stored positions of each."""
        return {table: table.newest(self.session, stored) for table, stored in tables.items()}

    def stored_positions(self) -> dict[StreamName, dict[InstanceName, Token]]:
        """Return all stored positions."""
        return collect_positions(self.session.ask(STORED))

    def page(
        self, table: StreamTable[_Session], writer: InstanceName, *, after: Token, upto: Token, limit: int
    ) -> Page:
        """Return a page as ``IStreamStore.facts`` does."""
        check_limit(limit)
        return table.rows(self.session, writer, after=after, upto=upto, limit=limit).page()

    def find_receipt(self, key: str, expired: float) -> list[Token] | None:
        """Return the tokens of a receipt that was committed after ``expired``, a time in seconds."""
        for (tokens,) in self.session.ask(self._sql(RECEIPT), (key, expired, former_key(key), expired)):
            return [Token(each) for each in json.loads(tokens)]
        return None

    def read(self, function: Callable[[ISqlExecutor], _T]) -> _T:
        """Run ``function`` on one snapshot."""
        self.session.begin(self.SNAPSHOT)
        try:
            self.prepare_reading()
            return function(self.session)
        finally:
            self.session.rollback()

    def is_standby(self) -> bool:
        """Whether the database is a standby, on which facts may become visible in another order than their IDs."""
        return False

    def prepare_reading(self) -> None:
        """Set the session up for statements of the application."""

    # ---- writing

    def declare(self, tables: Sequence[StreamTable[_Session]], beside: Sequence[StreamDefinition] = ()) -> list[str]:
        """Create or check the streams' tables; returns warnings.  ``beside`` are streams that were declared before."""
        with self.naming():
            if self._read_only:
                return [each for table in tables for each in table.declare(self.session, may_create=False)]
            return self._declare(tables, [*beside])

    def run(self, function: Callable[[ISqlExecutor], _T], *, synchronous: bool = True) -> _T:
        """Run ``function`` inside the transaction; if there is none, begin one, ``synchronous`` or not."""
        self._begin(synchronous=synchronous)
        return function(self.session)

    def commit(self, batch: Batch) -> None:
        """Store a batch with all earlier statements; if that fails, undo all of it."""
        raise NotImplementedError

    def commit_together(self, batches: Sequence[Batch]) -> list[Exception | None]:
        """Store batches in one transaction, and return the outcome of each, None for success."""
        raise NotImplementedError

    def rollback(self) -> None:
        """Undo all statements since the last commit."""
        self._has_counts = None  # one of them may have created it
        self.session.rollback()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Run a transaction that excludes other processes that create tables."""
        self.session.begin(self.OWN)
        try:
            if self.EXCLUSIVE:
                self.session.run(self.EXCLUSIVE)
            yield
            self.session.commit()
        except BaseException:
            self.rollback()
            raise

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Let SchemaError name the database."""
        try:
            yield
        except SchemaError as error:
            raise SchemaError(f"database {self.session.name!r}: {error}", version=error.version) from error

    # ---- inside

    def _declare(self, tables: Sequence[StreamTable[_Session]], beside: list[StreamDefinition]) -> list[str]:
        """Declare the streams of a database that may be written; ``beside`` are those that were declared earlier."""
        raise NotImplementedError

    def _mark_missing(self, tables: Collection[StreamTable[_Session]]) -> list[str]:
        """Store marks up to the stored positions for tables that were missing; return warnings."""
        warnings = []
        for stream, positions in self.positions_of([*tables]).items() if tables else ():
            lost = {writer: token for writer, token in sorted(positions.items()) if token > 1}
            for writer, token in lost.items():
                put_gone(self.session, stream, writer, token, self.SCHEMA)
            if lost:
                gone = ", ".join(f"of {writer} up to {token}" for writer, token in lost.items())
                warnings.append(
                    f"stream {stream!r}: its table was missing, and is empty now, so facts are gone: {gone}; restore a "
                    "backup or, if this is a copy, delete the database of this worker"
                )
        return warnings

    def _put_counts(self, write: Write) -> None:
        """Store the text of a follower that counts facts; do nothing without the right to create its table."""
        if self._has_counts is None:
            self._has_counts = prepare_counts(self.session)
        if self._has_counts:
            put_counts(self.session, write)

    def _begin(self, *, synchronous: bool = True) -> None:  # noqa: ARG002 (only SQLite has others)
        """Begin a transaction unless there is one."""
        if not self.session.begun:
            self.session.begin()

    def _sql(self, sql: str) -> str:
        return sql.replace("?", self.MARK)
