"""Operations that end early, and unavailable databases: recorded work stays, exactly once."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.errors import AgentMisbehaved
from meshpoint.model.checkpoint import Cancel, TaskState
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, RunId, TaskId, new_id
from meshpoint.model.operations import OperationStatus
from meshpoint.model.options import AckPolicy, OnCheckpointFailure, OnLostOwner
from meshpoint.model.outcomes import Failed, FailureKind, Ok

from .agents import Gate, Ran, Steps, in_a_row
from .faults import IN_DOUBT, LOST_IN_DOUBT, NOT_COMMITTED
from .mesh import Mesh
from .puppet import Puppet
from .test_database_away import OUTAGES

HOMES = pytest.mark.parametrize("durable", [True, False])
AT_ONCE = {"drain_timeout": timedelta(0)}
asked = Peer("peer", int, int)


async def test_a_failure_leaves_a_last_checkpoint_with_the_reason(mesh: Mesh, boss: Puppet) -> None:
    await mesh.replica(in_a_row(Steps(), "a", "fail", "b", subtasks=["a", "b"]))
    task_id = await boss.ask("agent", 1)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    await mesh.settle()
    saved, last = await mesh.store.history(task_id)
    assert (saved.seq, saved.failure_reason) == (1, None)
    assert (last.seq, last.failure_reason) == (2, "ValueError: it failed; password=***")
    assert last.subtasks == saved.subtasks
    assert last.current_subtask == "b"
    details = last.error_details
    assert details is not None
    assert (details["type"], details["message"]) == ("ValueError", "it failed; password=***")
    assert "in row" in str(details["traceback"])
    assert "hunter2" not in str(details)
    operation = await mesh.store.operation(task_id)
    assert operation is not None
    assert (operation.status, operation.progress_pct) == (OperationStatus.FAILED, 50.0)


async def test_ones_own_secret_keys_are_masked_too(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()

    @agent("agent", version="1")
    async def telling(ctx: TaskExecutionContext, number: int) -> int:
        await steps(ctx, "a", number)
        raise ValueError("pin=1234")

    await mesh.replica(telling, secret_keys=("pin",))
    task_id = await boss.ask("agent", 1)
    await boss.reply(task_id)
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert last.failure_reason == "ValueError: pin=***"
    assert "1234" not in str(last.error_details)


async def test_a_failure_within_a_subtask_names_it_as_the_current_one(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()

    def failing() -> None:
        raise ValueError("no")

    @agent("agent", version="1", subtasks=["a", "failing", "b"])
    async def row(ctx: TaskExecutionContext, number: int) -> int:
        number = await steps(ctx, "a", number)
        await ctx.subtask("failing", failing)
        return number

    await mesh.replica(row)
    task_id = await boss.ask("agent", 1)
    await boss.reply(task_id)
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert [each.status for each in last.subtasks] == ["completed", "failed"]
    assert (last.current_subtask, last.progress.pending) == ("failing", ("failing", "b"))


async def test_a_failure_before_anything_is_completed_leaves_a_checkpoint_too(mesh: Mesh, boss: Puppet) -> None:
    def failing() -> None:
        raise ValueError("no")

    @agent("agent", version="1")
    async def early(ctx: TaskExecutionContext, number: int) -> None:
        await ctx.subtask("failing", failing)

    await mesh.replica(early)
    task_id = await boss.ask("agent", 1)
    await boss.reply(task_id)
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert (last.seq, last.failure_reason) == (1, "ValueError: no")


@HOMES
async def test_a_cancel_stops_the_code_and_leaves_a_last_checkpoint(mesh: Mesh, boss: Puppet, durable: bool) -> None:
    steps = Steps()
    gate = steps.gate("b")
    replica = await mesh.replica(in_a_row(steps, "a", "b"), durable=durable)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await boss.cancel("agent", task_id)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert gate.cancelled == 1
    store: Any = mesh.store if durable else replica.memory
    last = await store.latest(task_id)
    assert last.failure_reason == "cancelled on request"
    assert last.error_details["type"] == "CancelledError"
    assert [(each.name, each.status) for each in last.subtasks] == [("a", "completed"), ("b", "started")]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_cancel_of_a_waiting_operation_leaves_a_last_checkpoint(
    mesh: Mesh, boss: Puppet, peer: Puppet
) -> None:
    steps = Steps()

    @agent("agent", version="1")
    async def pausing(ctx: TaskExecutionContext, number: int) -> int:
        return await ctx.call(asked(await steps(ctx, "a", number)))

    await mesh.replica(pausing)
    task_id = await boss.ask("agent", 1)
    await peer.request_number()
    await mesh.settle()
    await boss.cancel("agent", task_id)
    await boss.reply(task_id)
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert (last.seq, last.failure_reason) == (2, "cancelled on request")
    assert last.progress.completed == ("a",)


async def test_a_cancel_whose_broadcast_was_lost_is_found_at_the_next_save(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    gate = steps.gate("a")
    await mesh.replica(in_a_row(steps, "a", "b"))
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await mesh.settle()
    await mesh.store.cancel([Cancel(task_id, AgentName("agent"), RunId(new_id()), b"{}")])
    gate.opened.set()
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert steps.ran.names == ["a"], "no further subtask may run"
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert last.progress.completed == ("a",), "the subtask that ended must be recorded"
    assert await mesh.state(task_id) is TaskState.CANCELLED


async def test_a_cancel_that_is_found_in_a_child_task_stops_the_code_as_well(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    gate, after = steps.gate("a"), Ran()

    @agent("agent", version="1")
    async def framework(ctx: TaskExecutionContext, number: int) -> int:
        tool = asyncio.create_task(steps(ctx, "a", number))
        await asyncio.wait({tool})  # `wait` does not raise the exception of the tool
        after("went on")
        return number

    await mesh.replica(framework)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await mesh.settle()
    await mesh.store.cancel([Cancel(task_id, AgentName("agent"), RunId(new_id()), b"{}")])
    gate.opened.set()
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert after.names == []


async def test_a_zombies_save_changes_nothing_and_stops_its_code(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    gate = steps.gate("a")
    # as if frozen
    zombie = await mesh.replica(in_a_row(steps, "a", "b"), sweep_interval=timedelta(hours=1))
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await mesh.settle()
    await mesh.replica(in_a_row(steps, "a", "b"))
    await mesh.advance(17)
    await gate.reach(2)
    owner_may_go_on = steps.gates["a"] = Gate()
    gate.opened.set()  # opens both; the zombie has waited longer
    assert await boss.reply(task_id) == Ok(3)
    await mesh.settle()
    (fenced,) = mesh.events.of(Step.FENCED)
    assert fenced.replica == zombie.id
    assert (fenced.detail["what"], owner_may_go_on.visits) == ("save", 0)
    assert steps.ran.names == ["a", "a", "b"]
    assert zombie.worker.segments.live == {}
    assert await mesh.state(task_id) is TaskState.COMPLETED


async def test_what_a_segment_left_behind_begins_no_subtask(mesh: Mesh, boss: Puppet) -> None:
    """Otherwise its code would run, unrecorded, alongside the next run of the task."""
    steps, late = Steps(), Gate()
    left: list[asyncio.Task[int]] = []

    @agent("agent", version="1")
    async def leaving(ctx: TaskExecutionContext, number: int) -> int:
        async def straggler() -> int:
            await late()
            return await steps(ctx, "late", number)

        left.append(asyncio.create_task(straggler()))
        await late.reach()
        return await steps(ctx, "a", number)

    await mesh.replica(leaving)
    assert await boss.reply(await boss.ask("agent", 1)) == Ok(2)
    await mesh.settle()
    late.opened.set()
    with pytest.raises(AgentMisbehaved, match="outlived its segment"):
        await left[0]
    assert steps.ran.names == ["a"]


async def test_what_a_segment_left_running_is_stopped_before_its_end_is_committed(mesh: Mesh, boss: Puppet) -> None:
    """When a concurrent subtask fails the task, the other's result can no longer be recorded."""
    steps, failing = Steps(), Gate()
    gate = steps.gate("lasting")

    async def fail() -> None:
        await failing()
        raise ValueError("no")

    @agent("agent", version="1")
    async def both(ctx: TaskExecutionContext, number: int) -> None:
        await asyncio.gather(ctx.subtask("failing", fail), steps(ctx, "lasting", number))

    await mesh.replica(both)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    failing.opened.set()
    await boss.reply(task_id)
    await mesh.settle()
    before = await mesh.store.history(task_id)
    gate.opened.set()
    await mesh.settle()
    assert steps.ended.names == []
    assert await mesh.store.history(task_id) == before
    assert [(each.name, each.status) for each in before[-1].subtasks] == [
        ("failing", "failed"),
        ("lasting", "started"),
    ]


