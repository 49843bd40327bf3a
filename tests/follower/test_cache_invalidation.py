"""The caches stream invalidates the cached functions of a worker."""

from __future__ import annotations

from tests.doubles import logged
from tests.follower.cases import HELLO, WorkerCase, position, rdata


class CacheTests(WorkerCase):
    def setUp(self) -> None:
        super().setUp()
        self.calls: list[str] = []

        @self.worker.cached()
        def get(key: str) -> str:
            self.calls.append(key)
            return key

        self.get = get
        self.writer = self.serve(HELLO + position(1, 1, "caches"))

    def row(self, name: str, *keys: str) -> str:
        encoded = ",".join(f'"{key}"' for key in keys)
        return f'["{name}",[{encoded}],1]'

    def test_trap_30_caches_are_invalidated_before_the_position_is_applied(self) -> None:
        self.start()
        self.get("1")
        self.get("2")
        fresh: list[str] = []
        self.worker.wait_for("caches", "master", 2).addCallback(lambda _: fresh.append(self.get("1")))
        self.send(self.writer, rdata(2, self.row("get", "1"), "caches"))
        self.get("2")
        self.assertEqual(self.calls, ["1", "2", "1"])
        self.assertEqual(fresh, ["1"])

    def test_a_value_from_before_the_first_position_of_a_writer_is_not_kept(self) -> None:
        """An invalidation that was published before that position is never received."""
        self.get("1")
        self.start()
        self.get("1")
        self.get("1")
        self.assertEqual(self.calls, ["1"] * 2)
        self.send(self.writer, position(1, 7, "caches", "other"))
        self.get("1")
        self.assertEqual((self.calls, self.at("caches", "other")), (["1"] * 3, 7))
        self.send(self.writer, position(7, 9, "caches", "other"))
        self.get("1")
        self.assertEqual(self.calls, ["1"] * 3)

    def test_a_special_name_invalidates_several_caches(self) -> None:
        self.worker.caches.fan_out("changed", "get", "unknown")
        self.start()
        self.get("1")
        self.send(self.writer, rdata(2, self.row("changed", "1"), "caches"))
        self.get("1")
        self.assertEqual(self.calls, ["1", "1"])

    def test_an_invalid_caches_row_is_logged_and_does_not_stop_the_stream(self) -> None:
        self.start()
        self.get("1")
        with logged() as messages:
            self.send(self.writer, rdata(2, "[17]", "caches"), rdata(3, self.row("get", "1"), "caches"))
        self.get("1")
        self.assertEqual((self.calls, self.at("caches")), (["1", "1"], 3))
        self.assertEqual(len(messages), 1)
        self.assertRegex(messages[0], r"^caches fact 2: \S")

    def test_a_reset_of_the_caches_stream_clears_every_cache(self) -> None:
        self.start()
        self.send(self.writer, position(1, 9, "caches"))
        self.get("1")
        self.serve(HELLO + position(5, 5, "caches"))
        with logged():
            self.net.cut()
            self.net.run(1.0)
        self.get("1")
        self.assertEqual(self.calls, ["1", "1"])

    def test_caches_are_invalidated_beside_a_function_for_the_caches_stream(self) -> None:
        self.apply("caches")
        self.start()
        self.get("1")
        self.send(self.writer, rdata(2, self.row("get", "1"), "caches"))
        self.get("1")
        self.assertEqual((self.calls, self.seen), (["1", "1"], [[2]]))

    def test_cached_functions_without_the_caches_stream_are_logged_as_a_warning(self) -> None:
        self.worker = self.make_worker(streams=["orders"])
        self.worker.cached()(lambda: None)
        self.serve(HELLO + position(1, 1))
        with logged() as messages:
            self.start()
        self.assertEqual(messages, ["nothing invalidates the cached functions: caches is not among streams"])
