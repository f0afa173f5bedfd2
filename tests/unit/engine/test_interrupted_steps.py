"""Steps that are cancelled, or whose segment ends, while a write of theirs is in flight."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.errors import StepFailed
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcomes
from meshpoint.subtasks.resuming import resume_operation
from run_log import RunLog

from .agents import Gate, ScriptedAgent
from .mesh import Mesh
from .resuming import int_peer, stored_outcome


async def settle_one_call(mesh: Mesh, client: FakePeer, peer: FakePeer, task_id: TaskId) -> Any:
    """Answer the task's only call with 10, and return its outcome if it has ended."""
    await peer.respond(await peer.wait_for_request(), 10)
    await mesh.idle()
    return client.replies(task_id)


@pytest.mark.parametrize(("write", "runs"), [("begin", []), ("append", ["slow"])])
async def test_a_step_cancelled_during_a_write_is_cancelled_in_every_run(
    mesh: Mesh, client: FakePeer, peer: FakePeer, write: str, runs: list[str]
) -> None:
    ran, writing, seen = RunLog(), Gate(), list[str]()

    @agent("agent")
    async def impatient(ctx: TaskExecutionContext, number: int) -> int:
        step = asyncio.create_task(ctx.step("slow", ran, "slow"))
        await asyncio.sleep(0)
        if not seen:
            await writing.wait_reached()
        step.cancel()
        try:
            await step
            seen.append("result")
        except asyncio.CancelledError:
            seen.append("cancelled")
        writing.opened.set()
        return await int_peer(len(seen) if seen[-1] == "result" else number)

    replica = await mesh.replica(impatient)
    replica.store.before[write] = writing
    task_id = await client.ask("agent", 1)
    assert await settle_one_call(mesh, client, peer, task_id) == [Ok(10)]
    assert (seen, ran.names) == (["cancelled"] * 2, runs)


async def test_a_step_cancelled_before_it_began_leaves_its_name(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    ran = RunLog()

    @agent("agent")
    async def hasty(ctx: TaskExecutionContext, number: int) -> int:
        step = asyncio.create_task(ctx.step("step", ran, "first"))
        step.cancel()
        with suppress(asyncio.CancelledError):
            await step
        await ctx.step("step", ran, "second")
        never_run = asyncio.create_task(ctx.step("other", ran, "other"))
        never_run.cancel()
        with suppress(asyncio.CancelledError):
            await never_run
        return await int_peer(number)

    await mesh.replica(hasty)
    task_id = await client.ask("agent", 1)
    assert await settle_one_call(mesh, client, peer, task_id) == [Ok(10)]
    assert ran.names == ["second"]


async def test_a_step_that_ended_before_a_drain_does_not_run_again(
    mesh: Mesh, client: FakePeer
) -> None:
    ran, writing = RunLog(), Gate()

    @agent("agent")
    async def recording(ctx: TaskExecutionContext, number: int) -> int:
        await ctx.step("step", ran, "step")
        return number

    first = await mesh.replica(recording, drain_timeout=timedelta(0))
    first.store.before["append"] = writing
    task_id = await client.ask("agent", 1)
    await writing.wait_reached()
    draining = asyncio.create_task(first.drain())
    await mesh.idle()
    writing.opened.set()
    await draining
    await mesh.replica(recording)
    await mesh.advance(2)
    assert await client.reply(task_id) == Ok(1)
    assert ran.names == ["step"]


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_step_that_ended_before_its_operation_failed_is_reused(
    mesh: Mesh, client: FakePeer, peer: FakePeer, is_cancelled: bool
) -> None:
    """A sibling fails while the record of the step is being written."""
    ran, writing, has_failed, is_fixed = RunLog(), Gate(), asyncio.Event(), [False]

    @agent("agent", resume_from="last-pause")
    async def charging(ctx: TaskExecutionContext, number: int) -> int:
        await ctx.subtask("operation", int, 1)
        number = await int_peer(number)
        charge = asyncio.create_task(ctx.step("charge", ran, "charge"))
        if is_fixed[0]:
            await charge
            return await int_peer(number)
        await writing.wait_reached()
        if is_cancelled:  # as a TaskGroup does
            charge.cancel()
            with suppress(asyncio.CancelledError):
                await charge
        has_failed.set()
        raise ValueError("a sibling has failed")

    replica = await mesh.replica(charging)
    replica.store.before["append"] = writing
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 10)
    await has_failed.wait()
    await mesh.idle()
    writing.opened.set()
    assert isinstance(await client.reply(task_id), Failed)
    is_fixed[0] = True
    await mesh.idle()
    await resume_operation(mesh.store, task_id)
    await mesh.advance(2)
    await peer.respond(await peer.wait_for_request(2), 20)
    await mesh.idle()
    assert await stored_outcome(mesh, task_id) == Ok(20)
    assert ran.names == ["charge"]


