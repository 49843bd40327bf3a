"""Which statements leave something in a session; ``test_interactions`` has the effect on a server."""

from __future__ import annotations

from replication.storage.postgres.leftovers import RESET, SET_SCHEMAS, Leftovers


def leaves(sql: str) -> bool:
    leftovers = Leftovers()
    leftovers.note(sql)
    return leftovers.end()


def test_locks_cursors_and_temporary_tables_last() -> None:
    for sql in (
        "select pg_advisory_lock(1)",
        "SELECT pg_try_advisory_lock_shared(1)",
        "SELECT pg_advisory_unlock_all()",
        "DECLARE c CURSOR\nWITH  HOLD FOR SELECT 1",
        "CREATE TEMP TABLE t (a int)",
        "create local temporary view v AS SELECT 1",
        "SELECT a INTO TEMPORARY t FROM mine",
        "INSERT INTO pg_temp.t VALUES (1)",
    ):
        assert leaves(sql), sql


def test_what_ends_with_the_transaction_and_similar_names_do_not_last() -> None:
    for sql in (
        "SELECT pg_advisory_xact_lock(1)",
        "CREATE TEMP TABLE t (a int) ON COMMIT DROP",
        "INSERT INTO temp (temp) VALUES (1)",
        "SELECT temperature, temp FROM readings",
        "CREATE TABLE temp (a int)",
    ):
        assert not leaves(sql), sql


def test_settings_are_reset_only_after_statements_of_the_application() -> None:
    leftovers = Leftovers()
    leftovers.after_reset = [("SELECT 1", ())]
    assert leftovers.resets() == ()
    leftovers.note("SELECT 2")
    assert leftovers.resets() == [(RESET, ()), ("SELECT 1", ())]
    assert not leftovers.end()
    assert leftovers.resets() == ()


def test_tables_are_found_as_before_only_after_statements_of_the_application() -> None:
    leftovers = Leftovers()
    leftovers.schemas = "public, pg_temp"
    assert leftovers.before_store() == ()
    leftovers.note("SET LOCAL search_path TO tenant")
    assert leftovers.before_store() == [(SET_SCHEMAS, ("public, pg_temp",))]
    leftovers.end()
    assert leftovers.before_store() == ()
