"""What all databases share: what a table of facts does, a commit's batch, the direction of IDs, and common errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from replication.errors import FactsGoneError, PositionMovedError, StoreError, UnknownStreamError, ValueRefusedError
from replication.streams.interfaces import ISqlExecutor
from replication.streams.merged_page import BEGIN_AFTER
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from replication.storage.table import StreamTable
    from replication.streams.definitions import StreamDefinition
    from replication.streams.facts import Fact
    from replication.streams.interfaces import Receipt, Write
    from replication.wire.grammar import StreamName

MASTER: Final = InstanceName("master")  # the writer of rows without an instance name

WrittenFact = tuple[InstanceName, "Sequence[Fact]"]  # a writer, and facts of it
TAKEN_CURE: Final = (  # of a fact whose ID has another fact
    "after a restore, start each writer of the stream; if its database was emptied or exchanged, delete what a writer "
    "that no longer exists has here (docs/operations.md, Backups); if two writers with databases of their own write "
    "it, follow each of them with a worker that has a database of its own"
)


class ReceiptTakenError(StoreError):
    """An append with the same idempotency key was committed first.  The message does not have the key: it is secret."""

    def __init__(self, database: str) -> None:
        super().__init__(f"database {database!r}: an append with the same idempotency key was stored meanwhile")


class IdTakenError(StoreError):
    """Another program has written rows with the ID of a fact: the same may work with another ID."""


class TooLargeError(StoreError):
    """A value is larger than the database allows."""


class ClaimedError(StoreError):
    """Another process writes this database, or writes it under this name; on PostgreSQL ``holder`` describes it."""

    holder: str = ""


class CopiedError(StoreError):
    """The positions of a stream are those of a copy, not of a function."""


class Direction(msgspec.Struct, frozen=True):
    """The direction in which a table counts: a stored ID is ``sign`` times its token.  The rest is SQL."""

    sign: int
    above: str
    upto: str
    furthest: str
    order: str
    minus: str

    @classmethod
    def of(cls, definition: StreamDefinition) -> Direction:
        """Return the direction of a stream; one without a table counts up."""
        return DOWN if definition.negative and not definition.in_memory else UP


UP: Final = Direction(1, ">", "<=", "max", "ASC", "")
DOWN: Final = Direction(-1, "<", ">=", "min", "DESC", "-")


class UsedByOneProcess:
    """The claims of other processes on a store that one process uses: there are none."""

    async def claimed_elsewhere(self, names: Collection[InstanceName]) -> Mapping[InstanceName, bool]:  # noqa: ARG002
        """Return none."""
        return {}

    async def take_over(self, name: InstanceName) -> bool:  # noqa: ARG002
        """Return False: there is no claim to end."""
        return False


class Batch(msgspec.Struct, frozen=True):
    """What one commit stores: writes with their tables, and a receipt.

    ``now`` is its wall time in seconds; receipts up to the time ``expired`` are too old (ReceiptClock).  A
    commit without statements waits for the disk if it is ``synchronous``; with statements, their transaction decides.
    """

    writes: Sequence[tuple[StreamTable[Any], Write]]
    receipt: Receipt | None
    now: float
    expired: float
    synchronous: bool = True


class ISession(ISqlExecutor, Protocol):
    """A session of a database, blocking; every error of the driver is raised as StoreError.

    As an ISqlExecutor it runs statements of the application, in a transaction.
    """

    name: str  # of the database, for messages; without a password

    @property
    def begun(self) -> bool:
        """Whether a transaction was begun and not ended."""
        ...

    def run(self, sql: str, parameters: Sequence[object] = (), *, prepare: bool = True) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows; without ``prepare`` its plan is not kept."""
        ...

    def ask(self, sql: str, parameters: Sequence[object] = (), *, prepare: bool = True) -> list[tuple[Any, ...]]:
        """Run a statement that only reads; it runs again if the session was lost before."""
        ...

    def add(self, sql: str, parameters: Sequence[object]) -> object:
        """Run a statement of the transaction, now or together with a later one; its rows are not needed."""
        ...

    def begin(self, how: str = "") -> None:
        """Begin a transaction."""
        ...

    def commit(self) -> None:
        """Make the transaction durable."""
        ...

    def rollback(self) -> None:
        """Undo the transaction; do nothing if there is none."""
        ...

    def close(self) -> None:
        """End the session."""
        ...


