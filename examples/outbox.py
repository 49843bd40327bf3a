"""A shop with SQLite only: each change of its tables, and a row of the outbox, in one transaction."""

import json
import sqlite3
from contextlib import closing

TABLES = """
    CREATE TABLE IF NOT EXISTS stock (item TEXT PRIMARY KEY, left INTEGER NOT NULL CHECK (left >= 0));
    CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, item TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS outbox (id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, body TEXT NOT NULL);
    INSERT OR IGNORE INTO stock VALUES ('pen', 2);
"""


def place_order(database: sqlite3.Connection, order_id: str, item: str) -> None:
    """Place an order; IntegrityError if nothing is left, and then nothing is stored."""
    with database:  # one transaction
        database.execute("INSERT INTO orders VALUES (?, ?)", (order_id, item))
        database.execute("UPDATE stock SET left = left - 1 WHERE item = ?", (item,))
        body = json.dumps({"order": order_id, "item": item})
        database.execute("INSERT INTO outbox (kind, body) VALUES ('placed', ?)", (body,))


with closing(sqlite3.connect("outbox.db", timeout=30)) as database:
    database.executescript(TABLES)
    for number in (1, 2, 3):
        try:
            place_order(database, f"o{number}", "pen")
            print(f"order o{number} is placed")
        except sqlite3.IntegrityError as error:
            print(f"order o{number}: {error}")
