"""A trace passes through the messages of every broker."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from meshpoint import Peer, TaskExecutionContext, agent
from meshpoint.adapters.telemetry import providers
from meshpoint.local import local_mesh
from meshpoint.model.ids import new_id

ask_flights = Peer("flights", str, str)


@agent("flights")
async def flights(ctx: TaskExecutionContext, city: str) -> str:
    return f"a flight to {city}"


@agent("travel")
async def travel(ctx: TaskExecutionContext, city: str) -> str:
    return await ask_flights(city)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)  # the global one is set once
    monkeypatch.setattr(providers, "has_tracing", lambda: True)
    return exporter


@pytest.fixture(
    params=[
        "memory",
        "sqlite",
        pytest.param("amqp", marks=pytest.mark.servers),
        pytest.param("postgres", marks=pytest.mark.servers),
    ]
)
def broker_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "memory":
            return "memory://"
        case "sqlite":
            return f"sqlite:///{tmp_path}/queues.db"
        case _:
            url: str = request.getfixturevalue(f"{request.param}_url")
            return url


async def test_a_call_and_its_answer_are_one_trace(
    broker_url: str, exporter: InMemorySpanExporter
) -> None:
    namespace = f"traces-{new_id()}"
    async with local_mesh(travel, flights, broker_url=broker_url, namespace=namespace) as mesh:
        assert await mesh.call(travel, "Rome") == "a flight to Rome"
    spans = exporter.get_finished_spans()
    segments = [span for span in spans if span.name.startswith("invoke_agent")]
    asking, answering, resumed = segments
    assert [span.name.split()[1] for span in segments] == ["travel", "flights", "travel"]
    assert len({span.context.trace_id for span in segments if span.context}) == 1
    linked = [link.context.span_id for link in resumed.links]
    assert linked == [span.context.span_id for span in (asking, answering) if span.context]
