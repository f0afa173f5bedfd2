"""Whether the process has set up an OpenTelemetry SDK. Imports nothing to find out."""

from __future__ import annotations

import sys

_TRACE, _METRICS = "opentelemetry.trace", "opentelemetry.metrics"


def has_tracing() -> bool:
    """Whether spans are recorded anywhere."""
    api = sys.modules.get(_TRACE)
    return api is not None and _is_provided(api.get_tracer_provider(), _TRACE)


def has_metrics() -> bool:
    """Whether measurements are recorded anywhere."""
    api = sys.modules.get(_METRICS)
    return api is not None and _is_provided(api.get_meter_provider(), _METRICS)


def _is_provided(provider: object, api: str) -> bool:
    """Whether `provider` comes from an SDK. The API's own providers record nothing."""
    return not type(provider).__module__.startswith(api)
