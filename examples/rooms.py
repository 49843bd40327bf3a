"""Rooms: a graph of events that forks, merges and is backfilled, and a worker that follows every step."""

from twisted.internet import defer, endpoints, task

from replication import Master, Rooms, Worker

ROOM = "!tour:example.com"


def event(name, *prev, **more):
    return {"event_id": name, "type": "note", "prev_event_ids": list(prev), **more}


async def main(reactor):
    master = Master(server_name="example.com", database="sqlite:///rooms.db")
    rooms = Rooms(master)  # declares the streams events and backfill
    await rooms.started()
    port = await endpoints.serverFromString(reactor, "tcp:0:interface=127.0.0.1").listen(master.factory())
    worker = Worker(
        connect=[f"tcp:127.0.0.1:{port.getHost().port}"],
        server_name="example.com",
        database="sqlite:///rooms-worker.db",
        catch_up=["sqlite:///rooms.db"],
    )

    @worker.on("events")
    @worker.on("backfill")
    async def show(facts, txn):
        for fact in facts:
            print(txn.stream, fact.token, *fact.texts, flush=True)

    async def persist(*events, stream="events"):
        tokens = await rooms.persist(ROOM, events, backfilled=stream == "backfill")
        await worker.wait_for(stream, "master", tokens[-1], timeout=10)

    await worker.start()
    # The first event names an earlier one that is missing. The state before it is given.
    await persist(event("enter", "earlier", depth=5, state_before=[]))
    # A fork: two events follow it, and both set the same piece of state.
    await persist(event("left", "enter", state_key="colour"), event("right", "enter", state_key="colour"))
    print("ends", (await rooms.view(ROOM)).forward_extremities, "gaps", await rooms.gaps(ROOM), flush=True)
    prevs, depth = await rooms.next_place(ROOM)
    await persist(event("merge", *prevs, depth=depth))
    await persist(event("earlier", depth=4), stream="backfill")
    await worker.stop()
    await master.stop()
    await port.stopListening()


task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor)))
