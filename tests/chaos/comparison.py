"""What must hold once the faults are over: nothing lost, nothing twice, nothing different.

- Each acknowledged append is in the writer's database, under the IDs that were answered, once.
- A writer's database has nothing else.
- Each copy has the rows of the writer's database, and each function's effects are those rows, once and in order.
- What a restored backup or a failover has lost is lost everywhere.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs

from tests.chaos.scene import PATIENCE, STREAMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.chaos.ledger import Append
    from tests.chaos.scene import Loss, Rows, Scene

EXAMPLES = 3  # of each finding


@attrs.define
class Findings:
    """What is wrong: the number of facts or rows, and some examples."""

    lost: int = 0
    twice: int = 0
    diverged: int = 0
    examples: list[str] = attrs.field(factory=list)

    def __bool__(self) -> bool:
        """Return whether anything is wrong."""
        return bool(self.lost or self.twice or self.diverged)

    def add(self, kind: str, what: str, found: Iterable[object]) -> None:
        """Count what was found."""
        listed = list(found)
        if listed:
            setattr(self, kind, getattr(self, kind) + len(listed))
            self.examples.append(f"{kind}: {what}: {len(listed)}, such as {listed[:EXAMPLES]}"[:2_000])


@attrs.frozen
class History:
    """What a writer's database has, and the appends that it has lost."""

    stream: str
    rows: Rows
    lost: frozenset[str]  # keys of acknowledged appends
    before: float  # when the last loss was over; 0 if there was none


def check(scene: Scene, findings: Findings, patience: float = PATIENCE) -> dict[str, History]:
    """Compare everything; no program appends now.  Followers may take ``patience`` seconds to become equal."""
    histories = {stream: check_writer(scene, stream, findings) for stream in STREAMS}
    for name in scene.followers:
        for history in histories.values():
            check_follower(scene, name, history, findings, 0 if findings else patience)
    return histories


def check_writer(scene: Scene, stream: str, findings: Findings) -> History:
    """Compare a writer's database with what was acknowledged."""
    rows = scene.until(lambda: _try(scene.homes[stream].rows), f"the database of {STREAMS[stream]} can be read")
    appends = scene.ledger(stream)
    lost = lost_keys(appends, [each for each in scene.losses if each.stream == stream])
    there = by_token(rows)
    findings.add("diverged", f"{stream} was refused", [each.refused for each in appends.values() if each.refused])
    findings.add("lost", f"{stream} has no answer", [key for key, each in appends.items() if each.ids is None])
    for key, append in appends.items():
        for token, texts in facts_of(append):
            if key in lost:
                continue
            found = there.get(token)
            if found is None:
                findings.add("lost", f"{stream} {key}", [(token, texts)])
            elif found != texts:
                findings.add("diverged", f"{stream} {key}", [(token, texts, found)])
    findings.add("twice", f"rows of {stream}", twice(parse(text) for *_, text in rows))
    asked = {parse(row) for append in appends.values() for fact in append.facts for row in fact}
    findings.add("diverged", f"{stream} was not asked for", [row for row in rows if parse(row[3]) not in asked])
    before = max((each.end for each in scene.losses if each.stream == stream), default=0.0)
    return History(stream, rows, lost, before)


def lost_keys(appends: dict[str, Append], losses: Iterable[Loss]) -> frozenset[str]:
    """Return the appends that a loss may have taken, and has: acknowledged in its time, and not in what was kept."""
    keys = set()
    for loss in losses:
        kept = {(row[0], parse(row[3])) for row in loss.kept}
        for key, each in appends.items():
            if each.ids is not None and loss.begin <= each.done < loss.end:
                facts = [(token, row) for token, rows in facts_of(each) for row in rows]
                if not {(token, parse(row)) for token, row in facts} <= kept:
                    keys.add(key)
    return frozenset(keys)


def check_follower(scene: Scene, name: str, history: History, findings: Findings, patience: float) -> None:
    """Compare what a follower has with the writer's database, until it is equal or ``patience`` is over."""
    follower, stream = scene.followers[name], history.stream
    found: Rows = []

    def equal() -> bool:
        nonlocal found
        found = _try(lambda: follower.rows(stream)) or []
        return bool(_fits(scene, name, history, found))

    try:
        scene.until(equal, "it is equal", patience)
    except AssertionError:
        there, here = Counter(history.rows), Counter(found)
        what = f"{name} {stream}"
        again = [row for row, number in here.items() if number > 1]
        findings.add("twice", what, again)
        findings.add("lost", what, sorted(there.keys() - here.keys(), key=str))
        if name != "plain":
            findings.add("diverged", what, sorted(here.keys() - there.keys(), key=str))
        if not (again or there.keys() ^ here.keys()) or name == "plain":
            findings.add("diverged", f"the order of {what}", ["it is not that of the IDs"])


def _fits(scene: Scene, name: str, history: History, found: Rows) -> bool:
    if name != "plain":
        return found == history.rows
    # Nothing undoes what this function has done: it may also have what was lost since.
    rest = Counter(found)
    rest.subtract(Counter(history.rows))
    if min(rest.values(), default=0) < 0 or max(rest.values(), default=0) > 1:
        return False
    appends = scene.ledger(history.stream)
    keys = {parse(row): key for key, each in appends.items() for fact in each.facts for row in fact}
    extra = [keys.get(parse(row[3])) for row, number in rest.items() if number]
    return all(key in history.lost or (key and appends[key].tried < history.before) for key in extra)


def by_token(rows: Rows) -> dict[Any, list[Any]]:
    """Return the rows of each fact, parsed."""
    found: dict[Any, list[Any]] = {}
    for token, _, _, text in rows:
        found.setdefault(token, []).append(json.loads(str(text)))
    return found


def facts_of(append: Append) -> list[tuple[int, list[Any]]]:
    """Return the acknowledged facts that have rows, with their IDs."""
    return [each for each in zip(append.ids or [], append.facts, strict=False) if each[1]]


def parse(row: object) -> str:
    """Return a row, or its text, in a form that can be compared."""
    return json.dumps(json.loads(row) if isinstance(row, str) else row)


def twice(values: Iterable[object]) -> list[object]:
    """Return the values that occur more than once."""
    return [value for value, number in Counter(values).items() if number > 1]


def _try(read: Callable[[], Rows]) -> Rows | None:
    """Return None while the database cannot be read, as before its table is made."""
    try:
        return read()
    except sqlite3.Error:
        return None
    except Exception as error:
        if type(error).__module__.startswith("psycopg"):
            return None
        raise
