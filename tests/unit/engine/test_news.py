"""Status updates are forwarded to the requester and keep its calls alive."""

from __future__ import annotations

from datetime import timedelta

import pytest

from meshpoint.model.events import Step
from meshpoint.model.messages import Header
from meshpoint.model.outcomes import Ok
from meshpoint.ports.broker import Published

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
    """The call to `two` has a short idle timeout, and `two` waits long for its own peer."""
    await mesh.replica(asker("one", "two", idle_timeout=seconds(9)), asker("two", "peer"), durable=durable)
    task_id = await boss.ask("one", 1)
    request = await peer.request_number()
    await mesh.advance(60)
    assert boss.replies() == []
    await peer.respond(request, "at last")
    assert await boss.reply(task_id) == Ok({"two": {"peer": "at last"}})


@HOMES
async def test_a_flood_of_news_is_throttled(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    for number in range(500):
        await peer.status(request, number)
    await mesh.events.wait(Step.STATUS_DROPPED, count=3)
    await mesh.settle()
    assert boss.statuses() == list(range(20))
    dropped = mesh.events.of(Step.STATUS_DROPPED, task_id=task_id)
    assert [event.detail["dropped"] for event in dropped] == [1, 10, 100]
    mesh.clock.advance(seconds(0.5))
    for number in range(500, 520):
        await peer.status(request, number)
    await mesh.settle()
    assert boss.statuses()[20:] == list(range(500, 510))
    await peer.respond(request, "right")
    assert await boss.reply(task_id) == Ok({"peer": "right"})


async def test_news_of_other_tasks_pass_a_flood(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"))
    for number in range(2):
        await boss.ask("asker", number)
    loud, quiet = await peer.request_number(1), await peer.request_number(2)
    for _ in range(100):
        await peer.status(loud, "loud")
    await peer.status(quiet, "quiet")
    await mesh.settle()
    assert sorted(map(str, boss.statuses())) == ["loud"] * 20 + ["quiet"]


async def test_long_news_are_not_forwarded(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await peer.status(request, "x" * 70_000)
    await peer.status(request, "short")
    await mesh.settle()
    assert boss.statuses() == ["short"]
    (dropped,) = mesh.events.of(Step.STATUS_DROPPED, task_id=task_id)
    assert "65536 bytes" in str(dropped.detail["reason"])


async def test_news_that_the_broker_can_never_accept_are_reported(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    running = await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    running.broker.fail(Published.REJECTED, type="status")
    await peer.status(await peer.request_number(), "refused")
    (rejected,) = await mesh.events.wait(Step.MESSAGE_REJECTED, task_id=task_id)
    assert rejected.detail["type"] == "status"
    assert boss.statuses() == []
