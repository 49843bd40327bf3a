"""A plain function and its fact in one transaction: 32 customers at once check out.

The function runs beside the database's connection.  So a transaction changes threads once, and on SQLite those that
wait share one commit.
"""

from twisted.internet import defer, task

from replication import Master, StreamDefinition


def create_table(txn, fact):
    txn.execute("CREATE TABLE IF NOT EXISTS stock (item TEXT PRIMARY KEY, left INTEGER CHECK (left >= 0))")
    txn.execute("INSERT OR REPLACE INTO stock VALUES ('tea', 20)")
    fact.write(["tea", 20])


def buy(txn, fact, item):
    """Take one from the stock; called on the database's thread, with the transaction and the fact."""
    ((left,),) = txn.execute("UPDATE stock SET left = left - 1 WHERE item = ? RETURNING left", [item])
    fact.write([item, left])
    fact.invalidate("get_stock", [item])
    return left  # run_interaction() returns it, once the row and the fact are durable


async def main(reactor):
    stock = StreamDefinition("stock", row=("item", "left"))
    shop = Master(server_name="shop.example", database="sqlite:///checkout.db", streams=[stock])
    await shop.start()
    stream = shop.stream("stock")
    await stream.run_interaction(create_table)
    customers = [defer.Deferred.fromCoroutine(stream.run_interaction(buy, "tea")) for _ in range(32)]
    outcomes = await defer.DeferredList(customers, consumeErrors=True)  # each succeeds or fails alone
    served = [left for succeeded, left in outcomes if succeeded]
    print(f"{len(served)} customers were served, {len(outcomes) - len(served)} came too late")
    await shop.stop()


task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor)))
