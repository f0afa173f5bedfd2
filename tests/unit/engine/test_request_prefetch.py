"""How many requests a replica takes from each queue of its agent."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import nested_queue, request_queue, request_shard
from meshpoint.model.outcomes import Ok

from .agents import Gate, ScriptedAgent, asker, doubler
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])


def busy_agent(gate: Gate) -> ScriptedAgent:
    """Answers "instant" at once and "long" after `gate`; calls its peer for anything else."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        if request == "instant":
            return Done("done")
        if request == "long":
            await gate()
            return Done("long")
        return Paused([Call("call", "peer", request)], b"")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        await gate()
        return Done("resumed")

    return ScriptedAgent("agent", start, resume)


async def pass_time(mesh: Mesh, seconds: float) -> None:
    """Move the clock in steps shorter than any wait in these tests."""
    for _ in range(round(seconds / 0.02)):
        mesh.clock.advance(timedelta(seconds=0.02))
        await mesh.idle()


async def occupy_slots_with_resumed(
    mesh: Mesh, client: FakePeer, peer: FakePeer, gate: Gate, slots: int
) -> None:
    """Fill every slot of the only replica with a resumed task."""
    for number in range(slots):
        await client.ask("agent", number)
        await peer.respond(await peer.wait_for_request(number + 1), 1)
    await gate.wait_reached(slots)
    await mesh.idle()


@BACKENDS
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("noticed", [True, False])
async def test_a_busy_replica_leaves_requests_to_an_idle_one(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool, depth: int, noticed: bool
) -> None:
    """`noticed`: the requests arrive after the replica reacted to its full slots.

    Otherwise it has already taken some of them.
    """
    gate = Gate()
    await mesh.replica(busy_agent(gate), max_concurrency=4, durable=durable)
    await occupy_slots_with_resumed(mesh, client, peer, gate, 4)
    await mesh.replica(busy_agent(gate), max_concurrency=4, durable=durable)
    await pass_time(mesh, 0.3 if noticed else 0)
    address = nested_queue(AgentName("agent")) if depth else request_queue(AgentName("agent"))
    requests = [client.request("instant", call_depth=depth) for _ in range(8)]
    for request in requests:
        await client.send("agent", request, address)
    await pass_time(mesh, 0 if noticed else 0.3)
    await mesh.idle()
    assert len(client.replies()) == 8
    assert gate.visits == 4


async def test_long_first_segments_leave_requests_to_other_replicas(
    mesh: Mesh, client: FakePeer
) -> None:
    gate = Gate()
    await mesh.replica(busy_agent(gate), max_concurrency=2)
    for address in (request_queue, nested_queue):
        await client.send("agent", client.request("long"), address(AgentName("agent")))
    await gate.wait_reached(2)
    await mesh.replica(busy_agent(gate), max_concurrency=2)
    for _ in range(6):
        await client.send("agent", client.request("instant"))
        await client.send("agent", client.request("instant"), nested_queue(AgentName("agent")))
    await pass_time(mesh, 0.5)
    assert len(client.replies()) == 12


