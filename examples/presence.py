"""Presence: a worker reports which users sync there and where they were seen; the master collects both."""

from twisted.internet import defer, endpoints, task

from replication import Master, StreamDefinition, Worker


async def main(reactor):
    typing = StreamDefinition("typing", row=("room_id", "user_ids"), key=("room_id",), in_memory=True)
    master = Master(server_name="example.com", database="sqlite:///presence.db", streams=[typing])

    @master.on_syncing
    def changed(user_id, syncing):
        print(user_id, "syncs" if syncing else "stopped syncing", flush=True)

    port = await endpoints.serverFromString(reactor, "tcp:0:interface=127.0.0.1").listen(master.factory())
    worker = Worker(connect=[f"tcp:127.0.0.1:{port.getHost().port}"], server_name="example.com", database="sqlite://")

    @worker.on("typing")
    def show(facts, txn):
        for fact in facts:
            for room_id, user_ids in fact.rows:
                print(*user_ids, "types in", room_id, flush=True)

    await worker.start()
    with worker.user_syncing("@erna:example.com"):
        worker.user_ip("@erna:example.com", "her access token", "192.0.2.7", "curl")
        async with master.stream("typing").reserve() as fact:
            await fact.write(["!tea:example.com", ["@erna:example.com"]])
        await worker.wait_for("typing", "master", fact.token)
    await worker.stop()
    await master.stop()
    await port.stopListening()


task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor)))
