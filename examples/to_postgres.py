"""Copy all tables of an SQLite file into a PostgreSQL database: `python to_postgres.py FILE URL`.

One transaction copies everything.  The rows that tables of these names had in PostgreSQL are deleted.
"""

import sqlite3
import sys

import psycopg
from psycopg.sql import SQL, Identifier

file, url = sys.argv[1:]
old = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
tables = old.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'").fetchall()
with psycopg.connect(url) as new:
    for name, create in tables:
        table = Identifier(name)
        if new.execute("SELECT to_regclass(%s)", [table.as_string(new)]).fetchone() == (None,):
            new.execute(create)  # a table that is made on demand: both databases take the same statement
        new.execute(SQL("DELETE FROM {}").format(table))
        rows = old.execute(SQL("SELECT * FROM {}").format(table).as_string(new))
        columns = [each[0] for each in rows.description]
        into = SQL("COPY {} ({}) FROM STDIN").format(table, SQL(", ").join(map(Identifier, columns)))
        count = 0
        with new.cursor().copy(into) as copy:
            for row in rows:
                copy.write_row(row)
                count += 1
        for column in columns:
            owned = new.execute("SELECT pg_get_serial_sequence(%s, %s)", [table.as_string(new), column])
            for (sequence,) in owned:
                if sequence:  # the next ID comes after those of the file
                    new.execute(SQL("SELECT setval({}, max({})) FROM {}").format(sequence, Identifier(column), table))
        print(f"{name}: {count} rows")
