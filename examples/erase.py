"""Replace the rows of one fact in the SQLite database of a writer or a copy: `erase.py FILE STREAM ID ROW`."""

import json
import sqlite3
import sys
from contextlib import closing

file, stream, token, row = sys.argv[1:]
row = json.dumps(json.loads(row), separators=(",", ":"))
with closing(sqlite3.connect(f"file:{file}?mode=rw", uri=True, timeout=30)) as database:
    with database:  # one transaction
        update = f'UPDATE "stream_{stream}" SET row = ? WHERE stream_id = ? RETURNING ord'
        rows = database.execute(update, [row, int(token)]).fetchall()
    database.execute("VACUUM")
    busy, *_ = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    print(f"{file}: {len(rows)} row replaced")
    if busy:
        raise SystemExit(f"{file}-wal may still have the old text, because another program reads: run this again")
