"""Caches: a worker keeps what a function returned until the master invalidates that entry."""

from twisted.internet import defer, endpoints, task

from replication import Master, StreamDefinition, Worker


async def main(reactor):
    shop = Master(
        server_name="shop.example",
        database="sqlite:///articles.db",
        streams=[StreamDefinition("articles", row=("article", "price"))],
    )
    port = await endpoints.serverFromString(reactor, "tcp:0:interface=127.0.0.1").listen(shop.factory())
    await shop.start()
    worker = Worker(
        connect=[f"tcp:127.0.0.1:{port.getHost().port}"],
        server_name="shop.example",
        database="sqlite://",
        catch_up=["sqlite:///articles.db"],
    )
    prices = {"tea": "4.00"}  # stands for a table of your database

    @worker.cached(max_entries=10_000)
    def get_price(article):
        print(f"computes the price of {article}", flush=True)
        return prices[article]

    @worker.cached()
    async def get_label(article, currency="EUR"):
        return f"{article}: {get_price(article)} {currency}"

    # One invalidation of "article_changed" removes the entry from both caches.
    worker.caches.fan_out("article_changed", "get_price", "get_discount")

    @worker.cached()
    def get_discount(article):
        print(f"computes the discount of {article}", flush=True)
        return "5 %"

    await worker.start()
    print(get_price("tea"), get_price("tea"), get_discount("tea"), await get_label("tea"), flush=True)

    prices["tea"] = "4.50"
    async with shop.stream("articles").reserve() as fact:
        await fact.write(["tea", "4.50"])
        fact.invalidate("article_changed", ["tea"])
        fact.invalidate("get_label", ["tea", "EUR"])  # all arguments in order, defaults too

    await worker.wait_for("caches", "master", fact.caches_token, timeout=10)
    print(get_price("tea"), get_discount("tea"), await get_label("tea"), flush=True)
    print(get_price.cache_info(), flush=True)
    await worker.stop()
    await shop.stop()
    await port.stopListening()


task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor)))