async def test_a_drain_in_the_middle_of_a_subtask(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    gate = steps.gate("b")
    replica = await mesh.replica(in_a_row(steps, "a", "b"), **AT_ONCE)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await replica.drain()
    assert await mesh.state(task_id) is TaskState.READY
    assert boss.replies() == []
    gate.opened.set()
    await mesh.replica(in_a_row(steps, "a", "b"))
    assert await boss.reply(task_id) == Ok(3)
    assert steps.ran.names == ["a", "b", "b"]
    assert steps.ended.names == ["a", "b"]


async def test_a_drain_in_the_middle_of_a_subtask_in_memory(mesh: Mesh, boss: Puppet) -> None:
    """In-process work is lost: the request is requeued and runs from the start."""
    steps = Steps()
    gate = steps.gate("b")
    replica = await mesh.replica(in_a_row(steps, "a", "b"), durable=False, **AT_ONCE)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await replica.drain()
    assert mesh.waiting("agent") == 1
    gate.opened.set()
    await mesh.replica(in_a_row(steps, "a", "b"), durable=False)
    assert await boss.reply(task_id) == Ok(3)
    assert steps.ran.names == ["a", "b", "a", "b"]


@pytest.mark.parametrize("faults", OUTAGES.values(), ids=OUTAGES)
@pytest.mark.parametrize("method", ["begin", "save", "track", "end"])
async def test_an_outage_at_any_write(mesh: Mesh, boss: Puppet, method: str, faults: list[str | None]) -> None:
    steps = Steps()
    policy = AckPolicy.ON_RECEIPT if method == "track" else AckPolicy.AT_CHECKPOINT
    replica = await mesh.replica(in_a_row(steps, "a", "b"), ack_policy=policy)
    replica.store.fail(method, *faults)
    task_id = await boss.ask("agent", 1)
    await mesh.advance(12)
    assert await boss.reply(task_id) == Ok(3)
    assert steps.ran.names == ["a", "b"]
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert mesh.events.of(Step.DEGRADED) == mesh.events.of(Step.FENCED) == []
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert replica.worker.site.slots.free == 10


async def test_away_at_the_first_subtask_it_is_kept_in_memory(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    gate = steps.gate("b")
    replica = await mesh.replica(in_a_row(steps, "a", "b"))
    replica.store.fail_always("begin")
    task_id = await boss.ask("agent", 1)
    await mesh.advance(12)
    await gate.reach()
    (degraded,) = mesh.events.of(Step.DEGRADED)
    assert degraded.task_ids == (task_id,)
    assert mesh.unacked("agent") == 1
    replica.store.heal()
    gate.opened.set()
    assert await boss.reply(task_id) == Ok(3)
    await mesh.settle()
    assert await mesh.state(task_id) is None, "a task never changes its backend"
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert steps.ran.names == ["a", "b"]


async def test_away_at_the_first_subtask_it_waits_if_it_is_told_to(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    replica = await mesh.replica(in_a_row(steps, "a"), on_checkpoint_failure=OnCheckpointFailure.WAIT)
    replica.store.fail_always("begin")
    task_id = await boss.ask("agent", 1)
    await mesh.advance(60)
    assert steps.ran.names == []
    replica.store.heal()
    await mesh.advance(3)
    assert await boss.reply(task_id) == Ok(2)
    assert mesh.events.of(Step.DEGRADED) == []


async def test_away_at_a_later_subtask_it_waits(mesh: Mesh, boss: Puppet) -> None:
    steps = Steps()
    replica = await mesh.replica(in_a_row(steps, "a", "b"))
    replica.store.fail_always("save")
    task_id = await boss.ask("agent", 1)
    await mesh.advance(13)
    assert steps.ran.names == ["a"]
    assert boss.replies() == []
    replica.store.heal()
    await mesh.advance(3)
    assert await boss.reply(task_id) == Ok(3)
    assert steps.ran.names == ["a", "b"]


@pytest.mark.parametrize("stopped_by", ["a cancel", "a drain", "a timeout of its own"])
@pytest.mark.parametrize("fault", [None, IN_DOUBT, LOST_IN_DOUBT, NOT_COMMITTED])
async def test_code_that_is_stopped_while_its_task_is_begun(
    mesh: Mesh, boss: Puppet, stopped_by: str, fault: str | None
) -> None:
    """Whether or not the row was written, there is one outcome and no orphaned run."""
    steps, committing = Steps(), Gate()

    @agent("agent", version="1")
    async def impatient(ctx: TaskExecutionContext, number: int) -> int:
        step = asyncio.ensure_future(steps(ctx, "a", number))
        if stopped_by != "a timeout of its own":
            return await step
        await committing.reach()
        step.cancel()
        await asyncio.wait({step})
        return -1

    replica = await mesh.replica(impatient, **AT_ONCE)
    replica.store.fail("begin", fault)
    replica.store.after["begin"] = committing
    task_id = await boss.ask("agent", 1)
    if fault in {LOST_IN_DOUBT, NOT_COMMITTED}:
        await mesh.advance(3)
    await committing.reach()
    draining = None
    if stopped_by == "a cancel":
        await boss.cancel("agent", task_id)
    elif stopped_by == "a drain":
        draining = asyncio.create_task(replica.drain())
    await mesh.settle()
    committing.opened.set()
    del replica.store.after["begin"]
    await mesh.settle()
    if draining is not None:
        await draining
    await mesh.replica(impatient)
    await mesh.advance(25)
    (reply,) = boss.replies(task_id)
    if stopped_by == "a cancel":
        assert isinstance(reply, Failed)
        assert reply.kind is FailureKind.CANCELLED
    else:
        assert reply == (Ok(2) if stopped_by == "a drain" else Ok(-1))
    state = await mesh.state(task_id)
    assert state is not None
    assert state.ended
    assert len(mesh.events.of(Step.SEGMENT, Phase.BEFORE)) == (2 if stopped_by == "a drain" else 1)
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


@pytest.mark.parametrize("saved", [True, False])
async def test_an_operation_whose_owner_died_may_be_left_to_a_person(mesh: Mesh, boss: Puppet, saved: bool) -> None:
    steps = Steps()
    gate = steps.gate("b" if saved else "a")
    options = {"on_lost_owner": OnLostOwner.FAIL}
    first = await mesh.replica(in_a_row(steps, "a", "b"), **options)
    task_id = await boss.ask("agent", 1)
    await gate.reach()
    await mesh.settle()
    await first.crash()
    await mesh.replica(in_a_row(steps, "a", "b"), **options)
    await mesh.advance(17)
    reply = await boss.reply(task_id)
    assert isinstance(reply, Failed)
    advice = f"; checkpoint available: resume with `meshpoint tasks resume {task_id}`" if saved else "; no checkpoint"
    assert reply.message == f"the replica that ran it is gone{advice}"
    (told,) = mesh.events.of(Step.OWNER_LOST)
    assert told.task_ids == (task_id,)
    assert gate.visits == 1
    last = await mesh.store.latest(task_id)
    assert (last.failure_reason if last else None) == (reply.message if saved else None)


async def test_a_task_that_is_no_operation_is_taken_over_all_the_same(mesh: Mesh, boss: Puppet) -> None:
    before, steps = Gate(), Steps()

    @agent("agent", version="1")
    async def slow(ctx: TaskExecutionContext, number: int) -> int:
        await before()
        return await steps(ctx, "a", number)

    options = {"on_lost_owner": OnLostOwner.FAIL, "ack_policy": AckPolicy.ON_RECEIPT}
    first = await mesh.replica(slow, **options)
    task_id = await boss.ask("agent", 1)
    await before.reach()
    await first.crash()
    before.opened.set()
    await mesh.replica(slow, **options)
    await mesh.advance(17)
    assert await boss.reply(task_id) == Ok(2)


async def test_a_drained_owner_is_not_a_lost_one(mesh: Mesh, boss: Puppet) -> None:
    """The first owner crashed before the task was an operation; the second drains in a subtask."""
    before, steps = Gate(), Steps()
    gate = steps.gate("a")

    @agent("agent", version="1")
    async def slow(ctx: TaskExecutionContext, number: int) -> int:
        await before()
        return await steps(ctx, "a", number)

    options = {"on_lost_owner": OnLostOwner.FAIL, "ack_policy": AckPolicy.ON_RECEIPT, **AT_ONCE}
    first = await mesh.replica(slow, **options)
    task_id = await boss.ask("agent", 1)
    await before.reach()
    await first.crash()
    before.opened.set()
    second = await mesh.replica(slow, **options)
    while not gate.visits:
        await mesh.advance(1)
    await second.drain()
    gate.opened.set()
    await mesh.replica(slow, **options)
    await mesh.advance(2)
    assert await boss.reply(task_id) == Ok(2)
    assert mesh.events.of(Step.OWNER_LOST) == []


async def test_waiting_operations_have_no_owner_to_lose(mesh: Mesh, boss: Puppet, peer: Puppet) -> None:
    steps = Steps()

    @agent("agent", version="1")
    async def pausing(ctx: TaskExecutionContext, number: int) -> int:
        return await ctx.call(asked(await steps(ctx, "a", number)))

    first = await mesh.replica(pausing, on_lost_owner=OnLostOwner.FAIL)
    task_id = await boss.ask("agent", 1)
    request = await peer.request_number()
    await mesh.settle()
    await first.crash()
    await mesh.replica(pausing, on_lost_owner=OnLostOwner.FAIL)
    await mesh.advance(17)
    await peer.respond(request, 10)
    assert await boss.reply(task_id) == Ok(10)
    assert TaskId(request.headers["x-parent-task-id"]) == task_id  # type: ignore[arg-type]
