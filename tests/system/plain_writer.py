"""An external writer: a process that writes by plain SQL, with psycopg or through psql.

``plain_writer.py URL SEED TRANSACTIONS psycopg|PATH_OF_PSQL`` prints a line of JSON per transaction: the IDs, and when
it was about to ask for the COMMIT (by the machine's one monotonic clock), or null if it was rolled back.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

INSERT = "INSERT INTO events (name) VALUES {} RETURNING id"


def by_psycopg(url: str) -> Callable[[str], list[int]]:
    """Return a function that runs a statement and returns its first column."""
    import psycopg

    connection = psycopg.connect(url, autocommit=True)

    def run(sql: str) -> list[int]:
        if sql.startswith("COPY"):
            with connection.cursor().copy(sql) as copy:
                copy.write_row(["copied"])
            return []
        cursor = connection.execute(sql)
        return [int(row[0]) for row in cursor] if cursor.description else []

    return run


def by_psql(url: str, psql: str) -> Callable[[str], list[int]]:
    """Return the same over the standard input of psql."""
    process: Any = subprocess.Popen(
        [psql, "--quiet", "--no-align", "--tuples-only", "--no-psqlrc", url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )

    def run(sql: str) -> list[int]:
        if sql.startswith("COPY"):
            process.stdin.write(f"{sql};\ncopied\n\\.\n\\echo end\n")
        else:
            process.stdin.write(f"{sql};\n\\echo end\n")
        process.stdin.flush()
        return [int(line) for line in iter(process.stdout.readline, "end\n")]

    return run


def main(url: str, seed: str, count: str, how: str) -> None:
    """Write rows."""
    run = by_psycopg(url) if how == "psycopg" else by_psql(url, how)
    chance = random.Random(int(seed))

    def dawdle() -> None:
        if chance.random() < 0.5:
            time.sleep(chance.uniform(0, 0.05))

    def insert() -> list[int]:
        rows = ", ".join([f"('w{seed}')"] * chance.choice([1, 1, 1, 2, 5]))
        return run(INSERT.format(rows))

    def copy() -> list[int]:
        run("COPY events (name) FROM STDIN")
        return run("SELECT currval('events_id_seq')")

    for _ in range(int(count)):
        ids: list[int] = []
        run("BEGIN")
        if chance.random() < 0.2:
            dawdle()  # before it draws: a transaction that is older than its ID
        for _ in range(chance.choice([1, 1, 2, 3])):
            fate = chance.random()
            if fate < 0.15:
                run("SAVEPOINT here")
                insert()
                dawdle()
                run("ROLLBACK TO here")
            elif fate < 0.3:
                run("SAVEPOINT here")
                ids += insert()
                run("RELEASE here")
            elif fate < 0.4:
                ids += copy()
            elif fate < 0.45:  # an ID that is never used
                run("SELECT nextval('events_id_seq')")
            else:
                ids += insert()
            dawdle()
        at: float | None = time.monotonic()
        if chance.random() < 0.15:
            at = None
            run("ROLLBACK")
        else:
            run("COMMIT")
        sys.stdout.write(f"{json.dumps([ids, at])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
