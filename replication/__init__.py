"""Append-only streams of facts: one or several processes write a stream, and others follow it.

The packages, from the top floor down.  An import only goes down; ``setup.cfg`` has the contract, and CI proves it::

    replay/      `python -m replication.replay`, and the public names of the replay
    cli/         `replication COMMAND`: main.py and a file for each command
    service.py   `twistd replication`: options, and the wiring of a daemon
    config.py    TOML and options become a frozen Config; an unknown key is an error that names the nearest known key
    bench/       `replication bench`: a file for each scenario; simulation/ is `replication simulate`
    follower/    following writers: worker.py (wiring), streams.py, stream.py, step_errors.py, merge.py,
                 catch_up.py, waiters.py; application.py and failures.py call functions, and find a fact that one cannot
                 take; app_module.py imports what the option ``app`` names; absent_writers.py, lost_writers.py and
                 second_databases.py name writers that are not where they should be, by confirmed_notes.py;
                 relay.py serves what is followed, audit.py compares it with a Synapse's database, which
                 former_writers.py, database_restores.py and ended_transactions.py read, too; local_users.py shows
                 whose database it is; one_writer.py is for its tables that name no writer; follower_factory.py
                 makes the followers
    writer/      writing streams: master.py (life cycle), stream.py, reservation.py, publisher.py, subscribers.py
    presence/    users that sync and users last seen: reporter.py (worker), tracker.py (writer)
    spark/       everything that needs PySpark: the replay job and the data source
    segments/    history as files of RDATA lines: made from tables, listed in a manifest, read for catch-up
    caches.py    functions whose results the caches stream invalidates
    net/         Twisted TCP: protocol.py (LineReceiver), client.py (one writer), redis.py (a Synapse's), broadcast.py,
                 listening.py, certificates.py (TLS that demands them), admission.py (bounds), notify.py (systemd)
    web/         HTTP: the API of a process, and two clients of it, one on Twisted and one blocking
    storage/     IStreamStore: sqlite/, postgres/, memory.py (tests, simulation); tables beside the streams in tables/
    deferreds.py sharing and shielding Deferreds, bounding them by a lifetime; locks for any number of waiters
    logs.py      a trouble logged once; observers for `twistd --logger`; log files opened again
    session/     one connection without I/O: connection.py, channel.py (Redis), encoder.py (facts to lines)
    rooms/       the graph of events behind the streams events and backfill: extremities, state, its resolution
    synapse/     the streams of a Synapse: rows by field, and where its database has them
    streams/     what a stream is, without I/O: facts, pending IDs, reorder buffer, cursors, definitions, interfaces
    wire/        the line protocol: grammar.py, commands.py, lines.py
    errors.py    the errors that applications catch, drawn as a tree
    urls.py      URLs whose secrets are not shown

In the writer, a fact passes ``writer``, ``session.encoder`` and ``net`` to its subscribers.  In the follower, it passes
``net``, ``session`` and ``follower`` to the application.  ``docs/architecture.md`` draws this, and the ways of a page
and a segment.  A public name is loaded when it is first used, so ``import replication.wire`` loads no Twisted.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replication.caches import CachedFunction
    from replication.errors import (
        CatchUpError,
        CommitsLostError,
        ConfigError,
        FactsGoneError,
        LocalProtocolError,
        NotAWriterError,
        PositionMovedError,
        PositionTimeoutError,
        ProtocolError,
        RemoteProtocolError,
        ReplicationError,
        RoomError,
        RowError,
        RowRefusedError,
        SchemaError,
        SequenceRegressedError,
        StoppingError,
        StoreError,
        StreamError,
        UnknownRoomError,
        UnknownStreamError,
        ValueRefusedError,
    )
    from replication.follower.application import ApplyTransaction
    from replication.follower.worker import Worker
    from replication.net.access import Access, Grant, Rights
    from replication.net.admission import Bounds
    from replication.net.clock import use_monotonic_clock
    from replication.net.protocol import Limits
    from replication.session.connection import Keepalive
    from replication.streams.definitions import SourceTable, StreamDefinition
    from replication.streams.facts import Fact
    from replication.streams.positions import MultiWriterToken
    from replication.streams.skips import FailedFact, FailedFactAction
    from replication.streams.typed_rows import Row, TypedStream
    from replication.web.site import make_site
    from replication.wire.commands import ApplicationCommand
    from replication.writer.interaction import NewFact
    from replication.writer.master import Master
    from replication.writer.reservation import Reservation
    from replication.writer.rooms import Rooms
    from replication.writer.stream import StreamWriter

__version__ = "0.2.0.dev0"

__all__ = [
    "Access",
    "ApplicationCommand",
    "ApplyTransaction",
    "Bounds",
    "CachedFunction",
    "CatchUpError",
    "CommitsLostError",
    "ConfigError",
    "Fact",
    "FactsGoneError",
    "FailedFact",
    "FailedFactAction",
    "Grant",
    "Keepalive",
    "Limits",
    "LocalProtocolError",
    "Master",
    "MultiWriterToken",
    "NewFact",
    "NotAWriterError",
    "PositionMovedError",
    "PositionTimeoutError",
    "ProtocolError",
    "RemoteProtocolError",
    "ReplicationError",
    "Reservation",
    "Rights",
    "RoomError",
    "Rooms",
    "Row",
    "RowError",
    "RowRefusedError",
    "SchemaError",
    "SequenceRegressedError",
    "SourceTable",
    "StoppingError",
    "StoreError",
    "StreamDefinition",
    "StreamError",
    "StreamWriter",
    "TypedStream",
    "UnknownRoomError",
    "UnknownStreamError",
    "ValueRefusedError",
    "Worker",
    "__version__",
    "make_site",
    "use_monotonic_clock",
]

_ELSEWHERE = {
    "Access": "replication.net.access",
    "ApplicationCommand": "replication.wire.commands",
    "ApplyTransaction": "replication.follower.application",
    "Bounds": "replication.net.admission",
    "CachedFunction": "replication.caches",
    "Fact": "replication.streams.facts",
    "FailedFact": "replication.streams.skips",
    "FailedFactAction": "replication.streams.skips",
    "Grant": "replication.net.access",
    "Keepalive": "replication.session.connection",
    "Limits": "replication.net.protocol",
    "Master": "replication.writer.master",
    "MultiWriterToken": "replication.streams.positions",
    "NewFact": "replication.writer.interaction",
    "Reservation": "replication.writer.reservation",
    "Rights": "replication.net.access",
    "Rooms": "replication.writer.rooms",
    "Row": "replication.streams.typed_rows",
    "SourceTable": "replication.streams.definitions",
    "StreamDefinition": "replication.streams.definitions",
    "StreamWriter": "replication.writer.stream",
    "TypedStream": "replication.streams.typed_rows",
    "Worker": "replication.follower.worker",
    "make_site": "replication.web.site",
    "use_monotonic_clock": "replication.net.clock",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module when it is first used (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ELSEWHERE.get(name, "replication.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
