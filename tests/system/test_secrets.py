"""Secrets are planted wherever a user can give one, and everything that comes out is read: none of it has a secret."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from replication import config
from replication.segments.run import ReplayRequest
from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.system.daemons import LOCAL, Daemon, append, environment, run_command, until
from tests.system.peers import ask

if TYPE_CHECKING:
    from tests.postgres import PostgresServer

SECRET = "hunter2secret"
BEARER = "openhunter2sesame"
TWISTD = "twistd -n --pidfile= replication"
# Every way to give a URL that is refused or cannot be reached; U is replaced by a user and a password, S by a password.
REFUSED = [
    *(
        f"{TWISTD} master --database={each}"
        for each in ("mysql://U@h/d", "sqlite://U@h/d", "postgresql:/U@h/d", "U@h/d")
    ),
    *(
        f"{TWISTD} master --database={each}"
        for each in ("postgresql://U%zz@h/d", "postgresql://U/d", "postgresql://U@@h")
    ),
    f"{TWISTD} master --database=sqlite:///a.db?key=S",
    f"{TWISTD} master --database=postgresql://U@127.0.0.1:1/d",
    f"{TWISTD} master --http=postgresql://U@h/d",
    f"{TWISTD} master --listen=tcp:U@h:1",
    f"{TWISTD} master postgresql://U@h/d",
    f"{TWISTD} postgresql://U@h/d",
    f"{TWISTD} worker --connect=postgresql://U@h/d",
    f"{TWISTD} worker --connect=tcp:U@h:1",
    *(
        f"{TWISTD} worker --catch-up={each}"
        for each in ("ftp://U@h", "http://U@h:1", "s3://U@bucket", "U@h", "mysql://U@h/d")
    ),
    f"{TWISTD} worker --config=refused.toml",
    "replication status --http http://U@127.0.0.1:1",
    "replication status --http=http://127.0.0.1:1/?token=S",
    "replication append --http https://U@127.0.0.1:1 orders [1]",
    "replication tail postgresql://U@h/d",
    "replication tail tcp:h:1 --from 0 --http http://U@127.0.0.1:1",
    "replication rooms --database postgresql://U@127.0.0.1:1/d !r:h",
    "replication rooms --database mysql://U@h/d !r:h",
    "replication streams check --config shop.toml --database postgresql://U@127.0.0.1:1/d",
    "replication replay --master none --database postgresql://U@127.0.0.1:1/d --out out",
    "replication replay --master none --database mysql://U@h/d --out out",
    "replication replay --master none --database sqlite:///none.db --out s3://U@bucket/out",
    "replication postgresql://U@h/d",
    "replication status postgresql://U@h/d",
]


def assert_clean(text: str, where: str) -> None:
    for secret in (SECRET, BEARER):
        assert secret not in text, f"{where} has the secret: …{text[max(0, text.index(secret) - 100) :][:200]}"


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_refused_is_not_repeated(command: str, tmp_path: Path) -> None:
    (tmp_path / "refused.toml").write_text(
        f'[writers.a]\nconnect = "tcp:h:1"\nhttp = "http://me:{SECRET}@h:1"\nhtp = "{SECRET}"\n'
    )
    (tmp_path / "shop.toml").write_text('[[streams]]\nname = "orders"\ntable = "orders"\nrow = ["a"]\n')
    arguments = [
        each.replace("U@", f"me:{SECRET}@").replace("U/", f"me:{SECRET}/").replace("U%", f"me:{SECRET}%")
        for each in command.split()
    ]
    arguments = [re.sub(r"=S$", f"={SECRET}", each) for each in arguments]
    assert any(SECRET in each for each in arguments) or "refused.toml" in command
    done = run_command(*arguments, folder=tmp_path)
    assert done.returncode in (1, 2), done
    assert done.stdout + done.stderr
    assert_clean(done.stdout + done.stderr, command)


def test_nothing_that_two_daemons_print_serve_or_store_has_a_secret(tmp_path: Path, postgres: PostgresServer) -> None:
    """A master and a worker that writes, on PostgreSQL, with catch-up sources that fail in several ways."""
    (tmp_path / "secret").write_text(BEARER)
    postgres.sql("DROP ROLE IF EXISTS locked; CREATE ROLE locked LOGIN PASSWORD 'another'")
    at = f"127.0.0.1:{postgres.port}"
    with postgres.database() as name, postgres.database() as other:
        database = f"postgresql://postgres:{SECRET}@{at}/{name}"
        (tmp_path / "worker.toml").write_text(
            f"""
            catch_up = ["postgresql://locked:{SECRET}@{at}/{name}", "postgresql://me:{SECRET}@127.0.0.1:1/{name}",
                        "postgresql://postgres@{at}/{name}_lost?password={SECRET}", "http://127.0.0.1:1"]
            writes = ["refunds"]
            secret_file = "{tmp_path}/secret"
            """
        )
        master = Daemon(tmp_path, "master", "--stream=orders", f"--database={database}", "--secret-file=secret", *LOCAL)
        master.before = ["env"]  # so that its arguments are the process's
        with master:
            http = master.address("HTTP")
            append(http, "orders", [Fact(Token(1), ('["o1"]',))], BEARER)
            worker = Daemon(
                tmp_path,
                "worker",
                "--config=worker.toml",
                f"--connect=tcp:{master.address('the wire')}",
                *("--database", f"postgresql://postgres:{SECRET}@{at}/{other}"),
                *LOCAL,
            )
            worker.before = ["env"]
            with worker:
                here = worker.address("HTTP")
                until(lambda: worker.log.count("a source of missed facts fails") >= 4, "every source has failed")
                headers = {"Authorization": f"Bearer {BEARER}"}
                for daemon, where in ((master, http), (worker, here)):
                    for path in (
                        "/v1/streams",
                        "/v1/connections",
                        "/health",
                        "/health/ready",
                        "/metrics",
                        "/v1/streams/x",
                    ):
                        assert_clean(str(ask(f"http://{where}{path}", headers=headers)), path)
                        assert_clean(str(ask(f"http://{where}{path}")), path)
                    assert_clean(Path(f"/proc/{daemon.pid}/cmdline").read_text(), "the title of a process")
                statuses = str(ask(f"http://{here}/v1/streams/orders", headers=headers))
                assert f"postgresql://locked@{at}/{name}" in statuses
                assert f"postgresql://me@127.0.0.1:1/{name}" in statuses
                shown = subprocess.run(
                    ["replication", "status", "--http", f"http://{here}", "--secret-file", "secret"],
                    cwd=tmp_path,
                    env=environment(),
                    capture_output=True,
                    text=True,
                    check=True,
                )
                assert_clean(shown.stdout + shown.stderr, "replication status")
                assert_clean(str(postgres.sql("SELECT query, application_name FROM pg_stat_activity")), "the sessions")
                found = config.load(
                    "worker", str(tmp_path / "worker.toml"), {"database": database, "listen": ["tcp:0"]}
                )
                assert_clean(repr(found) + str(found), "the configuration")
                assert_clean(repr(ReplayRequest(database, "out")), "a request for a replay")
                assert worker.terminate() == 0
            assert master.terminate() == 0
        for each in tmp_path.rglob("*"):
            if each.is_file() and each.name not in ("worker.toml", "secret"):
                assert_clean(each.read_bytes().decode("latin-1"), each.name)
