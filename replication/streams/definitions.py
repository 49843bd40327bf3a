"""Stream definitions, and the registry that finds them by name (docs/protocol/streams.md)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Literal

import attrs

from replication.errors import ConfigError, RowError, UnknownStreamError, did_you_mean
from replication.streams.retention import Retention
from replication.wire import grammar
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
        raise ConfigError(f"give a list of names, not the text {values!r}")
    return tuple(values)


def _instances(values: Iterable[str]) -> tuple[InstanceName, ...]:
    return tuple(map(InstanceName, _names(values)))


@attrs.frozen(kw_only=True)
class SourceTable:
    """One of the tables of a joined stream.

    Args:
        table: its name.  In SQL expressions it is called ``source``.
        row: an SQL expression for each field of a row.  A plain name is a column of ``table``.
        joins: SQL joins that add columns, as in ``LEFT JOIN names ON names.id = source.id``; they must not add rows.
        where: an SQL expression that selects rows.
        id_column: the column with the stream ID.  It should have an index.
        instance_column: the column with the writer's name; NULL means ``master``.
        kind: if given, a row is ``[kind, [expression, …]]``, so that a stream can have rows of several kinds.
        dialect: the only kind of database that has this table, ``"sqlite"`` or ``"postgresql"``; None means both.

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
    """One stream: its name, the fields of its rows, its writers, and where its facts are stored.

    Without ``table``, ``tables`` and ``in_memory``, the stream has the generic table ``stream_NAME``.  ConfigError if a
    combination cannot work.

    Args:
        name: of the stream: letters, digits, ``_``, ``.`` and ``-``, a letter first, at most 100 characters.
        row: the names of a row's fields, in order.  Writers check rows against it.  None: a row is any JSON value.
        table: the application's table of a mapped stream; ``row`` names its columns.
        id_column: its column with the stream ID.
        instance_column: its column with the writer's name, if several writers share the table.
        where: an SQL expression that selects rows of ``table``.
        negative: the table counts -1, -2, …; the tokens on the wire count upwards.
        writers: the names of the instances that may write.  Empty: every process that declares the stream.
        key: names of fields.  Of the facts with equal values in these fields only the last one matters; a replay may
            leave out the others.
        shares: the name of the stream whose stream IDs this stream uses too (docs/protocol/ids.md F5).
        in_memory: there is no table; the one writer keeps the last fact for each ``key``, or those of the last minutes.
        tables: the tables of a joined stream.  For one ID, the rows of a table come after those of the tables before
            it.  The application writes the tables, in a fact's transaction.
        json_fields: fields of ``tables`` with JSON text, which are decoded.
        boolean_fields: fields of ``tables`` that become true or false, whatever the database stores.
        ascii_fields: fields of ``tables`` with JSON text, which stay texts, escaped to ASCII.
        distinct: equal rows of one ID in ``tables`` are sent once, and rows are sorted.
        dialect: the only kind of database that has ``table``; in others the stream has its generic table.
        sequence: the sequence of PostgreSQL for stream IDs, if it is not the column's own.
        known_by_token: any writer may send the facts of another one, too.  A follower applies each once, by its token.
        position_name: for a stream that another program writes, and that is only read here: its name in that program's
            ``stream_positions``.  A writer without a position there writes no more.  Empty: no positions are stored,
            and a row is inserted in the transaction that allocates its ID.
        retention: what the writer keeps, such as ``30d, 10 GiB``, and ``all`` (docs/operations.md, Retention).  Only
            facts of a generic table are ever deleted.

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
    known_by_token: bool = attrs.field(default=False, kw_only=True)
    position_name: str | None = attrs.field(default=None, kw_only=True)
    retention: str | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        """Check the combination; ConfigError if it cannot work."""
        if _NAME.fullmatch(self.name) is None:
            raise ConfigError(f"stream name {self.name!r}: use letters, digits, '_', '.' and '-', a letter first")
        if unknown := [each for each in self.key if each not in (self.row or ())]:
            raise ConfigError(f"stream {self.name!r}: key names {', '.join(unknown)}, which row lacks")
        if self.in_memory and (
            self.table is not None or self.tables or self.shares is not None or len(self.writers) > 1
        ):
            raise ConfigError(f"stream {self.name!r} is in memory: it has one writer, no table, and IDs of its own")
        if self.tables:
            self._check_tables()
        elif self.distinct or (*self.json_fields, *self.boolean_fields, *self.ascii_fields):
            raise ConfigError(f"stream {self.name!r}: distinct and …_fields need tables")
        if self.retention is not None:
            self._check_retention(self.retention)
        self._check_names(self.sequence or "x")
        if self.table is None:
            if self.instance_column or self.where:
                raise ConfigError(f"stream {self.name!r}: instance_column and where need a table")
            return
        if not self.row:
            raise ConfigError(f"stream {self.name!r} is mapped onto table {self.table!r}: row must list its columns")
        self._check_names(self.table, self.id_column, self.instance_column or "x", *self.row)

    def _check_retention(self, text: str) -> None:
        if not self.may_forget:
            raise ConfigError(f"stream {self.name!r}: only facts of a generic table have a retention")
        try:
            Retention.parse(text)
        except ConfigError as error:
            raise ConfigError(f"stream {self.name!r}: {error}") from error

    def _check_tables(self) -> None:
        name, row = self.name, self.row
        if self.table is not None or row is None:
            raise ConfigError(f"stream {name!r} has tables: give row, the names of its fields, and no table")
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
                raise ConfigError(
                    f"stream {self.name!r}: {name!r} is not the plain name of a table or column: use 1 to 63 "
                    "letters, digits and '_', and no digit first; PostgreSQL finds the schema by search_path"
                )

    def sources(self, dialect: Dialect) -> Sequence[SourceTable]:
        """Return the tables of a joined stream that a database of this kind has."""
        return [each for each in self.tables if each.dialect in (None, dialect)]

    def all_sources(self, dialect: Dialect) -> Sequence[SourceTable]:
        """Return the tables of a mapped or joined stream that a database of this kind has."""
        if not self.maps(dialect):
            return self.sources(dialect)
        return [
            SourceTable(
                table=self.table or "",
                row=self.row or (),
                where=self.where,
                id_column=self.id_column,
                instance_column=self.instance_column,
            )
        ]

    def maps(self, dialect: Dialect) -> bool:
        """Return whether the stream is mapped onto one table in a database of this kind."""
        return self.table is not None and self.dialect in (None, dialect)

    @property
    def generator(self) -> StreamName:
        """The stream whose ID generator this one uses: itself, or ``shares``."""
        return self.shares or self.name

    @property
    def stored_name(self) -> str | None:
        """Its name in ``stream_positions``; None if its positions are not stored there."""
        return self.name if self.position_name is None else self.position_name or None

    @property
    def has_kinds(self) -> bool:
        """Whether its rows have several kinds, so that rows of several tables make one fact."""
        return len({source.kind for source in self.tables}) > 1

    @property
    def in_tables(self) -> bool:
        """Whether the stream is mapped onto, or joined from, tables of the application."""
        return self.table is not None or bool(self.tables)

    @property
    def may_forget(self) -> bool:
        """Whether its facts may be deleted: those of applications, and those in memory, never are."""
        return not (self.in_tables or self.in_memory or self.position_name is not None)

    @property
    def names_writers(self) -> bool:
        """Whether each fact has the name of its writer in the database: a column of every table has it."""
        return all(each.instance_column for each in self.tables or ([self] if self.table else ()))

    def is_mapped(self, dialect: Dialect) -> bool:
        """Return whether a database of this kind has the stream in the application's tables, with IDs of its own."""
        return self.shares is None and (self.maps(dialect) or bool(self.sources(dialect)))

    def encode(self, row: object) -> str:
        """Return ``row`` as JSON text; RowError if it is not JSON or does not have the fields of ``row``."""
        fields = self.row
        if fields is not None and not (isinstance(row, (list, tuple)) and len(row) == len(fields)):
            got = f"an array of {len(row)}" if isinstance(row, (list, tuple)) else f"a {type(row).__name__}"
            raise RowError(f"a row of {self.name!r} is [{', '.join(fields)}], not {got}")
        return grammar.encode_row(row)

    def written_by(self, instance: InstanceName) -> bool:
        """Return whether ``instance`` may write the stream."""
        return not self.writers or instance in self.writers

    def has_one_writer(self, instance: InstanceName) -> bool:
        """Return whether ``instance`` may write the stream, and its table has no column with the writer."""
        return self.table is not None and self.instance_column is None and self.written_by(instance)


