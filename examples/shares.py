"""A function for the worker daemon: each of the workers share0 and share1 takes its share of the orders."""

import zlib
from collections.abc import Sequence

from replication import ApplyTransaction, Fact, Worker

SHARES = 2  # all workers have the same number


def register(worker: Worker) -> None:
    mine = int(worker.instance_name.removeprefix("share"))

    @worker.on("orders")
    async def apply(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        await txn.execute("CREATE TABLE IF NOT EXISTS states (order_id TEXT PRIMARY KEY, state TEXT)")
        rows = [row for fact in facts for row in fact.rows if zlib.crc32(row[0].encode()) % SHARES == mine]
        upsert = "INSERT INTO states VALUES (?, ?) ON CONFLICT (order_id) DO UPDATE SET state = excluded.state"
        await txn.executemany(upsert, rows)
