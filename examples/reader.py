"""A worker inside an application: apply orders, wait for one, and read through a cache."""

from twisted.internet import defer, task

from replication import Worker


async def main(reactor):
    worker = Worker(
        connect=["tcp:127.0.0.1:9192"],
        server_name="shop.example",
        instance_name="reader",
        catch_up=["sqlite:///shop.db"],
    )

    @worker.on("orders")
    async def apply(facts, txn):
        for fact in facts:
            print(fact.token, *fact.rows, flush=True)

    @worker.cached(max_entries=10_000)
    def get_order(order_id):
        return f"order {order_id}, as read from the database"

    await worker.start()  # returns when the first positions of every writer have arrived
    await worker.wait_for("orders", "master", 4, timeout=10)
    print(get_order("o2"), flush=True)
    await worker.stop()


task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor)))
