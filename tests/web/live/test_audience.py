"""The viewers who are shown the same, and the bytes that they share."""

from __future__ import annotations

from typing import Any, cast

from replication.net.access import Rights
from replication.web.live.audience import BYTES_PER_SECOND, Audience, Shown, Viewer
from replication.web.live.tables import Table


class Request:
    """Keeps what is written."""

    rights = Rights()

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def update_rights(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written.append(data)


def table(*rows: tuple[str, int]) -> Table:
    return Table("T", ("name", "#n"), {name: [name, str(number)] for name, number in rows}, "None.")


def audience(viewers: int) -> tuple[Audience, list[Viewer]]:
    made = Audience(Shown(Rights(), "", "", ""))
    made.viewers.update(dict.fromkeys(Viewer(cast("Any", Request())) for _ in range(viewers)))
    return made, [*made.viewers]


def send(to: Audience, now: float) -> None:
    for viewer in to.waiting(now):
        to.send(viewer, now)


def written(viewer: Viewer) -> list[bytes]:
    return cast("Request", viewer.request).written


def test_viewers_share_bytes_that_have_only_what_has_changed() -> None:
    shared, (first, second) = audience(2)
    shared.update({"state": "ready", "streams": table(("a", 1), ("b", 2))}, 0.0)
    send(shared, 0.0)
    shared.update({"state": "ready", "streams": table(("a", 1), ("b", 3))}, 2.0)
    send(shared, 2.0)
    assert written(first)[1] == b'event: cells\ndata: {"streams": [[1, 1, "3"]]}\n\n'
    assert all(one is other for one, other in zip(written(first), written(second), strict=True))


def test_a_table_with_other_rows_is_sent_whole() -> None:
    shared, (viewer,) = audience(1)
    for number, rows in enumerate([[("a", 1), ("b", 2)], [("b", 2), ("a", 1)], [("b", 2)], []]):
        shared.update({"streams": table(*rows)}, float(number))
        send(shared, float(number))
    assert [each.count(b"event: streams") for each in written(viewer)] == [1, 1, 1, 1]
    assert b"None." in written(viewer)[-1]


def test_nothing_is_written_if_nothing_has_changed() -> None:
    shared, (viewer,) = audience(1)
    for now in range(3):
        shared.update({"streams": table(("a", 1)), "trouble": ""}, float(now))
        send(shared, float(now))
    assert len(written(viewer)) == 1


def test_a_part_that_becomes_empty_is_sent() -> None:
    shared, (viewer,) = audience(1)
    for now, trouble in enumerate(["stopped", ""]):
        shared.update({"trouble": trouble}, float(now))
        send(shared, float(now))
    assert written(viewer)[-1] == b'event: trouble\ndata: ""\n\n'


def test_a_viewer_that_has_missed_news_is_sent_the_whole_page_at_most_so_often() -> None:
    shared, (viewer,) = audience(1)
    for now in range(100):
        viewer.paused = bool(now % 4)  # it reads now and then
        shared.update({"state": "x" * 3 * BYTES_PER_SECOND, "streams": table(("a", now))}, float(now))
        send(shared, float(now))
    assert all(b"event: state" in each for each in written(viewer))
    assert 20 < len(written(viewer)) <= 25
    assert sum(map(len, written(viewer))) < 100 * BYTES_PER_SECOND


def test_further_news_are_due_when_the_bytes_of_the_last_ones_are_within_the_limit() -> None:
    shared, _ = audience(1)
    shared.update({"state": "y" * 2 * BYTES_PER_SECOND}, 5.0)
    assert shared.due == 5.0  # the whole page, as it was just opened
    shared.update({"state": "x" * 2 * BYTES_PER_SECOND}, 7.0)
    assert 9.0 < shared.due < 9.1
