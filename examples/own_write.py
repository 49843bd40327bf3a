"""Append a fact over HTTP, wait until a worker has applied it, and read the worker's table: `own_write.py ORDER STATE`.

The worker stores its position in the transaction that has the effects.  So both are there at once.
"""

import json
import sqlite3
import sys
import time
from contextlib import closing
from urllib.request import Request, urlopen

FACTS = "http://127.0.0.1:9093/v1/streams/orders/facts"
POSITION = "SELECT stream_id FROM stream_positions WHERE stream_name = 'orders' AND instance_name = 'master'"

order_id, state = sys.argv[1:]
body = json.dumps({"rows": [[order_id, state]]}).encode()
with urlopen(Request(FACTS, body, {"Content-Type": "application/json"}), timeout=60) as answer:
    (token,) = json.load(answer)["ids"]
print(f"appended {token}")
with closing(sqlite3.connect("replication-counter.db", timeout=30)) as database:
    deadline = time.monotonic() + 30
    while (database.execute(POSITION).fetchone() or (0,))[0] < token:
        if time.monotonic() > deadline:
            raise SystemExit(f"the worker has not applied {token} yet")
        time.sleep(0.01)
    print(*database.execute("SELECT state, n FROM counts ORDER BY state"))
