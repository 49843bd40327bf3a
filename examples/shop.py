"""A master inside an application: each order is a row of a table and a fact of a stream, in one transaction."""

from twisted.internet import defer, endpoints, task

from replication import Master, StreamDefinition


async def main(reactor):
    shop = Master(
        server_name="shop.example",
        database="sqlite:///shop.db",
        streams=[StreamDefinition("orders", row=("order_id", "state"))],
    )
    await endpoints.serverFromString(reactor, "tcp:9192:interface=127.0.0.1").listen(shop.factory())
    await shop.start()

    async def place_order():
        async with shop.stream("orders").reserve() as fact:  # reserves a stream ID
            order_id = f"o{fact.token}"
            await fact.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, state TEXT)")
            await fact.execute("INSERT INTO orders VALUES (?, ?)", [order_id, "placed"])
            await fact.write([order_id, "placed"])
            fact.invalidate("get_order", [order_id])  # removes one entry from a cache at every worker
        # Committed. Workers receive the fact when every smaller ID is complete.

    for _ in range(3):
        await place_order()
    print("three orders placed", flush=True)
    reactor.addSystemEventTrigger("before", "shutdown", shop.stop)
    await defer.Deferred()  # run until Ctrl-C


task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor)))
