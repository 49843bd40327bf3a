"""A worker inside an aiohttp application: it serves the newest state of each order."""

import asyncio

from aiohttp import web
from twisted.internet import asyncioreactor, defer
from twisted.internet.main import installReactor

from replication import PositionTimeoutError, Worker

WORKER = web.AppKey("worker", Worker)
STATES = web.AppKey("states", dict)


async def notify(order_id, state):
    """Stand for a call of another asyncio library."""
    await asyncio.sleep(0)
    print(order_id, "is", state, flush=True)


async def get_order(request):
    token = int(request.query.get("token", 0))  # as the POST of orders_api.py returned it
    try:
        waiting = request.app[WORKER].wait_for("orders", "master", token, timeout=10)
        await waiting.asFuture(asyncio.get_running_loop())
    except PositionTimeoutError as error:
        raise web.HTTPServiceUnavailable(text=str(error)) from error
    return web.json_response({"state": request.app[STATES].get(request.match_info["order_id"])})


async def run_worker(app):
    loop = asyncio.get_running_loop()
    reactor = asyncioreactor.AsyncioSelectorReactor(loop)
    installReactor(reactor)
    reactor.startRunning(installSignalHandlers=False)
    app[STATES] = {}
    app[WORKER] = worker = Worker(
        connect=["tcp:127.0.0.1:9192"],
        server_name="shop.example",
        database="sqlite://",  # in memory, as the states are: each start applies all facts again
        catch_up=["sqlite:///orders.db"],
    )

    @worker.on("orders")
    async def apply(facts, txn):
        for fact in facts:
            for order_id, state in fact.rows:
                app[STATES][order_id] = state
                await defer.Deferred.fromFuture(asyncio.ensure_future(notify(order_id, state)))

    await worker.start().asFuture(loop)
    yield
    await worker.stop().asFuture(loop)


if __name__ == "__main__":
    app = web.Application()
    app.router.add_get("/orders/{order_id}", get_order)
    app.cleanup_ctx.append(run_worker)
    web.run_app(app, host="127.0.0.1", port=8081)
