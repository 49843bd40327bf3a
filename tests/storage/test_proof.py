"""The proof that a database can be written: how often it is made, and what else counts."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import LogLevel
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import RowRefusedError, StoreError, ValueRefusedError
from replication.storage.contract import Batch, IdTakenError, ReceiptTakenError
from replication.storage.proof import FAILURE_LIFE, PROOF_LIFE, WriteProof
from replication.storage.table import POSITIONS_ONLY
from tests.contract.stream_store import facts, write
from tests.doubles import begin, error_of, logged

FACTS = Batch([(POSITIONS_ONLY, write(2, facts(2)))], None, 0.0, 0.0)
POSITION = Batch([(POSITIONS_ONLY, write(2))], None, 0.0, 0.0)
FULL = StoreError("the disk is full")
OUTAGE = ["the database does not work: the disk is full", "the database works again"]


class ProofTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.commits: list[Deferred[None]] = []
        self.proof = WriteProof(self.commit, self.clock.seconds)

    async def commit(self) -> None:
        done: Deferred[None] = Deferred()
        self.commits.append(done)
        await done

    def check(self) -> list[object]:
        return begin(self.proof.check())

    def test_checks_at_one_time_share_a_commit(self) -> None:
        waiting = [self.check() for _ in range(50)]
        self.assertEqual(len(self.commits), 1)
        self.commits[0].callback(None)
        self.assertEqual(waiting, [[None]] * 50)

    def test_a_commit_that_succeeded_counts_for_a_second(self) -> None:
        self.check()
        self.commits[0].callback(None)
        self.clock.advance(PROOF_LIFE - 0.1)
        self.assertEqual(self.check(), [None])
        self.assertEqual(len(self.commits), 1)
        self.clock.advance(0.1)
        self.assertEqual(self.check(), [])
        self.assertEqual(len(self.commits), 2)

    def test_after_an_error_the_next_check_commits_again(self) -> None:
        waiting = [self.check(), self.check()]
        self.commits[0].errback(FULL)
        self.assertEqual([error_of(each) for each in waiting], [FULL] * 2)
        waiting = [self.check()]
        self.commits[1].callback(None)
        self.assertEqual(waiting, [[None]])

    def test_to_cancel_a_check_cancels_no_commit(self) -> None:
        checking = Deferred.fromCoroutine(self.proof.check())
        checking.addErrback(lambda _: None)
        checking.cancel()
        waiting = self.check()
        self.commits[0].callback(None)
        self.assertEqual((waiting, len(self.commits)), ([None], 1))

    def test_a_failed_commit_of_facts_counts_until_one_succeeds(self) -> None:
        self.check()
        self.commits[0].callback(None)
        self.proof.noted([FULL, FULL], [FACTS, FACTS])
        self.assertIs(error_of(self.check()), FULL)
        self.proof.noted([None], [POSITION])
        self.assertIs(error_of(self.check()), FULL)
        self.proof.noted([FULL, None], [FACTS, FACTS])
        self.assertEqual(self.check(), [None])

    def test_an_outage_is_logged_once_and_so_is_its_end(self) -> None:
        with logged(LogLevel.info) as messages:
            self.proof.noted([FULL, FULL], [FACTS, FACTS])
            self.proof.noted([FULL], [FACTS])
            self.proof.report(FULL)
            self.proof.noted([None], [FACTS])
            self.proof.noted([None], [FACTS])
        self.assertEqual(messages, OUTAGE)
        with logged(LogLevel.info) as messages:
            self.assertEqual(self.check(), [])
            self.commits[0].errback(FULL)
            self.assertEqual(self.check(), [])
            self.commits[1].callback(None)
        self.assertEqual(messages, OUTAGE)

    def test_a_small_commit_is_no_end_of_an_outage_in_which_facts_do_not_fit(self) -> None:
        with logged(LogLevel.info) as messages:
            self.proof.noted([FULL], [FACTS])
            self.clock.advance(FAILURE_LIFE)
            self.check()
            self.commits[0].callback(None)
        self.assertEqual(messages, OUTAGE[:1])

    def test_a_failed_commit_of_facts_counts_for_ten_seconds(self) -> None:
        self.proof.noted([FULL], [FACTS])
        self.clock.advance(FAILURE_LIFE)
        self.assertEqual(self.check(), [])

    def test_a_refused_value_and_a_position_are_no_reason(self) -> None:
        self.proof.noted([ValueRefusedError("too long"), FULL], [FACTS, POSITION])
        self.assertEqual(self.check(), [])

    def test_a_row_that_a_constraint_refuses_is_no_reason(self) -> None:
        self.proof.noted([RowRefusedError("UNIQUE constraint failed")], [FACTS])
        self.assertEqual(self.check(), [])

    def test_a_key_that_another_append_has_taken_is_no_reason(self) -> None:
        """A client that repeated an append too early made the process unready for ten seconds."""
        self.proof.noted([ReceiptTakenError("orders.db")], [FACTS])
        self.assertEqual(self.check(), [])

    def test_an_id_that_another_program_has_taken_is_no_reason(self) -> None:
        """Programs with plain SQL beside a master made it unready again and again."""
        self.proof.noted([IdTakenError("try again")], [FACTS])
        self.assertEqual(self.check(), [])
