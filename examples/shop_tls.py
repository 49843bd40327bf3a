"""A master that demands client certificates, on the wire and over HTTP: `python shop_tls.py`."""

from pathlib import Path

from twisted.internet import defer, endpoints, ssl, task

from replication import Master, StreamDefinition, make_site

own = ssl.PrivateCertificate.loadPEM(Path("db1.key").read_bytes() + Path("db1.pem").read_bytes())
tls = own.options(ssl.Certificate.loadPEM(Path("ca.pem").read_bytes()))


async def main(reactor):
    orders = StreamDefinition("orders", row=("order_id", "state"))
    shop = Master(server_name="shop.example", database="sqlite:///shop_tls.db", streams=[orders])
    await shop.start()
    reactor.addSystemEventTrigger("before", "shutdown", shop.stop)
    await endpoints.SSL4ServerEndpoint(reactor, 9092, tls).listen(shop.factory())
    await endpoints.SSL4ServerEndpoint(reactor, 9093, tls).listen(make_site(shop.served, secret=None, certified=True))
    print("ready", flush=True)
    raise await shop.failed  # it ends the process with status 1, for example if the database was exchanged


task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor)))
