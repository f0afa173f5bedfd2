"""A task ends at its deadline in every state, and its requester gets an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address
from meshpoint.model.operations import Adopted, Revive
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.tasks import Requester, TaskState
from meshpoint.model.usage import Tokens
from meshpoint.testing.clock import FakeClock

from .agents import Gate, ScriptedAgent, gated
from .cells import IsolatedRuns
from .mesh import Mesh
from .scenes import DEADLINE, ONLY_IN_A_DATABASE, STORED, Scene

BACKENDS = pytest.mark.parametrize("durable", [True, False])
LEASE = 17
"""Seconds after which tasks of a dead replica are rescued."""


@pytest.mark.parametrize(
    ("arrange", "state", "why"),
    [
        (Scene.waiting, TaskState.WAITING, " while it waited for 'peer'"),
        (Scene.ready, TaskState.READY, " while it was ready"),
        (
            Scene.parked,
            TaskState.PARKED,
            " while it was parked: call 1: expected flights, recorded weather",
        ),
        (Scene.suspended, TaskState.WAITING, " while it was suspended"),
        (Scene.suspended_with_outcomes, TaskState.READY, " while it was suspended"),
        (Scene.suspending, TaskState.RUNNING, ""),
        (Scene.running, None, ""),
        (Scene.running_with_a_row, TaskState.RUNNING, ""),
        (Scene.resumed, TaskState.RUNNING, ""),
    ],
    ids=[
        *("waiting", "ready", "parked", "suspended", "suspended with outcomes", "suspending"),
        *("running", "running with a row", "resumed"),
    ],
)
async def test_a_task_ends_at_its_deadline_in_every_state(
    any_mesh: Mesh,
    arrange: Callable[[Scene], Awaitable[TaskId]],
    state: TaskState | None,
    why: str,
) -> None:
    scene = await Scene(any_mesh).open()
    if not scene.durable and arrange in ONLY_IN_A_DATABASE:
        pytest.skip("a task in the process has no row that a person or another replica can change")
    task_id = await arrange(scene)
    await any_mesh.idle()
    if scene.durable:
        found = await any_mesh.store.task(task_id)
        assert (found and found[0].state) is state
    await any_mesh.advance(DEADLINE - 1)
    assert scene.client.replies(task_id) == []
    await any_mesh.advance(3)
    reply = await scene.client.reply(task_id)
    assert (type(reply), reply_kind(reply)) == (Failed, FailureKind.TIMEOUT)
    assert isinstance(reply, Failed)
    assert reply.message == f"the task's deadline has passed{why}"
    (event,) = await any_mesh.events.wait(Step.TASK_FAILED, task_id=task_id)
    assert (event.detail["kind"], event.detail["reason"]) == ("timeout", reply.message)


def reply_kind(reply: Outcome) -> FailureKind | None:
    return reply.kind if isinstance(reply, Failed) else None


@BACKENDS
@pytest.mark.parametrize("ignored", [1, 1_000])
async def test_code_that_ignores_its_deadline_does_not_answer_later(
    mesh: Mesh, client: FakePeer, durable: bool, ignored: int
) -> None:
    gate, gone_on = Gate(), asyncio.Event()

    async def stubborn(ctx: TaskExecutionContext, request: Any) -> Any:
        for _ in range(ignored):
            with suppress(asyncio.CancelledError):
                await gate()
                break
        gone_on.set()
        return Done("too late")

    await mesh.replica(ScriptedAgent("agent", stubborn), durable=durable, max_concurrency=1)
    task_id = await client.ask("agent", 1, deadline=mesh.deadline_in(DEADLINE))
    await gate.wait_reached()
    await mesh.advance(DEADLINE)
    assert gate.cancelled == 1
    await mesh.advance(5)
    assert reply_kind(await client.reply(task_id)) is FailureKind.TIMEOUT
    assert mesh.unacked("agent") == 0
    other = await client.ask("agent", 2)  # the slot is free
    await gate.wait_reached(2 if ignored == 1 else 3)
    gate.opened.set()
    await gone_on.wait()
    assert await client.reply(other) == Ok("too late")
    await mesh.idle()
    assert len(client.replies(task_id)) == 1


async def test_stubborn_code_of_a_stored_task_changes_nothing_later(
    mesh: Mesh, client: FakePeer, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()

    async def stubborn(ctx: TaskExecutionContext, request: Any) -> Any:
        while True:
            with suppress(asyncio.CancelledError):
                await gate()
                return Paused([Call("call", "peer", 1)], b"")

    replica = await mesh.replica(ScriptedAgent("agent", stubborn), **STORED)
    task_id = await client.ask("agent", 1, deadline=mesh.deadline_in(DEADLINE))
    await gate.wait_reached()
    await mesh.advance(DEADLINE + 5)
    assert reply_kind(await client.reply(task_id)) is FailureKind.TIMEOUT
    assert f"task {task_id}: its code ignores that the task's deadline has passed" in caplog.text
    assert len(replica.worker.runner.unfinished_code) == 1
    writes = len(replica.store.calls)
    gate.opened.set()
    await mesh.idle()
    assert replica.worker.runner.unfinished_code == {}
    assert replica.store.calls[writes:] == []
    assert await mesh.state(task_id) is TaskState.FAILED


@BACKENDS
async def test_code_may_clean_up_at_its_deadline(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    cleaned_up = False

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        nonlocal cleaned_up
        ctx.token_usage.record(Tokens(input=7), model="m")
        try:
            await asyncio.Event().wait()
        finally:
            assert ctx.cancelled.is_set()
            await mesh.clock.sleep(timedelta(seconds=2))
            cleaned_up = True

    await mesh.replica(ScriptedAgent("agent", start), durable=durable)
    task_id = await client.ask("agent", 1, deadline=mesh.deadline_in(DEADLINE))
    await mesh.idle()
    await mesh.advance(DEADLINE + 1)
    assert client.replies(task_id) == []
    await mesh.advance(1)
    reply = await client.reply(task_id)
    assert (reply_kind(reply), reply.usage.total.input, cleaned_up) == (
        FailureKind.TIMEOUT,
        7,
        True,
    )
    (event,) = await mesh.events.wait(Step.TASK_FAILED, task_id=task_id)
    assert "await asyncio.Event().wait()" in str(event.detail["traceback"])


async def test_a_rescued_task_past_its_deadline_runs_no_code(mesh: Mesh, client: FakePeer) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), ack_policy="on_receipt")
    task_id = await client.ask("agent", 1, deadline=mesh.deadline_in(10))
    await gate.wait_reached()
    await replica.crash()
    await mesh.replica(gated("agent", gate))
    await mesh.advance(LEASE + 1)
    assert await client.reply(task_id) == Failed(
        FailureKind.TIMEOUT, "the task's deadline has passed"
    )
    assert gate.visits == 1


@pytest.mark.parametrize("later", [10, None])
async def test_a_resumed_requester_extends_the_deadline_of_running_code(
    mesh: Mesh, client: FakePeer, later: int | None
) -> None:
    gate = Gate()
    await mesh.replica(gated("agent", gate), **STORED)
    task_id = await client.ask("agent", 1, deadline=mesh.deadline_in(DEADLINE))
    await gate.wait_reached()
    extended = None if later is None else timedelta(seconds=DEADLINE + later)
    requester = Requester(
        Address("client.resp"),
        "client",
        deadline=None if extended is None else mesh.clock.now() + extended,
    )
    command = Revive(task_id=task_id, token="token", requester=requester, order="1", adopt=True)
    assert await mesh.store.revive(command) == Adopted()
    await mesh.advance(DEADLINE + 5)
    assert (client.replies(task_id), gate.cancelled) == ([], 0)
    await mesh.advance(10)
    assert gate.cancelled == (later is not None)


@pytest.mark.parametrize("paused_at", [DEADLINE - 5, DEADLINE + 5])
async def test_code_that_pauses_has_the_deadline_of_a_resumed_requester(
    mesh: Mesh, client: FakePeer, peer: FakePeer, paused_at: int
) -> None:
    """Its segment began with an earlier deadline."""
    gate = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        await gate()
        return Paused([Call("call", "peer", request)], b"state")

    await mesh.replica(ScriptedAgent("agent", start), **STORED)
    task_id = await client.ask("agent", 1, deadline=mesh.deadline_in(DEADLINE))
    await gate.wait_reached()
    deadline = mesh.clock.now() + timedelta(seconds=2 * DEADLINE)
    requester = Requester(Address("client.resp"), "client", deadline=deadline)
    command = Revive(task_id=task_id, token="token", requester=requester, order="1", adopt=True)
    assert await mesh.store.revive(command) == Adopted()
    await mesh.advance(paused_at)
    gate.opened.set()
    request = await peer.wait_for_request()
    assert client.replies(task_id) == []
    assert float(request.headers["x-deadline"]) > mesh.deadline_in(DEADLINE - paused_at)
    await mesh.advance(2 * DEADLINE - paused_at + 1)
    assert reply_kind(await client.reply(task_id)) is FailureKind.TIMEOUT


async def test_a_deadline_is_checked_once_the_database_answers_again(
    mesh: Mesh, client: FakePeer
) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), **STORED)
    task_id = await client.ask("agent", 1, deadline=mesh.deadline_in(DEADLINE))
    await gate.wait_reached()
    replica.store.unavailable = True
    await mesh.advance(DEADLINE + 10)
    assert client.replies(task_id) == []
    replica.store.heal()
    await mesh.advance(60)
    assert reply_kind(await client.reply(task_id)) is FailureKind.TIMEOUT


async def make_suspect(mesh: Mesh, client: FakePeer, agent: Any, gate: Gate) -> TaskId:
    """Start a task with a deadline, and crash two replicas that run it."""
    for attempt in (1, 2):
        replica = await mesh.replica(agent, ack_policy="on_receipt")
        if attempt == 1:
            task_id = await client.ask("agent", 1, deadline=mesh.deadline_in(2 * LEASE + 6))
        else:
            await mesh.advance(LEASE)
        await gate.wait_reached(attempt)
        await replica.crash()
    return task_id


async def test_a_suspect_ends_at_its_deadline(mesh: Mesh, client: FakePeer) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    isolation = IsolatedRuns(mesh, agent)
    task_id = await make_suspect(mesh, client, agent, gate)
    await mesh.replica(agent, isolation=isolation)
    await mesh.advance(LEASE)
    await gate.wait_reached(3)
    await mesh.advance(6)
    assert reply_kind(await client.reply(task_id)) is FailureKind.TIMEOUT
    (run,) = isolation.all
    await mesh.idle()
    assert (run.is_done, run.signals) == (True, [])


async def test_a_process_that_misses_its_deadline_is_killed(mesh: Mesh, client: FakePeer) -> None:
    gate = Gate()
    agent = gated("agent", gate)
    isolation = IsolatedRuns(mesh, agent)
    task_id = await make_suspect(mesh, client, agent, gate)
    await mesh.replica(agent, isolation=isolation)
    stopped_clock = FakeClock(mesh.clock.now())
    waiting = asyncio.create_task(isolation.wait_for_run())
    waiting.add_done_callback(
        lambda task: setattr(task.result().worker.runtime, "clock", stopped_clock)
    )
    await mesh.advance(LEASE)
    await gate.wait_reached(3)
    await mesh.advance(6 + 2)
    assert client.replies(task_id) == []
    await mesh.advance(1)
    assert reply_kind(await client.reply(task_id)) is FailureKind.TIMEOUT
    await mesh.idle()
    assert isolation.all[0].is_done


async def test_a_suspect_that_waits_for_other_tasks_ends_at_its_deadline(
    mesh: Mesh, client: FakePeer
) -> None:
    """Without a process of its own, it runs only when nothing else does."""
    gates = {1: Gate(), 2: Gate()}

    async def start(ctx: TaskExecutionContext, request: int) -> Done[str]:
        await gates[request]()
        return Done("done")

    agent = ScriptedAgent("agent", start)
    task_id = await make_suspect(mesh, client, agent, gates[1])
    replica = await mesh.replica(agent)
    other = await client.ask("agent", 2)
    await gates[2].wait_reached()
    await mesh.advance(LEASE + 6 + 5)
    assert reply_kind(await client.reply(task_id)) is FailureKind.TIMEOUT
    assert gates[1].visits == 2
    gates[2].opened.set()
    assert await client.reply(other) == Ok("done")
    await mesh.idle()
    assert replica.worker.runtime.slots.free == 10
