"""A resumed operation calls the same tasks of its peers, unless the calling code is outdated."""

from __future__ import annotations

from typing import Any

import pytest

from meshpoint.agents.function import agent
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.outcomes import Ok

from .mesh import Mesh
from .puppet import Puppet
from .resuming import answer_in_turn, asked, asking, other, result_of, resumed


async def test_the_same_calls_go_to_the_same_tasks(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    works = [False]
    await mesh.replica(asking(works, 7, 7, 8))
    task_id = await boss.ask("agent", 1)
    first = await answer_in_turn(mesh, peer, 70, 71, 80)
    await boss.reply(task_id)
    works[0] = True
    await resumed(mesh, task_id)
    again = await answer_in_turn(mesh, peer, 700, 710, 800, before=3)
    assert [each.correlation_id for each in again] == [each.correlation_id for each in first]
    assert {each.headers["x-parent-task-id"] for each in again} == {f"{task_id}~resume-1"}
    assert {each.headers["x-resume"] for each in again} == {"00000001"}
    assert not [each for each in first if "x-resume" in each.headers]
    assert await result_of(mesh, task_id) == Ok([700, 710, 800])
    operation = await mesh.store.operation(task_id)
    assert operation is not None
    assert len({child.id for child in operation.children}) == 3


async def test_other_calls_go_to_new_tasks(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    works = [False]
    first_release = await mesh.replica(asking(works, 7))
    task_id = await boss.ask("agent", 1)
    (first,) = await answer_in_turn(mesh, peer, 70)
    await boss.reply(task_id)
    await first_release.crash()
    works[0] = True
    await mesh.replica(asking(works, 9))
    await resumed(mesh, task_id)
    (again,) = await answer_in_turn(mesh, peer, 90, before=1)
    assert again.correlation_id != first.correlation_id
    assert "x-resume" not in again.headers
    assert again.headers["x-parent-task-id"] == task_id
    assert await result_of(mesh, task_id) == Ok([90])


async def test_a_late_answer_to_an_earlier_attempt_is_the_answer_to_nothing(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    works = [True]
    await mesh.replica(asking(works, 7))
    task_id = await boss.ask("agent", 1)
    first = await peer.request_number()
    await mesh.settle()
    await boss.cancel("agent", task_id)
    await boss.reply(task_id)
    await resumed(mesh, task_id)
    again = await peer.request_number(2)
    await mesh.settle()
    await peer.respond(first, 70)
    await mesh.settle()
    assert await mesh.state(task_id) is TaskState.WAITING
    assert len(mesh.events.of(Step.LATE)) == 1
    await peer.respond(again, 71)
    await mesh.settle()
    assert await result_of(mesh, task_id) == Ok([71])


async def test_a_peer_is_cancelled_under_its_own_id(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    works = [False]
    await mesh.replica(asking(works, 7))
    task_id = await boss.ask("agent", 1)
    (first,) = await answer_in_turn(mesh, peer, 70)
    await boss.reply(task_id)
    await resumed(mesh, task_id)
    await peer.request_number(2)
    await mesh.settle()
    await boss.cancel("agent", task_id)
    assert await peer.cancelled() == [first.correlation_id]


@pytest.mark.parametrize("pauses_between", [False, True])
async def test_what_an_outdated_subtask_had_asked_is_asked_anew(
    mesh: Mesh, boss: Puppet, peer: Puppet, pauses_between: bool
) -> None:
    second = await mesh.puppet("other")

    async def ask(ctx: TaskExecutionContext, of: int, salt: int) -> int:
        return await ctx.call(asked(of))

    def release(salt: int, works: bool) -> Any:
        @agent("agent", version="1")
        async def asks_in_subtasks(ctx: TaskExecutionContext, number: int) -> list[int]:
            answers = [
                await ctx.subtask("same", ask, ctx, 1, 0),
                await ctx.subtask("changed", ask, ctx, 2, salt),
                await ctx.call(other(5)) if pauses_between else 5,
                await ctx.subtask("after", ask, ctx, 3, 0),
            ]
            if not works:
                raise ValueError("no")
            return answers

        return asks_in_subtasks

    async def answer_the_other(count: int) -> None:
        if pauses_between:
            await second.respond(await second.request_number(count), 5)

    first_release = await mesh.replica(release(0, works=False))
    task_id = await boss.ask("agent", 1)
    first = list(await answer_in_turn(mesh, peer, 1, 2))
    await answer_the_other(1)
    first += await answer_in_turn(mesh, peer, 3, before=2)
    await boss.reply(task_id)
    await first_release.crash()
    await mesh.replica(release(1, works=True))
    await resumed(mesh, task_id)
    (changed,) = await answer_in_turn(mesh, peer, 20, before=3)
    await answer_the_other(2)
    (after,) = await answer_in_turn(mesh, peer, 30, before=4)
    assert await result_of(mesh, task_id) == Ok([1, 20, 5, 30])
    ids = {each.correlation_id for each in first}
    assert changed.correlation_id not in ids
    assert after.correlation_id not in ids
    assert "x-resume" not in {*changed.headers, *after.headers}


async def test_what_a_recorded_subtask_had_asked_is_not_taken_for_anothers_call(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    """The recorded subtask does not repeat its call, so the next equal call needs its own id."""
    works = [False]

    async def ask(ctx: TaskExecutionContext) -> int:
        return await ctx.call(asked(7))

    @agent("agent", version="1")
    async def twice(ctx: TaskExecutionContext, number: int) -> list[int]:
        answers = [await ctx.subtask("inside", ask, ctx), await ctx.call(asked(7))]
        if not works[0]:
            raise ValueError("no")
        return answers

    await mesh.replica(twice)
    task_id = await boss.ask("agent", 1)
    _, outside = await answer_in_turn(mesh, peer, 70, 71)
    await boss.reply(task_id)
    works[0] = True
    await resumed(mesh, task_id)
    (again,) = await answer_in_turn(mesh, peer, 72, before=2)
    assert again.correlation_id == outside.correlation_id
    assert await result_of(mesh, task_id) == Ok([70, 72])
