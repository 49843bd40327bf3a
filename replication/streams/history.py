"""The history of a writer: its runs, by which a follower notices that a database was restored or exchanged.

A writer begins an *epoch* each time it starts: a random name, and the position at that start.  A backup has the epochs
up to the backup only, so after a restore the next epoch begins where the backup ended.  A follower stores the epochs
that it has followed, and compares them with the writer's before it trusts a position
(docs/protocol/following.md E7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    History = Sequence["Epoch"]  # of one writer of one stream, the oldest first; empty if it is not known

MAX_EPOCHS: Final = 1_000  # the newest; about 30 kB of JSON
UNKNOWN_HISTORY: Final = "?"  # in place of the JSON of a history, which a process cannot read now
RAISED: Final = "raised-"  # how the name of an epoch begins in which others have raised the position of a former writer


class Epoch(NamedTuple):
    """One run of a writer.

    All facts of earlier epochs are at or below ``start``, all facts of this one are above.  ``settled``, which is at
    most ``start``, is the position up to which every ID was complete when this epoch began.  A name is random.  What
    follows a dot in it is the *state* of the tables: if it differs, facts above ``settled`` may be lost.
    """

    name: str
    settled: Token
    start: Token


def begin_epoch(history: History, epoch: Epoch) -> History:
    """Return the history with one more epoch; it replaces the last one if that has no facts and is not the first.

    The first one stays: it is what a follower shares with a backup from before its first fact, or with the next start.
    So does one of ``raise_epoch``: followers may have it with a smaller start.
    """
    kept = [*history]
    if len(kept) > 1 and kept[-1].start == epoch.start and not kept[-1].name.startswith(RAISED):
        epoch = epoch._replace(settled=min(epoch.settled, kept.pop().settled))  # what was open then may be lost
    return [*kept, epoch][-MAX_EPOCHS:]


def raise_epoch(history: History, epoch: Epoch, position: Token) -> History:
    """Return the history of a former writer with ``epoch`` last, in which its position is raised from ``position``.

    The epoch has no facts, and its start moves with the position.  So a follower that has facts above ``settled``
    counts them, and no follower goes back because of the position alone.
    """
    kept = [*history]
    if kept and kept[-1].name == epoch.name:
        kept.pop()
    elif kept and kept[-1].name.startswith(RAISED):  # of another process, which may have raised it at the same time
        kept[-1] = kept[-1]._replace(start=max(kept[-1].start, position))
    return [*kept, epoch][-MAX_EPOCHS:]


def raised_name(position: Token, random_part: str) -> str:
    """Return the name of an epoch in which the position of a former writer is raised from ``position``."""
    return f"{RAISED}{position}-{random_part}"


def read_position(ours: History, theirs: History, position: Token) -> Token | None:
    """Return the ``common_position`` of a reader that counts no facts, as a query of Spark.

    Without an epoch of ``raise_epoch``, a reader has no position above the one that was raised there, unless facts are
    lost.
    """
    common = common_position(ours, theirs, position)
    if common is None:
        return None
    names = {epoch.name for epoch in ours}
    place = max(place for place, epoch in enumerate(theirs, 1) if epoch.name in names)
    lost = [each.settled for each in theirs[place:] if (former := _raised_from(each)) is not None and former < position]
    return min([common, *lost])


def common_position(ours: History, theirs: History, position: Token) -> Token | None:
    """Return up to where a follower at ``position`` has the writer's facts; None if the histories share no epoch.

    The last shared epoch ends where either history goes on without the other.  If both do, the writer has lost what
    followed it.  An epoch of ``raise_epoch`` may start above what is lost: there its settled position counts, too.
    """
    places = {epoch.name: place for place, epoch in enumerate(theirs, 1)}
    for place, epoch in reversed([*enumerate(ours, 1)]):
        if epoch.name in places:
            there = places[epoch.name]
            following = [*ours[place : place + 1], *theirs[there : there + 1]]
            ends = [each.settled for each in following if each.start < position]
            both = len(following) > 1 and following[1].name.startswith(RAISED)
            if both and following[1].settled < following[0].settled:
                ends.append(following[1].settled)
            return min([position, *ends])
    return None


def is_behind(history: History, newer: History) -> bool:
    """Whether ``newer`` goes on after the last epoch of ``history``: a process with it lacks a start of the writer."""
    names = [epoch.name for epoch in newer]
    return bool(history) and history[-1].name in names[:-1]


def doubted_since(ours: History, theirs: History, position: Token, *, at_each_start: bool = False) -> Token | None:
    """Return above which ID facts up to ``position`` may be lost, although a larger ID is not.

    IDs are not completed in their order.  So a backup may have ID 6 and lack ID 5, which was open; a standby, too.
    None: the state of the tables is the same since the last shared epoch, or nothing can be lost there.  With
    ``at_each_start`` the state does not matter: each later epoch may have begun after a restore.
    """
    names = {epoch.name for epoch in ours}
    shared = [place for place, epoch in enumerate(theirs) if epoch.name in names]
    if not shared:
        return None
    later, state = theirs[shared[-1] + 1 :], _state(theirs[shared[-1]])
    changed = [epoch for epoch in later if at_each_start or "" != _state(epoch) != state != ""]
    return min([epoch.settled for epoch in changed if epoch.settled < position], default=None)


def certain_position(ours: History, theirs: History, position: Token) -> Token | None:
    """Return up to which ID a source at ``position`` has the writer's facts for certain; None if no epoch is shared.

    Above this ID a fact may be lost.  The facts of a source cannot be counted, as ``doubted_since`` needs it.
    """
    common = common_position(ours, theirs, position)
    since = None if common is None else doubted_since(ours, theirs, common)
    return common if since is None else since


def _raised_from(epoch: Epoch) -> Token | None:
    position, dash, _ = epoch.name.removeprefix(RAISED).partition("-")
    return Token(int(position)) if epoch.name.startswith(RAISED) and dash and position.isdecimal() else None


def _state(epoch: Epoch) -> str:
    return epoch.name.partition(".")[2]


def encode_part(history: History, place: int, size: int) -> str:
    """Return ``size`` epochs of a history as JSON, beginning with the one at ``place``, and the number of all."""
    return msgspec.json.encode((len(history), history[place : place + size])).decode()


def read_part(text: str) -> tuple[int, Sequence[Epoch]]:
    """Return the number of epochs and those in the JSON of ``encode_part``; MsgspecError if it has another form."""
    return msgspec.json.decode(text, type=tuple[int, list[Epoch]])


def encode_history(history: History) -> str:
    """Return a history as JSON, ``[[name, settled, start], …]``."""
    return msgspec.json.encode(history).decode()


def read_history(text: str | bytes) -> History:
    """Return the history in the JSON of ``encode_history``; MsgspecError if it has another form."""
    return msgspec.json.decode(text, type=list[Epoch])
