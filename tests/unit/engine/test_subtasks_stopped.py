"""Operations that end early, and unavailable databases: recorded work stays, exactly once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import FunctionAgent, agent
from meshpoint.agents.peer import Peer
from meshpoint.errors import AgentMisbehaved
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, RunId, new_id
from meshpoint.model.operations import OperationStatus
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import Cancel
from run_log import RunLog

from .agents import Gate, Steps, sequential_agent
from .faults import IN_DOUBT, LOST_IN_DOUBT, NOT_COMMITTED
from .mesh import Mesh
from .test_store_outages import OUTAGES

BACKENDS = pytest.mark.parametrize("durable", [True, False])
NO_DRAIN: dict[str, Any] = {"drain_timeout": timedelta(0)}
int_peer = Peer("peer", int, int)


async def test_a_failure_writes_a_final_checkpoint_with_the_reason(
    mesh: Mesh, client: FakePeer
) -> None:
    await mesh.replica(sequential_agent(Steps(), "a", "fail", "b", subtasks=["a", "b"]))
    task_id = await client.ask("agent", 1)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    await mesh.idle()
    saved, last = await mesh.store.history(task_id)
    assert (saved.seq, saved.failure_reason) == (1, None)
    assert (last.seq, last.failure_reason) == (2, "ValueError: it failed; password=***")
    assert last.subtasks == saved.subtasks
    assert last.current_subtask == "b"
    details = last.error_details
    assert details is not None
    assert (details["type"], details["message"]) == ("ValueError", "it failed; password=***")
    assert "in run_in_sequence" in str(details["traceback"])
    assert "hunter2" not in str(details)
    operation = await mesh.store.operation(task_id)
    assert operation is not None
    assert (operation.status, operation.progress_pct) == (OperationStatus.FAILED, 50.0)


async def test_configured_secret_keys_are_masked(mesh: Mesh, client: FakePeer) -> None:
    steps = Steps()

    @agent("agent", version="1")
    async def return_details(ctx: TaskExecutionContext, number: int) -> int:
        await steps(ctx, "a", number)
        raise ValueError("pin=1234")

    await mesh.replica(return_details, secret_keys=("pin",))
    task_id = await client.ask("agent", 1)
    await client.reply(task_id)
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert last.failure_reason == "ValueError: pin=***"
    assert "1234" not in str(last.error_details)


async def test_a_failure_in_a_subtask_names_it_as_current(mesh: Mesh, client: FakePeer) -> None:
    steps = Steps()

    def failing() -> None:
        raise ValueError("no")

    @agent("agent", version="1", subtasks=["a", "failing", "b"])
    async def run_in_sequence(ctx: TaskExecutionContext, number: int) -> int:
        number = await steps(ctx, "a", number)
        await ctx.subtask("failing", failing)
        return number

    await mesh.replica(run_in_sequence)
    task_id = await client.ask("agent", 1)
    await client.reply(task_id)
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert [record.status for record in last.subtasks] == ["completed", "failed"]
    assert (last.current_subtask, last.progress.pending) == ("failing", ("failing", "b"))


async def test_a_failure_before_any_completed_subtask_writes_a_checkpoint(
    mesh: Mesh, client: FakePeer
) -> None:
    def failing() -> None:
        raise ValueError("no")

    @agent("agent", version="1")
    async def fail_early(ctx: TaskExecutionContext, number: int) -> None:
        await ctx.subtask("failing", failing)

    await mesh.replica(fail_early)
    task_id = await client.ask("agent", 1)
    await client.reply(task_id)
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert (last.seq, last.failure_reason) == (1, "ValueError: no")


@BACKENDS
async def test_a_cancel_stops_the_code_and_writes_a_final_checkpoint(
    mesh: Mesh, client: FakePeer, durable: bool
) -> None:
    steps = Steps()
    gate = steps.gate("b")
    replica = await mesh.replica(sequential_agent(steps, "a", "b"), durable=durable)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await client.cancel("agent", task_id)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert gate.cancelled == 1
    store: Any = mesh.store if durable else replica.memory
    last = await store.latest(task_id)
    assert last.failure_reason == "cancelled on request"
    assert last.error_details["type"] == "CancelledError"
    assert [(record.name, record.status) for record in last.subtasks] == [
        ("a", "completed"),
        ("b", "started"),
    ]
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


async def test_a_cancel_of_a_waiting_operation_writes_a_final_checkpoint(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    steps = Steps()

    @agent("agent", version="1")
    async def pausing(ctx: TaskExecutionContext, number: int) -> int:
        return await int_peer(await steps(ctx, "a", number))

    await mesh.replica(pausing)
    task_id = await client.ask("agent", 1)
    await peer.wait_for_request()
    await mesh.idle()
    await client.cancel("agent", task_id)
    await client.reply(task_id)
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert (last.seq, last.failure_reason) == (2, "cancelled on request")
    assert last.progress.completed == ("a",)


async def test_a_cancel_whose_broadcast_was_lost_is_found_at_the_next_save(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    gate = steps.gate("a")
    await mesh.replica(sequential_agent(steps, "a", "b"))
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await mesh.idle()
    await mesh.store.cancel([Cancel(task_id, AgentName("agent"), RunId(new_id()), b"{}")])
    gate.opened.set()
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert steps.started.names == ["a"], "no further subtask may run"
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert last.progress.completed == ("a",), "the subtask that ended must be recorded"
    assert await mesh.state(task_id) is TaskState.CANCELLED


async def test_a_cancel_found_in_a_child_task_stops_the_code(mesh: Mesh, client: FakePeer) -> None:
    steps = Steps()
    gate, after = steps.gate("a"), RunLog()

    @agent("agent", version="1")
    async def framework(ctx: TaskExecutionContext, number: int) -> int:
        tool = asyncio.create_task(steps(ctx, "a", number))
        await asyncio.wait({tool})  # `wait` does not raise the exception of the tool
        after("went on")
        return number

    await mesh.replica(framework)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await mesh.idle()
    await mesh.store.cancel([Cancel(task_id, AgentName("agent"), RunId(new_id()), b"{}")])
    gate.opened.set()
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.kind is FailureKind.CANCELLED
    assert after.names == []


async def test_a_zombies_save_changes_nothing_and_stops_its_code(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    gate = steps.gate("a")
    # as if frozen
    zombie = await mesh.replica(
        sequential_agent(steps, "a", "b"), sweep_interval=timedelta(hours=1)
    )
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await mesh.idle()
    await mesh.replica(sequential_agent(steps, "a", "b"))
    await mesh.advance(17)
    await gate.wait_reached(2)
    owner_gate = steps.gates["a"] = Gate()
    gate.opened.set()  # opens both; the zombie has waited longer
    assert await client.reply(task_id) == Ok(3)
    await mesh.idle()
    (fenced,) = mesh.events.matching(Step.FENCED)
    assert fenced.replica == zombie.id
    assert (fenced.detail["what"], owner_gate.visits) == ("save", 0)
    assert steps.started.names == ["a", "a", "b"]
    assert zombie.worker.tasks.segments == {}
    assert await mesh.state(task_id) is TaskState.COMPLETED


async def test_a_leftover_asyncio_task_cannot_begin_a_subtask(
    mesh: Mesh, client: FakePeer
) -> None:
    """Otherwise its code would run, unrecorded, alongside the next run of the task."""
    steps, late_gate = Steps(), Gate()
    leftover_tasks: list[asyncio.Task[int]] = []

    @agent("agent", version="1")
    async def leaving(ctx: TaskExecutionContext, number: int) -> int:
        async def straggler() -> int:
            await late_gate()
            return await steps(ctx, "late", number)

        leftover_tasks.append(asyncio.create_task(straggler()))
        await late_gate.wait_reached()
        return await steps(ctx, "a", number)

    await mesh.replica(leaving)
    assert await client.reply(await client.ask("agent", 1)) == Ok(2)
    await mesh.idle()
    late_gate.opened.set()
    with pytest.raises(AgentMisbehaved, match="outlived its segment"):
        await leftover_tasks[0]
    assert steps.started.names == ["a"]


async def test_a_subtask_that_outlives_its_segment_records_nothing(
    mesh: Mesh, client: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that its checkpoint would name has been left."""
    monkeypatch.setattr("meshpoint.engine.segment._STOP_TIMEOUT", 0)
    gate = Gate()
    leftover_tasks: list[asyncio.Task[int]] = []

    async def ignore_cancellation() -> int:
        while not gate.opened.is_set():
            with suppress(asyncio.CancelledError):
                await gate()
        return 1

    @agent("agent", version="1")
    async def leaving(ctx: TaskExecutionContext, number: int) -> int:
        leftover_tasks.append(asyncio.create_task(ctx.subtask("late", ignore_cancellation)))
        await gate.wait_reached()
        return number

    await mesh.replica(leaving)
    assert await client.reply(await client.ask("agent", 1)) == Ok(1)
    await mesh.idle()
    gate.opened.set()
    with pytest.raises(AgentMisbehaved, match="outlived its segment"):
        await leftover_tasks[0]
    assert mesh.events.matching(Step.SAVE) == mesh.events.matching(Step.FENCED) == []


