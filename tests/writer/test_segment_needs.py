"""A folder of segments needs what a replay has not added to it yet."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import msgspec
from msgspec.structs import replace
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import CatchUpError
from replication.follower.catch_up import CatchUpSources
from replication.segments.folders import LocalFolder, write_index
from replication.segments.histories import HISTORIES
from replication.segments.manifest import MANIFEST
from replication.storage.memory import MemoryStore
from replication.streams.definitions import StreamDefinition
from replication.streams.history import Epoch, encode_history
from replication.streams.retention import SegmentChain
from replication.urls import Url
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer import segment_needs
from replication.writer.segment_needs import LONG_CURE, SegmentNeeds, set_retention
from tests.segments.histories import HISTORY, MASTER, STREAM, fact, write_folder
from tests.serving import MasterCase
from tests.storage.pump import Pump


class SegmentNeedsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.store, pump = MemoryStore(), Pump()
        pump.wait(self.store.open())
        pump.wait(self.store.declare(StreamDefinition(STREAM), StreamDefinition("other")))

    def needed(self, folder: str, writer: str = MASTER) -> dict[str, dict[str, int]]:
        pump = Pump()
        names = [StreamName(STREAM), StreamName("other")]
        needs = SegmentNeeds(folder, pump, self.store)
        found = pump.wait(needs.needed(names, InstanceName(writer)))
        self.assertEqual(pump.wait(needs.needed(names, InstanceName(writer))), found)  # files are read once
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

    def test_what_a_segment_lacks_is_needed(self) -> None:
        """A retention deletes the only other copy."""
        for spoil, has, why in (
            (lambda path: path.unlink(), 3, "No such file"),
            (lambda path: path.write_bytes(b"x" * path.stat().st_size), 3, "damaged"),
            (lambda path: path.write_bytes(path.read_bytes()[:-1]), 3, "damaged"),
        ):
            with TemporaryDirectory() as folder:
                write_folder(Path(folder), HISTORY, ends=[3, 5, 9])
                spoil(next(Path(folder).rglob(f"{3:020}-*")))
                ((who, found),) = self.needed(folder)[STREAM].items()
                self.assertEqual(found, has, who)
                self.assertIn(why, who)

    def test_a_round_looks_at_a_bounded_number_of_rows(self) -> None:
        with TemporaryDirectory() as folder, patch.object(segment_needs, "ROWS_AT_ONCE", 1):
            write_folder(Path(folder), HISTORY, ends=[3, 5, 6, 9])
            self.assertEqual(self.needed(folder)[STREAM], {"the segments in ": 5})
            Pump().wait(self.store.forget_facts(STREAM, MASTER, Token(5)))
            self.assertEqual(self.needed(folder)[STREAM], {"the segments in ": 9})

    def test_a_row_that_is_too_long_for_a_line_is_needed(self) -> None:
        with TemporaryDirectory() as folder:
            long = [fact(2, "a"), fact(3, "b"), fact(4, "x" * 100), fact(5, "c")]
            write_folder(Path(folder), long, ends=[5], limit=60)
            who = f"the segments in , which lack the rows of fact 4: {LONG_CURE}"
            self.assertEqual(
                {each.replace(folder, ""): has for each, has in self.needed(folder)[STREAM].items()}, {who: 3}
            )

    def test_what_is_before_the_first_segment_is_needed_unless_it_is_gone(self) -> None:
        with TemporaryDirectory() as folder:
            write_folder(Path(folder), HISTORY, ends=[5, 9], after=3)
            ((who, found),) = self.needed(folder)[STREAM].items()
            self.assertEqual(found, 0)
            self.assertTrue(who.endswith(", which begin after 3"), who)
            Pump().wait(self.store.forget_facts(STREAM, MASTER, Token(3)))
            ((who, found),) = self.needed(folder)[STREAM].items()
            self.assertEqual(found, 9)

    def test_facts_of_another_history_are_needed(self) -> None:
        """A restored master has other facts under the IDs that the segments have."""
        with TemporaryDirectory() as folder:
            write_folder(Path(folder), HISTORY, ends=[5, 9])
            old, new = Epoch("a.1", Token(1), Token(1)), Epoch("b.2", Token(5), Token(5))
            doubted = Epoch("b.2", Token(5), Token(9))  # of a backup with the ID 9, in which the ID 6 was open
            write_index(
                LocalFolder(Path(folder)), HISTORIES, msgspec.json.encode([[STREAM, MASTER, encode_history([old])]])
            )
            for ours, has in (([old], 9), ([old, new], 5), ([old, doubted], 5), ([new], 0)):
                Pump().wait(self.store.store_histories(MASTER, {STREAM: ours}))
                ((_, found),) = self.needed(folder)[STREAM].items()
                self.assertEqual(found, has)

    def test_the_segments_are_summed_up(self) -> None:
        with TemporaryDirectory() as folder:
            pump = Pump()
            self.assertEqual(pump.wait(SegmentNeeds(folder, pump, self.store).segments()), [])
            write_folder(Path(folder), HISTORY, ends=[5, 9])
            files = [each.stat().st_size for each in Path(folder).rglob("*.rdata*")]
            rows = sum(len(each.texts) for each in HISTORY if each.token <= 9)
            expected = SegmentChain(folder, StreamName(STREAM), MASTER, Token(0), Token(9), rows, sum(files))
            for has_segments in (
                SegmentNeeds(folder, pump, self.store),
                sources := CatchUpSources(pump, [folder], {}, None),
            ):
                (found,) = pump.wait(has_segments.segments())
                self.assertEqual(replace(found, after=Token(0)), expected)
            pump.wait(sources.close())


class SetRetentionTests(MasterCase):
    def test_a_master_waits_for_a_folder_and_with_force_not_for_followers(self) -> None:
        followers = self.master.followers
        reactor: Any = self.net
        folder = SegmentNeeds("/segments", reactor, self.master.store)
        for segments, force, needs in (
            (None, False, [followers]),
            (Url("/segments"), False, [followers, folder]),
            (Url("/segments"), True, [folder]),
        ):
            self.master.retention.needs = [followers]
            set_retention(self.master, reactor, "2 rows", segments, force=force)
            self.assertEqual((self.master.retention.default, self.master.retention.needs), ("2 rows", needs))
