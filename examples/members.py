"""A program beside a Synapse: serve the number of members of a room, cached until Synapse changes them."""

import sys

from twisted.enterprise.adbapi import ConnectionPool
from twisted.internet import defer, endpoints, task
from twisted.web import resource, server

from replication import Worker
from replication.synapse.invalidation import BY_ROOM
from replication.synapse.since_1_159 import CACHES

COUNT = "SELECT count(*) FROM current_state_events WHERE room_id = %s AND membership = 'join'"


class Members(resource.Resource):
    isLeaf = True

    def __init__(self, count_members):
        super().__init__()
        self.count_members = count_members

    def render_GET(self, request):
        defer.Deferred.fromCoroutine(self.answer(request)).addErrback(request.processingFailed)
        return server.NOT_DONE_YET

    async def answer(self, request):
        count = await self.count_members(request.postpath[0].decode())
        request.write(b"%d\n" % count)
        request.finish()


async def main(reactor, redis, synapse, listen):
    database = ConnectionPool("psycopg", synapse, cp_min=1, cp_max=1, cp_reconnect=True)
    worker = Worker(
        connect=[redis],
        server_name="alpha.test",
        instance_name="members1",
        database="sqlite://",  # in memory: there is nothing to keep
        streams=["caches"],
        catch_up=[synapse],
        definitions=[CACHES.definition],
    )

    @worker.cached(invalidated_by=BY_ROOM)
    async def count_members(room_id):
        print("counts the members of", room_id, flush=True)
        rows = await database.runQuery(COUNT, [room_id])
        return rows[0][0]

    await worker.start()
    await endpoints.serverFromString(reactor, listen).listen(server.Site(Members(count_members)))
    print("ready", flush=True)
    await defer.Deferred()  # run until Ctrl-C


task.react(lambda reactor, *words: defer.Deferred.fromCoroutine(main(reactor, *words)), sys.argv[1:])
