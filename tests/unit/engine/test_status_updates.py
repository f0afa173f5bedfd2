"""Status updates are forwarded to the requester and keep its calls alive."""

from __future__ import annotations

from datetime import timedelta

import pytest

from fake_peer import FakePeer
from meshpoint import TaskExecutionContext, agent
from meshpoint.model.envelopes import MAX_STATUS_BYTES
from meshpoint.model.events import Step
from meshpoint.model.messages import Header, MessageType
from meshpoint.model.outcomes import Ok
from meshpoint.ports.broker import PublishResult

from .agents import asker
from .mesh import Mesh

BACKENDS = pytest.mark.parametrize("durable", [True, False])


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)


@BACKENDS
async def test_statuses_are_forwarded_to_the_requester(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("one", "two"), asker("two", "peer"), durable=durable)
    await client.ask("one", 1)
    await peer.status(await peer.wait_for_request(), {"half": "done"})
    await mesh.idle()
    assert client.statuses() == [{"half": "done"}]


@BACKENDS
async def test_a_call_silent_beyond_its_idle_timeout_times_out(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(
        asker("asker", "peer", timeout=seconds(100), idle_timeout=seconds(10)), durable=durable
    )
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    assert request.headers[Header.IDLE_TIMEOUT.value] == 10
    for _ in range(4):
        await mesh.advance(8)
        await peer.status(request, "alive")
        await mesh.idle()
    assert client.replies() == []
    await mesh.advance(12)
    assert client.replies(task_id) == [Ok({"peer": "timeout"})]
    assert peer.cancels() == [request.correlation_id]


async def test_statuses_do_not_extend_the_absolute_timeout(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer", timeout=seconds(20), idle_timeout=seconds(10)))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    for _ in range(4):
        await mesh.advance(5)
        await peer.status(request, "alive")
        await mesh.idle()
    await mesh.advance(2)
    assert client.replies(task_id) == [Ok({"peer": "timeout"})]


async def test_statuses_from_another_sender_are_ignored(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer", idle_timeout=seconds(10)))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.advance(8)
    await peer.status(request, "alive", app_id="mallory")
    await mesh.advance(4)
    assert client.replies(task_id) == [Ok({"peer": "timeout"})]
    assert client.statuses() == []


@BACKENDS
async def test_a_waiting_child_sends_keep_alives(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    """The call to `two` has a short idle timeout, and `two` waits long for its own peer."""
    await mesh.replica(
        asker("one", "two", idle_timeout=seconds(9)), asker("two", "peer"), durable=durable
    )
    task_id = await client.ask("one", 1)
    request = await peer.wait_for_request()
    await mesh.advance(60)
    assert client.replies() == []
    await peer.respond(request, "at last")
    assert await client.reply(task_id) == Ok({"two": {"peer": "at last"}})


@BACKENDS
async def test_a_flood_of_statuses_is_throttled(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    for number in range(500):
        await peer.status(request, number)
    await mesh.events.wait(Step.STATUS_DROPPED, count=3)
    await mesh.idle()
    assert client.statuses() == list(range(20))
    dropped = mesh.events.matching(Step.STATUS_DROPPED, task_id=task_id)
    assert [event.detail["dropped"] for event in dropped] == [1, 10, 100]
    mesh.clock.advance(seconds(0.5))
    for number in range(500, 520):
        await peer.status(request, number)
    await mesh.idle()
    assert client.statuses()[20:] == list(range(500, 510))
    await peer.respond(request, "right")
    assert await client.reply(task_id) == Ok({"peer": "right"})


async def test_a_flood_does_not_throttle_statuses_of_other_tasks(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"))
    for number in range(2):
        await client.ask("asker", number)
    loud_request, quiet_request = await peer.wait_for_request(1), await peer.wait_for_request(2)
    for _ in range(100):
        await peer.status(loud_request, "loud")
    await peer.status(quiet_request, "quiet")
    await mesh.idle()
    assert sorted(map(str, client.statuses())) == ["loud"] * 20 + ["quiet"]


async def test_long_statuses_are_not_forwarded(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await peer.status(request, "x" * 70_000)
    await peer.status(request, "short")
    await mesh.idle()
    assert client.statuses() == ["short"]
    (dropped,) = mesh.events.matching(Step.STATUS_DROPPED, task_id=task_id)
    assert "65536 bytes" in str(dropped.detail["reason"])


async def test_a_status_may_have_the_maximal_length(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"))
    await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await peer.status(request, "x")
    await mesh.idle()
    (short,) = client.messages
    longest = "x" * (MAX_STATUS_BYTES - len(short.body) + 1)
    await peer.status(request, longest)
    await peer.status(request, longest + "x")
    await mesh.idle()
    assert client.statuses() == ["x", longest]
    assert len(client.messages[1].body) == MAX_STATUS_BYTES


async def test_an_own_status_may_have_the_maximal_length(mesh: Mesh, client: FakePeer) -> None:
    @agent("talker")
    async def talk(ctx: TaskExecutionContext, length: int) -> None:
        await ctx.update_status("x" * length)

    async def send(length: int) -> list[int]:
        earlier = len(client.messages)
        await client.reply(await client.ask("talker", length))
        sent = [m for m in client.messages[earlier:] if m.type is MessageType.STATUS]
        return [len(message.body) for message in sent]

    await mesh.replica(talk)
    (short,) = await send(1)
    assert await send(MAX_STATUS_BYTES - short + 1) == [MAX_STATUS_BYTES]
    assert await send(MAX_STATUS_BYTES - short + 2) == []


async def test_statuses_that_the_broker_rejects_are_reported(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    replica.broker.fail(PublishResult.REJECTED, type="status")
    await peer.status(await peer.wait_for_request(), "refused")
    (rejected,) = await mesh.events.wait(Step.MESSAGE_REJECTED, task_id=task_id)
    assert rejected.detail["type"] == "status"
    assert client.statuses() == []


@BACKENDS
async def test_a_flood_costs_few_look_ups(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=durable)
    await client.ask("asker", 1)
    request = await peer.wait_for_request()
    store = replica.store if durable else replica.memory
    for number in range(3):
        for _ in range(200):
            await peer.status(request, number)
            await peer.status(request, number, app_id="mallory")
        await mesh.idle()
        assert len(client.statuses()) == 20 * (number + 1)
        mesh.clock.advance(seconds(1))
    looked_up = [given for name, given in store.arguments if name == "record_progress"]
    senders = [progress.sender for (updates,) in looked_up for progress in updates]
    assert senders.count("peer") == 3
    await peer.respond(request, "right")


@BACKENDS
async def test_a_short_idle_timeout_is_extended_by_each_update(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    call = asker("asker", "peer", timeout=seconds(100), idle_timeout=seconds(2))
    await mesh.replica(call, durable=durable)
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    for _ in range(20):
        await mesh.advance(0.5)
        await peer.status(request, "alive")
        await mesh.idle()
    assert client.replies() == []
    await mesh.advance(3)
    assert client.replies(task_id) == [Ok({"peer": "timeout"})]
