"""Agent code that damages its context: only its own task is affected, and that can be stopped."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.errors import AgentMisbehaved
from meshpoint.model.agent_memory import AgentMemory
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate, ScriptedAgent
from .mesh import Mesh, RunningReplica


class UncancellableFuture(asyncio.Future[None]):
    """A future that raises from `cancel` after it was cancelled."""

    def cancel(self, msg: Any = None) -> bool:
        super().cancel()
        raise RuntimeError("not now")


class UncancellableWaiter(asyncio.Future[None]):
    """A waiter of `ctx.cancelled` whose event loop is already closed."""

    def __init__(self) -> None:
        loop = asyncio.new_event_loop()
        super().__init__(loop=loop)
        self.add_done_callback(lambda _: None)
        loop.close()


async def start_damaged_and_healthy(
    mesh: Mesh, client: FakePeer
) -> tuple[RunningReplica, str, str, Gate]:
    """Start a task whose code raises when stopped, then a normal one, in the same replica."""
    gate, damaged_gate = Gate(), Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        if request == "odd":
            ctx.cancelled._waiters.append(UncancellableWaiter())
            damaged_gate.visits += 1
            damaged_gate.reached.set()
            await UncancellableFuture()
        await gate()

    options: dict[str, Any] = {"drain_timeout": timedelta(0), "max_concurrency": 2}
    replica = await mesh.replica(ScriptedAgent("agent", start), **options)
    bad_id = await client.ask("agent", "odd")
    await damaged_gate.wait_reached()
    good_id = await client.ask("agent", "good")
    await gate.wait_reached()
    return replica, bad_id, good_id, gate


async def test_a_drain_stops_all_code(mesh: Mesh, client: FakePeer) -> None:
    replica, _, _, gate = await start_damaged_and_healthy(mesh, client)
    await replica.drain()
    assert gate.cancelled == 1
    assert replica.worker.tasks.segments == {}
    assert (mesh.unacked("agent"), mesh.waiting("agent")) == (0, 2)


async def test_a_cancel_ends_the_task(mesh: Mesh, client: FakePeer) -> None:
    _, bad, _, gate = await start_damaged_and_healthy(mesh, client)
    await client.cancel("agent", bad)
    reply = await client.reply(bad)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    await mesh.idle()
    assert mesh.dead_letters("agent") == []
    assert gate.cancelled == 0


async def test_a_lost_lease_stops_the_code(mesh: Mesh, client: FakePeer) -> None:
    replica, bad, _, _ = await start_damaged_and_healthy(mesh, client)
    tasks = replica.worker.tasks
    (segment,) = [item for item in tasks.segments.values() if item.run.task_id == bad]
    tasks.stop_lost(segment.run)
    await segment.removed.wait()
    assert client.replies() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cancelled", True),
        ("token_usage", None),
        ("token_usage", {"total": 1}),
        ("subject", 5),
        ("task_id", "another"),
        ("a2a_context", None),
        ("memory", None),
        ("progress", None),
    ],
)
async def test_runtime_methods_of_a_context_cannot_be_replaced(
    mesh: Mesh, client: FakePeer, name: str, value: Any
) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        setattr(ctx, name, value)
        return Done("replaced")

    await mesh.replica(ScriptedAgent("agent", start))
    reply = await client.reply(await client.ask("agent", 1))
    assert isinstance(reply, Failed)
    assert name in reply.message


@pytest.mark.parametrize("name", ["_runtime", "subtask", "save_progress", "status"])
async def test_a_context_whose_attributes_are_replaced_does_not_stop_the_replica(
    mesh: Mesh, client: FakePeer, name: str
) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        if request == "replace":
            setattr(ctx, name, None)
        return Done("done")

    replica = await mesh.replica(ScriptedAgent("agent", start), max_concurrency=1)
    assert await client.reply(await client.ask("agent", "replace")) == Ok("done")
    assert await client.reply(await client.ask("agent", "go on")) == Ok("done")
    await replica.drain()


async def test_memory_ends_with_the_segment_even_if_the_runtime_was_replaced(
    mesh: Mesh, client: FakePeer
) -> None:
    kept: list[AgentMemory] = []

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        kept.append(ctx.memory)
        ctx._runtime = ContextRuntime()
        return Done("done")

    await mesh.replica(ScriptedAgent("agent", start))
    assert await client.reply(await client.ask("agent", 1)) == Ok("done")
    await mesh.idle()
    with pytest.raises(AgentMisbehaved, match="only in a running segment"):
        await kept[0].get("key")


async def test_a_method_of_the_runtime_cannot_be_replaced(mesh: Mesh, client: FakePeer) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        ctx._runtime.skip_subtask_calls = None  # type: ignore[method-assign,assignment]

    await mesh.replica(ScriptedAgent("agent", start))
    reply = await client.reply(await client.ask("agent", 1))
    assert isinstance(reply, Failed)
    assert "read-only" in reply.message


async def test_usage_holds_counts(mesh: Mesh, client: FakePeer) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        ctx.token_usage.total = None  # type: ignore[assignment]  # wrong on purpose
        return Done("replaced")

    await mesh.replica(ScriptedAgent("agent", start))
    reply = await client.reply(await client.ask("agent", 1))
    assert isinstance(reply, Failed)
    assert "ValidationError" in reply.message


async def test_a_subject_can_be_stored(mesh: Mesh, client: FakePeer) -> None:
    subjects: list[str | None] = []

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        ctx.subject = "a\0\ud800"
        subjects.append(ctx.subject)
        return Done("done")

    await mesh.replica(ScriptedAgent("agent", start))
    assert await client.reply(await client.ask("agent", 1)) == Ok("done")
    assert subjects == ["a\N{REPLACEMENT CHARACTER}\\ud800"]


async def test_an_input_mutated_by_the_code_does_not_change_the_request(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("call", "peer", request.pop("cities").pop())], b"")

    async def resume(*_: Any) -> Any:
        return Done("done")

    await mesh.replica(ScriptedAgent("agent", start, resume))
    request = client.request({"cities": ["Oslo"]})
    await client.send("agent", request)
    call = await peer.wait_for_request()
    await mesh.idle()
    await client.send("agent", request)
    await mesh.idle()
    assert client.replies() == []
    await peer.respond(call, 1)
    assert await client.reply(request.correlation_id) == Ok("done")
