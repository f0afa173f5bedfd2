"""A resumed operation calls the same tasks of its peers, unless the calling code is outdated."""

from __future__ import annotations

from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Step
from meshpoint.model.outcomes import Ok
from meshpoint.model.tasks import TaskState

from .mesh import Mesh
from .resuming import (
    answer_in_turn,
    calling_until_fixed,
    int_peer,
    other_peer,
    resume_and_sweep,
    stored_outcome,
)


async def test_repeated_calls_go_to_the_same_tasks(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    is_fixed = [False]
    await mesh.replica(calling_until_fixed(is_fixed, 7, 7, 8))
    task_id = await client.ask("agent", 1)
    first = await answer_in_turn(mesh, peer, 70, 71, 80)
    await client.reply(task_id)
    is_fixed[0] = True
    await resume_and_sweep(mesh, task_id)
    resumed_requests = await answer_in_turn(mesh, peer, 700, 710, 800, before=3)
    assert [request.correlation_id for request in resumed_requests] == [
        each.correlation_id for each in first
    ]
    assert {each.headers["x-parent-task-id"] for each in resumed_requests} == {
        f"{task_id}~resume-1"
    }
    assert {each.headers["x-resume"] for each in resumed_requests} == {"00000001"}
    assert not [each for each in first if "x-resume" in each.headers]
    assert await stored_outcome(mesh, task_id) == Ok([700, 710, 800])
    operation = await mesh.store.operation(task_id)
    assert operation is not None
    assert len({child.id for child in operation.children}) == 3


async def test_equal_calls_of_one_pause_go_to_different_tasks_again(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    is_fixed = [False]

    @agent("agent", version="1")
    async def calling(ctx: TaskExecutionContext, number: int) -> list[int]:
        await ctx.subtask("once", int, 1)
        answers = list(await ctx.gather(int_peer(7), int_peer(7)))
        if not is_fixed[0]:
            raise ValueError("no")
        return answers

    await mesh.replica(calling)
    task_id = await client.ask("agent", 1)
    first = await answer_in_turn(mesh, peer, 70, 71)
    await client.reply(task_id)
    is_fixed[0] = True
    await resume_and_sweep(mesh, task_id)
    again = await answer_in_turn(mesh, peer, 700, 710, before=2)
    ids = {request.correlation_id for request in first}
    assert {request.correlation_id for request in again} == ids
    assert len(ids) == 2
    assert await stored_outcome(mesh, task_id) == Ok([700, 710])


async def test_changed_calls_go_to_new_tasks(mesh: Mesh, client: FakePeer, peer: FakePeer) -> None:
    is_fixed = [False]
    first_release = await mesh.replica(calling_until_fixed(is_fixed, 7))
    task_id = await client.ask("agent", 1)
    (first,) = await answer_in_turn(mesh, peer, 70)
    await client.reply(task_id)
    await first_release.crash()
    is_fixed[0] = True
    await mesh.replica(calling_until_fixed(is_fixed, 9))
    await resume_and_sweep(mesh, task_id)
    (resumed_request,) = await answer_in_turn(mesh, peer, 90, before=1)
    assert resumed_request.correlation_id != first.correlation_id
    assert "x-resume" not in resumed_request.headers
    assert resumed_request.headers["x-parent-task-id"] == task_id
    assert await stored_outcome(mesh, task_id) == Ok([90])


async def test_a_late_response_to_an_earlier_attempt_is_ignored(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    is_fixed = [True]
    await mesh.replica(calling_until_fixed(is_fixed, 7))
    task_id = await client.ask("agent", 1)
    first = await peer.wait_for_request()
    await mesh.idle()
    await client.cancel("agent", task_id)
    await client.reply(task_id)
    await resume_and_sweep(mesh, task_id)
    resumed_request = await peer.wait_for_request(2)
    await mesh.idle()
    await peer.respond(first, 70)
    await mesh.idle()
    assert await mesh.state(task_id) is TaskState.WAITING
    assert len(mesh.events.matching(Step.LATE)) == 1
    await peer.respond(resumed_request, 71)
    await mesh.idle()
    assert await stored_outcome(mesh, task_id) == Ok([71])


async def test_a_peer_is_cancelled_under_its_own_id(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    is_fixed = [False]
    await mesh.replica(calling_until_fixed(is_fixed, 7))
    task_id = await client.ask("agent", 1)
    (first,) = await answer_in_turn(mesh, peer, 70)
    await client.reply(task_id)
    await resume_and_sweep(mesh, task_id)
    await peer.wait_for_request(2)
    await mesh.idle()
    await client.cancel("agent", task_id)
    assert await peer.wait_for_cancels() == [first.correlation_id]


@pytest.mark.parametrize("pauses_between", [False, True])
async def test_calls_of_an_outdated_subtask_are_made_again(
    mesh: Mesh, client: FakePeer, peer: FakePeer, pauses_between: bool
) -> None:
    second = await mesh.fake_peer("other")

    async def ask(ctx: TaskExecutionContext, number_: int, salt: int) -> int:
        return await int_peer(number_)

    def release(salt: int, is_fixed: bool) -> Any:
        @agent("agent", version="1")
        async def call_in_subtasks(ctx: TaskExecutionContext, number: int) -> list[int]:
            answers = [
                await ctx.subtask("same", ask, ctx, 1, 0),
                await ctx.subtask("changed", ask, ctx, 2, salt),
                await other_peer(5) if pauses_between else 5,
                await ctx.subtask("after", ask, ctx, 3, 0),
            ]
            if not is_fixed:
                raise ValueError("no")
            return answers

        return call_in_subtasks

    async def answer_the_other(count: int) -> None:
        if pauses_between:
            await second.respond(await second.wait_for_request(count), 5)

    first_release = await mesh.replica(release(0, is_fixed=False))
    task_id = await client.ask("agent", 1)
    first = list(await answer_in_turn(mesh, peer, 1, 2))
    await answer_the_other(1)
    first += await answer_in_turn(mesh, peer, 3, before=2)
    await client.reply(task_id)
    await first_release.crash()
    await mesh.replica(release(1, is_fixed=True))
    await resume_and_sweep(mesh, task_id)
    (changed,) = await answer_in_turn(mesh, peer, 20, before=3)
    await answer_the_other(2)
    (after,) = await answer_in_turn(mesh, peer, 30, before=4)
    assert await stored_outcome(mesh, task_id) == Ok([1, 20, 5, 30])
    ids = {request.correlation_id for request in first}
    assert changed.correlation_id not in ids
    assert after.correlation_id not in ids
    assert "x-resume" not in {*changed.headers, *after.headers}


async def test_calls_of_a_recorded_subtask_are_not_reused_elsewhere(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The recorded subtask does not repeat its call, so the next equal call needs its own id."""
    is_fixed = [False]

    async def ask(ctx: TaskExecutionContext) -> int:
        return await int_peer(7)

    @agent("agent", version="1")
    async def twice(ctx: TaskExecutionContext, number: int) -> list[int]:
        answers = [await ctx.subtask("inside", ask, ctx), await int_peer(7)]
        if not is_fixed[0]:
            raise ValueError("no")
        return answers

    await mesh.replica(twice)
    task_id = await client.ask("agent", 1)
    _, outside = await answer_in_turn(mesh, peer, 70, 71)
    await client.reply(task_id)
    is_fixed[0] = True
    await resume_and_sweep(mesh, task_id)
    (resumed_request,) = await answer_in_turn(mesh, peer, 72, before=2)
    assert resumed_request.correlation_id == outside.correlation_id
    assert await stored_outcome(mesh, task_id) == Ok([70, 72])
