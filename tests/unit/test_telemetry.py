"""Telemetry is added only on request."""

from __future__ import annotations

import asyncio
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from hidden_imports import run_without
from meshpoint import TaskExecutionContext, agent, ports
from meshpoint.adapters.telemetry import providers
from meshpoint.adapters.telemetry.metrics import MetricsObserver
from meshpoint.adapters.telemetry.tracing import TracingObserver
from meshpoint.errors import ConfigurationError
from meshpoint.local import local_mesh
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId
from meshpoint.ports.observer import Observers, SelectiveObserver, Steps
from meshpoint.settings import MeshSettings, Settings, load
from meshpoint.wiring import (
    MetricsAddress,
    current_traceparent,
    export_metrics,
    serve,
    with_telemetry,
)
from recorded_events import RecordedEvents

MEMORY = MeshSettings(broker_url="memory://")
WITHOUT_SDK = """
import asyncio, sys
from meshpoint import agent
from meshpoint.local import local_mesh

@agent("echo")
async def echo(ctx, text: str) -> str:
    return text

async def main():
    async with local_mesh(echo) as mesh:
        assert await mesh.call(echo, "hello") == "hello"

asyncio.run(main())
print([name for name in sys.modules if name.startswith(("opentelemetry", "prometheus_client"))])
"""


def test_nothing_is_imported_without_an_sdk() -> None:
    done = run_without([], WITHOUT_SDK)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_nothing_is_observed_while_the_api_has_no_sdk() -> None:
    """Some libraries import the API, which records nothing by itself."""
    code = (
        "import opentelemetry.trace, opentelemetry.metrics\n"
        "from meshpoint.adapters.telemetry import providers\n"
        "print(providers.has_tracing(), providers.has_metrics())\n"
    )
    assert run_without([], code).stdout == "False False\n"


def test_an_sdk_is_found() -> None:
    code = (
        "from opentelemetry import metrics, trace\n"
        "from opentelemetry.sdk.metrics import MeterProvider\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "from meshpoint.adapters.telemetry import providers\n"
        "trace.set_tracer_provider(TracerProvider())\n"
        "print(providers.has_tracing(), providers.has_metrics())\n"
        "metrics.set_meter_provider(MeterProvider())\n"
        "print(providers.has_tracing(), providers.has_metrics())\n"
    )
    assert run_without([], code).stdout == "True False\nTrue True\n"


def test_an_observer_stays_alone_without_telemetry() -> None:
    observer = RecordedEvents()
    assert with_telemetry(observer, MEMORY) is observer
    assert current_traceparent() is None


def test_an_sdk_adds_observers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "has_tracing", lambda: True)
    monkeypatch.setattr(providers, "has_metrics", lambda: True)
    observer = RecordedEvents()
    added = with_telemetry(observer, MEMORY)
    assert isinstance(added, Observers)
    assert [type(each) for each in added.observers] == [
        MetricsObserver,
        TracingObserver,
        RecordedEvents,
    ]


def test_a_faulty_observer_does_not_hide_events_from_others() -> None:
    class Faulty:
        def emit(self, event: Event) -> None:
            raise ValueError("no")

    recorded = RecordedEvents()
    event = Event(Step.STARTED, Phase.INFO, AgentName("a"), ReplicaId("r"))
    Observers((Faulty(), recorded)).emit(event)
    assert recorded.all == [event]


class _Starts(SelectiveObserver):
    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.handlers = {(Step.STARTED, Phase.INFO): self.seen.append}


def test_an_observer_gets_the_events_that_it_handles() -> None:
    starts, recorded = _Starts(), RecordedEvents()
    steps = Steps(Observers((starts, Observers((recorded,)))), AgentName("a"), ReplicaId("r"))
    steps.emit(Step.STARTED)
    steps.emit(Step.DRAINED)
    assert [event.step for event in starts.seen] == [Step.STARTED]
    assert [event.step for event in recorded.all] == [Step.STARTED, Step.DRAINED]
    starts.emit(recorded.all[1])
    assert len(starts.seen) == 1


