"""Rows as objects with named, typed fields, instead of arrays."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import msgspec

from replication.errors import RemoteProtocolError, RowError
from replication.streams.definitions import StreamDefinition
from replication.wire import grammar
from replication.wire.grammar import StreamName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.streams.facts import Fact

R = TypeVar("R")

Flag = bool | Literal[0, 1]  # SQLite has 0 and 1 for false and true; a row has false and true


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A row: an array of fields, in the order of declaration.  Further fields of a newer release are dropped.

    ``FLAGS`` names the fields of type ``Flag``, which become ``bool``.
    """

    FLAGS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Make the flags ``bool``."""
        for name in self.FLAGS:
            msgspec.structs.force_setattr(self, name, bool(getattr(self, name)))

    def named(self) -> Mapping[str, object]:
        """Return the fields by name, as JSON values."""
        return {name: msgspec.to_builtins(getattr(self, name)) for name in self.__struct_fields__}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the fields, in order."""
        return cls.__struct_fields__


_Row = TypeVar("_Row", bound=Row)


class History(Enum):
    """Which facts a stream's tables keep."""

    WHOLE = "append-only"  # every fact
    NEWEST = "last value only"  # each fact until a newer one replaces it
    NONE = "memory only"  # nothing


class TypedStream(Generic[R]):
    """A stream with typed rows.

    Args:
        definition: of the stream.
        row: the class of its rows, or a union of classes.
        history: which facts its tables keep.

    Example: ``TypedStream(StreamDefinition("orders", row=OrderRow.names()), OrderRow)``.

    """

    def __init__(self, definition: StreamDefinition, row: Any, history: History = History.WHOLE) -> None:
        self.definition = definition
        self.history = history
        self.row = row
        self._decode = msgspec.json.Decoder(row).decode

    @property
    def name(self) -> StreamName:
        """The name of the stream."""
        return self.definition.name

    def read(self, fact: Fact) -> list[R]:
        """Return the rows of a fact as objects; RowError names the field that is wrong."""
        try:
            return [self.read_row(text) for text in fact.texts]
        except RowError as error:
            raise RowError(f"{self.name} {fact.token}: {error}", stream=self.name) from error

    def read_row(self, text: str) -> R:
        """Return one row, given as JSON text, as an object; RowError if it is not a row of this stream."""
        try:
            row: R = self._decode(text)
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
            return self._read_slowly(text, error)
        return row

    def _read_slowly(self, text: str, error: Exception) -> R:
        """Decode what the fast decoder refuses: lone surrogates are JSON.  RowError for anything else."""
        try:
            row: R = msgspec.convert(grammar.read_json(text), self.row)
        except (msgspec.ValidationError, UnicodeEncodeError, RemoteProtocolError):
            raise RowError(f"not a row of {self.name}: {error}: {text[:200]}", stream=self.name) from error
        return row


def typed_stream(name: str, row: type[_Row], history: History = History.WHOLE, **options: Any) -> TypedStream[_Row]:
    """Return the stream ``name`` with rows of one class, which has the names of their fields.

    ``options`` are those of StreamDefinition; TypeError for another one.
    """
    return TypedStream(StreamDefinition(StreamName(name), row=row.names(), **options), row, history)
