"""Races between concurrent messages of in-process tasks."""

from __future__ import annotations

from fake_peer import FakePeer
from meshpoint.model.outcomes import Failed

from .agents import doubler
from .mesh import Mesh


async def test_a_request_delivered_many_times_is_answered_once(
    mesh: Mesh, client: FakePeer
) -> None:
    await mesh.replica(doubler, durable=False, begin_at_delivery=0, max_attempts=1)
    task_id = await client.ask("doubler", 1)
    assert isinstance(await client.reply(task_id), Failed)
    await mesh.idle()
    assert len(client.replies(task_id)) == 1
    assert len(mesh.dead_letters("doubler")) == 1
