"""Checkpointing switched off and the database unavailable: new tasks run, others wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.envelopes import (
    attach_message,
    cancel_message,
    read_message,
    signal_message,
)
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId
from meshpoint.model.messages import Message, MessageType, private_queue, response_queue
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.signals import Signal
from meshpoint.model.tasks import TaskState

from .agents import Gate, Steps, asker, doubler, sequential_agent
from .mesh import Mesh, RunningReplica
from .resuming import failing_until_fixed

OFF: dict[str, Any] = {"checkpointing": False}
chat = Signal("chat", int)
GONE = private_queue(AgentName("client"), ReplicaId("gone"))


async def replica_in_outage(mesh: Mesh, agent: Any, **options: Any) -> RunningReplica:
    """A replica with checkpointing off whose database has become unavailable."""
    replica = await mesh.replica(agent, **OFF, **options)
    replica.store.unavailable = True
    await mesh.advance(2)
    return replica


async def redeliver(
    mesh: Mesh, client: FakePeer, requests: Sequence[Message], **options: Any
) -> RunningReplica:
    """A replica in an outage that receives the requests again after another's crash."""
    first = await mesh.replica(asker("asker", "peer"), **OFF)
    first.store.before["lookup"] = Gate()  # never opened
    for request in requests:
        await client.send("asker", request)
    await mesh.idle()
    second = await replica_in_outage(mesh, asker("asker", "peer"), **options)
    await first.crash()
    await mesh.idle()
    return second


@pytest.mark.parametrize("is_known", [True, False])
async def test_first_deliveries_run_without_the_database(
    mesh: Mesh, client: FakePeer, peer: FakePeer, is_known: bool
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), **OFF)
    replica.store.unavailable = True
    if is_known:
        await mesh.advance(5)
    task_id = await client.ask("asker", 1)
    await peer.respond(await peer.wait_for_request(), 2)
    assert await client.reply(task_id) == Ok({"peer": 2})
    assert len(mesh.events.matching(Step.STORE_UNAVAILABLE)) == 1
    await mesh.idle()
    assert mesh.unacked("asker") == 0


async def test_subtasks_run_without_the_database(mesh: Mesh, client: FakePeer) -> None:
    await replica_in_outage(mesh, sequential_agent(Steps(), "a", "b"))
    assert await client.reply(await client.ask("agent", 1)) == Ok(3)


