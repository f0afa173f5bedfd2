"""A resumed requester asks again: the child resumes from its checkpoint and answers it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.bodies import ResponseBody, parse
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Message
from meshpoint.model.operations import OperationStatus
from meshpoint.model.outcomes import Failed, Ok, Outcome

from .agents import Gate, Steps, doubler, in_a_row
from .mesh import Mesh
from .puppet import Puppet
from .resuming import answer_in_turn, asked, asking, mending, result_of, resumed


def ask_again(boss: Puppet, task_id: TaskId, retry: int = 1, **headers: Any) -> Message:
    """The request sent by the requester's `retry`-th resume."""
    return boss.request(1, task_id, parent_task=f"parent~resume-{retry}", resume=f"{retry:08d}", **headers)


def answers(boss: Puppet, retry: int) -> list[Outcome]:
    """Outcomes sent to one attempt of the parent."""
    parent = f"parent~resume-{retry}" if retry else "parent"
    letters = [each for each in boss.letters if each.headers.get("x-parent-task-id") == parent]
    return [parse(ResponseBody, each.body).outcome() for each in letters]


async def failed_child(mesh: Mesh, boss: Puppet) -> tuple[TaskId, Steps, list[bool]]:
    steps = Steps()
    tested, works = mending(steps, "a", "b")
    await mesh.replica(tested)
    task_id = await boss.ask("agent", 1, parent_task="parent")
    await boss.reply(task_id)
    await mesh.settle()
    works[0] = True
    return task_id, steps, works


async def test_a_child_goes_on_from_its_own_checkpoint_under_its_own_id(mesh: Mesh, boss: Puppet) -> None:
    task_id, steps, _ = await failed_child(mesh, boss)
    await boss.send("agent", ask_again(boss, task_id))
    await mesh.advance(2)
    assert answers(boss, 1) == [Ok(3)]
    assert [each.correlation_id for each in boss.letters] == [task_id, task_id]
    assert steps.ran.names == ["a", "b"]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert mesh.events.story(task_id, Step.RESUME) == ["resume before", "resume after"]


