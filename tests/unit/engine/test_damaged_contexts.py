"""Agent code that damages its context: only its own task is affected, and that can be stopped."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate, Scripted
from .mesh import Mesh, Running
from .puppet import Puppet


class Stubborn(asyncio.Future[None]):
    """A future that raises from `cancel` after it was cancelled."""

    def cancel(self, msg: Any = None) -> bool:
        super().cancel()
        raise RuntimeError("not now")


class Waiter(asyncio.Future[None]):
    """A waiter of `ctx.cancelled` whose event loop is already closed."""

    def __init__(self) -> None:
        loop = asyncio.new_event_loop()
        super().__init__(loop=loop)
        self.add_done_callback(lambda _: None)
        loop.close()


async def two_tasks(mesh: Mesh, boss: Puppet) -> tuple[Running, str, str, Gate]:
    """Start a task whose code raises when stopped, then a normal one, in the same replica."""
    gate, odd = Gate(), Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        if request == "odd":
            ctx.cancelled._waiters.append(Waiter())  # type: ignore[attr-defined]
            odd.visits += 1
            odd.reached.set()
            await Stubborn()
        await gate()

    options = {"drain_timeout": timedelta(0), "max_concurrency": 2}
    replica = await mesh.replica(Scripted("agent", start), **options)
    bad = await boss.ask("agent", "odd")
    await odd.reach()
    good = await boss.ask("agent", "good")
    await gate.reach()
    return replica, bad, good, gate


async def test_a_drain_stops_all_code(mesh: Mesh, boss: Puppet) -> None:
    replica, _, _, gate = await two_tasks(mesh, boss)
    await replica.drain()
    assert gate.cancelled == 1
    assert replica.worker.segments.live == {}
    assert (mesh.unacked("agent"), mesh.waiting("agent")) == (0, 2)


async def test_a_cancel_ends_the_task(mesh: Mesh, boss: Puppet) -> None:
    _, bad, _, gate = await two_tasks(mesh, boss)
    await boss.cancel("agent", bad)
    reply = await boss.reply(bad)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    await mesh.settle()
    assert mesh.dead_letters("agent") == []
    assert gate.cancelled == 0


async def test_a_lost_lease_stops_the_code(mesh: Mesh, boss: Puppet) -> None:
    replica, bad, _, _ = await two_tasks(mesh, boss)
    segments = replica.worker.segments
    (segment,) = [each for each in segments.live.values() if each.run.task_id == bad]
    segments.lose(segment.run)
    await segment.left.wait()
    assert boss.replies() == []


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
async def test_what_the_runtime_uses_of_a_context_cannot_be_replaced(
    mesh: Mesh, boss: Puppet, name: str, value: Any
) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        setattr(ctx, name, value)
        return Done("replaced")

    await mesh.replica(Scripted("agent", start))
    reply = await boss.reply(await boss.ask("agent", 1))
    assert isinstance(reply, Failed)
    assert name in reply.message


@pytest.mark.parametrize("name", ["run_subtasks_with", "remember_with"])
async def test_a_context_whose_methods_are_replaced_does_not_stop_the_replica(
    mesh: Mesh, boss: Puppet, name: str
) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        if request == "replace":
            setattr(ctx, name, None)
        return Done("done")

    replica = await mesh.replica(Scripted("agent", start), max_concurrency=1)
    assert await boss.reply(await boss.ask("agent", "replace")) == Ok("done")
    assert await boss.reply(await boss.ask("agent", "go on")) == Ok("done")
    await replica.drain()


async def test_usage_holds_counts(mesh: Mesh, boss: Puppet) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        ctx.token_usage.total = None  # type: ignore[assignment]
        return Done("replaced")

    await mesh.replica(Scripted("agent", start))
    reply = await boss.reply(await boss.ask("agent", 1))
    assert isinstance(reply, Failed)
    assert "ValidationError" in reply.message


async def test_a_subject_can_be_stored(mesh: Mesh, boss: Puppet) -> None:
    subjects: list[str | None] = []

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        ctx.subject = "a\0\ud800"
        subjects.append(ctx.subject)
        return Done("done")

    await mesh.replica(Scripted("agent", start))
    assert await boss.reply(await boss.ask("agent", 1)) == Ok("done")
    assert subjects == ["a\N{REPLACEMENT CHARACTER}\\ud800"]


async def test_an_input_that_the_code_changes_is_still_the_same_request(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        return Paused([Call("call", "peer", request.pop("cities").pop())], b"")

    async def resume(*_: Any) -> Any:
        return Done("done")

    await mesh.replica(Scripted("agent", start, resume))
    request = boss.request({"cities": ["Oslo"]})
    await boss.send("agent", request)
    call = await peer.request_number()
    await mesh.settle()
    await boss.send("agent", request)
    await mesh.settle()
    assert boss.replies() == []
    await peer.respond(call, 1)
    assert await boss.reply(request.correlation_id) == Ok("done")
