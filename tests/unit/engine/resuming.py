"""Helpers for tests of resumed operations."""

from __future__ import annotations

from typing import Any

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.bodies import ResponseBody, parse_body
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Message
from meshpoint.model.outcomes import Outcome
from meshpoint.subtasks.resuming import resume_operation

from .agents import Steps
from .mesh import Mesh

int_peer, other_peer = Peer("peer", int, int), Peer("other", int, int)


async def stored_outcome(mesh: Mesh, task_id: str) -> Outcome:
    """The outcome stored in the task's row."""
    existing = (await mesh.store.lookup([TaskId(task_id)]))[TaskId(task_id)]
    assert existing.reply is not None
    return parse_body(ResponseBody, existing.reply.body).outcome()


async def resume_and_sweep(mesh: Mesh, task_id: TaskId) -> None:
    """Resume an operation and let the replicas sweep."""
    await resume_operation(mesh.store, task_id)
    await mesh.advance(2)


def failing_until_fixed(steps: Steps, *names: str) -> tuple[Any, list[bool]]:
    """An agent that fails after the subtasks `names` until the returned `works[0]` is true."""
    is_fixed = [False]

    @agent("agent", version="1")
    async def failing(ctx: TaskExecutionContext, number: int) -> int:
        for name in names:
            number = await steps(ctx, name, number)
        if not is_fixed[0]:
            raise ValueError("no")
        return number

    return failing, is_fixed


def calling_until_fixed(is_fixed: list[bool], *numbers: int) -> Any:
    """An agent that calls `peer` with each number in turn, then fails until `works[0]` is true."""

    @agent("agent", version="1")
    async def calling(ctx: TaskExecutionContext, number: int) -> list[int]:
        await ctx.subtask("once", int, 1)
        answers = [await int_peer(number_) for number_ in numbers]
        if not is_fixed[0]:
            raise ValueError("no")
        return answers

    return calling


async def answer_in_turn(
    mesh: Mesh, peer: FakePeer, *answers: int, before: int = 0
) -> list[Message]:
    for count, answer in enumerate(answers, before + 1):
        await mesh.advance(1)
        await peer.respond(await peer.wait_for_request(count), answer)
        await mesh.idle()
    return peer.requests[before : before + len(answers)]
