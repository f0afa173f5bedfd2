"""A resumed requester asks again: the child resumes from its checkpoint and answers it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.bodies import ResponseBody, parse_body
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Message
from meshpoint.model.operations import OperationStatus
from meshpoint.model.outcomes import Failed, Ok, Outcome
from meshpoint.model.tasks import TaskState

from .agents import Gate, Steps, doubler, sequential_agent
from .mesh import Mesh
from .resuming import (
    answer_in_turn,
    calling_until_fixed,
    failing_until_fixed,
    int_peer,
    resume_and_sweep,
    stored_outcome,
)


def resend_request(client: FakePeer, task_id: TaskId, retry: int = 1, **headers: Any) -> Message:
    """The request sent by the requester's `retry`-th resume."""
    return client.request(
        1, task_id, parent_task=f"parent~resume-{retry}", resume=f"{retry:08d}", **headers
    )


def responses_to(client: FakePeer, retry: int) -> list[Outcome]:
    """Outcomes sent to one attempt of the parent."""
    parent = f"parent~resume-{retry}" if retry else "parent"
    messages = [
        message for message in client.messages if message.headers.get("x-parent-task-id") == parent
    ]
    return [parse_body(ResponseBody, each.body).outcome() for each in messages]


async def create_failed_child(mesh: Mesh, client: FakePeer) -> tuple[TaskId, Steps, list[bool]]:
    steps = Steps()
    child, is_fixed = failing_until_fixed(steps, "a", "b")
    await mesh.replica(child)
    task_id = await client.ask("agent", 1, parent_task="parent")
    await client.reply(task_id)
    await mesh.idle()
    is_fixed[0] = True
    return task_id, steps, is_fixed


async def test_a_retried_child_resumes_from_its_checkpoint_under_its_id(
    mesh: Mesh, client: FakePeer
) -> None:
    task_id, steps, _ = await create_failed_child(mesh, client)
    await client.send("agent", resend_request(client, task_id))
    await mesh.advance(2)
    assert responses_to(client, 1) == [Ok(3)]
    assert [message.correlation_id for message in client.messages] == [task_id, task_id]
    assert steps.started.names == ["a", "b"]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert mesh.events.timeline(task_id, Step.RESUME) == ["resume before", "resume after"]


