"""What a caller sees of a task whose code runs again, waits for peers, or reports too much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from pydantic import JsonValue

from fake_peer import FakePeer
from meshpoint import ArtifactUpdate, StatusUpdate, TaskHandle, TextDelta, Update
from meshpoint import Mesh as CallerMesh
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.client.transport import Transport
from meshpoint.engine.status_sender import WaitingUpdates
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import MAX_STATUS_BYTES
from meshpoint.model.events import Phase, Step
from meshpoint.model.messages import MessageType
from meshpoint.model.outcomes import Ok, Outcomes
from meshpoint.model.status_metadata import StatusMetadata, StatusNumber, UpdateKind

from .agents import Gate, ScriptedAgent, asker
from .faults import FaultyBroker
from .mesh import Mesh, RunningReplica

BACKENDS = pytest.mark.parametrize("durable", [True, False])


@pytest.fixture
async def caller(mesh: Mesh) -> AsyncIterator[CallerMesh]:
    transport = Transport(FaultyBroker(mesh.exchange), "caller")
    async with transport:
        yield CallerMesh(transport)


class Follower:
    """Collects the updates of one task."""

    def __init__(self, task: TaskHandle[Any]) -> None:
        self.updates: list[Update] = []
        self.done = asyncio.create_task(self._follow(task))

    async def _follow(self, task: TaskHandle[Any]) -> None:
        async for update in task.updates():
            self.updates.append(update)

    def statuses(self) -> list[tuple[JsonValue, bool]]:
        return [
            (each.message, each.reset) for each in self.updates if isinstance(each, StatusUpdate)
        ]

    def text(self) -> str:
        return "".join(each.text for each in self.updates if isinstance(each, TextDelta))


async def follow(caller: CallerMesh, agent_name: str, request: JsonValue = 1) -> Follower:
    return Follower(await caller.send(agent_name, request))


def gated_talker(gate: Gate) -> ScriptedAgent:
    """Reports before and after its peer's answer, and waits at `gate` each time."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        await ctx.update_status("start")
        return Paused([Call("peer", "peer", request)], b"state")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Done[str]:
        await ctx.update_status("resume")
        await gate()
        await ctx.update_status("end")
        return Done("done")

    return ScriptedAgent("talker", start, resume)


async def test_a_rescued_run_begins_with_a_reset_and_its_zombie_is_not_shown(
    mesh: Mesh, caller: CallerMesh, peer: FakePeer
) -> None:
    zombie_gate, gate = Gate(), Gate()
    frozen = timedelta(hours=1)
    await mesh.replica(gated_talker(zombie_gate), sweep_interval=frozen)
    follower = await follow(caller, "talker")
    request = await peer.wait_for_request()
    await mesh.idle()
    await peer.respond(request, 1)
    await zombie_gate.wait_reached()
    await mesh.idle()
    assert follower.statuses() == [("start", False), ("resume", False)]
    await mesh.replica(gated_talker(gate))
    await mesh.advance(17)
    await mesh.events.wait(Step.RESCUE, Phase.AFTER)
    await gate.wait_reached()
    zombie_gate.opened.set()
    await mesh.idle()
    assert follower.statuses()[2:] == [("resume", True)], "the zombie's update is dropped"
    gate.opened.set()
    await follower.done
    assert follower.statuses()[3:] == [("end", False)]
    assert [each.generation for each in follower.updates[:-1]] == [0, 1, 1, 1]


