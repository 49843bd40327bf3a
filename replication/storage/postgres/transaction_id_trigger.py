"""The trigger that assigns a transaction ID before a transaction allocates from the sequence of a table.

PostgreSQL assigns a transaction ID at the first change of data, and ``nextval`` need not be one.  With the trigger, the
oldest transaction ID in progress shows which IDs are settled (``streams.horizon``), if stream IDs come from the
column's DEFAULT.
"""

# ruff: noqa: S608 - names in SQL are quoted and come from StreamDefinition, which accepts plain names only

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.storage.postgres.session import PostgresSession

TRIGGER: Final = "replication_number_first"

_HAS: Final = (  # a trigger that is disabled, or that replicas skip, does not count
    f"EXISTS (SELECT FROM pg_trigger WHERE tgrelid = to_regclass(name) AND tgname = '{TRIGGER}' AND tgenabled = 'A' "
    f"AND tgtype & {4 | 16} = {4 | 16})"  # before INSERT, and UPDATE, which may set id = DEFAULT
)
_EACH: Final = "FROM unnest(%s::text[]) WITH ORDINALITY AS each (name, place) ORDER BY place"
HAVE_TRIGGER: Final = f"ARRAY(SELECT {_HAS} {_EACH})"  # for each table, in order
# An INSERT into a partition does not fire the trigger of the whole table, nor the other way round, and both allocate
# from one sequence.
ASSIGN_IDS_FIRST: Final = (
    f"ARRAY(SELECT {_HAS} AND NOT EXISTS (SELECT FROM pg_inherits WHERE to_regclass(name) IN (inhparent, inhrelid)) "
    f"{_EACH})"
)
_FUNCTION: Final = f"""
    CREATE OR REPLACE FUNCTION {TRIGGER}() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_current_xact_id(); RETURN NULL; END $$
"""
_IS_USED: Final = f"SELECT true FROM pg_trigger WHERE tgfoid = to_regproc('{TRIGGER}') LIMIT 1"
_LOCK_TIMEOUT: Final = "SET LOCAL lock_timeout = '5s'"  # while this waits, every new INSERT waits too


def have_trigger(session: PostgresSession, tables: Sequence[str]) -> Sequence[bool]:
    """Return for each table, quoted, whether it has the trigger."""
    ((found,),) = session.run(f"SELECT {HAVE_TRIGGER}", (list(tables),))
    return list(found)


def install(session: PostgresSession, tables: Sequence[str]) -> None:
    """Create the trigger on all tables, or on none and raise StoreError; waits for transactions that inserted."""
    with _transaction(session):
        session.run(_FUNCTION)
        for table in tables:
            session.run(f"DROP TRIGGER IF EXISTS {TRIGGER} ON {table}")
            session.run(
                f"CREATE TRIGGER {TRIGGER} BEFORE INSERT OR UPDATE ON {table} "
                f"FOR EACH STATEMENT EXECUTE FUNCTION {TRIGGER}()"
            )
            session.run(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {TRIGGER}")


def remove(session: PostgresSession, tables: Sequence[str]) -> None:
    """Drop the trigger of all tables, and its function once no table has it."""
    with _transaction(session):
        for table in tables:
            session.run(f"DROP TRIGGER IF EXISTS {TRIGGER} ON {table}")
        if not session.run(_IS_USED):
            session.run(f"DROP FUNCTION IF EXISTS {TRIGGER}()")


@contextmanager
def _transaction(session: PostgresSession) -> Iterator[None]:
    """Run statements in a transaction without a commit mark, because the table of marks may not exist yet."""
    session.run("BEGIN")
    try:
        session.run(_LOCK_TIMEOUT)
        yield
        session.run("COMMIT")
    except BaseException:
        session.rollback()
        raise
