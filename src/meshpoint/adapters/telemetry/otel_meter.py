"""Metrics through OpenTelemetry's API."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from meshpoint._version import __version__
from meshpoint.adapters.telemetry.metrics import Kind, Labels, Metric, Recorder, scalar_recorder

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
        attributes_of = cache(lambda labels: dict(zip(metric.labels, labels, strict=True)))
        if metric.kind is Kind.HISTOGRAM:
            record = self._meter.create_histogram(
                name,
                unit,
                metric.description,
                explicit_bucket_boundaries_advisory=metric.buckets,
            ).record
            return lambda value, labels: record(value, attributes_of(labels))
        values: dict[Labels, float] = {}

        def observe(options: CallbackOptions) -> Iterable[Observation]:  # in the reader's thread
            return [Observation(value, attributes_of(key)) for key, value in [*values.items()]]

        if metric.kind is Kind.COUNTER:
            self._meter.create_observable_counter(name, [observe], unit, metric.description)
        else:
            self._meter.create_observable_gauge(name, [observe], unit, metric.description)
        return scalar_recorder(metric.kind, values)


def instrument_name(metric: Metric) -> tuple[str, str]:
    """The name and the unit of `metric` in OpenTelemetry."""
    name = metric.name.removesuffix("_total").replace("meshpoint_", "meshpoint.", 1)
    stem, _, suffix = name.rpartition("_")
    return (stem, unit) if (unit := _UNITS.get(suffix)) else (name, "")
