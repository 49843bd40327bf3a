"""docs/spark.md has every field of a manifest, and every option of the Spark source."""

from __future__ import annotations

from replication.segments.manifest import KEYS
from replication.spark.options import READERS
from tests.docs.pages import code, page, table

PAGE = page("spark.md")


def test_every_field_of_the_manifest_is_there() -> None:
    assert [code(row["field"])[0] for row in table(PAGE, "## The manifest")] == [*KEYS]


def test_every_option_of_the_source_is_there() -> None:
    shown = [code(row["option"])[0] for row in table(PAGE, "## The data source")]
    assert sorted(shown) == sorted(READERS)
