"""Signals to tasks, and their values, as messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import FunctionAgent, agent
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import complete_message, read_message, signal_message
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.mailbox import MAX_SIGNAL_BYTES, MAX_SIGNALS_OF_SENDER
from meshpoint.model.messages import Header, Message, MessageType, response_queue
from meshpoint.model.outcomes import Ok
from meshpoint.model.questions import Question, QuestionKey
from meshpoint.model.signals import Signal
from meshpoint.model.tasks import TaskState

from .agents import Gate
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])
Run = Callable[[TaskExecutionContext], Coroutine[Any, Any, Any]]
chat = Signal("chat", str)
approval = Question("approval", bool)
RECORDED = 'recorded {"text":""}'


def chatting(run: Run) -> FunctionAgent[Any, Any]:
    @agent("agent")
    async def wrapper(ctx: TaskExecutionContext, _: Any) -> Any:
        return await run(ctx)

    return wrapper


async def receive_two(ctx: TaskExecutionContext) -> str:
    first = await ctx.receive(chat)
    second = await ctx.receive(chat)
    return f"{first} {second}"


async def waiting(mesh: Mesh, client: FakePeer) -> TaskId:
    """Start a task that waits, and wait for its checkpoint."""
    task_id = await client.ask("agent", 1)
    await mesh.events.wait(Step.CHECKPOINT, Phase.AFTER, task_id=task_id)
    await mesh.idle()
    return task_id


def a_signal(sender: FakePeer, task_id: str, value: Any, signal_id: str = "") -> Message:
    name = AgentName(sender.name)
    return signal_message(
        name, TaskId(task_id), "chat", signal_id or new_id(), value, response_queue(name)
    )


async def exchange(mesh: Mesh, sender: FakePeer, message: Message, **options: Any) -> str:
    """Send a message, and return the last reply to it."""
    await sender.send_control("agent", message, **options)
    for _ in range(50):
        await mesh.idle()
        if found := replies(sender, message):
            return found[-1]
    return "no reply"


def replies(sender: FakePeer, message: Message) -> list[str]:
    return [
        f"{each.headers['x-completed']} {each.body.decode()}"
        for each in sender.messages
        if each.type is message.type and each.correlation_id == message.message_id
    ]


def _is_recorded(sender: FakePeer, message: Message) -> bool:
    return RECORDED in replies(sender, message)


@BACKENDS
async def test_a_waiting_task_receives_a_signal(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    for _ in range(2):
        await mesh.replica(chatting(receive_two), durable=durable)
    task_id = await waiting(mesh, client)
    for value in ("a", "b"):
        message = a_signal(client, task_id, value)
        await exchange(mesh, client, message)
        assert RECORDED in replies(client, message)
    assert await client.reply(task_id) == Ok("a b")


@BACKENDS
async def test_a_signal_to_the_first_segment_writes_its_row(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    released = asyncio.Event()

    async def wait_first(ctx: TaskExecutionContext) -> str:
        await released.wait()
        return await receive_two(ctx)

    for _ in range(2):
        await mesh.replica(chatting(wait_first), durable=durable)
    task_id = await client.ask("agent", 1)
    await mesh.events.wait(Step.SEGMENT, Phase.BEFORE, task_id=task_id)
    messages = [a_signal(client, task_id, value) for value in ("a", "b")]
    for message in messages:
        await exchange(mesh, client, message)
        await client.wait_until(partial(_is_recorded, client, message))
    if durable:
        assert await mesh.state(task_id) is TaskState.RUNNING
    released.set()
    assert await client.reply(task_id) == Ok("a b")


async def test_a_signal_accepted_in_the_first_segment_survives_a_crash(
    mesh: Mesh, client: FakePeer
) -> None:
    """The signal was acknowledged, so the row that the next replica rescues has it."""
    runs: list[str] = []

    async def hang_once(ctx: TaskExecutionContext) -> str:
        runs.append("run")
        if len(runs) == 1:
            await asyncio.Event().wait()
        return await receive_two(ctx)

    first = await mesh.replica(chatting(hang_once))
    task_id = await client.ask("agent", 1)
    await mesh.events.wait(Step.SEGMENT, Phase.BEFORE, task_id=task_id)
    message = a_signal(client, task_id, "a")
    await exchange(mesh, client, message)
    await client.wait_until(partial(_is_recorded, client, message))
    await first.crash()
    await mesh.replica(chatting(hang_once))
    await mesh.advance(60)
    await exchange(mesh, client, message)  # repeated: the reply may have been lost
    await exchange(mesh, client, a_signal(client, task_id, "b"))
    assert await client.reply(task_id) == Ok("a b")


async def test_an_unknown_task_is_not_open(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(chatting(receive_two))
    reply = await exchange(mesh, client, a_signal(client, "unknown", "a"))
    assert reply.startswith("not-open")
    read = read_message(
        AgentName("client"), TaskId("unknown"), "key", response_queue(AgentName("client"))
    )
    assert (await exchange(mesh, client, read)).startswith("not-open")


async def test_a_read_or_a_strangers_signal_writes_no_row(mesh: Mesh, client: FakePeer) -> None:
    gate = Gate()

    async def wait_at_gate(ctx: TaskExecutionContext) -> str:
        await gate()
        return "done"

    replica = await mesh.replica(chatting(wait_at_gate))
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    mallory, name = await mesh.fake_peer("mallory"), AgentName("client")
    read = read_message(name, task_id, "key", response_queue(name))
    await exchange(mesh, client, read)
    await exchange(mesh, mallory, a_signal(mallory, task_id, "a"))
    await mesh.idle()
    assert RECORDED in replies(client, read)
    assert "begin" not in replica.store.calls
    gate.opened.set()
    assert await client.reply(task_id) == Ok("done")


@BACKENDS
async def test_a_stranger_can_neither_signal_nor_read(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    async def set_and_receive(ctx: TaskExecutionContext) -> str:
        await ctx.set_value("key", "secret")
        return await receive_two(ctx)

    await mesh.replica(chatting(set_and_receive), durable=durable)
    task_id = await waiting(mesh, client)
    mallory = await mesh.fake_peer("mallory")
    name = AgentName("mallory")
    for message, requester in (
        (a_signal(mallory, task_id, "a"), ""),
        (read_message(name, task_id, "key", response_queue(name)), ',"requester":"client"'),
    ):
        await exchange(mesh, mallory, message)
        text = f'"text":"task {task_id} belongs to another requester"'
        assert f"refused {{{text}{requester}}}" in replies(mallory, message)
    assert mesh.dead_reasons("agent") == 2 * [f"task {task_id} belongs to another requester"]
    own = AgentName("client")
    read = read_message(own, task_id, "key", response_queue(own))
    await exchange(mesh, client, read)
    assert 'recorded {"text":"","value":"secret","isSet":true}' in replies(client, read)
    unset = read_message(own, task_id, "other", response_queue(own))
    await exchange(mesh, client, unset)
    assert RECORDED in replies(client, unset)


@BACKENDS
async def test_an_operator_signals_every_task(mesh: Mesh, client: FakePeer, durable: bool) -> None:
    for _ in range(2):
        await mesh.replica(chatting(receive_two), durable=durable, operator_logins=("ops-login",))
    task_id = await waiting(mesh, client)
    operator = await mesh.fake_peer("ops")
    for value in ("a", "b"):
        message = a_signal(operator, task_id, value)
        await exchange(mesh, operator, replace(message, user_id="ops-login"))
        assert RECORDED in replies(operator, message)
    assert await client.reply(task_id) == Ok("a b")


async def test_a_forged_forward_is_not_accepted(mesh: Mesh, client: FakePeer) -> None:
    """Only on a private queue does the agent's own name say that a replica has forwarded it."""
    await mesh.replica(chatting(receive_two))
    task_id = await waiting(mesh, client)
    mallory = await mesh.fake_peer("mallory")
    message = replace(
        a_signal(mallory, task_id, "a"), headers={Header.ON_BEHALF_OF.value: "client"}
    )
    await exchange(mesh, mallory, message)
    assert await mesh.state(task_id) is TaskState.WAITING
    posing = replace(message, app_id="agent", message_id=new_id())
    await exchange(mesh, mallory, posing)
    assert await mesh.state(task_id) is TaskState.WAITING
    assert any("reply_to" in reason for reason in mesh.dead_reasons("agent"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "JSON"),
        (b'{"id":"x"}', "signal"),
        (b'{"id":"x","signal":"a b","signalId":"1"}', "signal: not a valid signal name"),
        (b'{"id":"","signal":"chat","signalId":"1"}', "id: must be printable"),
        (b'{"id":"x","signal":"chat","signalId":"\\u0000"}', "signalId: must be printable"),
        (b'{"id":"x","signal":"chat","signalId":"' + b"1" * 300 + b'"}', "signalId"),
        (
            b'{"id":"x","signal":"chat","signalId":"1","value":' + b"[" * 150 + b"]" * 150 + b"}",
            "value: nested more than 100 deep",
        ),
    ],
)
async def test_an_unreadable_signal_is_refused(
    mesh: Mesh, client: FakePeer, body: bytes, reason: str
) -> None:
    await mesh.replica(chatting(receive_two))
    message = replace(a_signal(client, "x", 1), body=body)
    assert (await exchange(mesh, client, message)).startswith("refused")
    assert reason in mesh.dead_reasons("agent")[0]


