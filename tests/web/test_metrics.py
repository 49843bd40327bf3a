"""Figures as Prometheus text."""

from __future__ import annotations

import pytest

from replication.streams.interfaces import Sample
from replication.web.metrics import render


def test_samples_of_one_name_are_one_family_under_our_name() -> None:
    text = render(
        [
            Sample("position", 9, {"writer": "a"}),
            Sample("lines_total", 12, {"direction": "out"}),
            Sample("position", 7, {"writer": 'b"\\\n'}),
        ]
    )
    assert text.decode().splitlines() == [
        "# HELP replication_position M: the position that this writer has published. W: the position applied here.",
        "# TYPE replication_position gauge",
        'replication_position{writer="a"} 9.0',
        r'replication_position{writer="b\"\\\n"} 7.0',
        "# HELP replication_lines_total Lines of the wire, in and out.",
        "# TYPE replication_lines_total counter",
        'replication_lines_total{direction="out"} 12.0',
    ]


def test_a_gauge_and_a_counter_may_be_namesakes() -> None:
    text = render(
        [
            Sample("connections", 2),
            Sample("connections_total", 5),
        ]
    )
    assert b"# TYPE replication_connections gauge\nreplication_connections 2.0\n" in text
    assert b"# TYPE replication_connections_total counter\nreplication_connections_total 5.0\n" in text


def test_labels_may_differ_within_a_family() -> None:
    text = render([Sample("lag", 1), Sample("lag", 2, {"b": "c"})])
    assert text.endswith(b'replication_lag 1.0\nreplication_lag{b="c"} 2.0\n')


def test_without_prometheus_client_it_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ImportError):
        render([])
