"""A stream without a table here: its facts are in the memory of their writer, or elsewhere; a position is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.errors import StoreError
from replication.storage.postgres_tables import quoted, relation_name
from replication.storage.tables import UP
from replication.streams.registry import StreamDefinition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.storage.pages import Rows
    from replication.wire.grammar import InstanceName, Token


class NoTable:
    """What stands for the table, in either database."""

    direction = UP
    sources: Sequence[str] = ()
    gives_ids: tuple[str, str] | None = None

    def __init__(self, definition: StreamDefinition) -> None:
        self.definition = definition
        self.sequence = quoted(relation_name(definition.name, "_seq"))

    def declare(self, _database: object, *, may_create: bool) -> Sequence[str]:  # noqa: ARG002
        """Make nothing."""
        return ()

    def insert(self, *_: object) -> None:
        """Refuse, by StoreError, to store facts."""
        raise self._refusal()

    def delete(self, *_: object) -> None:
        """Delete nothing: there is nothing."""

    def rows(self, *_: object, **__: object) -> Rows:
        """Refuse, by StoreError, to read facts."""
        raise self._refusal()

    def newest(self, *_: object) -> Mapping[InstanceName, Token]:
        """Return nothing: only what was stored as a position is known."""
        return {}

    def beyond(self, _token: Token) -> Sequence[str]:
        """Return nothing: there is nothing."""
        return ()

    def last_id(self, _database: object) -> None:
        """Return None: nobody else writes here."""

    def _refusal(self) -> StoreError:
        return StoreError(f"facts of stream {self.definition.name!r} are in the memory of their writer only")


FOLLOWED: Final = NoTable(StreamDefinition("followed"))  # stands for every stream of which only a position is kept
