"""A recorder of the lines of a main process, to which a follower's copy is compared."""

from __future__ import annotations

from collections import defaultdict

from tests.interop.actions import MOVED
from tests.system.peers import Peer

LAST = "POSITION user_signature"  # of a main process's answer to REPLICATE


class Recorder(Peer):
    """A connection that subscribes to all streams and never pings, so it has no timeout."""

    def __init__(self, wire: str) -> None:
        super().__init__(wire)
        self.send(b"NAME recorder\nREPLICATE \n")
        self.read_until(LAST)
        self.first = self.positions()
        self.moved = MOVED & self.first.keys()  # what there is to move

    def rdata(self, *streams: str) -> list[str]:
        """Return the RDATA lines of some streams."""
        self.read_what_is_there()
        return [line for line in self.lines if line.startswith(tuple(f"RDATA {stream} " for stream in streams))]

    def positions(self) -> dict[str, int]:
        """Return the position of each stream so far."""
        self.read_what_is_there()
        return {line.split(" ")[1]: int(token) for line in self.lines if (token := _token(line)) is not None}

    def facts(self) -> dict[str, dict[int, list[str]]]:
        """Return the rows of each fact so far, by stream and token."""
        self.read_what_is_there()
        facts: dict[str, dict[int, list[str]]] = defaultdict(dict)
        rows: dict[str, list[str]] = defaultdict(list)
        for line in self.lines:
            if line.startswith("RDATA "):
                _, stream, _, token, row = line.split(" ", 4)
                rows[stream].append(row)
                if token != "batch":
                    facts[stream][int(token)] = rows.pop(stream)  # caches may be sent again, the same
        return facts


def _token(line: str) -> int | None:
    match line.split(" ", 4):
        case ["POSITION", _, _, _, token] | ["RDATA", _, _, token, _] if token != "batch":
            return int(token)
    return None
