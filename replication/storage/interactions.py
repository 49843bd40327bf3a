"""Interactions: plain functions of the application that run in a transaction, on the thread of its connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replication.storage.contract import Batch, ISession
    from replication.streams.interfaces import ISqlExecutor


class CheckedStatements:
    """An ISqlExecutor for an interaction.

    ``check`` raises StoreError for a statement that would end the transaction.  So does the session once the database
    has undone the transaction: a later statement would be durable by itself.
    """

    def __init__(self, session: ISession, check: Callable[[str], None]) -> None:
        self.dialect = session.dialect
        self._session = session
        self._check = check

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows."""
        self._check(sql)
        self._session.begun  # noqa: B018 (it raises)
        return self._session.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement once per item."""
        self._check(sql)
        self._session.begun  # noqa: B018 (it raises)
        self._session.executemany(sql, parameters)


@attrs.define(eq=False)
class Interaction:
    """Calls ``function`` in a transaction; what it returns is stored there, and is ``batch`` from then on."""

    _function: Callable[[ISqlExecutor], Batch]
    _check: Callable[[str], None]
    batch: Batch | None = attrs.field(init=False, default=None)

    def run(self, session: ISession) -> Batch:
        """Call the function, and return what is to be stored; a second call starts over."""
        self.batch = None
        self.batch = self._function(CheckedStatements(session, self._check))
        session.begun  # noqa: B018 (it raises if the function has passed over an error that undid the transaction)
        return self.batch
