"""Metrics in Prometheus's text format, written by prometheus_client, which is imported at the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.errors import install_command
from replication.streams.interfaces import Sample
from replication.web.request import Answer, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from replication.web.request import ApiRequest

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


async def answer_metrics(request: ApiRequest) -> Answer:
    """Answer with the metrics of the process and of its HTTP API."""
    answers = [
        Sample("http_answers", "counter", "Answers given over HTTP.", count, {"call": call, "status": str(status)})
        for (call, status), count in request.api.answers.items()
    ]
    try:
        text = render([*request.api.served.samples(), *answers])
    except ImportError as error:
        raise RequestError(501, f"metrics need prometheus_client: {install_command('metrics')}") from error
    return Answer(200, text, CONTENT_TYPE)


def render(samples: Iterable[Sample]) -> bytes:
    """Return ``samples`` as text; each metric's name begins with ``replication_``, a counter's ends with ``_total``.

    ImportError if prometheus_client is not installed.
    """
    from prometheus_client import CollectorRegistry, Metric, generate_latest  # noqa: PLC0415  an extra: see above
    from prometheus_client.registry import Collector  # noqa: PLC0415

    class Samples(Collector):
        def collect(self) -> Iterable[Metric]:
            families: dict[tuple[str, str], Metric] = {}
            for sample in samples:
                name = f"replication_{sample.name.removesuffix('_total')}"
                family = families.setdefault((name, sample.kind), Metric(name, sample.meaning, sample.kind))
                suffix = "_total" if sample.kind == "counter" else ""
                family.add_sample(name + suffix, dict(sample.labels), sample.value)
            return families.values()

    registry = CollectorRegistry()
    registry.register(Samples())
    return generate_latest(registry)