async def test_a_step_that_ended_after_a_cancel_is_reused(
    mesh: Mesh, client: FakePeer, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the records of two steps find the cancel, because its broadcast is lost."""
    ran, gate = RunLog(), Gate()

    async def charge(what: str) -> str:
        ran(what)
        await gate()
        return what

    @agent("agent", resume_from="last-pause")
    async def charging(ctx: TaskExecutionContext, number: int) -> str:
        await ctx.subtask("operation", int, 1)
        await int_peer(number)
        a, b = await asyncio.gather(ctx.step("a", charge, "a"), ctx.step("b", charge, "b"))
        return a + b

    replica = await mesh.replica(charging)
    monkeypatch.setattr(replica.worker.tasks, "cancel", lambda *_: False)
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 10)
    await gate.wait_reached(2)
    await client.cancel("agent", task_id)
    await mesh.idle()
    gate.opened.set()
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    await mesh.idle()
    await resume_operation(mesh.store, task_id)
    await mesh.advance(2)
    assert await stored_outcome(mesh, task_id) == Ok("ab")
    assert ran.names == ["a", "b"]


async def test_a_step_nobody_awaits_does_not_run_once_its_code_has_ended(
    mesh: Mesh, client: FakePeer
) -> None:
    ran, writing, left_behind = RunLog(), Gate(), list[asyncio.Task[None]]()

    @agent("agent")
    async def leaving(ctx: TaskExecutionContext, number: int) -> int:
        left_behind.append(asyncio.create_task(ctx.step("late", ran, "late")))
        await writing.wait_reached()
        return number

    replica = await mesh.replica(leaving)
    replica.store.before["begin"] = writing
    task_id = await client.ask("agent", 1)
    await writing.wait_reached()
    await mesh.idle()
    writing.opened.set()
    assert await client.reply(task_id) == Ok(1)
    assert await asyncio.gather(*left_behind, return_exceptions=True)
    assert ran.names == []


async def test_a_step_that_outlives_its_segment_does_not_fence_its_pause(
    mesh: Mesh, client: FakePeer, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshpoint.engine.segment._STOP_TIMEOUT", 0)
    stubborn, pausing, left_behind = Gate(), Gate(), list[asyncio.Task[None]]()

    async def ignore_cancels() -> None:
        while not stubborn.opened.is_set():
            with suppress(asyncio.CancelledError):
                await stubborn()

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        await ctx.step("first", int, 1)
        left_behind.append(asyncio.create_task(ctx.step("stubborn", ignore_cancels)))
        await stubborn.wait_reached()
        return Paused([Call("call", "peer", request)], b"state")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Done[int]:
        return Done(1)

    replica = await mesh.replica(ScriptedAgent("agent", start, resume))
    replica.store.before["pause"] = pausing
    task_id = await client.ask("agent", 1)
    await pausing.wait_reached()
    stubborn.opened.set()
    await asyncio.gather(*left_behind, return_exceptions=True)
    await mesh.idle()
    pausing.opened.set()
    assert await settle_one_call(mesh, client, peer, task_id) == [Ok(1)]
    assert mesh.events.matching(Step.FENCED) == []


class Odd(BaseModel):
    """A type whose own code raises."""

    number: int

    @field_validator("number")
    @classmethod
    def fail(cls, number: int) -> int:
        raise KeyError(number)


@pytest.mark.parametrize(
    ("value", "error_type"), [({"number": 1}, "NotJson"), ("x" * 2_000_000, "ResultTooLarge")]
)
async def test_a_result_that_cannot_be_recorded_fails_the_step_in_every_run(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    monkeypatch: pytest.MonkeyPatch,
    value: Any,
    error_type: str,
) -> None:
    monkeypatch.setattr("meshpoint.engine.step_log.MAX_ROW_BYTES", 3_000_000)
    ran, failures = RunLog(), list[str]()

    def return_value() -> Odd | str:
        ran("step")
        return value  # type: ignore[no-any-return]  # not an Odd yet

    @agent("agent")
    async def caught(ctx: TaskExecutionContext, number: int) -> int:
        try:
            await ctx.step("step", return_value)
        except StepFailed as failure:
            failures.append(failure.error_type)
        return await int_peer(number)

    await mesh.replica(caught)
    task_id = await client.ask("agent", 1)
    assert await settle_one_call(mesh, client, peer, task_id) == [Ok(10)]
    assert (failures, ran.names) == ([error_type] * 2, ["step"])
