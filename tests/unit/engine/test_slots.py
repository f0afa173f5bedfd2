"""Slots limit the running segments, and ready tasks come before new requests."""

from __future__ import annotations

from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import TaskState

from .agents import Gate, ScriptedAgent, asker, caller, doubler, gated, gated_after, summer
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])


@BACKENDS
async def test_segments_never_exceed_the_slots(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    running = max_running = 0

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        await mesh.idle()
        running -= 1
        return Done(request)

    await mesh.replica(ScriptedAgent("agent", start), max_concurrency=3, durable=durable)
    tasks = [await client.ask("agent", number) for number in range(12)]
    assert [await client.reply(task_id) for task_id in tasks] == [
        Ok(number) for number in range(12)
    ]
    assert max_running == 3


@BACKENDS
async def test_a_paused_task_holds_no_slot(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), max_concurrency=1, durable=durable)
    for number in range(5):
        await client.ask("asker", number)
        await peer.wait_for_request(number + 1)
        await mesh.idle()
    assert replica.worker.runtime.slots.free == 1
    assert replica.worker.tasks.segments == {}


def blocking_agent(gate: Gate, order: list[Any]) -> ScriptedAgent:
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

    return ScriptedAgent("agent", start, resume)


@pytest.mark.parametrize("requested", ["before they are ready", "afterwards"])
async def test_ready_tasks_run_before_new_requests(
    mesh: Mesh, client: FakePeer, peer: FakePeer, requested: str
) -> None:
    gate, order = Gate(), list[Any]()
    await mesh.replica(blocking_agent(gate, order), max_concurrency=1)
    tasks = [await client.ask("agent", name) for name in ("a", "b")]
    requests = [await peer.wait_for_request(count) for count in (1, 2)]
    await mesh.idle()
    await client.ask("agent", "block")
    await gate.wait_reached()
    if requested == "before they are ready":
        await client.ask("agent", "new")
        await mesh.idle()
    for request in requests:
        await peer.respond(request, 1)
    if requested == "afterwards":
        await client.ask("agent", "new")
    await mesh.idle()
    for task_id in tasks:
        assert await mesh.state(task_id) is TaskState.READY
    order.clear()
    gate.opened.set()
    for task_id in tasks:
        assert await client.reply(task_id) == Ok("resumed")
    await peer.wait_for_request(3)
    assert order == ["resume a", "resume b", "new"]


