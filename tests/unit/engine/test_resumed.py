"""Operations resumed after a failure or cancel: valid recorded work does not run again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from meshpoint.agents.function import agent
from meshpoint.agents.replies import Replies
from meshpoint.agents.stateful import StatefulAgent
from meshpoint.errors import NoCheckpoint, OperationCompleted, OperationConflict, OperationNotFound, OperationRunning
from meshpoint.model.checkpoint import TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.operations import OperationStatus
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.subtasks.migrating import migrates
from meshpoint.subtasks.resuming import resume_operation

from .agents import Ran, Steps, doubler, in_a_row
from .mesh import Mesh
from .puppet import Puppet
from .resuming import asked, mending, result_of, resumed
from .test_subtasks import Kept


async def test_it_goes_on_from_what_is_recorded_and_answers_nobody(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    tested, works = mending(steps, "a", "b")
    await mesh.replica(tested)
    task_id = await boss.ask("agent", 1)
    assert isinstance(await boss.reply(task_id), Failed)
    await mesh.settle()
    works[0] = True
    await resumed(mesh, task_id)
    assert await result_of(mesh, task_id) == Ok(3)
    assert steps.ran.names == ["a", "b"]
    assert len(boss.replies()) == 1
    operation = await mesh.store.operation(task_id)
    assert operation is not None
    assert (operation.status, operation.retry_count) == (OperationStatus.COMPLETED, 1)
    assert await mesh.store.history(task_id) == []


async def test_one_that_was_cancelled_goes_on_too(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    gate = steps.gate("b")
    await mesh.replica(in_a_row(steps, "a", "b"))
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await boss.cancel("agent", task_id)
    await boss.reply(task_id)
    await mesh.settle()
    gate.opened.set()
    await resumed(mesh, task_id)
    assert await result_of(mesh, task_id) == Ok(3)
    assert steps.ran.names == ["a", "b", "b"]


async def test_it_may_fail_again_and_be_resumed_again(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    tested, works = mending(steps, "a")
    await mesh.replica(tested)
    task_id = await boss.ask("agent", 1)
    await boss.reply(task_id)
    for retries in (1, 2, 3):
        works[0] = retries == 3
        await mesh.settle()
        await resumed(mesh, task_id)
        operation = await mesh.store.operation(task_id)
        assert operation is not None
        assert operation.retry_count == retries
    assert await result_of(mesh, task_id) == Ok(2)
    assert steps.ran.names == ["a"]


async def test_another_release_runs_again_what_it_changed(mesh: Mesh, boss: Puppet) -> None:
    steps, mended = Steps(), Ran()
    first = await mesh.replica(in_a_row(steps, "a", "b", "c", "fail"))
    task_id = await boss.ask("agent", 1)
    await boss.reply(task_id)
    await first.crash()

    async def ten_more(name: str, number: int) -> int:
        mended(name)
        return number + 10

    @agent("agent", version="1")
    async def next_release(ctx: TaskExecutionContext, number: int) -> int:
        number = await steps(ctx, "a", number)
        number = await ctx.subtask("b", ten_more, "b", number)
        return await steps(ctx, "c", number)

    await mesh.replica(next_release)
    await resumed(mesh, task_id)
    assert await result_of(mesh, task_id) == Ok(13)
    assert (steps.ran.names, mended.names) == (["a", "b", "c", "c"], ["b"])
    why = {event.detail["subtask"]: event.detail["why"] for event in mesh.events.of(Step.SUBTASK_AGAIN)}
    assert why == {"b": "its function has changed", "c": "after 'b', which runs again"}


async def test_a_crash_in_a_resumed_attempt(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    tested, works = mending(steps, "a", "b")
    first = await mesh.replica(tested)
    task_id = await boss.ask("agent", 1)
    await boss.reply(task_id)
    await mesh.settle()
    works[0] = True

    def crash(event: Any) -> None:
        if event.step is Step.SEGMENT and event.phase is Phase.AFTER:
            mesh.events.hooks.remove(crash)
            first.task.cancel()
            first.store.away = first.broker.away = True

    mesh.events.hooks.append(crash)
    await resumed(mesh, task_id)
    await first.crash()
    await mesh.replica(tested)
    await mesh.advance(17)
    assert await result_of(mesh, task_id) == Ok(3)
    assert steps.ran.names == ["a", "b"]


async def test_handlers_are_resumed_from_the_first(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    steps, works = Steps(), [False]

    class Failing(StatefulAgent[int, Kept, int]):
        name = "agent"

        async def on_request(self, ctx: TaskExecutionContext, number: int) -> Any:
            return self.ask(Kept(number=await steps(ctx, "s0", number)), {"more": asked(7)}, then=self.on_more)

        async def on_more(self, ctx: TaskExecutionContext, state: Kept, replies: Replies) -> Any:
            number = await steps(ctx, "s1", state.number + replies.value("more", asked))
            if not works[0]:
                raise ValueError("no")
            return self.done(number)

    await mesh.replica(Failing())
    task_id = await boss.ask("agent", 1)
    await peer.respond(await peer.request_number(), 10)
    await boss.reply(task_id)
    await mesh.settle()
    works[0] = True
    await resumed(mesh, task_id)
    first, again = peer.requests
    assert (again.correlation_id, again.headers["x-parent-task-id"]) == (first.correlation_id, f"{task_id}~resume-1")
    assert "x-resume" in again.headers
    await peer.respond(again, 10)
    await mesh.settle()
    assert await result_of(mesh, task_id) == Ok(13)
    assert steps.ran.names == ["s0", "s1"]


@pytest.mark.parametrize("which", ["nothing", "a running one", "a completed one", "no subtask", "an exclusive one"])
async def test_precise_refusals(mesh: Mesh, boss: Puppet, which: str) -> None:
    steps = Steps()
    await mesh.replica(in_a_row(steps, "a", "fail", exclusive=True), in_a_row(steps, "b", name="good"), doubler)
    failed = await boss.ask("agent", 1)
    await boss.reply(failed)
    await mesh.settle()
    match which:
        case "nothing":
            with pytest.raises(OperationNotFound):
                await resume_operation(mesh.store, TaskId(new_id()))
        case "a running one":
            gate = steps.gate("b")
            task_id = await boss.ask("good", 1)
            await gate.reach()
            with pytest.raises(OperationRunning):
                await resume_operation(mesh.store, task_id)
        case "a completed one":
            task_id = await boss.ask("good", 1)
            await boss.reply(task_id)
            await mesh.settle()
            with pytest.raises(OperationCompleted):
                await resume_operation(mesh.store, task_id)
        case "no subtask":
            task_id = await boss.ask("agent", "no number")
            await boss.reply(task_id)
            with pytest.raises(OperationNotFound):
                await resume_operation(mesh.store, task_id)  # the task never had a row
        case _:
            gate = steps.gate("a")
            active = await boss.ask("agent", 2)
            await gate.reach()
            with pytest.raises(OperationConflict, match=active):
                await resume_operation(mesh.store, failed)


async def test_an_operation_that_recorded_nothing_has_no_checkpoint(mesh: Mesh, boss: Puppet) -> None:
    """Its replica crashed in the first subtask, in every attempt it had."""
    steps = Steps()
    gate = steps.gate("a")
    first = await mesh.replica(in_a_row(steps, "a"), max_attempts=1)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await first.crash()
    await mesh.replica(in_a_row(steps, "a"), max_attempts=1)
    await mesh.advance(17)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.message.endswith("; no checkpoint")
    with pytest.raises(NoCheckpoint):
        await resume_operation(mesh.store, task_id)


@migrates("1", "2")
def b_is_called_c(checkpoint: dict[str, Any]) -> dict[str, Any]:
    checkpoint["completed_subtasks"] = ["a", "c"]
    checkpoint["interim_results"]["c"] = checkpoint["interim_results"].pop("b")
    return checkpoint


async def test_checkpoints_of_an_earlier_version_are_migrated(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    old = await mesh.replica(in_a_row(steps, "a", "b", "fail"))
    task_id = await boss.ask("agent", 1)
    await boss.reply(task_id)
    await old.crash()
    await mesh.replica(in_a_row(steps, "a", "c", version="2", migrations=[b_is_called_c]))
    await resumed(mesh, task_id)
    assert await result_of(mesh, task_id) == Ok(3)
    assert steps.ran.names == ["a", "b"]


async def test_a_missing_migration_gives_the_task_back_and_parks_it_after_the_limit(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    gate = steps.gate("b")
    old = await mesh.replica(in_a_row(steps, "a", "b"))
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await old.crash()
    await mesh.replica(in_a_row(steps, "a", "b", version="2"))
    await mesh.advance(30)
    assert await mesh.state(task_id) is TaskState.READY
    assert boss.replies() == []
    mesh.clock.advance(timedelta(hours=1))
    await mesh.advance(10)
    assert await mesh.state(task_id) is TaskState.PARKED
    (parked,) = mesh.events.of(Step.PARKED)
    assert "no migration leads from 1 to 2" in str(parked.detail["reason"])
    assert boss.replies() == []
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert last.progress.completed == ("a",)


async def test_a_replica_of_the_old_version_takes_what_the_new_one_gave_back(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    gate = steps.gate("b")
    old = await mesh.replica(in_a_row(steps, "a", "b"))
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await old.crash()
    gate.opened.set()
    new = await mesh.replica(in_a_row(steps, "a", "b", version="2"))
    await mesh.advance(17)
    assert await mesh.state(task_id) is TaskState.READY
    await new.crash()
    await mesh.replica(in_a_row(steps, "a", "b"))
    await mesh.advance(7)
    assert await boss.reply(task_id) == Ok(3)
    assert steps.ended.names == ["a", "b"]
