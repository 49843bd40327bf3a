"""Functions of a worker that reports users: a user with a new receipt syncs here, and was seen."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication import Worker
    from replication.streams.facts import Fact

IP = "192.0.2.7"


def register(worker: Worker) -> None:
    """Register a function for receipts."""
    syncing = ExitStack()

    @worker.on("receipts")
    def apply(facts: Sequence[Fact], _txn: object) -> None:
        for fact in facts:
            for _room, _kind, user, *_ in fact.rows:
                syncing.enter_context(worker.user_syncing(user))
                worker.user_ip(user, f"token of {user}", IP, "an agent", "A DEVICE")
