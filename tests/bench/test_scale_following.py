"""From ``append`` to a worker, measured; ``test_scale.py`` runs all of it."""

from __future__ import annotations

from unittest import mock

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from replication.bench.scale_following import append
from replication.wire.grammar import encode_row


class AppendTests(SynchronousTestCase):
    def test_rows_have_their_length_and_batches_a_bound(self) -> None:
        """A batch has 1,000 rows, or as many as fit into a MiB."""
        for length, facts, batches in ((50, 2_500, [1_000, 1_000, 500]), (65_536, 20, [16, 4])):
            master = mock.Mock()
            master.writer.append = mock.AsyncMock(return_value=[7, 8])
            last = self.successResultOf(Deferred.fromCoroutine(append(master, facts, length)))
            appended = [call.args[0] for call in master.writer.append.call_args_list]
            self.assertEqual(([*map(len, appended)], last), (batches, 8))
            self.assertEqual({len(encode_row(row)) for batch in appended for (row,) in batch}, {length})
