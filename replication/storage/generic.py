"""The generic table ``stream_NAME``, for every database: a row of the table is a row of the stream, as JSON text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from replication.errors import SchemaError, StoreError
from replication.storage.contract import ISession, TooLargeError, facts_gone
from replication.storage.pages import Rows, cut_rows, split_rows
from replication.storage.table import StreamTable
from replication.streams.interfaces import FactSlice
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.storage.contract import WrittenFact
    from replication.streams.definitions import StreamDefinition

_Session = TypeVar("_Session", bound=ISession)


class GenericRows(StreamTable[_Session]):
    """What the generic tables of all databases share; a subclass sets the SQL.

    ``_page``, whose parameters are the writer, the range and the limit, returns a whole page as two values, the IDs and
    the texts; and whether there is a table ``gone_facts``.  Where there is one, ``_page_after_gone``, with the writer
    as one more parameter, returns up to where facts are gone instead, as of the same snapshot.  ``_measure`` returns
    the last ID, the rows and the bytes.  The driver releases the interpreter's lock for each row, so a page that is
    read row by row beside a busy reactor takes several times as long.
    """

    COLUMNS: Final = ("stream_id", "ord", "instance_name", "row")
    _page: str
    _page_after_gone: str
    _measure: str

    def __init__(self, definition: StreamDefinition, name: str, mark: str) -> None:
        super().__init__(definition)
        self.name, way = name, self.direction
        self._fact = f'SELECT "row" FROM "{name}" WHERE stream_id = {mark} ORDER BY ord'  # noqa: S608 - a name of a stream
        self._has_gone = False  # whether the database is known to have the table ``gone_facts``
        self._delete_upto = f'DELETE FROM "{name}" WHERE stream_id {way.upto} {mark} AND instance_name = {mark}'  # noqa: S608
        self._delete = f'DELETE FROM "{name}" WHERE stream_id {way.above} {mark} AND instance_name = {mark}'  # noqa: S608

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise SchemaError unless the table, which has these columns, was created by this package."""
        if not columns:
            raise SchemaError(
                f"there is no table {self.name!r}, and no fact of stream {self.definition.name!r}; if its facts are in "
                "a table of the application, define it in [[streams]] here as at the process that writes it"
            )
        if [*columns] != [*self.COLUMNS]:
            raise SchemaError(
                f"table {self.name!r} has the columns {', '.join(columns)}, so it is not one of ours: "
                f"rename it, or map stream {self.definition.name!r} onto it"
            )

    def delete(self, session: _Session, writer: InstanceName, above: Token) -> None:
        """Delete the facts of ``writer`` above a token."""
        session.run(self._delete, (self.direction.sign * above, writer))

    def delete_upto(self, session: _Session, writer: InstanceName, upto: Token) -> None:
        """Delete the facts of ``writer`` up to a token."""
        session.run(self._delete_upto, (self.direction.sign * upto, writer))

    def measure(self, session: _Session, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> FactSlice:
        """Return a slice as ``IKeptFacts.measure`` does."""
        sign = self.direction.sign
        ((last, rows, size),) = session.ask(self._measure, (writer, sign * after, sign * upto, limit))
        return FactSlice(after if last is None else Token(sign * last), rows, int(size))

    def rows_of(self, written: Sequence[WrittenFact]) -> list[tuple[int, int, InstanceName, str]]:
        """Return the rows of facts, in the order of COLUMNS."""
        sign = self.direction.sign
        return [
            (sign * token, place, writer, text)
            for writer, facts in written
            for token, texts in facts
            for place, text in enumerate(texts)
        ]

    def present(self, session: _Session, writer: InstanceName, after: Token, upto: Token) -> set[Token]:  # noqa: ARG002
        """Return nothing: the stream may have tables of an application, but none in a database of this kind."""
        return set()

    def rows(self, session: _Session, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Rows:
        """Return a page; a shorter one if ``limit`` rows do not fit into one value of the database.

        FactsGoneError if facts above ``after`` were deleted.
        """
        sign = self.direction.sign
        parameters = writer, sign * after, sign * upto, limit + 1
        try:
            if self._has_gone:
                ((ids, texts, gone),) = session.ask(self._page_after_gone, (writer, *parameters))
                if gone is not None and gone > after:
                    raise facts_gone(self.definition.name, writer, Token(gone))
            else:
                ((ids, texts, self._has_gone),) = session.ask(self._page, parameters)
                if self._has_gone:
                    return self.rows(session, writer, after=after, upto=upto, limit=limit)
        except StoreError as error:
            self._has_gone = False  # a backup from before may have been restored
            if limit == 1 or not isinstance(error, TooLargeError):
                raise
            return self.rows(session, writer, after=after, upto=upto, limit=limit // 2)
        if ids is None:
            return Rows([], [], upto, limited=False)
        tokens, texts = split_rows(self.name, ids, texts)
        rows = cut_rows(tokens, texts, upto=upto, limit=limit)
        if rows is not None:
            return rows
        whole = session.ask(self._fact, (sign * tokens[0],))
        if not whole:  # it was deleted meanwhile
            return self.rows(session, writer, after=after, upto=upto, limit=limit)
        return Rows.of_fact(tokens[0], [text for (text,) in whole], upto)


def newest_of(rows: Sequence[tuple[Any, ...]]) -> Mapping[InstanceName, Token]:
    """Return the positions in rows of (writer, token)."""
    return {InstanceName(writer): Token(token) for writer, token in rows}
