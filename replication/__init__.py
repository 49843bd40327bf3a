"""Append-only streams of facts, replicated from the process that writes them to those that follow.

The house, from the top floor down; an import only goes down (``setup.cfg`` has the contract, CI proves it)::

    cli/         `replication COMMAND`: main.py and a file per command
    service.py   twistd: Options, makeService
    logs.py      observers for `twistd --logger`
    config.py    TOML and options to a frozen Config; an unknown key is an error that names its neighbour
    bench/       `replication bench`: a file per scenario; measures, decides nothing
    roomkeeper.py rooms over a master: persisting events, and reading them back
    master.py    the writing role, wired from plain values: what an application embeds
    worker.py    the following role, likewise
    serving.py   a process that writes and is followed: what a master is, and what a worker that writes has
    watching.py  others that write into mapped tables: looked for, and handed to the writers of their streams
    audience.py  those who follow such a process: greeted, told what is new
    effects.py   what such a process does with what they say beside that: who syncs, what may be forgotten
    lastseen.py  where users were last seen, written in batches
    listeners.py an application's functions for commands
    tokens.py    the texts of tokens that say where several writers are
    voice.py     what a follower says to its writers beside asking for facts
    writer.py    one stream as its writer holds it: reserve, write, commit, settle, announce
    follower.py  one stream as a follower holds it: catch up, apply, move the position
    linear.py    one stream of several writers, followed in the order of its IDs
    sources.py   where missed facts come from, in order
    caches.py    functions whose results are forgotten when the caches stream says so
    replay/      history on Spark, without Twisted: segments for catch-up, streams as a Spark source
    net/         Twisted TCP: protocol.py (the LineReceiver skin) listener.py (factory) link.py (one followed writer)
    web/         Twisted HTTP: facts, catch-up, status, metrics
    storage/     IStreamStore: where facts and positions are kept
    waiting.py   a Deferred for several who wait, or for work that goes on without us
    session/     one conversation: connection.py (who may say what) outbox.py (what waits) feed.py (facts to lines)
                 syncing.py (who syncs where)
    synapse/     the streams of a Synapse: rows by field, and where its database has them
    rooms/       the graph of events behind the streams events and backfill: extremities, state, its resolution
    streams/     what a stream is, without I/O: facts, pending IDs, cursors, definitions, and seams.py: what we need
    wire/        how things are spelt: grammar.py commands.py
    errors.py    every error, drawn as a tree

The way through: bytes, ``wire``, ``session``, ``streams``, ``storage``; and out again live (``session.feed``, ``net``)
late (``web``) or in bulk (``replay``).  Names are loaded when they are first used, so ``import replication.wire``
brings no Twisted.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replication.errors import (
        CatchUpError,
        ConfigError,
        LocalProtocolError,
        NotAWriterError,
        PositionMovedError,
        PositionTimeoutError,
        ProtocolError,
        RemoteProtocolError,
        ReplicationError,
        RoomError,
        RowError,
        SchemaError,
        SequenceRegressedError,
        StoppingError,
        StoreError,
        StreamError,
        UnknownRoomError,
        UnknownStreamError,
        ValueRefusedError,
    )
    from replication.master import Master
    from replication.roomkeeper import Rooms
    from replication.streams.facts import Fact
    from replication.streams.registry import SourceTable, StreamDefinition
    from replication.streams.typed import Row, TypedStream
    from replication.wire.commands import ApplicationCommand
    from replication.worker import Worker

__version__ = "0.1.0"

__all__ = [
    "ApplicationCommand",
    "CatchUpError",
    "ConfigError",
    "Fact",
    "LocalProtocolError",
    "Master",
    "NotAWriterError",
    "PositionMovedError",
    "PositionTimeoutError",
    "ProtocolError",
    "RemoteProtocolError",
    "ReplicationError",
    "RoomError",
    "Rooms",
    "Row",
    "RowError",
    "SchemaError",
    "SequenceRegressedError",
    "SourceTable",
    "StoppingError",
    "StoreError",
    "StreamDefinition",
    "StreamError",
    "TypedStream",
    "UnknownRoomError",
    "UnknownStreamError",
    "ValueRefusedError",
    "Worker",
    "__version__",
]

_ELSEWHERE = {
    "ApplicationCommand": "replication.wire.commands",
    "Fact": "replication.streams.facts",
    "Master": "replication.master",
    "Rooms": "replication.roomkeeper",
    "Row": "replication.streams.typed",
    "SourceTable": "replication.streams.registry",
    "StreamDefinition": "replication.streams.registry",
    "TypedStream": "replication.streams.typed",
    "Worker": "replication.worker",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module when it is first used (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, "replication.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
