"""Metrics through OpenTelemetry's API."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry import metrics

from meshpoint._version import __version__
from meshpoint.adapters.telemetry.metrics import Kind, Metric, Recorder

_UNITS = {"seconds": "s", "bytes": "By"}


class OpenTelemetryMeter:
    """Records through the meter provider that the process has set up."""

    def __init__(self) -> None:
        self._meter = metrics.get_meter("meshpoint", __version__)

    def recorder(self, metric: Metric) -> Recorder:
        """Create `metric`; see `Meter`.

        Its name has neither unit nor suffix: exporters for Prometheus append them.
        """
        name, unit = instrument_name(metric)
        add: Callable[[float, dict[str, str]], None]
        match metric.kind:
            case Kind.COUNTER:
                add = self._meter.create_counter(name, unit, metric.description).add
            case Kind.GAUGE:
                add = self._meter.create_gauge(name, unit, metric.description).set
            case Kind.HISTOGRAM:
                add = self._meter.create_histogram(
                    name,
                    unit,
                    metric.description,
                    explicit_bucket_boundaries_advisory=metric.buckets,
                ).record
        return lambda value, labels: add(value, dict(zip(metric.labels, labels, strict=True)))


def instrument_name(metric: Metric) -> tuple[str, str]:
    """The name and the unit of `metric` in OpenTelemetry."""
    name = metric.name.removesuffix("_total").replace("meshpoint_", "meshpoint.", 1)
    stem, _, suffix = name.rpartition("_")
    return (stem, unit) if (unit := _UNITS.get(suffix)) else (name, "")
