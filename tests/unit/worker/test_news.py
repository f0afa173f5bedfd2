"""News on the way: forwarded up, and proof of life."""

from __future__ import annotations

from datetime import timedelta

import pytest

from meshpoint.model.messages import Header
from meshpoint.model.outcomes import Ok

from .agents import asker
from .mesh import Mesh
from .puppet import Puppet

HOMES = pytest.mark.parametrize("durable", [True, False])


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


@HOMES
async def test_news_is_forwarded_up(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    await mesh.replica(asker("one", "two"), asker("two", "peer"), durable=durable)
    await boss.ask("one", 1)
    await peer.status(await peer.request_number(), {"half": "done"})
    await mesh.settle()
    assert boss.statuses() == [{"half": "done"}]


@HOMES
async def test_silence_longer_than_the_idle_timeout(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    await mesh.replica(asker("asker", "peer", timeout=seconds(100), idle_timeout=seconds(10)), durable=durable)
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    assert request.headers[Header.IDLE_TIMEOUT.value] == 10
    for _ in range(4):
        await mesh.advance(8)
        await peer.status(request, "alive")
        await mesh.settle()
    assert boss.replies() == []
    await mesh.advance(12)
    assert boss.replies(task_id) == [Ok({"peer": "timeout"})]
    assert peer.cancels() == [request.correlation_id]


async def test_news_does_not_move_the_absolute_timeout(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer", timeout=seconds(20), idle_timeout=seconds(10)))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    for _ in range(4):
        await mesh.advance(5)
        await peer.status(request, "alive")
        await mesh.settle()
    await mesh.advance(2)
    assert boss.replies(task_id) == [Ok({"peer": "timeout"})]


async def test_news_from_somebody_else_counts_for_nothing(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer", idle_timeout=seconds(10)))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.advance(8)
    await peer.status(request, "alive", app_id="mallory")
    await mesh.advance(4)
    assert boss.replies(task_id) == [Ok({"peer": "timeout"})]
    assert boss.statuses() == []


@HOMES
async def test_a_waiting_child_sends_keep_alives(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    """One has little patience, and two waits long for its own peer."""
    await mesh.replica(asker("one", "two", idle_timeout=seconds(9)), asker("two", "peer"), durable=durable)
    task_id = await boss.ask("one", 1)
    request = await peer.request_number()
    await mesh.advance(60)
    assert boss.replies() == []
    await peer.respond(request, "at last")
    assert await boss.reply(task_id) == Ok({"two": {"peer": "at last"}})
