"""What the application's statements leave in a session, and how the next transaction is kept from it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    Statements = Sequence[tuple[str, Sequence[object]]]

RESET: Final = "RESET ALL"
# The schemas in which the session finds tables, and last that of temporary tables, which usually comes first.
SCHEMAS: Final = (
    "SELECT concat_ws(', ', string_agg(quote_ident(name), ', ' ORDER BY place), 'pg_temp') "
    "FROM unnest(current_schemas(false)) WITH ORDINALITY AS schemas (name, place)"
)
SET_SCHEMAS: Final = "SELECT set_config('search_path', %s, true)"
# What may outlast a transaction, and is no setting: advisory locks, cursors, temporary tables.
LASTING: Final = re.compile(
    r"\bpg_(?:try_)?advisory_(?:un)?lock|\bWITH\s+HOLD\b"
    r"|(?:\bCREATE\s+(?:(?:GLOBAL|LOCAL)\s+)?|(?<!INSERT\s)(?<!MERGE\s)\bINTO\s+|\bpg_)TEMP(?:ORARY)?\b"
    r"(?!.*\bON\s+COMMIT\s+DROP\b)",
    re.IGNORECASE | re.DOTALL,
)


class Leftovers:
    """What the transaction in progress may leave in its session.

    A function of the server can change settings without a trace in the statement, so all settings are reset, in the
    trip of the COMMIT.  A rollback undoes them.  ``after_reset`` are statements that follow a reset.  ``schemas`` is
    the search_path with which this package finds its tables: the application may have set another one, or have made
    temporary tables of the same names.
    """

    def __init__(self) -> None:
        self.after_reset: Statements = ()
        self.schemas = ""
        self._used = self._lasts = False

    def note(self, sql: str) -> None:
        """Note that the application runs a statement."""
        self._used = True
        if LASTING.search(sql):
            self._lasts = True

    def outdate(self) -> None:
        """Note that the session's settings may be out of date, so that it is replaced."""
        self._lasts = True

    def before_store(self) -> Statements:
        """Return the statements to run before this package stores anything in the transaction."""
        return [(SET_SCHEMAS, (self.schemas,))] if self._used else ()

    def resets(self) -> Statements:
        """Return the statements to run after the COMMIT."""
        return [(RESET, ()), *self.after_reset] if self._used else ()

    def end(self) -> bool:
        """Note that the transaction has ended; returns whether the session must not be used again."""
        lasts, self._used, self._lasts = self._lasts, False, False
        return lasts
