"""Traces and metrics through OpenTelemetry's API, and an HTTP endpoint for Prometheus and probes.

Everything is derived from the events of `meshpoint.model.events`. `docs/reference/telemetry.md`
lists the spans and metrics.
"""
