"""A broker that refuses or does not confirm messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

from meshpoint.agents.function import agent as function_agent
from meshpoint.errors import BrokerUnavailable
from meshpoint.model.calls import Call, Done
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.messages import Address, Message
from meshpoint.model.outcomes import Ok
from meshpoint.ports.broker import Published

from .agents import Gate, Scripted, asker, caller, doubler, gated, gated_after
from .faults import IN_DOUBT, NOT_COMMITTED
from .mesh import Mesh
from .puppet import Puppet

FAULTS = {
    "away": [NOT_COMMITTED] * 2,
    "the confirm is lost": [IN_DOUBT],
    "overloaded": [Published.OVERLOADED] * 2,
}


@function_agent("subtasks")
async def with_a_subtask(ctx: TaskExecutionContext, number: int) -> int:
    """The subtask gives the task an in-process row from its first segment on."""

    async def double(value: int) -> int:
        return 2 * value

    return await ctx.subtask("double", double, number)


HOMES = pytest.mark.parametrize("durable", [True, False])


async def test_at_the_start(mesh: Mesh) -> None:
    running = await mesh.launch(doubler, away="broker", startup_timeout=timedelta(seconds=30))
    await mesh.advance(35)
    with pytest.raises(BrokerUnavailable):
        await running.task
    mesh.replicas.clear()


async def test_at_the_start_for_a_while(mesh: Mesh, boss: Puppet) -> None:
    running = await mesh.launch(doubler, away="broker")
    await mesh.advance(10)
    running.broker.away = False
    await mesh.advance(5)
    assert await boss.reply(await boss.ask("doubler", 1)) == Ok(2)


@HOMES
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
async def test_a_call_is_sent_again_under_its_id(
    mesh: Mesh, boss: Puppet, peer: Puppet, faults: list[str | Published], durable: bool
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=durable)
    replica.broker.fail(*faults, type="request")
    task_id = await boss.ask("asker", 1)
    await mesh.settle()
    # committed calls are sent by the sweeper
    assert mesh.unacked("asker") == (0 if durable else 1)
    await mesh.advance(40)
    assert len({request.correlation_id for request in peer.requests}) == 1
    assert len(peer.requests) == (2 if faults == [IN_DOUBT] else 1)
    await peer.respond(peer.requests[0], 1)
    assert await boss.reply(task_id) == Ok({"peer": 1})


@HOMES
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
async def test_a_reply_is_sent_again(
    mesh: Mesh, boss: Puppet, peer: Puppet, faults: list[str | Published], durable: bool
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=durable)
    replica.broker.fail(*faults, type="response")
    task_id = await boss.ask("asker", 1)
    await peer.respond(await peer.request_number(), 1)
    await mesh.settle()
    assert mesh.unacked("asker") == (0 if durable else 1)  # only this process has the reply
    await mesh.advance(40)
    assert set(map(str, boss.replies(task_id))) == {str(Ok({"peer": 1}))}
    assert mesh.unacked("asker") == 0


@HOMES
@pytest.mark.parametrize("faults", [FAULTS["away"], FAULTS["the confirm is lost"]], ids=["away", "in doubt"])
async def test_a_reply_without_a_row_holds_its_request_while_the_broker_is_away(
    mesh: Mesh, boss: Puppet, faults: list[str | Published], durable: bool
) -> None:
    replica = await mesh.replica(doubler, durable=durable)
    replica.broker.fail(*faults, type="response")
    task_id = await boss.ask("doubler", 1)
    await mesh.settle()
    assert mesh.unacked("doubler") == 1
    assert replica.worker.site.slots.free == 10  # no slot is held while the broker is unavailable
    await mesh.advance(10)
    assert set(map(str, boss.replies(task_id))) == {str(Ok(2))}
    assert mesh.unacked("doubler") == 0


@HOMES
async def test_a_reply_to_nobody_is_given_up(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    await mesh.replica(asker("asker", "peer"), doubler, durable=durable)
    for agent in ("asker", "doubler"):
        message = boss.request(1, agent)
        object.__setattr__(message, "reply_to", Address("boss.private.gone"))
        await boss.send(agent, message)
    await peer.respond(await peer.request_number(), 1)
    await mesh.advance(25)
    assert mesh.events.of(Step.REPLY_UNROUTABLE) == []
    assert mesh.events.of(Step.BROKER_AWAY) == []
    await mesh.advance(40)
    assert {event.task_ids for event in mesh.events.of(Step.REPLY_UNROUTABLE)} == {("asker",), ("doubler",)}
    assert mesh.unacked("asker") == mesh.unacked("doubler") == 0
    replies = len(mesh.events.of(Step.REPLY, Phase.AFTER))
    await mesh.advance(400)
    assert len(mesh.events.of(Step.REPLY, Phase.AFTER)) == replies


@HOMES
async def test_an_overloaded_requester_gets_its_reply_however_late(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    replica = await mesh.replica(doubler, durable=durable)
    replica.broker.fail(*[Published.OVERLOADED] * 100, type="response")
    task_id = await boss.ask("doubler", 1)
    await mesh.settle()
    assert mesh.unacked("doubler") == (0 if durable else 1)  # only this process has the reply
    await mesh.advance(90)
    assert boss.replies() == []
    assert mesh.events.of(Step.REPLY_UNROUTABLE) == []
    replica.broker.heal()
    await mesh.advance(400)
    assert boss.replies(task_id) == [Ok(2)]
    assert mesh.unacked("doubler") == 0


@pytest.mark.parametrize("agent", ["doubler", "asker", "subtasks"])
@pytest.mark.parametrize("end", ["drain", "crash"])
async def test_a_reply_that_only_a_process_has_is_made_again_after_its_end(
    mesh: Mesh, boss: Puppet, peer: Puppet, agent: str, end: str
) -> None:
    agents = {"doubler": doubler, "asker": asker("asker", "peer"), "subtasks": with_a_subtask}
    replica = await mesh.replica(agents[agent], durable=False, drain_timeout=timedelta(0))
    replica.broker.fail(*[Published.OVERLOADED] * 100, type="response")
    task_id = await boss.ask(agent, 1)
    if agent == "asker":
        await peer.respond(await peer.request_number(), 1)
    await mesh.settle()
    assert boss.replies() == []
    assert mesh.unacked(agent) == 1
    await (replica.drain() if end == "drain" else replica.crash())
    assert mesh.waiting(agent) == 1
    assert mesh.events.of(Step.REPLY_DROPPED) == []
    await mesh.replica(agents[agent], durable=False)
    if agent == "asker":
        await peer.respond(await peer.request_number(2), 1)
    assert await boss.reply(task_id) == Ok({"peer": 1} if agent == "asker" else 2)


async def test_a_drain_does_not_wait_for_a_reply_that_is_refused_after_its_time(mesh: Mesh, boss: Puppet) -> None:
    day = timedelta(days=1)
    replica = await mesh.replica(doubler, durable=False, drain_timeout=timedelta(0), release_timeout=day)
    on_its_way = Gate()

    async def refuse(messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        await on_its_way()
        return [Published.OVERLOADED for _ in messages]

    replica.broker.publish = refuse  # type: ignore[method-assign]
    await boss.ask("doubler", 1)
    await on_its_way.reach()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    on_its_way.opened.set()
    await draining
    assert mesh.waiting("doubler") == 1


async def test_a_drain_waits_for_replies_that_only_the_process_has(mesh: Mesh, boss: Puppet) -> None:
    replica = await mesh.replica(doubler, durable=False, drain_timeout=timedelta(hours=1))
    replica.broker.fail(*[Published.OVERLOADED] * 3, type="response")
    task_id = await boss.ask("doubler", 1)
    await mesh.settle()
    draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    assert not draining.done()
    await mesh.advance(60)
    await draining
    assert boss.replies(task_id) == [Ok(2)]
    assert mesh.unacked("doubler") == mesh.waiting("doubler") == 0


async def test_a_request_is_acked_before_the_broker_closes_its_channel(mesh: Mesh, boss: Puppet) -> None:
    replica = await mesh.replica(doubler, durable=False, drain_timeout=timedelta(0))
    replica.broker.fail(*[Published.OVERLOADED] * 10_000, type="response")
    task_id = await boss.ask("doubler", 1)
    await mesh.advance(14 * 60)
    assert mesh.unacked("doubler") == 1
    await mesh.advance(3 * 60)
    assert mesh.unacked("doubler") == 0
    assert mesh.events.of(Step.REPLY_DROPPED) == []
    await replica.drain()
    (dropped,) = mesh.events.of(Step.REPLY_DROPPED)
    assert (dropped.task_ids, dropped.detail["reason"]) == ((task_id,), "the process ends")


async def test_replies_that_wait_hold_up_no_other_request(mesh: Mesh, boss: Puppet) -> None:
    other = await mesh.puppet("other")
    replica = await mesh.replica(doubler, durable=False, max_concurrency=1, max_in_memory=5)
    replica.broker.fail(*[Published.OVERLOADED] * 100, type="response")
    for number in range(8):
        await boss.ask("doubler", number)
        await mesh.settle()
    assert mesh.unacked("doubler") == 5
    assert len(mesh.events.of(Step.REPLY_DROPPED)) == 3
    replica.broker.heal()
    assert await other.reply(await other.ask("doubler", 21)) == Ok(42)


async def test_a_request_that_comes_again_while_its_reply_waits(mesh: Mesh, boss: Puppet) -> None:
    replica = await mesh.replica(doubler, durable=False)
    replica.broker.fail(*[Published.OVERLOADED] * 100, type="response")
    task_id = await boss.ask("doubler", 1)
    await mesh.settle()
    replica.broker.lose_connection()
    await boss.ask("doubler", 1, task_id)
    await mesh.settle()
    assert mesh.unacked("doubler") == 2
    assert len(mesh.events.of(Step.SEGMENT, Phase.BEFORE)) == 1
    replica.broker.heal()
    await mesh.advance(60)
    assert set(map(str, boss.replies(task_id))) == {str(Ok(2))}
    assert mesh.unacked("doubler") == mesh.waiting("doubler") == 0


async def test_a_request_from_another_address_while_its_reply_to_the_former_one_is_on_its_way(
    mesh: Mesh, boss: Puppet
) -> None:
    replica = await mesh.replica(doubler, durable=False)
    replica.broker.fail(Published.OVERLOADED, type="response")
    task_id = await boss.ask("doubler", 1)
    await mesh.settle()
    publish, on_its_way = replica.broker.publish, Gate()
    refuses = "boss.private.2"

    async def slowly(messages: Sequence[tuple[Address, Message]]) -> list[Published]:
        if messages[0][0] == refuses:
            return [Published.OVERLOADED]
        await on_its_way()
        return await publish(messages)

    replica.broker.publish = slowly  # type: ignore[method-assign]
    await mesh.advance(8)
    await on_its_way.reach()
    message = boss.request(1, task_id)
    object.__setattr__(message, "reply_to", Address(refuses))
    await boss.send("doubler", message)
    await mesh.settle()
    on_its_way.opened.set()
    assert await boss.reply(task_id) == Ok(2)
    await mesh.settle()
    assert mesh.unacked("doubler") == 2  # only this process has the reply to the other address
    refuses = ""
    await mesh.advance(60)
    assert mesh.unacked("doubler") == 0


@HOMES
async def test_a_request_that_nobody_asked_to_answer(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    await mesh.replica(asker("asker", "peer"), doubler, durable=durable)
    for agent in ("asker", "doubler"):
        message = boss.request(1, agent)
        object.__setattr__(message, "reply_to", None)
        await boss.send(agent, message)
    await peer.respond(await peer.request_number(), 1)
    await mesh.settle()
    assert mesh.unacked("asker") == mesh.unacked("doubler") == 0
    assert await mesh.state("asker") is (TaskState.COMPLETED if durable else None)


async def test_an_outage_of_the_broker(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    """Replies committed during the outage are sent afterwards."""
    gate = Gate()
    replica = await mesh.replica(gated_after("agent", "peer", gate))
    tasks = [await boss.ask("agent", number) for number in range(3)]
    for count in (1, 2, 3):
        await peer.respond(await peer.request_number(count), 1)
    await gate.reach(3)
    replica.broker.away = True
    gate.opened.set()
    await mesh.advance(60)
    assert boss.replies() == []
    assert [await mesh.state(task_id) for task_id in tasks] == [TaskState.COMPLETED] * 3
    replica.broker.away = False
    await mesh.advance(330)
    for task_id in tasks:
        assert await boss.reply(task_id) == Ok({"peer": 1})


@HOMES
async def test_a_lost_connection_in_the_middle(mesh: Mesh, boss: Puppet, peer: Puppet, durable: bool) -> None:
    """Unacked messages are redelivered to the same replica and change nothing."""
    gate = Gate()
    replica = await mesh.replica(gated("slow", gate), durable=durable)
    asking = await mesh.replica(asker("asker", "peer"), durable=durable)
    slow, asked = await boss.ask("slow", 1), await boss.ask("asker", 1)
    await gate.reach()
    request = await peer.request_number()
    for _ in range(5):
        replica.broker.lose_connection()
        asking.broker.lose_connection()
        await mesh.settle()
    gate.opened.set()
    await peer.respond(request, 1)
    assert await boss.reply(slow) == Ok("done")
    assert await boss.reply(asked) == Ok({"peer": 1})
    await mesh.settle()
    assert gate.visits == 1
    assert len(peer.requests) == 1
    assert mesh.unacked("slow") == mesh.unacked("asker") == 0


async def test_prefetch_that_cannot_be_changed_now_costs_nothing(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=False)
    replica.broker.fail(NOT_COMMITTED, type="request")
    task_id = await boss.ask("asker", 1)
    await mesh.events.wait(Step.SEGMENT, Phase.BEFORE)
    replica.broker.away = True
    await mesh.advance(2)
    replica.broker.away = False
    await mesh.advance(20)
    await peer.respond(await peer.request_number(), 1)
    assert await boss.reply(task_id) == Ok({"peer": 1})


async def test_status_updates_may_be_lost(mesh: Mesh, boss: Puppet) -> None:
    async def start(ctx: object, request: object) -> object:
        for step in range(3):
            await ctx.status({"step": step})  # type: ignore[attr-defined]
        return Done("done")

    replica = await mesh.replica(Scripted("talker", start))
    replica.broker.fail(NOT_COMMITTED, IN_DOUBT, type="status")
    assert await boss.reply(await boss.ask("talker", 1)) == Ok("done")
    assert boss.statuses() == [{"step": 1}, {"step": 2}]


async def test_one_of_two_peers_is_unknown(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    two = caller("two", lambda _: [Call("known", "peer", 1), Call("unknown", "nobody", 1)])
    await mesh.replica(two)
    task_id = await boss.ask("two", 1)
    await peer.respond(await peer.request_number(), 1)
    assert await boss.reply(task_id) == Ok({"known": 1, "unknown": "undeliverable"})
