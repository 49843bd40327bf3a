"""What the streams need from outside, as protocols.  ``after`` excludes, ``upto`` includes, everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs

from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from replication.streams.facts import Fact
    from replication.streams.registry import StreamDefinition
    from replication.wire.grammar import InstanceName, StreamName

_T = TypeVar("_T")


@attrs.frozen
class Page:
    """Facts in ascending order, and how far they reach: everything up to ``upto`` is here, or never was.

    ``limited`` says that there may be more beyond ``upto``.
    """

    facts: Sequence[Fact]
    upto: Token
    limited: bool


class ICatchUp(Protocol):
    """A source of facts that were missed."""

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return the facts of ``writer`` with ``after < token <= upto``, about ``limit`` rows of them.

        A fact is never cut: one with more rows than ``limit`` comes alone and whole.  CatchUpError or StoreError if
        the source cannot tell.
        """
        ...


@attrs.frozen
class Write:
    """One (stream, writer)'s part of a transaction.

    ``facts`` are stored under ``writer``; the stored position becomes ``upto``, which never lowers it; beside facts, 0
    leaves it alone, so that this waits for nobody who moves it.  ``expected`` makes the transaction fail with
    PositionMovedError unless that is the stored position before (0 if there is none).
    ``reset`` lowers the position to ``upto`` and deletes every fact of ``writer`` above it.

    With a ``follower`` it is the position up to which that process has applied what ``writer`` wrote elsewhere: there
    are no ``facts``, the stream need not be declared, and ``positions`` does not tell it where many processes share a
    database.
    """

    stream: StreamName
    writer: InstanceName
    upto: Token
    facts: Sequence[Fact] = ()
    expected: Token | None = None
    reset: bool = False
    follower: InstanceName | None = None


@attrs.frozen
class Receipt:
    """The name under which a client may ask again what became of an append, and what to answer."""

    key: str
    tokens: Sequence[Token]


class ISequence(Protocol):
    """Where the IDs of a stream come from that several processes write: drawn outside any transaction."""

    async def draw(self, count: int) -> Sequence[int]:
        """Return ``count`` IDs, ascending, larger than all that this process drew before, which nobody else gets.

        They need not follow each other, and none is given back.  StoreError if there is no getting them now.
        """
        ...


@attrs.frozen
class Reach:
    """How far the IDs of a stream have come that anybody may draw, in this process or in a program of somebody else.

    Every ID up to ``complete`` was committed or rolled back; None: it is not known yet of any.  ``drawn`` is the last
    one that was given out.  If they differ, ``waits`` is for how many seconds, ``blockers`` who is waited for as far as
    that is known, in words for people.  ``error`` is why nothing can be seen since.
    """

    complete: Token | None
    drawn: Token
    waits: float = 0.0
    blockers: Sequence[str] = ()
    error: str | None = None


class IWatch(Protocol):
    """Sees what others write into the tables of mapped ``streams``."""

    streams: Sequence[StreamName]

    async def look(self) -> Mapping[StreamName, Reach]:
        """Return how far each mapped stream has come, in one trip to the database; StoreError if it does not answer.

        It is another mapping at each look; a Reach in it that is the same object as before has not changed.
        """
        ...


class IStatements(Protocol):
    """A database, to a function that runs on the database's own thread; both raise what ITransaction's do.

    ``dialect`` is ``sqlite`` or ``postgresql``.  Parameters are ``?`` in SQLite and ``%s`` in PostgreSQL.
    """

    dialect: str

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows."""
        ...

    def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement once per item of ``parameters``."""
        ...


class ITransaction(Protocol):
    """A transaction of the application, which begins with the first statement.

    From then on it holds the write lock of an SQLite database; in PostgreSQL, where others go on, a statement that
    fails leaves nothing to do but ``rollback``.  Statements run one after the other, off the reactor thread.
    ``commit`` or ``rollback`` ends it, once.
    """

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows; StoreError names what the database said."""
        ...

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement once per item of ``parameters``."""
        ...

    async def run(self, function: Callable[[IStatements], _T]) -> _T:
        """Run ``function`` inside the transaction, on the database's thread: many statements for one trip there.

        It returns what ``function`` does, or raises it.
        """
        ...

    async def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> None:
        """Store ``writes`` with what was executed and return once all of it is durable; StoreError: none of it is."""
        ...

    async def rollback(self) -> None:
        """Undo what was executed."""
        ...


