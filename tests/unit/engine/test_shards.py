"""Several request queues for one agent: a flood from one sender leaves the others their share."""

from __future__ import annotations

from typing import Any

import pytest

from meshpoint.client import Client
from meshpoint.errors import BrokerUnavailable, QueueFull
from meshpoint.model.calls import Call, Done
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Address, nested_of, shard_for, shard_of
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.ports.broker import Published

from .agents import Scripted, asker, caller, doubler
from .faults import FaultyBroker
from .mesh import Mesh
from .puppet import Puppet

AGENT = AgentName("agent")


def echo(order: list[Any]) -> Scripted:
    """Returns its input and records the order."""

    async def start(ctx: TaskExecutionContext, request: Any) -> Any:
        order.append(request)
        return Done(request)

    return Scripted("agent", start)


def two_senders(shards: int) -> tuple[str, str]:
    """Two sender names that map to different queues."""
    first = "flood"
    others = (f"honest{number}" for number in range(1000))
    return first, next(each for each in others if shard_for(AGENT, each, shards) != shard_for(AGENT, first, shards))


def test_every_queue_gets_senders_and_a_sender_has_one_queue() -> None:
    addresses = [shard_for(AGENT, f"sender{number}", 4) for number in range(100)]
    assert set(addresses) == {shard_of(AGENT, number) for number in range(4)}
    assert addresses == [shard_for(AGENT, f"sender{number}", 4) for number in range(100)]
    assert {shard_for(AGENT, f"sender{number}", 1) for number in range(100)} == {Address("agent.req")}
    assert shard_for(AGENT, "travel", 4) == "agent.req.2"  # the example in docs/reference/wire.md


async def test_a_flood_leaves_the_others_their_share(mesh: Mesh) -> None:
    """All requests are queued before the replica starts."""
    starting = await mesh.replica(echo([]), request_shards=4)
    await starting.drain()
    flood, honest = two_senders(4)
    order = list[Any]()
    async with (
        Client(FaultyBroker(mesh.exchange), flood) as flooding,
        Client(FaultyBroker(mesh.exchange), honest) as asking,
    ):
        flooded = [await flooding.send("agent", number) for number in range(200)]
        waiting = [await asking.send("agent", f"honest {number}") for number in range(5)]
        await mesh.replica(echo(order), request_shards=4, max_concurrency=3)
        assert [(await each).outcome for each in waiting] == [Ok(f"honest {number}") for number in range(5)]
        assert [(await each).outcome for each in flooded] == [Ok(number) for number in range(200)]
    assert max(order.index(f"honest {number}") for number in range(5)) < 30
    assert len(order) == 205


async def test_queues_that_are_no_longer_asked_for_are_drained(mesh: Mesh, boss: Puppet) -> None:
    more = await mesh.replica(echo([]), request_shards=4)
    await more.drain()
    request = boss.request("late")
    assert await boss.send("agent", request, shard_of(AGENT, 3)) is Published.ACCEPTED
    await mesh.replica(echo([]), request_shards=1)
    assert await boss.reply(request.correlation_id) == Ok("late")


async def test_replicas_with_fewer_queues_find_those_of_others(mesh: Mesh, boss: Puppet) -> None:
    await mesh.replica(echo([]))
    more = await mesh.replica(echo([]), request_shards=3)
    await more.drain()
    await mesh.advance(301)
    request = boss.request("late")
    assert await boss.send("agent", request, shard_of(AGENT, 2)) is Published.ACCEPTED
    assert await boss.reply(request.correlation_id) == Ok("late")


async def test_a_queue_that_was_deleted_is_left(mesh: Mesh, boss: Puppet) -> None:
    more = await mesh.replica(echo([]), request_shards=3)
    await more.drain()
    replica = await mesh.replica(echo([]))
    assert set(replica.worker._subscriptions) >= {"requests", "requests 1", "requests 2", "nested"}
    del mesh.exchange._queues[shard_of(AGENT, 2)]
    await mesh.advance(301)
    assert "requests 2" not in replica.worker._subscriptions
    assert "requests 1" in replica.worker._subscriptions
    assert await boss.reply(await boss.ask("agent", "still here")) == Ok("still here")


async def test_a_client_whose_queue_is_gone_uses_the_first(mesh: Mesh) -> None:
    flood, honest = two_senders(2)
    name = next(each for each in (flood, honest) if shard_for(AGENT, each, 2) == shard_of(AGENT, 1))
    await mesh.replica(echo([]), request_shards=2)
    async with Client(FaultyBroker(mesh.exchange), name) as client:
        assert (await (await client.send("agent", 1))).outcome == Ok(1)
        del mesh.exchange._queues[shard_of(AGENT, 1)]
        assert (await (await client.send("agent", 2))).outcome == Ok(2)


async def test_a_client_hears_that_a_queue_is_full(mesh: Mesh) -> None:
    await mesh.replica(echo([]))
    broker = FaultyBroker(mesh.exchange)
    async with Client(broker) as client:
        broker.fail(Published.OVERLOADED)
        with pytest.raises(QueueFull, match="request queue of agent 'agent' is full"):
            await client.send("agent", 1)


@pytest.mark.parametrize("durable", [True, False])
async def test_more_calls_at_once_than_allowed_fail_the_task(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    await mesh.replica(doubler, durable=durable)
    asking = caller("asker", lambda count: [Call(str(number), "doubler", number) for number in range(count)])
    await mesh.replica(asking, durable=durable, max_fan_out=3)
    assert await boss.reply(await boss.ask("asker", 3)) == Ok({"0": 0, "1": 2, "2": 4})
    failed = await boss.reply(await boss.ask("asker", 4))
    assert isinstance(failed, Failed)
    assert failed.message == "it makes 4 calls at once; max_fan_out is 3"
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0


async def test_the_calls_of_a_large_fan_out_are_published_in_parts(mesh: Mesh, boss: Puppet) -> None:
    """Publishes of other tasks go between the parts; parts cut off by an outage are sent later."""
    await mesh.replica(doubler)
    asking = caller("asker", lambda count: [Call(str(number), "doubler", number) for number in range(count)])
    replica = await mesh.replica(asking)
    publish, batches = replica.broker.publish, list[int]()

    async def counting(messages: Any) -> Any:
        if messages[0][0] == nested_of(AgentName("doubler")):
            batches.append(len(messages))
            if len(batches) == 2:
                raise BrokerUnavailable("the broker is unavailable")
        return await publish(messages)

    replica.broker.publish = counting  # type: ignore[method-assign]
    task_id = await boss.ask("asker", 900)
    await mesh.advance(60)
    outcome = await boss.reply(task_id)
    assert isinstance(outcome, Ok)
    assert max(batches) <= 200


async def test_requests_that_come_again_take_no_room_from_other_queues(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    options = {"request_shards": 2, "max_in_memory": 20, "max_concurrency": 2}
    replica = await mesh.replica(asker("asker", "peer"), durable=False, **options)
    shards = [shard_of(AgentName("asker"), number) for number in range(2)]
    for shard in shards * 4:
        await boss.send("asker", boss.request(1), shard)
    await peer.request_number(8)
    for _ in range(8):
        await mesh.settle()
        replica.broker.lose_connection()
    await mesh.settle()
    for shard in shards:
        await boss.send("asker", boss.request(2), shard)
    await peer.request_number(10)
    assert mesh.events.of(Step.MEMORY_FULL) == []
