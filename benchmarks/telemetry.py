"""What telemetry costs: the whole mesh with and without it, and each event alone.

    make bench ARGS=telemetry
    python -m benchmarks.telemetry   # events alone

With it, replicas send spans to a local collector, which also scrapes their Prometheus endpoints
each second. Without servers, the events of real tasks are replayed to each observer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from benchmarks.environment import BenchmarkServers
from benchmarks.measure import Medians
from benchmarks.report import Cell, Report, Table
from benchmarks.rivals.rounds import compare
from benchmarks.rivals.specs import command_here
from meshpoint import Peer, TaskExecutionContext, agent
from meshpoint.adapters.telemetry import tracing
from meshpoint.adapters.telemetry.metrics import MetricsObserver
from meshpoint.adapters.telemetry.prometheus_meter import PrometheusMeter
from meshpoint.adapters.telemetry.tracing import TracingObserver
from meshpoint.local import local_mesh
from meshpoint.model.events import Event, Phase, Step
from meshpoint.ports.observer import Observer, Observers

OFF = "off"
SHARES = {
    "metrics": "metrics",
    "metrics, spans of 1 % of the traces": "0.01",
    "metrics, all spans": "1",
}
_TARGET = 0.95
_FAN_OUTS = (1, 10)
_IN_FLIGHT = 64
_TASKS, _ROUNDS = 100, 50
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
    """Keeps events, and the trace context of each segment as it was before its span."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._traces: list[tuple[Any, Mapping[str, Any]]] = []

    def emit(self, event: Event) -> None:
        if event.step is Step.SEGMENT and event.phase is Phase.BEFORE:
            context: Any = event.all_details()["trace"]
            self._traces.append((context, dict(context)))
        self.events.append(event)

    def reset(self) -> None:
        """Undo what an observer has written into the events, and what it knows of them."""
        for context, before in self._traces:
            context.clear()
            context.update(before)
        tracing._parse.cache_clear()


class _NoObserver:
    def emit(self, event: Event) -> None:
        pass


async def run(stage: BenchmarkServers, *, quick: bool) -> Report:
    """Measure the mesh with each share of exported traces, round after round."""
    rounds, seconds = (5, 1.5) if quick else (9, 3.0)
    broker = (await stage.rabbit()).url
    options: Mapping[str, Sequence[str]] = {
        OFF: (),
        **{name: ("--sample", share) for name, share in SHARES.items()},
    }
    commands = {
        name: command_here("mesh", broker, await stage.database(), *arguments)
        for name, arguments in options.items()
    }
    measured = await compare(commands, _FAN_OUTS, _IN_FLIGHT, rounds, seconds)
    return Report(
        name="telemetry",
        about=await stage.describe(),
        tables=[_table(measured)],
        figures={
            name: {each: [sample.rate for sample in found] for each, found in m.samples.items()}
            for name, m in measured.items()
        },
    )


def _table(measured: Mapping[str, Medians]) -> Table:
    rows: list[list[Cell]] = []
    for name, medians in measured.items():
        rows.append([name, OFF, medians.rate(OFF).median, 1.0, "", ""])
        for share in SHARES:
            ratio = medians.ratio(share, OFF)
            rows.append(
                [
                    name,
                    share,
                    medians.rate(share).median,
                    ratio.median,
                    f"{ratio.low:.3g}..{ratio.high:.3g}",
                    "met" if ratio.median >= _TARGET else "missed",
                ]
            )
    return Table(
        "Tasks per second with telemetry",
        ["", "exported", "tasks/s", "on ÷ off", "lowest..highest", f"at least {_TARGET}"],
        rows,
        f"In flight: {_IN_FLIGHT} tasks. Rounds next to each other are compared. The collector "
        "runs on the same machine.",
    )


async def record(observer: Observer) -> _Recorder:
    """The events of tasks that run one after the other, with the traces of `observer`."""
    recorder = _Recorder()
    async with local_mesh(caller, echo, observer=Observers((recorder, observer))) as mesh:
        await mesh.call(caller, 0)
        recorder.events.clear()
        for number in range(_TASKS):
            await mesh.call(caller, number)
    return recorder


def measure(observer: Observer, recorder: _Recorder) -> float:
    """Seconds of CPU time for all events: the shortest of several rounds."""
    times = []
    for _ in range(_ROUNDS):
        recorder.reset()
        started_at = time.thread_time()
        for event in recorder.events:
            observer.emit(event)
        times.append(time.thread_time() - started_at)
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
    for name, create in OBSERVERS.items():
        observer = create()
        recorder = asyncio.run(record(observer))
        events = recorder.events
        seconds = measure(observer, recorder) - measure(_NoObserver(), recorder)
        print(
            f"{name}: {seconds / len(events) * 1e6:.1f} µs for each of "
            f"{len(events) / _TASKS:.0f} events, "
            f"{seconds / _TASKS * 1e6:.0f} µs per task"
        )


if __name__ == "__main__":
    main()
