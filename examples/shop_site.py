"""A Twisted web site with a master in it: `twistd -n -y shop_site.py`."""

import atexit
import os

from twisted.application import internet, service
from twisted.internet import defer, endpoints, reactor
from twisted.logger import Logger
from twisted.web import resource, server

from replication import Master, StreamDefinition, make_site


class Orders(resource.Resource):
    """``POST /`` with an order's ID as its body places the order and answers the fact's token."""

    isLeaf = True

    def __init__(self, shop):
        super().__init__()
        self.shop = shop

    def render_POST(self, request):
        placing = defer.Deferred.fromCoroutine(self.place(request))
        placing.addErrback(request.processingFailed)  # answers 500
        return server.NOT_DONE_YET

    async def place(self, request):
        async with self.shop.stream("orders").reserve() as fact:
            await fact.write([request.content.read().decode(), "placed"])
        request.setResponseCode(201)
        request.write(b"%d\n" % fact.token)
        request.finish()


class ReplicationService(service.Service):
    """Starts a Master or a Worker with the application, and stops it before the process ends."""

    log = Logger()

    def __init__(self, replicated):
        self.replicated = replicated

    def startService(self):
        super().startService()
        self.replicated.failed.addCallback(self.end)  # the database was exchanged
        self.replicated.start().addErrback(lambda failure: reactor.callWhenRunning(self.end, failure.value))

    def end(self, error):
        """End the process with status 1, so that a supervisor starts it again."""
        self.log.critical("{why}", why=error)
        if self.running:
            atexit.register(os._exit, 1)  # the status of twistd would be 0
            reactor.stop()  # pyright: ignore (its type lacks it)

    def stopService(self):
        super().stopService()
        return self.replicated.stop()  # a Deferred: it fires when open transactions have ended


def listening(endpoint, factory):
    return internet.StreamServerEndpointService(endpoints.serverFromString(reactor, endpoint), factory)


orders = StreamDefinition("orders", row=("order_id", "state"))
shop = Master(server_name="shop.example", database="sqlite:///shop_site.db", streams=[orders])
application = service.Application("shop")
for each in (
    ReplicationService(shop),
    listening("tcp:8080:interface=127.0.0.1", server.Site(Orders(shop))),
    listening("tcp:9192:interface=127.0.0.1", shop.factory()),  # the wire: workers connect here
    listening("tcp:9193:interface=127.0.0.1", make_site(shop.served, secret=None)),  # HTTP: catch-up, status, metrics
):
    each.setServiceParent(application)
