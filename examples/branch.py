"""One of two branches of a shop: both processes write one stream, and each follows the other."""

import sys

from twisted.internet import defer, endpoints, task

from replication import StreamDefinition, Worker

PORTS = {"north": 9291, "south": 9391}


async def main(reactor, name):
    branch = Worker(
        server_name="shop.example",
        instance_name=name,  # the writer's name: every process has its own
        database="postgresql:///branches",
        writes=[StreamDefinition("orders", row=("order_id", "state"), writers=PORTS)],
        writers={each: {"connect": f"tcp:127.0.0.1:{port}"} for each, port in PORTS.items()},
        catch_up=["postgresql:///branches"],
    )
    orders = branch.stream("orders")
    confirmed = defer.Deferred[None]()

    @branch.on("orders")  # facts of the other branch only
    async def apply(facts, txn):
        for fact in facts:
            for order_id, state in fact.rows:
                print(f"{name} applies {fact.token} of {txn.writer}: {order_id} is {state}", flush=True)
                if state == "placed":  # with a key, a repeated append writes nothing
                    await orders.append([[[order_id, "confirmed"]]], key=f"confirm {order_id}")
                else:
                    confirmed.callback(None)

    await endpoints.serverFromString(reactor, f"tcp:{PORTS[name]}:interface=127.0.0.1").listen(branch.factory())
    print(f"{name} listens", flush=True)
    await branch.start()  # returns when the other branch has started, too
    if name == "south":
        async with orders.reserve() as fact:
            await fact.execute("CREATE TABLE orders (id text PRIMARY KEY, state text)")
            await fact.execute("INSERT INTO orders VALUES (%s, %s)", ["o1", "placed"])
            await fact.write(["o1", "placed"])
    await confirmed
    await branch.stop()


task.react(lambda reactor, name: defer.Deferred.fromCoroutine(main(reactor, name)), sys.argv[1:])
