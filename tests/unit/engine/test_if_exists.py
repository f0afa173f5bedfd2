"""`if_exists="reject"`: a task that must not exist yet."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint import InvalidOption, QueueFull, SendInDoubt, TaskExists
from meshpoint import Mesh as Connection
from meshpoint.client import starts
from meshpoint.errors import BrokerUnavailable
from meshpoint.model.messages import Address, Header, Message
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState
from meshpoint.ports.broker import PublishResult

from .agents import Gate, asker, doubler, gated
from .mesh import Mesh, connected

BACKENDS = pytest.mark.parametrize("durable", [True, False])


async def start(connection: Connection, agent: str, value: Any = 1, **options: Any) -> Any:
    return await connection.send(agent, value, task_id="order-17", if_exists="reject", **options)


async def refusal(connection: Connection, agent: str, value: Any = 1) -> str:
    with pytest.raises(TaskExists) as caught:
        await start(connection, agent, value)
    assert (caught.value.agent, caught.value.task_id) == (agent, "order-17")
    return str(caught.value)


@BACKENDS
async def test_a_running_task(
    mesh: Mesh, first: Connection, second: Connection, durable: bool
) -> None:
    gate = Gate()
    await mesh.replica(gated("agent", gate), durable=durable)
    task = await start(first, "agent")
    expected = (
        "task 'order-17' of 'agent' exists: choose another task_id, or attach with mesh.task"
    )
    assert await refusal(second, "agent") == expected
    assert await refusal(first, "agent") == expected
    gate.opened.set()
    assert await task.result() == "done"


async def test_a_waiting_or_ended_task(
    mesh: Mesh, first: Connection, second: Connection, peer: FakePeer
) -> None:
    for _ in range(2):
        await mesh.replica(asker("asker", "peer"))
    task = await start(first, "asker")
    request = await peer.wait_for_request()
    await mesh.idle()
    await refusal(second, "asker")
    await peer.respond(request, "done")
    assert await task.result() == {"peer": "done"}
    assert "exists" in await refusal(second, "asker")
    assert "exists" in await refusal(first, "asker")
    assert await task.result() == {"peer": "done"}
    assert len(peer.requests) == 1


@BACKENDS
async def test_a_task_of_another_requester_cannot_be_attached_to(
    mesh: Mesh, first: Connection, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    await start(first, "asker")
    await peer.wait_for_request()
    await mesh.idle()
    async with connected(mesh, "stranger") as stranger:
        assert await refusal(stranger, "asker") == (
            "the task id is in use by another request: choose another task_id than 'order-17'"
        )


async def test_another_input_is_refused_with_the_field(
    mesh: Mesh, first: Connection, second: Connection
) -> None:
    gate = Gate()
    await mesh.replica(gated("agent", gate))
    task = await start(first, "agent", {"city": "Rome"})
    assert "exists with another input (field 'city')" in await refusal(
        second, "agent", {"city": "Oslo"}
    )
    assert "exists with another input" in await refusal(first, "agent", {"city": "Oslo"})
    gate.opened.set()
    assert await task.result() == "done"


async def test_one_of_two_racing_senders_wins(
    mesh: Mesh, first: Connection, second: Connection, peer: FakePeer
) -> None:
    for _ in range(2):
        await mesh.replica(asker("asker", "peer"))
    results = await asyncio.gather(
        *(start(each, "asker") for each in (first, second, first)), return_exceptions=True
    )
    winners = [each for each in results if not isinstance(each, BaseException)]
    assert len(winners) == 1
    assert all(isinstance(each, TaskExists) for each in results if each not in winners)
    await peer.respond(await peer.wait_for_request(), "done")
    assert await winners[0].result() == {"peer": "done"}
    await mesh.idle()
    assert len(peer.requests) == 1


async def test_a_plain_request_attaches(
    mesh: Mesh, first: Connection, second: Connection, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"))
    task = await start(first, "asker")
    other = await second.send("asker", 1, task_id="order-17")
    await peer.respond(await peer.wait_for_request(), "done")
    assert await other.result() == {"peer": "done"}
    await mesh.advance(10)
    assert await task.result() == {"peer": "done"}


async def test_a_task_from_a_plain_request_exists(
    mesh: Mesh, first: Connection, second: Connection, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"))
    task = await first.send("asker", 1, task_id="order-17")
    request = await peer.wait_for_request()
    await mesh.idle()
    await refusal(second, "asker")
    await refusal(first, "asker")
    await peer.respond(request, "done")
    assert await task.result() == {"peer": "done"}


@BACKENDS
async def test_a_send_in_doubt_may_be_repeated(
    mesh: Mesh,
    first: Connection,
    second: Connection,
    peer: FakePeer,
    monkeypatch: pytest.MonkeyPatch,
    durable: bool,
) -> None:
    await mesh.replica(asker("asker", "peer"), durable=durable)
    broker = first._transport._broker
    publish = broker.publish

    async def lose_confirm(messages: Any) -> Any:
        await publish(messages)
        monkeypatch.setattr(broker, "publish", publish)
        raise BrokerUnavailable("the confirm was lost")

    monkeypatch.setattr(broker, "publish", lose_confirm)
    with pytest.raises(SendInDoubt):
        await start(first, "asker")
    request = await peer.wait_for_request()
    await mesh.idle()
    await refusal(second, "asker")
    task = await start(first, "asker")
    await refusal(first, "asker")
    await peer.respond(request, "done")
    assert await task.result() == {"peer": "done"}
    await mesh.idle()
    assert len(peer.requests) == 1


async def test_a_cancelled_send_may_be_repeated(
    mesh: Mesh, first: Connection, second: Connection
) -> None:
    replica = await mesh.replica(doubler)
    await replica.drain()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await start(first, "doubler", 2)
    await mesh.replica(doubler)
    task = await start(first, "doubler", 2)
    assert await task.result() == 4
    await refusal(second, "doubler", 2)


async def test_a_refused_request_leaves_nothing_in_doubt(
    mesh: Mesh, first: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.replica(doubler)

    async def reject(messages: Any) -> list[PublishResult]:
        return [PublishResult.OVERLOADED for _ in messages]

    with monkeypatch.context() as patch:
        patch.setattr(first._transport._broker, "publish", reject)
        with pytest.raises(QueueFull):
            await start(first, "doubler", 2)
    assert await (await start(first, "doubler", 2)).result() == 4
    await refusal(first, "doubler", 2)


async def test_a_full_queue_leaves_an_earlier_send_in_doubt(
    mesh: Mesh, first: Connection, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.replica(asker("asker", "peer"))
    broker = first._transport._broker
    publish = broker.publish

    async def lose_confirm(messages: Any) -> Any:
        await publish(messages)
        raise BrokerUnavailable("the confirm was lost")

    async def overloaded(messages: Any) -> list[PublishResult]:
        return [PublishResult.OVERLOADED for _ in messages]

    for failing, error in ((lose_confirm, SendInDoubt), (overloaded, QueueFull)):
        with monkeypatch.context() as patch:
            patch.setattr(broker, "publish", failing)
            with pytest.raises(error):
                await start(first, "asker")
    task = await start(first, "asker")  # not refused by its own first request
    await peer.respond(await peer.wait_for_request(), "done")
    assert await task.result() == {"peer": "done"}


async def test_a_lost_acceptance_is_repeated(
    mesh: Mesh, first: Connection, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "REPEAT_DELAYS", (0.05,))
    monkeypatch.setattr("meshpoint.client.transport.REPEAT_DELAYS", (0.05,))
    replica = await mesh.replica(asker("asker", "peer"))
    lost: list[Message] = []
    publish = replica.broker.publish

    async def lose_first(messages: Any) -> Any:
        kept: list[tuple[Address, Message]] = []
        for address, message in messages:
            if Header.START in message.headers and not lost:
                lost.append(message)
            else:
                kept.append((address, message))
        results = await publish(kept) if kept else []
        return (
            results if len(results) == len(messages) else [PublishResult.ACCEPTED] * len(messages)
        )

    monkeypatch.setattr(replica.broker, "publish", lose_first)
    task = await start(first, "asker")
    assert len(lost) == 1
    await peer.respond(await peer.wait_for_request(), "done")
    assert await task.result() == {"peer": "done"}
    assert len(peer.requests) == 1


async def test_a_crash_after_the_row_is_written(
    mesh: Mesh, first: Connection, second: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshpoint.client.transport.REPEAT_DELAYS", (0.05,))
    gate = Gate()
    crashed = await mesh.replica(gated("agent", gate))
    starting = asyncio.ensure_future(start(first, "agent"))
    await gate.wait_reached()
    await crashed.crash()
    gate.opened.set()
    await mesh.replica(gated("agent", gate))
    task = await starting
    await refusal(second, "agent")
    await mesh.advance(60)  # the lease expires
    assert isinstance(await task.outcome(), Ok)


@BACKENDS
async def test_a_delayed_task(
    mesh: Mesh, first: Connection, second: Connection, durable: bool
) -> None:
    await mesh.replica(doubler, durable=durable)
    task = await start(first, "doubler", 2, delay=timedelta(hours=1))
    if durable:
        assert await mesh.state(task.id) is TaskState.READY
    await refusal(second, "doubler", 2)
    await mesh.advance(3700)
    assert await task.result() == 4


async def test_a_handle_on_the_same_connection_stays_attached(
    mesh: Mesh, first: Connection, second: Connection, peer: FakePeer
) -> None:
    await mesh.replica(asker("asker", "peer"))
    await second.send("asker", 1, task_id="order-17")
    request = await peer.wait_for_request()
    await mesh.idle()
    attached = asyncio.ensure_future(first.task("asker", "order-17").result())
    await mesh.idle()
    await refusal(first, "asker")
    await peer.respond(request, "done")
    assert await attached == {"peer": "done"}


async def test_other_values_are_refused(mesh: Mesh, first: Connection) -> None:
    await mesh.replica(doubler)
    with pytest.raises(InvalidOption, match='if_exists: must be "attach" or "reject", not 1'):
        await first.send("doubler", 2, if_exists=1)  # type: ignore[call-overload]
    assert await (await first.send("doubler", 2, if_exists="reject")).result() == 4


@BACKENDS
async def test_a_task_that_was_cancelled_before_its_request(
    mesh: Mesh, first: Connection, durable: bool
) -> None:
    await mesh.replica(doubler, durable=durable)
    await first.task("doubler", "order-17").cancel()
    await mesh.idle()
    task = await start(first, "doubler")
    outcome = await task.outcome()
    assert isinstance(outcome, Failed)
    assert outcome.kind is FailureKind.CANCELLED
