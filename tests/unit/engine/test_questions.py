"""Tasks that wait for a person."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from fake_peer import FakePeer
from meshpoint.agents.function import FunctionAgent, agent
from meshpoint.agents.stateful import Replies, StatefulAgent
from meshpoint.errors import PeerFailed, QuestionNotOpen
from meshpoint.model.bodies import (
    A2AMessage,
    A2ATaskState,
    CompleteBody,
    Part,
    ResponseBody,
    TaskBody,
    TaskStatus,
)
from meshpoint.model.calls import Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import complete_message, reject_message
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Header, Message, MessageType, response_queue
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.questions import Question, QuestionKey
from meshpoint.model.signals import Signal
from meshpoint.model.tasks import TaskState

from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])
Run = Callable[[TaskExecutionContext], Coroutine[Any, Any, Any]]


class Decision(BaseModel):
    approved: bool
    comment: str = ""


approval = Question("approval", Decision)


def purchasing(run: Run, name: str = "agent") -> FunctionAgent[Any, Any]:
    @agent(name)
    async def wrapper(ctx: TaskExecutionContext, _: Any) -> Any:
        return await run(ctx)

    return wrapper


async def decide(ctx: TaskExecutionContext) -> str:
    decision = await ctx.wait_for(approval, prompt="Buy it?")
    return f"{decision.approved} {decision.comment}"


def key_of(task_id: TaskId, place: str = "1", name: str = "approval") -> QuestionKey:
    return QuestionKey(AgentName("agent"), task_id, TaskId(f"~?{name}.{place}"))


async def ask(mesh: Mesh, client: FakePeer) -> TaskId:
    """Start a task that asks, and wait for its checkpoint."""
    task_id = await client.ask("agent", 1)
    await mesh.events.wait(Step.CHECKPOINT, Phase.AFTER, task_id=task_id)
    await mesh.idle()
    return task_id


async def answer(mesh: Mesh, sender: FakePeer, question_id: str, value: Any) -> str:
    """Answer a question, and return what becomes of it."""
    message = complete_message(
        AgentName(sender.name),
        question_id,
        TaskId("task"),
        value,
        response_queue(AgentName(sender.name)),
    )
    return await send_completion(mesh, sender, message)


async def send_completion(mesh: Mesh, sender: FakePeer, message: Message) -> str:
    """Send an answer or a rejection, and return the reply to it."""
    before = len(completions(sender))
    await sender.send_control("agent", message)
    for _ in range(50):
        await mesh.idle()
        if len(completions(sender)) > before:
            return completions(sender)[-1]
    return "no answer"


def completions(sender: FakePeer) -> list[str]:
    return [
        f"{message.headers['x-completed']} {message.body.decode()}"
        for message in sender.messages
        if message.type is MessageType.COMPLETE
    ]


@BACKENDS
async def test_a_person_answers_a_question(mesh: Mesh, client: FakePeer, durable: bool) -> None:
    await mesh.replica(purchasing(decide), durable=durable)
    task_id = await ask(mesh, client)
    await mesh.advance(3600)
    question_id = key_of(task_id).to_id()
    reply = await answer(mesh, client, question_id, {"approved": True, "comment": "fine"})
    assert reply.startswith("recorded")
    assert await client.reply(task_id) == Ok("True fine")


async def test_a_question_in_a_database(any_mesh: Mesh) -> None:
    client = await any_mesh.fake_peer("client")
    for _ in range(2):
        await any_mesh.replica(purchasing(decide))
    task_id = await ask(any_mesh, client)
    (row, calls) = await any_mesh.task(task_id)
    assert row.waiting_for == ("approval",)
    assert [call.absolute_deadline for call in calls] == [None]
    (asked,) = await any_mesh.store.find_questions([key_of(task_id)])
    assert asked is not None
    assert (asked.name, asked.requester, asked.outcome) == ("approval", "client", None)
    await client.send_control(
        "agent",
        complete_message(
            AgentName("client"),
            key_of(task_id).to_id(),
            task_id,
            {"approved": False},
            response_queue(AgentName("client")),
        ),
    )
    assert await client.reply(task_id) == Ok("False ")


async def test_a_second_answer_is_refused(mesh: Mesh, client: FakePeer) -> None:
    async def decide_twice(ctx: TaskExecutionContext) -> str:
        first, second = await ctx.gather(
            ctx.wait_for(approval), ctx.wait_for("colour", str, allow=["painter"])
        )
        return f"{first.approved} {second}"

    await mesh.replica(purchasing(decide_twice))
    task_id = await ask(mesh, client)
    question_id = key_of(task_id).to_id()
    assert (await answer(mesh, client, question_id, {"approved": True})).startswith("recorded")
    at = mesh.clock.now()
    refused = await answer(mesh, client, question_id, {"approved": False})
    assert refused.startswith("refused")
    assert f"'approval' was answered at {at:%H:%M} by 'client'" in refused
    painter = await mesh.fake_peer("painter")
    colour_id = key_of(task_id, name="colour").to_id()
    refused = await answer(mesh, client, colour_id, "red")
    assert "may not answer 'colour'" in refused
    assert mesh.dead_reasons("agent") == ["'client' may not answer 'colour'"]
    assert (await answer(mesh, painter, colour_id, "blue")).startswith("recorded")
    assert await client.reply(task_id) == Ok("True blue")
    again = await answer(mesh, client, question_id, {"approved": False})
    assert "'approval' is no longer open" in again or "was answered" in again


@BACKENDS
async def test_an_unfit_answer_is_refused_to_its_sender(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(purchasing(decide), durable=durable)
    task_id = await ask(mesh, client)
    question_id = key_of(task_id).to_id()
    refused = await answer(mesh, client, question_id, {"approved": "yes"})
    assert "approval.approved: should be a boolean" in refused
    assert (await answer(mesh, client, question_id, {"approved": True})).startswith("recorded")
    assert await client.reply(task_id) == Ok("True ")


async def test_a_deeply_nested_answer_is_refused_to_its_sender(
    mesh: Mesh, client: FakePeer
) -> None:
    """With the pauses of its task around it, a JSON parser could not read it back."""
    deep: Any = True
    for _ in range(150):
        deep = [deep]
    await mesh.replica(purchasing(decide))
    task_id = await ask(mesh, client)
    refused = await answer(mesh, client, key_of(task_id).to_id(), deep)
    assert refused == 'refused {"text":"value: nested more than 100 deep"}'


async def test_a_stranger_answers_nothing(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(purchasing(decide))
    task_id = await ask(mesh, client)
    mallory = await mesh.fake_peer("mallory")
    question_id = key_of(task_id).to_id()
    refused = await answer(mesh, mallory, question_id, {"approved": True})
    assert refused == """refused {"text":"'mallory' may not answer 'approval'"}"""
    assert await mesh.state(task_id) is TaskState.WAITING
    assert "'mallory' may not answer 'approval'" in mesh.dead_reasons("agent")


async def test_an_answer_under_another_name_gets_no_reply(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(purchasing(decide))
    mallory, bob = await mesh.fake_peer("mallory"), await mesh.fake_peer("bob")
    message = complete_message(
        AgentName("mallory"), "nonsense", TaskId("task"), True, response_queue(AgentName("bob"))
    )
    await mallory.send_control("agent", message)
    await mesh.idle()
    assert completions(bob) == completions(mallory) == []


async def test_a_message_that_answers_and_rejects_is_refused(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(purchasing(decide))
    task_id = await ask(mesh, client)
    id_ = key_of(task_id).to_id()
    name = AgentName("client")
    message = reject_message(name, id_, task_id, "no", response_queue(name))
    body = CompleteBody(question=id_, value={"approved": True}, rejects=id_).to_bytes()
    refused = await send_completion(mesh, client, replace(message, body=body))
    assert refused == 'refused {"text":"question: give either question or rejects"}'
    assert await mesh.state(task_id) is TaskState.WAITING


async def test_an_agent_answers_no_question_of_another(mesh: Mesh, client: FakePeer) -> None:
    """They share a database, but each has its own operators."""
    other = AgentName("other")
    await mesh.replica(purchasing(decide), purchasing(decide, other))
    task_id = await client.ask("other", 1)
    await mesh.events.wait(Step.CHECKPOINT, Phase.AFTER, task_id=task_id)
    await mesh.idle()
    question_id = key_of(task_id)._replace(agent=other).to_id()
    refused = await answer(mesh, client, question_id, {"approved": True})
    assert "question: it is a question of 'other'" in refused
    assert await mesh.state(task_id) is TaskState.WAITING


@BACKENDS
async def test_a_login_in_allow_answers(mesh: Mesh, client: FakePeer, durable: bool) -> None:
    async def decide_by_login(ctx: TaskExecutionContext) -> str:
        decision = await ctx.wait_for(approval, allow=["ada"])
        return f"{decision.approved}"

    await mesh.replica(purchasing(decide_by_login), durable=durable)
    await mesh.replica(purchasing(decide_by_login), durable=durable)
    task_id = await ask(mesh, client)
    message = complete_message(
        AgentName("client"),
        key_of(task_id).to_id(),
        task_id,
        {"approved": True},
        response_queue(AgentName("client")),
    )
    for _ in range(4):  # both replicas read from the shared queue
        await client.send_control("agent", replace(message, user_id="eve", message_id=new_id()))
    await mesh.idle()
    assert await mesh.state(task_id) is not TaskState.COMPLETED
    await client.send_control("agent", replace(message, user_id="ada"))
    assert await client.reply(task_id) == Ok("True")


@BACKENDS
async def test_a_rejected_question_fails_its_wait(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    failures: list[str] = []

    async def ask_twice(ctx: TaskExecutionContext) -> str:
        for number in range(2):
            try:
                await ctx.wait_for(approval, prompt=f"{number}")
            except PeerFailed as error:
                failures.append(str(error))
        return "both rejected"

    await mesh.replica(purchasing(ask_twice), durable=durable)
    task_id = await ask(mesh, client)
    question_id = key_of(task_id).to_id()
    sender = AgentName("client")
    message = reject_message(
        sender, question_id, task_id, "too dear", response_queue(AgentName("client"))
    )
    assert (await send_completion(mesh, client, message)).startswith("recorded")
    await mesh.idle()
    assert failures[0] == "question 'approval': error: rejected by 'client': too dear"
    other = replace(message, message_id=new_id())
    late = await send_completion(mesh, client, other)
    assert late.startswith("refused")
    assert "'approval' was rejected at" in late
    second = key_of(task_id, "2").to_id()
    message = reject_message(sender, second, task_id, "", response_queue(sender))
    assert (await send_completion(mesh, client, message)).startswith("recorded")
    assert await client.reply(task_id) == Ok("both rejected")


async def test_a_rejection_is_recorded_once(mesh: Mesh, client: FakePeer) -> None:
    async def ask_two(ctx: TaskExecutionContext) -> str:
        first, second = await ctx.gather_outcomes(
            ctx.wait_for(approval), ctx.wait_for("colour", str)
        )
        return f"{first.message if isinstance(first, Failed) else first} {second}"

    await mesh.replica(purchasing(ask_two))
    task_id = await ask(mesh, client)
    sender = AgentName("client")
    message = reject_message(
        sender, key_of(task_id).to_id(), task_id, "no", response_queue(sender)
    )
    for _ in range(2):  # delivered again
        assert (await send_completion(mesh, client, message)).startswith("recorded")
    other = await answer(mesh, client, key_of(task_id).to_id(), {"approved": True})
    assert "'approval' was rejected at " in other
    assert "by 'client'" in other


def test_an_earlier_release_cannot_read_a_rejection_as_an_answer() -> None:
    sender = AgentName("client")
    message = reject_message(sender, "an-id", TaskId("task"), "no", response_queue(sender))
    assert b'"question"' not in message.body


@pytest.mark.parametrize("body", [b"{}", b'{"question": "a", "rejects": "b"}', b'{"rejects": 1}'])
async def test_a_message_must_be_an_answer_or_a_rejection(
    mesh: Mesh, client: FakePeer, body: bytes
) -> None:
    await mesh.replica(purchasing(decide))
    sender = AgentName("client")
    message = reject_message(sender, "id", TaskId("task"), "no", response_queue(sender))
    assert (await send_completion(mesh, client, replace(message, body=body))).startswith("refused")
    assert len(mesh.dead_reasons("agent")) == 1


async def test_a_response_answers_no_question(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(purchasing(decide))
    task_id = await ask(mesh, client)
    body = ResponseBody(
        task=TaskBody(
            id="~?approval.1",
            status=TaskStatus(
                state=A2ATaskState.COMPLETED,
                message=A2AMessage(
                    message_id="1", role="ROLE_AGENT", parts=[Part(data={"approved": True})]
                ),
            ),
        )
    )
    forged = Message(
        type=MessageType.RESPONSE,
        body=body.to_bytes(),
        message_id="forged",
        correlation_id="~?approval.1",
        app_id="~?approval",
        headers={Header.PARENT_TASK.value: task_id},
    )
    await client.send_control("agent", forged)
    await client.send_control("agent", replace(forged, app_id="client"))
    await mesh.idle()
    assert await mesh.state(task_id) is TaskState.WAITING
    assert "app_id: '~?approval' is reserved" in mesh.dead_reasons("agent")


@BACKENDS
async def test_a_question_keeps_its_id_after_a_timeout(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    ids = set[str]()

    async def remind(ctx: TaskExecutionContext) -> str:
        wait = ctx.wait_for(approval, timeout=timedelta(seconds=10))
        ids.add(wait.id)
        for reminder in range(3):
            try:
                decision = await wait
            except TimeoutError:
                continue
            return f"{decision.approved} after {reminder}"
        return "nobody"

    await mesh.replica(purchasing(remind), durable=durable)
    task_id = await ask(mesh, client)
    await mesh.advance(13)
    (question_id,) = ids
    assert question_id == key_of(task_id).to_id()
    assert (await answer(mesh, client, question_id, {"approved": True})).startswith("recorded")
    assert await client.reply(task_id) == Ok("True after 1")


async def test_the_deadline_of_the_task_ends_a_question(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(purchasing(decide))
    task_id = await client.ask("agent", 1, deadline=mesh.deadline_in(10))
    await mesh.advance(13)
    outcome = await client.reply(task_id)
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.TIMEOUT
    assert "while it waited for 'approval'" in outcome.message


async def test_a_question_twice_at_once_is_refused(mesh: Mesh, client: FakePeer) -> None:
    async def twice(ctx: TaskExecutionContext) -> str:
        wait = ctx.wait_for(approval)
        await ctx.gather(wait, wait)
        return "never"

    await mesh.replica(purchasing(twice))
    task_id = await client.ask("agent", 1)
    outcome = await client.reply(task_id)
    assert isinstance(outcome, Failed)
    assert "it waits for question 'approval' twice at once" in outcome.message


@pytest.mark.parametrize(
    ("wait", "message"),
    [
        (lambda ctx: ctx.wait_for(approval, timeout=60), "nobody answered 'approval' in time"),
        (
            lambda ctx: ctx.receive(Signal("chat", str), timeout=60),
            "no signal 'chat' arrived in time",
        ),
    ],
    ids=["question", "signal"],
)
async def test_a_timeout_that_is_not_handled_is_the_kind_of_the_failure(
    mesh: Mesh, client: FakePeer, wait: Any, message: str
) -> None:
    @agent("agent")
    async def waiting(ctx: TaskExecutionContext, _: int) -> None:
        await wait(ctx)

    @agent("broken")
    async def broken(ctx: TaskExecutionContext, _: int) -> None:
        raise TimeoutError("the disk")

    await mesh.replica(waiting, broken)
    task_id = await client.ask("agent", 1)
    await mesh.advance(61)
    assert await client.reply(task_id) == Failed(FailureKind.TIMEOUT, message)
    assert await client.reply(await client.ask("broken", 1)) == Failed(
        FailureKind.ERROR, "TimeoutError: the disk"
    )


async def test_a_stateful_agent_asks_a_question(mesh: Mesh, client: FakePeer) -> None:
    class Buying(StatefulAgent[int, str, str]):
        name = "agent"

        async def on_request(
            self, ctx: TaskExecutionContext, request: int, /
        ) -> Paused | Done[str]:
            wait = ctx.wait_for(approval, timeout=60)
            return self.ask("s", {"decision": wait}, then=self.on_answer)

        async def on_answer(
            self, ctx: TaskExecutionContext, state: str, replies: Replies
        ) -> Paused | Done[str]:
            try:
                return self.done(f"approved: {replies.value('decision', approval).approved}")
            except (PeerFailed, TimeoutError) as error:
                return self.done(str(error))

    await mesh.replica(Buying())
    task_id = await ask(mesh, client)
    question_id = key_of(task_id, "1.g0").to_id()
    assert (await answer(mesh, client, question_id, {"approved": True})).startswith("recorded")
    assert await client.reply(task_id) == Ok("approved: True")
    rejected = await ask(mesh, client)
    key, sender = key_of(rejected, "1.g0"), AgentName("client")
    message = reject_message(sender, key.to_id(), rejected, "no", response_queue(sender))
    assert (await send_completion(mesh, client, message)).startswith("recorded")
    expected = "question 'approval': error: rejected by 'client': no"
    assert await client.reply(rejected) == Ok(expected)
    unanswered = await ask(mesh, client)
    await mesh.advance(61)
    assert await client.reply(unanswered) == Ok("nobody answered 'approval' in time")


def encoded(text: str) -> str:
    return urlsafe_b64encode(text.encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    "question_id",
    [
        "",
        "[]",
        "é",
        encoded("[" * 5000),
        encoded('["agent", "task"]'),
        encoded('["agent", "task", 1]'),
        encoded('["agent", "a\\u0000b", "c"]'),
        encoded('["agent", "\\ud800", "c"]'),
        encoded(f'["agent", "task", "{"x" * 300}"]'),
        encoded('["a/b", "task", "c"]'),
    ],
)
def test_what_is_no_id_of_a_question(question_id: str) -> None:
    with pytest.raises(QuestionNotOpen, match="is not the id of a question") as caught:
        QuestionKey.from_id(question_id)
    assert len(str(caught.value)) < 150


async def test_a_deeply_nested_id_leaves_others_alone(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(purchasing(decide))
    task_id = await ask(mesh, client)
    nested = await answer(mesh, client, encoded("[" * 5000), {"approved": True})
    assert "is not the id of a question" in nested
    (reason,) = mesh.dead_reasons("agent")
    assert "is not the id of a question" in reason
    question_id = key_of(task_id).to_id()
    assert (await answer(mesh, client, question_id, {"approved": True})).startswith("recorded")


async def test_answers_without_a_message_id_are_not_taken_for_each_other(
    mesh: Mesh, client: FakePeer
) -> None:
    async def decide_and_wait(ctx: TaskExecutionContext) -> None:
        await ctx.gather(ctx.wait_for(approval), ctx.wait_for("colour", str))

    await mesh.replica(purchasing(decide_and_wait))
    task_id = await ask(mesh, client)
    for approved in (True, False):
        message = complete_message(
            AgentName("client"),
            key_of(task_id).to_id(),
            task_id,
            {"approved": approved},
            response_queue(AgentName("client")),
        )
        await client.send_control("agent", replace(message, message_id=""))
        await mesh.idle()
    first, second = completions(client)
    assert first.startswith("recorded")
    assert second.startswith("refused")


@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        (lambda ctx: ctx.wait_for(approval, allow="ada"), "a list of logins, such as ['ada']"),
        (lambda ctx: ctx.wait_for(approval, allow=5), "a list of logins, such as ['ada'], not 5"),
        (lambda ctx: ctx.wait_for(approval, allow=[""]), "allow has '', which is not the name"),
        (lambda ctx: ctx.wait_for(approval, allow=["a", 1]), "allow has 1, which is not the"),
        (lambda ctx: ctx.wait_for(approval, prompt=1), "prompt must be a string, not int"),
        (lambda ctx: ctx.wait_for(approval, prompt="\ud800"), "prompt cannot be encoded"),
        (
            lambda ctx: ctx.wait_for(approval, prompt="x" * 10_001),
            "prompt has 10,001 characters; at most 10,000 are shown to people",
        ),
        (lambda ctx: ctx.wait_for("colour"), "'colour' needs the type of its answer"),
    ],
)
async def test_arguments_that_nobody_could_answer(
    mesh: Mesh, client: FakePeer, wait: Callable[[Any], Any], expected: str
) -> None:
    async def ask_wrongly(ctx: TaskExecutionContext) -> Any:
        return await wait(ctx)

    await mesh.replica(purchasing(ask_wrongly))
    outcome = await client.reply(await client.ask("agent", 1))
    assert isinstance(outcome, Failed)
    assert expected in outcome.message
