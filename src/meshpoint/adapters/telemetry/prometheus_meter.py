"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

from meshpoint.adapters.telemetry.metrics import Kind, Metric, Recorder


class PrometheusMeter:
    """Keeps the values of this process for Prometheus."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

    def recorder(self, metric: Metric) -> Recorder:
        """Create `metric`; see `Meter`."""
        names = metric.name, metric.description, metric.labels
        match metric.kind:
            case Kind.COUNTER:
                counter = Counter(*names, registry=self._registry)
                return _recorder(lambda labels: counter.labels(*labels).inc)
            case Kind.GAUGE:
                gauge = Gauge(*names, registry=self._registry)
                return _recorder(lambda labels: gauge.labels(*labels).set)
            case Kind.HISTOGRAM:
                histogram = Histogram(*names, registry=self._registry, buckets=metric.buckets)
                return _recorder(lambda labels: histogram.labels(*labels).observe)

    def render(self) -> bytes:
        """All values, in Prometheus's text format."""
        return generate_latest(cast("CollectorRegistry", _WithoutCreated(self._registry)))


def _recorder(bind: Callable[[tuple[str, ...]], Callable[[float], None]]) -> Recorder:
    """Keep what `bind` returns for each combination of labels: looking it up takes most time."""
    bound: dict[tuple[str, ...], Callable[[float], None]] = {}

    def record(value: float, labels: tuple[str, ...]) -> None:
        if (record_value := bound.get(labels)) is None:
            record_value = bound[labels] = bind(labels)
        record_value(value)

    return record


class _WithoutCreated(Collector):
    """The metrics of a registry, without the times at which the client has created them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Family]:
        for family in self._registry.collect():
            family.samples = [
                sample for sample in family.samples if not sample.name.endswith("_created")
            ]
            yield family