def undeclared(stream: StreamName) -> UnknownStreamError:
    """Return the error for a stream that was not declared."""
    return UnknownStreamError(f"stream {stream[:100]!r} was not declared to the store", stream=stream)


def facts_gone(stream: StreamName, writer: InstanceName, upto: Token) -> FactsGoneError:
    """Return the error for a page that would begin below facts that were deleted."""
    cure = f"get them from segments, or {BEGIN_AFTER.format(upto=upto)}"
    return FactsGoneError(
        f"facts of {stream} by {writer} up to {upto} are gone: {cure}",
        stream=stream,
        writer=writer,
        upto=upto,
    )


def ended(end: str) -> StoreError:
    """Return the error for a transaction that is used after its end."""
    return StoreError(f"the transaction was {end}: begin another one")


def moved(write: Write, stored: Token) -> PositionMovedError:
    """Return the error for a stored position that is not the one that ``write`` expects."""
    return PositionMovedError(
        f"the position of {write.writer!r} in stream {write.stream!r} is {stored}, not {write.expected}: "
        "does another process use this database?",
        stream=write.stream,
        writer=write.writer,
        expected=write.expected,
        stored=stored,
    )


def refuse_another_writer(definition: StreamDefinition, me: InstanceName, stored: Collection[str], *more: str) -> None:
    """Raise StoreError if another instance than ``me`` has published the rows of a table without an instance column.

    Under a second name all rows would be published again.  ``stored`` are the instances with a position; ``more`` are
    further tables of positions in this database, for the statement that renames the writer.
    """
    name, table = definition.name, definition.table
    others = sorted(set(stored) - {me, ""})
    if not others:
        return
    writers = ", ".join(map(repr, others))
    where = f"WHERE stream_name = '{name}' AND instance_name = '{others[0]}'"
    updates = "; ".join(f"UPDATE {each} SET instance_name = '{me}' {where}" for each in ("stream_positions", *more))  # noqa: S608
    cure = f"{updates}; and the other steps of a rename, also at each follower (docs/operations.md, Mapped tables)"
    if me in stored:
        cure = f"DELETE FROM stream_positions {where}"  # noqa: S608 - a statement for a person to run
    raise StoreError(
        f"stream {name!r}: table {table!r} has no instance_column, so it has one writer: that is {writers}, not {me!r}."
        f" Start this process as {others[0]!r}; or, if several instances write, set instance_column; or, if "
        f"{others[0]!r} was renamed to {me!r}, {cure}"
    )


def differs(
    definition: StreamDefinition, token: Token, texts: Sequence[str], kept: Sequence[str], *, was_there: bool
) -> StoreError:
    """Return the error for a fact whose rows in the table differ.

    With ``was_there`` the rows are older than the fact, so another ID may work: IdTakenError.  It does not show these
    rows, which its reader may not be allowed to read.  Otherwise the columns changed the values, and no later attempt
    can work: ValueRefusedError.
    """
    name, table = definition.name, f"table {definition.table!r}"
    if was_there:
        why = f"{table} has rows for fact {token} already; another program wrote them: try again, with another ID"
        return IdTakenError(f"stream {name!r}: {why}")
    found = f"fact {token} is {shown(texts)}, but {table} has {shown(kept)} for it"
    return ValueRefusedError(f"stream {name!r}: {found}: append values as the columns store them")


def shown(texts: Sequence[str]) -> str:
    """Return rows for an error message, shortened."""
    return " ".join(texts)[:200] or "no row"
