"""A task in each state in which it has not ended."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from meshpoint.errors import IncompatibleState
from meshpoint.model.calls import Call, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.transitions import TaskSuspended

from .agents import Gate, ScriptedAgent, asker, gated, gated_after
from .mesh import Mesh, SqlMesh

DEADLINE = 20
"""Seconds after which a requested task is overdue."""
LONG_LEASE: dict[str, Any] = {"lease": timedelta(days=1)}
STORED: dict[str, Any] = {"ack_policy": "on_receipt", **LONG_LEASE}


class Scene:
    """Brings one task of `agent` into a state.

    The client requests it with a deadline, or `parent` calls it without one.
    """

    def __init__(self, mesh: Mesh, *, has_parent: bool = False) -> None:
        self.mesh, self.gate = mesh, Gate()
        self.durable, self._has_parent = isinstance(mesh, SqlMesh), has_parent

    async def open(self) -> Scene:
        self.client = await self.mesh.fake_peer("client")
        self.peer = await self.mesh.fake_peer("peer")
        return self

    async def serve(self, agent: Any, **options: Any) -> None:
        self.replica = await self.mesh.replica(
            agent, durable=self.durable, **{**LONG_LEASE, **options}
        )

    async def ask(self) -> TaskId:
        """Request the task, and return its id."""
        if not self._has_parent:
            return await self.client.ask("agent", 1, deadline=self.mesh.deadline_in(DEADLINE))
        received = len(self.mesh.events.matching(Step.RECEIVE, Phase.AFTER, agent="agent"))
        self.parent_task = await self.client.ask("parent", 1)
        events = await self.mesh.events.wait(
            Step.RECEIVE, Phase.AFTER, count=received + 1, agent="agent"
        )
        return events[-1].task_ids[0]

    async def waiting(self) -> TaskId:
        await self.serve(asker("agent", "peer"))
        task_id = await self.ask()
        await self.peer.wait_for_request()
        return task_id

    async def running(self) -> TaskId:
        await self.serve(gated("agent", self.gate))
        task_id = await self.ask()
        await self.gate.wait_reached()
        return task_id

    async def running_with_a_row(self) -> TaskId:
        await self.serve(gated("agent", self.gate), **STORED)
        task_id = await self.ask()
        await self.gate.wait_reached()
        return task_id

    async def resumed(self) -> TaskId:
        await self.serve(gated_after("agent", "peer", self.gate))
        task_id = await self.ask()
        await self.peer.respond(await self.peer.wait_for_request(), 1)
        await self.gate.wait_reached()
        return task_id

    async def ready(self) -> TaskId:
        await self.serve(gated_after("agent", "peer", self.gate), max_concurrency=1)
        task_id = await self.ask()
        request = await self.peer.wait_for_request()
        await self.client.ask("agent", 1)  # takes the only slot
        await self.peer.respond(await self.peer.wait_for_request(2), 1)
        await self.gate.wait_reached()
        await self.peer.respond(request, 1)
        await self.mesh.events.wait(Step.CLAIM, Phase.AFTER, task_id=task_id)
        return task_id

    async def parked(self) -> TaskId:
        async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
            return Paused([Call("call", "peer", request)], b"")

        async def resume(*_: object) -> Paused:
            raise IncompatibleState("call 1: expected flights, recorded weather")

        await self.serve(ScriptedAgent("agent", start, resume))
        task_id = await self.ask()
        await self.peer.respond(await self.peer.wait_for_request(), 1)
        await self.mesh.events.wait(Step.PARKED, task_id=task_id)
        return task_id

    async def suspended(self) -> TaskId:
        return await self._suspend(await self.waiting())

    async def suspended_with_outcomes(self) -> TaskId:
        task_id = await self.suspended()
        await self.peer.respond(await self.peer.wait_for_request(), 1)
        await self.mesh.events.wait(Step.CLAIM, Phase.AFTER, task_id=task_id)
        return task_id

    async def suspending(self) -> TaskId:
        return await self._suspend(await self.resumed())

    async def _suspend(self, task_id: TaskId) -> TaskId:
        (result,) = await self.mesh.store.suspend([task_id])
        assert isinstance(result, TaskSuspended)
        return task_id


ONLY_IN_A_DATABASE = {
    *(Scene.parked, Scene.running_with_a_row),
    *(Scene.suspended, Scene.suspended_with_outcomes, Scene.suspending),
}
"""Scenes that need a row."""
