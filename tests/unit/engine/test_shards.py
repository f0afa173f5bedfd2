"""Several request queues for one agent: a flood from one sender leaves the others their share."""

from __future__ import annotations

from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.errors import BrokerUnavailable, QueueFull
from meshpoint.model.calls import Call, Done
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Address, nested_queue, request_shard, shard_for_sender
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.ports.broker import PublishResult
from plain_client import PlainClient

from .agents import ScriptedAgent, asker, caller, doubler
from .faults import FaultyBroker
from .mesh import Mesh

AGENT = AgentName("agent")


def echo_agent(order: list[Any]) -> ScriptedAgent:
    """Returns its input and records the order."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        order.append(request)
        return Done(request)

    return ScriptedAgent("agent", start)


def senders_on_two_shards(shards: int) -> tuple[str, str]:
    """Two sender names that map to different queues."""
    first = "flood"
    others = (f"honest{number}" for number in range(1000))
    return first, next(
        name
        for name in others
        if shard_for_sender(AGENT, name, shards) != shard_for_sender(AGENT, first, shards)
    )


def test_senders_are_spread_over_all_queues_and_each_has_one() -> None:
    addresses = [shard_for_sender(AGENT, f"sender{number}", 4) for number in range(100)]
    assert set(addresses) == {request_shard(AGENT, number) for number in range(4)}
    assert addresses == [shard_for_sender(AGENT, f"sender{number}", 4) for number in range(100)]
    assert {shard_for_sender(AGENT, f"sender{number}", 1) for number in range(100)} == {
        Address("agent.req")
    }
    assert (
        shard_for_sender(AGENT, "travel", 4) == "agent.req.2"
    )  # the example in docs/reference/wire.md


async def test_a_flooding_sender_does_not_starve_others(mesh: Mesh) -> None:
    """All requests are queued before the replica starts."""
    starting = await mesh.replica(echo_agent([]), request_shards=4)
    await starting.drain()
    flooding_sender, regular_sender = senders_on_two_shards(4)
    order = list[Any]()
    async with (
        PlainClient(FaultyBroker(mesh.exchange), flooding_sender) as flooding,
        PlainClient(FaultyBroker(mesh.exchange), regular_sender) as asking,
    ):
        flooded = [await flooding.send("agent", number) for number in range(200)]
        waiting = [await asking.send("agent", f"honest {number}") for number in range(5)]
        await mesh.replica(echo_agent(order), request_shards=4, max_concurrency=3)
        assert [(await reply).outcome for reply in waiting] == [
            Ok(f"honest {number}") for number in range(5)
        ]
        assert [(await each).outcome for each in flooded] == [Ok(number) for number in range(200)]
    assert max(order.index(f"honest {number}") for number in range(5)) < 30
    assert len(order) == 205


async def test_queues_that_are_no_longer_configured_are_drained(
    mesh: Mesh, client: FakePeer
) -> None:
    more_shards = await mesh.replica(echo_agent([]), request_shards=4)
    await more_shards.drain()
    request = client.request("late")
    assert await client.send("agent", request, request_shard(AGENT, 3)) is PublishResult.ACCEPTED
    await mesh.replica(echo_agent([]), request_shards=1)
    assert await client.reply(request.correlation_id) == Ok("late")


async def test_replicas_with_fewer_shards_serve_the_queues_of_others(
    mesh: Mesh, client: FakePeer
) -> None:
    await mesh.replica(echo_agent([]))
    more_shards = await mesh.replica(echo_agent([]), request_shards=3)
    await more_shards.drain()
    await mesh.advance(301)
    request = client.request("late")
    assert await client.send("agent", request, request_shard(AGENT, 2)) is PublishResult.ACCEPTED
    assert await client.reply(request.correlation_id) == Ok("late")


async def test_a_deleted_queue_is_no_longer_consumed(mesh: Mesh, client: FakePeer) -> None:
    more_shards = await mesh.replica(echo_agent([]), request_shards=3)
    await more_shards.drain()
    replica = await mesh.replica(echo_agent([]))
    assert set(replica.worker._subscriptions) >= {"requests", "requests 1", "requests 2", "nested"}
    del mesh.exchange.queues[request_shard(AGENT, 2)]
    await mesh.advance(301)
    assert "requests 2" not in replica.worker._subscriptions
    assert "requests 1" in replica.worker._subscriptions
    assert await client.reply(await client.ask("agent", "still here")) == Ok("still here")


async def test_a_client_whose_queue_was_deleted_uses_the_first_one(mesh: Mesh) -> None:
    flooding_sender, regular_sender = senders_on_two_shards(2)
    name = next(
        item
        for item in (flooding_sender, regular_sender)
        if shard_for_sender(AGENT, item, 2) == request_shard(AGENT, 1)
    )
    await mesh.replica(echo_agent([]), request_shards=2)
    async with PlainClient(FaultyBroker(mesh.exchange), name) as client:
        assert (await (await client.send("agent", 1))).outcome == Ok(1)
        del mesh.exchange.queues[request_shard(AGENT, 1)]
        assert (await (await client.send("agent", 2))).outcome == Ok(2)


async def test_a_client_gets_an_error_when_a_queue_is_full(mesh: Mesh) -> None:
    await mesh.replica(echo_agent([]))
    broker = FaultyBroker(mesh.exchange)
    async with PlainClient(broker) as client:
        broker.fail(PublishResult.OVERLOADED)
        with pytest.raises(QueueFull, match="request queue of agent 'agent' is full"):
            await client.send("agent", 1)


@pytest.mark.parametrize("durable", [True, False])
async def test_more_calls_at_once_than_allowed_fail_the_task(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    await mesh.replica(doubler, durable=durable)
    asking = caller(
        "asker", lambda count: [Call(str(number), "doubler", number) for number in range(count)]
    )
    await mesh.replica(asking, durable=durable, max_fan_out=3)
    assert await client.reply(await client.ask("asker", 3)) == Ok({"0": 0, "1": 2, "2": 4})
    failed = await client.reply(await client.ask("asker", 4))
    assert isinstance(failed, Failed)
    assert failed.message == "it makes 4 calls at once; max_fan_out is 3"
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0


async def test_the_calls_of_a_large_fan_out_are_published_in_parts(
    mesh: Mesh, client: FakePeer
) -> None:
    """Publishes of other tasks go between the parts; parts cut off by an outage are sent later."""
    await mesh.replica(doubler)
    asking = caller(
        "asker", lambda count: [Call(str(number), "doubler", number) for number in range(count)]
    )
    replica = await mesh.replica(asking)
    publish, batches = replica.broker.publish, list[int]()

    async def counting(messages: Any) -> Any:
        if messages[0][0] == nested_queue(AgentName("doubler")):
            batches.append(len(messages))
            if len(batches) == 2:
                raise BrokerUnavailable("the broker is unavailable")
        return await publish(messages)

    replica.broker.publish = counting  # type: ignore[method-assign]  # a fake
    task_id = await client.ask("asker", 900)
    await mesh.advance(60)
    outcome = await client.reply(task_id)
    assert isinstance(outcome, Ok)
    assert max(batches) <= 200


async def test_redelivered_requests_use_no_capacity_of_other_queues(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    options = {"request_shards": 2, "max_in_memory": 20, "max_concurrency": 2}
    replica = await mesh.replica(asker("asker", "peer"), durable=False, **options)
    shards = [request_shard(AgentName("asker"), number) for number in range(2)]
    for shard in shards * 4:
        await client.send("asker", client.request(1), shard)
    await peer.wait_for_request(8)
    for _ in range(8):
        await mesh.idle()
        replica.broker.lose_connection()
    await mesh.idle()
    for shard in shards:
        await client.send("asker", client.request(2), shard)
    await peer.wait_for_request(10)
    assert mesh.events.matching(Step.MEMORY_FULL) == []
