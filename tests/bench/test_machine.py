"""What the figures were measured on."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.machine import describe_machine


class MachineTests(SynchronousTestCase):
    def test_what_is_told(self) -> None:
        """All that has a say in the figures."""
        told = describe_machine()
        self.assertEqual([*told], ["python", "platform", "cpu", "cores", "load", "twisted", "sqlite"])
        self.assertNotIn("", told.values())
