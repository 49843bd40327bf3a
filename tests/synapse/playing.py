"""A master that sends the recorded bytes of a Synapse, and answers over HTTP from the recording."""

from __future__ import annotations

import json
import random
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs, urlsplit

from tests.answering import answering
from tests.system.peers import listen

if TYPE_CHECKING:
    from tests.synapse.recorded import Facts

PAGE_ROWS = 100


class PlayedMaster:
    """Sends ``recording``, cut at random places, to the first worker that sends REPLICATE, and then pings."""

    def __init__(self, recording: bytes, facts: Facts, seed: int, *, pause_after: bytes = b"") -> None:
        """Send it; after the first line that begins with ``pause_after``, wait until ``resume`` is set."""
        first = recording.find(b"\n" + pause_after) if pause_after else -1
        self._pause_at = recording.find(b"\n", first + 1) + 1 if first >= 0 else -1
        self.received = b""  # from the worker
        self.fetched: list[tuple[str, int, int]] = []  # what it asked for: stream, from, upto
        self._recording = recording
        self._facts = facts
        self._chance = random.Random(seed)
        self.resume = threading.Event()
        self._ended = threading.Event()
        self._socket = listen()
        self._player = threading.Thread(target=self._play)
        self._serving = ExitStack()
        self.url = ""  # where its HTTP is

    @property
    def wire(self) -> str:
        """The endpoint."""
        return f"tcp:127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        self.url = self._serving.enter_context(answering(self._answer))
        self._player.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.resume.set()
        self._serving.close()
        self._player.join()
        self._socket.close()

    def _play(self) -> None:
        peer, _ = self._socket.accept()
        with peer:
            while b"REPLICATE" not in self.received:
                self.received += peer.recv(2**16)
            at = 0
            while at < len(self._recording):
                end = at + self._chance.choice((1, 700, 5_000, 70_000))
                if at < self._pause_at <= end:
                    end = self._pause_at
                peer.sendall(self._recording[at:end])
                at = end
                while at == self._pause_at and not self.resume.wait(0.5):
                    peer.sendall(b"PING 1\n")
            peer.settimeout(0.5)
            while not self._ended.is_set():
                try:
                    peer.sendall(b"PING 1\n")
                    self.received += peer.recv(2**16)
                except TimeoutError:
                    continue
                except OSError:
                    return

    def _page(self, stream: str, after: int, upto: int) -> dict[str, Any]:
        """Return whole facts; of backfill the last ones in descending order (docs/protocol/traps.md 12)."""
        self.fetched.append((stream, after, upto))
        rows: list[list[Any]] = []
        tokens = sorted(token for token in self._facts.get(stream, {}) if after < token <= upto)
        for token in reversed(tokens) if stream == "backfill" else tokens:
            if len(rows) >= PAGE_ROWS:
                return {"updates": rows, "upto_token": rows[-1][0], "limited": True}
            rows += [[token, json.loads(row)] for row in self._facts[stream][token]]
        return {"updates": rows, "upto_token": upto, "limited": False}

    def _answer(self, path: str, _: str | None) -> tuple[int, bytes]:
        asked = urlsplit(path)
        *place, stream, _ = asked.path.split("/")
        if place != ["", "_synapse", "replication", "get_repl_stream_updates"]:
            return 404, b"{}"
        ends = parse_qs(asked.query)
        return 200, json.dumps(self._page(stream, int(ends["from_token"][0]), int(ends["upto_token"][0]))).encode()
