"""Races between concurrent messages of in-process tasks."""

from __future__ import annotations

from meshpoint.model.outcomes import Failed

from .agents import doubler
from .mesh import Mesh
from .puppet import Puppet


async def test_a_request_that_came_too_often_is_answered_once(mesh: Mesh, boss: Puppet) -> None:
    await mesh.replica(doubler, durable=False, begin_at_delivery=0, max_attempts=1)
    task_id = await boss.ask("doubler", 1)
    assert isinstance(await boss.reply(task_id), Failed)
    await mesh.settle()
    assert len(boss.replies(task_id)) == 1
    assert len(mesh.dead_letters("doubler")) == 1
