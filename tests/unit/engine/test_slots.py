"""Slots limit the running segments, and ready tasks come before new requests."""

from __future__ import annotations

from typing import Any

import pytest

from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.outcomes import Ok

from .agents import Gate, Scripted, asker, caller, doubler, gated, gated_after, summer
from .mesh import Mesh
from .puppet import Puppet

HOMES = pytest.mark.parametrize("durable", [True, False])


@HOMES
async def test_no_more_segments_than_slots(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    running = most = 0

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await mesh.settle()
        running -= 1
        return Done(request)

    await mesh.replica(Scripted("agent", start), max_concurrency=3, durable=durable)
    tasks = [await boss.ask("agent", number) for number in range(12)]
    assert [await boss.reply(task_id) for task_id in tasks] == [Ok(number) for number in range(12)]
    assert most == 3


@HOMES
async def test_a_paused_task_holds_no_slot(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    replica = await mesh.replica(asker("asker", "peer"), max_concurrency=1, durable=durable)
    for number in range(5):
        await boss.ask("asker", number)
        await peer.request_number(number + 1)
        await mesh.settle()
    assert replica.worker.site.slots.free == 1
    assert replica.worker.segments.live == {}


def blocking(gate: Gate, order: list[Any]) -> Scripted:
    """Waits at `gate` for "block", pauses for anything else, and records the order."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        order.append(request)
        if request == "block":
            await gate()
            return Done("unblocked")
        return Paused([Call("call", "peer", request)], str(request).encode())

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        order.append(f"resume {state.decode()}")
        return Done("resumed")

    return Scripted("agent", start, resume)


@pytest.mark.parametrize("asked", ["before they are ready", "afterwards"])
async def test_ready_tasks_come_before_new_requests(mesh: Mesh, boss: Puppet, peer: Puppet, asked: str) -> None:
    gate, order = Gate(), list[Any]()
    await mesh.replica(blocking(gate, order), max_concurrency=1)
    tasks = [await boss.ask("agent", name) for name in ("a", "b")]
    requests = [await peer.request_number(count) for count in (1, 2)]
    await mesh.settle()
    await boss.ask("agent", "block")
    await gate.reach()
    if asked == "before they are ready":
        await boss.ask("agent", "new")
        await mesh.settle()
    for request in requests:
        await peer.respond(request, 1)
    if asked == "afterwards":
        await boss.ask("agent", "new")
    await mesh.settle()
    for task_id in tasks:
        assert await mesh.state(task_id) is TaskState.READY
    order.clear()
    gate.opened.set()
    for task_id in tasks:
        assert await boss.reply(task_id) == Ok("resumed")
    await peer.request_number(3)
    assert order == ["resume a", "resume b", "new"]


async def test_a_ready_task_comes_before_a_request_that_waits_longer(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate, order = Gate(), list[Any]()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        order.append(request)
        return Done(request) if request == "new" else Paused([Call("call", "peer", request)], request.encode())

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        order.append(f"resume {state.decode()}")
        await gate()
        return Done("resumed")

    replica = await mesh.replica(Scripted("agent", start, resume), max_concurrency=1)
    for name in ("a", "b"):
        await boss.ask("agent", name)
    a, b = await peer.request_number(1), await peer.request_number(2)
    await mesh.settle()
    lookup = replica.store.after["lookup"] = Gate()
    new = await boss.ask("agent", "new")
    await lookup.reach()
    await peer.respond(a, 1)
    await gate.reach()
    lookup.opened.set()
    await mesh.settle()  # "new" waits for the slot, and so does "b" after its response
    await peer.respond(b, 1)
    await mesh.settle()
    gate.opened.set()
    await boss.reply(new)
    assert order == ["a", "b", "resume a", "resume b", "new"]


async def test_a_freed_slot_takes_a_ready_task_at_once(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """No request arrives and the clock stands still, so no sweep runs."""
    gate, order = Gate(), list[Any]()
    await mesh.replica(blocking(gate, order), max_concurrency=1)
    task_id = await boss.ask("agent", "a")
    request = await peer.request_number()
    await mesh.settle()
    await boss.ask("agent", "block")
    await gate.reach()
    await peer.respond(request, 1)
    await mesh.settle()
    gate.opened.set()
    assert await boss.reply(task_id) == Ok("resumed")


async def test_a_replica_with_a_free_slot_is_woken(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate, order = Gate(), list[Any]()
    first = await mesh.replica(blocking(gate, order), max_concurrency=1)
    task_id = await boss.ask("agent", "a")
    request = await peer.request_number()
    await mesh.settle()
    await boss.ask("agent", "block")
    await gate.reach()
    second = await mesh.replica(blocking(gate, order), max_concurrency=1)
    # so that the busy replica gets the response
    await second.worker._subscriptions["shared"].cancel()
    await peer.respond(request, 1)
    assert await boss.reply(task_id) == Ok("resumed")
    (taken,) = mesh.events.of(Step.TAKE, Phase.AFTER)
    assert taken.replica == second.id != first.id


async def test_a_task_whose_join_was_met_before_it_waited(mesh: Mesh, boss: Puppet) -> None:
    """Nothing is sent, and the task becomes ready and is acquired at once."""
    agent = caller("agent", lambda _: [Call("call", "peer", 1)])
    await mesh.replica(agent, max_call_depth=2, max_concurrency=1)
    assert await boss.reply(await boss.ask("agent", 1, call_depth=2)) == Ok({"call": "error"})


async def test_more_ready_tasks_than_slots(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate = Gate()
    first = await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=20)
    tasks = [await boss.ask("agent", number) for number in range(20)]
    requests = [await peer.request_number(count + 1) for count in range(20)]
    await mesh.settle()
    await first.crash()
    for request in requests:
        await peer.respond(request, 1)
    gate.opened.set()
    replica = await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=2)
    for task_id in tasks:
        assert await boss.reply(task_id) == Ok({"peer": 1})
    await mesh.settle()
    assert replica.worker.site.slots.free == 2


async def test_take_overs_take_no_more_than_there_are_slots(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate = Gate()
    first = await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=5)
    tasks = [await boss.ask("agent", number) for number in range(5)]
    for count in range(5):
        await peer.respond(await peer.request_number(count + 1), 1)
    await gate.reach(5)
    await first.crash()
    second = await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=2)
    await mesh.advance(20)
    assert gate.visits == 7
    gate.opened.set()
    await mesh.advance(5)
    for task_id in tasks:
        assert await boss.reply(task_id) == Ok({"peer": 1})
    assert second.worker.site.slots.free == 2


@HOMES
async def test_a_fan_out_of_two_hundred(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    await mesh.replica(doubler, durable=durable)
    asking = await mesh.replica(summer, durable=durable)
    task_id = await boss.ask("summer", list(range(200)))
    assert await boss.reply(task_id) == Ok(2 * sum(range(200)))
    assert asking.worker.site.slots.free == 10
    if durable:
        assert asking.store.calls.count("pause") == 1
        # responses that arrive together are claimed together
        assert asking.store.calls.count("claim") < 100


async def test_a_fan_out_of_two_hundred_over_three_replicas(mesh: Mesh, boss: Puppet) -> None:
    for _ in range(3):
        await mesh.replica(doubler, summer)
    tasks = [await boss.ask("summer", list(range(200))) for _ in range(3)]
    for task_id in tasks:
        assert await boss.reply(task_id) == Ok(2 * sum(range(200)))
    assert len(mesh.events.of(Step.SEGMENT, Phase.BEFORE, agent="summer")) == 6


async def test_two_agents_in_one_process(mesh: Mesh, boss: Puppet) -> None:
    """They share a broker connection and an observer, but each has its own slots."""
    gate = Gate()
    await mesh.replica(gated("slow", gate), max_concurrency=1)
    await mesh.replica(doubler, max_concurrency=1)
    slow = await boss.ask("slow", 1)
    await gate.reach()
    assert await boss.reply(await boss.ask("doubler", 1)) == Ok(2)
    gate.opened.set()
    assert await boss.reply(slow) == Ok("done")