class StreamRegistry:
    """The definitions of a process by name, in the order of their declaration."""

    def __init__(self, definitions: Sequence[StreamDefinition] = ()) -> None:
        """Declare ``definitions``; ConfigError if two names are equal or differ in letter case only."""
        self._streams: dict[StreamName, StreamDefinition] = {}
        self._folded: dict[str, StreamName] = {}
        for definition in definitions:
            self._add(definition)
        for definition in definitions:
            self._check_shared(definition)

    def declare(self, definition: StreamDefinition) -> None:
        """Add a definition; an equal one may be there already.  ConfigError as in ``__init__``."""
        self._check_shared(definition)
        self._add(definition)

    def _add(self, definition: StreamDefinition) -> None:
        known = self._folded.setdefault(definition.name.casefold(), definition.name)
        if self._streams.setdefault(known, definition) != definition:
            raise ConfigError(f"stream {definition.name!r} is declared twice, as {known!r} before")

    def _check_shared(self, definition: StreamDefinition) -> None:
        """Raise ConfigError if the IDs of the stream in ``shares`` cannot be shared."""
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
        """Return the definition of a name; UnknownStreamError lists the known names."""
        try:
            return self._streams[StreamName(name)]
        except KeyError:
            known = f"{', '.join(self._streams) or 'none'}{did_you_mean(name, self._streams)}"
            text = f"no stream {name[:100]!r} here; known streams: {known}"
            raise UnknownStreamError(text, stream=name, lasting=True) from None

    def __contains__(self, name: object) -> bool:
        """Return whether a stream of that name is declared."""
        return name in self._streams

    def __iter__(self) -> Iterator[StreamDefinition]:
        """Iterate over all definitions, oldest first."""
        return iter(self._streams.values())

    def __len__(self) -> int:
        """Return the number of definitions."""
        return len(self._streams)
