"""Print the facts of a stream that are new since the last run: `python poll.py`, as often as you like.

The token is stored in the transaction that has the effects of the facts.  So each fact takes effect once.
"""

import json
import sqlite3
from contextlib import closing
from urllib.error import HTTPError
from urllib.request import urlopen

UPDATES = "http://127.0.0.1:9093/v1/streams/orders/updates?limit=1000&since="


def read_page(since):
    """Return the facts after a token, and the token of the next request."""
    try:
        with urlopen(UPDATES + since, timeout=60) as answer:
            page = json.load(answer)
    except HTTPError as error:
        page = json.load(error)
        if error.code != 410:
            raise SystemExit(page["detail"]) from error
        print(page["detail"])  # the retention has deleted facts that this program lacks
        return [], page["since"], True
    return page["updates"], page["upto_token"], page["limited"]


with closing(sqlite3.connect("poll.db")) as database:
    database.execute("CREATE TABLE IF NOT EXISTS states (order_id TEXT PRIMARY KEY, state TEXT)")
    database.execute("CREATE TABLE IF NOT EXISTS token (since TEXT)")
    (since,) = database.execute("SELECT since FROM token").fetchone() or ("0",)
    more = True
    while more:
        facts, since, more = read_page(since)
        with database:  # one transaction
            for token, writer, (order_id, state) in facts:
                print(token, writer, order_id, state)
                database.execute("INSERT OR REPLACE INTO states VALUES (?, ?)", (order_id, state))
            database.execute("DELETE FROM token")
            database.execute("INSERT INTO token VALUES (?)", (since,))
