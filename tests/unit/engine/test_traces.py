"""The spans of tasks: one trace through agents, pauses, a kill and a rescue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import JsonValue

from fake_peer import FakePeer
from meshpoint.adapters.telemetry import tracing
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.calls import Done
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.outcomes import Ok

from .agents import Gate, ScriptedAgent, asker, doubler, gated
from .mesh import Mesh, SqlMesh

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(params=["in the process", "in a database"])
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    """A mesh that stores traces with tasks, as objects or as bytes."""
    is_stored = request.param == "in a database"
    mesh = SqlMesh(request.getfixturevalue("sqlite_url")) if is_stored else Mesh()
    yield mesh
    await mesh.close()


class Spans:
    """The spans that have ended so far."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def named(self, name: str) -> list[ReadableSpan]:
        """All ended spans of this name, in the order in which they ended."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def segments(self) -> list[ReadableSpan]:
        spans = self._exporter.get_finished_spans()
        return [span for span in spans if span.name.startswith("invoke_agent ")]


class RefusingSampler(Sampler):
    """Samples nothing, and keeps the names of the spans for which it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def should_sample(
        self, parent_context: object, trace_id: int, name: str, *arguments: object, **more: object
    ) -> SamplingResult:
        self.asked.append(name)
        return SamplingResult(Decision.DROP)

    def get_description(self) -> str:
        return "refuses"


