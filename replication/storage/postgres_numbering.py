"""The trigger by which a transaction has its number before it draws an ID from the sequence of a table.

PostgreSQL gives a transaction its number when it first changes something, and drawing an ID need not be that.  With the
trigger, who is under way is told by numbers alone (``streams.gate``), as long as IDs come from the column's DEFAULT.
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which lets plain ones through only

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.storage.postgres_session import PostgresSession

TRIGGER: Final = "replication_number_first"

_HAS: Final = (  # one that replicas skip, or that was switched off, is not there
    f"EXISTS (SELECT FROM pg_trigger WHERE tgrelid = to_regclass(name) AND tgname = '{TRIGGER}' AND tgenabled = 'A' "
    f"AND tgtype & {4 | 16} = {4 | 16})"  # before INSERT and UPDATE, which may say SET id = DEFAULT
)
_EACH: Final = "FROM unnest(%s::text[]) WITH ORDINALITY AS each (name, place) ORDER BY place"
IS_THERE: Final = f"ARRAY(SELECT {_HAS} {_EACH})"  # of each table, in order
# Who inserts into a partition passes the trigger of the whole table by, and the other way round; both draw from one
# sequence.
IS_NUMBERED: Final = (
    f"ARRAY(SELECT {_HAS} AND NOT EXISTS (SELECT FROM pg_inherits WHERE to_regclass(name) IN (inhparent, inhrelid)) "
    f"{_EACH})"
)
_FUNCTION: Final = f"""
    CREATE OR REPLACE FUNCTION {TRIGGER}() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_current_xact_id(); RETURN NULL; END $$
"""
_IS_USED: Final = f"SELECT true FROM pg_trigger WHERE tgfoid = to_regproc('{TRIGGER}') LIMIT 1"
_PATIENTLY: Final = "SET LOCAL lock_timeout = '5s'"  # while it waits, nobody else can begin to insert


def are_numbered(session: PostgresSession, tables: Sequence[str]) -> Sequence[bool]:
    """Return of each table, quoted, whether it has the trigger."""
    ((there,),) = session.run(f"SELECT {IS_THERE}", (list(tables),))
    return list(there)


def install(session: PostgresSession, tables: Sequence[str]) -> None:
    """Give tables the trigger, all of them or, if StoreError says why not, none; it waits for those who insert now."""
    with _together(session):
        session.run(_FUNCTION)
        for table in tables:
            session.run(f"DROP TRIGGER IF EXISTS {TRIGGER} ON {table}")
            session.run(
                f"CREATE TRIGGER {TRIGGER} BEFORE INSERT OR UPDATE ON {table} "
                f"FOR EACH STATEMENT EXECUTE FUNCTION {TRIGGER}()"
            )
            session.run(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {TRIGGER}")


def remove(session: PostgresSession, tables: Sequence[str]) -> None:
    """Take the trigger from tables, and its function away once no table has it."""
    with _together(session):
        for table in tables:
            session.run(f"DROP TRIGGER IF EXISTS {TRIGGER} ON {table}")
        if not session.run(_IS_USED):
            session.run(f"DROP FUNCTION IF EXISTS {TRIGGER}()")


@contextmanager
def _together(session: PostgresSession) -> Iterator[None]:
    """Run statements in a transaction that leaves no mark, because the tables for that need not be there yet."""
    session.run("BEGIN")
    try:
        session.run(_PATIENTLY)
        yield
        session.run("COMMIT")
    except BaseException:
        session.rollback()
        raise