async def test_leftover_subtasks_stop_before_the_end_is_committed(
    mesh: Mesh, client: FakePeer
) -> None:
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
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    failing.opened.set()
    await client.reply(task_id)
    await mesh.idle()
    before = await mesh.store.history(task_id)
    gate.opened.set()
    await mesh.idle()
    assert steps.ended.names == []
    assert await mesh.store.history(task_id) == before
    assert [(record.name, record.status) for record in before[-1].subtasks] == [
        ("failing", "failed"),
        ("lasting", "started"),
    ]


async def test_a_drain_during_a_subtask_releases_the_task(mesh: Mesh, client: FakePeer) -> None:
    steps = Steps()
    gate = steps.gate("b")
    replica = await mesh.replica(sequential_agent(steps, "a", "b"), **NO_DRAIN)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await replica.drain()
    assert await mesh.state(task_id) is TaskState.READY
    assert client.replies() == []
    gate.opened.set()
    await mesh.replica(sequential_agent(steps, "a", "b"))
    assert await client.reply(task_id) == Ok(3)
    assert steps.started.names == ["a", "b", "b"]
    assert steps.ended.names == ["a", "b"]


async def test_a_drain_during_an_in_process_subtask_requeues_the_request(
    mesh: Mesh, client: FakePeer
) -> None:
    """In-process work is lost: the request is requeued and runs from the start."""
    steps = Steps()
    gate = steps.gate("b")
    replica = await mesh.replica(sequential_agent(steps, "a", "b"), durable=False, **NO_DRAIN)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await replica.drain()
    assert mesh.waiting("agent") == 1
    gate.opened.set()
    await mesh.replica(sequential_agent(steps, "a", "b"), durable=False)
    assert await client.reply(task_id) == Ok(3)
    assert steps.started.names == ["a", "b", "a", "b"]