@BACKENDS
async def test_a_first_segment_that_runs_again_begins_with_a_reset(
    mesh: Mesh, caller: CallerMesh, durable: bool
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        await ctx.update_status("start")
        await gate()
        return Done("done")

    replica = await mesh.replica(ScriptedAgent("talker", start), durable=durable)
    follower = await follow(caller, "talker")
    await gate.wait_reached()
    await mesh.idle()
    await replica.crash()
    await mesh.replica(ScriptedAgent("talker", start), durable=durable)
    await gate.wait_reached(2)
    gate.opened.set()
    await follower.done
    assert follower.statuses() == [("start", False), ("start", True)]


peer_handle = Peer("peer", int, int)


@agent("function", version="1")
async def reporting_function(ctx: TaskExecutionContext, number: int) -> int:
    await ctx.update_status("before")
    await ctx.add_text("one ")
    await ctx.add_artifact({"artifactId": "a", "n": 1})
    number = await peer_handle(number)
    await ctx.update_status("between")
    await ctx.add_text("two ")
    number = await peer_handle(number)
    await ctx.update_status("after")
    await ctx.add_text("three")
    await ctx.add_artifact({"artifactId": "a", "n": 2})
    await ctx.add_artifact({"artifactId": "b"})
    return number


@BACKENDS
async def test_a_replay_is_silent(
    mesh: Mesh, caller: CallerMesh, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(reporting_function, durable=durable)
    follower = await follow(caller, "function")
    for number in (1, 2):
        await peer.respond(await peer.wait_for_request(number), number)
    await follower.done
    assert follower.statuses() == [("before", False), ("between", False), ("after", False)]
    assert follower.text() == "one two three"
    artifacts = [each.artifact for each in follower.updates if isinstance(each, ArtifactUpdate)]
    assert artifacts == [
        {"artifactId": "a", "n": 1},
        {"artifactId": "a", "n": 2},
        {"artifactId": "b"},
    ]
    end = follower.updates[-1]
    assert end.kind == "ended"
    assert end.outcome == Ok(2, ({"artifactId": "a", "n": 2}, {"artifactId": "b"}))
    assert not any(each.reset for each in follower.updates)


@BACKENDS
async def test_a_flood_is_sent_at_a_bounded_rate_and_ends_with_the_latest(
    mesh: Mesh, caller: CallerMesh, durable: bool
) -> None:
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        for number in range(10_000):
            await ctx.update_status(number)
        await gate()
        return Done("done")

    replica = await mesh.replica(ScriptedAgent("loud", start), durable=durable)
    follower = await follow(caller, "loud")
    await gate.wait_reached()
    await mesh.idle()
    assert follower.statuses() == [(number, False) for number in range(20)]
    await mesh.advance(1)
    assert follower.statuses()[20:] == [(9_999, False)]
    gate.opened.set()
    await follower.done
    assert count_statuses(replica) == 21
    dropped = mesh.events.matching(Step.STATUS_DROPPED)
    assert [event.detail["dropped"] for event in dropped] == [1, 10, 100, 1000]


async def test_text_is_joined_and_complete_at_the_end(mesh: Mesh, caller: CallerMesh) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        for number in range(10_000):
            await ctx.add_text(f"{number % 10}")
            if number % 100 == 0:
                await asyncio.sleep(0)
        await ctx.update_status("written")
        await ctx.add_text("!")
        return Done("done")

    replica = await mesh.replica(ScriptedAgent("writer", start))
    follower = await follow(caller, "writer")
    await follower.done
    assert follower.text() == "0123456789" * 1_000 + "!"
    assert [each.kind for each in follower.updates[-3:]] == ["status", "text", "ended"]
    assert count_statuses(replica) <= 25


async def test_text_is_flushed_when_the_task_pauses(
    mesh: Mesh, caller: CallerMesh, peer: FakePeer
) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        for _ in range(30):
            await ctx.add_text("x")
            await asyncio.sleep(0)
        return Paused([Call("peer", "peer", 1)], b"state")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Done[str]:
        return Done("done")

    await mesh.replica(ScriptedAgent("writer", start, resume))
    follower = await follow(caller, "writer")
    request = await peer.wait_for_request()
    await mesh.idle()
    assert follower.text() == "x" * 30
    await peer.respond(request, 1)
    await follower.done


async def test_text_does_not_hold_up_later_text(mesh: Mesh, caller: CallerMesh) -> None:
    gates = Gate(), Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        for text, gate in zip(("one ", "two "), gates, strict=True):
            await ctx.add_text(text)
            await gate()
        return Done("done")

    await mesh.replica(ScriptedAgent("talker", start))
    follower = await follow(caller, "talker")
    for gate, text in zip(gates, ("one ", "one two "), strict=True):
        await gate.wait_reached()
        await mesh.idle()
        assert follower.text() == text
        gate.opened.set()
    await follower.done


async def test_tasks_in_memory_have_no_fence(
    mesh: Mesh, caller: CallerMesh, peer: FakePeer
) -> None:
    """Processes do not share the fences of tasks in their memory, so nothing can compare them."""
    gate = Gate()
    gate.opened.set()
    await mesh.replica(gated_talker(gate), durable=False)
    follower = await follow(caller, "talker")
    await peer.respond(await peer.wait_for_request(), 1)
    await follower.done
    fences = [update.id.split(".")[1] for update in follower.updates[:-1]]
    assert fences == ["0", "0", "0"]


def test_what_waits_is_bounded() -> None:
    waiting = WaitingUpdates()
    for number in range(10_000):
        waiting.add(UpdateKind.STATUS, number)
        waiting.add(UpdateKind.TEXT, "x" * 20)
        waiting.add(UpdateKind.ARTIFACT, {"n": number})
    taken = []
    while waiting:
        taken.append(waiting.take())
    assert len(taken) == 8 + 1 + 20
    assert "".join(str(text) for kind, text in taken if kind is UpdateKind.TEXT) == "x" * 64_000
    assert (UpdateKind.STATUS, 9_999) in taken


def test_text_before_a_status_is_sent_before_it() -> None:
    waiting = WaitingUpdates()
    updates: list[tuple[UpdateKind, JsonValue]] = [
        (UpdateKind.TEXT, "a"),
        (UpdateKind.STATUS, 1),
        (UpdateKind.TEXT, "b"),
        (UpdateKind.STATUS, 2),
        (UpdateKind.TEXT, "c"),
        (UpdateKind.TEXT, ""),
    ]
    for kind, content in updates:
        waiting.add(kind, content)
    assert [waiting.take()[1] for _ in range(3)] == ["ab", 2, "c"]
    assert not waiting


async def test_text_of_the_longest_characters_is_sent(mesh: Mesh, caller: CallerMesh) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        await ctx.add_text("\x01" * 20_000)
        return Done("done")

    await mesh.replica(ScriptedAgent("writer", start))
    follower = await follow(caller, "writer")
    await follower.done
    assert follower.text() == "\x01" * 20_000


async def test_an_artifact_too_large_to_send_arrives_with_the_outcome(
    mesh: Mesh, caller: CallerMesh
) -> None:
    artifact = {"artifactId": "a", "data": "x" * MAX_STATUS_BYTES}

    async def start(ctx: TaskExecutionContext, request: Any) -> Done[str]:
        await ctx.add_artifact(artifact)
        return Done("done")

    await mesh.replica(ScriptedAgent("talker", start))
    follower = await follow(caller, "talker")
    await follower.done
    assert [each.kind for each in follower.updates] == ["artifact", "ended"]
    (dropped,) = mesh.events.matching(Step.STATUS_DROPPED)
    assert "ctx.add_artifact" in str(dropped.detail["reason"])


async def test_code_that_outlives_its_segment_sends_nothing(
    mesh: Mesh, caller: CallerMesh, peer: FakePeer
) -> None:
    contexts: list[TaskExecutionContext] = []

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        contexts.append(ctx)
        await ctx.update_status("start")
        return Paused([Call("peer", "peer", 1)], b"state")

    replica = await mesh.replica(ScriptedAgent("talker", start))
    follower = await follow(caller, "talker")
    await peer.wait_for_request()
    await mesh.idle()
    await contexts[0].update_status("late")
    await contexts[0].add_text("late")
    await mesh.idle()
    assert count_statuses(replica) == 1
    follower.done.cancel()


@BACKENDS
async def test_statuses_arrive_from_three_levels_below(
    mesh: Mesh, caller: CallerMesh, peer: FakePeer, durable: bool
) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        await ctx.update_status("own")
        await ctx.add_text("text")
        return Paused([Call("peer", "peer", request)], b"state")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Done[str]:
        return Done("done")

    await mesh.replica(
        asker("one", "two"),
        asker("two", "three"),
        ScriptedAgent("three", start, resume),
        durable=durable,
    )
    follower = await follow(caller, "one")
    request = await peer.wait_for_request()
    await peer.status(request, "without a number")
    await mesh.idle()
    await peer.respond(request, 1)
    await follower.done
    own, text, foreign, _ = follower.updates
    assert [each.path for each in (own, text)] == [("two", "three")] * 2
    assert own.task_id == text.task_id != foreign.task_id == request.correlation_id
    assert foreign.path == ("two", "three", "peer")
    assert isinstance(text, TextDelta)
    assert (own.generation, foreign.generation) == (0, None)


async def test_a_forwarded_status_that_is_repeated_is_shown_once(
    mesh: Mesh, caller: CallerMesh, peer: FakePeer
) -> None:
    await mesh.replica(asker("one", "peer"))
    follower = await follow(caller, "one")
    request = await peer.wait_for_request()
    for position in (1, 2, 1, 2, 3):
        metadata = StatusMetadata(number=StatusNumber(0, 0, "run", position)).to_json()
        await peer.status(request, position, metadata=metadata)
    await mesh.idle()
    await peer.respond(request, 1)
    await follower.done
    assert [message for message, _ in follower.statuses()] == [1, 2, 3]


async def test_a_peer_cannot_report_for_the_task_of_another(
    mesh: Mesh, caller: CallerMesh, peer: FakePeer
) -> None:
    """Neither for another peer's call, nor for its parent, nor for another path."""
    mallory = await mesh.fake_peer("mallory")
    await mesh.replica(asker("one", "peer", "mallory"))
    task = await caller.send("one", 1)
    follower = Follower(task)
    request, own_request = await peer.wait_for_request(), await mallory.wait_for_request()
    number = StatusNumber(9, 9, "z", 9)
    forged = StatusMetadata(UpdateKind.STATUS, number, ("peer",), request.correlation_id)
    await mallory.status(request, "of the other's call", metadata=forged.to_json())
    await mallory.status(own_request, "forged path", metadata=forged.to_json())
    await mallory.send_back(
        request, MessageType.STATUS, address=task._transport.reply_to, body=b"{}"
    )
    await peer.status(
        request, "true", metadata=StatusMetadata(number=StatusNumber(0, 0, "a", 1)).to_json()
    )
    await mesh.idle()
    updates = [each for each in follower.updates if isinstance(each, StatusUpdate)]
    assert [(each.path, each.message) for each in updates] == [
        (("mallory", "peer"), "forged path"),
        (("peer",), "true"),
    ]
    follower.done.cancel()


def count_statuses(replica: RunningReplica) -> int:
    return sum(message.type is MessageType.STATUS for _, message in replica.broker.published)
