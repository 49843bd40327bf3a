"""Our worker beside the newest Synapse with workers: after each fault its copy equals the database.

The tests run in this order, on one homeserver whose users are active.  A difference stays, so later tests show it, too.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from tests.interop.synapse import SERVER_NAME
from tests.interop_modern.cluster import NAME
from tests.interop_modern.copies import in_database
from tests.interop_modern.homeserver import ADDED, NAMES
from tests.redis import Monitor
from tests.system.daemons import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.interop_modern.cluster import Cluster

    Record = Callable[[str, object], None]

_TROUBLE = re.compile(r"^\S+ \S+ synapse\.replication\.\S+ \d+ (?:WARNING|ERROR|CRITICAL) .*", re.MULTILINE)
_NOT_CONNECTED = re.compile("Dropping command as not connected")  # its publishing connection, also at its start


def test_facts_from_before_its_start_are_fetched_and_later_ones_followed(cluster: Cluster) -> None:
    cluster.wait_until_all_follow()
    cluster.act(10)
    cluster.check_copy()
    moved = {stream for stream, facts in in_database(cluster.postgres, cluster.database).items() if facts}
    assert moved == {"events", "caches", "push_rules", "quarantined_media", "profile_updates"}
    assert not cluster.traffic.failed()


def test_synapse_logs_nothing_about_us(cluster: Cluster) -> None:
    """This is before the first fault, so there is no other trouble either."""
    for name in NAMES:
        log = cluster.homeserver.processes[name].log
        assert NAME not in log
        assert [each[0] for each in _TROUBLE.finditer(log) if not _NOT_CONNECTED.search(each[0])] == []


def test_killed_worker(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.act(1)
        cluster.worker.kill()
        cluster.act(1)
        cluster.worker.start()
        until(lambda: f"following {SERVER_NAME}" in cluster.worker.log, "the worker follows")
    cluster.check_copy()


def test_dropped_subscriptions(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.act(2)
        cluster.redis.drop_subscribers()
    cluster.wait_until_all_follow()
    cluster.act(2)
    cluster.check_copy()


def test_paused_redis(cluster: Cluster) -> None:
    for _ in range(2):
        cluster.act(2)
        cluster.redis.call("CLIENT", "PAUSE", "3000", "ALL")
        cluster.act(3)
    cluster.check_copy()


def test_killed_redis(cluster: Cluster) -> None:
    cluster.act(2)
    cluster.redis.kill()
    cluster.act(2)
    cluster.redis.start()
    cluster.monitors.append(Monitor(cluster.redis))
    cluster.wait_until_all_follow()
    cluster.act(2)
    cluster.check_copy()


def test_restarted_postgresql(cluster: Cluster) -> None:
    cluster.act(2)
    cluster.postgres.restart()
    cluster.act(5)
    cluster.check_copy()


def test_killed_writer(cluster: Cluster) -> None:
    persister = cluster.homeserver.processes["persister2"]
    cluster.act(1)
    persister.kill()
    cluster.act(2)
    persister.start()
    cluster.wait_until_all_follow()
    cluster.act(3)
    cluster.check_copy()


def test_added_writer(cluster: Cluster) -> None:
    added = cluster.homeserver.processes[ADDED]
    added.start()
    cluster.wait_until_all_follow()
    for user in cluster.traffic.users:
        user.anywhere = [user.at_main.at(added.client_port)]
        user.upload_key()
    cluster.act(3)
    assert any(ADDED in writer for writer, _ in in_database(cluster.postgres, cluster.database)["caches"].values())
    cluster.check_copy()


def test_dropped_publishers(cluster: Cluster, record_testsuite_property: Record) -> None:
    """Redis has not read yet what they have sent, so no process publishes it again: the audit finds it."""
    cluster.check_copy()
    before = cluster.unpublished()
    for _ in range(5):
        cluster.redis.call("CLIENT", "PAUSE", "1500", "WRITE")  # it reads no PUBLISH
        cluster.act(1)
        for each in cluster.homeserver.publishers():
            cluster.redis.call("CLIENT", "KILL", "ID", each)
        cluster.act(2.5)  # later facts arrive, so nothing shows that others were lost
    cluster.traffic.pause()
    lost = cluster.unpublished() - before
    assert lost
    record_testsuite_property("facts not published as they were written", len(lost))
    cluster.check_copy()


def test_our_worker_has_published_replicate_only(cluster: Cluster) -> None:
    """Its connections are those that log in.  A connection of these tests may have the port of an earlier one of them.

    What our user may not do is in ACL LOG.
    """
    cluster.worker.kill()
    cluster.traffic.end()
    commands = cluster.commands()
    logged_in = {client for client, words in commands if words[0] == "AUTH"}
    others = ("AUTH", "PING", "PUBSUB", "CLIENT", "ACL", "MONITOR")
    sent = [words for client, words in commands if client in logged_in and words[0].upper() not in others]
    assert {*map(tuple, sent)} == {("SUBSCRIBE", SERVER_NAME), ("PUBLISH", SERVER_NAME, "REPLICATE ")}
    assert cluster.redis.call("ACL", "LOG") == []


def test_synapse_has_logged_nothing_about_us(cluster: Cluster, record_testsuite_property: Record) -> None:
    """What is a warning or an error there is about its own connections and processes."""
    trouble = Counter[str]()
    for each in cluster.homeserver.processes.values():
        log = each.log
        assert NAME not in log
        trouble.update(re.sub(r"\d+", "N", line[0]) for line in _TROUBLE.finditer(log))
    assert [each for each in trouble if re.search("parse|unknown|unhandled", each, re.IGNORECASE)] == []
    facts = {stream: len(facts) for stream, facts in in_database(cluster.postgres, cluster.database).items()}
    record_testsuite_property("facts", facts)
    record_testsuite_property("trouble", trouble)
    record_testsuite_property("done", cluster.traffic.done())
    record_testsuite_property("failed", cluster.traffic.failed())
