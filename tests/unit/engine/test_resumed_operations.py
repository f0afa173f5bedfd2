"""Operations resumed after a failure or cancel: valid recorded work does not run again."""

from __future__ import annotations

from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.stateful import Replies, StatefulAgent
from meshpoint.errors import (
    NoCheckpoint,
    OperationCompleted,
    OperationConflict,
    OperationNotFound,
    OperationRunning,
)
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.operations import OperationStatus
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.tasks import TaskState
from meshpoint.subtasks.migrating import migrates
from meshpoint.subtasks.resuming import resume_operation
from run_log import RunLog

from .agents import Steps, doubler, sequential_agent
from .mesh import Mesh
from .resuming import failing_until_fixed, int_peer, resume_and_sweep, stored_outcome
from .test_subtasks import Kept


async def test_a_resumed_operation_reuses_its_records_and_replies_again(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    failing, is_fixed = failing_until_fixed(steps, "a", "b")
    await mesh.replica(failing)
    task_id = await client.ask("agent", 1)
    assert isinstance(await client.reply(task_id), Failed)
    await mesh.idle()
    is_fixed[0] = True
    await resume_and_sweep(mesh, task_id)
    assert await stored_outcome(mesh, task_id) == Ok(3)
    assert steps.started.names == ["a", "b"]
    assert [isinstance(reply, Ok) for reply in client.replies()] == [False, True]
    operation = await mesh.store.operation(task_id)
    assert operation is not None
    assert (operation.status, operation.retry_count) == (OperationStatus.COMPLETED, 1)
    assert await mesh.store.history(task_id) == []


async def test_a_cancelled_operation_can_be_resumed(mesh: Mesh, client: FakePeer) -> None:
    steps = Steps()
    gate = steps.gate("b")
    await mesh.replica(sequential_agent(steps, "a", "b"))
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await client.cancel("agent", task_id)
    await client.reply(task_id)
    await mesh.idle()
    gate.opened.set()
    await resume_and_sweep(mesh, task_id)
    assert await stored_outcome(mesh, task_id) == Ok(3)
    assert steps.started.names == ["a", "b", "b"]


async def test_a_resumed_operation_can_fail_and_be_resumed_again(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    failing, is_fixed = failing_until_fixed(steps, "a")
    await mesh.replica(failing)
    task_id = await client.ask("agent", 1)
    await client.reply(task_id)
    for retries in (1, 2, 3):
        is_fixed[0] = retries == 3
        await mesh.idle()
        await resume_and_sweep(mesh, task_id)
        operation = await mesh.store.operation(task_id)
        assert operation is not None
        assert operation.retry_count == retries
    assert await stored_outcome(mesh, task_id) == Ok(2)
    assert steps.started.names == ["a"]


async def test_a_new_release_reruns_the_subtasks_it_changed(mesh: Mesh, client: FakePeer) -> None:
    steps, mended = Steps(), RunLog()
    first = await mesh.replica(sequential_agent(steps, "a", "b", "c", "fail"))
    task_id = await client.ask("agent", 1)
    await client.reply(task_id)
    await first.crash()

    async def add_ten(name: str, number: int) -> int:
        mended(name)
        return number + 10

    @agent("agent", version="1")
    async def next_release(ctx: TaskExecutionContext, number: int) -> int:
        number = await steps(ctx, "a", number)
        number = await ctx.subtask("b", add_ten, "b", number)
        return await steps(ctx, "c", number)

    await mesh.replica(next_release)
    await resume_and_sweep(mesh, task_id)
    assert await stored_outcome(mesh, task_id) == Ok(13)
    assert (steps.started.names, mended.names) == (["a", "b", "c", "c"], ["b"])
    reason_by_subtask = {
        event.detail["subtask"]: event.detail["why"]
        for event in mesh.events.matching(Step.SUBTASK_RERUN)
    }
    assert reason_by_subtask == {
        "b": "its function has changed",
        "c": "after 'b', which runs again",
    }


async def test_a_resumed_attempt_survives_a_crash(mesh: Mesh, client: FakePeer) -> None:
    steps = Steps()
    failing, is_fixed = failing_until_fixed(steps, "a", "b")
    first = await mesh.replica(failing)
    task_id = await client.ask("agent", 1)
    await client.reply(task_id)
    await mesh.idle()
    is_fixed[0] = True

    def crash(event: Any) -> None:
        if event.step is Step.SEGMENT and event.phase is Phase.AFTER:
            mesh.events.hooks.remove(crash)
            first.task.cancel()
            first.store.unavailable = first.broker.unavailable = True

    mesh.events.hooks.append(crash)
    await resume_and_sweep(mesh, task_id)
    await first.crash()
    await mesh.replica(failing)
    await mesh.advance(17)
    assert await stored_outcome(mesh, task_id) == Ok(3)
    assert steps.started.names == ["a", "b"]


async def test_handlers_are_resumed_from_the_first_one(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    steps, is_fixed = Steps(), [False]

    class Failing(StatefulAgent[int, Kept, int]):
        name = "agent"

        async def on_request(self, ctx: TaskExecutionContext, number: int) -> Any:
            return self.ask(
                Kept(number=await steps(ctx, "s0", number)),
                {"more": int_peer(7)},
                then=self.on_more,
            )

        async def on_more(self, ctx: TaskExecutionContext, state: Kept, replies: Replies) -> Any:
            number = await steps(ctx, "s1", state.number + replies.value("more", int_peer))
            if not is_fixed[0]:
                raise ValueError("no")
            return self.done(number)

    await mesh.replica(Failing())
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 10)
    await client.reply(task_id)
    await mesh.idle()
    is_fixed[0] = True
    await resume_and_sweep(mesh, task_id)
    first, second_request = peer.requests
    assert (second_request.correlation_id, second_request.headers["x-parent-task-id"]) == (
        first.correlation_id,
        f"{task_id}~resume-1",
    )
    assert "x-resume" in second_request.headers
    await peer.respond(second_request, 10)
    await mesh.idle()
    assert await stored_outcome(mesh, task_id) == Ok(13)
    assert steps.started.names == ["s0", "s1"]


@pytest.mark.parametrize(
    "task", ["nothing", "a running one", "a completed one", "no subtask", "an exclusive one"]
)
async def test_a_refused_resume_names_the_reason(mesh: Mesh, client: FakePeer, task: str) -> None:
    steps = Steps()
    await mesh.replica(
        sequential_agent(steps, "a", "fail", exclusive=True),
        sequential_agent(steps, "b", name="good"),
        doubler,
    )
    failed = await client.ask("agent", 1)
    await client.reply(failed)
    await mesh.idle()
    match task:
        case "nothing":
            with pytest.raises(OperationNotFound):
                await resume_operation(mesh.store, TaskId(new_id()))
        case "a running one":
            gate = steps.gate("b")
            task_id = await client.ask("good", 1)
            await gate.wait_reached()
            with pytest.raises(OperationRunning):
                await resume_operation(mesh.store, task_id)
        case "a completed one":
            task_id = await client.ask("good", 1)
            await client.reply(task_id)
            await mesh.idle()
            with pytest.raises(OperationCompleted):
                await resume_operation(mesh.store, task_id)
        case "no subtask":
            task_id = await client.ask("agent", "no number")
            await client.reply(task_id)
            with pytest.raises(OperationNotFound):
                await resume_operation(mesh.store, task_id)  # the task never had a row
        case _:
            gate = steps.gate("a")
            active = await client.ask("agent", 2)
            await gate.wait_reached()
            with pytest.raises(OperationConflict, match=active):
                await resume_operation(mesh.store, failed)


async def test_an_operation_that_recorded_nothing_has_no_checkpoint(
    mesh: Mesh, client: FakePeer
) -> None:
    """Its replica crashed in the first subtask, in every attempt it had."""
    steps = Steps()
    gate = steps.gate("a")
    first = await mesh.replica(sequential_agent(steps, "a"), max_attempts=1)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await first.crash()
    await mesh.replica(sequential_agent(steps, "a"), max_attempts=1)
    await mesh.advance(17)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.message.endswith("; no checkpoint")
    with pytest.raises(NoCheckpoint):
        await resume_operation(mesh.store, task_id)


@migrates("1", "2")
def rename_b_to_c(checkpoint: dict[str, Any]) -> dict[str, Any]:
    checkpoint["completed_subtasks"] = ["a", "c"]
    checkpoint["interim_results"]["c"] = checkpoint["interim_results"].pop("b")
    return checkpoint


async def test_checkpoints_of_an_earlier_version_are_migrated(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    old = await mesh.replica(sequential_agent(steps, "a", "b", "fail"))
    task_id = await client.ask("agent", 1)
    await client.reply(task_id)
    await old.crash()
    await mesh.replica(sequential_agent(steps, "a", "c", version="2", migrations=[rename_b_to_c]))
    await resume_and_sweep(mesh, task_id)
    assert await stored_outcome(mesh, task_id) == Ok(3)
    assert steps.started.names == ["a", "b"]


@migrates("1", "2")
def fail_to_rename(checkpoint: dict[str, Any]) -> dict[str, Any]:
    checkpoint["interim_results"].pop("never recorded")
    return checkpoint


async def test_a_migration_that_fails_parks_the_task_until_it_is_fixed(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    old = await mesh.replica(sequential_agent(steps, "a", "b", "fail"))
    task_id = await client.ask("agent", 1)
    await client.reply(task_id)
    await old.drain()
    before = await mesh.store.history(task_id)
    broken = await mesh.replica(
        sequential_agent(steps, "a", "c", version="2", migrations=[fail_to_rename])
    )
    await resume_and_sweep(mesh, task_id)
    parked = await mesh.store.operation(task_id)
    assert parked is not None
    assert (parked.status, parked.failure_reason) == (
        OperationStatus.PARKED,
        "agent 'agent': migration fail_to_rename (1 -> 2): KeyError: 'never recorded'",
    )
    assert await mesh.store.history(task_id) == before
    await broken.drain()
    await mesh.replica(sequential_agent(steps, "a", "c", version="2", migrations=[rename_b_to_c]))
    assert await mesh.store.unpark([task_id]) == [True]
    await mesh.advance(2)
    assert await stored_outcome(mesh, task_id) == Ok(3)
    assert steps.started.names == ["a", "b"]


async def test_a_missing_migration_parks_the_task(mesh: Mesh, client: FakePeer) -> None:
    steps = Steps()
    gate = steps.gate("b")
    old = await mesh.replica(sequential_agent(steps, "a", "b"))
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await old.crash()
    await mesh.replica(sequential_agent(steps, "a", "b", version="2"))
    await mesh.advance(30)
    assert await mesh.state(task_id) is TaskState.PARKED
    (event,) = mesh.events.matching(Step.PARKED)
    assert "no migration leads from 1 to 2" in str(event.detail["reason"])
    assert client.replies() == []
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert last.progress.completed == ("a",)


async def test_an_old_replica_acquires_a_task_the_new_version_released(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    gate = steps.gate("b")
    old = await mesh.replica(sequential_agent(steps, "a", "b"))
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await old.crash()
    gate.opened.set()
    new = await mesh.replica(sequential_agent(steps, "a", "b", version="2"))
    await mesh.advance(17)
    assert await mesh.state(task_id) is TaskState.PARKED
    await new.crash()
    await mesh.replica(sequential_agent(steps, "a", "b"))
    await mesh.advance(7)
    assert await client.reply(task_id) == Ok(3)
    assert steps.ended.names == ["a", "b"]
