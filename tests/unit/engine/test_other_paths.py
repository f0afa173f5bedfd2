"""Code that takes another path than its task's recorded calls: it leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import FunctionAgent, agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.events import Phase, Step
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.operations import OperationStatus
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.model.subtasks import AgentCheckpoint, SubtaskStatus
from meshpoint.model.tasks import TaskState
from run_log import RunLog

from .agents import Gate
from .faults import IN_DOUBT, NOT_COMMITTED
from .mesh import Mesh
from .test_crash_points import crash_replica_at

_peer, _hotels = Peer("peer", str, str), Peer("hotels", str, str)


class Work(RunLog):
    """Functions for steps and subtasks."""

    def note(self, name: str) -> str:
        self(name)
        return name

    async def hang(self) -> None:
        self("hang")
        await asyncio.Event().wait()


async def latest_checkpoint(mesh: Mesh, task_id: str) -> AgentCheckpoint | None:
    found: AgentCheckpoint | None = await mesh.store.latest(TaskId(task_id), AgentName("agent"))
    return found


async def stored(mesh: Mesh, task_id: str) -> tuple[bool, AgentCheckpoint | None]:
    """Whether the task is an operation, and its last checkpoint."""
    operation = await mesh.store.operation(TaskId(task_id))
    return operation is not None, await latest_checkpoint(mesh, task_id)


def older(work: Work, *, is_operation: bool) -> FunctionAgent[str, list[str]]:
    """A step before its call and one after it; for an operation also a subtask and memory."""

    @agent("agent", version="1")
    async def run(ctx: TaskExecutionContext, topic: str) -> list[str]:
        starts = 0
        if is_operation:
            await ctx.memory.incr("starts")
            await ctx.subtask("plan", work.note, "plan")
            starts = int(await ctx.memory.get("starts") or 0)
        await ctx.step("first", work.note, "first")
        answer = await _peer(topic)
        await ctx.step("second", work.note, "second")
        return [answer, str(starts), *ctx.progress.completed]

    return run


def newer(work: Work) -> FunctionAgent[str, str]:
    """Another call than `older`. Before it, a framework runs tools, which are subtasks."""

    @agent("agent", version="1")
    async def run(ctx: TaskExecutionContext, topic: str) -> str:
        async def tool(name: str) -> str:
            await ctx.save_progress(name)
            return work.note(name)

        await ctx.memory.incr("starts")
        await ctx.step("first", work.note, "first")
        async with asyncio.TaskGroup() as tools:
            for name in ("left", "right"):
                tools.create_task(ctx.subtask(name, tool, name))
        return await _hotels(topic)

    return run


@pytest.mark.parametrize(
    "crash",
    [
        None,
        (Step.SEGMENT, Phase.AFTER),
        (Step.RELEASE, Phase.BEFORE),
        (Step.RELEASE, Phase.AFTER),
    ],
    ids=lambda crash: "parked" if crash is None else f"killed {crash[1]} {crash[0]}",
)
@pytest.mark.parametrize("is_operation", [True, False], ids=["operation", "plain task"])
async def test_the_older_version_finds_what_it_left(
    any_mesh: Mesh, is_operation: bool, crash: tuple[Step, Phase] | None
) -> None:
    """Whether the mismatching run parks its task or is killed before that."""
    mesh, work = any_mesh, Work()
    client, peer = await mesh.fake_peer("client"), await mesh.fake_peer("peer")
    old = await mesh.replica(older(work, is_operation=is_operation), app_version="1.0")
    task_id = await client.ask("agent", "rome")
    request = await peer.wait_for_request()
    await mesh.idle()
    await old.crash()
    before = await stored(mesh, task_id)
    assert before[0] is is_operation
    new = await mesh.replica(newer(work), app_version="1.1")
    if crash is not None:
        crash_replica_at(mesh, new, *crash)
    await peer.respond(request, "yes")
    if crash is None:
        (parked,) = await mesh.events.wait(Step.PARKED)
        assert parked.detail["reason"] == "call 1: expected hotels, recorded peer"
    else:
        await asyncio.gather(new.task, return_exceptions=True)
    await mesh.idle()
    assert work.take_new()[-2:] == ["left", "right"]
    assert await stored(mesh, task_id) == before
    await new.crash()
    await mesh.replica(older(work, is_operation=is_operation), app_version="1.0")
    await mesh.advance(30)
    expected = ["yes", "1", "plan"] if is_operation else ["yes", "0"]
    assert await client.reply(task_id) == Ok(expected)
    assert work.names == ["second"]


async def test_a_new_subtask_before_a_recorded_call_parks_the_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """It does not run. An `except` in the code changes nothing."""
    work, is_new = Work(), [False]

    @agent("agent", version="1")
    async def changing(ctx: TaskExecutionContext, topic: str) -> str:
        first = await _peer(topic)
        if is_new[0]:
            try:
                await ctx.subtask("book", work.note, "book")
            except Exception:
                work("caught")
        return first + await _peer(first)

    await mesh.replica(changing, app_version="1.0")
    task_id = await client.ask("agent", "rome")
    await peer.respond(await peer.wait_for_request(), "1")
    request = await peer.wait_for_request(2)
    await mesh.idle()
    before = await stored(mesh, task_id)
    is_new[0] = True
    await peer.respond(request, "2")
    await mesh.idle()
    summary, _ = await mesh.task(task_id)
    assert summary.state is TaskState.PARKED
    assert summary.parked_reason == "subtask 'book' before call 2 is not recorded"
    assert work.names == ["caught"]
    assert await stored(mesh, task_id) == before == (False, None)


@pytest.mark.parametrize("kind", ["step", "subtask"])
async def test_code_that_catches_a_mismatch_records_nothing_afterwards(
    mesh: Mesh, client: FakePeer, peer: FakePeer, kind: str
) -> None:
    work, is_new, passed = Work(), [False], asyncio.Event()

    async def wait(name: str) -> str:
        await passed.wait()
        return work.note(name)

    async def catch(record: Any, name: str, function: Callable[[str], Any]) -> None:
        try:
            await record(name, function, name)
        except Exception as error:
            work(type(error).__name__)

    @agent("agent", version="1")
    async def changing(ctx: TaskExecutionContext, topic: str) -> str:
        async with asyncio.TaskGroup() as tools:
            if is_new[0]:
                tools.create_task(catch(ctx.subtask, "tool", wait))
                await asyncio.sleep(0)
                record = ctx.step if kind == "step" else ctx.subtask
                await catch(record, "book", work.note)
            answer = await _peer(topic)
            passed.set()
            await catch(ctx.step, "late step", work.note)
            await catch(ctx.subtask, "late subtask", work.note)
        return answer

    replica = await mesh.replica(changing)
    task_id = await client.ask("agent", "rome")
    request = await peer.wait_for_request()
    await mesh.idle()
    is_new[0] = True
    await peer.respond(request, "1")
    await mesh.idle()
    summary, _ = await mesh.task(task_id)
    assert summary.parked_reason == f"{kind} 'book' before call 1 is not recorded"
    assert sorted(work.names) == [*["ReplayMismatch"] * 4, "tool"]
    assert await stored(mesh, task_id) == (False, None)
    assert "append" not in replica.store.calls


@pytest.mark.parametrize("then", ["subtask", "pause", "end", "failure"])
async def test_a_subtask_of_a_replay_is_recorded_after_the_last_recorded_call(
    mesh: Mesh, client: FakePeer, peer: FakePeer, then: str
) -> None:
    """A framework's new tool fits the recorded calls: it is saved at the next chance."""
    work, is_new = Work(), [False]

    @agent("agent", version="1")
    async def changing(ctx: TaskExecutionContext, topic: str) -> str:
        async with asyncio.TaskGroup() as tools:
            if is_new[0]:
                tools.create_task(ctx.subtask("tool", work.note, "tool"))
        answer = await _peer(topic)
        if then == "subtask":
            await ctx.subtask("later", work.note, "later")
        if then in {"subtask", "pause"}:
            answer += await _peer(answer)
        if then == "failure":
            raise ValueError("no")
        return answer

    await mesh.replica(changing)
    task_id = await client.ask("agent", "rome")
    request = await peer.wait_for_request()
    await mesh.idle()
    is_new[0] = True
    await peer.respond(request, "1")
    await mesh.idle()
    operation = await mesh.store.operation(TaskId(task_id))
    assert operation is not None
    if then == "end":
        assert operation.status is OperationStatus.COMPLETED
        assert await client.reply(task_id) == Ok("1")
        return
    checkpoint = await latest_checkpoint(mesh, task_id)
    assert checkpoint is not None
    recorded = {record.name: record.status for record in checkpoint.subtasks}
    assert recorded["tool"] is SubtaskStatus.COMPLETED
    if then == "failure":
        assert isinstance(await client.reply(task_id), Failed)
        return
    await peer.respond(await peer.wait_for_request(2), "2")
    assert await client.reply(task_id) == Ok("12")
    assert work.names == ["tool", "later"] if then == "subtask" else ["tool"]


