"""What a Synapse 1.163.2 with three workers published over Redis, and how its database differs from that.

Of each token the first facts count: ``caches`` and ``device_lists`` were sent twice for some.
"""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

from tests.transcripts.recordings import DATA

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NAME = "synapse-modern"
SERVER = "alpha.test"
Facts = dict[int, tuple[str, list[str]]]  # by token: the writer and the rows

# The tables have these tokens, and Redis did not carry them: the publishing connections were dropped, or the
# subscriptions, for which POSITIONs came later.
UNSENT: Mapping[str, list[int]] = {
    "events": [1016, 1024, 1025, 1026, 1028, 1029, 1131],
    "caches": [*range(457, 467)],
    "push_rules": [29, 30, 31, 33, *range(36, 40), *range(41, 45), 46, *range(48, 53), *range(54, 59)],
    "receipts": [145, 153],
    "account_data": [78, 175],
}
# Who wrote them; `account_data` has one writer, and its tables name none.
UNSENT_BY: Mapping[str, Mapping[str, list[int]]] = {
    "events": {"persister1": [1024, 1025, 1026, 1028, 1131], "persister2": [1016, 1029]},
    "receipts": {"persister1": [153], "persister2": [145]},
    **{stream: {"writer1": UNSENT[stream]} for stream in ("caches", "push_rules", "account_data")},
}
# The tokens whose rows are no longer those that were sent.
CHANGED: Mapping[str, list[int]] = {
    # The flag outlier of 1156 and 1159 was cleared later; the events of the others were purged, with their room.
    "events": [1156, 1159, 1391, 1392, 1393, 1402],
    # A poll sends the newest ID of each user only, and rows are deleted once they are delivered.
    "to_device": [12, 14, 18, 31, 35, 38, 40, 46, 50, 53, 64],
}
# How many tokens were sent and are no longer in the tables.
GONE: Mapping[str, int] = {
    "events": 8,  # the rest of the purged room
    "push_rules": 12,  # of a user who was deactivated
    "presence": 187, "receipts": 56, "account_data": 90, "pushers": 4, "device_lists": 67, "to_device": 38,
    "thread_subscriptions": 16,
}  # fmt: skip


def timed_messages() -> Iterator[tuple[float, str]]:
    """Yield each message of the channel, in order, with the seconds since the start of the recording."""
    for line in gzip.decompress((DATA / NAME / "redis.txt.gz").read_bytes()).decode().splitlines():
        milliseconds, channel, message = line.split("\t", 2)
        if channel == SERVER:
            yield int(milliseconds) / 1000, message


def messages() -> Iterator[str]:
    """Yield each message of the channel, in order."""
    for _, message in timed_messages():
        yield message


def published_facts() -> dict[str, Facts]:
    """Return the facts that Redis carried, by stream."""
    facts: dict[str, Facts] = {}
    begun: dict[tuple[str, str], list[str]] = {}
    for message in messages():
        if message.startswith("RDATA "):
            _, stream, writer, token, row = message.split(" ", 4)
            begun.setdefault((stream, writer), []).append(row)
            if token != "batch":
                facts.setdefault(stream, {}).setdefault(int(token), (writer, begun.pop((stream, writer))))
    return facts


def final_positions() -> dict[tuple[str, str], int]:
    """Return the last position of each stream and writer that Redis carried; 0 and 1 stand for no fact."""
    found: dict[tuple[str, str], int] = {}
    for message in messages():
        if message.startswith(("POSITION ", "RDATA ")):
            name, stream, writer, *places = message.split(" ", 4)
            place = places[1] if name == "POSITION" else places[0]
            if place != "batch":
                found[stream, writer] = max(found.get((stream, writer), 0), int(place))
    return found


def check_facts(stream: str, found: Facts, published: Facts) -> None:
    """Compare the facts of a stream from its tables with those that Redis carried, and count all differences."""
    assert sorted(found.keys() - published.keys()) == UNSENT.get(stream, []), stream
    assert sorted(key for key in found.keys() & published.keys() if found[key] != published[key]) == CHANGED.get(
        stream, []
    ), stream
    assert len(published.keys() - found.keys()) == GONE.get(stream, 0), stream
