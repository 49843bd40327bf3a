"""What a worker makes of a stream: a copy, the input of a function, or a position."""

from __future__ import annotations

from tests.follower.cases import HELLO, WorkerCase, contents, position, rdata


class ModeTests(WorkerCase):
    def test_without_functions_and_caches_every_stream_is_copied(self) -> None:
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, "caches"))
        self.start()
        self.send(writer, rdata(2), rdata(2, '["f",null,1]', "caches"), position(2, 5))
        self.assertEqual(contents(self.store), {"orders": {2: ("[]",)}, "caches": {2: ('["f",null,1]',)}})
        self.assertEqual((self.stored(), self.stored("caches")), (5, 2))

    def test_with_a_function_only_positions_of_other_streams_are_followed(self) -> None:
        self.apply()
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, "stock"))
        self.start()
        self.send(writer, rdata(2), rdata(2, stream="stock"))
        self.assertEqual((self.seen, self.at("stock")), ([[2]], 2))
        self.assertEqual(contents(self.store), {"orders": {}})

    def test_copy_true_copies_the_other_streams(self) -> None:
        self.worker = self.make_worker(copy=True)
        self.apply()
        writer = self.serve(HELLO + position(1, 1) + position(1, 1, "stock"))
        self.start()
        self.send(writer, rdata(2), rdata(2, stream="stock"))
        self.assertEqual(contents(self.store), {"orders": {}, "stock": {2: ("[]",)}})

    def test_with_caches_and_no_function_nothing_is_copied(self) -> None:
        @self.worker.cached()
        def get(key: str) -> str:
            return key

        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.send(writer, rdata(2))
        self.assertEqual((contents(self.store), self.at()), ({}, 2))

    def test_the_mode_of_a_stream_is_decided_at_start(self) -> None:
        writer = self.serve(HELLO + position(1, 1))
        self.start()
        self.worker.cached()(lambda: None)
        self.send(writer, position(1, 1, "stock"), rdata(2, stream="stock"))
        self.assertEqual(contents(self.store)["stock"], {2: ("[]",)})
