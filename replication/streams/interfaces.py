"""Interfaces of stores, sources and sequences, and the statuses that are shown.

Everywhere, ``after`` excludes its token and ``upto`` includes it.

The module has more than 500 lines because it has every protocol between storage and the rest, with its rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence

    from replication.streams.definitions import StreamDefinition
    from replication.streams.facts import Fact
    from replication.streams.history import History
    from replication.streams.skips import SkippedFact, SkipState
    from replication.wire.grammar import InstanceName, StreamName

_T = TypeVar("_T")


class Page(msgspec.Struct, frozen=True):
    """A part of a range of facts.

    ``facts`` are in ascending order of token.  All facts of the range up to ``upto`` are here.  With ``limited`` there
    may be more above ``upto`` (docs/protocol/traps.md 13 and 14).  With ``left_out`` no source has the facts up to
    ``upto`` any more, so they are not here.  A page of compacted segments may lack facts
    that a later fact up to ``replaced_upto`` replaces.  An empty page of segments ends before the fact ``lacking``
    if no line can hold that fact.
    """

    facts: Sequence[Fact]
    upto: Token
    limited: bool
    left_out: bool = False
    replaced_upto: Token = Token(0)
    lacking: Token = Token(0)


class ICatchUp(Protocol):
    """A catch-up source: a follower fetches the facts of a gap from it (docs/protocol/following.md E5)."""

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return the first facts of ``writer`` with ``after < token <= upto``.

        Args:
            stream: its name.
            writer: the instance that wrote the facts.
            after: the token below the range; excluded.
            upto: the last token of the range; included.
            limit: the number of rows at which a page ends, at least 1.  No fact is cut: one with more rows is a page of
                its own.

        Raises FactsGoneError if a fact above ``after`` was deleted; CatchUpError or StoreError if the source cannot
        answer.
        """
        ...


class FactSlice(msgspec.Struct, frozen=True):
    """Consecutive facts of one writer, as a retention counts and deletes them (docs/operations.md, Retention).

    Attributes:
        upto: the token of the last fact.  The first one follows the slice before.
        rows: the number of rows.
        size: the bytes of their JSON texts.
        seconds: for how long the writer had run, over all its starts, when the slice was stored.

    """

    upto: Token
    rows: int
    size: int
    seconds: float = 0.0


class KnownFollower(msgspec.Struct, frozen=True):
    """What a follower has reported: its applied positions, and the time of the report in seconds since 1970."""

    name: InstanceName
    positions: Mapping[StreamName, Mapping[InstanceName, Token]]
    reported_at: float


