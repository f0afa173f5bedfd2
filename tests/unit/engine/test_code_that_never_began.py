"""Code that is stopped before its first step is never called, so it leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from meshpoint.engine import running
from meshpoint.engine.segment import Segment, Stop
from meshpoint.model.checkpoint import Requester, Run
from meshpoint.model.context import A2AContext, TaskExecutionContext
from meshpoint.model.ids import AgentName, ReplicaId, RunId, TaskId
from meshpoint.ports.observer import Steps

from .agents import Gate, gated
from .mesh import Events


async def test_it_is_not_even_called() -> None:
    begun: list[object] = []
    agent = gated("agent", Gate())

    def noted(ctx: TaskExecutionContext, request: Any) -> Coroutine[Any, Any, Any]:
        begun.append(request)
        raise AssertionError

    agent.start = noted  # type: ignore[method-assign]
    name, task_id = AgentName("agent"), TaskId("task")
    context = TaskExecutionContext(task_id=task_id, a2a_context=A2AContext())
    segment = Segment(Run(task_id, name, RunId("run")), Requester(), context)
    task = asyncio.create_task(running.first_segment(agent, segment, 1, Steps(Events(), name, ReplicaId("replica"))))
    while segment.code is None:
        await asyncio.sleep(0)
    segment.stop(Stop.CANCELLED)
    assert await task == running.Stopped(Stop.CANCELLED)
    assert begun == []
