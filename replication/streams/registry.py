"""The streams that this process knows: their definitions, by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal

import attrs

from replication.errors import ConfigError, UnknownStreamError
from replication.wire.grammar import InstanceName, StreamName

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}", re.ASCII)
_COLUMN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}", re.ASCII)

CACHES: Final = StreamName("caches")
FEDERATION: Final = StreamName("federation")

Dialect = Literal["sqlite", "postgresql"]


def _names(values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise ConfigError(f"a list of names is wanted, not the text {values!r}")
    return tuple(values)


def _instances(values: Iterable[str]) -> tuple[InstanceName, ...]:
    return tuple(map(InstanceName, _names(values)))


@attrs.frozen(kw_only=True)
class SourceTable:
    """One of the tables that the rows of a stream are gathered from.

    ``row`` are SQL expressions, and ``where`` is one, over ``source``, which is ``table``, and over what ``joins`` adds
    to it, as in ``LEFT JOIN names ON names.id = source.id``; what is joined must not multiply rows.  A plain name is a
    column of ``table``.  ``id_column`` has the stream ID, by which rows are sought, so it should have an index;
    ``instance_column`` the writer, ``master`` where it is NULL.  With a ``kind`` a row is ``[kind, [expression, …]]``:
    such a stream has rows of several kinds.  ``dialect`` says that only databases of that kind have this table, or
    understand this SQL.
    """

    table: str
    row: tuple[str, ...] = attrs.field(converter=_names)
    joins: str = ""
    where: str | None = None
    id_column: str = "stream_id"
    instance_column: str | None = None
    kind: str | None = None
    dialect: Dialect | None = None


def _tables(values: Iterable[SourceTable]) -> tuple[SourceTable, ...]:
    return tuple(values)


@attrs.frozen
class StreamDefinition:
    """What is agreed about one stream.

    ``row`` names the fields of a row, in order, and makes writers check them; without it a row is any JSON value.
    ``table`` maps the stream onto a table of the application, whose ``id_column`` holds the stream ID; without it the
    stream has a generic table of its own, ``stream_NAME``.  ``instance_column`` tells the writers of a shared table
    apart, ``where`` is SQL that picks rows, ``negative`` says that the table counts -1, -2, … while the wire counts up.
    ``tables`` gathers rows from several tables instead, or by joins: in one ID, a table's rows come after those of the
    tables before it.  They are read only: the application writes them, in a fact's transaction.  Of their fields,
    ``json_fields`` are texts of JSON and become what they say, ``boolean_fields`` become true or false whatever the
    database has, and the texts of ``ascii_fields``, JSON too, stay texts but are escaped to be ASCII.  With
    ``distinct``, the rows of an ID are told once each, and sorted.
    ``dialect`` says that only databases of that kind have ``table``; elsewhere the stream has its generic one.
    ``sequence`` names the one of PostgreSQL that IDs come from, if the column does not say.
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
    tables: tuple[SourceTable, ...] = attrs.field(default=(), converter=_tables, kw_only=True)
    json_fields: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    boolean_fields: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    ascii_fields: tuple[str, ...] = attrs.field(default=(), converter=_names, kw_only=True)
    distinct: bool = attrs.field(default=False, kw_only=True)
    dialect: Dialect | None = attrs.field(default=None, kw_only=True)
    sequence: str | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Refuse, by ConfigError, a definition that cannot work."""
        if _NAME.fullmatch(self.name) is None:
            raise ConfigError(f"stream name {self.name!r}: use letters, digits, '_', '.' and '-', a letter first")
        if unknown := [each for each in self.key if each not in (self.row or ())]:
            raise ConfigError(f"stream {self.name!r}: key names {', '.join(unknown)}, which row does not")
        if self.in_memory and (
            self.table is not None or self.tables or self.shares is not None or len(self.writers) > 1
        ):
            raise ConfigError(f"stream {self.name!r} is in memory: it has one writer, no table, and IDs of its own")
        if self.tables:
            self._check_tables()
        elif self.distinct or (*self.json_fields, *self.boolean_fields, *self.ascii_fields):
            raise ConfigError(f"stream {self.name!r}: distinct and …_fields are for what is gathered from tables")
        self._check_names(self.sequence or "x")
        if self.table is None:
            if self.instance_column or self.where:
                raise ConfigError(f"stream {self.name!r}: instance_column and where need a table")
            return
        if not self.row:
            raise ConfigError(f"stream {self.name!r} is mapped onto table {self.table!r}: row must list its columns")
        self._check_names(self.table, self.id_column, self.instance_column or "x", *self.row)

    def _check_tables(self) -> None:
        name, row = self.name, self.row
        if self.table is not None or row is None:
            raise ConfigError(
                f"stream {name!r} is gathered from tables: give row, the names of its fields, and no table"
            )
        converted = (*self.json_fields, *self.boolean_fields, *self.ascii_fields)
        if unknown := [each for each in converted if each not in row]:
            raise ConfigError(f"stream {name!r}: there is no field {', '.join(unknown)} in row")
        for source in self.tables:
            self._check_names(source.table, source.id_column, source.instance_column or "x")
            fields = 2 if source.kind is not None else len(source.row)
            if fields != len(row) or not source.row or (source.kind is not None and converted):
                raise ConfigError(
                    f"stream {name!r}, table {source.table!r}: its row does not give the stream's {len(row)} fields"
                )

    def _check_names(self, *names: str) -> None:
        for name in names:
            if _COLUMN.fullmatch(name) is None:
                raise ConfigError(f"stream {self.name!r}: {name!r} is not the plain name of a table or column")

    def sources(self, dialect: Dialect) -> Sequence[SourceTable]:
        """Return the tables that a database of this kind gathers rows from; none if it does not."""
        return [each for each in self.tables if each.dialect in (None, dialect)]

    def maps(self, dialect: Dialect) -> bool:
        """Whether a database of this kind has the stream in one table of the application."""
        return self.table is not None and self.dialect in (None, dialect)

    @property
    def generator(self) -> StreamName:
        """The stream whose IDs these are: this one, or the one that it shares them with."""
        return self.shares or self.name

    def is_mapped(self, dialect: Dialect) -> bool:
        """Whether a database of this kind has the stream in tables of the application, with IDs of its own."""
        return self.shares is None and (self.maps(dialect) or bool(self.sources(dialect)))

    def written_by(self, instance: InstanceName) -> bool:
        """Whether ``instance`` may write here."""
        return not self.writers or instance in self.writers

    def has_one_writer(self, instance: InstanceName) -> bool:
        """Whether ``instance`` writes here, and the rows of one table do not say so."""
        return self.table is not None and self.instance_column is None and self.written_by(instance)


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
