"""Metrics in Prometheus's text format, written by prometheus_client, which is imported at the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.errors import install_command
from replication.web.request import Answer, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from replication.streams.interfaces import Sample
    from replication.web.request import ApiRequest

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# The meaning of each metric, of a process that writes (M), and of a worker (W).  Those that end in _total are counters,
# the others are gauges.
METRICS: Final = {
    "position": "M: the position that this writer has published. W: the position applied here.",
    "lag": "M: settled and not yet published. W: published and not yet applied.",
    "stopped": "1 while the stream is stopped because applying or fetching fails.",
    "open_ids": "IDs that are reserved and not complete.",
    "oldest_open_seconds": "Age of the oldest open ID; 0 if there is none.",
    "facts_refused_total": "Facts refused because of their rows: too large, too deep, without the declared fields.",
    "kept_bytes": "Memory of an in-memory stream.",
    "gone": "ID up to which this process has deleted facts.",
    "kept_rows": "Rows that are counted and kept, of a stream with a retention.",
    "connections": "Connections of followers.",
    "connections_total": "Connections. M: accepted. W: made.",
    "connections_refused_total": "Connections refused because of a bound, by the key of the bound.",
    "silent_connections": "Connections of the wire that have sent no line.",
    "links": "Writers that this worker is connected to.",
    "lines_total": "Lines of the wire, in and out.",
    "bytes_total": "Bytes of the wire, in and out.",
    "queued_bytes": "Bytes that wait for peers that do not read.",
    "commands_total": "Commands received from followers.",
    "commands_refused_total": "Commands of followers that have no right to send them.",
    "faults_total": "Connections closed because of an error of the peer.",
    "skipped_messages_total": "Messages of Redis that were skipped: not needed, or wrong.",
    "catch_up_rows_total": "Rows served in pages.",
    "catch_ups_total": "Pages of missed facts requested.",
    "applied_rows_total": "Rows applied.",
    "failures_total": "How often applying or fetching failed.",
    "facts_skipped_total": "Facts that a function could not take, left out since the start.",
    "lost_and_found_total": "Facts that did not arrive, and were found in the writers' database by the audit.",
    "resets_total": "How often a writer's position went back.",
    "history_checks_total": "How often the history of a writer was compared with the one that was followed.",
    "history_mismatches_total": "How often the two histories differed below the position.",
    "cache_hits_total": "Calls answered from a cache.",
    "cache_misses_total": "Calls that were computed.",
    "cache_size": "Entries of a cache.",
    "cache_invalidations_total": "Invalidations of a cache.",
    "users_syncing": "Users that sync at any process.",
    "users_refused_total": "Users that did not count as syncing, because the memory for them was used up.",
    "user_ips_waiting": "Rows that wait to be written to users_last_seen.",
    "user_ips_written_total": "Rows written to users_last_seen.",
    "user_ips_dropped_total": "Rows dropped because more than 10,000, or 16 MiB, waited, or because they are refused.",
    "tls_failures_total": "Connections that failed in TLS, such as for the certificate of the client.",
    "certificate_expires_seconds": "When a certificate in a file of this process expires, in seconds since 1970.",
    "http_answers_total": "Answers given over HTTP.",
    "http_bodies_refused_total": "Bodies of requests refused because all bodies together took more than 256 MiB.",
    "http_body_bytes": "Bytes of the bodies that requests have sent and that are kept; bodies below 16 KiB do not "
    "count.",
    "http_connections": "Open connections of HTTP.",
    "http_timeouts_total": "Connections of HTTP closed because a request took too long, or because unread answers "
    "took more than 256 MiB.",
}


async def answer_metrics(request: ApiRequest) -> Answer:
    """Answer with the metrics of the process and of its HTTP API."""
    try:
        text = render([*request.api.served.samples(), *request.api.samples()])
    except ImportError as error:
        raise RequestError(501, f"metrics need prometheus_client: {install_command('metrics')}") from error
    return Answer(200, text, CONTENT_TYPE)


def render(samples: Iterable[Sample]) -> bytes:
    """Return ``samples``, all of METRICS, as text; each metric's name begins with ``replication_``.

    ImportError if prometheus_client is not installed.
    """
    from prometheus_client import CollectorRegistry, Metric, generate_latest  # noqa: PLC0415  an extra: see above
    from prometheus_client.registry import Collector  # noqa: PLC0415

    class Samples(Collector):
        def collect(self) -> Iterable[Metric]:
            families: dict[str, Metric] = {}
            for sample in samples:
                name, full_name = sample.name, f"replication_{sample.name}"
                kind = "counter" if name.endswith("_total") else "gauge"
                if name not in families:
                    families[name] = Metric(full_name.removesuffix("_total"), METRICS[name], kind)
                families[name].add_sample(full_name, dict(sample.labels), sample.value)
            return families.values()

    registry = CollectorRegistry()
    registry.register(Samples())
    return generate_latest(registry)