@pytest.fixture
def refusing(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> RefusingSampler:
    sampler = RefusingSampler()
    monkeypatch.setattr(trace, "get_tracer", TracerProvider(sampler=sampler).get_tracer)
    mesh.events.hooks.append(tracing.TracingObserver("memory").emit)
    return sampler


@pytest.fixture
def spans(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)  # the global one is set once
    mesh.events.hooks.append(tracing.TracingObserver("memory").emit)
    yield Spans(exporter)
    provider.shutdown()


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def trace_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id


def links_of(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def event_names(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


hotels_peer = Peer("hotels", str, str)
flights_peer = Peer("flights", str, str)


@agent("hotels")
async def hotels(ctx: TaskExecutionContext, city: str) -> str:
    return f"a hotel in {city}"


@agent("flights")
async def flights(ctx: TaskExecutionContext, city: str) -> str:
    return f"a flight to {city}"


def travel_with(gate: Gate) -> Any:
    @agent("travel")
    async def travel(ctx: TaskExecutionContext, city: str) -> list[str]:
        flight = await flights_peer(city)
        hotel = await hotels_peer(city)
        await gate()
        return [flight, hotel]

    return travel


async def test_a_trip_with_a_kill_and_a_rescue_is_one_trace(
    mesh: Mesh, client: FakePeer, spans: Spans
) -> None:
    gate = Gate()
    await mesh.replica(flights, hotels)
    first = await mesh.replica(travel_with(gate))
    task_id = await client.ask("travel", "Rome", traceparent=CALLER)
    await gate.wait_reached()
    await first.crash()
    gate.opened.set()
    await mesh.replica(travel_with(gate))
    await mesh.advance(25)
    assert await client.reply(task_id) == Ok(["a flight to Rome", "a hotel in Rome"])
    await mesh.idle()

    begun, resumed, killed, rescued = spans.named("invoke_agent travel")
    flight, hotel = spans.one("invoke_agent flights"), spans.one("invoke_agent hotels")
    assert {trace_of(span) for span in spans.segments()} == {trace_of(begun)}
    assert trace_of(begun) != int(CALLER.split("-")[1], 16)
    assert links_of(begun) == [int(CALLER.split("-")[2], 16)]
    assert parent_of(begun) is None
    assert [parent_of(span) for span in (resumed, killed, rescued)] == [id_of(begun)] * 3
    assert parent_of(flight) == id_of(begun)
    assert parent_of(hotel) == id_of(resumed)
    assert links_of(resumed) == [id_of(begun), id_of(flight)]
    assert links_of(killed) == links_of(rescued) == [id_of(resumed), id_of(hotel)]
    assert killed.status.status_code is StatusCode.ERROR
    assert rescued.status.status_code is StatusCode.UNSET
    paused = ["gen_ai.agent.paused", "gen_ai.agent.checkpointed"]
    assert event_names(begun) == paused
    assert event_names(resumed) == ["gen_ai.agent.resumed", *paused]
    assert event_names(rescued) == ["gen_ai.agent.resumed"]


async def test_a_segment_has_the_documented_attributes(
    mesh: Mesh, client: FakePeer, spans: Spans
) -> None:
    await mesh.replica(doubler)
    task_id = await client.ask("doubler", 1)
    await client.reply(task_id)
    await mesh.idle()
    segment = spans.one("invoke_agent doubler")
    (event,) = mesh.events.matching(Step.SEGMENT, Phase.BEFORE)
    assert segment.kind is SpanKind.INTERNAL
    assert dict(segment.attributes or {}) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "doubler",
        "gen_ai.agent.version": event.all_details()["version"],
        "meshpoint.task.id": task_id,
        "meshpoint.generation": 0,
        "meshpoint.attempt": 1,
    }


async def test_messages_have_spans(mesh: Mesh, client: FakePeer, spans: Spans) -> None:
    await mesh.replica(doubler, asker("asker", "doubler"))
    await client.reply(await client.ask("asker", 1))
    await mesh.idle()
    asking, resumed = spans.named("invoke_agent asker")
    doubling = spans.one("invoke_agent doubler")
    sent, received = spans.one("send doubler.nested"), spans.one("process doubler.nested")
    answered = spans.one("process asker.resp")
    assert [span.kind for span in (sent, received, answered)] == [
        SpanKind.PRODUCER,
        SpanKind.CONSUMER,
        SpanKind.CONSUMER,
    ]
    assert parent_of(sent) == parent_of(received) == id_of(asking)
    assert parent_of(answered) == id_of(doubling)
    call_id = doubling.attributes["meshpoint.task.id"] if doubling.attributes else None
    assert dict(sent.attributes or {}) == {
        "messaging.system": "memory",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "doubler.nested",
        "messaging.message.id": call_id,
        "messaging.message.conversation_id": call_id,
    }
    assert links_of(resumed) == [id_of(asking), id_of(doubling)]


async def test_a_batch_of_other_traces_links_to_each(
    mesh: Mesh, client: FakePeer, spans: Spans
) -> None:
    others = [CALLER.replace("b7ad", f"b7a{digit}") for digit in "123"]
    requests = [client.request(1, traceparent=other) for other in others]
    await mesh.replica(doubler)
    for request in requests:
        await client.send("doubler", request)
    for request in requests:
        await client.reply(request.correlation_id)
    await mesh.idle()
    received = spans.named("process doubler.req")
    linked = [link for span in received for link in links_of(span)]
    parents = [parent for span in received if (parent := parent_of(span)) is not None]
    assert sorted(linked + parents) == sorted(int(each.split("-")[2], 16) for each in others)


def receive(*traceparents: str | None) -> tuple[Event, Event]:
    """The events of a batch of requests."""
    messages: list[JsonValue] = [
        {"queue": "doubler.req", "id": "m", "correlation": "m", "trace": each}
        for each in traceparents
    ]
    before, after = (
        Event(
            Step.RECEIVE, phase, AgentName("doubler"), ReplicaId("r"), (), {"messages": messages}
        )
        for phase in (Phase.BEFORE, Phase.AFTER)
    )
    return before, after


def test_messages_of_unsampled_traces_have_no_part_in_a_span(spans: Spans, mesh: Mesh) -> None:
    (hook,) = mesh.events.hooks
    unsampled = CALLER.removesuffix("01") + "00"
    for event in receive(unsampled):
        hook(event)
    assert spans.named("process doubler.req") == []
    for event in receive(unsampled, CALLER):
        hook(event)
    received = spans.one("process doubler.req")
    assert parent_of(received) == int(CALLER.split("-")[2], 16)
    assert (received.attributes or {})["messaging.batch.message_count"] == 2


async def test_a_sampler_is_asked_once_for_the_segments_of_a_trace(
    mesh: Mesh, client: FakePeer, refusing: RefusingSampler
) -> None:
    def measure(number: int) -> int:
        return number

    @agent("surveyor")
    async def surveyor(ctx: TaskExecutionContext, number: int) -> int:
        await ctx.subtask("measure", measure, number)
        return await Peer("doubler", int, int)(number)

    await mesh.replica(doubler, surveyor)
    assert await client.reply(await client.ask("surveyor", 1)) == Ok(2)
    await mesh.idle()
    assert refusing.asked == ["process surveyor.req", "invoke_agent surveyor"]
    begun, *later = mesh.events.matching(Step.SEGMENT, Phase.BEFORE)
    traces: list[Any] = [event.all_details()["trace"] for event in (begun, *later)]
    assert {each["traceparent"] for each in traces} == {traces[0]["traceparent"]}
    assert not int(traces[0]["traceparent"][-2:], 16) & 1


async def test_code_of_an_unsampled_segment_sees_its_trace(
    mesh: Mesh, client: FakePeer, spans: Spans
) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        current = trace.get_current_span()
        return Done([current.is_recording(), current.get_span_context().trace_id])

    await mesh.replica(ScriptedAgent("curious", start))
    unsampled = CALLER.removesuffix("01") + "00"
    seen = await client.reply(await client.ask("curious", 1, traceparent=unsampled, call_depth=1))
    await mesh.idle()
    assert seen == Ok([False, int(CALLER.split("-")[1], 16)])
    assert spans.segments() == []


async def test_a_subtask_is_a_tool(mesh: Mesh, client: FakePeer, spans: Spans) -> None:
    def measure(number: int) -> int:
        return number

    @agent("surveyor")
    async def surveyor(ctx: TaskExecutionContext, number: int) -> int:
        return await ctx.subtask("measure", measure, number)

    await mesh.replica(surveyor)
    await client.reply(await client.ask("surveyor", 1))
    await mesh.idle()
    segment, tool = spans.one("invoke_agent surveyor"), spans.one("execute_tool measure")
    assert parent_of(tool) == id_of(segment)
    assert dict(tool.attributes or {})["gen_ai.tool.name"] == "measure"


async def test_code_of_the_agent_sees_the_span_of_its_segment(
    mesh: Mesh, client: FakePeer, spans: Spans
) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Done(trace.get_current_span().get_span_context().span_id)

    settling = list[bool]()

    def look(event: Event) -> None:
        if event.step in {Step.TASK_COMPLETED, Step.REPLY}:
            settling.append(trace.get_current_span().get_span_context().is_valid)

    mesh.events.hooks.append(look)
    await mesh.replica(ScriptedAgent("curious", start))
    seen = await client.reply(await client.ask("curious", 1))
    await mesh.idle()
    assert seen == Ok(id_of(spans.one("invoke_agent curious")))
    assert settling == [False, False, False]


async def test_a_refused_pause_ends_its_span(mesh: Mesh, client: FakePeer, spans: Spans) -> None:
    await mesh.replica(asker("asker", "a", "b"), max_fan_out=1)
    await client.reply(await client.ask("asker", 1))
    await mesh.idle()
    segment = spans.one("invoke_agent asker")
    assert segment.status.status_code is StatusCode.ERROR
    assert (segment.attributes or {})["error.type"] == "pause_refused"


async def test_a_failure_is_the_status_of_its_span(
    mesh: Mesh, client: FakePeer, spans: Spans
) -> None:
    async def fail(ctx: TaskExecutionContext, request: Any) -> Any:
        raise ValueError("password=hunter2")

    await mesh.replica(ScriptedAgent("failing", fail))
    await client.reply(await client.ask("failing", 1))
    await mesh.idle()
    segment = spans.one("invoke_agent failing")
    assert (segment.attributes or {})["error.type"] == "error"
    assert segment.status.description is None  # errors of agents may contain secrets
    assert segment.events == ()


async def test_a_task_that_paused_without_telemetry_begins_its_trace_later(
    mesh: Mesh, client: FakePeer, peer: FakePeer, spans: Spans
) -> None:
    (hook,) = mesh.events.hooks
    mesh.events.hooks.remove(hook)
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1, traceparent=CALLER)
    request = await peer.wait_for_request()
    await mesh.idle()
    mesh.events.hooks.append(hook)
    await peer.respond(request, 1)
    await client.reply(task_id)
    await mesh.idle()
    resumed = spans.one("invoke_agent asker")
    assert parent_of(resumed) is None
    assert links_of(resumed) == [int(CALLER.split("-")[2], 16)]


async def test_a_malformed_traceparent_begins_a_trace(
    mesh: Mesh, client: FakePeer, spans: Spans
) -> None:
    await mesh.replica(doubler)
    for value in ("00-abc-def-01", "ff", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
        await client.reply(await client.ask("doubler", 1, traceparent=value, call_depth=1))
    await mesh.idle()
    segments = spans.named("invoke_agent doubler")
    assert [(parent_of(span), links_of(span)) for span in segments] == [(None, [])] * 3


async def test_an_event_of_another_process_may_lack_its_details(spans: Spans, mesh: Mesh) -> None:
    (hook,) = mesh.events.hooks
    await mesh.replica(doubler)
    (started,) = mesh.events.matching(Step.STARTED)
    for phase in (Phase.BEFORE, Phase.AFTER):
        hook(Event(Step.SEGMENT, phase, started.agent, started.replica, (TaskId("t"),), {}))
    assert len(spans.segments()) == 1


async def test_an_idle_replica_has_no_open_span(
    mesh: Mesh, client: FakePeer, spans: Spans
) -> None:
    gate = Gate()
    await mesh.replica(gated("gated", gate))
    task_id = await client.ask("gated", 1)
    await gate.wait_reached()
    assert spans.segments() == []
    gate.opened.set()
    await client.reply(task_id)
    await mesh.idle()
    assert len(spans.segments()) == 1
