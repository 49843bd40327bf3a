"""The streams that this process knows: their definitions, by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import attrs

from replication.errors import ConfigError, UnknownStreamError
from replication.wire.grammar import InstanceName, StreamName

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}", re.ASCII)
_COLUMN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}", re.ASCII)

CACHES: Final = StreamName("caches")
FEDERATION: Final = StreamName("federation")


def _names(values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise ConfigError(f"a list of names is wanted, not the text {values!r}")
    return tuple(values)


def _instances(values: Iterable[str]) -> tuple[InstanceName, ...]:
    return tuple(map(InstanceName, _names(values)))


@attrs.frozen
class StreamDefinition:
    """What is agreed about one stream.

    ``row`` names the fields of a row, in order, and makes writers check them; without it a row is any JSON value.
    ``table`` maps the stream onto a table of the application, whose ``id_column`` holds the stream ID; without it the
    stream has a generic table of its own, ``stream_NAME``.  ``instance_column`` tells the writers of a shared table
    apart, ``where`` is SQL that picks rows, ``negative`` says that the table counts -1, -2, … while the wire counts up.
    ``writers`` are the instances that may write; empty means whoever serves the stream.  ``key`` names fields of
    ``row`` and says that of the facts with equal values there only the last one matters, so that history may be told
    without the others.  ``shares`` names the stream whose ID generator this one uses: no ID is in both,
    and facts of both are told in the order of their IDs (protocol F5; trap 17).  ``in_memory`` says that there is no
    table: facts live in their one writer, which keeps the last one per ``key``, or those of the last minutes.
    """

    name: StreamName = attrs.field(converter=StreamName)
    row: tuple[str, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_names), kw_only=True)
    table: str | None = attrs.field(default=None, kw_only=True)
    id_column: str = attrs.field(default="stream_id", kw_only=True)
    instance_column: str | None = attrs.field(default=None, kw_only=True)
    where: str | None = attrs.field(default=None, kw_only=True)
    negative: bool = attrs.field(default=False, kw_only=True)
    writers: tuple[InstanceName, ...] = attrs.field(default=(), converter=_instances, kw_only=True)
    key: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    shares: StreamName | None = attrs.field(default=None, converter=attrs.converters.optional(StreamName), kw_only=True)
    in_memory: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Refuse, by ConfigError, a definition that cannot work."""
        if _NAME.fullmatch(self.name) is None:
            raise ConfigError(f"stream name {self.name!r}: use letters, digits, '_', '.' and '-', a letter first")
        if unknown := [each for each in self.key if each not in (self.row or ())]:
            raise ConfigError(f"stream {self.name!r}: key names {', '.join(unknown)}, which row does not")
        if self.in_memory and (self.table is not None or self.shares is not None or len(self.writers) > 1):
            raise ConfigError(f"stream {self.name!r} is in memory: it has one writer, no table, and IDs of its own")
        if self.table is None:
            if self.instance_column or self.where:
                raise ConfigError(f"stream {self.name!r}: instance_column and where need a table")
            return
        if not self.row:
            raise ConfigError(f"stream {self.name!r} is mapped onto table {self.table!r}: row must list its columns")
        for column in (self.table, self.id_column, self.instance_column or "x", *self.row):
            if _COLUMN.fullmatch(column) is None:
                raise ConfigError(f"stream {self.name!r}: {column!r} is not the plain name of a table or column")

    def written_by(self, instance: InstanceName) -> bool:
        """Whether ``instance`` may write here."""
        return not self.writers or instance in self.writers


class StreamRegistry:
    """Definitions by name, in the order in which they were declared."""

    def __init__(self, definitions: Sequence[StreamDefinition] = ()) -> None:
        """Declare ``definitions``; ConfigError if two have one name (letter case does not tell names apart)."""
        self._streams: dict[StreamName, StreamDefinition] = {}
        self._folded: dict[str, StreamName] = {}
        for definition in definitions:
            self._add(definition)
        for definition in definitions:
            self._check_shared(definition)

    def declare(self, definition: StreamDefinition) -> None:
        """Add a stream; declaring the same one twice is harmless."""
        self._check_shared(definition)
        self._add(definition)

    def _add(self, definition: StreamDefinition) -> None:
        known = self._folded.setdefault(definition.name.casefold(), definition.name)
        if self._streams.setdefault(known, definition) != definition:
            raise ConfigError(f"stream {definition.name!r} is declared twice, as {known!r} before")

    def _check_shared(self, definition: StreamDefinition) -> None:
        """Refuse, by ConfigError, to share the IDs of a stream that cannot be shared with."""
        if definition.shares is None:
            return
        what = f"stream {definition.name!r} shares the IDs of {definition.shares!r}"
        other = self._streams.get(definition.shares)
        if other is None:
            raise ConfigError(f"{what}, which is not declared")
        if other.shares is not None or other.in_memory:
            whose = f"those of {other.shares!r}" if other.shares else "IDs in memory"
            raise ConfigError(f"{what}, which has {whose} itself")
        if (other.writers, other.negative) != (definition.writers, definition.negative):
            raise ConfigError(f"{what}: both need the same writers, and the same sign")

    def __getitem__(self, name: str) -> StreamDefinition:
        """Return the definition; UnknownStreamError lists what there is."""
        try:
            return self._streams[StreamName(name)]
        except KeyError:
            known = ", ".join(self._streams) or "none"
            raise UnknownStreamError(f"no stream {name[:100]!r} here; known streams: {known}") from None

    def __contains__(self, name: object) -> bool:
        """Whether a stream of that name is declared."""
        return name in self._streams

    def __iter__(self) -> Iterator[StreamDefinition]:
        """All definitions, oldest first."""
        return iter(self._streams.values())

    def __len__(self) -> int:
        """How many streams are declared."""
        return len(self._streams)
