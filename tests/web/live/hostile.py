"""A process whose every name, row and error has markup."""

from __future__ import annotations

from replication.streams.definitions import StreamDefinition
from replication.streams.interfaces import PeerStatus, StreamStatus, WriterStatus
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.web.served import FakeServed, fact

MARKUP = '<b onclick="x()">&amp;\x1b[31m\u202e'


class HostileServed(FakeServed):
    """Every name, row and error has markup."""

    server_name = MARKUP

    def __init__(self) -> None:
        super().__init__()
        self.definitions = [StreamDefinition(StreamName("orders"), row=("order_id", "<i>state</i>"))]
        self.keep("orders", "<u>w", [fact(5, [MARKUP, "paid"], MARKUP)])

    def stream_statuses(self, only: str | None = None) -> list[StreamStatus]:
        writer = WriterStatus(InstanceName("<u>w"), Token(5), Token(5), "stopped", MARKUP, failed=Token(5))
        return [StreamStatus(self.definitions[0], [writer], notes=[MARKUP])]

    def peer_statuses(self) -> list[PeerStatus]:
        return [PeerStatus(MARKUP, MARKUP, 1.7e9, 12, 345, 6, MARKUP, shares_name=True)]

    def unreachable_writers(self) -> list[str]:
        return [MARKUP]

    def absent_writers(self) -> list[str]:
        return [MARKUP]
