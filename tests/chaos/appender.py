"""A program that appends facts over HTTP: ``appender.py URL STREAM LEDGER SEED AUTHORITY``.

It writes each append into its ledger before the first request, and repeats the request with the same idempotency key
until it is acknowledged.  After a SIGKILL the next process goes on with what has no answer.  At the end of its input
it ends once everything is acknowledged.
"""

from __future__ import annotations

import http.client
import json
import random
import ssl
import sys
import threading
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.chaos.ledger import Append, LedgerFile, read_ledger

THREADS: Final = 3
PAUSE: Final = 0.1  # seconds between two requests of a thread, on average
TIMEOUT: Final = 10  # seconds for an answer
RETRY: Final = 0.2  # seconds
LONG: Final = 20_000  # bytes: no line has room for such a row
REFUSED: Final = range(400, 500)  # statuses


class Appender:
    """The threads of the program."""

    def __init__(self, url: str, stream: str, ledger: Path, seed: int, authority: str) -> None:
        self.ending = threading.Event()
        self._url, self._path = urlsplit(url), f"/v1/streams/{stream}/facts"
        self._stream = stream
        self._tls = ssl.create_default_context(cafile=authority) if authority else None
        appends = read_ledger(ledger)
        self._unknown = [each for each in appends.values() if each.ids is None and not each.refused]
        self._number = len(appends)
        self._chance = random.Random(f"{seed} {self._number}")
        self._ledger = LedgerFile(ledger)
        self._lock = threading.Lock()

    def run(self) -> None:
        """Append until ``ending``, and until all is acknowledged."""
        threads = [threading.Thread(target=self._append_all) for _ in range(THREADS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    def _append_all(self) -> None:
        while (append := self._next()) is not None:
            self._append(append)
            self.ending.wait(self._chance.uniform(0, 2 * PAUSE))

    def _next(self) -> Append | None:
        with self._lock:
            if self._unknown:
                return self._unknown.pop()
            if self.ending.is_set():
                return None
            self._number += 1
            append = Append(f"{self._stream}-{self._number}", 0.0, self._make(self._number))
        self._ledger.write("try", append.key, append.facts)
        return append

    def _make(self, number: int) -> list[list[Any]]:
        """Return facts of which each row is unlike all others."""
        chance = self._chance
        facts = []
        for fact in range(chance.choice((1, 1, 1, 2, 5, 20))):
            rows = [
                [number, fact, row, "ü" * chance.randrange(60)] for row in range(chance.choice((0, 1, 1, 1, 1, 2, 3)))
            ]
            facts.append(rows)
        if chance.random() < 0.01:
            facts.append([[number, len(facts), 0, "x" * LONG]])
        return facts

    def _append(self, append: Append) -> None:
        body = "".join(json.dumps({"rows": rows}) + "\n" for rows in append.facts).encode()
        while True:
            try:
                status, answer = self._post(append.key, body)
            except (OSError, http.client.HTTPException):
                status, answer = 0, b""
            if status == http.client.OK:
                self._ledger.write("done", append.key, json.loads(answer)["ids"])
                return
            if status in REFUSED:
                self._ledger.write("refused", append.key, f"{status} {answer.decode(errors='replace')}")
                return
            threading.Event().wait(self._chance.uniform(0, 2 * RETRY))

    def _post(self, key: str, body: bytes) -> tuple[int, bytes]:
        host, port = str(self._url.hostname), self._url.port
        connection = (
            http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=self._tls)
            if self._tls
            else http.client.HTTPConnection(host, port, timeout=TIMEOUT)
        )
        try:
            connection.request(
                "POST", self._path, body, {"Content-Type": "application/x-ndjson", "Idempotency-Key": key}
            )
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def main(url: str, stream: str, ledger: str, seed: str, authority: str = "") -> None:
    """Run until the standard input ends."""
    appender = Appender(url, stream, Path(ledger), int(seed), authority)
    threading.Thread(target=_wait_for_the_end, args=[appender.ending], daemon=True).start()
    appender.run()


def _wait_for_the_end(ending: threading.Event) -> None:
    sys.stdin.read()
    ending.set()


if __name__ == "__main__":
    main(*sys.argv[1:])
