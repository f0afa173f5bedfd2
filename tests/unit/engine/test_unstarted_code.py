"""Code that is stopped before its first step is never called, so it leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from meshpoint.engine import running
from meshpoint.engine.segment import Segment, StopReason, Workspace
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.subtasks import Operation
from meshpoint.model.tasks import Requester, Run

from .agents import doubler
from .mesh import Mesh


async def test_code_stopped_before_it_began_is_never_called(mesh: Mesh) -> None:
    started: list[object] = []

    def start() -> Coroutine[Any, Any, Any]:
        started.append(True)
        raise AssertionError

    async def open_operation(operation: Operation | None) -> Any:
        raise AssertionError

    runtime = (await mesh.replica(doubler)).worker.runtime
    task_id = TaskId("task")
    segment = Segment(Run(task_id, AgentName("agent"), RunId("run")), Requester())
    context = TaskExecutionContext(task_id)
    workspace = Workspace(segment, context, runtime, open_operation, doubler)
    code = running.AgentCode(start, segment, workspace, runtime)

    def stop_before_first_step(event: Event) -> None:
        if (event.step, event.phase) == (Step.SEGMENT, Phase.BEFORE):
            # the code is scheduled after this call
            asyncio.get_running_loop().call_soon(segment.stop, StopReason.CANCELLED)

    mesh.events.hooks.append(stop_before_first_step)
    assert await code.run() == running.Stopped(StopReason.CANCELLED)
    assert started == []
