"""A request that comes again from another connection: its sender gets the outcome too."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint import Mesh as Connection
from meshpoint import TaskHandle
from meshpoint.client.transport import Transport
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.messages import Address, AttachStatus, Header, Message
from meshpoint.model.outcomes import Ok, Outcome, Outcomes
from meshpoint.model.tasks import MAX_REPLY_ADDRESSES
from meshpoint.model.transitions import Attach, AttachResult, TaskLocked
from meshpoint.ports.broker import PublishResult

from .agents import Gate, ScriptedAgent, asker, doubler, gated, gated_after
from .faults import FaultyBroker
from .mesh import Mesh, RunningReplica

BACKENDS = pytest.mark.parametrize("durable", [True, False])


def outcomes(tasks: list[TaskHandle[Any]]) -> list[Outcome | None]:
    return [task._task.outcome for task in tasks]


def gated_before(name: str, peer: str, gate: Gate) -> ScriptedAgent:
    """An agent that waits at `gate` before it calls `peer`."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        await gate()
        return Paused([Call(peer, peer, request)], b"state")

    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Done[str]:
        return Done("done")

    return ScriptedAgent(name, start, resume)


def lock_once(replica: RunningReplica) -> None:
    """Let the replica's database report the task of the next attach as locked."""
    store = replica.store._inner

    async def attach(attaches: Sequence[Attach]) -> list[AttachResult]:
        del store.attach
        return [TaskLocked(each.task_id) for each in attaches]

    store.attach = attach


