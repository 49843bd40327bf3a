"""A command of your own: a worker requests a new index from the master."""

import attrs
from twisted.internet import defer, endpoints, task

from replication import ApplicationCommand, Master, Worker


@attrs.frozen
class Reindex(ApplicationCommand):
    """``REINDEX <table>``: a worker requests a new index of a table."""

    WORD = "REINDEX"
    SENT_BY = ("worker",)
    table: str

    @classmethod
    def parse(cls, rest):
        return cls(rest)

    def encode(self):
        return self.table


async def main(reactor):
    master = Master(server_name="example.com", database="sqlite:///reindex.db")
    received = defer.Deferred[None]()

    @master.on_command(Reindex)
    def reindex(command, peer):
        print(f"{peer.name} requests a new index of {command.table}", flush=True)
        received.callback(None)

    port = await endpoints.serverFromString(reactor, "tcp:0:interface=127.0.0.1").listen(master.factory())
    worker = Worker(connect=[f"tcp:127.0.0.1:{port.getHost().port}"], server_name="example.com", database="sqlite://")
    await worker.start()
    worker.send(Reindex("orders"))
    await received
    await worker.stop()
    await master.stop()
    await port.stopListening()


task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor)))
