"""A cancel ends a task once, in any state, and cancels the calls the task no longer needs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Message
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.tasks import TaskState

from .agents import Gate, ScriptedAgent, asker, doubler, gated, gated_after
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])


def is_cancelled(outcome: Outcome) -> bool:
    return isinstance(outcome, Failed) and outcome.kind is FailureKind.CANCELLED


@BACKENDS
async def test_a_cancel_ends_a_waiting_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    for _ in range(2):
        await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    await client.cancel("asker", task_id)
    assert is_cancelled(await client.reply(task_id))
    assert await peer.wait_for_cancels() == [request.correlation_id]
    await peer.respond(request, "too late")
    await mesh.advance(30)
    assert len(client.replies()) == 1
    assert peer.cancels() == [request.correlation_id]
    assert mesh.unacked("asker") == 0
    assert await mesh.state(task_id) is (TaskState.CANCELLED if durable else None)
    assert len(mesh.events.matching(Step.SEGMENT, Phase.BEFORE)) == 1


@BACKENDS
async def test_a_cancel_ends_a_ready_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    gate = Gate()
    await mesh.replica(gated_after("agent", "peer", gate), max_concurrency=1, durable=durable)
    tasks = [await client.ask("agent", 1), await client.ask("agent", 2)]
    for count in (1, 2):  # the second task waits for the slot of the first
        await peer.respond(await peer.wait_for_request(count), count)
        await gate.wait_reached()
    await mesh.idle()
    await client.cancel("agent", tasks[1])
    assert is_cancelled(await client.reply(tasks[1]))
    gate.opened.set()
    assert await client.reply(tasks[0]) == Ok({"peer": 1})
    await mesh.idle()
    assert gate.visits == 1
    assert mesh.unacked("agent") == 0


@BACKENDS
async def test_a_cancel_stops_the_first_segment(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    gate = Gate()
    await mesh.replica(gated("agent", gate), durable=durable, max_concurrency=1)
    await mesh.replica(doubler, durable=durable)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await client.cancel("agent", task_id)
    assert is_cancelled(await client.reply(task_id))
    assert gate.cancelled == 1
    await mesh.idle()
    assert mesh.unacked("agent") == 0
    assert len(mesh.events.matching(Step.CODE_CANCELLED)) == 1
    gate.opened.set()
    assert await client.reply(await client.ask("agent", 2)) == Ok("done")


@BACKENDS
async def test_a_cancel_stops_a_resumed_segment(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    gate = Gate()
    for _ in range(3):  # the owner stops no matter which replica receives the cancel
        await mesh.replica(gated_after("agent", "peer", gate), durable=durable)
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await gate.wait_reached()
    await client.cancel("agent", task_id)
    assert is_cancelled(await client.reply(task_id))
    assert gate.cancelled == 1
    await mesh.idle()
    assert mesh.unacked("agent") == 0
    assert peer.cancels() == []


@BACKENDS
@pytest.mark.parametrize("place", ["running", "waiting"])
async def test_the_outcome_repeats_the_reason_of_a_cancel(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool, place: str
) -> None:
    gate = Gate()
    for _ in range(3):  # wherever the cancel arrives and the task is
        await mesh.replica(gated_after("agent", "peer", gate), durable=durable)
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    if place == "running":
        await peer.respond(request, 1)
        await gate.wait_reached()
    await mesh.idle()
    await client.cancel("agent", task_id, reason="sold out " + "x" * 1000)
    outcome = await client.reply(task_id)
    assert is_cancelled(outcome)
    assert isinstance(outcome, Failed)
    assert outcome.message.startswith("cancelled on request: sold out xxx")
    assert len(outcome.message) == len("cancelled on request: ") + 500


async def test_cancelled_code_can_clean_up(mesh: Mesh, client: FakePeer) -> None:
    cleanups: list[str] = []

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cleanups.append(f"cancelled {ctx.cancelled.is_set()}")
            await asyncio.sleep(0)
            cleanups.append("cleaned up")
            raise

    await mesh.replica(ScriptedAgent("agent", start))
    task_id = await client.ask("agent", 1)
    await mesh.idle()
    await client.cancel("agent", task_id)
    assert is_cancelled(await client.reply(task_id))
    assert cleanups == ["cancelled True", "cleaned up"]


@BACKENDS
async def test_code_may_complete_despite_a_cancel(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    """With a row, an end committed before the cancel wins; without one, the first reply counts."""
    reached = Gate()

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        try:
            await reached()
        except asyncio.CancelledError:
            return Done("finished anyway")

    await mesh.replica(ScriptedAgent("agent", start), durable=durable)
    task_id = await client.ask("agent", 1)
    await reached.wait_reached()
    await client.cancel("agent", task_id)
    assert await client.reply(task_id) == Ok("finished anyway")
    await mesh.idle()
    assert len(client.replies()) == 1
    assert mesh.unacked("agent") == 0


@BACKENDS
async def test_a_cancel_just_after_the_code_ended_changes_nothing(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    """The code has already returned its pause, but nothing is committed yet."""
    replica = await mesh.replica(asker("asker", "peer"), durable=durable)

    def at_the_end_of_the_code(event: Any) -> None:
        if (event.step, event.phase) == (Step.SEGMENT, Phase.AFTER):
            replica.worker.tasks.cancel(event.task_ids[0])

    mesh.events.hooks.append(at_the_end_of_the_code)
    task_id = await client.ask("asker", 1)
    assert is_cancelled(await client.reply(task_id))
    await mesh.idle()
    assert peer.requests == []
    assert mesh.unacked("asker") == 0


@BACKENDS
async def test_a_cancel_that_overtakes_its_request_cancels_it(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    gate = Gate()
    for _ in range(2):
        await mesh.replica(gated("agent", gate), durable=durable)
    await client.cancel("agent", "not-yet")
    await mesh.idle()
    for _ in range(2):
        await client.ask("agent", 1, "not-yet")
    await mesh.idle()
    replies = client.replies("not-yet")
    assert len(replies) == 2
    assert all(map(is_cancelled, replies))
    assert gate.visits == 0
    assert mesh.unacked("agent") == 0


async def test_a_cancel_during_the_lookup_of_its_request_takes_effect(
    mesh: Mesh, client: FakePeer
) -> None:
    gate, lookup = Gate(), Gate()
    replica = await mesh.replica(gated("agent", gate))
    replica.store.after["lookup"] = lookup
    task_id = await client.ask("agent", 1)
    await lookup.wait_reached()
    await client.cancel("agent", task_id)
    await mesh.idle()
    lookup.opened.set()
    assert is_cancelled(await client.reply(task_id))
    assert gate.visits == 0
    assert replica.worker.runtime.slots.free == 10


async def test_a_cancel_during_the_begin_takes_effect(mesh: Mesh, client: FakePeer) -> None:
    gate, begin = Gate(), Gate()
    replica = await mesh.replica(gated("agent", gate), begin_at_delivery=1)
    replica.store.before["begin"] = begin
    task_id = await client.ask("agent", 1)
    await begin.wait_reached()
    await client.cancel("agent", task_id)
    await mesh.idle()
    begin.opened.set()
    assert is_cancelled(await client.reply(task_id))
    assert gate.visits == 0
    await mesh.idle()
    assert mesh.unacked("agent") == 0


async def test_a_missed_cancel_is_found_at_the_first_pause(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The broadcast is lost, but the pause finds the tombstone."""
    replica = await mesh.replica(asker("asker", "peer"))
    pause = Gate()
    replica.store.before["pause"] = pause
    task_id = await client.ask("asker", 1)
    await pause.wait_reached()
    replica.worker._private_inbox.put = lambda delivery: None  # type: ignore[method-assign]  # a fake
    await client.cancel("asker", task_id)
    await mesh.idle()
    pause.opened.set()
    assert is_cancelled(await client.reply(task_id))
    await mesh.idle()
    assert peer.requests == []
    assert mesh.unacked("asker") == 0