def hold_notices(replica: RunningReplica, gate: Gate) -> None:
    """Hold the messages to addresses whose place was taken until `gate` opens."""
    publish = replica.broker.publish

    async def publish_later(messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        if messages[0][1].headers.get(Header.ATTACH) == AttachStatus.DETACHED:
            await gate()
        return await publish(messages)

    replica.broker.publish = publish_later  # type: ignore[method-assign]  # a fault


@BACKENDS
async def test_a_crash_in_the_first_segment(
    mesh: Mesh, first: Connection, second: Connection, durable: bool
) -> None:
    gate = Gate()
    replica = await mesh.replica(gated("agent", gate), durable=durable)
    tasks = [await first.send("agent", 1, task_id="order-17")]
    await gate.wait_reached()
    tasks.append(await second.send("agent", 1, task_id="order-17"))
    await mesh.idle()
    await replica.crash()
    gate.opened.set()
    await mesh.replica(gated("agent", gate), durable=durable)
    await mesh.advance(30)
    assert outcomes(tasks) == 2 * [Ok("done")]


@BACKENDS
async def test_in_one_batch_with_the_first(
    mesh: Mesh, first: Connection, second: Connection, durable: bool
) -> None:
    replica = await mesh.replica(doubler, durable=durable)
    await replica.crash()
    tasks = [
        await each.send("doubler", 1, task_id="order-17", delay=timedelta(seconds=5))
        for each in (first, second)
    ]
    await mesh.replica(doubler, durable=durable)
    await mesh.idle()
    await mesh.advance(30)
    assert outcomes(tasks) == 2 * [Ok(2)]


async def test_while_the_first_pause_is_written(
    mesh: Mesh, peer: FakePeer, first: Connection, second: Connection
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    gate = Gate()
    replica.store.before["pause"] = gate
    tasks = [await first.send("asker", 1, task_id="order-17")]
    await gate.wait_reached()
    tasks.append(await second.send("asker", 1, task_id="order-17"))
    await mesh.idle()
    gate.opened.set()
    await peer.respond(await peer.wait_for_request(), "done")
    await mesh.advance(30)
    assert outcomes(tasks) == 2 * [Ok({"peer": "done"})]
    assert mesh.unacked("asker") == 0


async def test_a_crash_before_the_address_is_written(
    mesh: Mesh, peer: FakePeer, first: Connection, second: Connection
) -> None:
    gate, writes = Gate(), Gate()
    asker = gated_before("asker", "peer", gate)
    replica = await mesh.replica(asker)
    replica.store.before["attach"] = writes
    tasks = [await first.send("asker", 1, task_id="order-17")]
    await gate.wait_reached()
    tasks.append(await second.send("asker", 1, task_id="order-17"))
    await mesh.idle()
    gate.opened.set()
    await writes.wait_reached()
    await replica.crash()
    await mesh.replica(asker)
    await mesh.advance(30)
    await peer.respond(await peer.wait_for_request(), "done")
    await mesh.advance(30)
    assert outcomes(tasks) == 2 * [Ok("done")]


async def test_the_task_ends_while_the_address_is_written(
    mesh: Mesh, peer: FakePeer, first: Connection, second: Connection
) -> None:
    gate, writes = Gate(), Gate()
    replica = await mesh.replica(gated_after("agent", "peer", gate))
    tasks = [await first.send("agent", 1, task_id="order-17")]
    await peer.respond(await peer.wait_for_request(), 1)
    await gate.wait_reached()
    replica.store.before["attach"] = writes
    tasks.append(await second.send("agent", 1, task_id="order-17"))
    await writes.wait_reached()
    gate.opened.set()
    await mesh.idle()
    writes.opened.set()
    await mesh.advance(3)
    assert outcomes(tasks) == 2 * [Ok({"peer": 1})]
    assert mesh.unacked("agent") == 0
    await replica.drain()


async def test_another_session_locks_the_row(
    mesh: Mesh, peer: FakePeer, first: Connection, second: Connection
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    tasks = [await first.send("asker", 1, task_id="order-17")]
    request = await peer.wait_for_request()
    await mesh.idle()
    lock_once(replica)
    tasks.append(await second.send("asker", 1, task_id="order-17"))
    await mesh.advance(10)
    await peer.respond(request, "done")
    await mesh.advance(30)
    assert outcomes(tasks) == 2 * [Ok({"peer": "done"})]


@BACKENDS
async def test_the_task_ends_while_another_address_learns_that_its_place_was_taken(
    mesh: Mesh, durable: bool
) -> None:
    gate, notice = Gate(), Gate()
    replica = await mesh.replica(gated("agent", gate), durable=durable)
    hold_notices(replica, notice)
    async with AsyncExitStack() as stack:
        tasks = []
        for _ in range(MAX_REPLY_ADDRESSES + 1):
            broker = FaultyBroker(mesh.exchange)
            connection = Connection(await stack.enter_async_context(Transport(broker)))
            tasks.append(await connection.send("agent", 1, task_id="order-17"))
            await mesh.idle()
        await notice.wait_reached()
        gate.opened.set()
        await mesh.idle()
        other = await connection.send("agent", 2)
        await mesh.idle()
        assert outcomes([other]) == [Ok("done")]
        notice.opened.set()
        await mesh.advance(3)
        assert outcomes(tasks).count(Ok("done")) == MAX_REPLY_ADDRESSES
        assert mesh.unacked("agent") == 0
        assert not replica.worker.tasks.unacked.by_task


@BACKENDS
async def test_other_requests_do_not_wait_for_an_address_whose_place_was_taken(
    mesh: Mesh, peer: FakePeer, durable: bool
) -> None:
    notice = Gate()
    hold_notices(await mesh.replica(asker("asker", "peer"), durable=durable), notice)
    async with AsyncExitStack() as stack:
        for _ in range(MAX_REPLY_ADDRESSES + 1):
            broker = FaultyBroker(mesh.exchange)
            connection = Connection(await stack.enter_async_context(Transport(broker)))
            await connection.send("asker", 1, task_id="order-17")
            await mesh.idle()
        await notice.wait_reached()
        await connection.send("asker", 2, task_id="order-18")
        assert await peer.wait_for_request(2)
        notice.opened.set()