async def test_a_repeated_retry_is_answered_without_running_anything(
    mesh: Mesh, client: FakePeer
) -> None:
    task_id, steps, is_fixed = await create_failed_child(mesh, client)
    is_fixed[0] = False
    request = resend_request(client, task_id)
    await client.send("agent", request)
    await mesh.advance(2)
    await client.send("agent", request)
    await mesh.advance(2)
    assert [type(item) for item in responses_to(client, 1)] == [Failed, Failed]
    operation = await mesh.store.operation(task_id)
    assert operation is not None
    assert operation.retry_count == 1
    assert steps.started.names == ["a", "b"]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_the_same_request_in_two_replicas_runs_once(mesh: Mesh, client: FakePeer) -> None:
    """Both replicas look up the failed task before the first resumes it.

    The old failure is not sent again.
    """
    task_id, _, _ = await create_failed_child(mesh, client)
    first, second = mesh.replicas[0], await mesh.replica(mesh.replicas[0].worker.runner._agent)
    both_reached, release = Gate(), Gate()
    first.store.after["lookup"] = second.store.after["lookup"] = both_reached
    second.store.before["revive"] = release
    request = resend_request(client, task_id)
    await client.send("agent", request)
    await client.send("agent", request)
    await both_reached.wait_reached(2)
    both_reached.opened.set()
    await release.wait_reached()
    release.opened.set()
    await mesh.advance(2)
    assert set(map(str, responses_to(client, 1))) == {str(Ok(3))}
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_completed_child_replies_to_a_retried_request(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    await mesh.replica(sequential_agent(steps, "a"))
    task_id = await client.ask("agent", 1, parent_task="parent")
    await client.reply(task_id)
    await mesh.idle()
    await client.send("agent", resend_request(client, task_id))
    await mesh.idle()
    assert (responses_to(client, 0), responses_to(client, 1)) == ([Ok(2)], [Ok(2)])
    assert steps.started.names == ["a"]


@pytest.mark.parametrize("durable", [True, False])
async def test_a_running_child_replies_to_the_latest_requester(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    """A child in memory answers the earlier attempt as well."""
    steps = Steps()
    gate = steps.gate("a")
    await mesh.replica(sequential_agent(steps, "a"), durable=durable)
    task_id = await client.ask("agent", 1, parent_task="parent")
    await gate.wait_reached()
    await client.send("agent", resend_request(client, task_id))
    await mesh.idle()
    assert mesh.unacked("agent") == (0 if durable else 2)
    gate.opened.set()
    await mesh.idle()
    assert responses_to(client, 0) == ([] if durable else [Ok(2)])
    assert responses_to(client, 1) == [Ok(2)]
    assert steps.started.names == ["a"]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_running_child_without_a_row_reruns_for_the_latest_requester(
    mesh: Mesh, client: FakePeer
) -> None:
    """Nothing is left of the first run when the new request is looked up again."""
    before = Gate()

    @agent("agent", version="1")
    async def slow(ctx: TaskExecutionContext, number: int) -> int:
        await before()
        return number

    await mesh.replica(slow)
    task_id = await client.ask("agent", 1, parent_task="parent")
    await before.wait_reached()
    await client.send("agent", resend_request(client, task_id))
    await mesh.idle()
    before.opened.set()
    await mesh.idle()
    assert (responses_to(client, 0), responses_to(client, 1)) == ([Ok(1)], [Ok(1)])
    assert before.visits == 2
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_child_being_committed_replies_to_the_latest_requester(
    mesh: Mesh, client: FakePeer
) -> None:
    """The row is being written for the earlier attempt when the new request arrives."""
    steps, begin_gate = Steps(), Gate()
    replica = await mesh.replica(sequential_agent(steps, "a"))
    replica.store.before["begin"] = begin_gate
    task_id = await client.ask("agent", 1, parent_task="parent")
    await begin_gate.wait_reached()
    await client.send("agent", resend_request(client, task_id))
    await mesh.idle()
    begin_gate.opened.set()
    await mesh.advance(2)
    assert responses_to(client, 1) == [Ok(2)]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_request_during_the_reply_is_answered_again(mesh: Mesh, client: FakePeer) -> None:
    """The task has no row, so the second lookup finds nothing and it runs once more."""
    replica, publishing = await mesh.replica(doubler), Gate()
    publish = replica.broker.publish

    async def slow_publish(messages: Any) -> Any:
        await publishing()
        return await publish(messages)

    replica.broker.publish = slow_publish  # type: ignore[method-assign]  # a fake
    task_id = await client.ask("doubler", 1, parent_task="parent")
    await publishing.wait_reached()
    await client.send("doubler", resend_request(client, task_id))
    await mesh.idle()
    publishing.opened.set()
    await mesh.idle()
    assert (responses_to(client, 0), responses_to(client, 1)) == ([Ok(2)], [Ok(2)])
    assert mesh.unacked("doubler") == mesh.waiting("doubler") == 0


async def test_a_request_during_the_first_pause_is_answered(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    begin_gate = Gate()

    @agent("agent", version="1")
    async def plain(ctx: TaskExecutionContext, number: int) -> int:
        return await int_peer(number)

    replica = await mesh.replica(plain)
    replica.store.before["pause"] = begin_gate
    task_id = await client.ask("agent", 1, parent_task="parent")
    await begin_gate.wait_reached()
    await client.send("agent", resend_request(client, task_id))
    await mesh.idle()
    begin_gate.opened.set()
    await peer.respond(await peer.wait_for_request(), 70)
    await mesh.idle()
    assert (responses_to(client, 0), responses_to(client, 1)) == ([], [Ok(70)])
    assert len(peer.requests) == 1


async def test_a_child_on_another_replica_replies_to_the_latest_requester(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    steps = Steps()
    gate = steps.gate("a")

    @agent("agent", version="1")
    async def pausing(ctx: TaskExecutionContext, number: int) -> int:
        return await int_peer(await steps(ctx, "a", number))

    owner = await mesh.replica(pausing)
    task_id = await client.ask("agent", 1, parent_task="parent")
    await gate.wait_reached()
    await owner.worker._subscriptions["requests"].cancel()
    await mesh.replica(pausing)
    await client.send("agent", resend_request(client, task_id))
    await mesh.idle()
    gate.opened.set()
    await peer.respond(await peer.wait_for_request(), 70)
    await mesh.idle()
    assert (responses_to(client, 0), responses_to(client, 1)) == ([], [Ok(70)])


async def test_a_waiting_child_replies_to_the_latest_requester(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(calling_until_fixed([True], 7))
    task_id = await client.ask("agent", 1, parent_task="parent")
    request = await peer.wait_for_request()
    await mesh.idle()
    await client.send("agent", resend_request(client, task_id))
    await mesh.idle()
    await peer.respond(request, 70)
    await mesh.idle()
    assert (responses_to(client, 0), responses_to(client, 1)) == ([], [Ok([70])])
    assert len(peer.requests) == 1


@pytest.mark.parametrize("ends", ["well", "in failure"])
async def test_a_child_that_ends_during_a_retry_replies_to_it(
    mesh: Mesh, client: FakePeer, ends: str
) -> None:
    """The task was running when its row was looked up and has ended by the time it is resumed."""
    steps = Steps()
    gate = steps.gate("a")
    owner = await mesh.replica(
        sequential_agent(steps, "a", *([] if ends == "well" else ["fail"])), max_concurrency=1
    )
    second = await mesh.replica(sequential_agent(steps, "a"), sweep_interval=timedelta(hours=1))
    task_id = await client.ask("agent", 1, parent_task="parent")
    await gate.wait_reached()
    assert owner.worker.tasks.segments
    await owner.worker._subscriptions["requests"].cancel()
    reviving = Gate()
    second.store.before["revive"] = reviving
    await client.send("agent", resend_request(client, task_id))
    await reviving.wait_reached()
    gate.opened.set()
    await client.reply(task_id)
    await mesh.idle()
    reviving.opened.set()
    await mesh.advance(2)
    (outcome,) = responses_to(client, 1)
    assert outcome == Ok(2) if ends == "well" else isinstance(outcome, (Ok, Failed))
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_child_without_a_checkpoint_restarts_under_its_id(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    is_fixed = [False]

    @agent("agent", version="1")
    async def plain(ctx: TaskExecutionContext, number: int) -> int:
        answer = await int_peer(number)
        if not is_fixed[0]:
            raise ValueError("no")
        return answer

    await mesh.replica(plain)
    task_id = await client.ask("agent", 1, parent_task="parent")
    await answer_in_turn(mesh, peer, 70)
    await client.reply(task_id)
    await mesh.idle()
    is_fixed[0] = True
    await client.send("agent", resend_request(client, task_id))
    await answer_in_turn(mesh, peer, 71, before=1)
    assert responses_to(client, 1) == [Ok(71)]


async def test_a_purged_child_runs_as_a_new_task(mesh: Mesh, client: FakePeer) -> None:
    task_id, steps, _ = await create_failed_child(mesh, client)
    mesh.clock.advance(timedelta(days=31))
    assert await mesh.store.purge(AgentName("agent"), 10) == 1
    await client.send("agent", resend_request(client, task_id))
    await mesh.advance(2)
    assert responses_to(client, 1) == [Ok(3)]
    assert steps.started.names == ["a", "b", "a", "b"]


async def test_a_request_older_than_the_latest_changes_nothing(
    mesh: Mesh, client: FakePeer
) -> None:
    task_id, _, is_fixed = await create_failed_child(mesh, client)
    is_fixed[0] = False
    older = resend_request(client, task_id, retry=1)
    await client.send("agent", resend_request(client, task_id, retry=2))
    await mesh.advance(2)
    await client.send("agent", older)
    await mesh.advance(2)
    assert len(responses_to(client, 2)) == 1
    assert responses_to(client, 1) == []
    operation = await mesh.store.operation(task_id)
    assert operation is not None
    assert operation.retry_count == 1
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_resent_request_brings_its_own_deadline(mesh: Mesh, client: FakePeer) -> None:
    steps = Steps()
    child, is_fixed = failing_until_fixed(steps, "a")
    await mesh.replica(child)
    task_id = await client.ask("agent", 1, parent_task="parent", deadline=mesh.deadline_in(10))
    await client.reply(task_id)
    await mesh.advance(20)
    is_fixed[0] = True
    await client.send("agent", resend_request(client, task_id, deadline=mesh.deadline_in(10)))
    await mesh.advance(2)
    assert responses_to(client, 1) == [Ok(2)]


async def test_an_exclusive_child_reports_the_active_operation(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    await mesh.replica(sequential_agent(steps, "a", "fail", exclusive=True))
    task_id = await client.ask("agent", 1, parent_task="parent")
    await client.reply(task_id)
    await mesh.idle()
    gate = steps.gate("a")
    active = await client.ask("agent", 2)
    await gate.wait_reached()
    await client.send("agent", resend_request(client, task_id))
    await mesh.idle()
    (outcome,) = responses_to(client, 1)
    assert isinstance(outcome, Failed)
    assert outcome.message == f"agent 'agent' is exclusive, and its operation {active} is active"
    assert await mesh.state(task_id) is TaskState.FAILED


@pytest.mark.parametrize("fault", ["not committed", "in doubt", "lost, in doubt"])
async def test_a_child_is_resumed_despite_a_database_outage(
    mesh: Mesh, client: FakePeer, fault: str
) -> None:
    task_id, steps, _ = await create_failed_child(mesh, client)
    mesh.replicas[0].store.fail("revive", fault)
    await client.send("agent", resend_request(client, task_id))
    await mesh.advance(5)
    assert set(map(str, responses_to(client, 1))) == {str(Ok(3))}
    assert steps.started.names == ["a", "b"]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_an_in_process_child_resumes_from_its_checkpoint(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    child, is_fixed = failing_until_fixed(steps, "a", "b")
    await mesh.replica(child, durable=False)
    task_id = await client.ask("agent", 1, parent_task="parent")
    await client.reply(task_id)
    await mesh.idle()
    is_fixed[0] = True
    await client.send("agent", resend_request(client, task_id))
    await mesh.advance(2)
    assert responses_to(client, 1) == [Ok(3)]
    assert steps.started.names == ["a", "b"]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_parent_and_child_resume_together(mesh: Mesh, client: FakePeer) -> None:
    """The child's failure fails the parent; resuming the parent resumes the child."""
    steps, is_fixed = Steps(), [False]
    child = Peer("child", int, int)

    @agent("child", version="1")
    async def failing_child(ctx: TaskExecutionContext, number: int) -> int:
        number = await steps(ctx, "of the child", number)
        if not is_fixed[0]:
            raise ValueError("no")
        return number

    @agent("parent", version="1")
    async def parent(ctx: TaskExecutionContext, number: int) -> int:
        return await child(await steps(ctx, "of the parent", number))

    await mesh.replica(failing_child, parent)
    task_id = await client.ask("parent", 1)
    assert isinstance(await client.reply(task_id), Failed)
    await mesh.idle()
    is_fixed[0] = True
    await resume_and_sweep(mesh, task_id)
    await mesh.advance(2)
    assert await stored_outcome(mesh, task_id) == Ok(3)
    assert steps.started.names == ["of the parent", "of the child"]
    (operation,) = await mesh.store.operations(agent=AgentName("child"))
    assert (operation.status, operation.retry_count) == (OperationStatus.COMPLETED, 1)
