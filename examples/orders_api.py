"""A master inside an aiohttp application: asyncio owns the event loop, and Twisted runs on it."""

import asyncio
import sys

from aiohttp import web
from twisted.internet import asyncioreactor, defer, endpoints
from twisted.internet.main import installReactor

from replication import Master, StreamDefinition

MASTER = web.AppKey("master", Master)


def as_future(coroutine):
    """Run a coroutine that awaits Deferreds, and return its result as an asyncio Future."""
    return defer.Deferred.fromCoroutine(coroutine).asFuture(asyncio.get_running_loop())


async def add_order(master, order_id):
    async with master.stream("orders").reserve() as fact:
        await fact.write([order_id, "placed"])
    return fact.token


async def post_order(request):
    order = await request.json()
    token = await as_future(add_order(request.app[MASTER], order["id"]))
    return web.json_response({"token": token}, status=201)


async def run_master(app):
    loop = asyncio.get_running_loop()
    reactor = asyncioreactor.AsyncioSelectorReactor(loop)
    installReactor(reactor)  # before any import of twisted.internet.reactor
    reactor.startRunning(installSignalHandlers=False)  # aiohttp handles signals
    orders = StreamDefinition("orders", row=("order_id", "state"))
    app[MASTER] = Master(server_name="shop.example", database="sqlite:///orders.db", streams=[orders])
    app[MASTER].failed.addCallback(lambda error: loop.call_soon(sys.exit, str(error)))  # the database was exchanged
    await app[MASTER].start().asFuture(loop)
    wire = endpoints.serverFromString(reactor, "tcp:9192:interface=127.0.0.1")
    port = await wire.listen(app[MASTER].factory()).asFuture(loop)
    yield  # the application serves requests
    await app[MASTER].stop().asFuture(loop)
    await defer.maybeDeferred(port.stopListening).asFuture(loop)


if __name__ == "__main__":
    app = web.Application()
    app.router.add_post("/orders", post_order)
    app.cleanup_ctx.append(run_master)
    web.run_app(app, host="127.0.0.1", port=8080)