async def test_the_same_request_again_is_answered_again_and_runs_nothing(mesh: Mesh, boss: Puppet) -> None:
    task_id, steps, works = await failed_child(mesh, boss)
    works[0] = False
    request = ask_again(boss, task_id)
    await boss.send("agent", request)
    await mesh.advance(2)
    await boss.send("agent", request)
    await mesh.advance(2)
    assert [type(each) for each in answers(boss, 1)] == [Failed, Failed]
    operation = await mesh.store.operation(task_id)
    assert operation is not None
    assert operation.retry_count == 1
    assert steps.ran.names == ["a", "b"]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_the_same_request_twice_in_two_replicas(mesh: Mesh, boss: Puppet) -> None:
    """Both replicas look up the failed task before the first resumes it.

    The old failure is not sent again.
    """
    task_id, _, _ = await failed_child(mesh, boss)
    first, second = mesh.replicas[0], await mesh.replica(mesh.replicas[0].worker.segments._agent)
    both, later = Gate(), Gate()
    first.store.after["lookup"] = second.store.after["lookup"] = both
    second.store.before["revive"] = later
    request = ask_again(boss, task_id)
    await boss.send("agent", request)
    await boss.send("agent", request)
    await both.reach(2)
    both.opened.set()
    await later.reach()
    later.opened.set()
    await mesh.advance(2)
    assert set(map(str, answers(boss, 1))) == {str(Ok(3))}
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_completed_child_answers_again(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    await mesh.replica(in_a_row(steps, "a"))
    task_id = await boss.ask("agent", 1, parent_task="parent")
    await boss.reply(task_id)
    await mesh.settle()
    await boss.send("agent", ask_again(boss, task_id))
    await mesh.settle()
    assert (answers(boss, 0), answers(boss, 1)) == ([Ok(2)], [Ok(2)])
    assert steps.ran.names == ["a"]


@pytest.mark.parametrize("durable", [True, False])
async def test_a_child_at_work_answers_who_asks_now(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    """A child in memory answers the earlier attempt as well."""
    steps = Steps()
    gate = steps.gate("a")
    await mesh.replica(in_a_row(steps, "a"), durable=durable)
    task_id = await boss.ask("agent", 1, parent_task="parent")
    await gate.reach()
    await boss.send("agent", ask_again(boss, task_id))
    await mesh.settle()
    assert mesh.unacked("agent") == (0 if durable else 2)
    gate.opened.set()
    await mesh.settle()
    assert answers(boss, 0) == ([] if durable else [Ok(2)])
    assert answers(boss, 1) == [Ok(2)]
    assert steps.ran.names == ["a"]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_child_without_a_row_that_runs_runs_again_for_who_asks_now(mesh: Mesh, boss: Puppet) -> None:
    """Nothing is left of the first run when the new request is looked up again."""
    before = Gate()

    @agent("agent", version="1")
    async def slow(ctx: TaskExecutionContext, number: int) -> int:
        await before()
        return number

    await mesh.replica(slow)
    task_id = await boss.ask("agent", 1, parent_task="parent")
    await before.reach()
    await boss.send("agent", ask_again(boss, task_id))
    await mesh.settle()
    before.opened.set()
    await mesh.settle()
    assert (answers(boss, 0), answers(boss, 1)) == ([Ok(1)], [Ok(1)])
    assert before.visits == 2
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_child_that_is_being_begun_answers_who_asks_now(mesh: Mesh, boss: Puppet) -> None:
    """The row is being written for the earlier attempt when the new request arrives."""
    steps, committing = Steps(), Gate()
    replica = await mesh.replica(in_a_row(steps, "a"))
    replica.store.before["begin"] = committing
    task_id = await boss.ask("agent", 1, parent_task="parent")
    await committing.reach()
    await boss.send("agent", ask_again(boss, task_id))
    await mesh.settle()
    committing.opened.set()
    await mesh.advance(2)
    assert answers(boss, 1) == [Ok(2)]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_child_that_is_answering_is_asked_again(mesh: Mesh, boss: Puppet) -> None:
    """The task has no row, so the second lookup finds nothing and it runs once more."""
    replica, publishing = await mesh.replica(doubler), Gate()
    publish = replica.broker.publish

    async def slowly(messages: Any) -> Any:
        await publishing()
        return await publish(messages)

    replica.broker.publish = slowly  # type: ignore[method-assign]
    task_id = await boss.ask("doubler", 1, parent_task="parent")
    await publishing.reach()
    await boss.send("doubler", ask_again(boss, task_id))
    await mesh.settle()
    publishing.opened.set()
    await mesh.settle()
    assert (answers(boss, 0), answers(boss, 1)) == ([Ok(2)], [Ok(2)])
    assert mesh.unacked("doubler") == mesh.waiting("doubler") == 0


async def test_a_child_that_pauses_for_the_first_time_is_asked_again(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    committing = Gate()

    @agent("agent", version="1")
    async def plain(ctx: TaskExecutionContext, number: int) -> int:
        return await ctx.call(asked(number))

    replica = await mesh.replica(plain)
    replica.store.before["pause"] = committing
    task_id = await boss.ask("agent", 1, parent_task="parent")
    await committing.reach()
    await boss.send("agent", ask_again(boss, task_id))
    await mesh.settle()
    committing.opened.set()
    await peer.respond(await peer.request_number(), 70)
    await mesh.settle()
    assert (answers(boss, 0), answers(boss, 1)) == ([], [Ok(70)])
    assert len(peer.requests) == 1


async def test_a_child_that_runs_in_another_replica_answers_who_asks_now_after_a_pause(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    steps = Steps()
    gate = steps.gate("a")

    @agent("agent", version="1")
    async def pausing(ctx: TaskExecutionContext, number: int) -> int:
        return await ctx.call(asked(await steps(ctx, "a", number)))

    owner = await mesh.replica(pausing)
    task_id = await boss.ask("agent", 1, parent_task="parent")
    await gate.reach()
    await owner.worker._subscriptions["requests"].cancel()
    await mesh.replica(pausing)
    await boss.send("agent", ask_again(boss, task_id))
    await mesh.settle()
    gate.opened.set()
    await peer.respond(await peer.request_number(), 70)
    await mesh.settle()
    assert (answers(boss, 0), answers(boss, 1)) == ([], [Ok(70)])


async def test_a_waiting_child_answers_who_asks_now(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    await mesh.replica(asking([True], 7))
    task_id = await boss.ask("agent", 1, parent_task="parent")
    request = await peer.request_number()
    await mesh.settle()
    await boss.send("agent", ask_again(boss, task_id))
    await mesh.settle()
    await peer.respond(request, 70)
    await mesh.settle()
    assert (answers(boss, 0), answers(boss, 1)) == ([], [Ok([70])])
    assert len(peer.requests) == 1


@pytest.mark.parametrize("ends", ["well", "in failure"])
async def test_a_child_that_ends_while_it_is_asked_again(mesh: Mesh, boss: Puppet, ends: str) -> None:
    """The task was running when its row was looked up and has ended by the time it is resumed."""
    steps = Steps()
    gate = steps.gate("a")
    owner = await mesh.replica(in_a_row(steps, "a", *([] if ends == "well" else ["fail"])), max_concurrency=1)
    second = await mesh.replica(in_a_row(steps, "a"), sweep_interval=timedelta(hours=1))
    task_id = await boss.ask("agent", 1, parent_task="parent")
    await gate.reach()
    assert owner.worker.segments.live
    await owner.worker._subscriptions["requests"].cancel()
    reviving = Gate()
    second.store.before["revive"] = reviving
    await boss.send("agent", ask_again(boss, task_id))
    await reviving.reach()
    gate.opened.set()
    await boss.reply(task_id)
    await mesh.settle()
    reviving.opened.set()
    await mesh.advance(2)
    (outcome,) = answers(boss, 1)
    assert outcome == Ok(2) if ends == "well" else isinstance(outcome, (Ok, Failed))
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_child_without_a_checkpoint_starts_again_under_its_id(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    works = [False]

    @agent("agent", version="1")
    async def plain(ctx: TaskExecutionContext, number: int) -> int:
        answer = await ctx.call(asked(number))
        if not works[0]:
            raise ValueError("no")
        return answer

    await mesh.replica(plain)
    task_id = await boss.ask("agent", 1, parent_task="parent")
    await answer_in_turn(mesh, peer, 70)
    await boss.reply(task_id)
    await mesh.settle()
    works[0] = True
    await boss.send("agent", ask_again(boss, task_id))
    await answer_in_turn(mesh, peer, 71, before=1)
    assert answers(boss, 1) == [Ok(71)]


async def test_a_child_that_was_purged_runs_as_a_new_one(mesh: Mesh, boss: Puppet) -> None:
    task_id, steps, _ = await failed_child(mesh, boss)
    mesh.clock.advance(timedelta(days=31))
    assert await mesh.store.purge(AgentName("agent"), 10) == 1
    await boss.send("agent", ask_again(boss, task_id))
    await mesh.advance(2)
    assert answers(boss, 1) == [Ok(3)]
    assert steps.ran.names == ["a", "b", "a", "b"]


async def test_an_older_request_than_the_last_one_changes_nothing(mesh: Mesh, boss: Puppet) -> None:
    task_id, _, works = await failed_child(mesh, boss)
    works[0] = False
    older = ask_again(boss, task_id, retry=1)
    await boss.send("agent", ask_again(boss, task_id, retry=2))
    await mesh.advance(2)
    await boss.send("agent", older)
    await mesh.advance(2)
    assert len(answers(boss, 2)) == 1
    assert answers(boss, 1) == []
    operation = await mesh.store.operation(task_id)
    assert operation is not None
    assert operation.retry_count == 1
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_deadline_that_has_passed_is_that_of_the_new_request(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    tested, works = mending(steps, "a")
    await mesh.replica(tested)
    task_id = await boss.ask("agent", 1, parent_task="parent", deadline=mesh.in_seconds(10))
    await boss.reply(task_id)
    await mesh.advance(20)
    works[0] = True
    await boss.send("agent", ask_again(boss, task_id, deadline=mesh.in_seconds(10)))
    await mesh.advance(2)
    assert answers(boss, 1) == [Ok(2)]


async def test_an_exclusive_child_says_who_is_active(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    await mesh.replica(in_a_row(steps, "a", "fail", exclusive=True))
    task_id = await boss.ask("agent", 1, parent_task="parent")
    await boss.reply(task_id)
    await mesh.settle()
    gate = steps.gate("a")
    active = await boss.ask("agent", 2)
    await gate.reach()
    await boss.send("agent", ask_again(boss, task_id))
    await mesh.settle()
    (outcome,) = answers(boss, 1)
    assert isinstance(outcome, Failed)
    assert outcome.message == f"agent 'agent' is exclusive, and its operation {active} is active"
    assert await mesh.state(task_id) is TaskState.FAILED


@pytest.mark.parametrize("fault", ["not committed", "in doubt", "lost, in doubt"])
async def test_a_database_that_is_away_while_a_child_is_resumed(mesh: Mesh, boss: Puppet, fault: str) -> None:
    task_id, steps, _ = await failed_child(mesh, boss)
    mesh.replicas[0].store.fail("revive", fault)
    await boss.send("agent", ask_again(boss, task_id))
    await mesh.advance(5)
    assert set(map(str, answers(boss, 1))) == {str(Ok(3))}
    assert steps.ran.names == ["a", "b"]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_child_in_memory_goes_on_from_its_checkpoint(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    tested, works = mending(steps, "a", "b")
    await mesh.replica(tested, durable=False)
    task_id = await boss.ask("agent", 1, parent_task="parent")
    await boss.reply(task_id)
    await mesh.settle()
    works[0] = True
    await boss.send("agent", ask_again(boss, task_id))
    await mesh.advance(2)
    assert answers(boss, 1) == [Ok(3)]
    assert steps.ran.names == ["a", "b"]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_parent_and_child_go_on_together(mesh: Mesh, boss: Puppet) -> None:
    """The child's failure fails the parent; resuming the parent resumes the child."""
    steps, works = Steps(), [False]
    child = Peer("child", int, int)

    @agent("child", version="1")
    async def failing_child(ctx: TaskExecutionContext, number: int) -> int:
        number = await steps(ctx, "of the child", number)
        if not works[0]:
            raise ValueError("no")
        return number

    @agent("parent", version="1")
    async def parent(ctx: TaskExecutionContext, number: int) -> int:
        return await ctx.call(child(await steps(ctx, "of the parent", number)))

    await mesh.replica(failing_child, parent)
    task_id = await boss.ask("parent", 1)
    assert isinstance(await boss.reply(task_id), Failed)
    await mesh.settle()
    works[0] = True
    await resumed(mesh, task_id)
    await mesh.advance(2)
    assert await result_of(mesh, task_id) == Ok(3)
    assert steps.ran.names == ["of the parent", "of the child"]
    (operation,) = await mesh.store.operations(agent=AgentName("child"))
    assert (operation.status, operation.retry_count) == (OperationStatus.COMPLETED, 1)
