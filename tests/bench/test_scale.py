"""``replication bench scale`` at a tiny size."""

from __future__ import annotations

import re
from pathlib import Path

from replication.bench.cluster import find_binaries
from tests.bench.scenarios import ScenarioTestCase

SIZE = re.compile(r"^(\w+, )?[\d,]+ ")


class ScaleTests(ScenarioTestCase):
    def test_every_size_has_a_figure_and_every_figure_of_sizes_a_chart(self) -> None:
        databases = ["SQLite", *(["PostgreSQL"] if find_binaries() else [])]
        sizes = ["20 streams", "2,000 facts stored"]
        expected = {f"{database}, {size}" for database in databases for size in sizes}
        expected |= {"SQLite, 65,536 bytes a row", "20 connections", "1 open ID", "1,000 open IDs", "100,000 open IDs"}
        expected |= {"PostgreSQL, 2 writers"} if find_binaries() else set()
        picture = Path(self.mktemp())
        self.assertEqual(self.variants("scale", f"--plot={picture}"), expected)
        charts = {(SIZE.sub("", each["variant"]).rstrip("s"), each["metric"]) for each in self.results}
        self.assertEqual(picture.read_text().count("<g "), len(charts))
