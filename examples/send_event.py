"""A master that answers a request of Synapse's workers: a user sends a message at a worker."""

from twisted.internet import defer, endpoints, task

from replication import Master, make_site


async def main(reactor):
    master = Master(server_name="alpha.test", database="sqlite:///alpha.db", streams=["events"])

    @master.on_synapse_request("send_event")
    async def send_event(words, body):
        event_id, _ = words  # the second is the same in a repeated request
        event = body["event"]
        async with master.stream("events").reserve() as fact:
            await fact.write(["ev", [event_id, event["room_id"], event["type"], None, None, None, None, False]])
        return {"event_id": event_id, "stream_id": fact.token, "max_stream_id": fact.token}

    await master.start()
    http = endpoints.serverFromString(reactor, "tcp:9193:interface=127.0.0.1")
    await http.listen(make_site(master.served, secret=None))
    print("ready", flush=True)
    reactor.addSystemEventTrigger("before", "shutdown", master.stop)
    await defer.Deferred()  # run until Ctrl-C


task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor)))