@BACKENDS
async def test_a_request_is_requeued_once_and_runs_when_a_slot_is_free(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    """Repeated requeues would raise its delivery count until it becomes a dead letter."""
    gate = Gate()
    await mesh.replica(busy_agent(gate), max_concurrency=2, durable=durable)
    await occupy_slots_with_resumed(mesh, client, peer, gate, 2)
    for _ in range(5):
        await client.ask("agent", "instant")
    await pass_time(mesh, 20)
    assert client.replies() == []
    queue = mesh.exchange.queues.get(request_queue(AgentName("agent")))
    assert queue is not None
    unacked = [item for consumer in queue.consumers for item in consumer.unacked.values()]
    assert max(item.count for item in (*queue.ready, *unacked)) <= 2
    gate.opened.set()
    await pass_time(mesh, 1)
    assert sorted(str(reply) for reply in client.replies()) == sorted(
        str(reply) for reply in [Ok("resumed")] * 2 + [Ok("done")] * 5
    )
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_cancelled_request_is_not_requeued(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()
    await mesh.replica(busy_agent(gate), max_concurrency=1, durable=False)
    await client.ask("agent", "long")
    await gate.wait_reached()
    request = client.request("instant")
    await client.send("agent", request)
    await mesh.idle()
    await client.cancel("agent", request.correlation_id)
    await pass_time(mesh, 0.5)
    gate.opened.set()
    await pass_time(mesh, 0.5)
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert len(client.replies(request.correlation_id)) == 1


async def test_queues_are_served_in_turn(mesh: Mesh, client: FakePeer) -> None:
    """Requests in one queue do not wait for all the long requests in the other."""
    order = list[Any]()
    gates: dict[int, Gate] = {number: Gate() for number in range(20)}

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        order.append(request)
        if isinstance(request, int):
            await gates[request]()
        return Done(request)

    await mesh.replica(ScriptedAgent("agent", start), max_concurrency=2)
    for number in gates:
        await client.ask("agent", number)
    await gates[1].wait_reached()
    await pass_time(mesh, 1)
    await client.send(
        "agent", client.request("nested", call_depth=1), nested_queue(AgentName("agent"))
    )
    for number in range(4):
        gates[number].opened.set()
        await pass_time(mesh, 0.5)
    assert "nested" in order[:6]
    for gate in gates.values():
        gate.opened.set()
    await pass_time(mesh, 5)
    assert len(client.replies()) == 21


async def test_a_full_memory_is_reported_once(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=False, max_concurrency=1, max_in_memory=4)
    for number in range(10):
        await client.ask("asker", number)
    await mesh.idle()
    (event,) = mesh.events.matching(Step.MEMORY_FULL)
    assert event.detail == {"unacked": 4, "max_in_memory": 4}
    for count in range(1, 11):
        await peer.respond(await peer.wait_for_request(count), "ok")
        await mesh.idle()
    assert mesh.events.matching(Step.MEMORY_FULL) == [event]
    for number in range(10):
        await client.ask("asker", number)
    await mesh.idle()
    assert len(mesh.events.matching(Step.MEMORY_FULL)) == 2


async def test_prefetch_changes_are_rare(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    """Each change costs round trips to the broker."""
    replica = await mesh.replica(asker("asker", "peer"), durable=False)
    for number in range(60):
        await client.ask("asker", number)
    for count in range(1, 61):
        await peer.respond(await peer.wait_for_request(count), "ok")
    await mesh.idle()
    assert len(client.replies()) == 60
    assert len(replica.broker.prefetches) <= 12
    assert replica.broker.prefetches[-1] == 10


async def test_waiting_tasks_in_a_database_are_not_limited(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"), max_concurrency=1, max_in_memory=1)
    for number in range(10):
        await client.ask("asker", number)
    await peer.wait_for_request(10)
    assert mesh.events.matching(Step.MEMORY_FULL) == []


@BACKENDS
async def test_a_peer_without_a_nested_queue_is_called_on_its_main_queue(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(doubler)
    nested = nested_queue(AgentName("doubler"))
    del mesh.exchange.queues[nested]
    asking = await mesh.replica(asker("asker", "doubler"), durable=durable)
    for number in (1, 2):
        assert await client.reply(await client.ask("asker", number)) == Ok({"doubler": 2 * number})
    sent = [address for address, message in asking.broker.published if message.app_id == "asker"]
    assert sent.count(nested) == 1  # the missing nested queue is remembered


async def test_a_call_to_a_peer_without_any_queue_is_undeliverable(
    mesh: Mesh, client: FakePeer
) -> None:
    await mesh.replica(asker("asker", "nobody"))
    task_id = await client.ask("asker", 1)
    await mesh.advance(60)
    assert await client.reply(task_id) == Ok({"nobody": "undeliverable"})
    assert [event.detail for event in mesh.events.matching(Step.UNDELIVERABLE)] == [
        {"peer": "nobody"}
    ]


async def test_a_drain_requeues_requests_about_to_be_shed(mesh: Mesh, client: FakePeer) -> None:
    """An idle replica takes the request at once, before the drain ends."""
    gate = Gate()
    draining = await mesh.replica(busy_agent(gate), max_concurrency=1)
    await client.ask("agent", "long")
    await gate.wait_reached(1)
    consumer = draining.worker._request_consumer
    nested = nested_queue(AgentName("agent"))
    await client.send("agent", client.request("instant", call_depth=1), nested)
    await mesh.idle()
    assert len(consumer.inbox.waiting) == 1
    resizing = asyncio.Event()

    async def never_return(*_: Any) -> None:
        resizing.set()
        await asyncio.Event().wait()

    consumer._resize = never_return  # type: ignore[method-assign, assignment]  # a fake
    leaving = asyncio.create_task(consumer._requeue_waiting())
    await resizing.wait()
    await consumer.subscriptions["nested"].cancel()
    leaving.cancel()
    await asyncio.wait({leaving})
    await mesh.replica(busy_agent(gate))
    await mesh.idle()
    assert len(client.replies()) == 1


async def test_a_drain_requeues_each_request_once(mesh: Mesh, client: FakePeer) -> None:
    """Not once for each queue: every requeue raises the delivery count."""
    gate = Gate()
    draining = await mesh.replica(busy_agent(gate), max_concurrency=1, request_shards=4)
    agent = AgentName("agent")
    await client.send("agent", client.request("long"), nested_queue(agent))
    await gate.wait_reached(1)
    for number in range(4):
        await client.send("agent", client.request("instant"), request_shard(agent, number))
    await mesh.idle()
    assert len(draining.worker._request_consumer.inbox.waiting) == 4
    stopping = asyncio.create_task(draining.drain())
    await mesh.idle()
    queues = [mesh.exchange.queues.get(request_shard(agent, number)) for number in range(4)]
    assert [[item.count for item in queue.ready] for queue in queues if queue] == [[1]] * 4
    gate.opened.set()
    await stopping


@BACKENDS
async def test_duplicates_of_a_request_use_no_capacity(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    gate = Gate()
    await mesh.replica(busy_agent(gate), durable=durable, max_concurrency=4)
    task_id = await client.ask("agent", "long")
    await gate.wait_reached()
    for _ in range(10):
        await client.ask("agent", "long", task_id)
    assert await client.reply(await client.ask("agent", "instant")) == Ok("done")
    assert mesh.unacked("agent") == 1  # after a crash the broker redelivers it
    gate.opened.set()
    assert await client.reply(task_id) == Ok("long")
    await mesh.idle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