class IKeptFacts(Protocol):
    """Which facts a store has deleted, and which it can delete next: of generic tables only.

    Tokens only grow: what is gone stays gone.
    """

    async def gone(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return, per writer, up to where facts may be gone; a writer with all its facts is not there."""
        ...

    async def forget_facts(self, stream: StreamName, writer: InstanceName, upto: Token, *, delete: bool = True) -> None:
        """Note that facts up to ``upto`` are gone, in one transaction; ``facts`` then refuses to begin below.

        With ``delete``, delete them and their slices, and raise the stored position.  Other commits may wait for that.
        """
        ...

    async def mark_truncated(
        self, writer: InstanceName, published: Mapping[StreamName, Token]
    ) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Note that facts are gone of streams whose table was truncated with SQL since the first call for it.

        ``published`` are the positions of ``writer``, this process.  Returns up to where the facts of each writer are.
        """
        ...

    async def measure(
        self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int
    ) -> FactSlice:
        """Return the first facts of a range as a slice of about ``limit`` rows; it ends at ``after`` without facts."""
        ...

    async def slices(self, stream: StreamName, writer: InstanceName) -> Sequence[FactSlice]:
        """Return the stored slices, ascending."""
        ...

    async def store_slice(self, stream: StreamName, writer: InstanceName, new: FactSlice) -> None:
        """Store a slice; one with the same ``upto`` is replaced."""
        ...

    async def known_followers(self) -> Sequence[KnownFollower]:
        """Return what followers have reported, by name."""
        ...

    async def store_follower(self, follower: KnownFollower) -> None:
        """Store the report of a follower, in place of its last one."""
        ...

    async def forget_follower(self, name: InstanceName) -> None:
        """Delete the report of a follower, if there is one."""
        ...


class Write(msgspec.Struct, frozen=True):
    """What a transaction stores for one writer of one stream.

    Attributes:
        stream: its name.
        writer: the instance under whose name ``facts`` and the position are stored.
        upto: the new stored position; it never lowers the stored one.  With facts, 0 leaves the position as it is: the
            statement takes no row lock and does not wait for another transaction.
        facts: the facts to store.
        expected: the position that must be stored before, 0 if none is; otherwise the commit raises PositionMovedError.
        reset: lower the position to ``upto``, and delete every fact of ``writer`` above it.
        follower: the process whose applied position this is.  There are no facts then, and the stream need not be
            declared.  Where several processes share a database, ``IStreamStore.positions`` lacks this position.
        skipped: facts that ``follower`` leaves out, or takes up again.  With ``reset``, what is stored of facts above
            ``upto`` is deleted.
        gone: the mark that is stored, as by ``forget_facts``: facts up to this token may be gone.  Only with
            ``expected``.
        counts: the text that replaces what ``applied_counts`` returns; None leaves that as it is.  Only with
            ``follower``.
    """

    stream: StreamName
    writer: InstanceName
    upto: Token
    facts: Sequence[Fact] = ()
    expected: Token | None = None
    reset: bool = False
    follower: InstanceName | None = None
    skipped: Sequence[SkippedFact] = ()
    gone: Token | None = None
    counts: str | None = None


class Receipt(msgspec.Struct, frozen=True):
    """The stored answer of an append: its idempotency ``key`` and the ``tokens`` of its facts (docs/http.md)."""

    key: str
    tokens: Sequence[Token]


class ISequence(Protocol):
    """The sequence of a stream with several writers; it is used outside transactions (docs/protocol/ids.md F3)."""

    async def allocate(self, count: int) -> Sequence[int]:
        """Return ``count`` new IDs, ascending.

        They are larger than all IDs that this process has allocated before, and no other process receives them.  They
        may have gaps.  An unused ID is not returned to the sequence.  Raises StoreError if the database does not
        answer.
        """
        ...


class SequenceState(msgspec.Struct, frozen=True):
    """Which IDs of a mapped stream are settled (docs/protocol/ids.md F4).

    Attributes:
        settled: every ID up to here was committed or rolled back; None if that is not known of any ID.
        last_value: the last allocated ID.
        waits: for how long, in seconds, IDs above ``settled`` have waited; 0 if none waits.
        blockers: the transactions in progress that they wait for, as texts for people; empty while unknown.
        error: why the state cannot be read since the last poll; None if it can.
    """

    settled: Token | None
    last_value: Token
    waits: float = 0.0
    blockers: Sequence[str] = ()
    error: str | None = None


class IWatch(Protocol):
    """Polls the database for rows of external writers in the tables of mapped ``streams``."""

    streams: Sequence[StreamName]

    async def poll(self) -> Mapping[StreamName, SequenceState]:
        """Return the state of each stream, by name, in one query; StoreError if the database does not answer.

        Each poll returns another mapping.  A stream that has not changed has the same SequenceState object as before.
        """
        ...


class ISqlExecutor(Protocol):
    """Runs SQL for a function on the database's own thread; both methods raise StoreError.

    ``dialect`` is ``sqlite`` or ``postgresql``.  A parameter is ``?`` in SQLite and ``%s`` in PostgreSQL.
    """

    dialect: str

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows."""
        ...

    def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement once per item of ``parameters``."""
        ...


class IReactorCalls(Protocol):
    """Lets a function on the database's thread call one on the reactor's thread."""

    def __call__(self, function: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Call ``function`` there, wait for its coroutine, and return or raise what it does."""
        ...


class IAllocation(Protocol):
    """An ID of ``stream`` that is allocated from its sequence in the transaction that stores the fact."""

    stream: StreamName

    def expect(self) -> None:
        """Note that the transaction begins; on the reactor's thread."""
        ...

    def allocated(self, id_: int) -> None:
        """Take the ID, on the database's thread; another one if the transaction is tried again.

        SequenceRegressedError: it is not larger than all that were used before ``expect``.
        """
        ...


class ITransaction(Protocol):
    """A transaction of the application; it begins with the first statement, and ``commit`` or ``rollback`` ends it.

    In SQLite it holds the write lock of the database from the first statement on.  In PostgreSQL other transactions go
    on; after a statement that failed, only ``rollback`` works.  Statements run one after the other, off the reactor's
    thread.
    """

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows; StoreError has the database's message."""
        ...

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement once per item of ``parameters``."""
        ...

    async def run(self, function: Callable[[ISqlExecutor], _T]) -> _T:
        """Call ``function`` inside the transaction, on the database's thread, and return or raise what it does.

        However many statements it runs, that takes one change of threads.
        """
        ...

    async def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> None:
        """Store ``writes`` and ``receipt`` with all earlier statements; return when they are durable.

        If it raises StoreError, nothing is stored.  A commit that is not synchronous may return before it is durable
        (``IStreamStore.transaction``).
        """
        ...

    async def rollback(self) -> None:
        """Undo all statements."""
        ...

    async def blockers(self) -> Sequence[str]:
        """Return what a call that has not returned waits for, as texts for people; empty if that is not known."""
        ...


class IApplicationRows(Protocol):
    """Which rows there are of declared streams in tables of an application."""

    async def present(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token) -> set[Token]:
        """Return the tokens of ``writer`` with ``after < token <= upto`` that have rows in tables of an application."""
        ...

    async def writers(self, stream: StreamName, *, after: Token, upto: Token) -> Mapping[InstanceName, Token]:
        """Return the writers with rows in a range of tables of an application, each with its largest token there.

        Tables without a column of writers are left out.
        """
        ...

    def note_former(self, stream: StreamName, writers: Collection[InstanceName]) -> None:
        """Note that these writers of a declared stream have ended, so what is visible of them is complete.

        On a standby, ``facts`` else returns what is below the stored position of the writer.  They have none.
        """
        ...

    async def last_row(self, stream: StreamName) -> Token:
        """Return the largest token in tables of the application, of all writers; 0 if there are none.

        Rows that ``where`` leaves out count, too.
        """
        ...


class IStreamStore(ICatchUp, IKeptFacts, IApplicationRows, Protocol):
    """Where facts and positions are stored.

    ``warnings`` are sentences about what works and should be corrected; ``declare`` may add some.  Any method may raise
    StoreError if the database fails, and UnknownStreamError for a stream that was not declared.

    ``commits_lost``, a Deferred, fires if the database has lost commits of this process, as after a restore.  From then
    on every method raises that CommitsLostError.
    """

    warnings: list[str]
    commits_lost: Any

    async def open(self) -> None:
        """Connect and upgrade the tables; SchemaError if a newer version of this package has upgraded them.

        A store on a file claims the file; StoreError names the process that writes it.
        """
        ...

    async def declare(self, *definitions: StreamDefinition) -> None:
        """Create the streams' tables, or check them, in one transaction; SchemaError if a mapped table does not fit."""
        ...

    async def claim(self, instance: InstanceName) -> None:
        """Make this process the only one that writes as ``instance``; StoreError names the process that does.

        See docs/protocol/traps.md 34.
        """
        ...

    async def claimed_elsewhere(self, names: Collection[InstanceName]) -> Mapping[InstanceName, bool]:
        """Return which of these names other processes have claimed, each with whether its process is connected now.

        A process that is not connected may connect again, and commit.
        """
        ...

    async def take_over(self, name: InstanceName) -> bool:
        """End the claim of ``name`` if its process is not connected; return whether a claim was ended.

        After that the process commits nothing under this name.  Another process may claim the name.
        """
        ...

    def sequence(self, stream: StreamName) -> ISequence | None:
        """Return the stream's sequence; None if its one writer counts by itself, from ``positions``."""
        ...

    async def positions(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return, per writer, the largest token that was committed or stored; it may be above an open ID."""
        ...

    async def positions_of(self, streams: Sequence[StreamName]) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Return what ``positions`` returns, of several streams at once."""
        ...

    async def applied_positions(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, Token]:
        """Return, per writer, the applied position of ``follower``; the stream need not be declared."""
        ...

    async def applied_counts(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, str]:
        """Return, per writer, the text that ``Write.counts`` has stored; the stream need not be declared.

        It may be older than the position.  On PostgreSQL nothing is stored if the user may not create the table.
        """
        ...

    async def claim_tables(self, streams: Sequence[StreamName], instance: InstanceName, *, copy: bool) -> None:
        """Claim the tables of declared streams for their writers or, with ``copy``, for one follower.

        StoreError if another process fills it.  No process copies facts into the database where they are written, and
        no two processes copy them into one table.
        """
        ...

    async def stored_positions(self) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Return the stored positions, per stream and writer, in one query.

        All IDs of a writer up to its stored position are complete.
        """
        ...

    async def history(self, stream: StreamName, writer: InstanceName, follower: str = "") -> History:
        """Return the stored history of a writer, or the one that ``follower`` has followed; empty if there is none."""
        ...

    async def histories(self, writer: InstanceName) -> Mapping[StreamName, History]:
        """Return the stored history of a writer in every stream that has one."""
        ...

    async def store_histories(
        self, writer: InstanceName, histories: Mapping[StreamName, History], follower: str = ""
    ) -> None:
        """Store the history of a writer in each of these streams, in one transaction; they need not be declared."""
        ...

    async def raise_position(self, write: Write, history: History, former: History) -> None:
        """Store a position and ``history``, the new history of its writer, in one transaction.

        PositionMovedError: the stored position is not ``write.expected``, or the stored history is not ``former``.
        Then nothing is stored.
        """
        ...

    async def skipped_facts(
        self,
        follower: InstanceName,
        stream: StreamName | None = None,
        key: tuple[InstanceName, Token] | None = None,
        *,
        states: Collection[SkipState] = (),
        limit: int,
    ) -> Sequence[SkippedFact]:
        """Return what ``Write.skipped`` has stored for a follower, the latest first.

        Of all streams or of one, of all facts or of one, in all states or in some; streams need not be declared.
        """
        ...

    async def skipped_counts(self, follower: InstanceName, stream: StreamName) -> Mapping[InstanceName, int]:
        """Return how many facts of each writer a follower leaves out now; the stream need not be declared."""
        ...

    def watch(self) -> IWatch | None:
        """Return the watch of the mapped streams declared so far; None if external writers can write none."""
        ...

    def transaction(self, *, synchronous: bool = True) -> ITransaction:
        """Return a transaction that has not begun.  If it has no statements, its commit joins a group commit.

        If it is not ``synchronous``, a commit in SQLite does not wait for the disk.  It survives SIGKILL.  A power loss
        may undo the last such commits, until a synchronous commit or ``sync`` has returned.
        """
        ...

    async def sync(self) -> None:
        """Return once every commit is on the disk, also those that are not synchronous."""
        ...

    def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> Awaitable[None]:
        """Commit as a transaction without statements does, together with all commits that wait."""
        ...

    def interact(
        self,
        function: Callable[[ISqlExecutor, IReactorCalls], Sequence[Write]],
        allocation: IAllocation | None = None,
    ) -> Awaitable[None]:
        """Call ``function`` in a transaction, on the database's thread; commit with the writes that it returns.

        With ``allocation``, for a stream with a sequence, the transaction allocates its ID first.
        That takes one change of threads.  In SQLite, functions that wait share one commit; an exception of one undoes
        its own statements only.  If the database undoes a whole transaction, the others are called again.  To cancel
        the result ends the waiting, not the transaction.
        """
        ...

    async def read(self, function: Callable[[ISqlExecutor], _T]) -> _T:
        """Call ``function``, which only reads, on the database's thread; all its statements read one snapshot."""
        ...

    async def find_receipt(self, key: str) -> Sequence[Token] | None:
        """Return the tokens of the receipt that was committed under ``key``; None if there is none.

        It is there for a day at least, whatever the wall clock does meanwhile.
        """
        ...

    async def verify(self) -> None:
        """Raise CommitsLostError if the database has lost commits of this process."""
        ...

    async def check(self) -> None:
        """Return if the database answers and can be written, and facts could be stored last; else raise StoreError.

        A small commit proves it.  Calls at one time share it, and its success counts for a second.
        """
        ...

    async def close(self) -> None:
        """Finish what runs, and close the database."""
        ...


class WriterStatus(msgspec.Struct, frozen=True):
    """The status of one writer of a stream in this process.

    ``position`` is the settled ID (on the writer) or the applied position (on a follower).  ``published`` is the
    published position.  ``state`` is ``writing``, ``opening``, ``elsewhere``, ``former``, ``live``, ``catching up``,
    ``waiting for others``, ``stopped`` or ``not connected``.  ``error`` is why it is stopped.  ``lost_and_found`` is
    the number of facts that were lost on the way here, and were found in the writers' database.  ``failed`` is the
    token of the fact that a function cannot take now.  ``skipped`` is the number of facts that are left out.
    ``audited`` is the ID up to which the audit has compared: no fact is found below it later.  It is None without an
    audit.  ``late`` is the number of facts that were applied below the position.  ``gone`` is the ID up to which this
    process has deleted facts.  ``source`` is where a long catch-up fetches facts from.
    """

    instance: InstanceName
    position: Token
    published: Token
    state: str
    error: str | None = None
    lost_and_found: int = 0
    failed: Token | None = None
    skipped: int = 0
    audited: Token | None = None
    late: int = 0
    gone: int = 0
    source: str | None = None

    @property
    def lag(self) -> int:
        """The number of IDs that are settled and not published (on the writer), or published and not applied."""
        return abs(self.published - self.position)


class InMemoryLogStatus(msgspec.Struct, frozen=True):
    """The status of an in-memory log: facts, bytes, and the acknowledged token of each federation sender."""

    facts: int
    bytes: int
    acknowledged: Mapping[InstanceName, Token]


class StreamStatus(msgspec.Struct, frozen=True):
    """The status of one stream in this process.

    ``open_count`` is the number of open IDs.  ``oldest_open`` is the smallest open ID and its age in seconds.  Each of
    ``notes`` is a sentence about what should be corrected, or what IDs wait for.
    """

    definition: StreamDefinition
    writers: Sequence[WriterStatus]
    open_count: int = 0
    oldest_open: tuple[Token, float] | None = None
    kept: InMemoryLogStatus | None = None
    notes: Sequence[str] = ()

    @property
    def minimum(self) -> Token:
        """The lowest position of a writer."""
        return min((each.position for each in self.writers), default=Token(0))

    @property
    def maximum(self) -> Token:
        """The highest position of a writer."""
        return max((each.position for each in self.writers), default=Token(0))


class PeerStatus(msgspec.Struct, frozen=True):
    """One connection: ``since`` is in seconds since 1970, ``last_command`` the name of the last command received.

    ``shares_name``: another live process has this name.  Only a connection to Redis skips messages: ``skipped`` counts
    them by reason, ``unknown_commands`` and ``not_followed`` are the names of commands and streams among them.
    """

    name: str
    address: str
    since: float
    lines_out: int
    bytes_out: int
    queued_bytes: int
    last_command: str
    shares_name: bool = False
    skipped: Mapping[str, int] = msgspec.field(default_factory=dict)
    unknown_commands: Sequence[str] = ()
    not_followed: Sequence[str] = ()


class Sample(msgspec.Struct, frozen=True):
    """One sample of the metrics page (docs/http.md); the values of ``labels`` are limited."""

    name: str
    value: float
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
