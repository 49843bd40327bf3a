"""Rows as objects: what a stream's arrays mean, for whoever does not want to count fields."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import msgspec

from replication.errors import RemoteProtocolError, RowError
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.streams.facts import Fact
    from replication.streams.registry import StreamDefinition
    from replication.wire.grammar import StreamName

R = TypeVar("R")

Flag = bool | Literal[0, 1]  # true and false, or what SQLite makes of them; a row has true and false


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A row that is an array of fields, in the order of declaration; fields that a later version adds are let go."""

    FLAGS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Let 0 and 1 be false and true."""
        for name in self.FLAGS:
            msgspec.structs.force_setattr(self, name, bool(getattr(self, name)))

    def named(self) -> Mapping[str, object]:
        """Return the fields by name, as JSON has them."""
        return {name: msgspec.to_builtins(getattr(self, name)) for name in self.__struct_fields__}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the fields, in order."""
        return cls.__struct_fields__


class History(Enum):
    """What a stream's tables remember."""

    WHOLE = "append-only"  # every fact
    NEWEST = "last value only"  # a fact until another one replaces it; what is gone leaves a gap
    NONE = "memory only"  # nothing


class TypedStream(Generic[R]):
    """A stream whose rows are known: its definition, the class (or union of classes) of its rows, what its tables keep.

    ``TypedStream(StreamDefinition("orders", row=OrderRow.names()), OrderRow)`` makes one of your own.
    """

    def __init__(self, definition: StreamDefinition, row: Any, history: History = History.WHOLE) -> None:
        self.definition = definition
        self.history = history
        self.row = row
        self._decode = msgspec.json.Decoder(row).decode

    @property
    def name(self) -> StreamName:
        """What the stream is called."""
        return self.definition.name

    def read(self, fact: Fact) -> list[R]:
        """Return the rows of a fact, typed; RowError says which field of which one is not as it should be."""
        try:
            return [self.read_row(text) for text in fact.texts]
        except RowError as error:
            raise RowError(f"{self.name} {fact.token}: {error}") from error

    def read_row(self, text: str) -> R:
        """Return one row, typed; RowError if it is none of this stream."""
        try:
            row: R = self._decode(text)
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
            return self._read_slowly(text, error)
        return row

    def _read_slowly(self, text: str, error: Exception) -> R:
        """Read what the fast decoder did not: lone surrogates, which are JSON, or nothing."""
        try:
            row: R = msgspec.convert(grammar.read_json(text), self.row)
        except (msgspec.ValidationError, RemoteProtocolError):
            raise RowError(f"not a row of {self.name}: {error}: {text[:200]}") from error
        return row