async def test_a_redelivery_waits_for_the_database(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    request = client.request(1)
    second = await redeliver(mesh, client, [request])
    new_task = await client.ask("asker", 2)
    await peer.respond(await peer.wait_for_request(), "new")
    assert await client.reply(new_task) == Ok({"peer": "new"})
    await mesh.advance(10)
    assert len(peer.requests) == 1
    second.store.unavailable = False
    await mesh.advance(3)
    await peer.respond(await peer.wait_for_request(2), "redelivered")
    assert await client.reply(request.correlation_id) == Ok({"peer": "redelivered"})
    await mesh.idle()
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0
    assert second.worker.runtime.slots.free == 10


async def test_a_redelivery_whose_task_has_a_row_does_not_run_again(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """It paused in the database, and its replica died before the request was acked."""
    first = await mesh.replica(asker("asker", "peer"))
    first.store.before["confirm_sent"] = Gate()  # never opened
    task_id = await client.ask("asker", 1)
    call = await peer.wait_for_request()
    await mesh.idle()
    second = await replica_in_outage(mesh, asker("asker", "peer"))
    await first.crash()
    await peer.respond(call, 1)
    await mesh.advance(10)
    assert client.replies() == []
    second.store.unavailable = False
    await mesh.advance(5)
    assert set(map(str, client.replies(task_id))) == {str(Ok({"peer": 1}))}
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert len({request.correlation_id for request in peer.requests}) == 1
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0


async def test_waiting_redeliveries_leave_capacity_for_new_requests(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    requests = [client.request(number) for number in range(6)]
    second = await redeliver(mesh, client, requests, max_concurrency=2)
    new_tasks = [await client.ask("asker", number) for number in range(3)]
    for count, new_task in enumerate(new_tasks, 1):
        await peer.respond(await peer.wait_for_request(count), "new")
        assert await client.reply(new_task) == Ok({"peer": "new"})
    second.store.unavailable = False
    await mesh.advance(3)
    for count, _ in enumerate(requests, 4):
        await peer.respond(await peer.wait_for_request(count), "redelivered")
    await mesh.advance(2)
    for request in requests:
        assert await client.reply(request.correlation_id) == Ok({"peer": "redelivered"})
    await mesh.idle()
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0
    assert second.broker.prefetches[-1] == 2


async def test_a_copy_of_a_waiting_redelivery_waits_too(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    request = client.request(1)
    second = await redeliver(mesh, client, [request])
    await client.send("asker", request)
    await mesh.advance(5)
    assert peer.requests == []
    second.store.unavailable = False
    await mesh.advance(3)
    await peer.respond(await peer.wait_for_request(), 1)
    assert await client.reply(request.correlation_id) == Ok({"peer": 1})
    assert len(peer.requests) == 1
    await mesh.idle()
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0


async def test_a_resumed_requester_waits_for_the_database(mesh: Mesh, client: FakePeer) -> None:
    steps = Steps()
    child, is_fixed = failing_until_fixed(steps, "a", "b")
    first = await mesh.replica(child)
    task_id = await client.ask("agent", 1, parent_task="parent")
    assert isinstance(await client.reply(task_id), Failed)
    await mesh.idle()
    await first.drain()
    replica = await replica_in_outage(mesh, child)
    is_fixed[0] = True
    await client.send("agent", client.request(1, task_id, parent_task="parent", resume="00000001"))
    await mesh.advance(5)
    assert steps.started.names == ["a", "b"]
    assert len(client.replies()) == 1
    replica.store.unavailable = False
    await mesh.advance(5)
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert steps.started.names == ["a", "b"]


async def test_a_task_in_memory_recognizes_its_own_redelivery(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await replica_in_outage(mesh, asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    call = await peer.wait_for_request()
    await mesh.idle()
    replica.broker.lose_connection()
    await mesh.advance(2)
    await peer.respond(call, 1)
    await mesh.advance(2)
    assert client.replies() == []  # the request may be at another replica: a row must decide
    replica.store.unavailable = False
    await mesh.advance(10)
    assert await client.reply(task_id) == Ok({"peer": 1})
    assert len(peer.requests) == 1
    assert mesh.unacked("asker") == 0


@pytest.mark.parametrize("has_released", [True, False])
async def test_a_drain_hands_over_waiting_redeliveries(
    mesh: Mesh, client: FakePeer, peer: FakePeer, has_released: bool
) -> None:
    options = {"drain_timeout": timedelta(0)} if has_released else {}
    request = client.request(1)
    second = await redeliver(mesh, client, [request], **options)
    await second.drain()
    assert mesh.waiting("asker") == 1
    await mesh.replica(asker("asker", "peer"))
    await peer.respond(await peer.wait_for_request(), 1)
    assert await client.reply(request.correlation_id) == Ok({"peer": 1})


@pytest.mark.parametrize("pauses", [True, False])
async def test_an_undeliverable_reply_holds_up_no_others(
    mesh: Mesh, client: FakePeer, peer: FakePeer, pauses: bool
) -> None:
    """It waits in memory, and is delivered once its queue exists."""
    agent = asker("agent", "peer") if pauses else doubler
    replica = await replica_in_outage(mesh, agent, max_concurrency=1)
    for number in range(3):
        await client.ask(agent.name, number, f"task-{number}", reply_to=GONE)
        if pauses:
            await peer.respond(await peer.wait_for_request(number + 1), number)
        await mesh.advance(1)
    task_id = await client.ask(agent.name, 4)
    if pauses:
        await peer.respond(await peer.wait_for_request(4), 8)
    assert await client.reply(task_id) == Ok({"peer": 8} if pauses else 8)
    await client._broker.declare(AgentName("client"), ReplicaId("gone"))
    replica.store.unavailable = False
    await mesh.advance(20)
    assert await client.depth(GONE) == 3
    assert mesh.unacked(agent.name) == 0


async def test_ready_tasks_in_memory_do_not_wait_for_the_database(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await replica_in_outage(mesh, asker("asker", "peer"))
    due = replica.store.calls.count("due")
    replica.worker.tasks.tasks_ready.set()
    await mesh.idle()
    assert replica.store.calls.count("due") == due
    assert not replica.worker.tasks.tasks_ready.is_set()


async def test_commands_for_tasks_in_the_database_hold_up_no_others(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    sender, reply_to = AgentName("client"), response_queue(AgentName("client"))
    first = await mesh.replica(asker("asker", "peer"))
    old = TaskId(await client.ask("asker", 1))
    await peer.wait_for_request()
    await mesh.idle()
    await first.crash()
    replica = await replica_in_outage(mesh, asker("asker", "peer"))
    commands = [
        attach_message(sender, old, reply_to),
        attach_message(sender, old, reply_to, query="token"),
        read_message(sender, old, "progress", reply_to),
        signal_message(sender, old, "chat", "signal-1", 7, reply_to),
        cancel_message(sender, old),
    ]
    for command in commands:
        await client.send_control("asker", command)
    new = await client.ask("asker", 2)
    await peer.wait_for_request(2)
    await client.send_control("asker", cancel_message(sender, TaskId(new)))
    assert isinstance(await client.reply(new), Failed)
    await mesh.advance(10)
    assert client.replies(old) == []
    replica.store.unavailable = False
    await mesh.advance(3)
    assert await mesh.state(old) is TaskState.CANCELLED
    assert len(client.replies(old)) == 2, "the attach added an address"
    answered = {message.type for message in client.messages}
    assert answered >= {MessageType.STATUS, MessageType.READ, MessageType.SIGNAL}
    assert mesh.dead_letters("asker") == []


async def test_too_many_waiting_messages_delay_commands_only(
    mesh: Mesh, client: FakePeer, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses to tasks in memory arrive in the private queue."""
    monkeypatch.setattr("meshpoint.engine.postponed._MAX_CAPACITY", 4)
    sender, reply_to = AgentName("client"), response_queue(AgentName("client"))
    first = await mesh.replica(asker("asker", "peer"))
    old = TaskId(await client.ask("asker", 1))
    await peer.wait_for_request()
    await mesh.idle()
    await first.crash()
    replica = await replica_in_outage(mesh, asker("asker", "peer"), response_prefetch=2)
    cancelled = TaskId(await client.ask("asker", 2))
    await peer.wait_for_request(2)
    answered = TaskId(await client.ask("asker", 3))
    request = await peer.wait_for_request(3)
    for number in range(20):
        signal = signal_message(sender, old, "chat", f"signal-{number}", number, reply_to)
        await client.send_control("asker", signal)
    await mesh.advance(10)
    await client.send_control("asker", cancel_message(sender, cancelled))
    await peer.respond(request, 6)
    assert await client.reply(answered) == Ok({"peer": 6})
    await mesh.advance(10)
    assert client.replies(cancelled) == []
    queue = mesh.exchange.queues[response_queue(AgentName("asker"))]
    assert len(queue.ready) == 20 + 1 - 6, "two and four are held"
    replica.store.unavailable = False
    await mesh.advance(10)
    assert isinstance(await client.reply(cancelled), Failed)
    assert len(queue.ready) == 0


@agent("listener")
async def listener(ctx: TaskExecutionContext, count: int) -> list[int]:
    return [await ctx.receive(chat) for _ in range(count)]


@pytest.mark.parametrize("replica_count", [1, 2])
async def test_signals_reach_a_task_in_memory_in_order(
    mesh: Mesh, client: FakePeer, replica_count: int
) -> None:
    """Each is forwarded to the task's own replica before it waits for the database."""
    replicas = [await replica_in_outage(mesh, listener) for _ in range(replica_count)]
    task_id = TaskId(await client.ask("listener", 4))
    await mesh.idle()
    sender = AgentName("client")
    for number in range(4):
        signal = signal_message(
            sender, task_id, "chat", f"signal-{number}", number, response_queue(sender)
        )
        await client.send_control("listener", signal)
        await mesh.idle()
    assert await client.reply(task_id) == Ok([0, 1, 2, 3])
    for replica in replicas:
        replica.store.unavailable = False
    await mesh.advance(3)
    assert mesh.dead_letters("listener") == []


async def test_with_checkpointing_on_first_deliveries_wait(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    replica.store.unavailable = True
    await mesh.advance(2)
    await client.ask("asker", 1)
    await mesh.advance(10)
    assert peer.requests == []
