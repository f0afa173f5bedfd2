"""A replica crashes between two steps of a task: others continue it, and nothing is repeated."""

from __future__ import annotations

import pytest

from meshpoint.model.checkpoint import TaskState
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.options import AckPolicy
from meshpoint.model.outcomes import Ok

from .agents import asker
from .mesh import Mesh, Running
from .puppet import Puppet


def crash_at(mesh: Mesh, replica: Running, step: Step, phase: Phase) -> None:
    """Kill `replica` at its next event of this step and phase, before it does anything else."""

    def at(event: Event) -> None:
        if (event.step, event.phase, event.replica) == (step, phase, replica.id):
            mesh.events.hooks.remove(at)
            replica.task.cancel()
            replica.store.away = replica.broker.away = True

    mesh.events.hooks.append(at)


FIRST_HALF = [
    (Step.RECEIVE, Phase.BEFORE),
    (Step.RECEIVE, Phase.AFTER),
    (Step.SEGMENT, Phase.BEFORE),
    (Step.SEGMENT, Phase.AFTER),
    (Step.CHECKPOINT, Phase.BEFORE),
    (Step.CHECKPOINT, Phase.AFTER),
    (Step.DISPATCH, Phase.BEFORE),
    (Step.DISPATCH, Phase.AFTER),
    (Step.MARK, Phase.BEFORE),
    (Step.MARK, Phase.AFTER),
    (Step.ACK, Phase.BEFORE),
    (Step.ACK, Phase.AFTER),
]


@pytest.mark.parametrize(("step", "phase"), FIRST_HALF)
async def test_crash_on_the_way_to_the_checkpoint(
    mesh: Mesh, boss: Puppet, peer: Puppet, step: Step, phase: Phase
) -> None:
    first = await mesh.replica(asker("asker", "peer"))
    crash_at(mesh, first, step, phase)
    task_id = await boss.ask("asker", 1)
    await mesh.settle()
    await first.crash()
    await mesh.replica(asker("asker", "peer"))
    await mesh.advance(25)
    call_ids = {request.correlation_id for request in peer.requests}
    assert len(call_ids) == 1, "the calls were made twice"
    await peer.respond(peer.requests[0], 1)
    assert await boss.reply(task_id) == Ok({"peer": 1})
    await mesh.advance(20)
    assert mesh.unacked("asker") == mesh.waiting("asker") == 0
    assert await mesh.store.unsent("asker", 100) == []  # type: ignore[arg-type]


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
    (Step.MARK, Phase.BEFORE),
    (Step.MARK, Phase.AFTER),
]


@pytest.mark.parametrize(("step", "phase"), SECOND_HALF)
async def test_crash_on_the_way_to_the_end(mesh: Mesh, boss: Puppet, peer: Puppet, step: Step, phase: Phase) -> None:
    first = await mesh.replica(asker("asker", "peer"))
    task_id = await boss.ask("asker", 1)
    request = await peer.request_number()
    await mesh.settle()
    crash_at(mesh, first, step, phase)
    await peer.respond(request, 1)
    await mesh.settle()
    await first.crash()
    await mesh.replica(asker("asker", "peer"))
    await mesh.advance(40)
    assert set(map(str, boss.replies(task_id))) == {str(Ok({"peer": 1}))}
    assert len(peer.requests) == 1
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert await mesh.store.unsent("asker", 100) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(("step", "phase"), [*FIRST_HALF[:6], (Step.BEGIN, Phase.BEFORE), (Step.BEGIN, Phase.AFTER)])
async def test_crash_on_receipt(mesh: Mesh, boss: Puppet, peer: Puppet, step: Step, phase: Phase) -> None:
    first = await mesh.replica(asker("asker", "peer"), ack_policy=AckPolicy.ON_RECEIPT)
    crash_at(mesh, first, step, phase)
    task_id = await boss.ask("asker", 1)
    await mesh.settle()
    await first.crash()
    await mesh.replica(asker("asker", "peer"), ack_policy=AckPolicy.ON_RECEIPT)
    await mesh.advance(40)
    assert len({request.correlation_id for request in peer.requests}) == 1
    await peer.respond(peer.requests[0], 1)
    assert await boss.reply(task_id) == Ok({"peer": 1})


async def test_another_replica_dispatches_under_the_same_ids(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    first = await mesh.replica(asker("asker", "peer"))
    await mesh.replica(asker("asker", "peer"))
    await mesh.advance(5)
    crash_at(mesh, first, Step.DISPATCH, Phase.BEFORE)
    for number in range(4):
        await boss.ask("asker", number)
    await mesh.settle()
    await first.crash()
    assert len(peer.requests) < 4
    await mesh.advance(6)
    assert len(peer.requests) == 4
    for request in peer.requests:
        _, calls = await mesh.task(str(request.headers["x-parent-task-id"]))
        assert [call.sub_task_id for call in calls] == [request.correlation_id]
        await peer.respond(request, 1)
    for task_id in {str(request.headers["x-parent-task-id"]) for request in peer.requests}:
        assert await boss.reply(task_id) == Ok({"peer": 1})
