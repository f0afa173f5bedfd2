"""A broker that refuses or does not confirm messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent as function_agent
from meshpoint.errors import BrokerUnavailable
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.messages import Address, Message
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import TaskState
from meshpoint.ports.broker import PublishResult

from .agents import Gate, ScriptedAgent, asker, caller, doubler, gated, gated_after
from .faults import FIRST_LOST, IN_DOUBT, NOT_COMMITTED
from .mesh import Mesh

FAULTS = {
    "unavailable": [NOT_COMMITTED] * 2,
    "the confirm is lost": [IN_DOUBT],
    "overloaded": [PublishResult.OVERLOADED] * 2,
}


@function_agent("subtasks")
async def with_a_subtask(ctx: TaskExecutionContext, number: int) -> int:
    """The subtask gives the task an in-process row from its first segment on."""

    async def double(value: int) -> int:
        return 2 * value

    return await ctx.subtask("double", double, number)


BACKENDS = pytest.mark.parametrize("durable", [True, False])


async def test_a_replica_starts_once_the_broker_is_available(mesh: Mesh) -> None:
    replica = await mesh.launch(
        doubler, unavailable_service="broker", startup_timeout=timedelta(seconds=30)
    )
    await mesh.advance(35)
    with pytest.raises(BrokerUnavailable):
        await replica.task
    mesh.replicas.clear()


async def test_a_replica_waits_for_the_broker_at_the_start(mesh: Mesh, client: FakePeer) -> None:
    replica = await mesh.launch(doubler, unavailable_service="broker")
    await mesh.advance(10)
    replica.broker.unavailable = False
    await mesh.advance(5)
    assert await client.reply(await client.ask("doubler", 1)) == Ok(2)


async def test_no_message_is_lost_if_the_broker_adapter_returns_too_few_results(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    async def start(ctx: TaskExecutionContext, request: int) -> Paused:
        return Paused([Call("one", "peer", 1), Call("two", "peer", 2)], b"state")

    replica = await mesh.replica(ScriptedAgent("agent", start))
    replica.broker.fail(FIRST_LOST, type="request")
    task_id = await client.ask("agent", 1)
    await mesh.idle()
    await mesh.advance(40)
    assert {request.correlation_id for request in peer.requests} == {
        call.sub_task_id for call in (await mesh.task(task_id))[1]
    }
    (failed,) = mesh.events.matching(Step.BROKER_UNAVAILABLE)
    assert "returned 1 results for 2 messages" in str(failed.detail)


@BACKENDS
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
async def test_a_call_is_resent_under_the_same_id(
    mesh: Mesh, client: FakePeer, peer: FakePeer, faults: list[str | PublishResult], durable: bool
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=durable)
    replica.broker.fail(*faults, type="request")
    task_id = await client.ask("asker", 1)
    await mesh.idle()
    # committed calls are sent by the sweeper
    assert mesh.unacked("asker") == (0 if durable else 1)
    await mesh.advance(40)
    assert len({request.correlation_id for request in peer.requests}) == 1
    assert len(peer.requests) == (2 if faults == [IN_DOUBT] else 1)
    await peer.respond(peer.requests[0], 1)
    assert await client.reply(task_id) == Ok({"peer": 1})


@BACKENDS
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
async def test_a_reply_is_resent_after_an_outage(
    mesh: Mesh, client: FakePeer, peer: FakePeer, faults: list[str | PublishResult], durable: bool
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=durable)
    replica.broker.fail(*faults, type="response")
    task_id = await client.ask("asker", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    await mesh.idle()
    assert mesh.unacked("asker") == (0 if durable else 1)  # only this process has the reply
    await mesh.advance(40)
    assert set(map(str, client.replies(task_id))) == {str(Ok({"peer": 1}))}
    assert mesh.unacked("asker") == 0


@BACKENDS
@pytest.mark.parametrize(
    "faults",
    [FAULTS["unavailable"], FAULTS["the confirm is lost"]],
    ids=["unavailable", "in doubt"],
)
async def test_a_reply_without_a_row_keeps_its_request_unacked_in_an_outage(
    mesh: Mesh, client: FakePeer, faults: list[str | PublishResult], durable: bool
) -> None:
    replica = await mesh.replica(doubler, durable=durable)
    replica.broker.fail(*faults, type="response")
    task_id = await client.ask("doubler", 1)
    await mesh.idle()
    assert mesh.unacked("doubler") == 1
    assert (
        replica.worker.runtime.slots.free == 10
    )  # no slot is held while the broker is unavailable
    await mesh.advance(10)
    assert set(map(str, client.replies(task_id))) == {str(Ok(2))}
    assert mesh.unacked("doubler") == 0


@BACKENDS
async def test_a_reply_to_a_missing_queue_is_abandoned(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), doubler, durable=durable)
    for agent in ("asker", "doubler"):
        message = client.request(1, agent)
        object.__setattr__(message, "reply_to", Address("client.private.gone"))
        await client.send(agent, message)
    await peer.respond(await peer.wait_for_request(), 1)
    await mesh.advance(25)
    assert mesh.events.matching(Step.REPLY_UNROUTABLE) == []
    assert mesh.events.matching(Step.BROKER_UNAVAILABLE) == []
    await mesh.advance(40)
    assert {event.task_ids for event in mesh.events.matching(Step.REPLY_UNROUTABLE)} == {
        ("asker",),
        ("doubler",),
    }
    assert mesh.unacked("asker") == mesh.unacked("doubler") == 0
    replies = len(mesh.events.matching(Step.REPLY, Phase.AFTER))
    await mesh.advance(400)
    assert len(mesh.events.matching(Step.REPLY, Phase.AFTER)) == replies


@BACKENDS
async def test_an_overloaded_requester_eventually_gets_its_reply(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    replica = await mesh.replica(doubler, durable=durable)
    replica.broker.fail(*[PublishResult.OVERLOADED] * 100, type="response")
    task_id = await client.ask("doubler", 1)
    await mesh.idle()
    assert mesh.unacked("doubler") == (0 if durable else 1)  # only this process has the reply
    await mesh.advance(90)
    assert client.replies() == []
    assert mesh.events.matching(Step.REPLY_UNROUTABLE) == []
    replica.broker.heal()
    await mesh.advance(400)
    assert client.replies(task_id) == [Ok(2)]
    assert mesh.unacked("doubler") == 0


@pytest.mark.parametrize("agent", ["doubler", "asker", "subtasks"])
@pytest.mark.parametrize("end", ["drain", "crash"])
async def test_a_reply_lost_with_its_process_is_recomputed(
    mesh: Mesh, client: FakePeer, peer: FakePeer, agent: str, end: str
) -> None:
    agents = {"doubler": doubler, "asker": asker("asker", "peer"), "subtasks": with_a_subtask}
    replica = await mesh.replica(agents[agent], durable=False, drain_timeout=timedelta(0))
    replica.broker.fail(*[PublishResult.OVERLOADED] * 100, type="response")
    task_id = await client.ask(agent, 1)
    if agent == "asker":
        await peer.respond(await peer.wait_for_request(), 1)
    await mesh.idle()
    assert client.replies() == []
    assert mesh.unacked(agent) == 1
    await (replica.drain() if end == "drain" else replica.crash())
    assert mesh.waiting(agent) == 1
    assert mesh.events.matching(Step.REPLY_DROPPED) == []
    await mesh.replica(agents[agent], durable=False)
    if agent == "asker":
        await peer.respond(await peer.wait_for_request(2), 1)
    assert await client.reply(task_id) == Ok({"peer": 1} if agent == "asker" else 2)


async def test_a_drain_does_not_wait_for_an_expired_reply(mesh: Mesh, client: FakePeer) -> None:
    day = timedelta(days=1)
    replica = await mesh.replica(
        doubler, durable=False, drain_timeout=timedelta(0), release_timeout=day
    )
    publish_gate = Gate()

    async def reject(messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        await publish_gate()
        return [PublishResult.OVERLOADED for _ in messages]

    replica.broker.publish = reject  # type: ignore[method-assign]  # a fake
    await client.ask("doubler", 1)
    await publish_gate.wait_reached()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    publish_gate.opened.set()
    await draining
    assert mesh.waiting("doubler") == 1


async def test_a_drain_waits_for_replies_held_only_in_process(
    mesh: Mesh, client: FakePeer
) -> None:
    replica = await mesh.replica(doubler, durable=False, drain_timeout=timedelta(hours=1))
    replica.broker.fail(*[PublishResult.OVERLOADED] * 3, type="response")
    task_id = await client.ask("doubler", 1)
    await mesh.idle()
    draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    assert not draining.done()
    await mesh.advance(60)
    await draining
    assert client.replies(task_id) == [Ok(2)]
    assert mesh.unacked("doubler") == mesh.waiting("doubler") == 0


async def test_a_request_is_acked_before_the_broker_closes_its_channel(
    mesh: Mesh, client: FakePeer
) -> None:
    replica = await mesh.replica(doubler, durable=False, drain_timeout=timedelta(0))
    replica.broker.fail(*[PublishResult.OVERLOADED] * 10_000, type="response")
    task_id = await client.ask("doubler", 1)
    await mesh.advance(14 * 60)
    assert mesh.unacked("doubler") == 1
    await mesh.advance(3 * 60)
    assert mesh.unacked("doubler") == 0
    assert mesh.events.matching(Step.REPLY_DROPPED) == []
    await replica.drain()
    (broken_channel,) = mesh.events.matching(Step.REPLY_DROPPED)
    assert (broken_channel.task_ids, broken_channel.detail["reason"]) == (
        (task_id,),
        "the process ends",
    )


async def test_pending_replies_do_not_delay_other_requests(mesh: Mesh, client: FakePeer) -> None:
    other = await mesh.fake_peer("other")
    replica = await mesh.replica(doubler, durable=False, max_concurrency=1, max_in_memory=5)
    replica.broker.fail(*[PublishResult.OVERLOADED] * 100, type="response")
    for number in range(8):
        await client.ask("doubler", number)
        await mesh.idle()
    assert mesh.unacked("doubler") == 5
    assert len(mesh.events.matching(Step.REPLY_DROPPED)) == 3
    replica.broker.heal()
    assert await other.reply(await other.ask("doubler", 21)) == Ok(42)


async def test_a_redelivered_request_waits_for_its_pending_reply(
    mesh: Mesh, client: FakePeer
) -> None:
    replica = await mesh.replica(doubler, durable=False)
    replica.broker.fail(*[PublishResult.OVERLOADED] * 100, type="response")
    task_id = await client.ask("doubler", 1)
    await mesh.idle()
    replica.broker.lose_connection()
    await client.ask("doubler", 1, task_id)
    await mesh.idle()
    assert mesh.unacked("doubler") == 2
    assert len(mesh.events.matching(Step.SEGMENT, Phase.BEFORE)) == 1
    replica.broker.heal()
    await mesh.advance(60)
    assert set(map(str, client.replies(task_id))) == {str(Ok(2))}
    assert mesh.unacked("doubler") == mesh.waiting("doubler") == 0


async def test_a_request_from_a_new_address_during_the_reply_is_answered_there(
    mesh: Mesh, client: FakePeer
) -> None:
    replica = await mesh.replica(doubler, durable=False)
    replica.broker.fail(PublishResult.OVERLOADED, type="response")
    task_id = await client.ask("doubler", 1)
    await mesh.idle()
    publish, publish_gate = replica.broker.publish, Gate()
    refuses = "client.private.2"

    async def slow_publish(messages: Sequence[tuple[Address, Message]]) -> list[PublishResult]:
        if messages[0][0] == refuses:
            return [PublishResult.OVERLOADED]
        await publish_gate()
        return await publish(messages)

    replica.broker.publish = slow_publish  # type: ignore[method-assign]  # a fake
    await mesh.advance(8)
    await publish_gate.wait_reached()
    message = client.request(1, task_id)
    object.__setattr__(message, "reply_to", Address(refuses))
    await client.send("doubler", message)
    await mesh.idle()
    publish_gate.opened.set()
    assert await client.reply(task_id) == Ok(2)
    await mesh.idle()
    assert mesh.unacked("doubler") == 2  # only this process has the reply to the other address
    refuses = ""
    await mesh.advance(60)
    assert mesh.unacked("doubler") == 0


@BACKENDS
async def test_a_request_without_a_reply_address_runs_without_a_reply(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    await mesh.replica(asker("asker", "peer"), doubler, durable=durable)
    for agent in ("asker", "doubler"):
        message = client.request(1, agent)
        object.__setattr__(message, "reply_to", None)
        await client.send(agent, message)
    await peer.respond(await peer.wait_for_request(), 1)
    await mesh.idle()
    assert mesh.unacked("asker") == mesh.unacked("doubler") == 0
    assert await mesh.state("asker") is (TaskState.COMPLETED if durable else None)


async def test_all_tasks_complete_after_a_broker_outage(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """Replies committed during the outage are sent afterwards."""
    gate = Gate()
    replica = await mesh.replica(gated_after("agent", "peer", gate))
    tasks = [await client.ask("agent", number) for number in range(3)]
    for count in (1, 2, 3):
        await peer.respond(await peer.wait_for_request(count), 1)
    await gate.wait_reached(3)
    replica.broker.unavailable = True
    gate.opened.set()
    await mesh.advance(60)
    assert client.replies() == []
    assert [await mesh.state(task_id) for task_id in tasks] == [TaskState.COMPLETED] * 3
    replica.broker.unavailable = False
    await mesh.advance(330)
    for task_id in tasks:
        assert await client.reply(task_id) == Ok({"peer": 1})


@BACKENDS
async def test_all_tasks_complete_after_a_lost_connection(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    """Unacked messages are redelivered to the same replica and change nothing."""
    gate = Gate()
    replica = await mesh.replica(gated("slow", gate), durable=durable)
    asking = await mesh.replica(asker("asker", "peer"), durable=durable)
    slow_id, waiting_id = await client.ask("slow", 1), await client.ask("asker", 1)
    await gate.wait_reached()
    request = await peer.wait_for_request()
    for _ in range(5):
        replica.broker.lose_connection()
        asking.broker.lose_connection()
        await mesh.idle()
    gate.opened.set()
    await peer.respond(request, 1)
    assert await client.reply(slow_id) == Ok("done")
    assert await client.reply(waiting_id) == Ok({"peer": 1})
    await mesh.idle()
    assert gate.visits == 1
    assert len(peer.requests) == 1
    assert mesh.unacked("slow") == mesh.unacked("asker") == 0


async def test_a_failed_prefetch_change_affects_no_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=False)
    replica.broker.fail(NOT_COMMITTED, type="request")
    task_id = await client.ask("asker", 1)
    await mesh.events.wait(Step.SEGMENT, Phase.BEFORE)
    replica.broker.unavailable = True
    await mesh.advance(2)
    replica.broker.unavailable = False
    await mesh.advance(20)
    await peer.respond(await peer.wait_for_request(), 1)
    assert await client.reply(task_id) == Ok({"peer": 1})


async def test_status_updates_may_be_lost(mesh: Mesh, client: FakePeer) -> None:
    async def start(ctx: TaskExecutionContext, request: object) -> object:
        for step in range(3):
            await ctx.update_status({"step": step})
        return Done("done")

    replica = await mesh.replica(ScriptedAgent("talker", start))
    replica.broker.fail(NOT_COMMITTED, IN_DOUBT, type="status")
    assert await client.reply(await client.ask("talker", 1)) == Ok("done")
    assert client.statuses() == [{"step": 1}, {"step": 2}]


async def test_a_call_to_an_unknown_peer_does_not_affect_the_other_call(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    two = caller("two", lambda _: [Call("known", "peer", 1), Call("unknown", "nobody", 1)])
    await mesh.replica(two, undeliverable_after=timedelta())
    task_id = await client.ask("two", 1)
    await peer.respond(await peer.wait_for_request(), 1)
    assert await client.reply(task_id) == Ok({"known": 1, "unknown": "undeliverable"})
