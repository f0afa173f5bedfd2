"""What the callers of a task see of the questions that it asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import BaseModel, Field

from meshpoint import Mesh as CallerMesh
from meshpoint import Question, QuestionUpdate, StatusUpdate, TaskHandle
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.client.transport import Transport
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import MAX_STATUS_BYTES, status_envelope
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.questions import QuestionKey
from meshpoint.model.status_metadata import StatusMetadata, UpdateKind
from meshpoint.model.tasks import Requester

from .faults import FaultyBroker
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])
approval = Question("approval", bool)


@agent("asking")
async def asking(ctx: TaskExecutionContext, item: str) -> list[bool]:
    await ctx.update_status("asks")
    return [await ctx.wait_for(approval, prompt=f"{item} {number}?") for number in range(2)]


@pytest.fixture
async def caller(mesh: Mesh) -> AsyncIterator[CallerMesh]:
    async with Transport(FaultyBroker(mesh.exchange), "caller") as transport:
        yield CallerMesh(transport)


async def next_question(updates: Any) -> QuestionUpdate:
    async for update in updates:
        if isinstance(update, QuestionUpdate):
            return update
    raise AssertionError("the task asked nothing more")


@BACKENDS
async def test_each_pause_shows_its_question_once(
    mesh: Mesh, caller: CallerMesh, durable: bool
) -> None:
    await mesh.replica(asking, durable=durable)
    task = await caller.send(asking, "milk")
    kinds, prompts = [], []
    async for update in task.updates():
        kinds.append(update.kind)
        if isinstance(update, QuestionUpdate):
            assert (update.name, update.answer_schema) == ("approval", {"type": "boolean"})
            assert (update.task_id, update.path, update.reset) == (task.id, (), False)
            prompts.append(update.prompt)
            answering = asyncio.ensure_future(caller.complete(update.question_id, True))
    await answering
    assert kinds == ["status", "question", "question", "ended"]
    assert prompts == ["milk 0?", "milk 1?"]
    assert await task.result() == [True, True]


async def test_a_question_of_a_peer_is_shown_with_its_path(mesh: Mesh, caller: CallerMesh) -> None:
    ask = Peer("asking", str, list[bool])

    @agent("shop")
    async def shop(ctx: TaskExecutionContext, item: str) -> list[bool]:
        return await ask(item)

    await mesh.replica(asking, shop)
    task = await caller.send(shop, "milk")
    question = await next_question(task.updates())
    assert (question.path, question.prompt) == (("asking",), "milk 0?")
    assert QuestionKey.from_id(question.question_id).task_id == question.task_id != task.id


async def test_questions_beyond_the_rate_are_dropped(mesh: Mesh, caller: CallerMesh) -> None:
    @agent("asking")
    async def ask_much(ctx: TaskExecutionContext, count: int) -> list[bool]:
        waits = [ctx.wait_for(f"q{number}", bool) for number in range(count)]
        return list(await ctx.gather(*waits))

    await mesh.replica(ask_much)
    task = await caller.send(ask_much, 30)
    updates = task.updates()
    shown = [(await next_question(updates)).name for _ in range(20)]
    assert shown == [f"q{number}" for number in range(20)]
    await mesh.idle()
    assert mesh.events.matching(Step.STATUS_DROPPED)


async def test_a_question_too_large_to_send_is_dropped(mesh: Mesh, caller: CallerMesh) -> None:
    class Long(BaseModel):
        approved: bool = Field(description="x" * MAX_STATUS_BYTES)

    @agent("asking")
    async def ask_long(ctx: TaskExecutionContext, name: str) -> bool:
        return (await ctx.wait_for(Question(name, Long))).approved

    await mesh.replica(ask_long)
    await caller.send(ask_long, "approval")
    (dropped,) = await mesh.events.wait(Step.STATUS_DROPPED)
    assert "ctx.wait_for was given too much" in str(dropped.detail["reason"])


async def receive(mesh: Mesh, caller: CallerMesh, task: TaskHandle[Any], **content: Any) -> Any:
    """The update of a message that claims to show a question."""
    sender = await mesh.fake_peer("peer")
    reply_to = caller._transport.reply_to
    metadata = StatusMetadata(UpdateKind.QUESTION)
    envelope = status_envelope(
        AgentName("peer"), TaskId(task.id), Requester(reply_to), content, metadata
    )
    assert envelope is not None
    updates = task.updates()
    await sender.send_to_address(*envelope)
    return await anext(updates)


async def test_a_peer_cannot_pass_off_the_question_of_another_task(
    mesh: Mesh, caller: CallerMesh
) -> None:
    task = caller.task("peer", "mine")
    content: dict[str, Any] = {"name": "approval", "prompt": None, "answerSchema": {}}
    others = QuestionKey(AgentName("peer"), TaskId("others"), TaskId("~?approval.1")).to_id()
    update = await receive(mesh, caller, task, questionId=others, **content)
    assert isinstance(update, StatusUpdate)
