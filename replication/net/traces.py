"""Traces of facts, for OpenTelemetry: what the writer and each follower did with one fact is one trace.

All processes compute the IDs of a trace from the stream, the writer and the token, and decide alike which facts are
traced.  So nothing more is sent.  A span is made when its work is done.  Until ``run`` is called, OpenTelemetry
is not imported, and a transaction costs one comparison.
"""

from __future__ import annotations

import logging
import os
import re
import time
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from threading import Thread
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from replication.errors import ConfigError, install_command
from replication.streams.skips import describe_error
from replication.urls import Url, hide_secret, hide_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from replication.streams.cursor import Apply
    from replication.streams.facts import Fact
    from replication.wire.grammar import InstanceName, StreamName

FLUSH_PATIENCE: Final = 2.0  # seconds at the end of a process, in which the last spans may be sent
SHORTEST_SECRET: Final = 4  # characters of a secret: a shorter text is a part of many words
_OFF: Final[AbstractContextManager[None]] = nullcontext()

tracer: Tracer | None = None  # of this process


def run(reactor: Any, share: float, instance_name: str, version: str) -> None:
    """Trace a share of all facts while the reactor runs, in a process of this version; 0 is none.

    Where the spans are sent is configured by OpenTelemetry's environment variables.  ConfigError if its packages are
    not installed.
    """
    if not share:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.util.re import parse_env_headers  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"traces need OpenTelemetry: {install_command('otel')}") from error

    def start() -> None:
        global tracer  # noqa: PLW0603 (a process is traced or not, like its log)
        for name in (OTLPSpanExporter.__module__, parse_env_headers.__module__):
            logging.getLogger(name).addFilter(hide_settings)  # they log URLs that fail, and headers that are wrong
        tracer = Tracer(share, instance_name, version, OTLPSpanExporter())

    reactor.callWhenRunning(start)  # its thread would not survive the fork into the background
    reactor.addSystemEventTrigger("after", "shutdown", stop)


def hide_settings(record: logging.LogRecord) -> bool:
    """Leave the secrets in OpenTelemetry's headers and in the URL of its endpoint out of a record; let all pass."""
    text = record.getMessage()
    for name in ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"):
        for header in os.environ.get(name, "").split(","):
            value = re.split("[=:]", header, maxsplit=1)[-1].strip()  # a wrong header may have neither
            for each in [value, unquote(value), *unquote(value).split()]:
                text = hide_secret(text, each) if len(each) >= SHORTEST_SECRET else text
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        url = os.environ.get(name, "")
        if query := url.partition("?")[2]:
            text = text.replace(query, "…")
        text = Url(url).hide_in(text)
    record.msg, record.args = hide_secrets(text), ()
    return True


def stop() -> None:
    """Send the last spans, for FLUSH_PATIENCE seconds at most."""
    global tracer  # noqa: PLW0603
    if tracer is not None:
        closing = Thread(target=tracer.close, daemon=True)
        closing.start()
        closing.join(FLUSH_PATIENCE)
        tracer = None


def applying(stream: StreamName, parts: Mapping[InstanceName, Apply]) -> AbstractContextManager[None]:
    """Return the block in which a follower applies facts, each part those of one writer."""
    return _OFF if tracer is None else tracer.applying(stream, parts)


class Tracer:
    """Makes the spans of facts.

    Args:
        share: of all facts, from 0 to 1.
        instance_name: of this process.
        version: of this package.
        exporter: an OpenTelemetry SpanExporter; its thread sends spans in batches.  It drops what is too much.
        wall: seconds since 1970.

    """

    def __init__(
        self, share: float, instance_name: str, version: str, exporter: Any, wall: Callable[[], float] = time.time
    ) -> None:
        from opentelemetry import trace  # noqa: PLC0415 (an extra)
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator  # noqa: PLC0415
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON  # noqa: PLC0415

        class Ids(RandomIdGenerator):
            """Gives the first span of a trace its computed IDs, and others random ones."""

            trace_id, span_id = 0, 0

            def generate_trace_id(self) -> int:
                return self.trace_id

            def generate_span_id(self) -> int:
                given, self.span_id = self.span_id, 0
                return given or super().generate_span_id()

        self._api, self._ids, self._wall = trace, Ids(), wall
        self._limit = share * 2**64
        resource = Resource.create({"service.instance.id": instance_name, "service.version": version})
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, id_generator=self._ids, resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("replication", version)

    def wrote(self, stream: StreamName, writer: InstanceName, facts: Sequence[Fact], seconds: float) -> None:
        """Note that a writer has committed facts; their IDs were reserved so many seconds ago."""
        end = self._wall()
        for fact in facts:
            if (ids := self._traced(stream, writer, fact)) is not None:
                self._ids.trace_id, self._ids.span_id = ids
                kind = self._api.SpanKind.PRODUCER
                self._span(f"write {stream}", kind, (stream, writer, fact), end - seconds).end(_nanoseconds(end))

    @contextmanager
    def applying(self, stream: StreamName, parts: Mapping[InstanceName, Apply]) -> Iterator[None]:
        """Note how facts are applied in the block, and its error."""
        begin, failed = self._wall(), None
        try:
            yield
        except Exception as error:
            failed = describe_error(error)
            raise
        finally:
            end = _nanoseconds(self._wall())
            for writer, part in parts.items():
                for fact in part.facts:
                    if (ids := self._traced(stream, writer, fact)) is not None:
                        self._applied((stream, writer, fact), ids, begin, failed).end(end)

    def close(self) -> None:
        """Send the last spans."""
        self._provider.shutdown()

    def _traced(self, stream: StreamName, writer: InstanceName, fact: Fact) -> tuple[int, int] | None:
        """Return the IDs of the trace of a fact and of its first span, which are not 0; None if it is not traced."""
        digest = blake2b(f"{stream} {writer} {fact.token}".encode(), digest_size=24).digest()
        if int.from_bytes(digest[8:16]) >= self._limit:
            return None
        return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1

    def _applied(
        self, what: tuple[StreamName, InstanceName, Fact], ids: tuple[int, int], begin: float, failed: str | None
    ) -> Any:
        api = self._api
        first = api.SpanContext(*ids, is_remote=True, trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED))
        parent = api.set_span_in_context(api.NonRecordingSpan(first))
        span = self._span(f"apply {what[0]}", api.SpanKind.CONSUMER, what, begin, parent)
        if failed is not None:
            span.set_status(api.Status(api.StatusCode.ERROR, failed))
        return span

    def _span(
        self, name: str, kind: Any, what: tuple[StreamName, InstanceName, Fact], begin: float, parent: Any = None
    ) -> Any:
        stream, writer, fact = what
        attributes: dict[str, str | int] = {
            "replication.stream": stream,
            "replication.writer": writer,
            "replication.token": fact.token,
            "replication.rows": len(fact.texts),
        }
        context = parent or self._api.set_span_in_context(self._api.INVALID_SPAN)  # below no span of the application
        return self._tracer.start_span(name, context, kind=kind, attributes=attributes, start_time=_nanoseconds(begin))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
