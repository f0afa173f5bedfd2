"""A cancel ends a task once, in any state, and cancels the calls the task no longer needs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome

from .agents import Gate, Scripted, asker, doubler, gated, gated_after
from .mesh import Mesh
from .puppet import Puppet

HOMES = pytest.mark.parametrize("durable", [True, False])


def is_cancelled(outcome: Outcome) -> bool:
    return isinstance(outcome, Failed) and outcome.kind is FailureKind.CANCELLED


@HOMES
async def test_waiting(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    for _ in range(2):
        await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    await boss.cancel("asker", task_id)
    assert is_cancelled(await boss.reply(task_id))
    assert await peer.cancelled() == [request.correlation_id]
    await peer.respond(request, "too late")
    await mesh.advance(30)
    assert len(boss.replies()) == 1
    assert peer.cancels() == [request.correlation_id]
    assert mesh.unacked("asker") == 0
    assert await mesh.state(task_id) is (TaskState.CANCELLED if durable else None)
    assert len(mesh.events.of(Step.SEGMENT, Phase.BEFORE)) == 1


@HOMES
async def test_ready(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    gate = Gate()
    await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=1, durable=durable)
    tasks = [await boss.ask("agent", 1), await boss.ask("agent", 2)]
    for count in (1, 2):  # the second task waits for the slot of the first
        await peer.respond(await peer.request_number(count), count)
        await gate.reach()
    await mesh.settle()
    await boss.cancel("agent", tasks[1])
    assert is_cancelled(await boss.reply(tasks[1]))
    gate.opened.set()
    assert await boss.reply(tasks[0]) == Ok({"peer": 1})
    await mesh.settle()
    assert gate.visits == 1
    assert mesh.unacked("agent") == 0


@HOMES
async def test_running_for_the_first_time(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    gate = Gate()
    await mesh.replica(gated("agent", gate), durable=durable, max_concurrency=1)
    await mesh.replica(doubler, durable=durable)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await boss.cancel("agent", task_id)
    assert is_cancelled(await boss.reply(task_id))
    assert gate.cancelled == 1
    await mesh.settle()
    assert mesh.unacked("agent") == 0
    assert len(mesh.events.of(Step.CODE_CANCELLED)) == 1
    gate.opened.set()
    assert await boss.reply(await boss.ask("agent", 2)) == Ok("done")


@HOMES
async def test_running_after_a_pause(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    gate = Gate()
    for _ in range(3):  # the owner stops no matter which replica receives the cancel
        await mesh.replica(gated_after("agent", "peer", gate), durable=durable)
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 1)
    await gate.reach()
    await boss.cancel("agent", task_id)
    assert is_cancelled(await boss.reply(task_id))
    assert gate.cancelled == 1
    await mesh.settle()
    assert mesh.unacked("agent") == 0
    assert peer.cancels() == []


async def test_code_that_cleans_up_before_it_stops(mesh: Mesh, boss: Puppet) -> None:
    seen: list[str] = []

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append(f"cancelled {ctx.cancelled.is_set()}")
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise

    await mesh.replica(Scripted("agent", start))
    task_id = await boss.ask("agent", 1)
    await mesh.settle()
    await boss.cancel("agent", task_id)
    assert is_cancelled(await boss.reply(task_id))
    assert seen == ["cancelled True", "cleaned up"]


@HOMES
async def test_code_that_ends_all_the_same(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    """With a row, an end committed before the cancel wins; without one, the first reply counts."""
    reached = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        try:
            await reached()
        except asyncio.CancelledError:
            return Done("finished anyway")

    await mesh.replica(Scripted("agent", start), durable=durable)
    task_id = await boss.ask("agent", 1)
    await reached.reach()
    await boss.cancel("agent", task_id)
    assert await boss.reply(task_id) == Ok("finished anyway")
    await mesh.settle()
    assert len(boss.replies()) == 1
    assert mesh.unacked("agent") == 0


@HOMES
async def test_a_moment_too_late_to_stop_the_code(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    """The code has already returned its pause, but nothing is committed yet."""
    replica = await mesh.replica(asker("asker", "peer"), durable=durable)

    def at_the_end_of_the_code(event: Any) -> None:
        if (event.step, event.phase) == (Step.SEGMENT, Phase.AFTER):
            replica.worker.segments.cancel(event.task_ids[0])

    mesh.events.hooks.append(at_the_end_of_the_code)
    task_id = await boss.ask("asker", 1)
    assert is_cancelled(await boss.reply(task_id))
    await mesh.settle()
    assert peer.requests == []
    assert mesh.unacked("asker") == 0


@HOMES
async def test_a_cancel_that_overtakes_its_request(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    gate = Gate()
    for _ in range(2):
        await mesh.replica(gated("agent", gate), durable=durable)
    await boss.cancel("agent", "not-yet")
    await mesh.settle()
    for _ in range(2):
        await boss.ask("agent", 1, "not-yet")
    await mesh.settle()
    replies = boss.replies("not-yet")
    assert len(replies) == 2
    assert all(map(is_cancelled, replies))
    assert gate.visits == 0
    assert mesh.unacked("agent") == 0


async def test_while_its_request_is_looked_up(mesh: Mesh, boss: Puppet) -> None:
    gate, lookup = Gate(), Gate()
    replica = await mesh.replica(gated("agent", gate))
    replica.store.after["lookup"] = lookup
    task_id = await boss.ask("agent", 1)
    await lookup.reach()
    await boss.cancel("agent", task_id)
    await mesh.settle()
    lookup.opened.set()
    assert is_cancelled(await boss.reply(task_id))
    assert gate.visits == 0
    assert replica.worker.site.slots.free == 10


async def test_while_it_begins(mesh: Mesh, boss: Puppet) -> None:
    gate, begin = Gate(), Gate()
    replica = await mesh.replica(gated("agent", gate), begin_at_delivery=1)
    replica.store.before["begin"] = begin
    task_id = await boss.ask("agent", 1)
    await begin.reach()
    await boss.cancel("agent", task_id)
    await mesh.settle()
    begin.opened.set()
    assert is_cancelled(await boss.reply(task_id))
    assert gate.visits == 0
    await mesh.settle()
    assert mesh.unacked("agent") == 0


async def test_found_at_the_first_pause(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """The broadcast is lost, but the pause finds the tombstone."""
    replica = await mesh.replica(asker("asker", "peer"))
    pause = Gate()
    replica.store.before["pause"] = pause
    task_id = await boss.ask("asker", 1)
    await pause.reach()
    replica.worker._private_inbox.put = lambda delivery: None  # type: ignore[method-assign]
    await boss.cancel("asker", task_id)
    await mesh.settle()
    pause.opened.set()
    assert is_cancelled(await boss.reply(task_id))
    await mesh.settle()
    assert peer.requests == []
    assert mesh.unacked("asker") == 0


def twice(gate: Gate) -> Scripted:
    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        return Paused([Call("one", "peer", 1)], b"1")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        await gate()
        return Paused([Call("two", "peer", 2)], b"2")

    return Scripted("twice", start, resume)


async def test_found_at_a_later_pause(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate, pause = Gate(), Gate()
    replica = await mesh.replica(twice(gate))
    task_id = await boss.ask("twice", 1)
    await peer.respond(await peer.request_number(), 1)
    await gate.reach()
    replica.store.before["pause"] = pause
    gate.opened.set()
    await pause.reach()
    await boss.cancel("twice", task_id)
    await mesh.settle()
    assert boss.replies() == []
    pause.opened.set()
    assert is_cancelled(await boss.reply(task_id))
    assert len(peer.requests) == 1
    assert await mesh.state(task_id) is TaskState.CANCELLED


async def test_found_at_a_take_over(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    gate = Gate()
    first = await mesh.replica(gated_after("agent", "peer", gate))
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 1)
    await gate.reach()
    await first.crash()
    await mesh.replica(gated_after("agent", "peer", gate))
    await boss.cancel("agent", task_id)
    await mesh.advance(14)
    assert boss.replies() == []
    await mesh.advance(3)
    assert is_cancelled(await boss.reply(task_id))
    assert gate.visits == 1


async def test_too_late(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    await peer.respond(await peer.request_number(), 1)
    await boss.reply(task_id)
    await boss.cancel("asker", task_id)
    await mesh.advance(20)
    assert boss.replies() == [Ok({"peer": 1})]
    assert await mesh.state(task_id) is TaskState.COMPLETED


@HOMES
async def test_three_levels_deep(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    for name, below in (("one", "two"), ("two", "three"), ("three", "peer")):
        await mesh.replica(asker(name, below), durable=durable)
    task_id = await boss.ask("one", 1)
    request = await peer.request_number()
    await mesh.settle()
    await boss.cancel("one", task_id)
    assert is_cancelled(await boss.reply(task_id))
    assert await peer.cancelled() == [request.correlation_id]
    await mesh.advance(20)
    assert peer.cancels() == [request.correlation_id]
    for name in ("one", "two", "three"):
        assert mesh.unacked(name) == 0
    if durable:
        states = {task.agent: task.state for task in await mesh.store.tasks()}
        assert states == dict.fromkeys(("one", "two", "three"), TaskState.CANCELLED)


async def test_a_peer_that_could_not_be_told_is_told_later(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    replica.broker.fail("not committed", type="cancel")
    await boss.cancel("asker", task_id)
    await boss.reply(task_id)
    assert peer.cancels() == []
    await mesh.advance(12)
    assert peer.cancels() == [request.correlation_id]


async def test_told_by_another_replica_after_a_crash(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    first = await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    first.broker.away = True
    await boss.cancel("asker", task_id)
    await mesh.events.wait(Step.CANCEL, Phase.AFTER)
    await mesh.settle()
    await first.crash()
    await mesh.replica(asker("asker", "peer"))
    await mesh.advance(12)
    assert is_cancelled(await boss.reply(task_id))
    assert peer.cancels() == [request.correlation_id]


async def test_a_cancel_whose_broadcast_was_lost_in_a_crash_is_broadcast_again(mesh: Mesh, boss: Puppet) -> None:
    """The redelivered cancel finds the tombstone that its first delivery wrote."""
    gate = Gate()
    other = await mesh.replica(doubler)
    running = await mesh.replica(gated("agent", gate))
    task_id = await boss.ask("agent", 1)
    await gate.reach()

    async def lost(*_: Any) -> None:
        running.broker.lose_connection()  # the cancel is redelivered
        running.broker.broadcast = broadcast  # type: ignore[method-assign]

    broadcast, running.broker.broadcast = running.broker.broadcast, lost  # type: ignore[method-assign]
    await boss.cancel("agent", task_id)
    assert is_cancelled(await boss.reply(task_id))
    assert gate.cancelled == 1
    assert other.task.done() is False


async def test_one_call_of_a_cancelled_task_is_not_yet_sent(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    replica.broker.fail(*["not committed"] * 3, type="request")
    task_id = await boss.ask("asker", 1)
    await mesh.events.wait(Step.DISPATCH, Phase.FAILED)
    await mesh.settle()
    await boss.cancel("asker", task_id)
    assert is_cancelled(await boss.reply(task_id))
    await mesh.advance(60)
    assert peer.requests == []
