"""Tests of what a child of ``fork`` gives up; real ones are in sqlite/test_claim.py and postgres/test_session.py."""

from __future__ import annotations

import os

from twisted.trial.unittest import SynchronousTestCase

from replication.storage.forks import detach


class DetachTests(SynchronousTestCase):
    def test_descriptors_lead_nowhere_and_stay_open(self) -> None:
        reads, writes = os.pipe()
        self.addCleanup(os.close, writes)
        detach([writes])
        self.assertEqual(os.read(reads, 1), b"", "the other end is closed")
        os.close(reads)
        self.assertEqual(os.write(writes, b"x"), 1)
        self.assertFalse(os.get_inheritable(writes))