async def test_a_ready_task_runs_before_a_request_that_waited_longer(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate, order = Gate(), list[Any]()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        order.append(request)
        return (
            Done(request)
            if request == "new"
            else Paused([Call("call", "peer", request)], request.encode())
        )

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        order.append(f"resume {state.decode()}")
        await gate()
        return Done("resumed")

    replica = await mesh.replica(ScriptedAgent("agent", start, resume), max_concurrency=1)
    for name in ("a", "b"):
        await client.ask("agent", name)
    a, b = await peer.wait_for_request(1), await peer.wait_for_request(2)
    await mesh.idle()
    lookup = replica.store.after["lookup"] = Gate()
    new = await client.ask("agent", "new")
    await lookup.wait_reached()
    await peer.respond(a, 1)
    await gate.wait_reached()
    lookup.opened.set()
    await mesh.idle()  # "new" waits for the slot, and so does "b" after its response
    await peer.respond(b, 1)
    await mesh.idle()
    gate.opened.set()
    await client.reply(new)
    assert order == ["a", "b", "resume a", "resume b", "new"]


async def test_a_freed_slot_takes_a_ready_task_at_once(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """No request arrives and the clock stands still, so no sweep runs."""
    gate, order = Gate(), list[Any]()
    await mesh.replica(blocking_agent(gate, order), max_concurrency=1)
    task_id = await client.ask("agent", "a")
    request = await peer.wait_for_request()
    await mesh.idle()
    await client.ask("agent", "block")
    await gate.wait_reached()
    await peer.respond(request, 1)
    await mesh.idle()
    gate.opened.set()
    assert await client.reply(task_id) == Ok("resumed")


async def test_a_replica_with_a_free_slot_is_woken(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate, order = Gate(), list[Any]()
    first = await mesh.replica(blocking_agent(gate, order), max_concurrency=1)
    task_id = await client.ask("agent", "a")
    request = await peer.wait_for_request()
    await mesh.idle()
    await client.ask("agent", "block")
    await gate.wait_reached()
    second = await mesh.replica(blocking_agent(gate, order), max_concurrency=1)
    # so that the busy replica gets the response
    await second.worker._subscriptions["shared"].cancel()
    await peer.respond(request, 1)
    assert await client.reply(task_id) == Ok("resumed")
    (event,) = mesh.events.matching(Step.ACQUIRE, Phase.AFTER)
    assert event.replica == second.id != first.id


async def test_a_task_whose_join_was_already_met_is_resumed(mesh: Mesh, client: FakePeer) -> None:
    """Nothing is sent, and the task becomes ready and is acquired at once."""
    agent = caller("agent", lambda _: [Call("call", "peer", 1)])
    await mesh.replica(agent, max_call_depth=2, max_concurrency=1)
    assert await client.reply(await client.ask("agent", 1, call_depth=2)) == Ok({"call": "error"})


async def test_all_ready_tasks_run_when_they_exceed_the_slots(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()
    first = await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=20)
    tasks = [await client.ask("agent", number) for number in range(20)]
    requests = [await peer.wait_for_request(count + 1) for count in range(20)]
    await mesh.idle()
    await first.crash()
    for request in requests:
        await peer.respond(request, 1)
    gate.opened.set()
    replica = await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=2)
    for task_id in tasks:
        assert await client.reply(task_id) == Ok({"peer": 1})
    await mesh.idle()
    assert replica.worker.runtime.slots.free == 2


async def test_rescues_never_exceed_the_slots(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()
    first = await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=5)
    tasks = [await client.ask("agent", number) for number in range(5)]
    for count in range(5):
        await peer.respond(await peer.wait_for_request(count + 1), 1)
    await gate.wait_reached(5)
    await first.crash()
    second = await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=2)
    await mesh.advance(20)
    assert gate.visits == 7
    gate.opened.set()
    await mesh.advance(5)
    for task_id in tasks:
        assert await client.reply(task_id) == Ok({"peer": 1})
    assert second.worker.runtime.slots.free == 2


@BACKENDS
async def test_a_fan_out_of_two_hundred_completes(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(doubler, durable=durable)
    asking = await mesh.replica(summer, durable=durable)
    task_id = await client.ask("summer", list(range(200)))
    assert await client.reply(task_id) == Ok(2 * sum(range(200)))
    assert asking.worker.runtime.slots.free == 10
    if durable:
        assert asking.store.calls.count("pause") == 1
        # responses that arrive together are claimed together
        assert asking.store.calls.count("claim") < 100


async def test_a_fan_out_of_two_hundred_completes_on_three_replicas(
    mesh: Mesh, client: FakePeer
) -> None:
    for _ in range(3):
        await mesh.replica(doubler, summer)
    tasks = [await client.ask("summer", list(range(200))) for _ in range(3)]
    for task_id in tasks:
        assert await client.reply(task_id) == Ok(2 * sum(range(200)))
    assert len(mesh.events.matching(Step.SEGMENT, Phase.BEFORE, agent="summer")) == 6


async def test_a_busy_agent_does_not_block_another_in_its_process(
    mesh: Mesh, client: FakePeer
) -> None:
    """They share a broker connection and an observer, but each has its own slots."""
    gate = Gate()
    await mesh.replica(gated("slow", gate), max_concurrency=1)
    await mesh.replica(doubler, max_concurrency=1)
    slow = await client.ask("slow", 1)
    await gate.wait_reached()
    assert await client.reply(await client.ask("doubler", 1)) == Ok(2)
    gate.opened.set()
    assert await client.reply(slow) == Ok("done")
