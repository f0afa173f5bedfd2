"""One replica: `python -m benchmarks.rivals.mesh_replica`, with settings as a JSON line on stdin.

With the address of a collector, a share of the traces and a port, it sends spans there and serves
metrics at that port. Instead of a share, `metrics` sends no spans.

It prints `ready` when it serves, and drains when standard input closes. With
`MESHPOINT_PROFILE=FOLDER` it writes a profile.
"""

from __future__ import annotations

import asyncio
import cProfile
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from meshpoint import event_loop, wiring
from meshpoint.model.events import Event, Step
from meshpoint.settings import Settings


class _ReadinessReporter:
    """Prints `ready` and calls `on_ready` once all agents of this process serve."""

    def __init__(self, agents: int, on_ready: Callable[[], object]) -> None:
        self._not_ready, self._on_ready = agents, on_ready

    def emit(self, event: Event) -> None:
        if event.step is Step.STARTED:
            self._not_ready -= 1
            if not self._not_ready:
                self._on_ready()
                print("ready", flush=True)


def _export(collector: str, share: str) -> None:
    """Set up an SDK that sends spans to a collector, as an operator would."""
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(float(share)))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{collector}/v1/traces")))
    trace.set_tracer_provider(provider)


async def _serve(
    settings: Settings, on_ready: Callable[[], object], metrics: wiring.MetricsAddress | None
) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def wait_until_closed() -> None:
        loop.remove_reader(0)
        stop.set()

    loop.add_reader(
        0, wait_until_closed
    )  # nothing follows the settings, so stdin is readable only when closed
    reporter = _ReadinessReporter(len(settings.agents), on_ready)
    await wiring.serve(settings, observer=reporter, stop=stop, metrics=metrics)


def main() -> None:
    """Serve until standard input closes."""
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        settings = Settings.model_validate_json(stdin.readline())
    metrics = None
    if len(sys.argv) > 1:
        collector, share, port = sys.argv[1:]
        if share != "metrics":
            _export(collector, share)
        metrics = wiring.MetricsAddress("127.0.0.1", int(port))
    folder = os.environ.get("MESHPOINT_PROFILE")
    if not folder:
        event_loop.run(_serve(settings, lambda: None, metrics))
        return
    print(
        f"serving {', '.join(agent.name for agent in settings.agents)}: {os.getpid()}",
        file=sys.stderr,
    )
    profile = cProfile.Profile(time.thread_time)  # excludes other threads and processes
    event_loop.run(_serve(settings, profile.enable, metrics))
    profile.disable()
    profile.dump_stats(Path(folder) / f"{os.getpid()}.prof")


if __name__ == "__main__":
    main()
