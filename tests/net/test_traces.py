"""Spans of facts: one trace for the writer and its followers, and nothing while it is off."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from twisted.internet.testing import MemoryReactor

from replication.errors import ConfigError
from replication.net import traces
from replication.net.traces import Tracer
from replication.streams.cursor import Apply
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import logged
from tests.follower.cases import HELLO, WorkerCase, fact, position, rdata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.facts import Fact

pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is missing: pip install '.[otel]'")

ORDERS, MASTER = StreamName("orders"), InstanceName("master")


class Spans:
    """An exporter that keeps the spans; each Tracer of ``tracer`` is another process."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.tracers: list[Tracer] = []
        self.shut = 0

    def export(self, spans: Sequence[Any]) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self.found += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.shut += 1

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True

    def tracer(self, share: float = 1.0, name: str = "master", wall: float = 100.0) -> Tracer:
        self.tracers.append(Tracer(share, name, "1.2.3", self, lambda: wall))
        return self.tracers[-1]

    def all(self) -> list[Any]:
        """Return the spans in the order in which they were sent."""
        for each in self.tracers:
            each.close()
        return self.found


def facts(*tokens: int) -> list[Fact]:
    return [fact(each, "[]") for each in tokens]


def apply(tracer: Tracer, *tokens: int) -> None:
    with tracer.applying(ORDERS, {MASTER: Apply(facts(*tokens), Token(1), Token(tokens[-1]))}):
        pass


def test_the_writer_and_a_follower_make_one_trace_without_a_word_between_them() -> None:
    spans = Spans()
    spans.tracer().wrote(ORDERS, MASTER, facts(5, 6), 0.25)
    apply(spans.tracer(name="worker1", wall=101.0), 5)
    write, other, applied = spans.all()
    assert write.parent is None
    assert applied.parent.span_id == write.context.span_id
    assert applied.context.trace_id == write.context.trace_id != other.context.trace_id
    assert applied.context.span_id != write.context.span_id
    assert (write.name, applied.name) == ("write orders", "apply orders")
    assert (write.start_time, write.end_time, applied.start_time) == (99_750_000_000, 100_000_000_000, 101_000_000_000)
    assert write.attributes == {
        "replication.stream": "orders",
        "replication.writer": "master",
        "replication.token": 5,
        "replication.rows": 1,
    }
    assert applied.resource.attributes["service.instance.id"] == "worker1"
    assert applied.resource.attributes["service.version"] == "1.2.3"


def test_all_processes_trace_the_same_share() -> None:
    spans = Spans()
    tokens = range(2, 2_002)
    spans.tracer(share=0.1).wrote(ORDERS, MASTER, facts(*tokens), 0.0)
    apply(spans.tracer(share=0.1), *tokens)
    found = spans.all()
    half = len(found) // 2
    assert 120 < half < 280
    assert [each.attributes["replication.token"] for each in found[:half]] == [
        each.attributes["replication.token"] for each in found[half:]
    ]


def test_the_end_of_a_process_does_not_wait_long_for_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans()
    monkeypatch.setattr(traces, "tracer", spans.tracer())
    traces.stop()
    assert (spans.shut, traces.tracer) == (1, None)
    traces.stop()
    assert spans.shut == 1


def test_what_is_missing_is_named_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"traces need OpenTelemetry: pip install '.*\[otel\]'"):
        traces.run(object(), 1.0, "master", "1.2.3")


def test_a_process_that_does_not_trace_does_not_import_opentelemetry() -> None:
    program = "import sys, replication.service, replication.net.traces; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class FactsTests(WorkerCase):
    """A worker and a master that share this process, and its tracer."""

    def setUp(self) -> None:
        super().setUp()
        self.spans = Spans()
        self.patch(traces, "tracer", self.spans.tracer())

    def test_a_function_that_raises_is_an_error_of_the_span(self) -> None:
        @self.worker.on("orders")
        def refuse(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            raise ValueError("a bad order")

        with logged():
            self.serve(HELLO + position(1, 1) + rdata(2))
            self.start()
        self.flushLoggedErrors(ValueError)
        (span, *_) = self.spans.all()
        self.assertEqual((span.name, span.status.description), ("apply orders", "ValueError: a bad order"))

    def test_what_is_copied_is_a_span(self) -> None:
        self.serve(HELLO + position(1, 1) + rdata(2) + rdata(3))
        self.start()
        self.assertEqual([each.attributes["replication.token"] for each in self.spans.all()], [2, 3])


@pytest.mark.parametrize(
    "text",
    [
        "exceeded with url: /otlp?key=hunter2/v1/traces (Caused by a refusal)",
        "Failed to parse: '127.0.0.1:hunter2'",
        "no adapters were found for 'htp://me:hunter2@x/v1/traces'",
    ],
)
def test_a_failed_export_is_logged_without_the_secrets_of_its_url(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:hunter2/otlp?key=hunter2")
    record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "reason: %s", (text,), None)
    assert traces.hide_settings(record)
    assert "hunter2" not in record.getMessage()
    assert record.getMessage().startswith("reason: ")


@pytest.mark.parametrize(
    "headers",
    ["Authorization: Bearer hunter2secret", "a=b,hunter2secret;q", "x=y,key=hunter2secret\nz", "a=é hunter2secret,é"],
)
def test_headers_that_are_wrong_are_logged_without_their_secrets(
    headers: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenTelemetry logs a whole header if it has no value, as with a colon instead of an equals sign."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    reactor = MemoryReactor()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    monkeypatch.setattr(traces, "Tracer", lambda *_: None)
    traces.run(reactor, 1.0, "master", "1")
    for start in reactor.whenRunningHooks:
        start[0]()
    logging.getLogger(OTLPSpanExporter.__module__).error("the collector answers: %s", headers)
    assert "Header format invalid" in caplog.text
    assert "hunter2" not in caplog.text
    assert "the collector answers: " in caplog.text
