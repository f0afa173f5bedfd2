"""Every metric moves when its cause is provoked in a mesh."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeAlias

import pytest

from fake_peer import FakePeer
from meshpoint.adapters.telemetry.metrics import (
    METRICS,
    OTHER_PEER,
    Metric,
    MetricsObserver,
    Recorder,
)
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.messages import Message, MessageType
from meshpoint.model.outcomes import Failed, FailureKind, Outcomes

from .agents import Gate, ScriptedAgent, asker, doubler, gated, gated_after
from .mesh import Mesh

Key: TypeAlias = tuple[str, ...]
"""The name of a metric and the values of its labels."""


class Readings:
    """A meter that keeps every recorded value."""

    def __init__(self) -> None:
        self.values: dict[Key, list[float]] = {}

    def recorder(self, metric: Metric) -> Recorder:
        def record(value: float, labels: tuple[str, ...]) -> None:
            assert len(labels) == len(metric.labels)
            self.values.setdefault((metric.name, *labels), []).append(value)

        return record

    def of(self, name: str) -> dict[tuple[str, ...], list[float]]:
        """The values of one metric, by labels."""
        return {key[1:]: values for key, values in self.values.items() if key[0] == name}


@pytest.fixture
def readings(mesh: Mesh) -> Readings:
    readings = Readings()
    observer = MetricsObserver(
        [readings], monotonic=mesh.clock.monotonic, now=lambda: mesh.clock.now().timestamp()
    )
    mesh.events.hooks.append(observer.emit)
    return readings


async def wait_two_seconds(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    """A task waits two seconds for a peer; its code and its commits take no time."""
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.advance(2)
    await peer.respond(request, 1)
    await client.reply(task_id)
    await mesh.idle()


async def resume_elsewhere(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    first = await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    await first.crash()
    await mesh.replica(asker("asker", "peer"))
    await peer.respond(request, Failed(FailureKind.ERROR, "no"))
    await client.reply(task_id)
    await mesh.idle()


async def rescue(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    gate = Gate()
    first = await mesh.replica(gated_after("asker", "peer", gate))
    await client.ask("asker", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await gate.wait_reached()
    await first.crash()
    await mesh.replica(gated_after("asker", "peer", gate))
    await mesh.advance(25)
    await gate.wait_reached(visits=2)


async def fence(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    gate = Gate()
    await mesh.replica(gated_after("asker", "peer", gate), sweep_interval=timedelta(hours=1))
    await client.ask("asker", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await gate.wait_reached()
    await mesh.replica(gated_after("asker", "peer", gate))  # the first renews no lease
    await mesh.advance(25)
    await gate.wait_reached(visits=2)
    gate.opened.set()
    await mesh.events.wait(Step.FENCED)


async def respond_twice(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    other = await mesh.fake_peer("other")
    await mesh.replica(asker("asker", "peer", "other"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await peer.respond(request, 1)
    await peer.respond(request, 1)
    await mesh.events.wait(Step.DUPLICATE)
    await other.respond(await other.wait_for_request(), 1)
    await client.reply(task_id)
    await peer.respond(request, 1)
    await mesh.events.wait(Step.LATE)


async def send_rubbish(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    await mesh.replica(doubler)
    message = Message(MessageType.REQUEST, b"rubbish", "id", "id", app_id="client")
    await client.send("doubler", message)
    await mesh.events.wait(Step.DEAD_LETTER)


async def hold_a_slot(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    gate = Gate()
    await mesh.replica(gated("gated", gate), max_concurrency=8)
    task_id = await client.ask("gated", 1)
    await gate.wait_reached()
    gate.opened.set()
    await client.reply(task_id)
    await mesh.idle()


async def lose_the_database(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    replica = await mesh.replica(doubler)
    replica.store.unavailable = True
    await mesh.advance(10)
    replica.store.heal()
    await mesh.advance(10)


async def lose_the_broker(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    replica = await mesh.replica(doubler)
    replica.broker.unavailable = True
    await mesh.advance(10)
    replica.broker.unavailable = False
    await mesh.advance(10)


Cause: TypeAlias = Callable[[Mesh, FakePeer, FakePeer], Awaitable[None]]
EFFECTS: list[tuple[Cause, dict[str, dict[tuple[str, ...], list[float]]]]] = [
    (
        wait_two_seconds,
        {
            "meshpoint_tasks_ended_total": {("asker", "completed"): [1]},
            "meshpoint_calls_total": {("asker", "peer", "completed"): [1]},
            "meshpoint_pauses_total": {("asker",): [1]},
            "meshpoint_resumes_total": {("asker", "same"): [1]},
            "meshpoint_segment_duration_seconds": {("asker",): [0, 0]},
            "meshpoint_wait_duration_seconds": {("asker",): [2]},
            "meshpoint_resume_delay_seconds": {("asker",): [0]},
            "meshpoint_checkpoint_duration_seconds": {("asker",): [0]},
            "meshpoint_checkpoint_bytes": {("asker",): [len(b"state")]},
        },
    ),
    (
        resume_elsewhere,
        {
            "meshpoint_resumes_total": {("asker", "other"): [1]},
            "meshpoint_calls_total": {("asker", "peer", "error"): [1]},
        },
    ),
    (rescue, {"meshpoint_rescues_total": {("asker",): [1]}}),
    (fence, {"meshpoint_fenced_writes_total": {("asker",): [1]}}),
    (
        respond_twice,
        {
            "meshpoint_duplicate_responses_total": {("asker",): [1]},
            "meshpoint_late_responses_total": {("asker",): [1]},
        },
    ),
    (send_rubbish, {"meshpoint_dead_letters_total": {("doubler",): [1]}}),
    (hold_a_slot, {"meshpoint_slots_free": {("gated",): [8, 7, 8]}}),
]


@pytest.mark.parametrize(
    ("cause", "effects"), EFFECTS, ids=lambda each: getattr(each, "__name__", "")
)
async def test_a_cause_moves_its_metrics(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    readings: Readings,
    cause: Cause,
    effects: dict[str, dict[tuple[str, ...], list[float]]],
) -> None:
    await cause(mesh, client, peer)
    assert {name: readings.of(name) for name in effects} == effects


@pytest.mark.parametrize(
    ("cause", "name"),
    [(lose_the_database, "meshpoint_store_up"), (lose_the_broker, "meshpoint_broker_up")],
)
async def test_a_gauge_shows_an_outage_and_its_end(
    mesh: Mesh, client: FakePeer, peer: FakePeer, readings: Readings, cause: Cause, name: str
) -> None:
    await cause(mesh, client, peer)
    values = readings.of(name)[("doubler",)]
    changes = [
        value for value, before in zip(values, [None, *values], strict=False) if value != before
    ]
    assert changes == [1, 0, 1]
    assert not any(isinstance(value, bool) for value in values), "OTLP has no booleans"


def test_every_metric_has_a_cause() -> None:
    provoked = {name for _, effects in EFFECTS for name in effects}
    assert provoked | {"meshpoint_store_up", "meshpoint_broker_up"} == {
        metric.name for metric in METRICS
    }


async def test_a_failed_and_a_cancelled_task_are_counted_by_kind(
    mesh: Mesh, client: FakePeer, readings: Readings
) -> None:
    async def fail(ctx: TaskExecutionContext, request: Any) -> Any:
        raise ValueError("no")

    gate = Gate()
    await mesh.replica(ScriptedAgent("failing", fail), gated("gated", gate))
    await client.reply(await client.ask("failing", 1))
    task_id = await client.ask("gated", 1)
    await gate.wait_reached()
    await client.cancel("gated", task_id)
    await client.reply(task_id)
    await mesh.idle()
    assert readings.of("meshpoint_tasks_ended_total") == {
        ("failing", "error"): [1],
        ("gated", "cancelled"): [1],
    }


async def test_a_refused_request_is_no_task(
    mesh: Mesh, client: FakePeer, readings: Readings
) -> None:
    await mesh.replica(doubler)
    await client.reply(await client.ask("doubler", 1, deadline=mesh.deadline_in(-1)))
    await mesh.idle()
    assert readings.of("meshpoint_tasks_ended_total") == {}


async def test_the_labels_of_peers_are_bounded(
    mesh: Mesh, client: FakePeer, readings: Readings
) -> None:
    """Agent code chooses the names of peers, from its input if it likes."""
    names = [f"p{number}" for number in range(120)]

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        calls = [Call(name, name, 1, timeout=timedelta(seconds=5)) for name in names]
        return Paused(calls, b"state")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        return Done(len(outcomes))

    await mesh.replica(ScriptedAgent("asker", start, resume))
    await client.ask("asker", 1)
    await mesh.advance(70)
    await mesh.events.wait(Step.TASK_COMPLETED)
    calls = readings.of("meshpoint_calls_total")
    assert len({peer for _, peer, _ in calls}) == 101
    assert sum(len(values) for key, values in calls.items() if key[1] == OTHER_PEER) == 20


async def test_the_pause_of_a_zombie_is_not_counted(
    mesh: Mesh, client: FakePeer, peer: FakePeer, readings: Readings
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        return Paused([Call("first", "peer", 1)], b"1")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        await gate()
        return Paused([Call("second", "peer", 2)], b"2")

    twice = ScriptedAgent("twice", start, resume)
    await mesh.replica(twice, sweep_interval=timedelta(hours=1))
    await client.ask("twice", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await gate.wait_reached()
    await mesh.replica(twice)
    await mesh.advance(25)
    await gate.wait_reached(visits=2)
    gate.opened.set()
    await mesh.events.wait(Step.FENCED)
    await mesh.events.wait(Step.CHECKPOINT, Phase.AFTER, count=3)
    assert readings.of("meshpoint_pauses_total") == {("twice",): [1, 1]}
