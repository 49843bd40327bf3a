"""Actions of users that move every stream that a server without federation can move."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.interop.synapse import MatrixError, quoted

if TYPE_CHECKING:
    from tests.interop.synapse import Client

MOVED = frozenset(
    {
        "events",
        "presence",
        "typing",
        "receipts",
        "push_rules",
        "pushers",
        "caches",
        "device_lists",
        "to_device",
        "tag_account_data",
        "account_data",
        "groups",
        "user_signature",
    }
)


def move_all_streams(anna: Client, bert: Client) -> str:
    """Move every stream of ``MOVED``, and return the room."""
    room = str(anna.post("/createRoom", {"name": "Caf\u00e9 \u2615", "invite": [bert.user_id]})["room_id"])
    here = f"/rooms/{quoted(room)}"
    bert.post(f"{here}/join", {})
    event_id = anna.send_message(room, "\u201cquotes\u201d, back\\slash and \U0001f600")
    anna.put(f"{here}/redact/{quoted(anna.send_message(room, 'not this'))}/r{time.time_ns()}", {"reason": "a slip"})
    bert.put(f"{here}/typing/{quoted(bert.user_id)}", {"typing": True, "timeout": 30_000})
    bert.put(f"{here}/typing/{quoted(bert.user_id)}", {"typing": False})
    bert.post(f"{here}/receipt/m.read/{quoted(event_id)}", {})
    for client in (anna, bert):
        _keep(client, room)
    _trust(anna, bert)
    anna.put(f"/sendToDevice/m.test/{time.time_ns()}", {"messages": {bert.user_id: {"*": {"n": 1}}}})
    anna.put(f"/presence/{quoted(anna.user_id)}/status", {"presence": "online", "status_msg": "here \u2713"})
    name = f"group{time.time_ns()}"
    try:
        anna.post("/create_group", {"localpart": name, "profile": {"name": "a group"}})
    except MatrixError as error:
        if error.body["errcode"] != "M_UNRECOGNIZED":  # there are no groups any more since 1.61
            raise
    return room


def _keep(client: Client, room: str) -> None:
    """Set account data, tags, push rules and a pusher."""
    home = f"/user/{quoted(client.user_id)}"
    client.put(f"{home}/account_data/org.example.colour", {"colour": "blue", "at": time.time_ns()})
    client.put(f"{home}/rooms/{quoted(room)}/account_data/org.example.note", {"note": "\u00fc"})
    client.put(f"{home}/rooms/{quoted(room)}/tags/u.work", {"order": 0.5})
    client.put("/pushrules/global/content/word", {"pattern": "word", "actions": ["notify"]})
    pusher = {
        "kind": "http",
        "app_id": "org.example",
        "pushkey": f"key of {client.user_id}",
        "app_display_name": "an app",
        "device_display_name": "a device",
        "lang": "en",
        "data": {"url": "https://localhost/_matrix/push/v1/notify"},
    }
    client.post("/pushers/set", pusher)
    client.post("/pushers/set", {**pusher, "kind": None})


class _Key:
    """A cross-signing key."""

    def __init__(self, owner: str, usage: str) -> None:
        self._private = Ed25519PrivateKey.generate()
        self.name = f"ed25519:{_unpadded(self._private.public_key().public_bytes_raw())}"
        self.owner = owner
        self.public: dict[str, object] = {
            "user_id": owner,
            "usage": [usage],
            "keys": {self.name: self.name.partition(":")[2]},
        }

    def sign(self, signed: dict[str, object]) -> dict[str, object]:
        """Return an object with this key's signature over its canonical JSON."""
        text = json.dumps(signed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return {**signed, "signatures": {self.owner: {self.name: _unpadded(self._private.sign(text.encode()))}}}


def _trust(client: Client, other: Client) -> None:
    """Make keys for both users, and sign one user's key by the other."""
    keys = {}
    for each in (client, other):
        master, user = (_Key(each.user_id, usage) for usage in ("master", "user_signing"))
        each.confirm(
            "/keys/device_signing/upload",
            {"master_key": master.public, "user_signing_key": master.sign(user.public)},
            {"type": "m.login.password", "identifier": {"type": "m.id.user", "user": each.user_id}},
        )
        keys[each] = master, user
    signed = keys[client][1].sign(keys[other][0].public)
    name = keys[other][0].name.partition(":")[2]
    answer = client.post("/keys/signatures/upload", {other.user_id: {name: signed}})
    assert not answer["failures"], answer


def _unpadded(data: bytes) -> str:
    return b64encode(data).decode().rstrip("=")
