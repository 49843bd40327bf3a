"""A function for the worker daemon: count how many orders reached each state."""

from collections.abc import Sequence

from replication import ApplyTransaction, Fact, Worker


def register(worker: Worker) -> None:
    @worker.on("orders")
    async def apply(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        await txn.execute("CREATE TABLE IF NOT EXISTS counts (state TEXT PRIMARY KEY, n INTEGER)")
        for fact in facts:
            for _, state in fact.rows:
                await txn.execute(
                    "INSERT INTO counts VALUES (?, 1) ON CONFLICT (state) DO UPDATE SET n = counts.n + 1", [state]
                )