@pytest.mark.parametrize("body", [b"{}", b'{"id":"x","key":"\\n"}', b'{"id":"\\u0000","key":"k"}'])
async def test_an_unreadable_read_is_refused(mesh: Mesh, client: FakePeer, body: bytes) -> None:
    await mesh.replica(chatting(receive_two))
    message = replace(a_signal(client, "x", 1), type=MessageType.READ, body=body)
    assert (await exchange(mesh, client, message)).startswith("refused")
    assert len(mesh.dead_reasons("agent")) == 1


async def test_a_large_signal_is_refused_to_its_sender(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(chatting(receive_two))
    task_id = await waiting(mesh, client)
    reply = await exchange(mesh, client, a_signal(client, task_id, "x" * MAX_SIGNAL_BYTES))
    assert reply == (
        f'refused {{"text":"the value has {MAX_SIGNAL_BYTES + 2} bytes; '
        f'{MAX_SIGNAL_BYTES} is the maximum"}}'
    )


async def test_too_many_signals_are_refused_to_their_sender(mesh: Mesh, client: FakePeer) -> None:
    async def nap(ctx: TaskExecutionContext) -> None:
        await ctx.sleep(timedelta(days=1))

    await mesh.replica(chatting(nap))
    task_id = await waiting(mesh, client)
    for number in range(MAX_SIGNALS_OF_SENDER):
        await client.send_control("agent", a_signal(client, task_id, number))
    await mesh.idle()
    reply = await exchange(mesh, client, a_signal(client, task_id, "one more"))
    assert reply.startswith("refused")
    assert "unreceived signals" in reply


async def test_an_answer_to_a_running_task_is_kept(mesh: Mesh, client: FakePeer) -> None:
    """Its wait has timed out. The id is valid until it is answered."""
    released = asyncio.Event()

    async def ask_twice(ctx: TaskExecutionContext) -> str:
        wait = ctx.wait_for(approval, timeout=60)
        try:
            return "at once" if await wait else "no"
        except TimeoutError:
            await released.wait()
        first = await wait
        second = await ctx.wait_for(approval)
        return f"later: {first}, {second}"

    await mesh.replica(chatting(ask_twice))
    task_id = await waiting(mesh, client)
    await mesh.advance(61)
    assert await mesh.state(task_id) is TaskState.RUNNING
    name = AgentName("client")

    async def answer(place: str, value: bool) -> str:
        key = QuestionKey(AgentName("agent"), task_id, TaskId(f"~?approval.{place}"))
        message = complete_message(name, key.to_id(), task_id, value, response_queue(name))
        return await exchange(mesh, client, message)

    assert (await answer("1", True)).startswith("recorded")
    assert (await answer("1", False)).startswith("refused")
    released.set()
    await mesh.idle()
    assert await mesh.state(task_id) is TaskState.WAITING  # for the second question
    assert (await answer("1", False)).startswith("refused")
    await answer("2", False)
    assert await client.reply(task_id) == Ok("later: True, False")
