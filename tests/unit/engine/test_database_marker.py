"""Replicas of one agent with and without a database: one refuses to start, or stops."""

from __future__ import annotations

from datetime import timedelta

import pytest

from fake_peer import FakePeer
from meshpoint.errors import ConfigurationError
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import response_queue
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState

from .agents import asker, doubler
from .mesh import Mesh, RunningReplica

ASKER = AgentName("asker")
REFUSAL = (
    "agent.session_service: other replicas of 'asker' store their tasks in a database, "
    "which this replica would not see; use session_service: sql with their session_db_url; "
    "if no task is left there, stop those replicas and run: "
    "meshpoint doctor CONFIG --db URL --remove-marker asker"
)


async def assert_refused(mesh: Mesh, replica: RunningReplica) -> None:
    """Assert that the replica ends by itself, with the reason, and leaves nothing behind."""
    with pytest.raises(ConfigurationError) as refused:
        await replica.task
    assert str(refused.value) == REFUSAL
    await replica.broker.close()
    mesh.replicas.remove(replica)


@pytest.mark.parametrize("checkpointing", [True, False])
async def test_a_replica_without_a_database_refuses_to_start(
    mesh: Mesh, client: FakePeer, peer: FakePeer, checkpointing: bool
) -> None:
    """Also when all replicas with a database are gone, because their tasks may still wait."""
    first = await mesh.replica(asker("asker", "peer"), checkpointing=checkpointing)
    queues = set(mesh.exchange.queues)
    await assert_refused(mesh, await mesh.launch(asker("asker", "peer"), durable=False))
    await first.drain()
    await assert_refused(mesh, await mesh.launch(asker("asker", "peer"), durable=False))
    assert set(mesh.exchange.queues) == queues  # without private queues of their own


async def test_without_the_marker_it_starts(mesh: Mesh, client: FakePeer) -> None:
    first = await mesh.replica(doubler)
    await first.drain()
    remover = mesh.replicas[0].broker
    await remover.open()
    await remover.remove_database_marker(AgentName("doubler"))
    await mesh.replica(doubler, durable=False)
    assert await client.reply(await client.ask("doubler", 1)) == Ok(2)


async def test_agents_are_independent(mesh: Mesh, client: FakePeer) -> None:
    await mesh.replica(asker("asker", "doubler"))
    await mesh.replica(doubler, durable=False)
    assert await client.reply(await client.ask("asker", 2)) == Ok({"doubler": 4})


async def test_a_running_replica_without_a_database_stops_when_one_with_it_starts(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """Its tasks in memory run again where the database is."""
    first = await mesh.replica(
        asker("asker", "peer"), durable=False, drain_timeout=timedelta(seconds=5)
    )
    task_id = await client.ask("asker", 1)
    await peer.wait_for_request()
    await mesh.idle()
    await mesh.replica(asker("asker", "peer"))
    await mesh.advance(10)
    await assert_refused(mesh, first)
    await peer.respond(await peer.wait_for_request(2), 2)
    assert await client.reply(task_id) == Ok({"peer": 2})
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0


async def test_the_start_checks_again_after_it_consumes(mesh: Mesh) -> None:
    """The other replica starts between the first check and the first message."""
    first = await mesh.launch(asker("asker", "peer"), durable=False)
    original, checks = first.broker.has_database_marker, [0]

    async def check(agent: AgentName) -> bool:
        checks[0] += 1
        found = await original(agent)
        if checks[0] == 1:
            await first.broker.mark_database(agent)
        return found

    first.broker.has_database_marker = check  # type: ignore[method-assign]
    await assert_refused(mesh, first)
    assert mesh.events.matching(Step.STARTED) == []


@pytest.mark.parametrize("kind", ["response", "status", "cancel"])
async def test_no_message_of_the_others_tasks_is_handled(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    """The replica was already running, missed the wake-up, and gets the message first."""
    durable = await mesh.replica(asker("asker", "peer", idle_timeout=timedelta(seconds=60)))
    task_id = await client.ask("asker", 1)
    call = await peer.wait_for_request()
    await mesh.idle()
    await durable.broker.remove_database_marker(ASKER)
    misplaced = await mesh.replica(asker("asker", "peer"), durable=False)
    await durable.broker.mark_database(ASKER)
    consumers = mesh.exchange.queues[response_queue(ASKER)].consumers
    while consumers[0] not in misplaced.broker._consumers:
        consumers.rotate(1)
    if kind == "status":
        await mesh.advance(30)
        await peer.status(call, "working")
    elif kind == "cancel":
        await client.cancel("asker", task_id)
    else:
        await peer.respond(call, 1)
    await mesh.advance(40)
    await assert_refused(mesh, misplaced)
    if kind == "cancel":
        reply = await client.reply(task_id)
        assert isinstance(reply, Failed)
        assert reply.kind is FailureKind.CANCELLED
        return
    if kind == "status":  # it has postponed the idle deadline
        await peer.respond(call, 1)
    await mesh.advance(2)
    assert await client.reply(task_id) == Ok({"peer": 1})
    assert mesh.events.matching(Step.LATE) == []


async def test_cancels_of_its_own_tasks_need_no_check(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=False)
    task_ids = [await client.ask("asker", number) for number in range(5)]
    await peer.wait_for_request(5)
    await mesh.idle()
    checks = replica.broker.marker_checks
    for task_id in task_ids:
        await client.cancel("asker", task_id)
        reply = await client.reply(task_id)
        assert isinstance(reply, Failed)
    assert replica.broker.marker_checks == checks
    await mesh.idle()
    await client.cancel("asker", task_ids[0])  # may be a task in a database by now
    await mesh.idle()
    assert replica.broker.marker_checks == checks + 1


async def test_a_running_replica_checks_from_time_to_time(mesh: Mesh) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=False)
    await replica.broker.mark_database(ASKER)
    await mesh.advance(301)
    await assert_refused(mesh, replica)


async def test_a_broker_outage_does_not_stop_the_checks(mesh: Mesh) -> None:
    replica = await mesh.replica(asker("asker", "peer"), durable=False)
    await replica.broker.mark_database(ASKER)
    replica.broker.unavailable = True
    await mesh.advance(310)
    assert not replica.task.done()
    replica.broker.unavailable = False
    await mesh.advance(10)
    await assert_refused(mesh, replica)