async def test_a_cancel_during_a_replay_ends_a_task_that_is_no_operation(
    mesh: Mesh, client: FakePeer, peer: FakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store refuses to make it an operation. The broadcast of the cancel is lost."""
    work, is_new, reached, opened = Work(), [False], asyncio.Event(), asyncio.Event()

    @agent("agent", version="1")
    async def changing(ctx: TaskExecutionContext, topic: str) -> str:
        async with asyncio.TaskGroup() as tools:
            if is_new[0]:
                tools.create_task(ctx.subtask("tool", work.note, "tool"))
        answer = await _peer(topic)
        reached.set()
        await opened.wait()
        return answer + await _peer(answer)

    replica = await mesh.replica(changing)
    monkeypatch.setattr(replica.worker.tasks, "cancel", lambda *command: False)
    task_id = await client.ask("agent", "rome")
    request = await peer.wait_for_request()
    await mesh.idle()
    is_new[0] = True
    await peer.respond(request, "1")
    await reached.wait()
    await client.cancel("agent", task_id)
    await mesh.idle()
    opened.set()
    assert isinstance(await client.reply(task_id), Failed)
    assert await mesh.state(task_id) is TaskState.CANCELLED
    assert await stored(mesh, task_id) == (False, None)


async def test_a_subtask_that_was_stopped_before_a_recorded_call_fits(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """It has no result, but the checkpoint says that it began."""
    work = Work()

    @agent("agent", version="1")
    async def impatient(ctx: TaskExecutionContext, topic: str) -> str:
        await ctx.subtask("quick", work.note, "quick")
        try:
            async with asyncio.timeout(0):
                await ctx.subtask("slow", work.hang)
        except TimeoutError:
            work("late")
        return await _peer(topic)

    await mesh.replica(impatient)
    task_id = await client.ask("agent", "rome")
    await peer.respond(await peer.wait_for_request(), "yes")
    assert await client.reply(task_id) == Ok("yes")
    assert work.names == ["quick", *("hang", "late") * 2]


@pytest.mark.parametrize("fault", [NOT_COMMITTED, IN_DOUBT])
async def test_a_subtask_that_a_slow_database_kept_from_beginning_fits(
    mesh: Mesh, client: FakePeer, peer: FakePeer, fault: str
) -> None:
    """Its time limit ends before the database has made the task an operation."""
    work = Work()

    @agent("agent", version="1")
    async def impatient(ctx: TaskExecutionContext, topic: str) -> str:
        try:
            async with asyncio.timeout(0):
                await ctx.subtask("slow", work.note, "slow")
        except TimeoutError:
            work("late")
        return await _peer(topic)

    replica = await mesh.replica(impatient)
    replica.store.fail("begin", fault)
    task_id = await client.ask("agent", "rome")
    await mesh.advance(5)
    assert work.names == ["late"]
    await peer.respond(await peer.wait_for_request(), "yes")
    assert await client.reply(task_id) == Ok("yes")
    assert work.names == ["late", "slow"]


async def test_a_subtask_next_to_a_recorded_call_may_begin_earlier_than_before(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """The code waits before its call only in the replay, for example because a cache is cold."""
    work, is_cold = Work(), [False]

    @agent("agent", version="1")
    async def racing(ctx: TaskExecutionContext, topic: str) -> str:
        async with asyncio.TaskGroup() as tools:
            tool = tools.create_task(ctx.subtask("tool", work.note, "tool"))
            if is_cold[0]:
                await asyncio.sleep(0)
            answer = await _peer(topic)
        return answer + tool.result()

    await mesh.replica(racing)
    task_id = await client.ask("agent", "rome")
    request = await peer.wait_for_request()
    await mesh.idle()
    assert work.names == []
    is_cold[0] = True
    await peer.respond(request, "yes ")
    assert await client.reply(task_id) == Ok("yes tool")
    assert work.names == ["tool"]


async def test_records_after_the_last_recorded_call_belong_to_the_task(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    """A run that fits all recorded calls, and then meets a result that does not fit.

    Its steps are taken back. Its subtasks count, as in any run that does not end.
    """
    work, is_new, killed = Work(), [False], asyncio.Event()

    async def number() -> int:
        work("number")
        return 5

    @agent("agent", version="1")
    async def changing(ctx: TaskExecutionContext, topic: str) -> str:
        answer = await _peer(topic)
        if is_new[0]:
            await ctx.step("new step", work.note, "new step")
            await ctx.subtask("new subtask", work.note, "new subtask")
            return str(await ctx.step("number", _words))
        kept: Any = await ctx.step("number", number)
        if not killed.is_set():
            killed.set()
            await asyncio.Event().wait()
        await ctx.subtask("new subtask", work.note, "new subtask")
        return f"{answer} {await ctx.step('new step', work.note, 'new step')} {kept}"

    old = await mesh.replica(changing, app_version="1.0")
    task_id = await client.ask("agent", "rome")
    await peer.respond(await peer.wait_for_request(), "yes")
    await killed.wait()
    await old.crash()
    is_new[0] = True
    new = await mesh.replica(changing, app_version="1.1")
    await mesh.advance(30)
    (event,) = mesh.events.matching(Step.PARKED)
    assert str(event.detail["reason"]).startswith("the recorded result of step 'number'")
    assert work.take_new() == ["number", "new step", "new subtask"]
    await new.crash()
    is_new[0] = False
    await mesh.replica(changing, app_version="1.0")
    await mesh.advance(30)
    assert await client.reply(task_id) == Ok("yes new step 5")
    assert work.names == ["new step"]


async def test_a_run_that_has_lost_its_task_takes_no_steps_back(
    mesh: Mesh, client: FakePeer
) -> None:
    """The run that owns the task has appended entries of its own."""
    work, frozen = Work(), Gate()
    gates = [Gate(), Gate(), Gate()]

    async def number() -> int:
        work("number")
        return 5

    @agent("agent", version="1")
    async def newer(ctx: TaskExecutionContext, topic: str) -> str:
        await ctx.step("new step", work.note, "new step")
        await frozen()
        return str(await ctx.step("number", _words))

    def older(gate: Gate) -> FunctionAgent[str, str]:
        @agent("agent", version="1")
        async def run(ctx: TaskExecutionContext, topic: str) -> str:
            kept = await ctx.step("number", number)
            if gate is not gates[0]:
                await ctx.step("mine", work.note, "mine")
            await gate()
            return str(kept)

        return run

    first = await mesh.replica(older(gates[0]), drain_timeout=timedelta(0))
    task_id = await client.ask("agent", "rome")
    await gates[0].wait_reached()
    await mesh.replica(newer, sweep_interval=timedelta(hours=1))  # as if frozen, once it runs
    await first.drain()
    await frozen.wait_reached()
    second = await mesh.replica(older(gates[1]))
    await mesh.advance(30)
    await gates[1].wait_reached()
    frozen.opened.set()
    await mesh.idle()
    assert mesh.events.matching(Step.PARKED) == []
    await second.crash()
    gates[2].opened.set()
    await mesh.replica(older(gates[2]))
    await mesh.advance(30)
    assert await client.reply(task_id) == Ok("5")
    assert work.names == ["number", "new step", "mine"]


async def _words() -> list[str]:
    raise AssertionError("a recorded step runs again")
