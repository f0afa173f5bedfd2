"""Checkpointing switched on and off while tasks wait: no answer is lost and no task runs twice."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint import Mesh as Connection
from meshpoint.agents.function import agent
from meshpoint.engine.completions import Completions
from meshpoint.errors import AnswerRefused, BrokerUnavailable
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Message
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.questions import QuestionKey
from meshpoint.model.tasks import TaskState

from .agents import Gate, Steps, asker, doubler, gated_after, sequential_agent, summer
from .mesh import Mesh, RunningReplica
from .resuming import failing_until_fixed

OFF: dict[str, Any] = {"checkpointing": False}
NO_DRAIN: dict[str, Any] = {"drain_timeout": timedelta(0)}


async def start_waiting(
    mesh: Mesh, client: FakePeer, peer: FakePeer, count: int = 1
) -> list[tuple[TaskId, Message]]:
    """Start tasks of `asker`, one after the other, and return each with its open call."""
    waiting = []
    for _ in range(count):
        task_id = await client.ask("asker", len(peer.requests))
        waiting.append((task_id, await peer.wait_for_request(len(peer.requests) + 1)))
        await mesh.idle()
    return waiting


async def answer_all(
    mesh: Mesh, client: FakePeer, peer: FakePeer, waiting: list[tuple[TaskId, Message]]
) -> None:
    """Answer the calls, and check that each task completes with its own answer, once."""
    for number, (_, call) in enumerate(waiting):
        await peer.respond(call, number)
    await mesh.advance(2)
    for number, (task_id, _) in enumerate(waiting):
        assert await client.reply(task_id) == Ok({"peer": number})
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0
    assert mesh.dead_reasons("asker") == []
    assert mesh.events.matching(Step.LATE) == []


async def states(mesh: Mesh) -> set[TaskState]:
    return {task.state for task in await mesh.store.tasks()}


async def end(replica: RunningReplica, how: str) -> None:
    await (replica.crash() if how == "crash" else replica.drain())


@pytest.mark.parametrize("how", ["drain", "crash"])
async def test_a_replica_with_checkpointing_off_resumes_the_tasks_in_the_database(
    mesh: Mesh, client: FakePeer, peer: FakePeer, how: str
) -> None:
    first = await mesh.replica(asker("asker", "peer"))
    waiting = await start_waiting(mesh, client, peer, 4)
    await end(first, how)
    await mesh.replica(asker("asker", "peer"), **OFF)
    await answer_all(mesh, client, peer, waiting)
    assert await states(mesh) == {TaskState.COMPLETED}
    assert len(peer.requests) == 4


async def test_a_resumed_task_pauses_in_the_database_again(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    first = await mesh.replica(summer)
    other_doubler = await mesh.fake_peer("doubler")
    task_id = await client.ask("summer", [1])
    call = await other_doubler.wait_for_request()
    await mesh.idle()
    await first.drain()
    await mesh.replica(summer, **OFF)
    await other_doubler.respond(call, 5)
    assert await client.reply(task_id) == Ok(5)
    assert await mesh.state(task_id) is TaskState.COMPLETED


async def test_with_checkpointing_off_new_tasks_are_looked_up_and_write_no_row(
    mesh: Mesh, client: FakePeer
) -> None:
    await mesh.replica(doubler, summer, **OFF)
    assert await client.reply(await client.ask("summer", [1, 2, 3])) == Ok(12)
    assert await mesh.store.tasks() == []
    for replica in mesh.replicas:
        assert "lookup" in replica.store.calls
        assert {"begin", "pause", "store_replies"}.isdisjoint(replica.store.calls)


async def test_subtasks_follow_the_switch(mesh: Mesh, client: FakePeer) -> None:
    steps = Steps()
    replica = await mesh.replica(sequential_agent(steps, "a", "b"), **OFF)
    assert await client.reply(await client.ask("agent", 1)) == Ok(3)
    assert await mesh.store.tasks() == []
    assert "begin" in replica.memory.calls


@pytest.mark.parametrize("how", ["drain", "crash"])
async def test_switched_on_the_tasks_in_memory_run_again_in_the_database(
    mesh: Mesh, client: FakePeer, peer: FakePeer, how: str
) -> None:
    first = await mesh.replica(asker("asker", "peer"), **OFF, **NO_DRAIN)
    waiting = await start_waiting(mesh, client, peer, 3)
    await end(first, how)
    await mesh.replica(asker("asker", "peer"))
    await peer.wait_for_request(6)
    await mesh.idle()
    assert await states(mesh) == {TaskState.WAITING}
    again = [(task_id, peer.requests[3 + n]) for n, (task_id, _) in enumerate(waiting)]
    await answer_all(mesh, client, peer, again)


@pytest.mark.parametrize("off_first", [True, False])
async def test_replicas_with_both_settings_serve_at_once(
    mesh: Mesh, client: FakePeer, peer: FakePeer, off_first: bool
) -> None:
    for checkpointing in (not off_first, off_first):
        await mesh.replica(asker("asker", "peer"), checkpointing=checkpointing)
    waiting = await start_waiting(mesh, client, peer, 8)
    assert len(await mesh.store.tasks()) == 4
    await answer_all(mesh, client, peer, waiting)
    assert len(peer.requests) == 8


async def test_switched_off_and_on_again_while_tasks_wait(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer", "other"))
    other = await mesh.fake_peer("other")
    task_id = await client.ask("asker", 1)
    call, other_call = await peer.wait_for_request(), await other.wait_for_request()
    await mesh.idle()
    await replica.drain()
    replica = await mesh.replica(asker("asker", "peer", "other"), **OFF)
    await peer.respond(call, 1)
    await mesh.idle()
    await replica.drain()
    await mesh.replica(asker("asker", "peer", "other"))
    await other.respond(other_call, 2)
    assert await client.reply(task_id) == Ok({"peer": 1, "other": 2})


async def test_a_running_task_in_the_database_is_rescued_with_checkpointing_off(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()
    first = await mesh.replica(gated_after("asker", "peer", gate))
    ((task_id, call),) = await start_waiting(mesh, client, peer)
    await peer.respond(call, 1)
    await gate.wait_reached()
    await first.crash()
    gate.opened.set()
    await mesh.replica(gated_after("asker", "peer", gate), **OFF)
    await mesh.advance(40)
    assert await client.reply(task_id) == Ok({"peer": 1})
    assert len(mesh.events.matching(Step.RESCUE, Phase.AFTER)) == 1


async def test_a_timeout_in_the_database_expires_with_checkpointing_off(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    first = await mesh.replica(asker("asker", "peer", timeout=timedelta(seconds=30)))
    ((task_id, _),) = await start_waiting(mesh, client, peer)
    await first.drain()
    await mesh.replica(asker("asker", "peer"), **OFF)
    await mesh.advance(40)
    assert await client.reply(task_id) == Ok({"peer": "timeout"})


async def test_a_redelivered_request_finds_its_task_in_the_database(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    request = client.request(1)
    first = await mesh.replica(asker("asker", "peer"))
    await client.send("asker", request)
    call = await peer.wait_for_request()
    await mesh.idle()
    await first.drain()
    await mesh.replica(asker("asker", "peer"), **OFF)
    await client.send("asker", request)
    await mesh.advance(1)
    assert len(peer.requests) == 1
    await peer.respond(call, 1)
    assert await client.reply(request.correlation_id) == Ok({"peer": 1})
    await client.send("asker", request)
    await mesh.idle()
    assert client.replies(request.correlation_id) == [Ok({"peer": 1})] * 2
    assert len(peer.requests) == 1


@pytest.mark.parametrize("checkpointing", [True, False])
async def test_a_cancel_reaches_a_waiting_task_of_either_setting(
    mesh: Mesh, client: FakePeer, peer: FakePeer, checkpointing: bool
) -> None:
    first = await mesh.replica(asker("asker", "peer"), checkpointing=checkpointing)
    ((task_id, call),) = await start_waiting(mesh, client, peer)
    if checkpointing:
        await first.drain()
    else:
        first.broker.locked_addresses.add("nothing")
    await mesh.replica(asker("asker", "peer"), **OFF)
    await client.cancel("asker", task_id)
    await mesh.advance(2)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert await peer.wait_for_cancels() == [call.correlation_id]


async def test_a_cancel_before_its_request_counts_with_checkpointing_off(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    first = await mesh.replica(asker("asker", "peer"), **OFF)
    request = client.request(1)
    await client.cancel("asker", request.correlation_id)
    await mesh.idle()
    await first.drain()
    await mesh.replica(asker("asker", "peer"), **OFF)
    await client.send("asker", request)
    reply = await client.reply(request.correlation_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert peer.requests == []


async def test_a_resumed_requester_resumes_a_task_in_the_database(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    child, is_fixed = failing_until_fixed(steps, "a", "b")
    first = await mesh.replica(child)
    task_id = await client.ask("agent", 1, parent_task="parent")
    assert isinstance(await client.reply(task_id), Failed)
    await mesh.idle()
    await first.drain()
    await mesh.replica(child, **OFF)
    is_fixed[0] = True
    request = client.request(1, task_id, parent_task="parent", resume="00000001")
    await client.send("agent", replace(request, message_id=f"{task_id}.1"))
    await mesh.advance(2)
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert Ok(3) in client.replies()
    assert steps.started.names == ["a", "b"]


async def test_an_agent_says_at_the_start_that_tasks_live_in_memory(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "meshpoint")

    def lines() -> list[str]:
        return [each.getMessage() for each in caplog.records if "memory" in each.getMessage()]

    await mesh.replica(doubler)
    assert lines() == []
    await mesh.replica(doubler, **OFF)
    (line,) = lines()
    assert line.startswith("agent doubler: stateless_checkpointing is off: ")


async def test_with_checkpointing_off_a_replica_needs_its_private_queue(mesh: Mesh) -> None:
    replica = await mesh.launch(doubler, **OFF, startup_timeout=timedelta(seconds=5))
    replica.broker.locked_addresses.add("private")
    await mesh.advance(10)
    with pytest.raises(BrokerUnavailable, match="private queue"):
        await replica.task
    mesh.replicas.clear()


@agent("asking")
async def asking(ctx: TaskExecutionContext, number: int) -> bool:
    """Asks a question."""
    return await ctx.wait_for("approval", bool)


async def test_a_task_in_memory_gets_its_answer_while_the_database_is_unavailable(
    mesh: Mesh, connection: Connection
) -> None:
    replicas = [await mesh.replica(asking, **OFF) for _ in range(2)]
    tasks = [await connection.send("asking", number) for number in range(4)]
    await mesh.idle()
    waits = [(await task.status()).waits[0] for task in tasks]
    for replica in replicas:
        replica.store.fail_always("find_questions")
    for number in (1, 0, 3, 2):  # so that the other replica gets the first one
        question_id = waits[number].question_id
        assert question_id is not None
        await connection.complete(question_id, True)
        assert await tasks[number].result() is True


async def test_an_answer_to_a_task_in_the_database_waits_for_it_without_delaying_others(
    mesh: Mesh, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwarded, forward = list[bytes](), Completions._forward

    async def forward_and_count(completions: Completions, message: Message) -> None:
        forwarded.append(message.body)
        await forward(completions, message)

    monkeypatch.setattr(Completions, "_forward", forward_and_count)
    recording = await mesh.replica(asking)
    stored = await connection.send("asking", 1)
    await mesh.idle()
    (stored_wait,) = (await stored.status()).waits
    await recording.crash()
    replica = await mesh.replica(asking, **OFF)
    in_memory = await connection.send("asking", 2)
    await mesh.idle()
    (wait,) = (await in_memory.status()).waits
    replica.store.fail_always("find_questions")
    assert stored_wait.question_id is not None
    assert wait.question_id is not None
    answering = asyncio.ensure_future(connection.complete(stored_wait.question_id, True))
    await mesh.idle()
    await mesh.advance(1)
    assert len(forwarded) == 1, "an attempt during the outage has forwarded it again"
    await connection.complete(wait.question_id, False)
    assert await in_memory.result() is False
    replica.store.heal()
    await mesh.advance(2)
    await answering
    assert await stored.result() is True


async def test_with_checkpointing_off_an_answer_to_an_ended_task_is_refused(
    mesh: Mesh, connection: Connection
) -> None:
    replica = await mesh.replica(doubler)
    task_id = (await connection.send("doubler", 1)).id
    await mesh.idle()
    await replica.crash()
    await mesh.replica(doubler, **OFF)
    question = QuestionKey(AgentName("doubler"), TaskId(task_id), TaskId("~?approval.1"))
    with pytest.raises(AnswerRefused, match="its task has ended"):
        await connection.complete(question.to_id(), True)
