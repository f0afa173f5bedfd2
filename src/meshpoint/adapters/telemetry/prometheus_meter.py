"""Metrics for Prometheus.

Values are plain numbers until a scrape: the client's own counters and histograms take a lock and
several calls for each value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from meshpoint.adapters.telemetry.metrics import Kind, Labels, Metric, Recorder, scalar_recorder


class PrometheusMeter:
    """Keeps the values of this process for Prometheus. One thread records; any may render."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

    def recorder(self, metric: Metric) -> Recorder:
        """Create `metric`; see `Meter`."""
        if metric.kind is Kind.HISTOGRAM:
            histograms: dict[Labels, _Histogram] = {}
            self._registry.register(_HistogramCollector(metric, histograms))
            return _histogram_recorder(metric.buckets, histograms)
        values: dict[Labels, float] = {}
        self._registry.register(_ScalarCollector(metric, values))
        return scalar_recorder(metric.kind, values)

    def render(self) -> bytes:
        """All values, in Prometheus's text format."""
        return generate_latest(self._registry)


class _Histogram:
    """The values of one combination of labels, counted by bucket. The last has no bound."""

    __slots__ = ("counts", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts, self.sum = [0] * (buckets + 1), 0.0


def _histogram_recorder(bounds: Sequence[float], histograms: dict[Labels, _Histogram]) -> Recorder:
    def observe(value: float, labels: Labels) -> None:
        if (histogram := histograms.get(labels)) is None:
            histogram = histograms[labels] = _Histogram(len(bounds))
        histogram.counts[bisect_left(bounds, value)] += 1
        histogram.sum += value

    return observe


class _ScalarCollector(Collector):
    """Shows the values of a counter or a gauge."""

    def __init__(self, metric: Metric, values: dict[Labels, float]) -> None:
        self._metric, self._values = metric, values

    def collect(self) -> Iterator[Family]:
        metric = self._metric
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(metric.name, metric.description, labels=metric.labels)
        for labels, value in [*self._values.items()]:
            family.add_metric(labels, value)
        yield family


class _HistogramCollector(Collector):
    """Shows the values of a histogram."""

    def __init__(self, metric: Metric, histograms: dict[Labels, _Histogram]) -> None:
        self._metric, self._histograms = metric, histograms
        bounds = *metric.buckets, float("inf")
        self._bounds = [floatToGoString(bound) for bound in bounds]  # type: ignore[no-untyped-call]

    def collect(self) -> Iterator[Family]:
        metric = self._metric
        family = HistogramMetricFamily(metric.name, metric.description, labels=metric.labels)
        for labels, histogram in [*self._histograms.items()]:
            buckets = zip(self._bounds, accumulate(histogram.counts), strict=True)
            family.add_metric(labels, [*buckets], histogram.sum)
        yield family
