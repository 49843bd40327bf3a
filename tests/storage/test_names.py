"""Names of tables and sequences, as PostgreSQL keeps them."""

from __future__ import annotations

from replication.storage.names import quoted, relation_name


def test_names_of_long_streams_are_cut_and_stay_different() -> None:
    """PostgreSQL would cut them without an error, and two streams would share a table."""
    names = ["x" * 99 + "a", "x" * 99 + "b", "x" * 56, "x" * 57, "a.b-c", "a_b_c"]
    relations = [relation_name(name, end) for name in names for end in ("", "_seq")]
    assert len(set(relations)) == len(relations)
    assert max(map(len, relations)) == 63
    assert relation_name("orders") == "stream_orders"
    assert relation_name("orders", "_seq") == "stream_orders_seq"
    assert all(relation_name(name, "_seq").endswith("_seq") for name in names)


def test_a_name_is_quoted_as_sql_has_it() -> None:
    assert quoted("Orders") == '"Orders"'