def test_an_event_that_nobody_handles_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    monkeypatch.setattr(ports.observer, "Event", lambda *values: built.append(values[0]))
    steps = Steps(_Starts(), AgentName("a"), ReplicaId("r"))
    steps.emit(Step.DRAINED)
    steps.emit(Step.STARTED)
    assert built == [Step.STARTED]


async def test_a_caller_sends_its_span_with_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    seen: list[object] = []

    class Requests:
        def emit(self, event: Event) -> None:
            if event.step is Step.RECEIVE and event.phase is Phase.BEFORE:
                messages = event.all_details()["messages"]
                assert isinstance(messages, list)
                seen.extend(each["trace"] for each in messages if isinstance(each, dict))

    async with local_mesh(echo, observer=Requests()) as mesh:
        with provider.get_tracer("test").start_as_current_span("a service"):
            sent = current_traceparent()
            assert await mesh.call(echo, "hello") == "hello"
        assert await mesh.call(echo, "hello") == "hello"
    assert sent is not None
    assert seen == [sent, None]


@agent("echo")
async def echo(ctx: TaskExecutionContext, text: str) -> str:
    return text


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    (tmp_path / "echoing.py").write_text(
        "from meshpoint import agent\n"
        '@agent("echo")\n'
        "async def echo(ctx, text: str) -> str:\n"
        "    return text\n",
        encoding="utf-8",
    )
    (tmp_path / "mesh.yaml").write_text(
        "mesh: {namespace: metrics, broker_url: 'memory://'}\n"
        "agent: {name: echo, entrypoint: 'echoing:echo', max_concurrency: 7}\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    return load([tmp_path / "mesh.yaml"], env={})


async def get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer.decode()


async def test_a_replica_serves_its_metrics(settings: Settings, unused_port: int) -> None:
    stop, events = asyncio.Event(), RecordedEvents()
    address = MetricsAddress("127.0.0.1", unused_port)
    serving = asyncio.create_task(serve(settings, observer=events, stop=stop, metrics=address))
    await events.wait(Step.STARTED)
    assert 'meshpoint_slots_free{agent="echo"} 7.0' in await get(unused_port, "/metrics")
    assert (await get(unused_port, "/readyz")).startswith("HTTP/1.1 200 ")
    stop.set()
    await serving
    with pytest.raises(OSError, match=r"Connect call failed|refused"):
        await get(unused_port, "/healthz")


async def test_a_port_in_use_stops_the_start(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = MetricsAddress("127.0.0.1", other.getsockname()[1])
        with pytest.raises(ConfigurationError, match="is in use"):
            await serve(settings, metrics=address)


async def test_the_metrics_of_a_mesh_are_served(
    settings: Settings, tmp_path: Path, unused_port: int
) -> None:
    file = tmp_path / "mesh.db"
    mesh = settings.mesh.model_copy(update={"broker_url": f"sqlite:///{file}"})
    (agent,) = settings.agents
    stored = agent.model_copy(
        update={"session_service": "sql", "session_db_url": f"sqlite:///{file}"}
    )
    stop, address = asyncio.Event(), MetricsAddress("127.0.0.1", unused_port)
    exporting = asyncio.create_task(
        export_metrics(
            Settings(mesh=mesh, agents=(stored,)),
            address,
            interval=timedelta(seconds=15),
            stop=stop,
        )
    )
    while True:
        try:
            if (await get(unused_port, "/readyz")).startswith("HTTP/1.1 200 "):
                break
        except OSError:
            await asyncio.sleep(0)
    shown = await get(unused_port, "/metrics")
    server = f'server="sqlite:///{file}"'
    assert f'meshpoint_server_up{{role="database",{server}}} 0.0' in shown  # no file yet
    assert f'meshpoint_server_up{{role="broker",{server}}} 1.0' in shown
    stop.set()
    await exporting
    with pytest.raises(OSError, match=r"Connect call failed|refused"):
        await get(unused_port, "/healthz")


async def test_a_port_in_use_stops_the_metrics_of_a_mesh(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = MetricsAddress("127.0.0.1", other.getsockname()[1])
        with pytest.raises(ConfigurationError, match=r"^--port: .* is in use"):
            await export_metrics(
                settings, address, interval=timedelta(seconds=15), stop=asyncio.Event()
            )
