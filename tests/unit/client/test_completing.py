"""`mesh.complete`: answers to questions from a program."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from meshpoint import (
    AnswerRefused,
    NotJson,
    Question,
    QuestionNotOpen,
    Signal,
    SignalNotKept,
    TaskExecutionContext,
    TaskFailed,
    agent,
)
from meshpoint.client.transport import Transport
from meshpoint.local import local_mesh
from meshpoint.model.bodies import CompletedBody
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import CompletionStatus
from meshpoint.model.questions import QuestionKey

from .calling import give_up_after_reply

approval = Question("approval", bool)


def asking(ids: asyncio.Queue[str]) -> Any:
    @agent("asking")
    async def ask(ctx: TaskExecutionContext, what: str) -> str:
        wait = ctx.wait_for(approval, prompt=f"Buy {what}?", timeout=timedelta(days=1))
        if not ctx.replaying:
            ids.put_nowait(wait.id)
        return f"{what}: {await wait}"

    return ask


async def test_a_program_answers_a_question_with_its_id() -> None:
    ids = asyncio.Queue[str]()
    ask = asking(ids)
    async with local_mesh(ask) as mesh:
        task = await mesh.send(ask, "milk")
        question_id = await ids.get()
        # Maybe before the task has paused: it is tried again.
        with pytest.raises(AnswerRefused, match="approval: should be a boolean"):
            await mesh.complete(question_id, "yes")
        await mesh.complete(question_id, True)
        assert await task.result() == "milk: True"


async def test_a_program_rejects_a_question() -> None:
    ids = asyncio.Queue[str]()
    ask = asking(ids)
    async with local_mesh(ask) as mesh:
        task = await mesh.send(ask, "milk")
        await mesh.reject(await ids.get(), "x" * 1000)
        with pytest.raises(TaskFailed, match="question 'approval': error: rejected by 'client'"):
            await task.result()
        with pytest.raises(QuestionNotOpen, match="is not the id of a question"):
            await mesh.reject("nonsense", "no")


async def test_an_id_of_no_question_is_refused() -> None:
    async with local_mesh(asking(asyncio.Queue())) as mesh:
        with pytest.raises(QuestionNotOpen, match="is not the id of a question"):
            await mesh.complete("nonsense", True)


@pytest.mark.parametrize("value", [object(), float("nan"), b"\xff", "\ud800", -(10**4200)])
async def test_an_answer_that_is_not_json(value: object) -> None:
    ask = asking(asyncio.Queue())
    question_id = QuestionKey(AgentName("asking"), TaskId("task"), TaskId("~?approval.1")).to_id()
    async with local_mesh(ask) as mesh:
        with pytest.raises(NotJson, match="answer"):
            await mesh.complete(question_id, value)


async def test_an_answer_before_the_question_says_when_to_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, released = asyncio.Queue[str](), asyncio.Event()

    @agent("asking")
    async def ask(ctx: TaskExecutionContext, with_step: bool) -> str:
        if with_step:  # its row does not have the question either
            await ctx.step("prepare", asyncio.sleep, 0)
        wait = ctx.wait_for(approval)
        if not ctx.replaying:
            ids.put_nowait(wait.id)
            await released.wait()
        return f"{await wait}"

    async with local_mesh(ask) as mesh:
        for with_step in (False, True):
            released.clear()
            task = await mesh.send(ask, with_step)
            question_id = await ids.get()
            with monkeypatch.context() as patch:
                give_up_after_reply(patch)
                with pytest.raises(QuestionNotOpen, match="not asked it yet: answer again once"):
                    await mesh.complete(question_id, True)
            answering = asyncio.ensure_future(mesh.complete(question_id, True))
            released.set()
            await answering
            assert await task.result() == "True"
    key = QuestionKey(AgentName("asking"), TaskId("order-17"), TaskId("~?approval.1.g0"))
    give_up_after_reply(monkeypatch)
    async with local_mesh(ask) as mesh:
        with pytest.raises(QuestionNotOpen, match="no replica knows its task, or the task is in"):
            await mesh.complete(key.to_id(), True)


async def test_the_error_of_a_late_answer_names_the_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(*_: object) -> tuple[CompletionStatus, CompletedBody]:
        return CompletionStatus.NOT_OPEN, CompletedBody(text="it was answered before")

    monkeypatch.setattr(Transport, "_exchange", refuse)
    key = QuestionKey(AgentName("asking"), TaskId("order-17"), TaskId("~?approval.1.g0"))
    async with local_mesh(asking(asyncio.Queue())) as mesh:
        with pytest.raises(QuestionNotOpen) as error:
            await mesh.complete(key.to_id(), True)
    assert str(error.value) == "question 'approval' of task 'order-17': it was answered before"


async def test_an_answer_without_a_reply_may_still_be_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stay_silent(*_: object) -> tuple[CompletionStatus | None, CompletedBody]:
        return None, CompletedBody()

    monkeypatch.setattr(Transport, "_exchange", stay_silent)
    key = QuestionKey(AgentName("asking"), TaskId("order-17"), TaskId("~?approval.1.g0"))
    async with local_mesh(asking(asyncio.Queue())) as mesh:
        for answering in (mesh.complete(key.to_id(), True), mesh.reject(key.to_id(), "too dear")):
            with pytest.raises(QuestionNotOpen, match="a replica that starts may still record it"):
                await answering
        with pytest.raises(SignalNotKept, match="a replica that starts may still store it"):
            await mesh.task("asking", "order-17").signal(Signal("urgent", bool), True)
