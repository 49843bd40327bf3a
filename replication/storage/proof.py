"""The proof that a database can be written: what ``IStreamStore.check`` returns."""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING, Final

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from replication.deferreds import share
from replication.errors import CommitsLostError, RowRefusedError, StoreError, ValueRefusedError
from replication.logs import TroubleLog
from replication.storage.contract import IdTakenError, ReceiptTakenError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from replication.storage.contract import Batch

PROOF_LIFE: Final = 1.0  # seconds for which a commit counts: probes may be frequent
FAILURE_LIFE: Final = 10.0  # seconds for which a failed commit of facts counts, unless a later one succeeds


@attrs.define(eq=False)
class WriteProof:
    """Proves by a small commit that a database can be written, and by the last commit of facts that they fit.

    A disk may have room for the small commit only.  ``commit`` commits it.  ``monotonic`` is a clock in seconds.
    The log has when the database begins to fail, and when it works again.
    """

    log = Logger()

    _commit: Callable[[], Coroutine[Deferred[Any], Any, None]]
    _monotonic: Callable[[], float] = time.monotonic
    _failed: tuple[StoreError, float] | None = attrs.field(init=False, default=None)  # of the last commit of facts
    _proving: Deferred[Exception | None] | None = attrs.field(init=False, default=None)
    _trouble: TroubleLog = attrs.field(init=False, factory=lambda: TroubleLog(WriteProof.log))
    _proved: float = attrs.field(init=False, default=-inf)  # when the last one that succeeded began

    async def check(self) -> None:
        """Return if the database can be written; else raise StoreError, or what ``commit`` raises.

        Calls at one time share a commit.  One that succeeded counts for PROOF_LIFE seconds after it began.
        """
        now = self._monotonic()
        if self._failed is not None and now - self._failed[1] < FAILURE_LIFE:
            raise self._failed[0]
        if self._proving is None or self._proving.called:
            if now - self._proved < PROOF_LIFE:
                return
            self._proving = Deferred.fromCoroutine(self._prove(now))
        if (error := await share(self._proving)) is not None:
            raise error

    def noted(
        self, outcomes: Sequence[BaseException | None], batches: Sequence[Batch | None]
    ) -> Sequence[BaseException | None]:
        """Note the outcomes of commits, and return them; an error of a value, a row, an ID or a key does not count.

        A batch of None stands for a function that failed before there was one.
        """
        if self._trouble.error is None and not any(outcomes):  # the usual case
            return outcomes
        of_facts = [
            outcome
            for batch, outcome in zip(batches, outcomes, strict=False)  # a group may have been cut
            if batch is not None
            and any(write.facts for _, write in batch.writes)
            and not isinstance(outcome, (ValueRefusedError, RowRefusedError, IdTakenError, ReceiptTakenError))
        ]
        errors = [outcome for outcome in of_facts if isinstance(outcome, StoreError)]
        if of_facts and len(errors) == len(of_facts):
            self.note_failed(errors[0])
        elif of_facts:
            self.end_trouble()
        return outcomes

    def note_failed(self, error: StoreError) -> None:
        """Note that facts cannot be committed, or receive no ID: the small commit would not find that."""
        self._failed = error, self._monotonic()
        self.report(error)

    def report(self, error: StoreError) -> None:
        """Log that the database does not work, unless the log has it; lost commits are logged where they are found."""
        if not isinstance(error, CommitsLostError):
            self._trouble.report("the database does not work: {error}", error=error)

    def end_trouble(self) -> None:
        """Note that facts were committed, and log the end of an outage."""
        self._failed = None
        self._trouble.end("the database works again")

    async def _prove(self, now: float) -> Exception | None:
        try:
            await self._commit()
        except Exception as error:  # noqa: BLE001 - every caller of check() receives it
            if isinstance(error, StoreError):
                self.report(error)
            return error
        self._proved = now
        if self._failed is None:
            self.end_trouble()
        return None