def pausing_twice(gate: Gate) -> ScriptedAgent:
    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        return Paused([Call("one", "peer", 1)], b"1")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Any) -> Any:
        await gate()
        return Paused([Call("two", "peer", 2)], b"2")

    return ScriptedAgent("twice", start, resume)


async def test_a_missed_cancel_is_found_at_a_later_pause(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate, pause = Gate(), Gate()
    replica = await mesh.replica(pausing_twice(gate))
    task_id = await client.ask("twice", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await gate.wait_reached()
    replica.store.before["pause"] = pause
    gate.opened.set()
    await pause.wait_reached()
    await client.cancel("twice", task_id)
    await mesh.idle()
    assert client.replies() == []
    pause.opened.set()
    assert is_cancelled(await client.reply(task_id))
    assert len(peer.requests) == 1
    assert await mesh.state(task_id) is TaskState.CANCELLED


async def test_a_missed_cancel_is_found_at_the_rescue(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    gate = Gate()
    first = await mesh.replica(gated_after("agent", "peer", gate))
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await gate.wait_reached()
    await first.crash()
    await mesh.replica(gated_after("agent", "peer", gate))
    await client.cancel("agent", task_id)
    await mesh.advance(14)
    assert client.replies() == []
    await mesh.advance(3)
    assert is_cancelled(await client.reply(task_id))
    assert gate.visits == 1


async def test_a_cancel_of_an_ended_task_changes_nothing(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await client.reply(task_id)
    await client.cancel("asker", task_id)
    await mesh.advance(20)
    assert client.replies() == [Ok({"peer": 1})]
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert mesh.events.matching(Step.TASK_FAILED) == []


@BACKENDS
async def test_a_cancel_reaches_three_levels_of_tasks(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    for name, below in (("one", "two"), ("two", "three"), ("three", "peer")):
        await mesh.replica(asker(name, below), durable=durable)
    task_id = await client.ask("one", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    await client.cancel("one", task_id)
    assert is_cancelled(await client.reply(task_id))
    assert await peer.wait_for_cancels() == [request.correlation_id]
    await mesh.advance(20)
    assert peer.cancels() == [request.correlation_id]
    for name in ("one", "two", "three"):
        assert mesh.unacked(name) == 0
    if durable:
        states = {task.agent: task.state for task in await mesh.store.tasks()}
        assert states == dict.fromkeys(("one", "two", "three"), TaskState.CANCELLED)


async def test_an_unsent_cancel_to_a_peer_is_sent_later(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    replica.broker.fail("not committed", type="cancel")
    await client.cancel("asker", task_id)
    await client.reply(task_id)
    assert peer.cancels() == []
    await mesh.advance(12)
    assert peer.cancels() == [request.correlation_id]


async def test_another_replica_sends_the_cancels_after_a_crash(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    first = await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    first.broker.unavailable = True
    await client.cancel("asker", task_id)
    await mesh.events.wait(Step.CANCEL, Phase.AFTER)
    await mesh.idle()
    await first.crash()
    await mesh.replica(asker("asker", "peer"))
    await mesh.advance(12)
    assert is_cancelled(await client.reply(task_id))
    assert peer.cancels() == [request.correlation_id]


async def test_a_cancel_broadcast_lost_in_a_crash_is_repeated(
    mesh: Mesh, client: FakePeer
) -> None:
    """The redelivered cancel finds the tombstone that its first delivery wrote."""
    gate = Gate()
    other = await mesh.replica(doubler)
    running = await mesh.replica(gated("agent", gate))
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()

    async def lose(agent: AgentName, message: Message) -> None:
        running.broker.lose_connection()  # the cancel is redelivered
        running.broker.broadcast = broadcast  # type: ignore[method-assign]  # a fake

    broadcast, running.broker.broadcast = running.broker.broadcast, lose  # type: ignore[method-assign]  # a fake
    await client.cancel("agent", task_id)
    assert is_cancelled(await client.reply(task_id))
    assert gate.cancelled == 1
    assert other.task.done() is False


async def test_an_unsent_call_of_a_cancelled_task_is_never_sent(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    replica.broker.fail(*["not committed"] * 3, type="request")
    task_id = await client.ask("asker", 1)
    await mesh.events.wait(Step.DISPATCH, Phase.FAILED)
    await mesh.idle()
    await client.cancel("asker", task_id)
    assert is_cancelled(await client.reply(task_id))
    await mesh.advance(60)
    assert peer.requests == []
