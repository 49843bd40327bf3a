"""Functions for the worker daemon: store the placed orders, and delete those that a restore of the master has lost."""

from collections.abc import Sequence

from replication import ApplyTransaction, Fact, Worker

TABLE = "CREATE TABLE IF NOT EXISTS placed (writer TEXT, id INTEGER, order_id TEXT, PRIMARY KEY (writer, id, order_id))"


def register(worker: Worker) -> None:
    @worker.on("orders")
    async def apply(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        await txn.execute(TABLE)
        rows = [(txn.writer, fact.token, order_id) for fact in facts for order_id, _ in fact.rows]
        await txn.executemany("INSERT INTO placed VALUES (?, ?, ?)", rows)

    @worker.on_reset("orders")
    async def undo(writer: str, to: int, txn: ApplyTransaction) -> None:
        await txn.execute(TABLE)
        await txn.execute("DELETE FROM placed WHERE writer = ? AND id > ?", [writer, to])
