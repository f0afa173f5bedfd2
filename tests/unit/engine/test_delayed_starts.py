"""Tasks that begin later than their request arrives."""

from __future__ import annotations

from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import FunctionAgent, agent
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState

from .agents import asker
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])


def counter() -> FunctionAgent[Any, Any]:
    """An agent that returns how often it has run."""
    count = 0

    @agent("agent")
    async def run(ctx: TaskExecutionContext, _: Any) -> int:
        nonlocal count
        count += 1
        return count

    return run


async def ask_later(mesh: Mesh, client: FakePeer, seconds: float, **headers: Any) -> TaskId:
    """Send a request whose task begins later, and wait until it is accepted."""
    task_id = await client.ask("agent", 1, start_at=mesh.deadline_in(seconds), **headers)
    await mesh.events.wait(Step.BEGIN, Phase.AFTER, task_id=task_id)
    return task_id


async def test_a_task_begins_at_its_time(any_mesh: Mesh) -> None:
    client = await any_mesh.fake_peer("client")
    await any_mesh.replica(counter())
    task_id = await ask_later(any_mesh, client, 20)
    await any_mesh.advance(18)
    assert client.replies() == []
    assert await any_mesh.state(task_id) is TaskState.READY
    await any_mesh.idle()
    assert any_mesh.unacked("agent") == 0
    await any_mesh.advance(4)
    assert await client.reply(task_id) == Ok(1)


async def test_another_replica_begins_the_task_of_a_killed_one(any_mesh: Mesh) -> None:
    client = await any_mesh.fake_peer("client")
    first = await any_mesh.replica(counter())
    task_id = await ask_later(any_mesh, client, 20)
    await any_mesh.idle()
    await first.crash()
    await any_mesh.replica(counter())
    await any_mesh.advance(23)
    assert await client.reply(task_id) == Ok(1)


async def test_a_task_in_memory_begins_at_its_time(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(counter(), durable=False)
    task_id = await ask_later(mesh, client, 20)
    await mesh.advance(18)
    assert client.replies() == []
    assert mesh.unacked("agent") == 1
    await mesh.advance(4)
    assert await client.reply(task_id) == Ok(1)
    assert mesh.unacked("agent") == 0


async def test_a_task_in_memory_of_a_killed_replica_begins_at_its_time(
    mesh: Mesh, client: FakePeer
) -> None:
    first = await mesh.replica(counter(), durable=False)
    task_id = await ask_later(mesh, client, 20)
    await first.crash()
    await mesh.replica(counter(), durable=False)
    await mesh.advance(15)
    assert client.replies() == []
    await mesh.advance(7)
    assert await client.reply(task_id) == Ok(1)


async def test_tasks_due_in_the_far_future_leave_room_for_others(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("agent", "peer"), durable=False, max_in_memory=2, max_concurrency=1)
    later = [await client.ask("agent", 1, start_at=mesh.deadline_in(1000)) for _ in range(2)]
    await mesh.idle()
    assert mesh.events.matching(Step.MEMORY_FULL) == []
    for number in (1, 2):
        await client.ask("agent", number)
        await peer.wait_for_request(number)
    for request in list(peer.requests):
        await peer.respond(request, "done")
    await mesh.advance(1002)
    for number in (3, 4):
        await peer.respond(await peer.wait_for_request(number), "done")
    for task_id in later:
        assert await client.reply(task_id) == Ok({"peer": "done"})
    assert mesh.unacked("agent") == 0


@BACKENDS
async def test_a_task_that_has_not_begun_is_cancelled(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(counter(), durable=durable)
    task_id = await ask_later(mesh, client, 20)
    await client.cancel("agent", task_id)
    outcome = await client.reply(task_id)
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.CANCELLED
    await mesh.advance(25)
    assert len(client.replies()) == 1


@BACKENDS
async def test_a_repeated_request_begins_nothing(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(counter(), durable=durable)
    task_id = await ask_later(mesh, client, 20)
    await client.ask("agent", 1, task_id, start_at=mesh.deadline_in(20))
    await mesh.advance(23)
    assert client.replies(task_id) == [Ok(1)]


@BACKENDS
async def test_a_start_in_the_past_is_now(mesh: Mesh, client: FakePeer, durable: bool) -> None:
    await mesh.replica(counter(), durable=durable)
    task_id = await client.ask("agent", 1, start_at=mesh.deadline_in(-5))
    assert await client.reply(task_id) == Ok(1)


@BACKENDS
async def test_a_deadline_before_the_start_ends_the_task(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(counter(), durable=durable)
    task_id = await ask_later(mesh, client, 20, deadline=mesh.deadline_in(10))
    await mesh.advance(13)
    outcome = await client.reply(task_id)
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.TIMEOUT
