"""A replica crashes between two steps of a task: others continue it, and nothing is repeated."""

from __future__ import annotations

import pytest

from fake_peer import FakePeer
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import TaskState

from .agents import asker
from .mesh import Mesh, RunningReplica


def crash_replica_at(mesh: Mesh, replica: RunningReplica, step: Step, phase: Phase) -> None:
    """Kill `replica` at its next event of this step and phase, before it does anything else."""

    def crash_on_event(event: Event) -> None:
        if (event.step, event.phase, event.replica) == (step, phase, replica.id):
            mesh.events.hooks.remove(crash_on_event)
            replica.task.cancel()
            replica.store.unavailable = replica.broker.unavailable = True

    mesh.events.hooks.append(crash_on_event)


FIRST_HALF = [
    (Step.RECEIVE, Phase.BEFORE),
    (Step.RECEIVE, Phase.AFTER),
    (Step.SEGMENT, Phase.BEFORE),
    (Step.SEGMENT, Phase.AFTER),
    (Step.CHECKPOINT, Phase.BEFORE),
    (Step.CHECKPOINT, Phase.AFTER),
    (Step.DISPATCH, Phase.BEFORE),
    (Step.DISPATCH, Phase.AFTER),
    (Step.CONFIRM_SENT, Phase.BEFORE),
    (Step.CONFIRM_SENT, Phase.AFTER),
    (Step.ACK, Phase.BEFORE),
    (Step.ACK, Phase.AFTER),
]


@pytest.mark.parametrize(("step", "phase"), FIRST_HALF)
async def test_a_task_survives_a_crash_before_its_checkpoint(
    mesh: Mesh, client: FakePeer, peer: FakePeer, step: Step, phase: Phase
) -> None:
    first = await mesh.replica(asker("asker", "peer"))
    crash_replica_at(mesh, first, step, phase)
    task_id = await client.ask("asker", 1)
    await mesh.idle()
    await first.crash()
    await mesh.replica(asker("asker", "peer"))
    await mesh.advance(25)
    call_ids = {request.correlation_id for request in peer.requests}
    assert len(call_ids) == 1, "the calls were made twice"
    await peer.respond(peer.requests[0], 1)
    assert await client.reply(task_id) == Ok({"peer": 1})
    await mesh.advance(20)
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0
    assert await mesh.store.unsent(AgentName("asker"), 100) == []


SECOND_HALF = [
    (Step.CLAIM, Phase.BEFORE),
    (Step.CLAIM, Phase.AFTER),
    (Step.ACK, Phase.BEFORE),
    (Step.ACK, Phase.AFTER),
    (Step.RESTORE, Phase.BEFORE),
    (Step.RESTORE, Phase.AFTER),
    (Step.SEGMENT, Phase.BEFORE),
    (Step.SEGMENT, Phase.AFTER),
    (Step.END, Phase.BEFORE),
    (Step.END, Phase.AFTER),
    (Step.REPLY, Phase.BEFORE),
    (Step.REPLY, Phase.AFTER),
    (Step.CONFIRM_SENT, Phase.BEFORE),
    (Step.CONFIRM_SENT, Phase.AFTER),
]


@pytest.mark.parametrize(("step", "phase"), SECOND_HALF)
async def test_a_task_survives_a_crash_before_its_end(
    mesh: Mesh, client: FakePeer, peer: FakePeer, step: Step, phase: Phase
) -> None:
    first = await mesh.replica(asker("asker", "peer"))
    task_id = await client.ask("asker", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    crash_replica_at(mesh, first, step, phase)
    await peer.respond(request, 1)
    await mesh.idle()
    await first.crash()
    await mesh.replica(asker("asker", "peer"))
    await mesh.advance(40)
    assert set(map(str, client.replies(task_id))) == {str(Ok({"peer": 1}))}
    assert len(peer.requests) == 1
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert await mesh.store.unsent(AgentName("asker"), 100) == []


@pytest.mark.parametrize(
    ("step", "phase"), [*FIRST_HALF[:6], (Step.BEGIN, Phase.BEFORE), (Step.BEGIN, Phase.AFTER)]
)
async def test_a_task_survives_a_crash_on_receipt(
    mesh: Mesh, client: FakePeer, peer: FakePeer, step: Step, phase: Phase
) -> None:
    first = await mesh.replica(asker("asker", "peer"), ack_policy="on_receipt")
    crash_replica_at(mesh, first, step, phase)
    task_id = await client.ask("asker", 1)
    await mesh.idle()
    await first.crash()
    await mesh.replica(asker("asker", "peer"), ack_policy="on_receipt")
    await mesh.advance(40)
    assert len({request.correlation_id for request in peer.requests}) == 1
    await peer.respond(peer.requests[0], 1)
    assert await client.reply(task_id) == Ok({"peer": 1})


async def test_another_replica_sends_calls_under_the_same_ids(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    first = await mesh.replica(asker("asker", "peer"))
    await mesh.replica(asker("asker", "peer"))
    await mesh.advance(5)
    crash_replica_at(mesh, first, Step.DISPATCH, Phase.BEFORE)
    for number in range(4):
        await client.ask("asker", number)
    await mesh.idle()
    await first.crash()
    assert len(peer.requests) < 4
    await mesh.advance(6)
    assert len(peer.requests) == 4
    for request in peer.requests:
        _, calls = await mesh.task(str(request.headers["x-parent-task-id"]))
        assert [call.sub_task_id for call in calls] == [request.correlation_id]
        await peer.respond(request, 1)
    for task_id in {str(request.headers["x-parent-task-id"]) for request in peer.requests}:
        assert await client.reply(task_id) == Ok({"peer": 1})
