"""A call waits as long as its peer lives, and no longer than `peer_timeout` for a dead one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Header
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import NO_DEADLINE

from .agents import Gate, asker, gated
from .mesh import Mesh
from .scenes import LONG_LEASE, ONLY_IN_A_DATABASE, Scene

PEER_TIMEOUT = 15


@pytest.mark.parametrize(
    "arrange",
    [
        Scene.waiting,
        Scene.ready,
        Scene.parked,
        Scene.suspended,
        Scene.suspended_with_outcomes,
        Scene.suspending,
        Scene.running,
        Scene.running_with_a_row,
        Scene.resumed,
    ],
    ids=lambda arrange: arrange.__name__,
)
async def test_a_parent_waits_for_a_living_child_in_every_state(
    any_mesh: Mesh, arrange: Callable[[Scene], Awaitable[TaskId]]
) -> None:
    scene = await Scene(any_mesh, has_parent=True).open()
    if not scene.durable and arrange in ONLY_IN_A_DATABASE:
        pytest.skip("a task in the process has no row that a person or another replica can change")
    await any_mesh.replica(
        asker("parent", "agent"),
        durable=scene.durable,
        peer_timeout=timedelta(seconds=PEER_TIMEOUT),
        **LONG_LEASE,
    )
    await arrange(scene)
    await any_mesh.advance(3 * PEER_TIMEOUT)
    assert scene.client.replies(scene.parent_task) == []
    assert scene.client.statuses() == []  # the client has not asked for signs of life
    scene.replica.broker.unavailable = True  # from now on the child is as good as dead
    await any_mesh.advance(PEER_TIMEOUT + 3)
    assert await scene.client.reply(scene.parent_task) == Ok({"agent": "timeout"})


async def test_a_mesh_that_was_stopped_continues_to_wait(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """No keep-alive was sent or received meanwhile, and the child starts last."""
    options: dict[str, Any] = {"peer_timeout": timedelta(seconds=PEER_TIMEOUT)}
    agents = [asker("parent", "agent"), asker("agent", "peer", timeout=timedelta(days=1))]
    replicas = [await mesh.replica(each, **options) for each in agents]
    task_id = await client.ask("parent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    for replica in replicas:
        await replica.crash()
    mesh.clock.advance(timedelta(hours=8))
    await mesh.replica(agents[0], **options)
    await mesh.advance(PEER_TIMEOUT - 3)
    await mesh.replica(agents[1], **options)
    await mesh.advance(3 * PEER_TIMEOUT)
    await peer.respond(request, "at last")
    assert await client.reply(task_id) == Ok({"agent": {"peer": "at last"}})


@pytest.mark.parametrize(
    ("timeouts", "idle_timeout", "deadline"),
    [
        ({}, 600, None),
        ({"timeout": timedelta(seconds=20)}, None, 19.5),
        ({"idle_timeout": timedelta(seconds=5)}, 5, None),
        ({"timeout": timedelta(seconds=20), "idle_timeout": timedelta(seconds=5)}, 5, 19.5),
    ],
)
@pytest.mark.parametrize("durable", [True, False])
async def test_only_named_timeouts_are_absolute(
    mesh: Mesh,
    client: FakePeer,
    peer: FakePeer,
    durable: bool,
    timeouts: dict[str, Any],
    idle_timeout: float | None,
    deadline: float | None,
) -> None:
    await mesh.replica(asker("asker", "peer", **timeouts), durable=durable)
    await client.ask("asker", 1)
    headers = (await peer.wait_for_request()).headers
    assert headers.get(Header.IDLE_TIMEOUT.value) == idle_timeout
    expected = None if deadline is None else mesh.deadline_in(deadline)
    assert headers.get(Header.DEADLINE.value) == expected


async def test_a_first_segment_sends_keep_alives_only_as_often_as_needed(
    mesh: Mesh, client: FakePeer
) -> None:
    gate = Gate()
    await mesh.replica(gated("agent", gate))
    task_id = await client.ask("agent", 1, idle_timeout=30)
    await client.ask("agent", 1)
    await gate.wait_reached(2)
    await mesh.advance(9)
    assert client.statuses() == []
    await mesh.advance(60)
    assert client.statuses() == [{"alive": True}] * 6
    assert {message.correlation_id for message in client.messages} == {task_id}
    gate.opened.set()
    assert await client.reply(task_id) == Ok("done")
    await mesh.advance(60)
    assert len(client.statuses()) == 6


async def test_a_child_that_sends_nothing_on_its_own_fails_the_call(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """An agent in another language has to send its own signs of life."""
    await mesh.replica(asker("asker", "peer"), peer_timeout=timedelta(seconds=PEER_TIMEOUT))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    for _ in range(3):
        await mesh.advance(PEER_TIMEOUT - 2)
        await peer.status(request, {"alive": True})
        await mesh.idle()
    assert client.replies() == []
    await mesh.advance(PEER_TIMEOUT + 2)
    assert await client.reply(task_id) == Ok({"peer": "timeout"})


async def test_a_far_deadline_of_an_earlier_version_is_none(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """Replicas of earlier versions send the stored deadline of a call without one."""
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1, deadline=NO_DEADLINE.timestamp() - 0.5)
    await peer.wait_for_request()
    await mesh.idle()
    assert (await mesh.task(task_id))[0].deadline is None
