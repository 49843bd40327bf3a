"""Where a database has the facts of one stream: the base of all kinds of tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from replication.errors import StoreError
from replication.storage.contract import Direction, ISession
from replication.storage.names import quoted, relation_name
from replication.streams.definitions import StreamDefinition

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from replication.storage.contract import WrittenFact
    from replication.storage.pages import Rows
    from replication.streams.interfaces import FactSlice
    from replication.wire.grammar import InstanceName, Token

_Session_contra = TypeVar("_Session_contra", bound=ISession, contravariant=True)


class StreamTable(Generic[_Session_contra]):
    """The facts of one stream.

    By itself it has none: the stream is in memory, or is only followed, and the database has positions of it.  For
    PostgreSQL there are ``sequence``, from which the IDs come, and ``sources``, the tables of the application that
    external writers may insert into, both quoted.  ``default_id`` is one of these whose ID column has a DEFAULT, and
    that column; ``declare`` sets it.  ``former`` are the writers of which ``IStreamStore.note_former`` was called.
    """

    sources: Sequence[str] = ()
    default_id: tuple[str, str] | None = None
    former: Collection[InstanceName] = frozenset()

    def __init__(self, definition: StreamDefinition) -> None:
        self.definition = definition
        self.direction = Direction.of(definition)
        self.sequence = quoted(relation_name(definition.generator, "_seq"))

    def declare(self, session: _Session_contra, *, may_create: bool) -> Sequence[str]:  # noqa: ARG002
        """Create or check the table.  Returns warnings; raises SchemaError if the table does not fit."""
        return ()

    def is_missing(self, session: _Session_contra) -> bool:  # noqa: ARG002
        """Whether ``declare`` may create the table, and has not done so yet."""
        return False

    def check_ids(self, session: _Session_contra, beside: Iterable[StreamDefinition]) -> None:
        """Raise SchemaError if a table of the application has an ID that is no token; ``beside`` are other streams."""

    def insert(self, session: _Session_contra, written: Sequence[WrittenFact]) -> None:  # noqa: ARG002
        """Store the rows of facts, of one writer or several."""
        raise self._refusal()

    def delete(self, session: _Session_contra, writer: InstanceName, above: Token) -> None:
        """Delete the facts of ``writer`` above a token."""

    def delete_upto(self, *_: Any) -> None:
        """Delete the facts of a writer up to a token; only generic tables do."""
        raise self._kept()

    def measure(self, *_: Any, **_range: Any) -> FactSlice:
        """Return a slice as ``IKeptFacts.measure`` does; only generic tables do."""
        raise self._kept()

    def rows(self, session: _Session_contra, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Rows:  # noqa: ARG002
        """Return a page as ``IStreamStore.facts`` does, as columns."""
        raise self._refusal()

    def present(self, session: _Session_contra, writer: InstanceName, after: Token, upto: Token) -> set[Token]:  # noqa: ARG002
        """Return the tokens of ``writer`` with ``after < token <= upto``; only tables of the application answer."""
        raise self._refusal()

    def writers(self, session: _Session_contra, after: Token, upto: Token) -> Mapping[InstanceName, Token]:  # noqa: ARG002
        """Return the writers with rows in a range, each with its largest token; only tables of the application do."""
        return {}

    def newest(self, session: _Session_contra, stored: Mapping[InstanceName, Token]) -> Mapping[InstanceName, Token]:  # noqa: ARG002
        """Return each writer's largest token, at least where it is above its position in ``stored``."""
        return {}

    def last_id(self, session: _Session_contra) -> Token | None:  # noqa: ARG002
        """Return the largest token in tables of the application, of all writers; None if there are none."""
        return None

    def newest_above(self, token: Token) -> Sequence[str]:  # noqa: ARG002
        """Return SQL for the largest token above one, in tables of the application with an index on the ID."""
        return ()

    def oldest(self) -> Sequence[str]:
        """Return SQL for the smallest token, in tables of the application with an index on the ID."""
        return ()

    def has_rows(self, token: str) -> Sequence[str]:  # noqa: ARG002
        """Return SQL conditions: a table of the application, with an index on the ID, has a row of a token."""
        return ()

    def _kept(self) -> StoreError:
        return StoreError(
            f"facts of stream {self.definition.name!r} are not in a table of this package: none is deleted"
        )

    def _refusal(self) -> StoreError:
        return StoreError(f"facts of stream {self.definition.name!r} are only in the memory of their writer")


# For every stream of which a follower stores a position.
POSITIONS_ONLY: Final[StreamTable[ISession]] = StreamTable(StreamDefinition("followed"))
