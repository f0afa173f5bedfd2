"""Time that telemetry takes for each event, and for a task that pauses once for one call.

    python -m benchmarks.telemetry

The events of real tasks are recorded, and then replayed to each observer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from meshpoint import Peer, TaskExecutionContext, agent
from meshpoint.adapters.telemetry.metrics import MetricsObserver
from meshpoint.adapters.telemetry.prometheus_meter import PrometheusMeter
from meshpoint.adapters.telemetry.tracing import TracingObserver
from meshpoint.local import local_mesh
from meshpoint.model.events import Event
from meshpoint.ports.observer import Observer

_TASKS, _ROUNDS, _REPETITIONS = 100, 5, 10
_ask_echo = Peer("echo", int, int)


@agent("echo")
async def echo(ctx: TaskExecutionContext, number: int) -> int:
    """Return the number."""
    return number


@agent("caller")
async def caller(ctx: TaskExecutionContext, number: int) -> int:
    """Pause for one call."""
    return await _ask_echo(number)


class _Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


class _NoObserver:
    def emit(self, event: Event) -> None:
        pass


async def record() -> Sequence[Event]:
    """The events of tasks that run one after the other."""
    recorder = _Recorder()
    async with local_mesh(caller, echo, observer=recorder) as mesh:
        await mesh.call(caller, 0)
        recorder.events.clear()
        for number in range(_TASKS):
            await mesh.call(caller, number)
    return recorder.events


def measure(observer: Observer, events: Sequence[Event]) -> float:
    """Seconds for all events: the shortest of several rounds."""
    times = []
    for _ in range(_ROUNDS):
        started_at = time.perf_counter()
        for _ in range(_REPETITIONS):
            for event in events:
                observer.emit(event)
        times.append((time.perf_counter() - started_at) / _REPETITIONS)
    return min(times)


def _tracing(sampler: Sampler) -> Callable[[], Observer]:
    def create() -> Observer:
        provider = TracerProvider(sampler=sampler)
        provider.add_span_processor(SpanProcessor())  # spans end, and go nowhere
        trace.get_tracer = provider.get_tracer  # type: ignore[assignment]  # the global provider can be set only once
        return TracingObserver("memory")

    return create


OBSERVERS: dict[str, Callable[[], Observer]] = {
    "Prometheus": lambda: MetricsObserver([PrometheusMeter()]),
    "traces, nothing sampled": _tracing(ALWAYS_OFF),
    "traces, everything sampled": _tracing(ALWAYS_ON),
}


def main() -> None:
    """Print one line for each observer."""
    events = asyncio.run(record())
    floor = measure(_NoObserver(), events)
    print(f"{len(events) / _TASKS:.0f} events for each task")
    for name, create in OBSERVERS.items():
        seconds = measure(create(), events) - floor
        print(
            f"{name}: {seconds / len(events) * 1e6:.1f} µs per event, "
            f"{seconds / _TASKS * 1e6:.0f} µs per task"
        )


if __name__ == "__main__":
    main()
