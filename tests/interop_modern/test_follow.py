"""Our worker beside the newest Synapse with workers: after each fault its copy equals the database.

The tests run in this order, on one homeserver whose users are active.  A difference stays, so later tests show it, too.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from tests.interop.synapse import SERVER_NAME
from tests.interop_modern.copies import in_database
from tests.interop_modern.homeserver import ADDED, NAMES
from tests.interop_modern.scene import NAME
from tests.redis import Monitor
from tests.system.daemons import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.interop_modern.scene import Scene

    Record = Callable[[str, object], None]

_TROUBLE = re.compile(r"^\S+ \S+ synapse\.replication\.\S+ \d+ (?:WARNING|ERROR|CRITICAL) .*", re.MULTILINE)
_NOT_CONNECTED = re.compile("Dropping command as not connected")  # its publishing connection, also at its start


def test_facts_from_before_its_start_are_fetched_and_later_ones_followed(scene: Scene) -> None:
    scene.wait_until_all_follow()
    scene.act(10)
    scene.check_copy()
    moved = {stream for stream, facts in in_database(scene.postgres, scene.database).items() if facts}
    assert moved == {"events", "caches", "push_rules", "quarantined_media", "profile_updates"}
    assert not scene.traffic.failed()


def test_synapse_logs_nothing_about_us(scene: Scene) -> None:
    """This is before the first fault, so there is no other trouble either."""
    for name in NAMES:
        log = scene.homeserver.processes[name].log
        assert NAME not in log
        assert [each[0] for each in _TROUBLE.finditer(log) if not _NOT_CONNECTED.search(each[0])] == []


def test_killed_worker(scene: Scene) -> None:
    for _ in range(3):
        scene.act(1)
        scene.worker.kill()
        scene.act(1)
        scene.worker.start()
        until(lambda: f"following {SERVER_NAME}" in scene.worker.log, "it follows")
    scene.check_copy()


def test_dropped_subscriptions(scene: Scene) -> None:
    for _ in range(3):
        scene.act(2)
        scene.redis.drop_subscribers()
    scene.wait_until_all_follow()
    scene.act(2)
    scene.check_copy()


def test_paused_redis(scene: Scene) -> None:
    for _ in range(2):
        scene.act(2)
        scene.redis.call("CLIENT", "PAUSE", "3000", "ALL")
        scene.act(3)
    scene.check_copy()


def test_killed_redis(scene: Scene) -> None:
    scene.act(2)
    scene.redis.kill()
    scene.act(2)
    scene.redis.start()
    scene.monitors.append(Monitor(scene.redis))
    scene.wait_until_all_follow()
    scene.act(2)
    scene.check_copy()


def test_restarted_postgresql(scene: Scene) -> None:
    scene.act(2)
    scene.postgres.restart()
    scene.act(5)
    scene.check_copy()


def test_killed_writer(scene: Scene) -> None:
    persister = scene.homeserver.processes["persister2"]
    scene.act(1)
    persister.kill()
    scene.act(2)
    persister.start()
    scene.wait_until_all_follow()
    scene.act(3)
    scene.check_copy()


def test_added_writer(scene: Scene) -> None:
    added = scene.homeserver.processes[ADDED]
    added.start()
    scene.wait_until_all_follow()
    for user in scene.traffic.users:
        user.anywhere = [user.at_main.at(added.client_port)]
        user.upload_key()
    scene.act(3)
    assert any(ADDED in writer for writer, _ in in_database(scene.postgres, scene.database)["caches"].values())
    scene.check_copy()


def test_dropped_publishers(scene: Scene, record_testsuite_property: Record) -> None:
    """Redis has not read yet what they have sent, so no process publishes it again: the audit finds it."""
    scene.check_copy()
    before = scene.unpublished()
    for _ in range(5):
        scene.redis.call("CLIENT", "PAUSE", "1500", "WRITE")  # it reads no PUBLISH
        scene.act(1)
        for each in scene.homeserver.publishers():
            scene.redis.call("CLIENT", "KILL", "ID", each)
        scene.act(2.5)  # later facts arrive, so nothing shows that others were lost
    scene.traffic.pause()
    lost = scene.unpublished() - before
    assert lost
    record_testsuite_property("facts not published as they were written", len(lost))
    scene.check_copy()


def test_our_worker_has_published_replicate_only(scene: Scene) -> None:
    """Its connections are those that log in.  A connection of these tests may have the port of an earlier one of them.

    What our user may not do is in ACL LOG.
    """
    scene.worker.kill()
    scene.traffic.end()
    commands = scene.commands()
    logged_in = {client for client, words in commands if words[0] == "AUTH"}
    others = ("AUTH", "PING", "PUBSUB", "CLIENT", "ACL", "MONITOR")
    sent = [words for client, words in commands if client in logged_in and words[0].upper() not in others]
    assert {*map(tuple, sent)} == {("SUBSCRIBE", SERVER_NAME), ("PUBLISH", SERVER_NAME, "REPLICATE ")}
    assert scene.redis.call("ACL", "LOG") == []


def test_synapse_has_logged_nothing_about_us(scene: Scene, record_testsuite_property: Record) -> None:
    """What is a warning or an error there is about its own connections and processes."""
    trouble = Counter[str]()
    for each in scene.homeserver.processes.values():
        log = each.log
        assert NAME not in log
        trouble.update(re.sub(r"\d+", "N", line[0]) for line in _TROUBLE.finditer(log))
    assert [each for each in trouble if re.search("parse|unknown|unhandled", each, re.IGNORECASE)] == []
    facts = {stream: len(facts) for stream, facts in in_database(scene.postgres, scene.database).items()}
    record_testsuite_property("facts", facts)
    record_testsuite_property("trouble", trouble)
    record_testsuite_property("done", scene.traffic.done())
    record_testsuite_property("failed", scene.traffic.failed())
