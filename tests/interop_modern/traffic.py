"""Users of a homeserver: threads make random calls that move the streams, until ``pause``; calls may fail in faults."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from http.client import HTTPException
from itertools import count
from typing import TYPE_CHECKING, Any

from tests.interop.synapse import Client, MatrixError, quoted
from tests.system.daemons import PATIENCE, until

if TYPE_CHECKING:
    from tests.interop_modern.homeserver import Homeserver

_NUMBERS = count(1)
INTERVAL = 0.5  # seconds on average between two calls of a user


class User(threading.Thread):
    """One user; what only the writer of a stream serves is called there, everything else at any process."""

    def __init__(self, homeserver: Homeserver, traffic: Traffic, name: str) -> None:
        super().__init__(name=name, daemon=True)
        processes = homeserver.processes
        self.at_main = homeserver.register(name, admin=True)
        self.at_writer = self.at_main.at(processes["writer1"].client_port)
        self.anywhere = [self.at_main.at(processes[each].client_port) for each in ("main", "persister1", "writer1")]
        self.at_persisters = [self.at_main.at(processes[each].client_port) for each in ("persister1", "persister2")]
        self.user_id = self.at_main.user_id
        self.done = Counter[str]()
        self.failed = Counter[str]()
        self.idle = threading.Event()
        self._home = f"/user/{quoted(self.user_id)}"
        self._traffic = traffic
        self._chance = random.Random(name)

    def run(self) -> None:
        """Act until the traffic ends."""
        actions = {
            self.send_message: 8,
            self.type: 3,
            self.read: 4,
            self.send_to_device: 2,
            self.keep: 2,
            self.rename: 1,
            self.make_rule: 3,
            self.be: 1,
            self.make_room: 1,
            self.come_and_go: 2,
            self.set_topic: 1,
            self.redact: 1,
            self.use_another_device: 1,
            self.upload_key: 1,
            self.upload_file: 1,
        }
        while not self._traffic.ended:
            if not self._traffic.going.is_set():
                self.idle.set()
                self._traffic.going.wait()
                self.idle.clear()
            (action,) = self._chance.choices([*actions], [*actions.values()])
            try:
                action()
                self.done[action.__name__] += 1
            except MatrixError as error:
                if error.status in (403, 429):  # not in the room, not allowed there, or too often
                    self.done["refused"] += 1
                    continue
                self.failed[f"{action.__name__} {error.status} {error.body.get('errcode')}"] += 1
            except (OSError, HTTPException, ValueError) as error:  # a process that was killed, or half an answer
                self.failed[f"{action.__name__} {type(error).__name__}"] += 1
            time.sleep(self._chance.uniform(0, 2 * INTERVAL))

    def _room(self) -> str:
        return self._chance.choice(self._traffic.rooms)

    def _any(self) -> Client:
        return self._chance.choice(self.anywhere)

    def send_message(self) -> None:
        """Send a message, sometimes into a thread."""
        room = self._room()
        body: dict[str, Any] = {"msgtype": "m.text", "body": f"\u201c{next(_NUMBERS)}\u201d \U0001f600 a\\b"}
        if self._chance.random() < 0.2 and room in self._traffic.last:
            body["m.relates_to"] = {"rel_type": "m.thread", "event_id": self._traffic.last[room]}
            self._any().put(f"/rooms/{quoted(room)}/send/m.room.message/{next(_NUMBERS)}", body)
        else:
            path = f"/rooms/{quoted(room)}/send/m.room.message/{next(_NUMBERS)}"
            self._traffic.last[room] = str(self._any().put(path, body)["event_id"])

    def type(self) -> None:
        """Type for a moment."""
        path = f"/rooms/{quoted(self._room())}/typing/{quoted(self.user_id)}"
        self.at_writer.put(path, {"typing": self._chance.random() < 0.6, "timeout": 5_000})

    def read(self) -> None:
        """Send a receipt."""
        if self._traffic.last:
            room, event = self._chance.choice([*self._traffic.last.items()])
            path = f"/rooms/{quoted(room)}/receipt/m.read/{quoted(event)}"
            self._chance.choice(self.at_persisters).post(path, {"thread_id": "main"})

    def send_to_device(self) -> None:
        """Send a message to all devices of another user."""
        other = self._chance.choice(self._traffic.users).user_id
        self.at_writer.put(f"/sendToDevice/m.test/{next(_NUMBERS)}", {"messages": {other: {"*": {"n": 1}}}})

    def keep(self) -> None:
        """Set account data, or a tag."""
        if self._chance.random() < 0.5:
            self.at_writer.put(f"{self._home}/account_data/org.example.n", {"n": next(_NUMBERS)})
        else:
            self.at_writer.put(f"{self._home}/rooms/{quoted(self._room())}/tags/u.work", {"order": 0.5})

    def rename(self) -> None:
        """Set the display name: a membership event in each room."""
        path = f"/profile/{quoted(self.user_id)}/displayname"
        self.at_main.put(path, {"displayname": f"{self.name} {next(_NUMBERS)}"})

    def make_rule(self) -> None:
        """Set or delete a push rule."""
        word = f"word{self._chance.randrange(20)}"
        self.at_writer.put(f"/pushrules/global/content/{word}", {"pattern": word, "actions": ["notify"]})

    def be(self) -> None:
        """Set the presence."""
        state = self._chance.choice(["online", "unavailable"])
        message = {"presence": state, "status_msg": f"\u2713 {next(_NUMBERS)}"}
        self.at_writer.put(f"/presence/{quoted(self.user_id)}/status", message)

    def make_room(self) -> None:
        """Create a room that all others may join."""
        room = self._any().post("/createRoom", {"preset": "public_chat", "name": f"Caf\u00e9 {next(_NUMBERS)}"})
        self._traffic.rooms.append(str(room["room_id"]))

    def come_and_go(self) -> None:
        """Join a room, or leave one that is not the first."""
        room = self._room()
        if self._chance.random() < 0.6 or room == self._traffic.rooms[0]:
            self._any().post(f"/join/{quoted(room)}", {})
        else:
            self._any().post(f"/rooms/{quoted(room)}/leave", {})

    def set_topic(self) -> None:
        """Set the topic of a room, where this user may."""
        self._any().put(f"/rooms/{quoted(self._room())}/state/m.room.topic", {"topic": f"{next(_NUMBERS)}"})

    def redact(self) -> None:
        """Redact a message of one's own; one without a relation, which Synapse would delete from its table."""
        room = self._room()
        here = f"/rooms/{quoted(room)}"
        path = f"{here}/send/m.room.message/{next(_NUMBERS)}"
        event = self._any().put(path, {"msgtype": "m.text", "body": "a slip"})["event_id"]
        self._any().put(f"{here}/redact/{quoted(event)}/{next(_NUMBERS)}", {"reason": "a slip"})

    def use_another_device(self) -> None:
        """Log in on a further device, and log out: access tokens are cached, and invalidated."""
        identifier = {"type": "m.id.user", "user": self.user_id}
        body = {"type": "m.login.password", "identifier": identifier, "password": self.at_main.password}
        token = Client(self.at_main.port).post("/login", body)["access_token"]
        Client(self.at_writer.port, token).get("/account/whoami")
        Client(self.at_main.port, token).post("/logout", {})

    def upload_key(self) -> None:
        """Upload a one-time key; the process that receives it invalidates a cache of all processes."""
        self._any().post("/keys/upload", {"one_time_keys": {f"curve25519:{next(_NUMBERS)}": "A" * 43}})

    def upload_file(self) -> None:
        """Upload a file and quarantine it."""
        main = f"http://127.0.0.1:{self.at_main.port}"
        uploaded = self._ask(f"{main}/_matrix/media/v3/upload", b"a file", "text/plain")
        place = uploaded["content_uri"].removeprefix("mxc://")
        self._ask(f"{main}/_synapse/admin/v1/media/quarantine/{place}", b"{}", "application/json")

    def _ask(self, url: str, body: bytes, kind: str) -> Any:
        headers = {"Authorization": f"Bearer {self.at_main.token}", "Content-Type": kind}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=PATIENCE) as answer:
            return json.load(answer)


class Traffic:
    """Several users in some rooms."""

    def __init__(self, homeserver: Homeserver, *names: str) -> None:
        self.going = threading.Event()
        self.ended = False
        self.rooms: list[str] = []
        self.last: dict[str, str] = {}  # the last message of each room
        self.users = [User(homeserver, self, each) for each in names]
        for user in self.users:
            user.make_room()
        for user in self.users:
            for room in self.rooms:
                user.at_main.post(f"/join/{quoted(room)}", {})
        self.going.set()
        for user in self.users:
            user.start()

    def pause(self) -> None:
        """Let all users finish what they do, and do nothing then."""
        self.going.clear()
        until(lambda: all(each.idle.is_set() for each in self.users), "the users pause")

    def go_on(self) -> None:
        """Let all users act again."""
        self.going.set()

    def end(self) -> None:
        """End all users."""
        self.ended = True
        self.going.set()
        for user in self.users:
            user.join(PATIENCE)

    def done(self) -> Counter[str]:
        """Return how often each action succeeded."""
        return sum((each.done for each in self.users), Counter[str]())

    def failed(self) -> Counter[str]:
        """Return how often actions failed, with the reason."""
        return sum((each.failed for each in self.users), Counter[str]())
