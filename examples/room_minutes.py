"""A function for the worker daemon beside a Synapse: count the events of each room and minute, and print the counts."""

import os

from twisted.enterprise.adbapi import ConnectionPool

SYNAPSE = ConnectionPool("psycopg", os.environ["SYNAPSE"], cp_min=1, cp_max=1, cp_reconnect=True)
COUNT = """
    SELECT room_id, to_char(to_timestamp(received_ts / 1000) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI'), count(*)
    FROM events WHERE stream_ordering = ANY(%s) GROUP BY 1, 2
"""
CREATE = """
    CREATE TABLE IF NOT EXISTS room_minutes (room TEXT, minute TEXT, events INTEGER, PRIMARY KEY (room, minute))
"""
ADD = """
    INSERT INTO room_minutes VALUES (?, ?, ?)
    ON CONFLICT (room, minute) DO UPDATE SET events = room_minutes.events + excluded.events
"""


def register(worker):
    @worker.on("events")
    async def count(facts, txn):
        await txn.execute(CREATE)
        for found in await SYNAPSE.runQuery(COUNT, [[fact.token for fact in facts]]):
            await txn.execute(ADD, found)
            print(*found, flush=True)