class IStreamStore(ICatchUp, Protocol):
    """Where facts and positions are kept.

    ``warnings`` says what works but should be mended, a sentence each; ``declare`` may add to it.
    """

    warnings: list[str]

    async def open(self) -> None:
        """Connect and bring the tables up to date; SchemaError if they are newer than this code."""
        ...

    async def declare(self, definition: StreamDefinition) -> None:
        """Make sure that the stream's table is there; SchemaError says what is wrong with a mapped one."""
        ...

    async def claim(self, instance: InstanceName) -> None:
        """Make this process the only one that writes as ``instance``; StoreError says which one does."""
        ...

    async def present(self, names: Collection[InstanceName]) -> Collection[InstanceName]:
        """Return which of these names other processes have claimed that are there now, and may write."""
        ...

    def sequence(self, stream: StreamName) -> ISequence | None:
        """Return where the stream's IDs come from; None if whoever writes it counts by itself, from ``positions``."""
        ...

    async def positions(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return, per writer, the largest token that was ever committed or stored as a position."""
        ...

    async def applied(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, Token]:
        """Return, per writer, the position of ``follower`` in a stream that need not be declared."""
        ...

    async def fill(self, stream: StreamName, instance: InstanceName, *, copy: bool) -> None:
        """Say who fills the table of a declared stream: those who write it or, for a ``copy``, one follower.

        StoreError if it is somebody else: of many processes that share a database, nobody copies facts to where they
        are written, and two do not copy them into one table.
        """
        ...

    async def stored(self) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Return, per stream and writer, the positions that were stored, in one question however many there are.

        Below a stored position nothing of its writer is open, while ``positions`` may be above an open ID.
        """
        ...

    def watch(self) -> IWatch | None:
        """Return what sees others write into the mapped streams declared up to now; None if nobody else can."""
        ...

    def transaction(self) -> ITransaction:
        """Return a transaction that has not begun; one that only commits shares its commit with others that wait."""
        ...

    async def read(self, function: Callable[[IStatements], _T]) -> _T:
        """Run ``function``, which only reads, on the database's thread; all its statements see one moment."""
        ...

    async def recall(self, key: str) -> Sequence[Token] | None:
        """Return the tokens of the receipt that was committed under ``key`` in the last day."""
        ...

    async def check(self) -> None:
        """Return if the database answers and can be written, else StoreError."""
        ...

    async def close(self) -> None:
        """Finish what runs and let go of the database."""
        ...


@attrs.frozen
class WriterStatus:
    """How one writer of a stream stands here.

    ``position`` is what is settled (on the writer) or applied (on a follower), ``announced`` the largest token known to
    be settled at the writer; their difference is the lag.  ``state`` is a word for people: ``writing``, ``live``,
    ``catching up``, ``stopped``, ``not connected``; ``error`` is why it is stopped.
    """

    instance: InstanceName
    position: Token
    announced: Token
    state: str
    error: str | None = None

    @property
    def lag(self) -> int:
        """IDs that are settled and not announced (on the writer), or announced and not applied (on a follower)."""
        return abs(self.announced - self.position)


@attrs.frozen
class KeptStatus:
    """What a stream without a table has in memory, in facts and bytes, and how far each sender has acknowledged it."""

    facts: int
    bytes: int
    acknowledged: Mapping[InstanceName, Token]


@attrs.frozen
class StreamStatus:
    """How one stream stands here; ``oldest_open`` is an incomplete ID and its age in seconds.

    ``notes`` say what should be mended or is waited for, a sentence each.
    """

    definition: StreamDefinition
    writers: Sequence[WriterStatus]
    open_count: int = 0
    oldest_open: tuple[Token, float] | None = None
    kept: KeptStatus | None = None
    notes: Sequence[str] = ()

    @property
    def minimum(self) -> Token:
        """The position that every writer has reached: the linear current ID."""
        return min((each.position for each in self.writers), default=Token(0))

    @property
    def maximum(self) -> Token:
        """The position of the writer that is furthest."""
        return max((each.position for each in self.writers), default=Token(0))


@attrs.frozen
class PeerStatus:
    """One connection: ``since`` in seconds of wall time, ``last_command`` the last word heard from it."""

    name: str
    address: str
    since: float
    lines_out: int
    bytes_out: int
    queued_bytes: int
    last_command: str


@attrs.frozen
class Sample:
    """One figure for a metrics page; ``kind`` is ``counter`` or ``gauge``, ``labels`` never grow without bound."""

    name: str
    kind: str
    meaning: str
    value: float
    labels: Mapping[str, str] = attrs.field(factory=dict)
