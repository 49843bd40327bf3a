"""A folder of segments needs what a replay has not added to it yet."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import CatchUpError
from replication.follower.catch_up import CatchUpSources
from replication.segments.manifest import MANIFEST
from replication.streams.retention import SegmentChain
from replication.urls import Url
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.segment_needs import SegmentNeeds, set_retention
from tests.segments.histories import HISTORY, MASTER, STREAM, write_folder
from tests.serving import MasterCase
from tests.storage.pump import Pump


class SegmentNeedsTests(SynchronousTestCase):
    def needed(self, folder: str, writer: str = MASTER) -> dict[str, dict[str, int]]:
        pump = Pump()
        names = [StreamName(STREAM), StreamName("other")]
        found = pump.wait(SegmentNeeds(folder, pump).needed(names, InstanceName(writer)))
        return {name: {who.removesuffix(folder): int(has) for who, has in each.items()} for name, each in found.items()}

    def test_segments_have_the_facts_up_to_their_end(self) -> None:
        with TemporaryDirectory() as folder:
            write_folder(Path(folder), HISTORY, ends=[3, 5, 9])
            who = "the segments in "
            self.assertEqual(self.needed(folder), {STREAM: {who: 9}, "other": {who: 0}})
            self.assertEqual(self.needed(folder, "worker2"), {STREAM: {who: 0}, "other": {who: 0}})

    def test_a_folder_without_a_manifest_has_nothing_and_one_that_is_damaged_is_an_error(self) -> None:
        with TemporaryDirectory() as folder:
            self.assertEqual(self.needed(folder)["other"], {"the segments in ": 0})
            (Path(folder) / MANIFEST).write_text("[]")
            with self.assertRaises(CatchUpError):
                self.needed(folder)

    def test_the_segments_are_summed_up(self) -> None:
        with TemporaryDirectory() as folder:
            pump = Pump()
            self.assertEqual(pump.wait(SegmentNeeds(folder, pump).segments()), [])
            write_folder(Path(folder), HISTORY, ends=[5, 9])
            files = [each.stat().st_size for each in Path(folder).rglob("*.rdata*")]
            rows = sum(len(each.texts) for each in HISTORY if each.token <= 9)
            expected = SegmentChain(folder, StreamName(STREAM), MASTER, Token(0), Token(9), rows, sum(files))
            for has_segments in (SegmentNeeds(folder, pump), sources := CatchUpSources(pump, [folder], {}, None)):
                (found,) = pump.wait(has_segments.segments())
                self.assertEqual(attrs.evolve(found, after=Token(0)), expected)
            pump.wait(sources.close())


class SetRetentionTests(MasterCase):
    def test_a_master_waits_for_a_folder_and_with_force_not_for_followers(self) -> None:
        followers = self.master.followers
        reactor: Any = self.net
        folder = SegmentNeeds("/segments", reactor)
        for segments, force, needs in (
            (None, False, [followers]),
            (Url("/segments"), False, [followers, folder]),
            (Url("/segments"), True, [folder]),
        ):
            self.master.retention.needs = [followers]
            set_retention(self.master, reactor, "2 rows", segments, force=force)
            self.assertEqual((self.master.retention.default, self.master.retention.needs), ("2 rows", needs))
