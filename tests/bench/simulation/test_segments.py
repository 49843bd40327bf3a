"""The segments of a simulation."""

from __future__ import annotations

from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from replication.bench.simulation.disk import finish
from replication.bench.simulation.run import WORLDS
from replication.bench.simulation.segments import MemoryFolder, SimulatedSegments
from replication.bench.simulation.world import World
from replication.segments.files import verify_segment
from replication.segments.manifest import MANIFEST, read_manifest
from replication.storage.memory import MemoryStore
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.served import WrittenStreams

A, MASTER = StreamName("a"), InstanceName("master")
LONG = f'"{"x" * 300}"'  # no line of the simulation holds it


class FolderTests(SynchronousTestCase):
    def test_a_file_is_there_once_it_is_written_and_its_stamp_changes(self) -> None:
        folder = MemoryFolder()
        self.assertRaises(FileNotFoundError, folder.open, "one")
        self.assertIsNone(folder.stamp("one"))
        stamps = set()
        for content in (b"1", b"2"):
            with folder.create("one") as sink:
                sink.write(content)
            folder.flush(["one"])
            self.assertEqual(folder.open("one").read(), content)
            stamps.add(folder.stamp("one"))
        self.assertEqual(len(stamps), 2)


class SegmentsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.disk = MemoryStore()
        finish(self.disk.open())
        finish(self.disk.declare(StreamDefinition(A)))
        self.segments = SimulatedSegments()

    def store(self, upto: int, *facts: Fact) -> None:
        finish(self.disk.transaction().commit([Write(A, MASTER, Token(upto), facts)]))

    def test_a_replay_extends_the_chain_up_to_the_stored_position(self) -> None:
        facts = [Fact(Token(each), (f"[{each}]", '"second"')) for each in range(2, 7)]
        self.store(4, *facts)  # an ID after 4 is open
        self.segments.replay(self.disk, MASTER)
        archive = self.segments.open()
        page = archive.page(A, MASTER, after=Token(1), upto=Token(9), limit=100)
        self.assertEqual((page.facts, page.upto), (facts[:2], 3))
        self.assertEqual(archive.page(A, MASTER, after=Token(4), upto=Token(9), limit=100).upto, 4)
        self.store(7)
        self.segments.replay(self.disk, MASTER)
        page = archive.page(A, MASTER, after=Token(4), upto=Token(9), limit=100)
        self.assertEqual((page.facts, page.upto), (facts[3:], 7))
        manifest = read_manifest(self.segments._folder)
        assert manifest is not None
        self.assertEqual(manifest.faults(), [])
        self.assertIsNotNone(self.segments._folder.stamp(MANIFEST))
        for segment in manifest.segments:
            with self.subTest(segment.name):
                self.segments._folder.size = lambda _, each=segment: each.stored_size
                self.assertIsNone(verify_segment(self.segments._folder, segment))

    def test_a_fact_that_no_line_holds_is_left_to_another_source(self) -> None:
        self.store(3, Fact(Token(2), ("[1]",)), Fact(Token(3), (LONG,)))
        self.segments.replay(self.disk, MASTER)
        page = self.segments.open().page(A, MASTER, after=Token(0), upto=Token(3), limit=100)
        self.assertEqual((page.facts, page.upto), ([Fact(Token(2), ("[1]",))], 2))

    def test_a_worker_asks_the_master_only_for_what_they_lack(self) -> None:
        with World(**WORLDS["segments"][1]) as world:
            worker = world.workers["copy"]
            worker.kill()
            for _ in range(7):
                world.masters[MASTER].append("a", world.rows(1))
                world.turn()
            with mock.patch.object(WrittenStreams, "page", autospec=True, side_effect=WrittenStreams.page) as asked:
                worker.start()
                world.converge()
            self.assertEqual(worker.position(A, MASTER), 8)
            self.assertEqual([(each.kwargs["after"], each.kwargs["upto"]) for each in asked.call_args_list], [(7, 8)])
