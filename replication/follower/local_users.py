"""Whether a database of a Synapse is that of the homeserver which is followed: its local users show its server name.

Processes of two homeservers often have the same names.  So nothing in the facts shows that ``catch_up`` names the
database of the other one.
"""

# ruff: noqa: S608 - names in SQL are those of TABLES

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from replication.errors import StoreError

if TYPE_CHECKING:
    from replication.streams.interfaces import ISqlExecutor, IStreamStore

# Tables of Synapse whose users are all local, with the column of the user.  Each is of a stream.
TABLES: Final = (
    ("account_data", "user_id"),
    ("push_rules_stream", "user_id"),
    ("room_account_data", "user_id"),
    ("pushers", "user_name"),
    ("thread_subscriptions", "user_id"),
)
CURE: Final = "name the database of {server_name!r} in catch_up, or correct server_name"
_SAMPLE: Final = 100  # users; most tables need no longer look
_CAN_READ: Final = {
    "postgresql": "SELECT 1 FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attname = %s "
    "AND NOT attisdropped AND has_column_privilege(attrelid, attnum, 'SELECT')",
    "sqlite": "SELECT 1 FROM pragma_table_info(?) WHERE name = ?",
}


class OtherServerError(StoreError):
    """A database is that of another homeserver; ``what`` is the message without the cure."""

    what: str = ""


async def check_server_name(store: IStreamStore, server_name: str) -> None:
    """Raise OtherServerError if a database has local users, and none is of ``server_name``.

    Without such a table that may be read and has rows, nothing is checked.
    """
    found = await store.read(partial(_find_others, server_name=server_name))
    if found is not None:
        what = f"{found}, and not of {server_name!r}"
        raise OtherServerError(f"{what}: {CURE.format(server_name=server_name)}", what=what)


def _find_others(database: ISqlExecutor, server_name: str) -> str | None:
    """Return what shows that a database is of another homeserver; the first table with users decides."""
    for table, column in TABLES:
        if not database.execute(_CAN_READ[database.dialect], (table, column)):
            continue
        sample = database.execute(f"SELECT {column} FROM {table} LIMIT {_SAMPLE}")
        servers = {str(user).partition(":")[2] for (user,) in sample} - {""}  # another program has such a table, too
        if not servers:
            continue
        if server_name in servers or _has_user(database, table, column, server_name):
            return None
        of = ", ".join(map(repr, sorted(servers)[:3]))
        return f"it is the database of another homeserver: the users in its table {table!r} are of {of}"
    return None


def _has_user(database: ISqlExecutor, table: str, column: str, server_name: str) -> bool:
    """Whether any user in a table is of a server; the first ones may be of a name that it had before."""
    like = "LIKE ?" if database.dialect == "sqlite" else "LIKE %s"
    name = server_name.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_")
    found = database.execute(f"SELECT 1 FROM {table} WHERE {column} {like} ESCAPE '\\' LIMIT 1", (f"%:{name}",))
    return bool(found)
