"""A homeserver, its users, and our worker beside it, as docs/how-to/follow-a-synapse.md describes it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from tests.interop.synapse import SERVER_NAME
from tests.interop_modern.copies import differences, in_copy, in_database, published
from tests.interop_modern.homeserver import REDIS_PASSWORD, Homeserver
from tests.interop_modern.traffic import Traffic
from tests.redis import Monitor
from tests.synapse.reading import READER
from tests.system.daemons import CHECKOUT, Daemon, get_json, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer

NAME = "replication1"  # of our worker, as in conf/synapse-redis.toml
PATIENCE = 60.0  # seconds until a copy equals the database, where nothing is written any more


class Cluster:
    """The homeserver, Redis, PostgreSQL, users and our worker.

    ``monitors`` have every command that Redis has received, except for a moment when it starts.
    """

    def __init__(self, folder: Path, homeserver: Homeserver, postgres: PostgresServer, database: str) -> None:
        self.homeserver = homeserver
        self.redis = homeserver.redis
        self.postgres = postgres
        self.database = database
        self.copy = folder / "copy.db"
        self.monitors = [Monitor(self.redis)]
        (folder / "password").write_text(REDIS_PASSWORD)
        self.worker = Daemon(
            folder,
            "worker",
            f"--config={CHECKOUT}/conf/synapse-redis.toml",
            f"--server-name={SERVER_NAME}",
            f"--connect=redis://us@127.0.0.1:{self.redis.port}",
            f"--redis-password-file={folder}/password",
            f"--catch-up={postgres.url(database, READER)}",
            f"--database=sqlite:///{self.copy}",
            "--http=tcp:0:interface=127.0.0.1",
        )

    def __enter__(self) -> Self:
        """Let users act, and start our worker a little later: what it has missed is in the database."""
        self.traffic = Traffic(self.homeserver, "anna", "bert", "cleo", "dora")
        time.sleep(3)
        self.worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.traffic.end()
        self.worker.kill()

    @property
    def subscribers(self) -> int:
        """The number of processes that must be subscribed."""
        return sum(each.running for each in self.homeserver.processes.values()) + 1

    def act(self, seconds: float) -> None:
        """Let the users act."""
        self.traffic.go_on()
        time.sleep(seconds)

    def wait_until_all_follow(self) -> None:
        """Wait until all processes are subscribed."""
        self.homeserver.wait_for_subscribers(self.subscribers)

    def check_copy(self) -> None:
        """Pause the users, and wait until the copy equals the database."""
        self.traffic.pause()
        unlike: dict[str, Any] = {}

        def equal() -> bool:
            nonlocal unlike
            unlike = self.differences()
            time.sleep(0.3)
            return not unlike

        try:
            until(equal, "the copy equals the database", PATIENCE)
        except AssertionError as error:
            shown = {stream: each[:5] for stream, each in unlike.items()}
            raise AssertionError(f"{error}; token, copy, database: {shown}; {self.positions()}") from None
        finally:
            self.traffic.go_on()

    def differences(self) -> dict[str, list[tuple[int, Any, Any]]]:
        """Return the facts that differ between the copy and the database."""
        return differences(in_copy(self.copy), in_database(self.postgres, self.database))

    def unpublished(self) -> set[tuple[str, int]]:
        """Return the streams and tokens of facts that Redis has not received as they are in the database."""
        carried = published([words[2] for _, words in self.commands() if words[:2] == ["PUBLISH", SERVER_NAME]])
        unlike = differences(carried, in_database(self.postgres, self.database))
        return {(stream, token) for stream, facts in unlike.items() for token, _, _ in facts}

    def commands(self) -> list[tuple[str, list[str]]]:
        """Return the client's address and the words of each command that Redis has received."""
        return [each for monitor in self.monitors for each in monitor.commands()]

    def positions(self) -> Any:
        """Return the status of our worker's streams."""
        streams = get_json(f"http://{self.worker.address('HTTP')}", "/v1/streams")["streams"]
        return {(each["name"], one["instance"]): one["position"] for each in streams for one in each["writers"]}
