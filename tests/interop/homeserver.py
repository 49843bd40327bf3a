"""A master as main process over a Synapse's database, which does what lines on its standard input request.

    python homeserver.py DATABASE WIRE-PORT HTTP-PORT SECRET DEFINITIONS

A line of its standard input is a JSON array, the name of a function below and its arguments; a line is the answer.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from twisted.internet import defer, endpoints, stdio, task
from twisted.protocols.basic import LineOnlyReceiver

from replication import Master
from replication.web.site import make_site

if TYPE_CHECKING:
    from collections.abc import Mapping

CLONE = (
    "INSERT INTO events (event_id, stream_ordering, topological_ordering, depth, type, room_id, sender, processed, "
    "outlier, origin_server_ts, received_ts, contains_url, instance_name) "
    "SELECT %s, %s, topological_ordering + 1, depth + 1, type, room_id, sender, processed, outlier, %s, %s, "
    "contains_url, 'master' FROM events WHERE event_id = %s"
)


class Homeserver:
    """Actions of users, as Synapse writes them: rows of its tables, and a fact for its workers."""

    def __init__(self, master: Master, *, has_outlier: bool) -> None:
        self.master = master
        self.has_outlier = has_outlier

    async def send_message(self, room: str, text: str) -> str:
        """Send a message like the last one of the room; rooms of version 1 accept any event ID."""
        async with self.master.stream("events").reserve() as fact:
            newest = (
                "SELECT event_id, json, internal_metadata, format_version, state_group FROM events "
                "JOIN event_json USING (event_id) JOIN event_to_state_groups USING (event_id) "
                "WHERE events.room_id = %s AND type = 'm.room.message' AND NOT outlier AND sender LIKE %s "
                "ORDER BY stream_ordering DESC LIMIT 1"
            )
            [(last, kept, metadata, version, group)] = await fact.execute(newest, [room, "%:alpha.test"])
            event_id, now = f"$sent{fact.token}:alpha.test", int(time.time() * 1000)
            event = {**json.loads(kept), "event_id": event_id, "content": {"msgtype": "m.text", "body": text}}
            await fact.execute(CLONE, [event_id, fact.stream_id, now, now, last])
            await fact.execute(
                "INSERT INTO event_json (event_id, room_id, internal_metadata, json, format_version) "
                "VALUES (%s, %s, %s, %s, %s)",
                [event_id, room, metadata, json.dumps(event), version],
            )
            await fact.execute("INSERT INTO event_to_state_groups VALUES (%s, %s)", [event_id, group])
            more = [False] if self.has_outlier else []
            await fact.write(["ev", [event_id, room, "m.room.message", None, None, None, None, False, *more]])
            return event_id

    async def keep(self, user: str, kind: str, content: Mapping[str, object]) -> int:
        """Set account data."""
        async with self.master.stream("account_data").reserve() as fact:
            # Without instance_name, as a Synapse of one writer does: 1.47 cannot start where only some rows have one.
            await fact.execute(
                "INSERT INTO account_data (user_id, account_data_type, stream_id, content) "
                "VALUES (%s, %s, %s, %s) ON CONFLICT (user_id, account_data_type) "
                "DO UPDATE SET stream_id = EXCLUDED.stream_id, content = EXCLUDED.content",
                [user, kind, fact.stream_id, json.dumps(content)],
            )
            await fact.write([user, None, kind])
            return int(fact.token)

    async def send_to_device(self, user: str, device: str, message: Mapping[str, object]) -> int:
        """Send a to-device message."""
        async with self.master.stream("to_device").reserve() as fact:
            await fact.execute(
                "INSERT INTO device_inbox (user_id, device_id, stream_id, message_json, instance_name) "
                "VALUES (%s, %s, %s, %s, 'master')",
                [user, device, fact.stream_id, json.dumps(message)],
            )
            await fact.write([user])
            return int(fact.token)

    async def type(self, room: str, users: list[str]) -> int:
        """Set who is typing in a room."""
        async with self.master.stream("typing").reserve() as fact:
            await fact.write([room, users])
            return int(fact.token)

    async def be(self, user: str, state: str, message: str) -> int:
        """Set the presence of a user."""
        now = int(time.time() * 1000)
        async with self.master.stream("presence").reserve() as fact:
            await fact.execute("DELETE FROM presence_stream WHERE user_id = %s", [user])
            await fact.write([user, state, now, now, now, message, state == "online"])
            return int(fact.token)

    async def forget(self, token: str, invalidate: bool) -> int:
        """Delete an access token; workers cache its user until an invalidation."""
        async with self.master.stream("push_rules").reserve() as fact:
            await fact.execute("DELETE FROM access_tokens WHERE token = %s", [token])
            if invalidate:
                fact.invalidate("get_user_by_access_token", [token])
            return int(fact.token)

    async def send(self, destination: str) -> int:
        """Send an EDU to a server through the federation senders."""
        edu = {"edu_type": "m.example", "content": {}, "origin": "alpha.test", "destination": destination}
        async with self.master.stream("federation").reserve() as fact:
            await fact.write(["e", edu])
            return int(fact.token)


class Orders(LineOnlyReceiver):
    """The lines on standard input, and the answers on standard output."""

    delimiter = b"\n"

    def __init__(self, homeserver: Homeserver) -> None:
        self._homeserver = homeserver

    def lineReceived(self, line: bytes) -> None:
        """Run the function that a line names."""
        name, *arguments = json.loads(line)
        work = defer.Deferred.fromCoroutine(getattr(self._homeserver, name)(*arguments))
        work.addCallbacks(
            lambda answer: self.sendLine(json.dumps({"answer": answer}).encode()),
            lambda failure: self.sendLine(json.dumps({"error": failure.getTraceback()}).encode()),
        )


async def main(reactor: Any, *place: str) -> None:
    """Serve until the process is stopped."""
    database, wire, http, secret, definitions = place
    master = Master(
        server_name="alpha.test",
        database=database,
        streams=[each.definition for each in import_module(definitions).STREAMS],
        reactor=reactor,
    )
    site = make_site(master.served, secret=secret, reactor=reactor)
    await master.start()
    for port, factory in ((wire, master.factory()), (http, site)):
        await endpoints.serverFromString(reactor, f"tcp:{port}:interface=127.0.0.1").listen(factory)
    orders = Orders(Homeserver(master, has_outlier=definitions.endswith("since_1_64")))
    stdio.StandardIO(orders)
    orders.sendLine(b"ready")
    reactor.addSystemEventTrigger("before", "shutdown", master.stop)
    await defer.Deferred()


if __name__ == "__main__":
    task.react(lambda reactor: defer.Deferred.fromCoroutine(main(reactor, *sys.argv[1:])))
