"""One end of a connection, in either role: cuts change nothing, a Fault has a reason, and rows can be decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.session.connection import Fault, ReplicationConnection, Role, Rows
from replication.session.encoder import encode_facts
from replication.storage.tables.client_ips import declare_last_seen, put_last_seen, read_last_seen
from replication.streams.facts import Fact
from replication.wire import grammar
from replication.wire.commands import Error, Rdata, UserIp
from tests.rooms.recorded import in_memory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from replication.session.connection import Received

LIMIT = 1_024  # bytes of a line: the least that a configuration may have
DATABASE = in_memory()
declare_last_seen(DATABASE)


def check(data: bytes) -> None:
    """Receive ``data`` but its first byte, which chooses the role."""
    role = Role.WORKER if data[:1] == b"w" else Role.MASTER
    data = data[1:]
    whole = connection(role)
    received = whole.receive_data(data, 1.0)
    for size in (1, 7, 100):
        parts = connection(role)
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        again = [each for piece in pieces for each in parts.receive_data(piece, 1.0)]
        assert [*singly(again)] == [*singly(received)]
        assert (parts.closed, parts.lines_received) == (whole.closed, whole.lines_received)
    for each in received:
        check_received(each, whole)


def connection(role: Role) -> ReplicationConnection:
    """Return a new end of a connection."""
    return ReplicationConnection(role, 0.0, line_limit=LIMIT)


def singly(received: Iterable[Received]) -> Iterable[object]:
    """Yield Rows row by row: how many are together depends on the reads."""
    for each in received:
        if isinstance(each, Rows):
            yield from (Rdata(each.stream, each.instance, *row) for row in zip(each.places, each.texts, strict=True))
        else:
            yield each


def check_received(received: Received, end: ReplicationConnection) -> None:
    """Use what was received as the daemons do."""
    if isinstance(received, Fault):
        assert end.closed
        assert received.text
        assert received.kind
        # the sending end answers with it
        assert ReplicationConnection(end.role, 0.0, line_limit=LIMIT).send(Error(received.text), 1.0)
    elif isinstance(received, Rows):
        grammar.read_rows(received.texts)
        facts = [
            Fact(place, (text,))
            for place, text in zip(received.places, received.texts, strict=True)
            if place is not None and place > 0
        ]
        for fact in facts:
            encoded = encode_facts(received.stream, received.instance, [fact], after=fact.token, upto=fact.token)
            assert b"".join(each.data for each in encoded).endswith(b"\n")
    elif isinstance(received, UserIp):
        DATABASE.execute("BEGIN")
        put_last_seen(DATABASE, [received])
        assert len(read_last_seen(DATABASE, received.user_id)) == 1
        DATABASE.execute("ROLLBACK")