@pytest.mark.parametrize("faults", OUTAGES.values(), ids=OUTAGES)
@pytest.mark.parametrize("method", ["begin", "save", "track", "end"])
async def test_subtasks_survive_an_outage_at_any_write(
    mesh: Mesh, client: FakePeer, method: str, faults: list[str | None]
) -> None:
    steps = Steps()
    policy = "on_receipt" if method == "track" else "at_checkpoint"
    replica = await mesh.replica(sequential_agent(steps, "a", "b"), ack_policy=policy)
    replica.store.fail(method, *faults)
    task_id = await client.ask("agent", 1)
    await mesh.advance(12)
    assert await client.reply(task_id) == Ok(3)
    assert steps.started.names == ["a", "b"]
    assert await mesh.state(task_id) is TaskState.COMPLETED
    assert mesh.events.matching(Step.DEGRADED) == mesh.events.matching(Step.FENCED) == []
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert replica.worker.runtime.slots.free == 10


async def test_an_outage_at_the_first_subtask_keeps_the_task_in_process(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    gate = steps.gate("b")
    replica = await mesh.replica(sequential_agent(steps, "a", "b"))
    replica.store.fail_always("begin")
    task_id = await client.ask("agent", 1)
    await mesh.advance(12)
    await gate.wait_reached()
    (degraded,) = mesh.events.matching(Step.DEGRADED)
    assert degraded.task_ids == (task_id,)
    assert mesh.unacked("agent") == 1
    replica.store.heal()
    gate.opened.set()
    assert await client.reply(task_id) == Ok(3)
    await mesh.idle()
    assert await mesh.state(task_id) is None, "a task never changes its backend"
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0
    assert steps.started.names == ["a", "b"]


async def test_an_outage_at_the_first_subtask_is_waited_out_if_configured(
    mesh: Mesh, client: FakePeer
) -> None:
    steps = Steps()
    replica = await mesh.replica(sequential_agent(steps, "a"), on_checkpoint_failure="wait")
    replica.store.fail_always("begin")
    task_id = await client.ask("agent", 1)
    await mesh.advance(60)
    assert steps.started.names == []
    replica.store.heal()
    await mesh.advance(3)
    assert await client.reply(task_id) == Ok(2)
    assert mesh.events.matching(Step.DEGRADED) == []


async def test_an_outage_at_a_later_subtask_is_waited_out(mesh: Mesh, client: FakePeer) -> None:
    steps = Steps()
    replica = await mesh.replica(sequential_agent(steps, "a", "b"))
    replica.store.fail_always("save")
    task_id = await client.ask("agent", 1)
    await mesh.advance(13)
    assert steps.started.names == ["a"]
    assert client.replies() == []
    replica.store.heal()
    await mesh.advance(3)
    assert await client.reply(task_id) == Ok(3)
    assert steps.started.names == ["a", "b"]


@pytest.mark.parametrize("stopped_by", ["a cancel", "a drain", "a timeout of its own"])
@pytest.mark.parametrize("fault", [None, IN_DOUBT, LOST_IN_DOUBT, NOT_COMMITTED])
async def test_code_can_be_stopped_while_its_task_begins(
    mesh: Mesh, client: FakePeer, stopped_by: str, fault: str | None
) -> None:
    """Whether or not the row was written, there is one outcome and no orphaned run."""
    steps, committing = Steps(), Gate()

    @agent("agent", version="1")
    async def impatient(ctx: TaskExecutionContext, number: int) -> int:
        step = asyncio.ensure_future(steps(ctx, "a", number))
        if stopped_by != "a timeout of its own":
            return await step
        await committing.wait_reached()
        step.cancel()
        await asyncio.wait({step})
        return -1

    replica = await mesh.replica(impatient, **NO_DRAIN)
    replica.store.fail("begin", fault)
    replica.store.after["begin"] = committing
    task_id = await client.ask("agent", 1)
    if fault in {LOST_IN_DOUBT, NOT_COMMITTED}:
        await mesh.advance(3)
    await committing.wait_reached()
    draining = None
    if stopped_by == "a cancel":
        await client.cancel("agent", task_id)
    elif stopped_by == "a drain":
        draining = asyncio.create_task(replica.drain())
    await mesh.idle()
    committing.opened.set()
    del replica.store.after["begin"]
    await mesh.idle()
    if draining is not None:
        await draining
    await mesh.replica(impatient)
    await mesh.advance(25)
    (reply,) = client.replies(task_id)
    if stopped_by == "a cancel":
        assert isinstance(reply, Failed)
        assert reply.kind is FailureKind.CANCELLED
    else:
        assert reply == (Ok(2) if stopped_by == "a drain" else Ok(-1))
    state = await mesh.state(task_id)
    assert state is not None
    assert state.is_final
    assert len(mesh.events.matching(Step.SEGMENT, Phase.BEFORE)) == (
        2 if stopped_by == "a drain" else 1
    )
    assert mesh.unacked("agent") == mesh.waiting("agent") == 0


@pytest.mark.parametrize("saved", [True, False])
async def test_an_operation_whose_owner_died_can_be_failed_for_review(
    mesh: Mesh, client: FakePeer, saved: bool
) -> None:
    steps = Steps()
    gate = steps.gate("b" if saved else "a")
    options: dict[str, Any] = {"on_lost_owner": "fail"}
    first = await mesh.replica(sequential_agent(steps, "a", "b"), **options)
    task_id = await client.ask("agent", 1)
    await gate.wait_reached()
    await mesh.idle()
    await first.crash()
    await mesh.replica(sequential_agent(steps, "a", "b"), **options)
    await mesh.advance(17)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    advice = (
        f"; checkpoint available: resume with `meshpoint tasks resume {task_id}`"
        if saved
        else "; no checkpoint"
    )
    assert reply.message == f"the replica that ran it is gone{advice}"
    (event,) = mesh.events.matching(Step.OWNER_LOST)
    assert event.task_ids == (task_id,)
    assert gate.visits == 1
    last = await mesh.store.latest(task_id)
    assert (last.failure_reason if last else None) == (reply.message if saved else None)


async def test_an_operation_to_fail_needs_no_replica_that_reads_it(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    steps = Steps()
    gate = steps.gate("b")

    def versioned(version: str) -> FunctionAgent[int, int]:
        @agent("agent", version=version)
        async def pausing(ctx: TaskExecutionContext, number: int) -> int:
            answer = await int_peer(await steps(ctx, "a", number))
            return await steps(ctx, "b", answer)

        return pausing

    first = await mesh.replica(versioned("1"), on_lost_owner="fail")
    task_id = await client.ask("agent", 1)
    await peer.respond(await peer.wait_for_request(), 10)
    await gate.wait_reached()
    await mesh.idle()
    await first.crash()
    await mesh.replica(versioned("2"), on_lost_owner="fail")
    await mesh.advance(17)
    reply = await client.reply(task_id)
    assert isinstance(reply, Failed)
    assert reply.message == (
        "the replica that ran it is gone; checkpoint available: "
        f"resume with `meshpoint tasks resume {task_id}`"
    )
    (event,) = mesh.events.matching(Step.OWNER_LOST)
    assert event.task_ids == (task_id,)
    last = await mesh.store.latest(task_id)
    assert last is not None
    assert last.failure_reason == reply.message


async def test_a_task_that_is_not_an_operation_is_still_rescued(
    mesh: Mesh, client: FakePeer
) -> None:
    before, steps = Gate(), Steps()

    @agent("agent", version="1")
    async def slow(ctx: TaskExecutionContext, number: int) -> int:
        await before()
        return await steps(ctx, "a", number)

    options: dict[str, Any] = {
        "on_lost_owner": "fail",
        "ack_policy": "on_receipt",
    }
    first = await mesh.replica(slow, **options)
    task_id = await client.ask("agent", 1)
    await before.wait_reached()
    await first.crash()
    before.opened.set()
    await mesh.replica(slow, **options)
    await mesh.advance(17)
    assert await client.reply(task_id) == Ok(2)


async def test_a_drained_owner_does_not_count_as_lost(mesh: Mesh, client: FakePeer) -> None:
    """The first owner crashed before the task was an operation; the second drains in a subtask."""
    before, steps = Gate(), Steps()
    gate = steps.gate("a")

    @agent("agent", version="1")
    async def slow(ctx: TaskExecutionContext, number: int) -> int:
        await before()
        return await steps(ctx, "a", number)

    options: dict[str, Any] = {
        "on_lost_owner": "fail",
        "ack_policy": "on_receipt",
        **NO_DRAIN,
    }
    first = await mesh.replica(slow, **options)
    task_id = await client.ask("agent", 1)
    await before.wait_reached()
    await first.crash()
    before.opened.set()
    second = await mesh.replica(slow, **options)
    while not gate.visits:
        await mesh.advance(1)
    await second.drain()
    gate.opened.set()
    await mesh.replica(slow, **options)
    await mesh.advance(2)
    assert await client.reply(task_id) == Ok(2)
    assert mesh.events.matching(Step.OWNER_LOST) == []


async def test_waiting_operations_have_no_owner(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    steps = Steps()

    @agent("agent", version="1")
    async def pausing(ctx: TaskExecutionContext, number: int) -> int:
        return await int_peer(await steps(ctx, "a", number))

    first = await mesh.replica(pausing, on_lost_owner="fail")
    task_id = await client.ask("agent", 1)
    request = await peer.wait_for_request()
    await mesh.idle()
    await first.crash()
    await mesh.replica(pausing, on_lost_owner="fail")
    await mesh.advance(17)
    await peer.respond(request, 10)
    assert await client.reply(task_id) == Ok(10)
    assert request.headers["x-parent-task-id"] == task_id
