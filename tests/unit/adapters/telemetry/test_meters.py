"""Metrics in Prometheus and in OpenTelemetry have the documented names."""

from __future__ import annotations

import re
from typing import Any

import pytest
from opentelemetry import metrics as otel_metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from meshpoint.adapters.telemetry.metrics import METRICS, Kind, Meter
from meshpoint.adapters.telemetry.otel_meter import OpenTelemetryMeter, instrument_name
from meshpoint.adapters.telemetry.prometheus_meter import PrometheusMeter


def record_all(meter: Meter) -> None:
    """Record the value 1 in every metric, with the name of each label as its value."""
    for metric in METRICS:
        meter.recorder(metric)(1, metric.labels)


def test_prometheus_shows_every_metric_under_its_name() -> None:
    meter = PrometheusMeter()
    record_all(meter)
    shown = meter.render().decode()
    for metric in METRICS:
        labels = ",".join(f'{name}="{name}"' for name in sorted(metric.labels))
        name = f"{metric.name}_sum" if metric.kind is Kind.HISTOGRAM else metric.name
        assert f"{name}{{{labels}}} 1.0" in shown.splitlines()


def test_names_follow_the_conventions_of_prometheus() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"meshpoint_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") is (metric.kind is Kind.COUNTER)
        assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM)
        assert list(metric.buckets) == sorted(metric.buckets)
        assert set(metric.labels) <= {"agent", "peer", "outcome", "replica"}


def test_opentelemetry_gets_every_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(otel_metrics, "get_meter", provider.get_meter)
    record_all(OpenTelemetryMeter())
    data: Any = reader.get_metrics_data()
    (scope,) = data.resource_metrics[0].scope_metrics
    recorded = {each.name: each for each in scope.metrics}
    assert recorded.keys() == {instrument_name(metric)[0] for metric in METRICS}
    for metric in METRICS:
        name, unit = instrument_name(metric)
        (point,) = recorded[name].data.data_points
        assert recorded[name].unit == unit
        assert dict(point.attributes) == {label: label for label in metric.labels}
        if metric.kind is Kind.HISTOGRAM:
            assert point.explicit_bounds == metric.buckets
    provider.shutdown()


@pytest.mark.parametrize(
    ("name", "instrument"),
    [
        ("meshpoint_tasks_ended_total", ("meshpoint.tasks_ended", "")),
        ("meshpoint_segment_duration_seconds", ("meshpoint.segment_duration", "s")),
        ("meshpoint_checkpoint_bytes", ("meshpoint.checkpoint", "By")),
        ("meshpoint_slots_free", ("meshpoint.slots_free", "")),
    ],
)
def test_an_instrument_has_neither_unit_nor_suffix(name: str, instrument: tuple[str, str]) -> None:
    (metric,) = (each for each in METRICS if each.name == name)
    assert instrument_name(metric) == instrument
