"""Statements of this package that are sent together over libpq, in one round trip.

Each transaction sends BEGIN, its facts, its mark and COMMIT.  A cursor of psycopg takes several times the processor
time for each of them, because it serves values of all types, and the pipeline of psycopg takes as much again.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import attrs
import psycopg
from psycopg import errors, generators
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGresult

PREPARED: Final = 500  # statements of a session: a few for each stream
PREPARED_AT: Final = 5  # uses, as in psycopg


@attrs.define(eq=False)
class _Statement:
    """A statement with parameters; ``name`` is empty until the server has it prepared."""

    text: bytes
    uses: int = 0
    name: bytes = b""


class WaitingStatements:
    """The statements of a transaction that are sent together with its next one."""

    def __init__(self) -> None:
        self.opening: str | None = None  # BEGIN, until it is sent
        self.added: list[tuple[str, Sequence[object]]] = []

    def take(self) -> list[tuple[str, Sequence[object]]]:
        """Return the statements, which are sent now."""
        opening: list[tuple[str, Sequence[object]]] = [] if self.opening is None else [(self.opening, ())]
        taken = opening + self.added
        self.clear()
        return taken

    def clear(self) -> None:
        """Drop the statements."""
        self.opening = None
        self.added.clear()


class Pipeline:
    """Sends statements over a connection of the driver.

    If the driver prepares no statement there, a frequent one with parameters is prepared here.  After a ROLLBACK or a
    DROP, the driver drops everything that is prepared, unless it has prepared nothing itself.
    """

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection
        self._prepares = connection.prepare_threshold is None
        self._encoding = connection.info.encoding
        self._statements: dict[str, _Statement] = {}  # the latest used last
        self._names = 0

    def run(self, statements: Sequence[tuple[str, Sequence[object]]]) -> list[PGresult]:
        """Run statements in turn, and return the result of each; after one that fails, no further one runs.

        A parameter, ``%s``, is a text, a number or a list of them; the statement gives it its type.
        """
        libpq, encoding = self._connection.pgconn, self._encoding
        values = [[_dump(each, encoding) for each in parameters] for _, parameters in statements]
        used = [self._use(sql, encoding) if parameters else None for sql, parameters in statements]
        new: list[tuple[_Statement, bytes, int]] = []  # with the place of the result
        wanted = list[bool]()
        libpq.enter_pipeline_mode()
        for forgotten in self._forget():  # first: an error here must not follow a COMMIT
            libpq.send_query_params(b"DEALLOCATE " + forgotten, None)
            wanted.append(False)
        for (sql, _), statement, parameters in zip(statements, used, values, strict=True):
            if statement is None:
                libpq.send_query_params(sql.encode(encoding), None)
            elif statement.name:
                libpq.send_query_prepared(statement.name, parameters)
            elif statement.uses < PREPARED_AT or not self._prepares:
                libpq.send_query_params(statement.text, parameters)
            else:
                self._names += 1
                name = b"replication_%d" % self._names
                new.append((statement, name, len(wanted)))
                libpq.send_prepare(name, statement.text)
                wanted.append(False)
                libpq.send_query_prepared(name, parameters)
            wanted.append(True)
        libpq.pipeline_sync()
        results = self._connection.wait(self._fetch(len(wanted)))
        libpq.exit_pipeline_mode()
        for statement, name, place in new:
            if results[place].status == ExecStatus.COMMAND_OK:  # it stays prepared if a later statement fails
                statement.name = name
        for result in results:
            if result.status == ExecStatus.FATAL_ERROR:
                error = error_from_result(result, encoding)
                if isinstance(error, errors.InvalidSqlStatementName):  # a function of the server has deallocated it
                    self._statements.clear()
                raise error
        return [result for result, each in zip(results, wanted, strict=True) if each]

    def begin_with_id(self, sequence: str) -> int:
        """Begin a transaction, and return an ID from a sequence: one text takes a third of the time of two here."""
        name = sequence.replace("'", "''")
        sql = f"BEGIN; SELECT nextval('{name}')"
        result = self._connection.pgconn.exec_(sql.encode(self._encoding))
        if result.status != ExecStatus.TUPLES_OK:
            raise error_from_result(result, self._encoding)
        return int(result.get_value(0, 0) or 0)

    def _fetch(self, count: int) -> PQGen[list[PGresult]]:
        """Send all, and return the results."""
        libpq = self._connection.pgconn
        yield from generators.send(libpq)
        results = []
        for _ in range(count):
            results += yield from generators.fetch_many(libpq)
            if libpq.status == ConnStatus.BAD and results[-1].status == ExecStatus.FATAL_ERROR:
                raise error_from_result(results[-1], self._encoding)
        yield from generators.fetch_many(libpq)  # the end of the pipeline
        return results

    def _forget(self) -> list[bytes]:
        """Forget statements that were not used for longest; return the names of those that are prepared."""
        count = max(0, len(self._statements) - PREPARED)
        forgotten = [self._statements.pop(sql).name for sql in [*islice(self._statements, count)]]
        return [name for name in forgotten if name]

    def _use(self, sql: str, encoding: str) -> _Statement:
        statement = self._statements.pop(sql, None)
        if statement is None:
            first, *others = sql.split("%s")
            parts = [f"${place}{text}" for place, text in enumerate(others, 1)]
            statement = _Statement("".join([first, *parts]).encode(encoding))
        statement.uses += 1
        self._statements[sql] = statement
        return statement


def _dump(value: object, encoding: str) -> bytes | None:
    """Return a value as the server reads it."""
    if value is None:
        return None
    text = value if isinstance(value, str) else _array(value) if isinstance(value, list) else str(value)
    if "\0" in text:
        raise psycopg.DataError("a text of PostgreSQL cannot contain NUL (0x00) bytes")
    return text.encode(encoding)


def _array(values: list[object]) -> str:
    return f"{{{','.join(map(_element, values))}}}"


def _element(value: object) -> str:
    if not isinstance(value, str):
        return str(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
