"""Helpers for tests of resumed operations."""

from __future__ import annotations

from typing import Any

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.bodies import ResponseBody, parse
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Message
from meshpoint.model.outcomes import Outcome
from meshpoint.subtasks.resuming import resume_operation

from .agents import Steps
from .mesh import Mesh
from .puppet import Puppet

asked, other = Peer("peer", int, int), Peer("other", int, int)


async def result_of(mesh: Mesh, task_id: str) -> Outcome:
    """The outcome stored in the task's row; a resumed task replies to no one."""
    known = (await mesh.store.lookup([TaskId(task_id)]))[TaskId(task_id)]
    assert known.reply is not None
    return parse(ResponseBody, known.reply.body).outcome()


async def resumed(mesh: Mesh, task_id: TaskId) -> None:
    """Resume an operation and let the replicas sweep."""
    await resume_operation(mesh.store, task_id)
    await mesh.advance(2)


def mending(steps: Steps, *names: str) -> tuple[Any, list[bool]]:
    """An agent that fails after the subtasks `names` until the returned `works[0]` is true."""
    works = [False]

    @agent("agent", version="1")
    async def mending(ctx: TaskExecutionContext, number: int) -> int:
        for name in names:
            number = await steps(ctx, name, number)
        if not works[0]:
            raise ValueError("no")
        return number

    return mending, works


def asking(works: list[bool], *numbers: int) -> Any:
    """An agent that calls `peer` with each number in turn, then fails until `works[0]` is true."""

    @agent("agent", version="1")
    async def asking(ctx: TaskExecutionContext, number: int) -> list[int]:
        await ctx.subtask("once", int, 1)
        answers = [await ctx.call(asked(each)) for each in numbers]
        if not works[0]:
            raise ValueError("no")
        return answers

    return asking


async def answer_in_turn(mesh: Mesh, peer: Puppet, *answers: int, before: int = 0) -> list[Message]:
    for count, answer in enumerate(answers, before + 1):
        await mesh.advance(1)
        await peer.respond(await peer.request_number(count), answer)
        await mesh.settle()
    return peer.requests[before : before + len(answers)]
