"""Replicas do not run a suspended task until a person resumes it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from meshpoint.agents.function import FunctionAgent, agent
from meshpoint.agents.peer import Peer
from meshpoint.cli.task_facts import TaskDetails, describe_state, describe_task
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import TaskSuspended

from .agents import Gate
from .mesh import Mesh

_LEASE = 17
"""Seconds after which tasks of a dead replica are rescued."""


class _Runs:
    """An agent that asks its peer twice, with a gate between the answers, and counts its runs."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.gate, self.count = mesh, Gate(), 0

    async def open(self, replicas: int = 2, **options: Any) -> TaskId:
        """Start replicas, and a task that waits for its first answer."""
        self.client = await self.mesh.fake_peer("client")
        self.peer = await self.mesh.fake_peer("peer")
        for _ in range(replicas):
            await self.mesh.replica(self._agent(), **options)
        task_id = await self.client.ask("agent", "rome")
        await self.peer.wait_for_request()
        await self.mesh.idle()
        return task_id

    def _agent(self) -> FunctionAgent[str, list[str]]:
        peer = Peer("peer", str, str, timeout=timedelta(days=1))

        @agent("agent", version="1")
        async def ask_twice(ctx: TaskExecutionContext, topic: str) -> list[str]:
            self.count += 1
            first = await peer(topic)
            await self.gate()
            return [first, await peer(topic)]

        return ask_twice

    async def respond(self, number: int) -> None:
        await self.peer.respond(await self.peer.wait_for_request(number), str(number))

    async def respond_while_suspended(self, number: int, task_id: TaskId) -> None:
        """Answer the only open call. No replica runs the task, also much later."""
        claims = len(self.mesh.events.matching(Step.CLAIM, Phase.AFTER, task_id=task_id))
        await self.respond(number)
        await self.mesh.events.wait(Step.CLAIM, Phase.AFTER, count=claims + 1, task_id=task_id)
        await self.assert_held(task_id)

    async def continue_to_end(self, task_id: TaskId) -> None:
        """Let the task continue after its first response, and answer its second call."""
        self.gate.opened.set()
        assert await self.mesh.store.unsuspend([task_id]) == [True]
        await self.mesh.advance(1)
        await self.respond(2)
        assert await self.client.reply(task_id) == Ok(["1", "2"])

    async def assert_held(self, task_id: TaskId) -> None:
        before = self.count
        await self.mesh.advance(3 * _LEASE)
        assert self.count == before
        assert self.client.replies(task_id) == []
        summary, _ = await self.mesh.task(task_id)
        assert describe_state(summary) == "ready (suspended)"


async def _suspend(mesh: Mesh, task_id: TaskId, state: TaskState, *, repeated: bool) -> None:
    assert await mesh.store.suspend([task_id]) == [TaskSuspended(state, repeated=repeated)]


async def test_a_waiting_task_stays_until_it_is_resumed(any_mesh: Mesh) -> None:
    runs = _Runs(any_mesh)
    runs.gate.opened.set()
    task_id = await runs.open()
    await _suspend(any_mesh, task_id, TaskState.WAITING, repeated=False)
    summary, _ = await any_mesh.task(task_id)
    assert describe_state(summary) == "waiting 0 of 1 (suspended)"
    await runs.respond_while_suspended(1, task_id)
    shown = dict(describe_task(TaskDetails(*await any_mesh.task(task_id), None)))
    assert shown["waits for"] == f"a person: meshpoint tasks resume {task_id} --db URL"
    assert "deadline" not in shown
    assert "suspended" in shown
    await _suspend(any_mesh, task_id, TaskState.READY, repeated=True)
    assert await any_mesh.store.unsuspend([task_id]) == [True]
    await any_mesh.advance(1)
    await runs.respond(2)
    assert await runs.client.reply(task_id) == Ok(["1", "2"])
    assert runs.count == 3
    assert len(runs.peer.requests) == 2


async def test_a_running_task_stops_at_its_next_pause(any_mesh: Mesh) -> None:
    runs = _Runs(any_mesh)
    task_id = await runs.open()
    await runs.respond(1)
    await runs.gate.wait_reached()
    await _suspend(any_mesh, task_id, TaskState.RUNNING, repeated=False)
    assert describe_state((await any_mesh.task(task_id))[0]) == "suspending"
    runs.gate.opened.set()
    await runs.respond_while_suspended(2, task_id)
    assert await any_mesh.store.unsuspend([task_id]) == [True]
    await any_mesh.advance(1)
    assert await runs.client.reply(task_id) == Ok(["1", "2"])


async def test_a_suspension_is_taken_back_before_the_pause(any_mesh: Mesh) -> None:
    runs = _Runs(any_mesh)
    task_id = await runs.open()
    await runs.respond(1)
    await runs.gate.wait_reached()
    await _suspend(any_mesh, task_id, TaskState.RUNNING, repeated=False)
    assert await any_mesh.store.unsuspend([task_id]) == [True]
    runs.gate.opened.set()
    await runs.respond(2)
    assert await runs.client.reply(task_id) == Ok(["1", "2"])


async def test_a_run_that_drains_is_not_continued_elsewhere(any_mesh: Mesh) -> None:
    runs = _Runs(any_mesh)
    task_id = await runs.open(1, drain_timeout=timedelta())
    await runs.respond(1)
    await runs.gate.wait_reached()
    await _suspend(any_mesh, task_id, TaskState.RUNNING, repeated=False)
    await any_mesh.replicas[0].drain()
    await any_mesh.replica(runs._agent())
    await runs.assert_held(task_id)
    await runs.continue_to_end(task_id)


async def test_a_run_that_crashes_is_not_continued_elsewhere(any_mesh: Mesh) -> None:
    runs = _Runs(any_mesh)
    task_id = await runs.open(1)
    await runs.respond(1)
    await runs.gate.wait_reached()
    await _suspend(any_mesh, task_id, TaskState.RUNNING, repeated=False)
    await any_mesh.replicas[0].crash()
    await any_mesh.replica(runs._agent())
    await any_mesh.advance(_LEASE)
    await runs.assert_held(task_id)
    await runs.continue_to_end(task_id)


async def test_its_requester_cancels_it(any_mesh: Mesh) -> None:
    runs = _Runs(any_mesh)
    task_id = await runs.open()
    await _suspend(any_mesh, task_id, TaskState.WAITING, repeated=False)
    await runs.respond_while_suspended(1, task_id)
    await runs.client.cancel("agent", task_id)
    reply = await runs.client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert runs.count == 1


async def test_a_repeated_request_does_not_run_it(any_mesh: Mesh) -> None:
    runs = _Runs(any_mesh)
    runs.gate.opened.set()
    task_id = await runs.open()
    await _suspend(any_mesh, task_id, TaskState.WAITING, repeated=False)
    await runs.respond_while_suspended(1, task_id)
    await runs.client.ask("agent", "rome", task_id)
    await runs.assert_held(task_id)
    assert any_mesh.unacked("agent") == any_mesh.waiting("agent") == 0
