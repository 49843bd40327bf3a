"""Figures as Prometheus text.  prometheus_client writes it, and is only looked for when somebody asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

    from replication.streams.seams import Sample

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def render(samples: Iterable[Sample]) -> bytes:
    """Return ``samples``, a family for all of one name, each called ``replication_NAME`` (a counter ``…_total``).

    ImportError if prometheus_client is not installed.
    """
    from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415  an extra: see above
    from prometheus_client.registry import Collector  # noqa: PLC0415

    class Samples(Collector):
        def collect(self) -> Iterable[Metric]:
            return _families(samples)

    registry = CollectorRegistry()
    registry.register(Samples())
    return generate_latest(registry)


def _families(samples: Iterable[Sample]) -> Iterable[Metric]:
    from prometheus_client import Metric  # noqa: PLC0415

    families: dict[tuple[str, str], Metric] = {}
    for sample in samples:
        name = f"replication_{sample.name.removesuffix('_total')}"
        family = families.setdefault((name, sample.kind), Metric(name, sample.meaning, sample.kind))
        suffix = "_total" if sample.kind == "counter" else ""
        family.add_sample(name + suffix, dict(sample.labels), sample.value)
    return families.values()
