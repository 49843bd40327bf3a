"""A fact is one trace in the processes of a master and a worker, whose spans reach one collector, also at the end."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from tests.system.daemons import LOCAL, Daemon, append, until
from tests.system.test_skips import HTTP, follow, order

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MESSAGES: Any = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="OpenTelemetry is missing: pip install '.[otel]'"
)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Give the URL of a collector, and its spans, each with the instance that has sent it."""
    found: list[tuple[str, Any]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") is None:
                for sent in MESSAGES.ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = {each.key: each.value.string_value for each in sent.resource.attributes}
                    spans = [span for scope in sent.scope_spans for span in scope.spans]
                    found.extend((names["service.instance.id"], span) for span in spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", found
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_fact_is_one_trace_across_processes(tmp_path: Path, collector: tuple[str, list[tuple[str, Any]]]) -> None:
    url, found = collector
    (tmp_path / "traced.toml").write_text("traces = 1.0\n")
    master = Daemon(tmp_path, "master", "--stream=orders", "--config=traced.toml", *LOCAL)
    master.environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "3600000"}
    with master:
        worker = Daemon(tmp_path, "worker", *follow(master), "--config=traced.toml", HTTP)
        worker.environment |= {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with worker:
            append(master.address("HTTP"), "orders", [order()])
            (applied,) = until(lambda: [span for name, span in found if name == "worker1"], "the worker sends a span")
        assert not [span for name, span in found if name == "master"]  # it sends every hour
        assert master.terminate() == 0
    (write,) = [span for name, span in found if name == "master"]
    assert (write.name, applied.name) == ("write orders", "apply orders")
    assert (applied.trace_id, applied.parent_span_id) == (write.trace_id, write.span_id)
    assert write.start_time_unix_nano <= write.end_time_unix_nano <= applied.end_time_unix_nano
