"""`Mesh.send` keeps the outcome of a task that never paused; `Mesh.call` does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from fake_peer import FakePeer
from meshpoint import Mesh as Connection
from meshpoint.client.transport import Transport
from meshpoint.model.ids import AgentName
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import TaskState

from .agents import asker, doubler
from .faults import FaultyBroker
from .mesh import Mesh, RunningReplica

WRITES = {"begin", "pause", "claim", "end", "release", "store_replies", "attach"}


@pytest.fixture
async def connection(mesh: Mesh) -> AsyncIterator[Connection]:
    async with Transport(FaultyBroker(mesh.exchange)) as transport:
        yield Connection(transport)


@pytest.fixture
async def later(mesh: Mesh) -> AsyncIterator[Connection]:
    """A connection of the same service after a restart."""
    async with Transport(FaultyBroker(mesh.exchange)) as transport:
        yield Connection(transport)


def writes(replica: RunningReplica) -> list[str]:
    return [name for name in replica.store.calls if name in WRITES]


async def test_a_sent_task_keeps_its_result_for_seven_days(
    mesh: Mesh, connection: Connection, later: Connection
) -> None:
    replica = await mesh.replica(doubler)
    task = await connection.send("doubler", 21)
    assert await task.result() == 42
    assert writes(replica) == ["store_replies"]
    mesh.clock.advance(timedelta(days=6))
    await mesh.store.purge(AgentName("doubler"), 10)
    assert await later.task("doubler", task.id).result() == 42
    mesh.clock.advance(timedelta(days=2))
    await mesh.store.purge(AgentName("doubler"), 10)
    assert await mesh.state(task.id) is None


async def test_a_called_task_leaves_no_row(mesh: Mesh, connection: Connection) -> None:
    replica = await mesh.replica(doubler)
    assert await connection.call("doubler", 21) == 42
    await mesh.idle()
    assert writes(replica) == []
    assert await mesh.store.tasks() == []


async def test_a_sent_task_with_a_pause_costs_no_further_write(
    mesh: Mesh, peer: FakePeer, connection: Connection
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    task = await connection.send("asker", 1)
    await peer.respond(await peer.wait_for_request(), "done")
    assert await task.result() == {"peer": "done"}
    await mesh.idle()
    assert writes(replica) == ["pause", "claim", "end"]
    mesh.clock.advance(timedelta(days=2))
    await mesh.store.purge(AgentName("asker"), 10)
    assert await mesh.state(task.id) is TaskState.COMPLETED
    mesh.clock.advance(timedelta(days=6))
    await mesh.store.purge(AgentName("asker"), 10)
    assert await mesh.state(task.id) is None


async def test_a_crash_after_the_result_was_kept_loses_no_reply(
    mesh: Mesh, connection: Connection
) -> None:
    replica = await mesh.replica(doubler)
    stored = asyncio.Event()

    async def stop_after_commit() -> None:
        stored.set()
        await asyncio.Event().wait()

    replica.store.after["store_replies"] = stop_after_commit
    task = await connection.send("doubler", 21)
    await stored.wait()
    await replica.crash()
    await mesh.replica(doubler)
    await mesh.advance(30)
    assert await task.outcome() == Ok(42)
    assert mesh.unacked("doubler") == 0


async def test_without_a_database_the_result_is_sent_and_not_kept(
    mesh: Mesh, connection: Connection
) -> None:
    await mesh.replica(doubler, durable=False)
    assert await (await connection.send("doubler", 21)).result() == 42
    await mesh.idle()
    assert mesh.unacked("doubler") == 0
