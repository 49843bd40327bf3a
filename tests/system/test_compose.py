"""What ``examples/compose`` starts runs here without containers: the same commands, configurations and health check."""

from __future__ import annotations

import json
import re
import shlex
import sqlite3
import subprocess
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest

from replication.bench.cluster import free_ports
from tests.docs.pages import page, section
from tests.system.daemons import CHECKOUT, Daemon, environment, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer

COMPOSE = CHECKOUT / "examples/compose"


def instruction(name: str) -> list[str]:
    """Return the command that an instruction of the Containerfile has."""
    (found,) = re.findall(rf"^ *{name} (\[.*\])$", (COMPOSE / "Containerfile").read_text(), re.MULTILINE)
    words: list[str] = json.loads(found)
    return words


def services() -> dict[str, Any]:
    """Return the services of the compose file."""
    yaml: Any = pytest.importorskip("yaml", reason="PyYAML is missing: pip install '.[test]'")
    found: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    return found


def test_every_file_that_a_service_mounts_is_there() -> None:
    mounted = {
        volume.partition(":")[0]
        for each in services().values()
        for volume in each["volumes"]
        if volume.startswith("./")
    }
    assert mounted == {f"./{each.name}" for each in COMPOSE.glob("*.toml")}


def test_the_services_start_are_healthy_and_replicate(tmp_path: Path, postgres: PostgresServer) -> None:
    assert instruction("ENTRYPOINT") == ["twistd", "-n", "--pidfile=", "replication"]  # what Daemon runs
    (tmp_path / "secret").write_text("a secret of these tests\n")
    found = services()
    names = [name for name in found if name != "postgres"]
    wire, *http = free_ports(1 + len(names))
    ports = dict(zip(names, http, strict=True))

    def started(name: str) -> Daemon:
        """Start a service with the addresses and files of this machine."""
        role, *options = found[name]["command"]
        text = (COMPOSE / f"{role}.toml").read_text()
        for old, new in (
            (
                'database = "postgresql://replication@postgres:5432/replication"',
                f'database = "{postgres.url(database)}"',
            ),
            ('"tcp:9092"', f'"tcp:{wire}"'),
            ("tcp:master:9092", f"tcp:127.0.0.1:{wire}"),
            ("http://master:9093", f"http://127.0.0.1:{ports['master']}"),
            ('"tcp:9093"', f'"tcp:{ports[name]}"'),
            ("/run/secrets/replication", str(tmp_path / "secret")),
        ):
            text = text.replace(old, new)
        (tmp_path / f"{name}.toml").write_text(text)
        options = [each.replace(f"/etc/replication/{role}.toml", f"{name}.toml") for each in options]
        return stack.enter_context(Daemon(tmp_path, role, *options, name=name))

    def healthy(name: str) -> bool:
        check = [each.replace(":9093", f":{ports[name]}") for each in instruction("CMD")]
        return subprocess.run(check, check=False, capture_output=True, env=environment()).returncode == 0

    def copied(name: str) -> list[int]:
        with closing(sqlite3.connect(tmp_path / f"replication-{name}.db", timeout=30)) as copy:
            try:
                return [each for (each,) in copy.execute("SELECT stream_id FROM stream_orders")]
            except sqlite3.OperationalError:
                return []

    def run(service: str, command: str) -> str:
        """Return what a command of the page prints."""
        words = shlex.split(command.replace("/run/secrets/replication", str(tmp_path / "secret")))
        done = subprocess.run(
            [*words, f"--http=http://127.0.0.1:{ports[service]}"],
            check=True,
            capture_output=True,
            text=True,
            env=environment(),
        )
        return done.stdout

    shown = section(page("operations.md"), "## Containers")
    with postgres.database() as database, ExitStack() as stack:
        daemons = {name: started(name) for name in names}
        for each, daemon in daemons.items():
            assert daemon.address("HTTP")
            assert healthy(each), each
        appended, status = (run(*each) for each in re.findall(r"^docker compose exec (\w+) (.*)$", shown, re.MULTILINE))
        assert appended == "2\n"
        assert status.startswith("worker worker1 of shop.example: ok\n")
        until(lambda: copied("worker1") == copied("worker2") == [2], "both workers have the fact")
        for daemon in reversed(daemons.values()):
            assert daemon.terminate() == 0
        assert not healthy("master")
