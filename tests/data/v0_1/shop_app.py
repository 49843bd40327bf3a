"""An application for ``--app``: it stores each row of ``orders`` once, in the transaction that saves the position."""


def register(worker):
    @worker.on("orders")
    async def apply(facts, txn):
        await txn.execute("CREATE TABLE IF NOT EXISTS applied (token bigint, ord integer, PRIMARY KEY (token, ord))")
        rows = [f"({fact.token}, {n})" for fact in facts for n, _ in enumerate(fact.rows)]
        if rows:
            await txn.execute(f"INSERT INTO applied VALUES {', '.join(rows)}")
