"""How many requests a replica takes from each queue of its agent."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import nested_of, requests_of, shard_of
from meshpoint.model.outcomes import Ok

from .agents import Gate, Scripted, asker, doubler
from .mesh import Mesh
from .puppet import Puppet

HOMES = pytest.mark.parametrize("durable", [True, False])


def busy(gate: Gate) -> Scripted:
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

    return Scripted("agent", start, resume)


async def time_passes(mesh: Mesh, seconds: float) -> None:
    """Move the clock in steps shorter than any wait in these tests."""
    for _ in range(round(seconds / 0.02)):
        mesh.clock.advance(timedelta(seconds=0.02))
        await mesh.settle()


async def all_slots_resumed(mesh: Mesh, boss: Puppet, peer: Puppet, gate: Gate, slots: int) -> None:
    """Fill every slot of the only replica with a resumed task."""
    for number in range(slots):
        await boss.ask("agent", number)
        await peer.respond(await peer.request_number(number + 1), 1)
    await gate.reach(slots)
    await mesh.settle()


@HOMES
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("noticed", [True, False])
async def test_a_busy_replica_leaves_requests_to_an_idle_one(
    mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool, depth: int, noticed: bool
) -> None:
    """`noticed`: the requests arrive after the replica reacted to its full slots.

    Otherwise it has already taken some of them.
    """
    gate = Gate()
    await mesh.replica(busy(gate), max_concurrency=4, durable=durable)
    await all_slots_resumed(mesh, boss, peer, gate, 4)
    await mesh.replica(busy(gate), max_concurrency=4, durable=durable)
    await time_passes(mesh, 0.3 if noticed else 0)
    address = nested_of(AgentName("agent")) if depth else requests_of(AgentName("agent"))
    requests = [boss.request("instant", call_depth=depth) for _ in range(8)]
    for request in requests:
        await boss.send("agent", request, address)
    await time_passes(mesh, 0 if noticed else 0.3)
    await mesh.settle()
    assert len(boss.replies()) == 8
    assert gate.visits == 4


async def test_first_segments_that_take_long_keep_no_request_either(mesh: Mesh, boss: Puppet) -> None:
    gate = Gate()
    await mesh.replica(busy(gate), max_concurrency=2)
    for address in (requests_of, nested_of):
        await boss.send("agent", boss.request("long"), address(AgentName("agent")))
    await gate.reach(2)
    await mesh.replica(busy(gate), max_concurrency=2)
    for _ in range(6):
        await boss.send("agent", boss.request("instant"))
        await boss.send("agent", boss.request("instant"), nested_of(AgentName("agent")))
    await time_passes(mesh, 0.5)
    assert len(boss.replies()) == 12


@HOMES
async def test_a_request_is_requeued_once_and_runs_when_a_slot_is_free(
    mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool
) -> None:
    """Repeated requeues would raise its delivery count until it becomes a dead letter."""
    gate = Gate()
    await mesh.replica(busy(gate), max_concurrency=2, durable=durable)
    await all_slots_resumed(mesh, boss, peer, gate, 2)
    for _ in range(5):
        await boss.ask("agent", "instant")
    await time_passes(mesh, 20)
    assert boss.replies() == []
    queue = mesh.exchange.queue(requests_of(AgentName("agent")))
    assert queue is not None
    held = [item for consumer in queue.consumers for item in consumer.unacked.values()]
    assert max(item.count for item in (*queue.ready, *held)) <= 2
    gate.opened.set()
    await time_passes(mesh, 1)
    assert sorted(str(reply) for reply in boss.replies()) == sorted(
        str(reply) for reply in [Ok("resumed")] * 2 + [Ok("done")] * 5
    )
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_cancelled_request_is_not_requeued(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate = Gate()
    await mesh.replica(busy(gate), max_concurrency=1, durable=False)
    await boss.ask("agent", "long")
    await gate.reach()
    request = boss.request("instant")
    await boss.send("agent", request)
    await mesh.settle()
    await boss.cancel("agent", request.correlation_id)
    await time_passes(mesh, 0.5)
    gate.opened.set()
    await time_passes(mesh, 0.5)
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert len(boss.replies(request.correlation_id)) == 1


async def test_each_queue_has_its_turn(mesh: Mesh, boss: Puppet) -> None:
    """Requests in one queue do not wait for all the long requests in the other."""
    order = list[Any]()
    gates: dict[int, Gate] = {number: Gate() for number in range(20)}

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        order.append(request)
        if isinstance(request, int):
            await gates[request]()
        return Done(request)

    await mesh.replica(Scripted("agent", start), max_concurrency=2)
    for number in gates:
        await boss.ask("agent", number)
    await gates[1].reach()
    await time_passes(mesh, 1)
    await boss.send("agent", boss.request("nested", call_depth=1), nested_of(AgentName("agent")))
    for number in range(4):
        gates[number].opened.set()
        await time_passes(mesh, 0.5)
    assert "nested" in order[:6]
    for gate in gates.values():
        gate.opened.set()
    await time_passes(mesh, 5)
    assert len(boss.replies()) == 21


async def test_what_limits_intake_is_told_once(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"), durable=False, max_concurrency=1, max_in_memory=4)
    for number in range(10):
        await boss.ask("asker", number)
    await mesh.settle()
    (told,) = mesh.events.of(Step.MEMORY_FULL)
    assert told.detail == {"held": 4, "max_in_memory": 4}
    for count in range(1, 11):
        await peer.respond(await peer.request_number(count), "ok")
        await mesh.settle()
    assert mesh.events.of(Step.MEMORY_FULL) == [told]
    for number in range(10):
        await boss.ask("asker", number)
    await mesh.settle()
    assert len(mesh.events.of(Step.MEMORY_FULL)) == 2


async def test_prefetch_is_seldom_changed(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """Each change costs round trips to the broker."""
    replica = await mesh.replica(asker("asker", "peer"), durable=False)
    for number in range(60):
        await boss.ask("asker", number)
    for count in range(1, 61):
        await peer.respond(await peer.request_number(count), "ok")
    await mesh.settle()
    assert len(boss.replies()) == 60
    assert len(replica.broker.prefetches) <= 12
    assert replica.broker.prefetches[-1] == 10


async def test_a_database_holds_tasks_without_a_limit(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"), max_concurrency=1, max_in_memory=1)
    for number in range(10):
        await boss.ask("asker", number)
    await peer.request_number(10)
    assert mesh.events.of(Step.MEMORY_FULL) == []


@HOMES
async def test_a_peer_without_a_queue_of_nested_requests_is_asked_on_the_other(
    mesh: Mesh, boss: Puppet, durable: bool
) -> None:
    await mesh.replica(doubler)
    nested = nested_of(AgentName("doubler"))
    del mesh.exchange._queues[nested]
    asking = await mesh.replica(asker("asker", "doubler"), durable=durable)
    for number in (1, 2):
        assert await boss.reply(await boss.ask("asker", number)) == Ok({"doubler": 2 * number})
    sent = [address for address, message in asking.broker.published if message.app_id == "asker"]
    assert sent.count(nested) == 1  # the missing nested queue is remembered


async def test_a_peer_without_any_queue_is_undeliverable(mesh: Mesh, boss: Puppet) -> None:
    await mesh.replica(asker("asker", "nobody"))
    task_id = await boss.ask("asker", 1)
    await mesh.advance(60)
    assert await boss.reply(task_id) == Ok({"nobody": "undeliverable"})


async def test_a_drain_gives_back_what_was_about_to_leave(mesh: Mesh, boss: Puppet) -> None:
    """An idle replica takes the request at once, before the drain ends."""
    gate = Gate()
    draining = await mesh.replica(busy(gate), max_concurrency=1)
    await boss.ask("agent", "long")
    await gate.reach(1)
    intake = draining.worker._intake
    nested = nested_of(AgentName("agent"))
    await boss.send("agent", boss.request("instant", call_depth=1), nested)
    await mesh.settle()
    assert len(intake.inbox.waiting) == 1
    resizing = asyncio.Event()

    async def for_ever(*_: Any) -> None:
        resizing.set()
        await asyncio.Event().wait()

    intake._resize = for_ever  # type: ignore[method-assign]
    leaving = asyncio.create_task(intake._turn_away())
    await resizing.wait()
    await intake.subscriptions["nested"].cancel()
    leaving.cancel()
    await asyncio.wait({leaving})
    await mesh.replica(busy(gate))
    await mesh.settle()
    assert len(boss.replies()) == 1


async def test_a_drain_gives_each_request_back_once(mesh: Mesh, boss: Puppet) -> None:
    """Not once for each queue: every requeue raises the delivery count."""
    gate = Gate()
    draining = await mesh.replica(busy(gate), max_concurrency=1, request_shards=4)
    agent = AgentName("agent")
    await boss.send("agent", boss.request("long"), nested_of(agent))
    await gate.reach(1)
    for number in range(4):
        await boss.send("agent", boss.request("instant"), shard_of(agent, number))
    await mesh.settle()
    assert len(draining.worker._intake.inbox.waiting) == 4
    stopping = asyncio.create_task(draining.drain())
    await mesh.settle()
    queues = [mesh.exchange.queue(shard_of(agent, number)) for number in range(4)]
    assert [[item.count for item in queue.ready] for queue in queues if queue] == [[1]] * 4
    gate.opened.set()
    await stopping


@HOMES
async def test_copies_of_a_request_take_no_room_from_others(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    gate = Gate()
    await mesh.replica(busy(gate), durable=durable, max_concurrency=4)
    task_id = await boss.ask("agent", "long")
    await gate.reach()
    for _ in range(10):
        await boss.ask("agent", "long", task_id)
    assert await boss.reply(await boss.ask("agent", "instant")) == Ok("done")
    assert mesh.unacked("agent") == 1  # after a crash the broker redelivers it
    gate.opened.set()
    assert await boss.reply(task_id) == Ok("long")
    await mesh.settle()
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
